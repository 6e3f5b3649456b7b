"""Boxes of stored tensors, read into tensors that exist: any strides, any device, any dtype."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._tensors import memory as _memory
from fastckpt._tensors import torch as _tensors
from fastckpt._tensors.cast import Cast
from fastckpt.exceptions import StructureMismatchError

from . import _torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt._api.destinations import Targets

Box = list[tuple[int, int, int]]


class Request(NamedTuple):
    """What ``_core.ReadRequest`` takes."""

    tensor: int
    address: int
    capacity: int
    box: Box
    strides: Sequence[int] | None = None


class Fill:
    """Reads boxes into tensors: requests, and movers for those without an address, by their numbers."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self.requests: list[Request] = []
        self.filled: list[Any] = []
        self._detours: list[tuple[Any, Any]] = []

    def ask(self, index: int, box: Sequence[tuple[int, int]], target: Any, key: str) -> None:
        """Ask for a box of the stored tensor number ``index``, for ``target``, a detached tensor of the box's sizes.

        Raises:
            StructureMismatchError: the sizes differ.
        """
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
        if type(target) is not _tensors.Tensor or target.layout is not _torch.torch.strided:
            target = self._detour(target, dtype)
        layout = self._layout(target)
        if not _memory.is_nested(layout):
            target = self._detour(target, dtype)
            layout = self._layout(target)
        self._request(index, [(start, stop, 1) for start, stop in box], target, dtype, layout)

    def _detour(self, target: Any, dtype: Any) -> Any:
        """A plain tensor that is copied to ``target`` at the end."""
        plain = _torch.torch.empty(target.shape, dtype=dtype)
        self._detours.append((target, plain))
        return plain

    @staticmethod
    def _layout(target: Any) -> Any:
        size = target.element_size()
        strides = tuple(stride * size for stride in target.stride())
        return _memory.laid_out(target.data_ptr(), tuple(target.shape), strides, size)

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
        """Take the requests of targets for whole tensors of values, into memory that has an address."""
        for request in self.targets.requests:
            stored = self.targets.stored[request.tensor]
            sizes = (stored.logical or stored).shape
            box = [(0, size, 1) for size in sizes]
            self.requests.append(Request(request.tensor, request.address, request.capacity, box))

    def finish(self) -> None:
        """Once all has been read."""
        with _torch.torch.no_grad():
            for target, plain in self._detours:
                target.copy_(plain)
        _tensors.changed([value for value in self.filled if isinstance(value, _tensors.Tensor)])
