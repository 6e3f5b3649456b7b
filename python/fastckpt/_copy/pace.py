"""The rate limit, the progress and the cancellation of a copy."""

from __future__ import annotations

import errno
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager
from threading import Event, Lock
from typing import TYPE_CHECKING, TypeAlias

from fastckpt import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Stop: TypeAlias = Callable[[], bool]
    Tick: TypeAlias = Callable[[int, int], None]

#: Bytes per request: enough for any disk, and one part of an object.
BLOCK = 8 << 20
#: Threads that move blocks. One or two keep a disk busy; a store needs more.
THREADS = 4
#: Bytes per second for which one thread is enough under a limit: fewer threads disturb other programs less.
_PER_THREAD = 500e6
_PAGE = 4096
#: Under a limit, the most seconds for one block, which bounds the length of bursts.
_BURST = 0.1
_LEAST = 64 << 10
#: The most seconds lost to a slow disk that a copy makes up for.
_SLACK = 0.1
#: Seconds between two checks whether to stop.
INTERVAL = 0.1


class Pace:
    """Paces all threads of one copy.

    ``wait`` and ``moved`` are for the threads, ``look`` is for the calling thread.

    Args:
        limit: bytes per second, or None.
        stop: whether to stop; called by the thread that called the copy, about ten times a second.
        tick: called at the same times, with the bytes done and the total.

    Attributes:
        block: bytes to move at a time.
        threads: the most threads that move blocks to or from a disk.
        done: bytes that have been moved, or did not need to be.
        total: bytes in all.
        reused: bytes of ``done`` that were at the target already.
    """

    def __init__(self, limit: float | None, stop: Stop | None, tick: Tick | None) -> None:
        self.block = BLOCK
        self.threads = THREADS
        if limit is not None:
            self.threads = min(THREADS, 1 + int(min(limit / _PER_THREAD, THREADS)))
            self.block = min(BLOCK, max(_LEAST, int(limit * _BURST) // _PAGE * _PAGE))
        self.done = 0
        self.total = 0
        self.reused = 0
        self._counters: _core.Operation | None = None
        self._limit = limit
        self._stop = stop
        self._tick = tick
        self._paid = 0.0
        self._lock = Lock()
        self._stopped = Event()

    def book(self, nbytes: int, now: float) -> float:
        """Seconds to wait before ``nbytes`` may be moved."""
        if self._limit is None:
            return 0.0
        with self._lock:
            self._paid = max(self._paid, now - _SLACK) + nbytes / self._limit
            return self._paid - now

    def wait(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may be moved.

        Raises:
            CancelledError: the copy was cancelled.
        """
        delay = self.book(nbytes, time.monotonic())
        if self._stopped.wait(delay) if delay > 0 else self._stopped.is_set():
            raise CancelledError

    def moved(self, nbytes: int) -> None:
        """Count ``nbytes``, which may be negative: for a file that must be moved again."""
        with self._lock:
            self.done += nbytes

    def look(self) -> None:
        """Report the progress, and check for cancellation.

        Raises:
            CancelledError: the copy was cancelled; its threads stop, too.
        """
        try:
            self._count()
            if self._tick is not None:
                self._tick(self.done, self.total)
            if self._stop is not None and self._stop():
                raise CancelledError  # noqa: TRY301 - handled like errors of `tick`
        except BaseException:
            self.halt()
            raise

    @contextmanager
    def shown(self, kind: str, target: str, step: int | None, *, whole: bool) -> Iterator[None]:
        """A context in which the live counters show the copy; ``whole`` if it publishes the checkpoint."""
        self._counters = counters = _core.begin_copy(kind, target, step)
        try:
            yield
        except BaseException as error:
            if counters is not None:
                why = error.errno if isinstance(error, OSError) else None
                counters.fail(errno.ECANCELED if isinstance(error, CancelledError) else why)
            raise
        if counters is not None:
            self._count()
            counters.end_copy(whole)

    def _count(self) -> None:
        if self._counters is not None and self.total:
            self._counters.copied(max(0, self.done - self.reused), max(0, self.total - self.reused))

    def halt(self) -> None:
        """Make the threads stop."""
        self._stopped.set()
