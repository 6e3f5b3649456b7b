"""The time for which this machine did not run, because a host paused it or no thread got the overloaded CPU.

Deadlines of tests assume a running machine, so tests add this time to them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_LOOK = 0.05
# Shorter delays happen on any machine.
_SHORT = 0.25


class Stillness:
    """The delays of a thread that only sleeps. Use :func:`watched`."""

    def __init__(self) -> None:
        self._pauses: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def since(self, moment: float) -> float:
        """Seconds for which the machine did not run since ``time.monotonic()`` had this value."""
        return sum(seconds for ended, seconds in self._pauses if ended > moment)

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(_LOOK):
            now = time.monotonic()
            if now - before - _LOOK > _SHORT:
                self._pauses.append((now, now - before - _LOOK))
            before = now


@contextlib.contextmanager
def watched() -> Iterator[Stillness]:
    """Watch during the ``with`` statement."""
    stillness = Stillness()
    try:
        yield stillness
    finally:
        stillness.end()
