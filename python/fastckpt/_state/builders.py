"""Builders for structure tokens: one only checks them, another builds the state with torch or numpy."""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt._tensors import numpy as _numpy
from fastckpt._tensors.described import integers, text
from fastckpt.exceptions import CheckpointError, UnsupportedTypeError

from . import values as _values
from .built_in import ON_DEMAND, RESERVED, TABLE
from .flatten import reuse_limit
from .registry import Types
from .structural import Undecodable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import ModuleType

    from fastckpt._core import StoredTensor

_FLAGS = frozenset({"", "g", "p", "pg"})
_FLAGS_AND_DEVICE = 2
_NAME = r"[a-z][a-z0-9_]{0,60}"
_WHAT = {
    "tensor": "a torch tensor",
    "size": "a torch.Size",
    "dtype": "a torch.dtype",
    "device": "a torch.device",
    "coo": "a sparse tensor",
    "compressed": "a sparse tensor",
    "quantized": "a quantised tensor",
    "expanded": "an expanded tensor",
}


#: fastckpt's own types that are made of tensors, and copy or check them.
MADE_OF_TENSORS = frozenset(
    {"torch.nested.nested_tensor", "torch.Generator", *(name for name in TABLE if name.startswith("numpy.random."))}
)


def torch_for(what: str) -> ModuleType:
    """The module for torch's types; ``what`` needs it, and is named in the error."""
    try:
        from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - imports torch
    except ImportError as error:
        raise ImportError(
            f"load: the checkpoint holds {what}, and torch cannot be imported ({error}): "
            'install torch, or load with framework="numpy"'
        ) from error
    return _torch


def numpy_leaf(token: list[Any]) -> Any:
    """A ``torch.Size`` as a tuple, a dtype or device as its name."""
    tag, value = token
    if tag == "size":
        return tuple(integers(value))
    return text(value)


class Tensor:
    """Stands for a tensor whose bytes have not been read."""

    __slots__ = ("number", "tag")

    def __init__(self, tag: str, number: int) -> None:
        self.tag = tag
        self.number = number


class _Later(dt.tzinfo):
    """Stands for a value that needs bytes or a decoder. It is a time zone, because the value might be one."""

    def utcoffset(self, _: dt.datetime | None, /) -> None: ...

    dst = utcoffset
    tzname = utcoffset


class _Unhashable:
    """Represents a value that can be neither a key nor a member of a set."""

    __hash__ = None  # type: ignore[assignment]


class _Uses:
    """Counts the uses of tensors that are parts of composed tensors: each use copies and checks the part.

    A part must be stored in full, and further uses are limited to a multiple of the stored bytes: otherwise a few bytes
    of a file could request any number of copies.
    """

    def __init__(self, stored: Sequence[StoredTensor]) -> None:
        self._stored = stored
        self._once: set[int] = set()
        self._again = 0
        self._limit: int | None = None

    def add(self, part: Tensor) -> None:
        """Record that a tensor is part of another one."""
        if part.tag == "expanded":
            raise ValueError("an expanded tensor that is part of another tensor")
        if part.number not in self._once:
            self._once.add(part.number)
            return
        if self._limit is None:
            self._limit = reuse_limit(sum(tensor.nbytes for tensor in self._stored))
        self._again += self._stored[part.number].nbytes
        if self._again > self._limit:
            raise ValueError("tensors that are part of too many others")

    def add_all(self, value: Any) -> None:
        """Record that all tensors in plain containers are parts of another tensor."""
        rest = [value]
        while rest:
            part = rest.pop()
            kind = type(part)
            if kind is Tensor:
                self.add(part)
            elif kind is dict:
                rest.extend(part.values())
            elif kind is list or kind is tuple:
                rest.extend(part)


class Validator:
    """Checks tokens against the stored tensors and the types, and collects the tensors; builds nothing.

    Args:
        stored: the tensors of the checkpoint.
        types: the known types, and whether values of other types are accepted, too.
        strangers: whether unknown types are accepted.

    Attributes:
        found: the tokens of all tensors, in order.
        unknown: the names of the unknown types.
    """

    plain = False

    def __init__(self, stored: Sequence[StoredTensor], *, types: Types | None = None, strangers: bool = False) -> None:
        self.stored = stored
        self.types = types or Types("load")
        self.strangers = strangers or self.types.plain
        self.found: list[list[Any]] = []
        self.unknown: dict[str, None] = {}
        self._uses = _Uses(stored)

    def tensor(self, token: list[Any]) -> Any:
        tag, index, *more = token
        if type(index) is not int or not 0 <= index < len(self.stored):
            raise ValueError(f"there is no tensor {index!r}"[:80])
        stored = self.stored[index]
        logical = stored.logical
        if tag == "tensor":
            if more and (more[0] not in _FLAGS or len(more) > _FLAGS_AND_DEVICE or type(more[-1]) is not str):
                raise ValueError("invalid flags or device of a tensor")
            if logical is not None and not logical.dtype.startswith("torch."):
                raise ValueError("a torch tensor of a dtype that is not torch's")
        elif tag == "array":
            if more:
                raise ValueError("flags for an array, which has none")
            if logical is not None and not logical.dtype.startswith("numpy."):
                raise ValueError("a numpy array of a dtype that is not numpy's")
        elif more != ["tensor"] or stored.dtype != "U8" or len(stored.shape) != 1 or logical is not None:
            raise ValueError("bytes that are not stored as a vector of bytes")
        self.found.append(token)
        return Tensor(tag, index)

    def leaf(self, token: list[Any]) -> Any:
        plain = numpy_leaf(token)
        # A mapping may have both a dtype and its name as keys.
        return plain if token[0] == "size" else _Later()

    def composed(self, token: list[Any], parts: list[Any]) -> Any:
        tag = token[0]
        tensors, plain = (parts[:1], parts[1:]) if tag == "quantized" else (parts, [])
        if tag == "expanded":
            return self._expanded(token, parts)
        if any(type(part) is not Tensor or part.tag not in {"tensor", "expanded"} for part in tensors):
            raise ValueError("a part that is not a tensor")
        if any(type(part) not in {Tensor, int, float, type(None)} for part in plain):
            raise ValueError("not a scale or zero point")
        self._uses.add_all(parts)
        if tag == "coo":
            _, sizes, coalesced, flags = token
            if type(coalesced) is not bool:
                raise ValueError("not a boolean")
        elif tag == "compressed":
            _, layout, sizes, flags = token
            if layout not in {"csr", "csc", "bsr", "bsc"}:
                raise ValueError("an unknown layout")
        else:
            _, dtype, sizes, scheme = token
            text(dtype)
            flags = ""
            if scheme not in {"per_tensor", "per_channel"}:
                raise ValueError("an unknown scheme")
        if any(size < 0 for size in integers(sizes)) or flags not in _FLAGS:
            raise ValueError("a negative size or unknown flags")
        return _Later()

    @staticmethod
    def _expanded(token: list[Any], parts: list[Any]) -> Tensor:
        _, sizes, flags = token
        (base,) = parts
        if type(base) is not Tensor or base.tag not in {"tensor", "array"}:
            raise ValueError("a base that is not a tensor")
        if flags not in (_FLAGS if base.tag == "tensor" else {""}) or any(size < 1 for size in integers(sizes)):
            raise ValueError("unknown flags, or a size below 1")
        return Tensor("expanded", base.number)

    def typed(self, name: str, value: Any, _: Any) -> Any:
        if name in MADE_OF_TENSORS:
            self._uses.add_all(value)
        if name in ON_DEMAND:
            return _Unhashable()
        if self.types.by_name(name) is None:
            if not self.strangers:
                raise _unknown(name)
            self.unknown[name] = None
        return _Later()

    def zone(self, value: Any) -> dt.tzinfo | None:
        return _values.zone(value)


class StateBuilder:
    """Makes the state.

    Args:
        framework: ``auto``, ``torch`` or ``numpy``.
        tensors: the tensor of each token of a tensor, in order.
        composed: the existing value for each token of a composed tensor, in order; None to make a new one.
        types: the known types, and whether other values are returned in their stored form.
    """

    def __init__(
        self,
        framework: str,
        tensors: Iterable[Any] = (),
        composed: Iterable[Any] | None = None,
        *,
        types: Types | None = None,
    ) -> None:
        self.framework = framework
        self.types = types or Types("load", framework=framework)
        self.plain = self.types.plain
        self._tensors = iter(tensors)
        self._composed: Iterator[Any] | None = None if composed is None else iter(composed)

    def tensor(self, _: list[Any]) -> Any:
        return next(self._tensors)

    def leaf(self, token: list[Any]) -> Any:
        if self.framework == "numpy":
            return numpy_leaf(token)
        torch = torch_for(_WHAT[token[0]])
        if token[0] == "dtype" and token[1] not in torch.DTYPES and re.fullmatch(_NAME, text(token[1])):
            raise UnsupportedTypeError(
                f"load: the checkpoint holds torch.{token[1]}, which this version of torch does not have: "
                'use a newer torch, or load with framework="numpy"'
            )
        return getattr(torch, token[0])(token)

    def composed(self, token: list[Any], parts: list[Any]) -> Any:
        there = None if self._composed is None else next(self._composed)
        if there is not None:
            return there
        if token[0] == "expanded" and type(parts[0]) is np.ndarray:
            return _numpy.expanded(token, parts)
        if self.framework == "numpy":
            raise UnsupportedTypeError(
                f"load: the checkpoint holds {_WHAT[token[0]]}, which NumPy does not have: load without "
                'framework="numpy", or choose other tensors with keys='
            )
        return getattr(torch_for(_WHAT[token[0]]), token[0])(token, parts)

    def typed(self, name: str, value: Any, attributes: Any) -> Any:
        codec = self.types.by_name(name)
        if codec is None:
            if self.plain:
                return value
            raise _unknown(name)  # no longer known since the check
        try:
            return codec.decode(value, attributes)
        except (CheckpointError, *_values.MALFORMED):
            raise
        except Undecodable as error:
            raise Undecodable(f"a value of the type {name!r}: {error}") from error.__cause__
        except Exception as error:
            raise ValueError(f"a value of the type {name!r}: {error!r}") from error

    def zone(self, value: Any) -> dt.tzinfo | None:
        if self.plain and not issubclass(type(value), dt.tzinfo):
            return None  # of an unknown type: the check would have refused anything else
        return _values.zone(value)


def _unknown(name: str) -> UnsupportedTypeError:
    return UnsupportedTypeError(
        f"load: the checkpoint holds a value of the type {name!r}, which this program does not know: declare its class "
        "first, with fastckpt.register_type or registry=, or load its plain contents with "
        'registry=fastckpt.Registry(undeclared="plain")'
        if name not in RESERVED
        else f"load: the checkpoint holds a value of the type {name!r}, which cannot be imported here: install it, or "
        'load its plain contents with registry=fastckpt.Registry(undeclared="plain")'
    )
