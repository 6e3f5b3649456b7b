"""The log of fastckpt: errors in a program without logging, and forks while another thread writes a line."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from threading import get_ident

from .event import Event

_logger = logging.getLogger("fastckpt")
#: For each line that is being written: its thread, and the event that is set when the line is written.
_lines: list[tuple[int, Event]] = []
#: The most seconds that a fork waits for a line, whose writer may be waiting for the thread that forks.
_WAIT = 5.0


class LastWord(logging.NullHandler):
    """A handler that is silent, as in any library, except for errors in a program without logging.

    Such a program would never see that a save in the background failed: a library's own handler, even a silent one,
    turns off Python's last-resort handler.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)

    def handle(self, record: logging.LogRecord) -> bool:
        """Pass an error to Python's last resort, which writes to stderr, unless another handler handles it."""
        at: logging.Logger | None = logging.getLogger(record.name)
        while at is not None:
            if not all(isinstance(handler, logging.NullHandler) for handler in at.handlers):
                return False
            at = at.parent if at.propagate else None
        if logging.lastResort is not None:
            logging.lastResort.handle(record)
        return True


def set_up() -> None:
    """Prevent forks while a line is written, and write errors to stderr if no logging is configured."""
    _logger.addHandler(LastWord())
    _logger.handle = _handle  # type: ignore[method-assign]


def _handle(record: logging.LogRecord) -> None:
    # This takes no lock: a signal handler may log in a thread that holds a lock of logging, for which others wait.
    line = get_ident(), Event()
    _lines.append(line)
    try:
        logging.Logger.handle(_logger, record)
    finally:
        with contextlib.suppress(ValueError):  # in a child, whose list is empty
            _lines.remove(line)
        line[1].set()


def _before_fork() -> None:
    """Wait until other threads have written their lines.

    The writing thread holds the lock of the stream. Python does not reset that lock in a child. So a child that is
    forked meanwhile would hang when it flushes the stream, at the latest when it exits.
    """
    until = time.monotonic() + _WAIT
    while others := [written for writer, written in tuple(_lines) if writer != get_ident()]:
        if not others[0].wait(until - time.monotonic()):
            return


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_before_fork, after_in_child=_lines.clear)
