"""One process of each kind does the imports of zygotes once for all workers of a test run.

The process that distributes tests starts a broker and gives its address to the workers. To get a zygote, they ask the
broker, which keeps a trunk for each set of variables that modules may read as they are imported. The trunk forks a
zygote, which serves only the asking process, with its environment, working directory and outputs, and ends
with it. A kind that needs more modules than another one (:data:`harness.zygote.MORE`) has a trunk that is forked
from the other kind's trunk. A zygote that runs under another command, as in a namespace, shares nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
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

PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def broker() -> Iterator[str]:
    """The address of a broker for the ``with`` statement. The broker and all trunks end with this process."""
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
    trunks: dict[str, socket.socket] = {}
    processes: list[subprocess.Popen[bytes]] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(64)
        print("ready", flush=True)
        while sys.stdin.fileno() not in select.select([sys.stdin.fileno(), listening], [], [])[0]:
            with listening.accept()[0] as asking:
                message, descriptors, _, _ = socket.recv_fds(asking, zygote.LARGEST_REQUEST, 4)
            trunk = _trunk(trunks, processes, json.loads(message)["kind"], *descriptors[2:])
            # The request waits in the trunk's socket until its imports are done, so that other kinds need not wait.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the trunk died and printed why
                socket.send_fds(trunk, [message], descriptors)
            for each in descriptors:
                os.close(each)
    for process in processes:
        process.kill()
        process.wait()
    for trunk in trunks.values():
        with contextlib.suppress(ConnectionResetError):
            trunk.recv(1)  # returns when its forks have ended, too


def _trunk(
    trunks: dict[str, socket.socket],
    processes: list[subprocess.Popen[bytes]],
    kind: dict[str, str],
    out: int,
    errors: int,
) -> socket.socket:
    """The trunk of a kind; a new trunk prints errors of its imports to the first process that asks."""
    name = json.dumps(kind, sort_keys=True)
    if name in trunks:
        return trunks[name]
    trunks[name], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        if zygote.MORE in kind:
            below = {key: value for key, value in kind.items() if key != zygote.MORE}
            trunk = _trunk(trunks, processes, below, out, errors)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(trunk, [json.dumps({"more": kind}).encode()], [theirs.fileno(), out, errors])
        else:
            process = subprocess.Popen(
                [sys.executable, "-m", "harness.sharing", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **kind},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
            )
            processes.append(process)
    return trunks[name]


def grow(descriptor: int) -> NoReturn:
    """Be the trunk: do the imports of its kind, and fork a zygote, or the trunk of a kind with more imports,
    for each request."""
    zygote.prepare()
    # No process waits for the trunk's forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, zygote.LARGEST_REQUEST, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            request = json.loads(message)
            (_grow_on if "more" in request else _become)(request, *descriptors)
        for each in descriptors:
            os.close(each)


def _grow_on(request: dict[str, Any], descriptor: int, out: int, errors: int) -> NoReturn:
    """Become the trunk of another kind, which ends when this trunk ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    for number, each in ((1, out), (2, errors)):
        os.dup2(each, number)
        os.close(each)
    os.environ.update(request["more"])
    grow(descriptor)


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
