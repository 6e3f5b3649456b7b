"""How a value of each type is stored: as a token, as a tensor, or as a token with further values inside it.

A table has the types of Python and numpy. ``flatten.py`` looks up the types of torch and of programs.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections import OrderedDict, defaultdict
from json.encoder import encode_basestring_ascii as quote
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt._tensors import memory as _memory
from fastckpt._tensors import numpy as _numpy
from fastckpt._tensors import records as _records
from fastckpt._tensors.described import THROUGH, Describe, Part, Parts, Stored, Unsupported, expansion, steps

from . import hashes as _hashes
from . import values as _values
from .built_in import ATTRIBUTED
from .structural import Codec
from .structural import name_of as name_of_class

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _mapping(token: str, value: dict[Any, Any]) -> Parts:
    if _hashes.too_deep(value):
        raise Unsupported(_hashes.TOO_DEEP)
    if _hashes.crowds(value):
        raise Unsupported(_hashes.WHY)
    return Parts(token, value.items(), keyed=True)


def _dict(value: dict[Any, Any]) -> Parts:
    return _mapping(f'["dict",{len(value)}]', value)


def _ordered(value: OrderedDict[Any, Any]) -> Parts:
    if vars(value):
        for name in vars(value):
            if type(name) is not str or hasattr(OrderedDict, name):
                raise Unsupported(f"its attribute {name!r} would hide a method of an OrderedDict: rename it")
        return Parts(ATTRIBUTED_TOKEN, ((THROUGH, Attributed(value)),))
    return _items(value)


def _items(value: OrderedDict[Any, Any]) -> Parts:
    return _mapping(f'["odict",{len(value)}]', value)


ATTRIBUTED_TOKEN = f'["type","{ATTRIBUTED}"]'


class Attributed:
    """An OrderedDict with attributes, like ``_metadata`` of a module's state, stored as its items and attributes."""

    __slots__ = ("value",)

    def __init__(self, value: OrderedDict[Any, Any]) -> None:
        self.value = value


class Bare(Attributed):
    """The items of an OrderedDict that has attributes."""

    __slots__ = ()


def _attributed(value: Attributed) -> Parts:
    return Parts('["tuple",2]', ((THROUGH, Bare(value.value)), (THROUGH, vars(value.value))))


def _default(value: defaultdict[Any, Any]) -> Parts:
    factory = value.default_factory
    name = "null"
    if factory is not None:
        known = _values.FACTORY_NAMES.get(factory) if isinstance(factory, type) else None
        if known is None:
            raise Unsupported(
                f"a defaultdict can have the factories {', '.join(_values.FACTORIES)} and None, not {factory!r}: store "
                "it as a dict, or convert it with Registry(encode=)"
            )
        name = f'"{known}"'
    return _mapping(f'["ddict",{len(value)}],{name}', value)


def _sequence(tag: str) -> Callable[[Any], Parts]:
    return lambda value: Parts(f'["{tag}",{len(value)}]', enumerate(value))


def _slice(value: slice) -> Parts:
    return Parts('["slice"]', ((Part("start"), value.start), (Part("stop"), value.stop), (Part("step"), value.step)))


def _datetime(value: dt.datetime) -> Parts:
    return Parts(_values.datetime_head(value), ((Part("tzinfo"), value.tzinfo),))


def _time(value: dt.time) -> Parts:
    return Parts(_values.time_head(value), ((Part("tzinfo"), value.tzinfo),))


_PARTS: dict[type, Callable[[Any], Parts]] = {
    dict: _dict,
    OrderedDict: _ordered,
    Attributed: _attributed,
    Bare: lambda value: _items(value.value),
    defaultdict: _default,
    list: _sequence("list"),
    tuple: _sequence("tuple"),
    set: _sequence("set"),
    frozenset: _sequence("fset"),
    slice: _slice,
    dt.datetime: _datetime,
    dt.time: _time,
}


def _array(value: np.ndarray[Any, Any]) -> Stored | Parts:
    dtype = value.dtype
    if dtype.kind not in _numpy.KINDS:
        return _records.describe_array(value)
    whole = value.flags.c_contiguous
    if not whole and 0 in value.strides:
        expanded = expansion(value.shape, value.strides, "")
        if expanded is not None:
            return Parts(expanded.token, ((THROUGH, value[expanded.base]),))
    name, logical = _numpy.stored_dtype(dtype)
    shape: Sequence[int] = value.shape
    address = _memory.address_of(value)
    tie = (
        (np.ndarray, address, dtype.str, shape, not whole and steps(shape, value.strides))
        if value.nbytes
        else id(value)
    )
    return Stored(
        tie,
        name,
        shape if logical is None else (value.nbytes,),
        address if whole and value.nbytes else 0,
        None if logical is None else (logical, shape),
        '["array",',
        "]",
        None if whole else _numpy.mover_out(value),
    )


def _bytes(tag: str) -> Callable[[Any], Stored | str]:
    head = f'["{tag}",'

    def describe(value: bytes | bytearray) -> Stored | str:
        if len(value) < _values.LONG_BYTES:
            return _values.short_bytes(tag, value)
        return Stored((tag, id(value)), "U8", (len(value),), 0, None, head, ',"tensor"]', None)

    return describe


DESCRIBE: dict[type, Describe] = {
    **dict.fromkeys(_numpy.ARRAYS, _array),
    **dict.fromkeys(_records.DTYPES, _records.describe_dtype),
    bytes: _bytes("bytes"),
    bytearray: _bytes("bytearray"),
    **_PARTS,
}


def torch_kind(value: Any) -> str | None:
    """See :func:`fastckpt._tensors.torch.kind_of`. An object can have a type of torch's only if torch was imported."""
    if "torch" not in sys.modules:
        return None
    from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - imports torch

    return _torch.kind_of(value)


def typed(codec: Codec, spared: Callable[[Codec, dict[str, Any]], dict[str, Any] | None] | None = None) -> Describe:
    """How to describe a value of a named type: its stored form, and its attributes or those that ``spared`` returns."""
    name = quote(codec.name)
    alone, with_attributes = f'["type",{name}]', f'["type",{name},2]'

    def describe(value: Any) -> Parts:
        try:
            encoded, attributes = codec.encode(value)
        except Unsupported:
            raise
        except Exception as error:
            raise Unsupported(f"encoding it as {codec.name} raised {error!r}") from error
        if spared is not None and attributes is not None:
            attributes = spared(codec, attributes)
        if attributes is None:
            return Parts(alone, ((THROUGH, encoded),))
        return Parts(with_attributes, ((THROUGH, encoded), (THROUGH, attributes)))

    return describe


def stateful(value: Any) -> Parts:
    """Describe an object with ``state_dict()``: it is stored as the result, without a trace of the object."""
    try:
        state = value.state_dict()
    except Exception as error:
        raise Unsupported(
            f"its state_dict() raised {error!r}: leave it out, or convert it with Registry(encode=)"
        ) from error
    # An object that has every attribute (a mock) would recurse without end.
    if not isinstance(state, dict) and callable(getattr(state, "state_dict", None)):
        kind = name_of_class(type(state))
        raise Unsupported(f"its state_dict() returned a {kind}, which has its own state_dict(), not a plain state")
    return Parts("", ((THROUGH, state),))


def has_state(kind: Any) -> bool:
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def other(value: Any) -> Parts:
    """A value of an unknown type."""
    # The attribute is looked up on the instance: an object may forward the attributes of another.
    if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return stateful(value)
    raise Unsupported(
        f"type {name_of_class(type(value))} is not supported: leave it out, convert it with Registry(encode=), or "
        "register it with fastckpt.register_type"
    )
