"""Makes ``fastckpt import`` examine files of torch in a fork: an interpreter takes seconds to import torch."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

from harness import jobs, limits, points


class Subprocess:
    """A stand-in for the part of the module ``subprocess`` that the command uses."""

    DEVNULL, PIPE = subprocess.DEVNULL, subprocess.PIPE

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


def least() -> dict[str, int]:
    """The current limits for the child, which a test may have lowered."""
    return {"memory": limits.of("bytes of a look"), "seconds": limits.of("seconds of a look")}


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """A context in which the child is a fork of this process, with torch, that runs the function under its limits."""

    def run(command: list[str], *, pass_fds: list[int], **_: Any) -> subprocess.CompletedProcess[bytes]:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                jobs.look_first(None, path=command[3], answer=f"/proc/self/fd/{pass_fds[0]}", **least())
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return subprocess.CompletedProcess(command, status, b"", b"")

    # Only fastckpt's name `subprocess` is replaced, not the functions that others use.
    with points.replaced(points.LOOK, lambda _: Subprocess(run)):
        yield
