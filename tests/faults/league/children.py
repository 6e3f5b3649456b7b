"""Processes that are forked after the import of a library: they train, resume, and are killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

#: Seconds after which a process counts as hung.
HUNG = 60.0


class End(NamedTuple):
    """The outcome of a process: ``returned``, ``raised``, ``killed`` or ``hung``, and its result or error."""

    how: str
    value: Any = None


class Child:
    """A forked process that calls ``work`` with a function that reports steps.

    With ``note``, the process continues after a step only once ``note`` was called with the step.

    Attributes:
        told: the reported steps.
    """

    def __init__(self, work: Callable[[Callable[[int], None]], Any], note: Callable[[int], None] | None = None) -> None:
        self.told: list[int] = []
        self._end: End | None = None
        self._rest = b""
        self._note = note
        self._out, out = os.pipe()
        go_on, self._go_on = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(out)
            os.close(go_on)
            return

        def tell(step: int) -> None:
            _tell(out, step)
            if note is not None:
                os.read(go_on, 1)

        status = 1
        with contextlib.suppress(BaseException):
            os.setsid()  # its child processes end with it
            silent = os.open(os.environ.get("LEAGUE_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            _tell(out, _run(work, tell))
            status = 0
        os._exit(status)

    def read(self, until: float, steps: int = 10**9) -> None:
        """Read the process's reports until it ends, has reported so many steps, or time.monotonic() reaches a time."""
        while self._end is None and len(self.told) < steps:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._out], [], [], left)[0]:
                return
            data = os.read(self._out, 1 << 16)
            if not data:
                os.waitpid(self.pid, 0)
                self._end = End("killed")
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                said = json.loads(line)
                if isinstance(said, int):
                    self.told.append(said)
                    if self._note is not None:
                        self._note(said)
                        os.write(self._go_on, b".")
                else:
                    os.waitpid(self.pid, 0)
                    self._end = End(*said)

    def kill(self) -> None:
        """SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, seconds: float = HUNG) -> End:
        """Wait for the end of the process; kill it if it hangs."""
        self.read(time.monotonic() + seconds)
        if self._end is None:
            self.kill()
            self.read(time.monotonic() + HUNG)
            self._end = End("hung")
        self.kill()
        os.close(self._out)
        os.close(self._go_on)
        return self._end


def _run(work: Callable[[Callable[[int], None]], Any], tell: Callable[[int], None]) -> tuple[str, Any]:
    try:
        return "returned", work(tell)
    except Exception as error:  # noqa: BLE001 - what a library raises is its answer
        return "raised", f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _tell(out: int, said: Any) -> None:
    os.write(out, json.dumps(said).encode() + b"\n")
