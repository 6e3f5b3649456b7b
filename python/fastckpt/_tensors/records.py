"""numpy's dtypes as plain values, and arrays of other elements: fields, raw bytes, Python objects."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from .described import THROUGH, Parts, Unsupported, exact, integers, members, text
from .numpy import KINDS, from_tensor, plain_dtype

if TYPE_CHECKING:
    from .numpy import Array

#: The depth of nested dtypes.
_DEPTH = 32
_VOID = r"\|V[0-9]{1,10}"
_OBJECT = "|O"
_MEMBERS = frozenset({"names", "formats", "offsets", "itemsize", "titles", "aligned"})

#: The classes of dtypes: numpy has one class for each kind.
DTYPES = tuple({type(np.dtype(text)) for text in np.typecodes["All"]})


def describe_dtype(dtype: np.dtype[Any]) -> Parts:
    """The token of a dtype, and its description."""
    return Parts('["type","numpy.dtype"]', ((THROUGH, encode_dtype(dtype)),))


def encode_dtype(dtype: np.dtype[Any], depth: int = 0) -> Any:
    """A dtype as a plain value: its string, a sub-array's base and shape, or its fields as for ``numpy.dtype``."""
    if depth > _DEPTH:
        raise Unsupported(f"a numpy dtype nested deeper than {_DEPTH} levels cannot be stored")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return encode_dtype(base, depth + 1), shape
    if dtype.names is None:
        # Types added by libraries can have the same string as a numpy type.
        if (dtype.kind in KINDS or dtype.type in {np.void, np.object_}) and np.dtype(dtype.str) == dtype:
            return dtype.str
        raise Unsupported(f"the numpy dtype {dtype} cannot be stored: numpy alone does not know it")
    fields: list[Any] = [dtype.fields[name] for name in dtype.names]  # type: ignore[index] # it has names
    described: dict[str, Any] = {
        "names": list(dtype.names),
        "formats": [encode_dtype(field[0], depth + 1) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
    }
    titles = [field[2] if len(field) > 2 else None for field in fields]  # noqa: PLR2004 - dtype, offset, title
    if any(title is not None for title in titles):
        if not all(title is None or type(title) is str for title in titles):
            raise Unsupported("a numpy dtype with titles that are not text cannot be stored")
        described["titles"] = titles
    if dtype.isalignedstruct:
        described["aligned"] = True
    return described


def decode_dtype(value: Any, depth: int = 0) -> np.dtype[Any]:
    """The dtype that :func:`encode_dtype` described; ValueError if ``value`` does not describe one."""
    if depth > _DEPTH:
        raise ValueError("a dtype nested too deep")
    made: np.dtype[Any]
    if type(value) is str:
        if value == _OBJECT or re.fullmatch(_VOID, value) is not None:
            made = np.dtype(value)
            return made
        return plain_dtype(value)
    if type(value) is tuple:
        base, shape = exact(value, tuple, 2)
        if not exact(shape, tuple) or any(size < 0 for size in integers(list(shape))):
            raise ValueError("not the shape of a sub-array")
        made = np.dtype((decode_dtype(base, depth + 1), shape))
        return made
    if any(type(name) is not str for name in exact(value, dict)) or not value.keys() <= _MEMBERS:
        raise ValueError("not the members of a dtype")
    return _of_fields(value, [decode_dtype(each, depth + 1) for each in exact(value["formats"], list)])


def _of_fields(value: dict[str, Any], formats: list[np.dtype[Any]]) -> np.dtype[Any]:
    titles = exact(value.get("titles", []), list)
    for name in (*exact(value["names"], list), *(title for title in titles if title is not None)):
        text(name)
    (size,) = integers([value["itemsize"]])
    # numpy accepts a field that ends beyond 31 bits, and more formats than names.
    ends = zip(value["names"], formats, integers(value["offsets"]), strict=True)
    if any(not 0 <= offset <= size - each.itemsize for _, each, offset in ends):
        raise ValueError("a field outside its element")
    if type(value.get("aligned", False)) is not bool:
        raise ValueError("not a boolean")
    fields: Any = {**value, "formats": formats}
    made: np.dtype[Any] = np.dtype(fields)
    return made


def describe_array(array: Array) -> Parts:
    """The token of an array whose elements are not plain, and its stored form."""
    return Parts('["type","numpy.ndarray"]', ((THROUGH, encode_array(array)),))


def encode_array(array: Array) -> dict[str, Any]:
    """An array as its dtype and its bytes, or its shape and its objects."""
    dtype = array.dtype
    if dtype.kind == "O":
        return {"dtype": _OBJECT, "shape": array.shape, "data": array.reshape(-1).tolist()}
    described = encode_dtype(dtype)
    if dtype.hasobject:
        raise Unsupported("a structured array with fields of Python objects cannot be stored: store its fields")
    size = dtype.itemsize
    if not size:
        return {"dtype": described, "data": np.empty((*array.shape, 0), np.uint8)}
    # The result is a view, whatever the strides, so that ties in memory are kept.
    return {"dtype": described, "data": array.view(np.ndarray).view(f"V{size}")[..., None].view(np.uint8)}


def decode_array(value: Any) -> Array:
    """The array that :func:`encode_array` encoded: its bytes, or objects, in its shape."""
    if len(exact(value, dict)) == 3:  # noqa: PLR2004 - dtype, shape, data
        described, shape, listed = members(value, "dtype", "shape", "data")
        if text(described) != _OBJECT or prod(integers(list(exact(shape, tuple)))) != len(exact(listed, list)):
            raise ValueError("not an array of objects")
        # Neither sequences nor zero-dimensional arrays are unpacked.
        return np.fromiter(listed, object, len(listed)).reshape(shape)
    described, data = members(value, "dtype", "data")
    dtype, data = decode_dtype(described), from_tensor(data)
    if dtype.hasobject or data.dtype != np.uint8 or not data.ndim:
        raise ValueError("not the bytes of an array")
    if data.shape[-1] != dtype.itemsize:
        raise ValueError("elements whose size is not that of the dtype")
    return data.view(dtype)[..., 0] if dtype.itemsize else np.empty(data.shape[:-1], dtype)


def decode_records(value: Any) -> Array:
    """Like :func:`decode_array`, for a ``numpy.recarray``, whose fields are attributes."""
    return decode_array(value).view(np.recarray)
