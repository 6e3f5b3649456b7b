"""Hundreds of child processes: one small process imports everything once and forks for each trial.

A trial that kills, limits or strips its process needs a separate process, and an interpreter takes 300 ms to start;
a fork takes 5 ms. The children run the functions of :mod:`harness.jobs` by name (those of another module as
``module:name``) and reply in JSON lines. ``FASTCKPT_TEST_IMPORT`` names modules to import once, before any fork;
``FASTCKPT_TEST_HUGE=1`` spends a second so that forks with many imports take a third of the time.
"""

# ruff: noqa: BLE001 - every exception of a child goes to its parent

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PTRACER = 0x5961_6D61
PR_SET_PTRACER_ANY = (1 << 64) - 1
HUGE_PAGE = 2 << 20
#: The variable that names modules to import after those of ``FASTCKPT_TEST_IMPORT``. Kinds that differ only in it are
#: forked from one process with the imports of ``FASTCKPT_TEST_IMPORT``.
MORE = "FASTCKPT_TEST_IMPORT_MORE"
MADV_COLLAPSE = 25
TESTS = Path(__file__).resolve().parents[1]
#: The address of the broker of :mod:`harness.sharing`, which shares the imports of zygotes among all workers; None
#: without a broker.
broker: str | None = None
# A request to the broker is one message with its descriptors: a stream could split it, and lose the descriptors.
LARGEST_REQUEST = 1 << 20


def environment() -> dict[str, str]:
    """This process's environment, without a choice of engine, and with the harness on Python's path."""
    plain = {key: value for key, value in os.environ.items() if key != "FASTCKPT_IO"}
    return {**plain, "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))}


class DiedError(AssertionError):
    """The child ended without a reply: it was killed, or crashed."""


class HungError(AssertionError):
    """The child did not reply in time."""


def ending(status: int) -> str:
    """A description of the end of a process with this wait status."""
    code = os.waitstatus_to_exitcode(status)
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"died with exit status {code}"


class Channel:
    """A channel of JSON lines over a socket, in both directions."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""

    def __del__(self) -> None:
        # A killed child's last messages may be read long after its end, so the socket is closed only with this object.
        self.sock.close()

    def send(self, value: Any) -> None:
        self.sock.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> Any:
        """The next value; raise ``EOFError`` at the end, and ``TimeoutError`` if no value comes in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self.sock], [], [], left)[0]:
                raise TimeoutError
            piece = b""
            with contextlib.suppress(ConnectionResetError):
                piece = self.sock.recv(1 << 16)
            if not piece:
                raise EOFError
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


@dataclass
class Raised:
    """A child's exception, as JSON describes it."""

    kind: str
    bases: list[str]
    errno: int | None
    filename: str | None
    text: str
    trace: str = field(repr=False)


@dataclass
class Child:
    """One forked process and its job. ``inner`` is its pid in the zygote's namespace, ``pid`` its pid here."""

    pid: int
    inner: int
    channel: Channel
    zygote: Zygote
    reports: list[Any] = field(default_factory=list)
    status: int | None = None

    def go(self) -> None:
        """Let a job that was started with ``hold=True`` begin."""
        self.channel.send("go")

    def next(self, timeout: float = 60.0) -> Any:
        """The next report of the job."""
        message = self._message(timeout)
        assert "report" in message, message
        return message["report"]

    def outcome(self, timeout: float = 60.0) -> Any:
        """The result of the job, or a :class:`Raised`; reports that come before it are kept in ``reports``."""
        while True:
            message = self._message(timeout)
            if "report" in message:
                self.reports.append(message["report"])
                continue
            self.wait()
            return Raised(**message["raised"]) if "raised" in message else message["returned"]

    def _message(self, timeout: float) -> dict[str, Any]:
        try:
            return dict(self.channel.receive(timeout))
        except EOFError:
            raise DiedError(f"child {self.pid} {ending(self.wait())}") from None
        except TimeoutError:
            self.kill()
            raise HungError(f"child {self.pid} sent nothing for {timeout} s") from None

    def drain(self) -> list[Any]:
        """All reports of a killed child, including unread ones from before its death."""
        with contextlib.suppress(EOFError):
            while True:
                message = self.channel.receive(60)
                if "report" in message:
                    self.reports.append(message["report"])
        return self.reports

    def signal(self, number: int) -> None:
        # Only the zygote reaps children, and only on request, so the pid still belongs to this child.
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Send SIGSTOP, and wait until all threads have stopped: until then they run on."""
        self.signal(signal.SIGSTOP)
        self.until_stopped()

    def until_stopped(self) -> None:
        """Wait until a pending signal has stopped the child."""
        status = Path(f"/proc/{self.pid}/stat")
        limit = time.monotonic() + 60
        while status.read_text(encoding="ascii").rpartition(")")[2].split()[0] != "T":
            if time.monotonic() > limit:
                raise AssertionError(f"child {self.pid} did not stop")
            time.sleep(0.001)

    def kill(self) -> int:
        """Send SIGKILL, wait until the process is gone, and return the wait status."""
        if self.status is None:
            self.signal(signal.SIGKILL)
        return self.wait()

    def ended(self) -> bool:
        """Whether the child has ended or was killed."""
        return " Z " in Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8")

    def wait(self) -> int:
        """Wait until the process and its locks are gone, and return the wait status."""
        if self.status is None:
            self.status = self.zygote.reap(self.inner)
        return self.status


class Forked:
    """A process that another process has forked for this one, with a part of ``Popen``'s interface."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = os.pidfd_open(pid)

    def wait(self, timeout: float) -> None:
        over = select.select([self._ended], [], [], timeout)[0]
        os.close(self._ended)
        if not over:
            raise AssertionError(f"zygote {self.pid} did not end")


def _shared(kind: dict[str, str], variables: dict[str, str]) -> socket.socket:
    """A socket to a new zygote, which imported its modules with ``kind`` in the environment, and has
    ``variables`` in its environment."""
    ours, theirs = socket.socketpair()
    request = {"kind": kind, "variables": variables, "folder": str(Path.cwd())}
    with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(broker)
        socket.send_fds(asking, [json.dumps(request).encode()], [theirs.fileno(), 0, 1, 2])
    return ours


class Zygote:
    """The process that forks, which several threads may use. Use :func:`running`."""

    def __init__(self, *prefix: str, env: dict[str, str] | None = None, own: dict[str, str] | None = None) -> None:
        """Start the zygote. ``own``: variables that are set after all imports."""
        # A BLAS thread pool would add threads to a process that forks.
        kind = {"OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "error", **(env or {})}
        variables = {**environment(), **kind, **(own or {})}
        shared = broker is not None and not prefix
        if shared:
            self.control = Channel(_shared(kind, variables))
        else:
            ours, theirs = socket.socketpair()
            command = [*prefix, sys.executable, "-m", "harness.zygote", str(theirs.fileno())]
            self.process: Any = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=variables)
            theirs.close()
            self.control = Channel(ours)
        self._lock = threading.Lock()
        # The zygote imports torch and more, which takes a second, or minutes on a busy machine.
        pid = self.control.receive(300)
        if shared:
            self.process = Forked(pid)

    def start(self, job: str, *, hold: bool = False, **arguments: Any) -> Child:
        """Fork a child that runs ``harness.jobs.<job>(channel, **arguments)``, or the function that a job names."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            self.control.send({"job": job, "hold": hold, "arguments": arguments})
            # A descriptor travels with a byte; the zygote must be waiting for that byte with recvmsg, or loses it.
            if self.control.receive(60) != "socket":
                raise AssertionError("the zygote sent an unexpected reply")
            socket.send_fds(self.control.sock, [b"\n"], [theirs.fileno()])
            inner = self.control.receive(60)
        return Child(self._outer(inner), inner, Channel(ours), self)

    def _outer(self, inner: int) -> int:
        """The pid here of a child that has another pid inside the namespace of an ``unshare --pid`` prefix."""
        space = Path(f"/proc/{self.process.pid}/ns/pid_for_children").readlink()
        if space == Path("/proc/self/ns/pid").readlink():
            return inner
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if (process / "ns/pid").readlink() == space:
                    numbers = re.search(r"^NSpid:(.*)$", (process / "status").read_text(encoding="ascii"), re.MULTILINE)
                    if numbers is not None and int(numbers[1].split()[-1]) == inner:
                        return int(process.name)
        raise AssertionError(f"no process {inner} in {space}")

    def run(self, job: str, *, timeout: float = 60.0, **arguments: Any) -> Any:
        """Run a job to its end in a child; return its result, or a :class:`Raised`."""
        return self.start(job, **arguments).outcome(timeout)

    def reap(self, pid: int) -> int:
        with self._lock:
            self.control.send({"reap": pid})
            return int(self.control.receive(60))


@contextlib.contextmanager
def running(*prefix: str, env: dict[str, str] | None = None) -> Iterator[Zygote]:
    """A zygote for the ``with`` statement; ``prefix`` is a command to run it under."""
    # The counters of killed children would accumulate in the directory of a real monitor.
    with tempfile.TemporaryDirectory(prefix="fastckpt-top-", dir="/dev/shm") as counters:
        zygote = Zygote(*prefix, env=env, own={"FASTCKPT_TOP_DIR": counters})
        try:
            yield zygote
        finally:
            zygote.control.sock.close()
            zygote.process.wait(timeout=60)


def _child(request: dict[str, Any], channel: Channel) -> NoReturn:
    code = 70
    try:
        # A test run in the background ignores SIGINT; restore the default that users' programs have.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Allow strace to attach even if Yama permits this only to ancestors.
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(PR_SET_PTRACER_ANY), 0, 0, 0)
        if request["hold"]:
            channel.receive()
        module, _, name = request["job"].rpartition(":")
        jobs = importlib.import_module(module or "harness.jobs")
        try:
            value = getattr(jobs, name)(channel, **request["arguments"])
            answer = {"returned": value}
        except BaseException as error:
            answer = {
                "raised": {
                    "kind": type(error).__name__,
                    "bases": [base.__name__ for base in type(error).__mro__],
                    "errno": getattr(error, "errno", None),
                    "filename": _text(getattr(error, "filename", None)),
                    "text": str(error),
                    "trace": traceback.format_exc(),
                }
            }
        channel.send(answer)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _text(value: Any) -> str | None:
    return None if value is None else os.fsdecode(value)


def _gather_memory() -> None:
    """Put imported modules into huge pages: a fork copies an entry for each page, and torch's 400 MB have 100,000 small
    ones. Linux before 6.1 refuses, which does no harm."""
    collapse = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        addresses, access, *_, name = (*line.split(None, 5), "")[:6]
        start, end = (int(address, 16) for address in addresses.split("-"))
        if access == "rw-p" and name in ("", "[heap]") and end - start >= HUGE_PAGE:
            collapse(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def prepare() -> None:
    """Do the imports that the environment names, before forks."""
    # Imports make no garbage, but the search for garbage takes a fifth of the time.
    gc.disable()
    importlib.import_module("harness.jobs")
    for variable in ("FASTCKPT_TEST_IMPORT", MORE):
        for module in filter(None, os.environ.get(variable, "").split(",")):
            importlib.import_module(module)
    # A collection in a child would write to every object, and so copy all pages shared with this process.
    gc.collect()
    gc.freeze()
    gc.enable()
    if os.environ.get("FASTCKPT_TEST_HUGE") == "1":
        _gather_memory()


def serve(descriptor: int) -> NoReturn:
    """Run the zygote's loop: fork or reap on request, until the other side closes."""
    control = Channel(socket.socket(fileno=descriptor))
    control.send(os.getpid())
    while True:
        try:
            request = control.receive()
        except EOFError:
            os._exit(0)  # torch's work at the end of an interpreter takes a second, and is not needed here
        if "reap" in request:
            control.send(os.waitpid(request["reap"], 0)[1])
            continue
        control.send("socket")
        _, descriptors, _, _ = socket.recv_fds(control.sock, 1, 1)
        pid = os.fork()
        if pid == 0:
            control.sock.close()
            _child(request, Channel(socket.socket(fileno=descriptors[0])))
        os.close(descriptors[0])
        control.send(pid)


if __name__ == "__main__":
    prepare()
    serve(int(sys.argv[1]))
