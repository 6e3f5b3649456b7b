"""Elements that change their dtype on their way in."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from . import memory as _memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from .memory import Bytes, Mover

    #: Makes elements of one dtype of as many of another; neither need be aligned.
    Convert = Callable[[Bytes, Bytes], None]

#: Elements that are converted at a time on their way through a mover.
_PIECE = 1 << 17


class Cast:
    """A mover that takes the bytes of a stored tensor and converts its elements.

    Args:
        convert: makes of stored elements those wanted.
        sizes: bytes of a stored element, and of one that is wanted.
        address: that of contiguous memory for all elements, or 0.
        mover: takes the converted elements where there is no address.
    """

    def __init__(self, convert: Convert, sizes: tuple[int, int], address: int, mover: Mover | None) -> None:
        self.mover = mover
        self._convert = convert
        self._from, self._to = sizes
        self._address = address
        #: The bytes of each element that a block's edge cuts, and which of them are there. They stay, so that a part
        #: may come again.
        self._cut: dict[int, tuple[Bytes, Bytes]] = {}
        self._lock = Lock()

    def __call__(self, start: int, address: int, nbytes: int) -> None:
        """See :data:`._memory.Mover`."""
        data = _memory.at(address, nbytes)
        size = self._from
        first, last = -(-start // size), (start + nbytes) // size
        if first > last:
            self._part(last, start - last * size, data)
            return
        head, tail = first * size - start, last * size - start
        if head:
            self._part(first - 1, size - head, data[:head])
        if first < last:
            self._whole(first, last, data[head:tail])
        if tail < nbytes:
            self._part(last, 0, data[tail:])

    def _part(self, element: int, offset: int, data: Bytes) -> None:
        """A part of one element, which is converted when all of it is there. Two threads may have the two halves."""
        with self._lock:
            known = self._cut.get(element)
            if known is None:
                known = self._cut[element] = np.zeros(self._from, np.uint8), np.zeros(self._from, np.uint8)
            whole, there = known
            whole[offset : offset + len(data)] = data
            there[offset : offset + len(data)] = 1
            if there.all():
                self._whole(element, element + 1, whole)

    def _whole(self, first: int, last: int, data: Bytes) -> None:
        size = self._to
        if self._address:
            self._convert(data, _memory.at(self._address + first * size, (last - first) * size))
            return
        assert self.mover is not None  # noqa: S101 - one of the two is there
        made = np.empty(min(_PIECE, last - first) * size, np.uint8)
        for begin in range(first, last, _PIECE):
            end = min(last, begin + _PIECE)
            piece = made[: (end - begin) * size]
            self._convert(data[(begin - first) * self._from : (end - first) * self._from], piece)
            self.mover(begin * size, _memory.address_of(piece), len(piece))
