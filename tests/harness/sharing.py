"""One zygote of each kind for all workers of a test run: what each of them would import, one process imports once.

The process that hands out the tests starts a broker and tells its workers the address. Who wants a zygote asks the
broker, which keeps a trunk for each set of variables that modules may read as they are imported. The trunk forks a
zygote, that serves whoever asked and nobody else, with its environment, working directory and outputs, and that ends
when it does. Where a zygote runs under a command of its own, as in a namespace, nothing is shared.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from harness import zygote


@contextlib.contextmanager
def broker() -> Iterator[str]:
    """The address of a broker, for as long as the block lasts. It ends with this process, and all trunks with it."""
    with tempfile.TemporaryDirectory(prefix="fastckpt-broker-") as folder:
        path = f"{folder}/socket"
        command = [sys.executable, "-m", "harness.sharing", path]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=zygote.environment()
        ) as process:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise AssertionError("the broker did not start")
            yield path


def serve(path: str) -> None:
    """The broker's loop: hand each request to the trunk of its kind, until the other end of standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trunks: dict[str, tuple[socket.socket, subprocess.Popen[bytes]]] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(64)
        print("ready", flush=True)
        while sys.stdin.fileno() not in select.select([sys.stdin.fileno(), listening], [], [])[0]:
            with listening.accept()[0] as asking:
                message, descriptors, _, _ = socket.recv_fds(asking, zygote.LARGEST_REQUEST, 4)
            kind = json.loads(message)["kind"]
            name = json.dumps(kind, sort_keys=True)
            if name not in trunks:
                trunks[name] = _trunk(kind, *descriptors[2:])
            # It waits there until the trunk has imported all: other kinds need not.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died, and said why
                socket.send_fds(trunks[name][0], [message], descriptors)
            for each in descriptors:
                os.close(each)
    for _, process in trunks.values():
        process.kill()
        process.wait()


def _trunk(kind: dict[str, str], out: int, errors: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start one, that tells who asked first what goes wrong as it imports."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.sharing", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **kind},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
        )
    return ours, process


def grow(descriptor: int) -> NoReturn:
    """The trunk: import what its kind is to have imported, and fork a zygote for each request."""
    zygote.prepare()
    # Nobody waits for the zygotes that it forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, zygote.LARGEST_REQUEST, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            _become(json.loads(message), *descriptors)
        for each in descriptors:
            os.close(each)


def _become(request: dict[str, Any], control: int, *standard: int) -> NoReturn:
    for number, each in enumerate(standard):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    zygote.serve(control)


if __name__ == "__main__":
    if Path(sys.argv[1]).is_absolute():
        serve(sys.argv[1])
    else:
        grow(int(sys.argv[1]))
