"""A gate that opens once, and measures how long it blocked waiters."""

from __future__ import annotations

import time

from fastckpt._api.event import Event


class Gate:
    """An event that counts the time of its waiters; the count is complete before any of them continues."""

    __slots__ = ("_event", "_since", "seconds")

    def __init__(self) -> None:
        self._event = Event()
        #: The time at which each waiting thread began to wait.
        self._since: dict[object, float] = {}
        self.seconds = 0.0

    def is_open(self) -> bool:
        """Whether the gate is open."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the gate is open, or the time is up; return whether it is open."""
        if self._event.is_set():
            return True
        token = object()
        self._since[token] = time.perf_counter()
        try:
            return self._event.wait(timeout)
        finally:
            since = self._since.pop(token, None)  # unless ``open`` has counted it
            if since is not None:
                self.seconds += time.perf_counter() - since

    def open(self) -> None:
        """Release all waiters, present and future."""
        now = time.perf_counter()
        for token in tuple(self._since):
            since = self._since.pop(token, None)
            if since is not None:
                self.seconds += now - since
        self._event.set()
