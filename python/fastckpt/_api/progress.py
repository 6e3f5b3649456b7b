"""Progress of a long operation: a bar on request, and a line in the log every few seconds.

The progress callback, called about ten times a second, also notices when the deadline of an operation has passed.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from fastckpt._text import size

from .outcome import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds between progress lines in the log: a shorter operation logs only its report.
LOG_INTERVAL = 10.0

#: The deadline of the operations in this context, by time.monotonic.
_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Make operations of the calling thread that are unfinished at a deadline raise TimeoutError and undo their work.

    Args:
        deadline: by ``time.monotonic``; infinite for no deadline.
    """
    if time.monotonic() >= deadline:
        raise TimeoutError("no time is left")
    before = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(before)


@contextmanager
def ticker(label: str, path: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A callback ``(done, total)``, in bytes, for the core to call about ten times a second."""
    log = _log(label, path)
    if not shown:
        yield log
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 - only a call with a bar pays for it

    with tqdm(desc=label, unit="B", unit_scale=True, total=0) as bar:

        def tick(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            log(done, total)

        yield tick


def _log(label: str, path: str) -> Callable[[int, int], None]:
    began = time.monotonic()
    due = began + LOG_INTERVAL
    deadline = _deadline.get()

    def tick(done: int, total: int) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= deadline:
            raise TimeoutError(f"{label}: {path}: not finished before its deadline; nothing of it was kept")
        if now < due:
            return
        due = now + LOG_INTERVAL
        rate = done / (now - began)
        left = f"about {(total - done) / rate:.0f} s left" if rate else "no progress"
        share = 100 * done / total if total else 0.0
        logger.info(
            "%s: %s of %s (%.0f %%) after %.0f s, %.2f GB/s, %s: %s",
            *(label, size(done), size(total), share, now - began, rate / 1e9, left, path),
        )

    return tick
