"""What the tools' tests share: the child that looks at a file of torch's, forked and not started."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from fastckpt._tools.convert import pickled as _pickled
from harness import jobs, zygote


@pytest.fixture(scope="session")
def looker():
    """Has imported what the child imports before it reads: torch alone takes seconds."""
    modules = "fastckpt._tensors.torch,fastckpt._tools.convert.pickled,fastckpt._tools.convert.distributed"
    with zygote.running(env={"FASTCKPT_TEST_IMPORT": modules, "PYTHONWARNINGS": ""}) as made:
        yield made


@pytest.fixture
def quick_look(looker, monkeypatch):
    """``convert`` looks at a file in a forked child: the same function, in a process of its own, under its limits.

    How the child is started is for the tests that do without this.
    """

    def run(command: list[str], *, pass_fds: list[int], **_: Any) -> subprocess.CompletedProcess[bytes]:
        path = command[3]
        # A descriptor of this process, opened anew: the file is the same.
        answer = f"/proc/{os.getpid()}/fd/{pass_fds[0]}"
        # The limits of this process, where a test may have lowered them.
        limits = {"memory": _pickled._MEMORY, "seconds": _pickled._SECONDS}
        child = looker.start("look_first", path=path, answer=answer, **limits)
        try:
            outcome = child.outcome(120)
        except zygote.DiedError:
            status = os.waitstatus_to_exitcode(child.wait())
            if status == jobs.OUT_OF_MEMORY:
                # Python has these words ready.
                return subprocess.CompletedProcess(command, 1, b"", b"MemoryError\n")
            return subprocess.CompletedProcess(command, status, b"", b"")
        raised = f"{outcome.kind}: {outcome.text}".encode()
        child.wait()
        return subprocess.CompletedProcess(command, 1, b"", raised)

    # The module alone, not the functions of subprocess that others use.
    monkeypatch.setattr(_pickled, "subprocess", _Subprocess(run))


class _Subprocess:
    DEVNULL, PIPE = subprocess.DEVNULL, subprocess.PIPE

    def __init__(self, run: Any) -> None:
        self.run = run
