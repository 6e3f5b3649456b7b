"""Casts elements during a load."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from . import memory as _memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from .memory import Bytes, Mover

    #: Converts elements of one dtype to another; neither need be aligned.
    Convert = Callable[[Bytes, Bytes], None]

#: Elements that are converted at a time before they go to a mover: as many as fit the CPU caches.
_PIECE = 1 << 17


class Cast:
    """A mover that receives the bytes of a stored tensor and converts its elements.

    Args:
        convert: converts stored elements to the wanted ones.
        sizes: bytes of a stored element, and of a converted one.
        address: contiguous memory for all elements, or 0.
        mover: receives the converted elements if there is no address.
    """

    def __init__(self, convert: Convert, sizes: tuple[int, int], address: int, mover: Mover | None) -> None:
        self.mover = mover
        self._convert = convert
        self._from, self._to = sizes
        self._address = address
        #: The bytes of each element that a block boundary cuts, and which of them have arrived. They are kept, so that
        #: a part may arrive again.
        self._cut: dict[int, tuple[Bytes, Bytes]] = {}
        self._lock = Lock()

    def __call__(self, start: int, address: int, nbytes: int) -> None:
        """See :data:`._memory.Mover`."""
        self.convert(start, address, nbytes, self._move)

    def _move(self, start: int, made: Bytes) -> None:
        assert self.mover is not None  # noqa: S101 - there is an address otherwise
        self.mover(start, _memory.address_of(made), len(made))

    def convert(self, start: int, address: int, nbytes: int, move: Callable[[int, Bytes], None]) -> None:
        """Convert the whole elements of a range, which may cut some.

        Args:
            start: the offset of the range in the stored tensor.
            address: the place of the range in memory.
            nbytes: the size of the range.
            move: without an address, called with converted elements, in separate memory, and their offset in the
                converted tensor.
        """
        data = _memory.at(address, nbytes)
        size = self._from
        first, last = -(-start // size), (start + nbytes) // size
        if first > last:
            self._part(last, start - last * size, data, move)
            return
        head, tail = first * size - start, last * size - start
        if head:
            self._part(first - 1, size - head, data[:head], move)
        if first < last:
            self._whole(first, last, data[head:tail], move)
        if tail < nbytes:
            self._part(last, 0, data[tail:], move)

    def _part(self, element: int, offset: int, data: Bytes, move: Callable[[int, Bytes], None]) -> None:
        """A part of one element, which is converted when all of it has arrived. Two threads may each bring half."""
        with self._lock:
            known = self._cut.get(element)
            if known is None:
                known = self._cut[element] = np.zeros(self._from, np.uint8), np.zeros(self._from, np.uint8)
            whole, there = known
            whole[offset : offset + len(data)] = data
            there[offset : offset + len(data)] = 1
            if there.all():
                self._whole(element, element + 1, whole, move)

    def _whole(self, first: int, last: int, data: Bytes, move: Callable[[int, Bytes], None]) -> None:
        size = self._to
        if self._address:
            self._convert(data, _memory.at(self._address + first * size, (last - first) * size))
            return
        made = np.empty((last - first) * size, np.uint8)
        for begin in range(0, last - first, _PIECE):
            end = min(last - first, begin + _PIECE)
            self._convert(data[begin * self._from : end * self._from], made[begin * size : end * size])
        move(first * size, made)
