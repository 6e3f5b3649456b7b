"""How long this machine has stood still: a virtual one is paused by its host, a full one gives nobody a turn.

What a deadline says of the code is said of a machine that runs, so a test adds this to it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_LOOK = 0.05
# A shorter delay is what any machine has.
_SHORT = 0.25


class Stillness:
    """What a thread that only sleeps has seen. Use :func:`watched`."""

    def __init__(self) -> None:
        self._pauses: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def since(self, moment: float) -> float:
        """Seconds for which it has stood still since then (``time.monotonic``)."""
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
    """Watch for as long as the block lasts."""
    stillness = Stillness()
    try:
        yield stillness
    finally:
        stillness.end()
