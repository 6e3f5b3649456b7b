"""Makes the workers of a test run forks of one process that has collected the tests and imported all modules. An
interpreter takes ten seconds for this, and a fork takes one second to collect again.

The process that distributes tests starts the trunk, and makes xdist start this file in place of an interpreter. This
file connects the streams of the fork with xdist, and runs for as long as the fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def trunk(arguments: Sequence[str]) -> Iterator[str]:
    """The ``--tx`` argument of xdist for a forked worker, for the ``with`` statement; ``arguments`` are those of
    pytest."""
    from harness import zygote

    with tempfile.TemporaryDirectory(prefix="fastckpt-workers-") as folder:
        path = f"{folder}/socket"
        command = [sys.executable, __file__, "serve", path, *arguments]
        environment = zygote.environment()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise AssertionError("the process that workers are forked from did not start")
            try:
                yield f"popen//python={shlex.join([sys.executable, __file__, path])}"
            finally:
                process.kill()


def serve(path: str, arguments: Sequence[str]) -> None:
    """Be the trunk: collect, and fork on request until the other end of standard input closes."""
    import pytest

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(64)
        print("ready", flush=True)
        # Errors of imports are not printed here, because each worker reports them.
        said = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(said, number)
        pytest.main([*arguments, "-n", "0", "--collect-only", "-q"])
        from harness import zygote  # after pytest's import, because a plugin may have to come first

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # this process does not wait for its forks
        while sys.stdin.fileno() not in select.select([sys.stdin.fileno(), listening], [], [])[0]:
            with listening.accept()[0] as asking:
                message, streams, _, _ = socket.recv_fds(asking, zygote.LARGEST_REQUEST, 3)
                pid = os.fork()
                if pid:
                    asking.send(str(pid).encode())
                    for each in streams:
                        os.close(each)
            if not pid:
                listening.close()
                _become(json.loads(message), streams)
                return


def _become(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Act as the interpreter that xdist requested."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, each in enumerate(streams):
        os.dup2(each, number)
        os.close(each)
    sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), "rww", (-1, 1, 1))
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    *_, code = request["command"]
    sys.argv = ["-c"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(code, vars(sys.modules["__main__"]))


def ask(path: str, command: Sequence[str]) -> None:
    """Make the trunk fork, and wait until the fork has ended."""
    request = {"variables": dict(os.environ), "folder": str(Path.cwd()), "command": list(command)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(path)
        socket.send_fds(asking, [json.dumps(request).encode()], [0, 1, 2])
        pid = int(asking.recv(32))
    # For xdist, a closed stream means a dead worker.
    for number in (0, 1):
        os.close(number)
    with contextlib.suppress(ProcessLookupError):  # the fork has ended
        select.select([os.pidfd_open(pid)], [], [])


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules are imported as harness.NAME
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        ask(sys.argv[1], sys.argv[2:])
