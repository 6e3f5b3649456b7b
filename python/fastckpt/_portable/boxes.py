"""Boxes of tensors: the bytes of a box, and their places in memory."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt._tensors.memory import address_of, is_nested, laid_out
from fastckpt._tensors.pieces import pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .records import StoredTensor

_MOST = 1 << 63
#: Wanted ranges less than this many bytes apart are read as one, because another operation costs about as much.
MERGE = 256 << 10


class Box:
    """A box of a tensor, given as in :class:`ReadRequest`; ``nbytes`` of an empty box is 0.

    Raises:
        ValueError: the request is not for a box of the tensor.
    """

    def __init__(
        self, tensor: StoredTensor, box: Sequence[tuple[int, int, int]] | None, strides: Sequence[int] | None
    ) -> None:
        shape = (tensor.logical or tensor).shape
        box = [(0, size, 1) for size in shape] if box is None else box
        self._name = tensor.name
        for given in (box, shape if strides is None else strides):
            if len(given) != len(shape):
                raise self._wrong(f"it has {len(given)} dimensions, but the tensor has {len(shape)}")
        for dimension, ((start, stop, step), size) in enumerate(zip(box, shape, strict=True)):
            if not 0 <= start <= stop <= size or step < 1:
                raise self._wrong(f"{start}..{stop} in steps of {step} is not in dimension {dimension} of size {size}")
        self.nbytes = 0
        if tensor.nbytes and all(start < stop for start, stop, _ in box):
            self._in_bytes(tensor.nbytes, shape, box)
            self._lay_out(strides)

    def _wrong(self, why: str) -> ValueError:
        return ValueError(f"a box of tensor `{self._name}`: {why}")

    def _in_bytes(self, nbytes: int, shape: Sequence[int], box: Sequence[tuple[int, int, int]]) -> None:
        """Count in units of whole bytes: in elements, or, if elements share bytes, in bytes of the last dimension."""
        bits, rest = divmod(nbytes * 8, prod(shape))
        if rest:
            raise self._wrong(f"the tensor's shape does not fit its {nbytes} bytes")
        if bits % 8:
            if not shape:
                raise self._wrong("the tensor's only element is not a whole number of bytes")
            start, stop, step = box[-1]
            if step != 1 or any(count * bits % 8 for count in (shape[-1], start, stop)):
                raise self._wrong(
                    f"elements of {bits} bits share bytes: the range along the last dimension must begin and end at a "
                    "whole byte, in steps of 1"
                )
            shape = (*shape[:-1], shape[-1] * bits // 8)
            box = [*box[:-1], (start * bits // 8, stop * bits // 8, 1)]
            bits = 8
        self.shape = tuple(shape)
        self.size = bits // 8
        self.box = list(box)
        self.counts = [-(-(stop - start) // step) for start, stop, step in box]
        self.nbytes = prod(self.counts) * self.size

    def _lay_out(self, strides: Sequence[int] | None) -> None:
        if strides is None:
            strides = [prod(self.counts[dimension + 1 :]) * self.size for dimension in range(len(self.counts))]
        reach = [(count - 1) * stride for count, stride in zip(self.counts, strides, strict=True)]
        #: The bytes of memory below the first element, and the total size of the memory.
        self.below = -sum(step for step in reach if step < 0)
        self.reach = self.below + sum(step for step in reach if step > 0) + self.size
        if (
            max([self.reach, *(abs(stride * count) for stride, count in zip(strides, self.counts, strict=True))])
            >= _MOST
        ):
            raise self._wrong("its strides are out of range")
        self.strides = tuple(strides)

    def at(self, address: int) -> np.ndarray[Any, Any]:
        """The memory of the box, whose lowest byte is at ``address``.

        Raises:
            ValueError: two elements would share bytes.
        """
        memory = laid_out(address + self.below, tuple(self.counts), self.strides, self.size)
        if not is_nested(memory):
            raise ValueError("has strides along which rows would overlap or interleave: nothing was moved")
        return memory

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The ranges of the tensor's bytes to read: those of the box, and gaps that are too small for another read."""
        stride, run, first = self.size, self.size, 0
        outer: list[range] = []
        for (start, _, step), count, size in zip(
            reversed(self.box), reversed(self.counts), reversed(self.shape), strict=True
        ):
            first += start * stride
            distance = step * stride
            if count > 1 and not outer and distance - run <= MERGE:
                run += (count - 1) * distance
            elif count > 1:
                outer.insert(0, range(0, count * distance, distance))
            stride *= size
        for offsets in product(*outer):
            begin = first + sum(offsets)
            yield begin, begin + run

    def deliver(self, memory: np.ndarray[Any, Any], start: int, data: np.ndarray[Any, Any]) -> None:
        """Copy the box's share of ``data``, the tensor's bytes that begin at ``start``, to ``memory``."""
        shape, size, box = self.shape, self.size, self.box
        if start % size or len(data) % size:
            # An element is cut: count in bytes.
            memory = laid_out(address_of(memory), (*memory.shape, size), (*memory.strides, 1), 1)
            shape, box, size = (*shape, size), [*box, (0, size, 1)], 1
        at = 0
        for index, count in pieces(shape, start // size, (start + len(data)) // size):
            whole = [slice(0, extent) for extent in shape[len(index) :]]
            there = [slice(one, one + 1) if isinstance(one, int) else one for one in index] + whole
            source = data[at : at + count * size].view(f"V{size}").reshape([part.stop - part.start for part in there])
            at += count * size
            cuts = [_common(part.start, part.stop, along) for part, along in zip(there, box, strict=True)]
            if None not in cuts:
                # The ellipsis makes an array even of a scalar.
                source_cut: Any = (*(cut[0] for cut in cuts if cut), ...)
                memory_cut: Any = (*(cut[1] for cut in cuts if cut), ...)
                np.copyto(memory[memory_cut], source[source_cut])


def _common(first: int, last: int, along: tuple[int, int, int]) -> tuple[slice, slice] | None:
    """The part of the indices ``[first, last)`` in the box: counted from ``first``, and counted in the box."""
    start, stop, step = along
    place = max(0, -(-(first - start) // step))
    begin = start + place * step
    end = min(last, stop)
    if begin >= end:
        return None
    count = -(-(end - begin) // step)
    return slice(begin - first, end - first, step), slice(place, place + count)
