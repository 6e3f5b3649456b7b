"""Copies from devices to a snapshot: asked for in parts, waited for one by one, and never left to run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fastckpt._tensors.movers import Copies, Range, Sources

#: Bytes that are asked for at a time: what a progress, a cancellation and the memory's being pinned go by.
PART = 1 << 30
#: Parts of a tensor begin at whole elements: no element is larger.
_ELEMENT = 16


class Asked:
    """What a save has asked of devices and not yet waited for.

    Args:
        sources: where it comes from.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._left: list[tuple[Copies, int]] = []
        #: Whether an exception has come while copies were being asked for, or before they were noted here.
        self._lost = False

    def ask(self, ranges: Iterable[Range], go_on: Callable[[], object] = lambda: None) -> list[Copies]:
        """Ask for copies, in the order of their addresses; ``go_on`` is called before each part and may raise."""
        made = []
        for part in _parts(sorted(ranges, key=lambda each: each[2])):
            go_on()
            self._lost = True
            copies = self.sources.enqueue(part)
            self._left.append((copies, sum(each[3] for each in part)))
            self._lost = False
            made.append(copies)
        return made

    def wait(self, arrived: Callable[[int], object] = lambda _: None) -> None:
        """Wait for all of it; ``arrived`` is told the bytes of each part that has come.

        Raises:
            Exception: a device has failed, or ``arrived`` raises. The rest is still to be waited for.
        """
        while self._left:
            copies, nbytes = self._left[0]
            copies.wait()
            del self._left[0]
            arrived(nbytes)

    def settle(self) -> bool:
        """Wait until nothing writes to the memory any more; whether all that was waited for here went well."""
        sound = True
        while self._left:
            copies, _ = self._left.pop()
            try:
                copies.wait()
            except Exception:  # noqa: BLE001 - who waited first has raised it, or nobody wants the bytes
                sound = False
        if self._lost:
            try:
                self.sources.synchronize()
            except Exception:  # noqa: BLE001
                sound = False
        return sound


def _parts(ranges: list[Range]) -> Iterator[list[Range]]:
    part: list[Range] = []
    room = PART
    for index, first, address, nbytes in ranges:
        done = 0
        while done < nbytes:
            size = min(nbytes - done, room)
            part.append((index, first + done, address + done, size))
            done += size
            room = (room - size) // _ELEMENT * _ELEMENT
            if not room:
                yield part
                part, room = [], PART
    if part:
        yield part
