"""Threads that read files of a checkpoint block by block, compute checksums, and pass the blocks to a destination."""

from __future__ import annotations

import mmap
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from fastckpt import _crc64
from fastckpt.exceptions import CorruptCheckpointError

from .pace import INTERVAL, THREADS
from .sources import Summed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from .pace import Pace
    from .sources import Bytes, Item, Opened, Source

_T = TypeVar("_T")

#: Bytes of a huge page.
_HUGE = 2 << 20


def memory_of(nbytes: int) -> Bytes:
    """New memory that begins at a page, or, if large, at a huge page: a device needs few segments for huge pages."""
    if nbytes < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)
    # Python's default is shared memory, which has no huge pages.
    mapped = mmap.mmap(-1, nbytes + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    begin = -memory.ctypes.data % _HUGE
    return memory[begin : begin + nbytes]


class UnreadableError(Exception):
    """A file is damaged, missing or unreadable.

    Attributes:
        error: the reason.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Sink(Protocol):
    """The destination of one file, block by block."""

    def put(self, start: int, data: Bytes) -> int:
        """Accept the bytes that begin at ``start``, and return their CRC-64. Threads may call this concurrently."""

    def end(self, opened: Opened) -> None:
        """End the file: all bytes have arrived and are correct."""

    def drop(self) -> None:
        """Discard the file: its bytes are wrong, or will not arrive."""


class _File:
    """A file that is being copied."""

    def __init__(self, item: Item, source: Source, make: Callable[[Item], Sink], block: int) -> None:
        self.item = item
        self.summed = Summed(source.path_of(item.name), item, block)
        self.error: BaseException | None = None
        self.moved = 0
        self._left = len(self.summed.blocks)
        self._source = source
        self._make = make
        self._opened: Opened | None = None
        self._sink: Sink | None = None
        self._lock = Lock()

    def move(self, number: int, memory: Bytes, pace: Pace) -> None:
        """Move a block; with the last one, end the file."""
        try:
            with self._lock:
                if self.error is not None:
                    return
                if self._sink is None:
                    self._opened = readable(lambda: self._source.open(self.item))
                    self._sink = self._make(self.item)
            start, nbytes = self.summed.blocks[number]
            opened, sink, data = self._opened, self._sink, memory[:nbytes]
            assert opened is not None  # noqa: S101 - it is opened before the sink is made
            pace.wait(nbytes)
            readable(lambda: opened.read_into(start, data))
            self.summed.put(number, sink.put(start, data))
            pace.moved(nbytes)
            with self._lock:
                self.moved += nbytes
                self._left -= 1
                if self._left or self.error is not None:
                    return
                readable(self.summed.compare)
            sink.end(opened)
            opened.close()
        except BaseException as error:  # noqa: BLE001 - the error is the file's
            with self._lock:
                self.error = self.error or error

    def close(self) -> None:
        """Remove incomplete files, after all threads have stopped."""
        if self.error is None and not self._left:
            return
        if self._sink is not None:
            self._sink.drop()
        if self._opened is not None:
            self._opened.close()


def readable(read: Callable[[], _T]) -> _T:
    """The result of ``read``; UnreadableError if it fails."""
    try:
        return read()
    except (CorruptCheckpointError, OSError) as error:
        raise UnreadableError(error) from error


def watched(jobs: Sequence[Callable[[], None]], pace: Pace) -> None:
    """Run each job in a separate thread, while the calling thread reports progress and checks whether to stop.

    Raises:
        CancelledError: the copy was cancelled.
        Exception: a job failed; the others have ended, too.
    """
    if not jobs:
        return
    with ThreadPoolExecutor(len(jobs), "fastckpt") as pool:
        try:
            working = {pool.submit(job) for job in jobs}
            while working:
                ended, working = wait(working, INTERVAL, FIRST_EXCEPTION)
                for one in ended:
                    one.result()
                pace.look()
        except BaseException:
            pace.halt()
            raise


def move(items: Sequence[Item], source: Source, make: Callable[[Item], Sink], pace: Pace) -> dict[str, Exception]:
    """Read ``items`` from ``source`` and put each into the sink that ``make`` makes.

    Returns:
        The files that could not be read, by name, and why.

    Raises:
        CancelledError: the copy was cancelled.
        Exception: a sink failed.
    """
    files = [_File(item, source, make, pace.block) for item in items]
    blocks = deque((file, number) for file in files for number in range(len(file.summed.blocks)))
    threads = min(pace.threads, len(blocks))

    def work() -> None:
        memory = memory_of(min(pace.block, max(item.nbytes for item in items)))
        while blocks:
            try:
                file, number = blocks.popleft()
            except IndexError:
                return
            file.move(number, memory, pace)
            if file.error is not None and not isinstance(file.error, UnreadableError):
                pace.halt()
                return

    try:
        watched([work] * threads, pace)
    finally:
        for file in files:
            file.close()
    return _failures(files, pace)


def _failures(files: Iterable[_File], pace: Pace) -> dict[str, Exception]:
    """The files that could not be read. Other errors are raised."""
    wrong = [file.error for file in files if file.error is not None and not isinstance(file.error, UnreadableError)]
    # Threads that another thread stopped report only the stop: their errors come last.
    for error in sorted(wrong, key=lambda error: isinstance(error, CancelledError)):
        raise error
    found = {}
    for file in files:
        if isinstance(file.error, UnreadableError):
            pace.moved(-file.moved)
            found[file.item.name] = file.error.error
    return found


def ahead(item: Item, source: Source, opened: Opened, pace: Pace) -> Iterator[Bytes]:
    """The blocks of a file in order, read ahead by threads. Each is valid until the next one is requested.

    Raises:
        UnreadableError: the file is damaged; raised before the last block is returned.
        CancelledError: the copy was cancelled.
    """
    summed = Summed(source.path_of(item.name), item, pace.block)
    memories = [memory_of(min(pace.block, item.nbytes)) for _ in range(min(THREADS, len(summed.blocks)))]

    def read(number: int, memory: Bytes) -> Bytes:
        start, nbytes = summed.blocks[number]
        pace.wait(nbytes)
        data = memory[:nbytes]
        readable(lambda: opened.read_into(start, data))
        summed.put(number, _crc64.of(data))
        return data

    reading: deque[Future[Bytes]] = deque()
    with ThreadPoolExecutor(len(memories), "fastckpt") as pool:
        try:
            for number in range(len(memories)):
                reading.append(pool.submit(read, number, memories[number]))
            for number in range(len(summed.blocks)):
                data = reading.popleft().result()
                if number == len(summed.blocks) - 1:
                    readable(summed.compare)
                yield data
                following = number + len(memories)
                if following < len(summed.blocks):
                    reading.append(pool.submit(read, following, memories[number % len(memories)]))
        finally:
            for one in reading:
                one.cancel()


def sum_of(item: Item, source: Source, opened: Opened, pace: Pace) -> str:
    """The checksum of a file whose checksum is not known."""
    summed = Summed(source.path_of(item.name), item, pace.block)
    memory = memory_of(min(pace.block, item.nbytes))
    for number, (start, nbytes) in enumerate(summed.blocks):
        data = memory[:nbytes]
        pace.wait(0)
        readable(lambda: opened.read_into(start, data))  # noqa: B023 - called at once
        summed.put(number, _crc64.of(data))
    return summed.found()
