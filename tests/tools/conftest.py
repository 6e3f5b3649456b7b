"""Fixtures for tests of the tools: the child that examines a file of torch is forked, not started anew."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

import fastckpt
from harness import cli, jobs, looks, points, zygote


@pytest.fixture(scope="session")
def looker():
    """A process that has imported what the child needs: torch alone takes seconds."""
    with zygote.running(env={"FASTCKPT_TEST_IMPORT": jobs.LOOKING, "PYTHONWARNINGS": ""}) as made:
        yield made


@pytest.fixture
def quick_look(looker):
    """Have ``import`` examine files in a forked child: the same function in a separate process, under the same limits.

    Tests without this fixture cover how the child is started.
    """

    def run(command: list[str], *, pass_fds: list[int], **_: Any) -> subprocess.CompletedProcess[bytes]:
        path = command[3]
        # The child opens a descriptor of this process again, which leads to the same file.
        answer = f"/proc/{os.getpid()}/fd/{pass_fds[0]}"
        child = looker.start("look_first", path=path, answer=answer, **looks.least())
        try:
            outcome = child.outcome(120)
        except zygote.DiedError:
            status = os.waitstatus_to_exitcode(child.wait())
            if status == jobs.OUT_OF_MEMORY:
                # Python preallocates this text.
                return subprocess.CompletedProcess(command, 1, b"", b"MemoryError\n")
            return subprocess.CompletedProcess(command, status, b"", b"")
        raised = f"{outcome.kind}: {outcome.text}".encode()
        child.wait()
        return subprocess.CompletedProcess(command, 1, b"", raised)

    with points.replaced(points.LOOK, lambda _: looks.Subprocess(run)):
        yield


@pytest.fixture
def import_(quick_look, capsys):
    """Run the command in this process; its child is forked, under its limits."""
    return lambda *arguments: _done(capsys, "import", *arguments)


@pytest.fixture
def export(capsys):
    return lambda *arguments: _done(capsys, "export", *arguments)


def _done(capsys, *arguments):
    capsys.readouterr()
    status = cli.main([*map(str, arguments)])
    return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())


@pytest.fixture
def where(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "counters").mkdir(mode=0o700)
    return tmp_path / "there"


@pytest.fixture
def compared(tmp_path, capsys):
    """A function that saves two states and returns the output of ``fastckpt diff``, as JSON and on the screen."""

    def run(before, after):
        for name, state in (("a", before), ("b", after)):
            fastckpt.save(state, tmp_path / name, overwrite=True)
        assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
        return document, capsys.readouterr().out

    return run
