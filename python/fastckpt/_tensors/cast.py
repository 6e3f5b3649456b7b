"""Elements that change their dtype on their way in."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from . import memory as _memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .memory import Bytes, Mover
    from .movers import Range, Sinks

    #: Makes elements of one dtype of as many of another; neither need be aligned.
    Convert = Callable[[Bytes, Bytes], None]

#: Elements that are converted at a time on their way through a mover of the host.
_PIECE = 1 << 17
#: Converted bytes that are held at a time, at most, on their way to devices.
_HELD = 16 << 20


class Cast:
    """A mover that takes the bytes of a stored tensor and converts its elements, always on the host.

    (A device rounds alike, but gives other bits for what is not a number.)

    Args:
        convert: makes of stored elements those wanted.
        sizes: bytes of a stored element, and of one that is wanted.
        address: that of contiguous memory for all elements, or 0.
        mover: takes the converted elements where there is no address.

    Attributes:
        mover: that.
        stored, size: bytes of a stored element, and of one that is wanted.
    """

    def __init__(self, convert: Convert, sizes: tuple[int, int], address: int, mover: Mover | None) -> None:
        self.mover = mover
        self.convert = convert
        self.stored, self.size = sizes
        self._address = address
        #: The bytes of each element that a block's edge cuts, and which of them are there. They stay, so that a part
        #: may come again.
        self._cut: dict[int, tuple[Bytes, Bytes]] = {}
        self._lock = Lock()

    @property
    def device(self) -> Any:
        """The ``torch.device`` of the memory; None for the host."""
        return getattr(self.mover, "device", None)

    def __call__(self, start: int, address: int, nbytes: int) -> None:
        """See :data:`._memory.Mover`."""
        for first, data in self.elements(start, address, nbytes, _PIECE):
            room = len(data) // self.stored * self.size
            if self._address:
                self.convert(data, _memory.at(self._address + first * self.size, room))
                continue
            assert self.mover is not None  # noqa: S101 - one of the two is there
            made = np.empty(room, np.uint8)
            self.convert(data, made)
            self.mover(first * self.size, _memory.address_of(made), room)

    def elements(self, start: int, address: int, nbytes: int, most: int) -> Iterator[tuple[int, Bytes]]:
        """What the stored bytes ``[start, start + nbytes)`` at ``address`` complete: whole elements, ``most`` at a time.

        Yields:
            The number of the first element, and the stored bytes.
        """
        data = _memory.at(address, nbytes)
        size = self.stored
        first, last = -(-start // size), (start + nbytes) // size
        if first > last:
            yield from self._part(last, start - last * size, data)
            return
        head, tail = first * size - start, last * size - start
        if head:
            yield from self._part(first - 1, size - head, data[:head])
        for begin in range(first, last, most):
            end = min(last, begin + most)
            yield begin, data[begin * size - start : end * size - start]
        if tail < nbytes:
            yield from self._part(last, 0, data[tail:])

    def _part(self, element: int, offset: int, data: Bytes) -> Iterator[tuple[int, Bytes]]:
        """A part of one element, which is there when all parts are. Two threads may have the two halves."""
        with self._lock:
            known = self._cut.get(element)
            if known is None:
                known = self._cut[element] = np.zeros(self.stored, np.uint8), np.zeros(self.stored, np.uint8)
            whole, there = known
            whole[offset : offset + len(data)] = data
            there[offset : offset + len(data)] = 1
            if not there.all():
                return
            whole = whole.copy()
        yield element, whole


def drain_cast(casts: Mapping[int, Cast], sinks: Sinks, ranges: Sequence[Range]) -> None:
    """Convert ranges of tensors, and bring what they become to devices.

    Small tensors lie side by side in what is handed over: they travel together.

    Args:
        casts: by index, of tensors on devices.
        sinks: takes what was converted, for the same indices.
        ranges: bytes as they are stored.
    """
    room = sum((nbytes // casts[index].stored + 2) * casts[index].size for index, _, _, nbytes in ranges)
    held = np.empty(min(room, _HELD), np.uint8)
    made: list[Range] = []
    used = 0
    for index, start, address, nbytes in ranges:
        cast = casts[index]
        for first, data in cast.elements(start, address, nbytes, _PIECE):
            size = len(data) // cast.stored * cast.size
            if used + size > len(held):
                sinks.drain(made)
                made, used = [], 0
            piece = held[used : used + size]
            cast.convert(data, piece)
            made.append((index, first * cast.size, _memory.address_of(piece), size))
            used += size
    if made:
        sinks.drain(made)
