"""A directory for trials, removed even if a signal ends the process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


#: Signals that end a process; Windows has no SIGHUP.
_ENDING = [signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _Ended(BaseException):
    """A signal that ends the process has arrived."""


class Signals:
    """A context that makes SIGINT, SIGTERM and SIGHUP raise, or holds them while ``held``; at its end, it resends them.

    It handles only signals with their default effect, and only in the main thread: no other thread receives signals.
    """

    def __init__(self, *, held: bool = False) -> None:
        self.held = held
        self._arrived: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:  # noqa: PYI034 - Self is younger than Python 3.10
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                before = signal.getsignal(number)
                if before in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = before
                    signal.signal(number, self._arrive)
        return self

    def _arrive(self, number: int, _: FrameType | None) -> None:
        self._arrived = number
        if not self.held:
            raise _Ended

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._arrived is not None:
            signal.raise_signal(self._arrived)


@contextlib.contextmanager
def scratch(directory: str | os.PathLike[str], tool: str) -> Iterator[tuple[Path, contextlib.ExitStack]]:
    """A context with a temporary directory, removed even after Ctrl-C or a termination signal.

    The exit callbacks of the context run before the directory is removed, and no signal comes in between.
    """
    path = Path(directory, f".fastckpt-{tool}-{os.getpid()}-{os.urandom(8).hex()}")
    ending = contextlib.ExitStack()
    with Signals() as signals:
        # A signal may come just after the directory is made, or just before it is removed.
        try:
            try:
                path.mkdir(mode=0o700)
                yield path, ending
            finally:
                signals.held = True
        finally:
            ending.close()
            shutil.rmtree(path, ignore_errors=True)
