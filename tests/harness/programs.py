"""Runs Python programs in forks of a process that has imported torch, which takes seconds.

Each file that uses this module has a test that starts a program as a user does, too.
"""

# ruff: noqa: BLE001 - every exception of a program is part of its result

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.context
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.zygote import Channel, DiedError, Zygote


def run(
    children: Zygote,
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    forks: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``command``, a script and its arguments, to its end, like ``subprocess.run`` with ``capture_output`` in
    an interpreter. The output is text that keeps carriage returns. ``forks``: processes that the program spawns with
    multiprocessing are forked."""
    arguments = list(map(str, command))
    with tempfile.TemporaryDirectory(prefix="fastckpt-program-") as said:
        child = children.start(
            "harness.programs:play",
            arguments=arguments,
            env=dict(os.environ if env is None else env),
            cwd=str(Path.cwd()),
            said=said,
            forks=forks,
        )
        try:
            status = int(child.outcome(timeout))
        except DiedError:
            status = os.waitstatus_to_exitcode(child.wait())
        out, err = (Path(said, name).read_bytes().decode() for name in ("out", "err"))
    return subprocess.CompletedProcess(arguments, status, out, err)


def play(channel: Channel, *, arguments: list[str], env: dict[str, str], cwd: str, said: str, forks: bool) -> int:
    """Run the program in this process, and return its exit status."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(said, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # Warning filters as in an interpreter without options.
    sys.warnoptions.clear()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    if forks:
        multiprocessing.get_context = _forking  # type: ignore[assignment]
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    try:
        status = _status_of(arguments[0])
    finally:
        # The steps that an interpreter takes at its end.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return status


def _status_of(script: str) -> int:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class _Forking(multiprocessing.context.ForkContext):
    """Leaves a child only its own ends of pipes, like spawning, so that it notices when the parent closes a pipe."""

    def Pipe(self, duplex: bool = True) -> Any:  # noqa: N802 - multiprocessing's name
        ours, theirs = super().Pipe(duplex)
        os.register_at_fork(after_in_child=ours.close)
        return ours, theirs


def _forking(_method: str | None = None) -> multiprocessing.context.ForkContext:
    return _Forking()
