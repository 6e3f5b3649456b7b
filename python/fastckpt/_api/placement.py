"""The device and the dtype of each loaded tensor: resolves ``device=`` and ``dtype=``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastckpt._state.builders import torch_for
from fastckpt._state.select import aliases, bound
from fastckpt._tensors.dtypes import PLAIN_NAMES, plain_name

from .selection import Patterns
from .tensor_info import TensorInfo, device_of, info_of

if TYPE_CHECKING:
    from fastckpt._core import StoredTensor
    from fastckpt._state.registry import Types
    from fastckpt._state.unflatten import Token

#: Dtypes that can be requested, and dtypes that can be cast, which include numpy's in any byte order.
_FLOATING = r"b?float16|float(32|64)|float8_\w+"
_CASTABLE = _FLOATING + r"|[<>]f\d+"
_WHOLE = r"bool|u?int\d+|[<>|][biu]\d+"
_SAVED = "saved"
#: Bytes of the state of a random generator of torch: 16 on a GPU, 5056 on the CPU.
_RANDOM = frozenset({16, 5056})


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices and dtypes by the number of the stored tensor, if they differ from the CPU and the stored dtype.

    Attributes:
        devices: the ``torch.device`` of each.
        dtypes: the name of the dtype of each, without ``torch.``
    """

    devices: Mapping[int, Any] = field(default_factory=dict)
    dtypes: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stock:
    """The tensors and values that can be loaded.

    Attributes:
        tokens: the whole structure, under the names of the file.
        stored: all tensors.
        files: the names of the shards.
        wanted: the tokens of the tensors to load.
        types: the types that are known.
        operation: the word that error messages begin with.
    """

    tokens: list[Token]
    stored: list[StoredTensor]
    files: list[str]
    wanted: list[list[Any]]
    types: Types
    operation: str = "load"

    def tensors(self, kinds: frozenset[str]) -> dict[int, list[Any]]:
        """The first token of each wanted tensor of these kinds, by its number."""
        found: dict[int, list[Any]] = {}
        for token in self.wanted:
            if token[0] in kinds:
                found.setdefault(token[1], token)
        return found

    def names(self) -> list[tuple[int, str]]:
        """The number and the name of each tensor, even of unwanted ones: a tied tensor has several names."""
        return [(index, name) for _, index, name in aliases(self.tokens, [tensor.name for tensor in self.stored])]


def place(stock: Stock, device: Any, dtype: Any, framework: str, *, strict: bool) -> Placement:
    """Resolve ``device`` and ``dtype``, as :func:`fastckpt.load` accepts them.

    Raises:
        KeyError: a pattern matches nothing, and ``strict`` is set.
        TypeError: an argument has the wrong type.
        ValueError: there is no such device here, or a dtype is not a floating-point dtype.
    """
    devices: dict[int, Any] = {}
    dtypes: dict[int, str] = {}
    if device is not None:
        tensors = stock.tensors(frozenset({"tensor", "array"} if framework == "torch" else {"tensor"}))
        devices = {
            index: found for index, found in _devices(stock, tensors, device, strict=strict) if found is not None
        }
    if dtype is not None:
        dtypes = dtypes_of(stock, dtype, strict=strict)
    return Placement(devices, dtypes)


def dtypes_of(stock: Stock, dtype: Any, *, strict: bool) -> dict[int, str]:
    """The names of the dtypes that tensors are cast to, by number, if they differ from the stored ones.

    Args:
        stock: the tensors and values of the checkpoint.
        dtype: as :func:`fastckpt.load` accepts it.
        strict: whether a pattern that matches nothing is an error.

    Raises:
        KeyError, TypeError, ValueError: as for :func:`place`.
    """
    kept = bound(stock.tokens, stock.types)
    tensors = {
        index: token
        for index, token in stock.tensors(frozenset({"tensor", "array"})).items()
        if index not in kept and re.fullmatch(_CASTABLE, _dtype_of(stock.stored[index]))
    }
    return {
        index: found
        for index, found in _dtypes(stock, tensors, dtype, strict=strict)
        if found is not None and found != _dtype_of(stock.stored[index])
    }


def named_dtypes_of(stock: Stock, dtype: Mapping[str, Any], inner: set[int]) -> dict[int, str]:
    """Like :func:`dtypes_of`, for tensors of integers and booleans whose exact name is in ``dtype``; no patterns.

    Tensors with a number in ``inner`` are parts of other tensors, and stay unchanged.
    """
    tensors = stock.tensors(frozenset({"tensor", "array"})).keys() - inner
    return {
        index: floating(dtype[name], stock.operation)
        for index, name in stock.names()
        if dtype.get(name) is not None and index in tensors and re.fullmatch(_WHOLE, _dtype_of(stock.stored[index]))
    }


def _dtype_of(stored: StoredTensor) -> str:
    return plain_name(stored.dtype, None if stored.logical is None else stored.logical.dtype)


def _by_rule(
    stock: Stock,
    tensors: Mapping[int, list[Any]],
    argument: str,
    rule: Mapping[str, Any] | Callable[[TensorInfo], Any],
    *,
    strict: bool,
) -> list[tuple[int, Any]]:
    """The result of patterns or a function for each tensor."""
    if callable(rule):
        return [(index, rule(info_of(stock.stored[index], token, stock.files))) for index, token in tensors.items()]
    patterns, values = Patterns(argument, rule, stock.operation), list(rule.values())
    chosen: dict[int, int] = {}
    for index, name in stock.names():
        number = patterns.first(name)
        if number is not None and index in tensors:
            chosen[index] = min(number, chosen.get(index, number))
    if strict:
        patterns.check()
    return [(index, values[number]) for index, number in chosen.items()]


def _devices(stock: Stock, tensors: Mapping[int, list[Any]], device: Any, *, strict: bool) -> list[tuple[int, Any]]:
    torch = torch_for("tensors for a device")
    known: dict[str, Any] = {}

    def named(value: Any) -> Any:
        name = str(value)
        if name not in known:
            known[name] = torch.device_of(value)
        return known[name]

    def one(value: Any, index: int) -> Any:
        saved = isinstance(value, str) and value == _SAVED
        name = device_of(tensors[index]) if saved else value
        if name is None:
            return None
        try:
            return named(name)
        except ValueError as error:
            whose = f"tensor {stock.stored[index].name!r}"
            where = f"{whose} was on {name} when it was saved" if saved else f"for {whose}"
            raise ValueError(
                f"{stock.operation}: device: {error} ({where}): give device= an existing device, "
                'or patterns, as in {"model.*": "cuda:0", "*": "cpu"}'
            ) from error

    if isinstance(device, Mapping) or (callable(device) and not torch.is_device(device)):
        return [
            (index, one(value, index)) for index, value in _by_rule(stock, tensors, "device", device, strict=strict)
        ]
    if isinstance(device, str) and device == _SAVED:
        return [(index, one(device, index)) for index in tensors]
    try:
        found = named(device)
    except ValueError as error:
        raise ValueError(
            f'{stock.operation}: device must be a torch.device, its name, "saved", patterns or a function: {error}'
        ) from error
    return [(index, found) for index, token in tensors.items() if not _stays(stock.stored[index], token)]


def _stays(stored: StoredTensor, token: list[Any]) -> bool:
    """Whether a tensor was on the CPU and must stay there: the state of a random generator, or an optimizer's ``step``.

    torch refuses a random state that is on a GPU, and each optimizer step would copy ``step`` back from the GPU.
    """
    if token[0] != "tensor" or device_of(token) != "cpu":
        return False
    if stored.logical is not None:
        return False
    if stored.dtype == "U8" and len(stored.shape) == 1:
        return stored.nbytes in _RANDOM
    return _counts(stored)


def _counts(stored: StoredTensor) -> bool:
    """Whether a tensor is an optimizer's ``step``."""
    return not stored.shape and stored.name.rpartition(".")[2] == "step"


def _dtypes(
    stock: Stock, tensors: Mapping[int, list[Any]], dtype: Any, *, strict: bool
) -> list[tuple[int, str | None]]:
    if isinstance(dtype, Mapping) or (callable(dtype) and not isinstance(dtype, type)):
        found = _by_rule(stock, tensors, "dtype", dtype, strict=strict)
        return [(index, None if value is None else floating(value, stock.operation)) for index, value in found]
    name = floating(dtype, stock.operation)
    # A dtype with few bits cannot count the steps of an optimizer: torch leaves its step unchanged, too.
    return [(index, name) for index in tensors if not _counts(stock.stored[index])]


def can_cast(source: str, target: str) -> bool:
    """Whether ``dtype=`` can cast the first of these dtypes to the second."""
    return re.fullmatch(_CASTABLE, source) is not None and re.fullmatch(_FLOATING, target) is not None


def floating(dtype: Any, operation: str = "load") -> str:
    """The name of a floating-point dtype, given as torch's, as numpy's or by name; ValueError for anything else."""
    name = (dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)).removeprefix("torch.")
    if re.fullmatch(_FLOATING, name) is None:
        like = PLAIN_NAMES.get(name.upper().replace("FP", "F"), "")
        like = f' ("{like}"?)' if re.fullmatch(_FLOATING, like) else ""
        raise ValueError(
            f"{operation}: dtype must be a floating-point dtype or its name, patterns or a function, not {dtype!r}"
            f"{like}: only floating-point tensors are cast"
        )
    return name
