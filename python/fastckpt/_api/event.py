"""An event to wait for that is safe inside signal handlers."""

from __future__ import annotations

import contextlib
import time
from _thread import allocate_lock
from typing import Any


class Event:
    """Like ``threading.Event``, but never cleared, and safe inside signal handlers.

    A handler may interrupt anything in its thread, even a wait for the same event. So no waiter holds a lock that
    another could need: each has its own lock, and the list of locks changes in atomic steps.
    """

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Any] = []

    def set(self) -> None:
        """Release all waiters, present and future."""
        self._set = True
        while True:
            try:
                waiter = self._waiters.pop()
            except IndexError:
                return
            waiter.release()

    def is_set(self) -> bool:
        """Whether the event is set."""
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, or the time is up; return whether it is set."""
        if self._set:
            return True
        waiter = allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        # If the event was set before the waiter joined the list, nothing would release the waiter.
        if not self._set:
            # Signal handlers run meanwhile; their exceptions are raised here.
            deadline = None if timeout is None else time.monotonic() + timeout
            try:
                while not self._set:
                    left = -1.0 if deadline is None else deadline - time.monotonic()
                    if deadline is not None and left <= 0:
                        break
                    # A lock refuses a timeout of centuries.
                    waiter.acquire(timeout=-1 if deadline is None else min(left, 1e6))
            finally:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
        return self._set
