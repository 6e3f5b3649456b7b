"""The log of fastckpt: errors in a program without logging, and forks while another thread writes a line."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from threading import get_ident

from .event import Event

_logger = logging.getLogger("fastckpt")
#: Lines that are being written: by which thread, and what is set once it is done.
_lines: list[tuple[int, Event]] = []
#: The most seconds that a fork waits for a line: its writer may be waiting for the thread that forks.
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
    # No lock: a signal handler may log on top of a thread that holds one of logging's, for which other threads wait.
    line = get_ident(), Event()
    _lines.append(line)
    try:
        logging.Logger.handle(_logger, record)
    finally:
        with contextlib.suppress(ValueError):  # in a child, which has none
            _lines.remove(line)
        line[1].set()


def _before_fork() -> None:
    """Wait for lines of other threads.

    A thread that writes one holds the lock of the stream. Python does not reset that lock in a child, so a child that
    is forked meanwhile would hang when it flushes the stream, at its end at the latest.
    """
    until = time.monotonic() + _WAIT
    while others := [written for writer, written in tuple(_lines) if writer != get_ident()]:
        if not others[0].wait(until - time.monotonic()):
            return


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_before_fork, after_in_child=_lines.clear)
