"""Boxes of stored tensors, read into tensors that exist: any strides, any device, any dtype.

A tensor that cannot take the values is refused by its key: torch's copy into some of them is wrong without an error.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._api.into import are_equal, layout_of, overlapping
from fastckpt._tensors import memory as _memory
from fastckpt._tensors import torch as _tensors
from fastckpt._tensors.cast import Cast
from fastckpt.exceptions import StructureMismatchError

from . import _torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt import _core
    from fastckpt._api.destinations import Targets

Box = list[tuple[int, int, int]]
_DENSE = "a dense tensor"


class Request(NamedTuple):
    """What ``_core.ReadRequest`` takes."""

    tensor: int
    address: int
    capacity: int
    box: Box
    strides: Sequence[int] | None = None


class _Asked(NamedTuple):
    """What fills a tensor, and where its elements are."""

    key: str
    number: int
    box: Sequence[tuple[int, int]]
    device: str
    layout: Any


class Fill:
    """Reads boxes into tensors: requests, and movers for those without an address, by their numbers."""

    def __init__(self, targets: Targets, reader: _core.Reader) -> None:
        self.targets = targets
        self.requests: list[Request] = []
        self.filled: list[Any] = []
        self._reader = reader
        self._asked: dict[Any, _Asked] = {}
        self._detours: list[tuple[str, Any, Any]] = []

    def ask(self, index: int, box: Sequence[tuple[int, int]], target: Any, key: str) -> None:
        """Ask for a box of the stored tensor number ``index``, for ``target``, a detached tensor of the box's sizes.

        Raises:
            StructureMismatchError: the sizes differ, the tensor is not dense, its elements share memory, or it has
                been asked for with other values.
        """
        if _kind_of(target) != _DENSE:
            raise _unlike(key, _DENSE, _kind_of(target))
        sizes = tuple(stop - start for start, stop in box)
        if tuple(target.shape) != sizes:
            raise StructureMismatchError(
                f"load: {key}: a box of the sizes {list(sizes)} was requested, but the tensor to fill has the sizes "
                f"{list(target.shape)}"
            )
        self.filled.append(target)
        dtype = self.targets.tensor_dtype(index)
        if not prod(sizes):
            return
        if type(target) is not _tensors.Tensor:
            target = self._detour(target, dtype, key)
        device, layout = layout_of(target)
        self._note(target, _Asked(key, index, box, device, layout))
        if not _memory.is_nested(layout):
            _check_itself(layout, key)
            target = self._detour(target, dtype, key)
            _, layout = layout_of(target)
        self._request(index, [(start, stop, 1) for start, stop in box], target, dtype, layout)

    def _note(self, target: Any, asked: _Asked) -> None:
        """Note what fills a tensor; one that is under several keys must get the same from each."""
        if not target.data_ptr():
            return
        key, number, box, device, layout = asked
        form = (target.dtype, target.is_conj(), target.is_neg())
        known = self._asked.setdefault((device, target.data_ptr(), layout.shape, layout.strides, form), asked)
        same = known.number == number or are_equal(self._reader, self.targets.stored, known.number, number)
        if not same or list(known.box) != list(box):
            raise StructureMismatchError(
                f"load: {known.key!r} and {key!r} are one tensor in the state, and differ in the checkpoint: give two "
                "tensors, or leave one of the keys out"
            )

    def _detour(self, target: Any, dtype: Any, key: str) -> Any:
        """A plain tensor that is copied to ``target`` at the end."""
        plain = _torch.torch.empty(target.shape, dtype=dtype)
        self._detours.append((key, target, plain))
        return plain

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

    def take_whole(self) -> None:
        """All boxes have been asked for: take the requests of targets for whole tensors of values.

        Their memory has an address.

        Raises:
            StructureMismatchError: two of the tensors to fill overlap.
        """
        for key, other in overlapping((asked.device, asked.layout, asked.key) for asked in self._asked.values()):
            raise StructureMismatchError(
                f"load: {key!r} and {other!r} overlap in memory in the state: give tensors that do not"
            )
        for request in self.targets.requests:
            stored = self.targets.stored[request.tensor]
            sizes = (stored.logical or stored).shape
            box = [(0, size, 1) for size in sizes]
            self.requests.append(Request(request.tensor, request.address, request.capacity, box))

    def finish(self) -> None:
        """Once all has been read."""
        for key, target, plain in self._detours:
            _copy(target, plain, key)
        _tensors.changed([value for value in self.filled if isinstance(value, _tensors.Tensor)])


def fill_composed(box: Sequence[tuple[int, int]], value: Any, target: Any, key: str) -> None:
    """Copy a box of ``value``, a tensor made of several, to ``target``.

    Raises:
        StructureMismatchError: ``target`` is of another kind, or cannot be filled.
    """
    kinds = [_kind_of(one) for one in (value, target)]
    if kinds[0] != kinds[1]:
        raise _unlike(key, *kinds)
    if any(bounds != (0, size) for bounds, size in zip(box, value.shape, strict=True)):
        if kinds[0] != _DENSE:
            raise StructureMismatchError(f"load: {key!r} is {kinds[0]} and cannot be filled in part: load it whole")
        for dimension, (start, stop) in enumerate(box):
            value = value.narrow(dimension, start, stop - start)
    if kinds[0] == _DENSE:
        target = target.detach()
        if type(target) is _tensors.Tensor and target.numel():
            # Along these dimensions both repeat one element.
            for dimension, steps in enumerate(zip(value.stride(), target.stride(), strict=True)):
                if steps == (0, 0):
                    value, target = value.narrow(dimension, 0, 1), target.narrow(dimension, 0, 1)
            _check_itself(layout_of(target)[1], key)
    elif _quantizer_of(value) != _quantizer_of(target):
        # torch's copy would change it in this tensor object, and not in others over the same memory.
        raise StructureMismatchError(
            f"load: {key!r} is quantised with another scale, zero point or dtype in the checkpoint than in the state: "
            "give a tensor with the same, or load it with fastckpt.load"
        )
    # Not detached otherwise: ``detach`` of a tensor without strides makes a new one, and a copy into it would be lost.
    _copy(target, value, key)


def _copy(target: Any, value: Any, key: str) -> None:
    try:
        with _torch.torch.no_grad():
            target.copy_(value)
    except (RuntimeError, TypeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise StructureMismatchError(
            f"load: {key!r} cannot be copied to the tensor in the state: give one like the one that was saved, or load "
            f"it with fastckpt.load. torch says: {first}"
        ) from error


def _kind_of(tensor: Any) -> str:
    if tensor.is_quantized:
        return "a quantised tensor"
    if tensor.is_nested:
        return "a nested tensor"
    return _DENSE if tensor.layout is _torch.torch.strided else f"a tensor of the layout {tensor.layout}"


def _unlike(key: str, saved: str, given: str) -> StructureMismatchError:
    return StructureMismatchError(
        f"load: {key!r} is {saved} in the checkpoint, and {given} in the state: give one like the one that was saved, "
        "or load it with fastckpt.load"
    )


def _quantizer_of(tensor: Any) -> Any:
    """The meaning of a tensor's integers; None for a tensor that is not quantised."""
    if not tensor.is_quantized:
        return None
    describe: Any = _tensors.describe_of(_tensors.Tensor)
    token, (_, *parts), _ = describe(tensor.detach())
    return [token, *(one.tolist() if isinstance(one, _tensors.Tensor) else one for _, one in parts)]


def _check_itself(layout: Any, key: str) -> None:
    """Refuse a tensor that is not empty if elements share memory: two that differ first in one of the dimensions.

    torch refuses only expanded ones.
    """
    for dimension in range(layout.ndim):
        rest = layout[(0,) * dimension]
        if _memory.overlap(rest[:1], rest[1:]):
            raise StructureMismatchError(
                f"load: {key!r}: elements of the tensor in the state share memory (it is expanded, or a view that "
                "overlaps itself): give a contiguous copy of it"
            )
