"""Reads boxes of stored tensors into existing tensors: any strides, any device, any dtype.

A tensor that cannot hold the values is refused by its key, because torch's copy to some such tensors is silently wrong.

Tensors that share memory, like tied weights or a buffer and views into it, are filled one after another, as torch does.
Afterwards each of them must have the values that it was filled with.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._api.tensor_info import are_equal
from fastckpt._tensors import memory as _memory
from fastckpt._tensors import torch as _tensors
from fastckpt._tensors.cast import Cast
from fastckpt._tensors.described import steps
from fastckpt._tensors.overlap import layout_of, overlapping
from fastckpt.exceptions import StructureMismatchError

from . import _torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt import _core
    from fastckpt._api.destinations import Targets
    from fastckpt._state.unflatten import Token

Box = list[tuple[int, int, int]]
_DENSE, _QUANTIZED = "a dense tensor", "a quantised tensor"


class Request(NamedTuple):
    """The arguments of ``_core.ReadRequest``."""

    tensor: int
    address: int
    capacity: int
    box: Box
    strides: Sequence[int] | None = None


@dataclass(slots=True, eq=False)
class Asked:
    """A tensor to fill.

    Attributes:
        key: its key in the state.
        given: the planner's tensor, detached if it is dense.
        target: the tensor to fill: ``given`` without the elements that it repeats.
        box: the box of the stored tensor to read.
        number: the number of the stored tensor; None for one that is made from others.
        spots: devices and layouts of the memory that holds its elements, where it has addresses.
        value: the value to copy to it at the end; None if it is read directly.
        others: the targets that share memory with it.
        filled: its contents after it was filled, if others share its memory.
    """

    key: str
    given: Any
    target: Any
    box: Sequence[tuple[int, int]]
    number: int | None
    spots: list[tuple[str, Any]] = field(default_factory=list)
    value: Any = None
    others: list[Asked] = field(default_factory=list)
    filled: list[Any] = field(default_factory=list)


class Fill:
    """Reads boxes into tensors; collects requests, and a mover for each request that has no address."""

    def __init__(self, targets: Targets, reader: _core.Reader) -> None:
        self.targets = targets
        self.requests: list[Request] = []
        self._reader = reader
        self._asked: list[Asked] = []
        #: The first target of each place in memory; targets without a place are under their identity.
        self._places: dict[Any, Asked] = {}

    def ask(self, tokens: Sequence[Token], box: Sequence[tuple[int, int]], given: Any, key: str) -> Asked:
        """Request a box of a stored tensor with these tokens, for a tensor of the box's sizes.

        A tensor that is made from others is later passed to :meth:`give`.

        Raises:
            StructureMismatchError: ``given`` is of another kind or has other sizes, or is partly requested but not
                dense, or its elements share memory differently than in the checkpoint.
        """
        kind, sizes = _stored_kind(tokens[0])
        if _kind_of(given) != kind:
            raise StructureMismatchError(
                f"load: {key!r} is {kind} in the checkpoint, and {_kind_of(given)} in the state: give one like the one "
                "that was saved, or load it with fastckpt.load"
            )
        if kind != _DENSE and any(bounds != (0, size) for bounds, size in zip(box, sizes, strict=True)):
            raise StructureMismatchError(f"load: {key!r} is {kind} and cannot be filled in part: load it whole")
        wanted = [stop - start for start, stop in box]
        if list(given.shape) != wanted:
            raise StructureMismatchError(
                f"load: {key!r}: a box of the sizes {wanted} was requested, but the tensor to fill has the sizes "
                f"{list(given.shape)}"
            )
        # Only dense tensors: ``detach`` of a tensor without strides makes a new one, and a copy into it would be lost.
        target = given.detach() if kind == _DENSE else given
        asked = Asked(key, target, target, box, tokens[0][1] if tokens[0][0] == "tensor" else None)
        if prod(wanted):
            if tokens[0][0] == "expanded" and type(target) is _tensors.Tensor:
                asked.target = _unrepeated(target, self._sizes(tokens[1][1]))
            asked.spots = _spots_of(asked.target)
            if kind in {_DENSE, _QUANTIZED} and not hasattr(target, "__tensor_flatten__"):
                for _, layout in asked.spots[:1]:
                    _check_itself(layout, key)
            self._asked.append(asked)
            if not asked.spots and self._places.setdefault(id(given), asked) is not asked:
                _share(self._places[id(given)], asked)
        return asked

    def settle(self) -> None:
        """After the last :meth:`ask`, make the requests, and add those for whole tensors in values.

        The memory of whole tensors in values has an address.

        Raises:
            StructureMismatchError: a tensor would get two different values.
        """
        apart = [asked for asked in self._asked if not self._is_again(asked)]
        for one, other in overlapping((*spot, asked) for asked in apart for spot in asked.spots):
            if one is not other:
                _share(one, other)
        for asked in apart:
            if asked.number is not None:
                self._read(asked, asked.number)
        for request in self.targets.requests:
            box = [(0, size, 1) for size in self._sizes(request.tensor)]
            self.requests.append(Request(request.tensor, request.address, request.capacity, box))

    def _sizes(self, number: int) -> Sequence[int]:
        stored = self.targets.stored[number]
        return (stored.logical or stored).shape

    def _is_again(self, asked: Asked) -> bool:
        """Whether an earlier target is the same tensor, and gets the same values."""
        target, number = asked.target, asked.number
        if number is None or not asked.spots or type(target) is not _tensors.Tensor:
            return False
        form = (target.device, target.dtype, target.is_conj(), target.is_neg())
        place = (target.data_ptr(), target.shape, steps(target.shape, target.stride()), *form)
        first = self._places.setdefault(place, asked)
        if first is asked or first.number is None or list(first.box) != list(asked.box):
            return False
        if first.number == number or are_equal(self._reader, self.targets.stored, first.number, number):
            return True
        one, other = [(self.targets.tensor_dtype(each), [*self._sizes(each)]) for each in (first.number, number)]
        if one == other and [(0, size) for size in one[1]] == list(asked.box):
            raise StructureMismatchError(
                f"load: {first.key!r} and {asked.key!r} are one tensor in the state, and differ in the checkpoint: "
                "give two tensors, or leave one of the keys out"
            )
        return False

    def _read(self, asked: Asked, number: int) -> None:
        """Request a box, in separate memory if the target is not a plain tensor or shares its memory."""
        target, dtype = asked.target, self.targets.tensor_dtype(number)
        _, layout = layout_of(target) if type(target) is _tensors.Tensor else ("", None)
        if layout is None or asked.others or not _memory.is_nested(layout):
            asked.value = target = _torch.torch.empty(target.shape, dtype=dtype)
            _, layout = layout_of(target)
        self._request(number, [(start, stop, 1) for start, stop in asked.box], target, dtype, layout)

    def _request(self, index: int, box: Box, target: Any, dtype: Any, layout: Any) -> None:
        room = target.numel() * dtype.itemsize
        straight = target.is_cpu and not target.is_conj() and not target.is_neg()
        whole = straight and target.is_contiguous()
        if target.dtype is dtype and straight:
            if whole:
                self.requests.append(Request(index, target.data_ptr(), room, box))
            else:
                low, high = _memory.span(layout)
                self.requests.append(Request(index, low, high - low, box, layout.strides))
            return
        mover = None if straight else _tensors.mover_in(target)
        if target.dtype is not dtype:
            if straight and not whole:
                mover = _memory.mover_in(layout)
            convert = _tensors.converter(dtype, target.dtype)
            mover = Cast(convert, (dtype.itemsize, target.dtype.itemsize), target.data_ptr() if whole else 0, mover)
        assert mover is not None  # noqa: S101 - what has an address was asked for above
        self.targets.push(len(self.requests), mover, room)
        self.requests.append(Request(index, 0, room, box))

    def give(self, asked: Asked, value: Any) -> None:
        """Accept a whole tensor that is made from others, to be copied at the end.

        Raises:
            StructureMismatchError: its scale, zero point or dtype differs from that of the tensor to fill.
        """
        if asked.target.is_quantized and _quantizer_of(value) != _quantizer_of(asked.target):
            # torch's copy would change the quantiser in this tensor object, but not in others over the same memory.
            raise StructureMismatchError(
                f"load: {asked.key!r} is quantised, and its scale, zero point or dtype in the checkpoint differs from "
                "that in the state: give a tensor with those of the checkpoint, or load it with fastckpt.load"
            )
        if asked.target.layout is _torch.torch.strided:
            for dimension, (start, stop) in enumerate(asked.box):
                length = min(stop - start, asked.target.shape[dimension])
                if length < value.shape[dimension]:
                    value = value.narrow(dimension, start, length)
        asked.value = value

    def finish(self) -> None:
        """Finish after everything has been read.

        Raises:
            StructureMismatchError: a tensor cannot hold its values, or another tensor in its memory overwrote them.
        """
        shared = []
        for asked in self._asked:
            if asked.value is not None:
                _copy(asked.target, asked.value, asked.key)
                asked.value = None
                if asked.others:
                    form = _torch.torch.contiguous_format
                    asked.filled = [part.clone(memory_format=form) for part in _parts_of(asked.target)]
                    shared.append(asked)
        _tensors.changed([asked.given for asked in self._asked if isinstance(asked.given, _tensors.Tensor)])
        for asked in shared:
            if not _is_as_filled(asked):
                # This tensor gets its values again, which overwrites those of the other tensor.
                for part, filled in zip(_parts_of(asked.target), asked.filled, strict=False):
                    _copy(part, filled, asked.key)
                other = next((one for one in asked.others if not _is_as_filled(one)), asked.others[-1])
                raise StructureMismatchError(
                    f"load: {asked.key!r} and {other.key!r} share memory in the state, and differ in the checkpoint: "
                    "give tensors with separate memory, or leave one of the keys out. The state has been changed"
                )


def _unrepeated(target: Any, base: Sequence[int]) -> Any:
    """A tensor without the elements that both it and an expanded tensor of this base repeat."""
    for dimension, (size, step) in enumerate(zip(base, target.stride(), strict=True)):
        if size == 1 and not step:
            target = target.narrow(dimension, 0, 1)
    return target


def _share(one: Asked, other: Asked) -> None:
    one.others.append(other)
    other.others.append(one)


def _parts_of(target: Any) -> list[Any]:
    """The plain tensors that hold the contents of a tensor, as far as torch reports them; its elements come first."""
    if not isinstance(target, _tensors.Tensor) or target.is_meta or target.is_nested:
        return []
    target = target.detach()
    if type(target) is not _tensors.Tensor:
        if hasattr(target, "__tensor_flatten__"):
            return [part for name in target.__tensor_flatten__()[0] for part in _parts_of(getattr(target, name))]
        try:
            target = target.as_subclass(_tensors.Tensor)
        except (RuntimeError, TypeError):
            return []
    if _kind_of(target) == _DENSE:
        return [target]
    describe: Any = _tensors.describe_of(_tensors.Tensor)
    return [part for _, part in describe(target).children if isinstance(part, _tensors.Tensor)]


def _spots_of(target: Any) -> list[tuple[str, Any]]:
    """Devices and layouts of the memory of a tensor."""
    found = []
    for part in _parts_of(target):
        # A tensor without storage may raise.
        with suppress(RuntimeError):
            if part.numel() and part.data_ptr():
                found.append(layout_of(part))
    return found


def _is_as_filled(asked: Asked) -> bool:
    """Whether a tensor still has the bytes with which it was filled."""
    now = _parts_of(asked.target)
    return len(now) == len(asked.filled) and all(
        one.shape == other.shape and _torch.torch.equal(_bytes_of(one), _bytes_of(other))
        for one, other in zip(now, asked.filled, strict=True)
    )


def _bytes_of(part: Any) -> Any:
    plain = part.resolve_conj().resolve_neg().contiguous()
    # A tensor of a single element counts as contiguous whatever its strides are.
    return plain.as_strided((plain.numel(),), (1,)).view(_torch.torch.uint8)


def _copy(target: Any, value: Any, key: str) -> None:
    torch = _torch.torch
    try:
        with torch.no_grad(), torch.inference_mode(target.is_inference()):
            target.copy_(value)
    except (RuntimeError, TypeError) as error:
        # Errors of devices and out-of-memory errors are not errors of the tensor.
        if type(error) not in (RuntimeError, NotImplementedError, TypeError) or "allocate" in str(error):
            raise
        first = str(error).strip().partition("\n")[0]
        raise StructureMismatchError(
            f"load: {key!r} cannot be copied to the tensor in the state: give one like the one that was saved, or load "
            f"it with fastckpt.load. torch says: {first}"
        ) from error


def _stored_kind(token: Token) -> tuple[str, Sequence[int]]:
    """The kind of a stored tensor, by its first token, and the sizes if it is not dense."""
    tag, *rest = token
    if tag == "coo":
        return "a tensor of the layout torch.sparse_coo", rest[0]
    if tag == "compressed":
        return f"a tensor of the layout torch.sparse_{rest[0]}", rest[1]
    return (_QUANTIZED, rest[1]) if tag == "quantized" else (_DENSE, ())


def _kind_of(tensor: Any) -> str:
    if tensor.is_quantized:
        return _QUANTIZED
    if tensor.is_nested:
        return "a nested tensor"
    return _DENSE if tensor.layout is _torch.torch.strided else f"a tensor of the layout {tensor.layout}"


def _quantizer_of(tensor: Any) -> Any:
    """The meaning of a tensor's integers; None for a tensor that is not quantised."""
    if not tensor.is_quantized:
        return None
    describe: Any = _tensors.describe_of(_tensors.Tensor)
    token, (_, *parts), _ = describe(tensor.detach())
    return [token, *(one.tolist() if isinstance(one, _tensors.Tensor) else one for _, one in parts)]


def _check_itself(layout: Any, key: str) -> None:
    """Refuse a non-empty tensor whose elements share memory: look for two whose indices first differ in a dimension.

    torch itself refuses only expanded tensors.
    """
    if _memory.is_nested(layout):
        return
    for dimension in range(layout.ndim):
        rest = layout[(0,) * dimension]
        if _memory.overlap(rest[:1], rest[1:]):
            raise StructureMismatchError(
                f"load: {key!r}: elements of the tensor in the state share memory (it is expanded, or a view that "
                "overlaps itself): give a contiguous copy of it"
            )
