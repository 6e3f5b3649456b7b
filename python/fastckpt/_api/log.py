"""The log, which threads of fastckpt write to as well: who hears of an error that nobody listens for, and forks."""

from __future__ import annotations

import contextlib
import logging
import os
from threading import RLock

_logger = logging.getLogger("fastckpt")
_writing = RLock()
#: Seconds that a fork waits for a line. Longer only where whatever writes it waits for the thread that forks.
_WAIT = 5.0


class LastWord(logging.NullHandler):
    """Silent, as a library has to be, except for errors in a program that has configured no logging.

    Such a program would never hear of a save that fails in the background: Python's last-resort handler is off as soon
    as a library has a handler of its own, even a silent one.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)

    def handle(self, record: logging.LogRecord) -> bool:
        """Give an error to Python's last resort, which writes to stderr, unless another handler takes it."""
        at: logging.Logger | None = logging.getLogger(record.name)
        while at is not None:
            if not all(isinstance(handler, logging.NullHandler) for handler in at.handlers):
                return False
            at = at.parent if at.propagate else None
        if logging.lastResort is not None:
            logging.lastResort.handle(record)
        return True


def set_up() -> None:
    """Keep forks out of lines, and tell errors where no logging is configured."""
    _logger.addHandler(LastWord())
    _logger.handle = _handle  # type: ignore[method-assign]


def _handle(record: logging.LogRecord) -> None:
    with _writing:
        logging.Logger.handle(_logger, record)


# Who writes a line holds the lock of the stream, as of stderr, which Python does not free in a child: one that was
# forked meanwhile would hang when it flushes the stream, at the latest at its end. So a fork waits for the line.
def _in_parent() -> None:
    with contextlib.suppress(RuntimeError):  # it did not get the lock in time
        _writing.release()


def _in_child() -> None:
    global _writing  # noqa: PLW0603 - that of another thread may have been taken
    _writing = RLock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=lambda: _writing.acquire(timeout=_WAIT), after_in_parent=_in_parent, after_in_child=_in_child
    )
