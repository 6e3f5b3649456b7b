"""A gate that opens once, and measures how long it held those who came before."""

from __future__ import annotations

import time

from fastckpt._api.event import Event


class Gate:
    """An event whose waiters' time is counted, and complete when they go on, whichever thread runs first then."""

    __slots__ = ("_event", "_since", "seconds")

    def __init__(self) -> None:
        self._event = Event()
        #: The time at which each waiting thread began to wait.
        self._since: dict[object, float] = {}
        self.seconds = 0.0

    def is_open(self) -> bool:
        """Whether it is open."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is open; whether it is."""
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
        """Release all waiters, now and for ever."""
        now = time.perf_counter()
        for token in tuple(self._since):
            since = self._since.pop(token, None)
            if since is not None:
                self.seconds += now - since
        self._event.set()
