"""Waiting without a lock that a signal handler could find taken."""

from __future__ import annotations

import contextlib
import time
from _thread import allocate_lock
from typing import Any


class Gate:
    """A one-way flag to wait for: like ``threading.Event``, and safe inside signal handlers.

    A handler runs on top of whatever its thread was doing, also on top of a wait for the same gate. So no waiter holds
    anything that another could want: each brings a lock of its own, and the list of them changes in atomic steps.
    """

    __slots__ = ("_open", "_waiters")

    def __init__(self) -> None:
        self._open = False
        self._waiters: list[Any] = []

    def open(self) -> None:
        """Let everybody through, now and for ever."""
        self._open = True
        while True:
            try:
                waiter = self._waiters.pop()
            except IndexError:
                return
            waiter.release()

    def is_open(self) -> bool:
        """Whether nobody has to wait."""
        return self._open

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is open; whether it is."""
        if self._open:
            return True
        waiter = allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        # It may have opened before the waiter was in the list, and then nobody would release that.
        if not self._open:
            # Signal handlers run meanwhile; an exception of theirs comes out here.
            deadline = None if timeout is None else time.monotonic() + timeout
            try:
                while not self._open:
                    left = -1.0 if deadline is None else deadline - time.monotonic()
                    if deadline is not None and left <= 0:
                        break
                    # A lock cannot wait for centuries.
                    waiter.acquire(timeout=-1 if deadline is None else min(left, 1e6))
            finally:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
        return self._open
