"""What a long operation shows while it runs: a bar on request, and a line in the log every few seconds."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fastckpt._text import size

from .outcome import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds between lines in the log: of an operation shorter than this the log has only the report.
LOG_INTERVAL = 10.0


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

    def tick(done: int, total: int) -> None:
        nonlocal due
        now = time.monotonic()
        if now < due:
            return
        due = now + LOG_INTERVAL
        rate = done / (now - began)
        left = f"about {(total - done) / rate:.0f} s left" if rate else "nothing moves"
        share = 100 * done / total if total else 0.0
        logger.info(
            "%s: %s of %s (%.0f %%) after %.0f s, %.2f GB/s, %s: %s",
            *(label, size(done), size(total), share, now - began, rate / 1e9, left, path),
        )

    return tick
