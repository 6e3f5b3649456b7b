"""The devices that a save copies from, and its snapshot's memory, to which no device may write after the save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastckpt._api import host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fastckpt._tensors.movers import Copies, Range, Sources

#: Bytes per request: the granularity of progress and cancellation, and of steps before memory is pinned.
PART = 1 << 30
#: The most bytes of an element: the parts of a tensor must begin at whole elements.
_ELEMENT = 16


def mask(sources: Sources, count: int, *, on_device: bool) -> bytes:
    """A byte per number below ``count``: whether its bytes are on a device, or if not ``on_device``, on the host."""
    found = bytearray([not on_device]) * count
    for index in sources.movers:
        found[index] = sources.is_on_device(index) == on_device
    return bytes(found)


class Devices:
    """The copies that a save requests from devices; made at the call, so that copies follow the streams' earlier work.

    Args:
        sources: copies tensors without an address.
        pin: the most bytes that may be pinned in this process; None for any number.
    """

    def __init__(self, sources: Sources, pin: int | None) -> None:
        self.sources = sources
        self.is_on_device = sources.is_on_device
        self.memory: host_memory.Memory | None = None
        self._pin = pin
        #: Copies that were requested and have not been waited for, and their bytes.
        self._left: list[tuple[Copies, int]] = []
        #: Whether an exception was raised during a request for copies, or before they were recorded here.
        self._lost = False
        self._is_sound = True

    def take(self, nbytes: int) -> host_memory.Memory:
        """Memory for a snapshot."""
        self.memory = host_memory.take(nbytes)
        return self.memory

    def must_pin(self) -> bool:
        """Whether :meth:`pin` has still to begin."""
        return self.memory is not None and bool(self.sources.devices) and self.memory.must_pin(self._pin)

    def pin(self) -> None:
        """Pin the memory in the background. Copies wait for the parts that they need. No copy may be in progress."""
        if self.memory is not None:
            self.memory.pin(self.sources.devices, self._pin)

    @property
    def is_pinned(self) -> bool:
        """Whether requested copies proceed without the host.

        For other memory, the host may have to wait for each copy: CUDA fills such memory before it returns, and devices
        without pinning give no guarantee.
        """
        memory = self.memory
        return memory is not None and memory.registration is not None and memory.is_pinned()

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warning for a report about memory that could not be pinned; none after ``pin=False``."""
        if self.memory is None or not self.sources.devices or self.memory.problem is None:
            return ()
        return (self.memory.problem,)

    def ask(self, ranges: Iterable[Range], go_on: Callable[[], object] = lambda: None) -> list[Copies]:
        """Request copies, in the order of their addresses; ``go_on`` is called before each part and may raise."""
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
        """Wait for all copies; ``arrived`` is called with the bytes of each part that has arrived.

        Raises:
            Exception: a device has failed, or ``arrived`` raises. The other copies must still be waited for.
        """
        while self._left:
            copies, nbytes = self._left[0]
            copies.wait()
            del self._left[0]
            arrived(nbytes)

    def settle(self) -> bool:
        """Wait until nothing writes to the memory; returns whether all copies succeeded.

        This waits only after a save has failed. So any other exception meanwhile, even from a signal handler, is
        chained to the error that the caller gets.
        """
        while self._left:
            try:
                self._left[-1][0].wait()
            except BaseException:  # noqa: BLE001 - the copies have ended in any case
                self._is_sound = False
            # Remove it only now: the list must name the copies in progress.
            self._left.pop()
        if self._lost:
            self._lost = False
            try:
                self.sources.synchronize()
            except BaseException:  # noqa: BLE001 - as above
                self._is_sound = False
        return self._is_sound

    def give_back(self) -> None:
        """Give the memory back once no copy writes to it."""
        memory, self.memory = self.memory, None
        sound = self.settle()
        if memory is not None:
            # Memory to which a failed device was writing must not be reused.
            (memory.give if sound else memory.close)()


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
