"""numpy arrays and scalars: which can be stored, their names, and their memory."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from . import memory as _memory
from .described import expanded_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from .memory import Bytes, Mover
    from .pieces import Index

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: safetensors' names of numpy's dtypes, by ``dtype.str``.
NAMES = {
    "|b1": "BOOL",
    "|i1": "I8",
    "|u1": "U8",
    "<i2": "I16",
    "<u2": "U16",
    "<f2": "F16",
    "<i4": "I32",
    "<u4": "U32",
    "<f4": "F32",
    "<i8": "I64",
    "<u8": "U64",
    "<f8": "F64",
    "<c8": "C64",
}
DTYPES = {name: np.dtype(text) for text, name in NAMES.items()}

#: Plain kinds: boolean, integers, floats, complex, times, text and bytes.
KINDS = frozenset("biufcmMSU")
_DTYPE = (
    # The pattern is compiled at its first use.
    r"[<>|][biufcmMSU][0-9]{1,10}(\[[0-9]{0,10}[a-zA-Z\u03bc]{1,2}(/[0-9]{1,10})?\])?"
)
_PREFIX = "numpy."

#: The scalar types that can be stored.
SCALARS = tuple({kind for kind in np.sctypeDict.values() if np.dtype(kind).kind in KINDS})

ARRAYS = (np.ndarray, np.memmap)


def stored_dtype(dtype: np.dtype[Any]) -> tuple[str, str | None]:
    """The dtype's name in the file, and the logical one if the file only has ``U8``."""
    name = NAMES.get(dtype.str)
    return (name, None) if name is not None else ("U8", _PREFIX + dtype.str)


def expanded(token: list[Any], parts: list[Any]) -> Array:
    """An array that repeats its base, read-only."""
    _, sizes, _ = token
    (base,) = parts
    if type(base) is not np.ndarray:
        raise ValueError("a base that is not an array")
    return np.broadcast_to(base, expanded_sizes(sizes, base.shape, base.itemsize))


def from_tensor(value: Any) -> Array:
    """``value``, which must be an array, or with ``framework="torch"`` a tensor, which is viewed as an array."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and type(value) is torch.Tensor:
        value = value.cpu().numpy()
    if type(value) is not np.ndarray:
        raise ValueError("not an array")
    return value


def parse_dtype(text: str) -> np.dtype[Any]:
    """The dtype of a manifest's ``as``; ValueError for anything but a plain dtype."""
    if not text.startswith(_PREFIX):
        raise ValueError(f"{text!r} is not a numpy dtype")
    return plain_dtype(text[len(_PREFIX) :])


def plain_dtype(text: str) -> np.dtype[Any]:
    """The plain dtype that numpy names ``text``; ValueError for anything else."""
    if re.fullmatch(_DTYPE, text) is None:
        raise ValueError(f"{text[:100]!r} is not a plain numpy dtype")
    dtype: np.dtype[Any] = np.dtype(text)
    return dtype


def encode_scalar(value: np.generic) -> str:
    """The token of a numpy scalar."""
    dtype = value.dtype
    # An empty string has the bytes of one character.
    return f'["scalar","{dtype.str}","{value.tobytes()[: dtype.itemsize].hex()}"]'


def decode_scalar(text: str, data: bytes) -> np.generic:
    """The scalar of dtype ``text`` with the bytes ``data``; ValueError if they do not fit."""
    dtype = plain_dtype(text)
    if dtype.itemsize != len(data):
        raise ValueError("a numpy scalar of the wrong size")
    # An array would drop the zeros at the end of a string.
    if dtype.kind == "S":
        return np.bytes_(data)
    if dtype.kind == "U":
        return np.str_(data.decode("utf-32-be" if text[0] == ">" else "utf-32-le", "surrogatepass"))
    value: np.generic = np.frombuffer(data, dtype)[0]
    return value


def mover_out(array: Array) -> Mover:
    """Copies ranges of ``array`` out, whatever its strides."""

    def copy(index: Index, contiguous: Bytes) -> None:
        part = array[(*index, ...)]
        np.ndarray(part.shape, array.dtype, contiguous)[...] = part

    return partial(_memory.copy_out, array.shape, array.dtype.itemsize, copy)


def converter(source: np.dtype[Any], target: np.dtype[Any]) -> Callable[[Bytes, Bytes], None]:
    """Converts elements of one dtype to another."""

    def convert(data: Bytes, out: Bytes) -> None:
        with np.errstate(all="ignore"):
            np.copyto(out.view(target), data.view(source), casting="unsafe")

    return convert


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, nbytes: int) -> Array:
    """A new array for ``nbytes`` at ``offset`` of a file."""
    if nbytes < _memory.CONGRUENT:
        return np.ndarray(shape, dtype)
    return _memory.buffer(nbytes, offset, dtype.itemsize).view(dtype).reshape(shape)


#: Dtypes that numpy lacks and ``ml_dtypes`` has, by torch's name, if their elements have the same layout.
_ML_DTYPES = frozenset(
    {"bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
_SHARED = r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)"


def dtype_of_torch(name: str) -> np.dtype[Any] | None:
    """The dtype of numpy for torch's dtype ``name``, from ``ml_dtypes`` if necessary and possible; else None."""
    if re.fullmatch(_SHARED, name):
        return np.dtype(name)
    if name in _ML_DTYPES:
        import importlib  # noqa: PLC0415 - for an optional library that few need

        try:
            dtype: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
        except (ImportError, AttributeError):
            return None
        return dtype
    return None
