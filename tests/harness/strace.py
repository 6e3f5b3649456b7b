"""Runs or attaches strace, reads the order of system calls, and injects an error or a signal into the k-th call."""

# ruff: noqa: PTH118 - paths are the text that strace printed

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness import needs

# A line is `123 openat(5</a/b>, "c", O_RDONLY) = 6</a/b/c>`; strace splits it if another thread's call came between.
_LINE = re.compile(r"^(?P<pid>\d+)\s+(?P<rest>.*)$")
_RESUMED = re.compile(r"^<\.\.\. (?P<name>\w+) resumed>(?P<rest>.*)$")
_CALL = re.compile(r"^(?P<name>\w+)\((?P<arguments>.*)\)\s+= (?P<result>.*)$", re.DOTALL)
_FD = re.compile(r"\d+<(?P<path>[^>]*)>|AT_FDCWD<(?P<cwd>[^>]*)>")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Call:
    """One system call. ``start`` and ``end`` order the calls of all threads; they differ if calls came between."""

    pid: int
    name: str
    arguments: str
    result: str
    start: int
    end: int

    @property
    def ok(self) -> bool:
        return not self.result.startswith(("-1", "?"))

    @property
    def injected(self) -> bool:
        return "(INJECTED)" in self.result

    def fd_paths(self) -> list[str]:
        """Paths of the descriptors among the arguments, in order."""
        return [match["path"] or match["cwd"] or "" for match in _FD.finditer(self.arguments)]

    def strings(self) -> list[str]:
        """The quoted arguments (strings), in order."""
        return [text.encode().decode("unicode_escape") for text in _STRING.findall(self.arguments)]

    def paths(self) -> list[str]:
        """The paths that the arguments name, each joined to the directory descriptor before it, as in the kernel."""
        found = []
        base = ""
        for match in re.finditer(rf"{_FD.pattern}|{_STRING.pattern}", self.arguments):
            if match["path"] is not None or match["cwd"] is not None:
                base = match["path"] or match["cwd"]
            else:
                text = match.group(3).encode().decode("unicode_escape")
                found.append(os.path.normpath(os.path.join(base, text)))
        return found

    def opened(self) -> str:
        """The real path of the descriptor that the call returned (openat, openat2, open)."""
        match = _FD.match(self.result)
        return (match["path"] or "") if match else ""


def parse(text: str) -> list[Call]:
    """All finished calls of ``strace -f -y`` output, in the order in which they ended."""
    calls: list[Call] = []
    open_calls: dict[int, tuple[str, int]] = {}
    for number, line in enumerate(text.splitlines()):
        match = _LINE.match(line)
        if match is None:
            continue
        pid, rest = int(match["pid"]), match["rest"]
        start = number
        if rest.endswith("<unfinished ...>"):
            open_calls[pid] = (rest.removesuffix("<unfinished ...>"), number)
            continue
        resumed = _RESUMED.match(rest)
        if resumed is not None:
            head, start = open_calls.pop(pid, (f"{resumed['name']}(", number))
            rest = head + resumed["rest"]
        call = _CALL.match(rest)
        if call is not None:
            calls.append(Call(pid, call["name"], call["arguments"], call["result"], start, number))
    return calls


@dataclass
class Trace:
    """An attached strace."""

    log: Path
    process: subprocess.Popen[str]
    _calls: list[Call] | None = field(default=None)

    def calls(self) -> list[Call]:
        """The calls so far; after the end of the traced process, all calls."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=60)
        return parse(self.log.read_text(encoding="utf-8", errors="replace"))


def injection(call: str, what: str, when: str | int) -> str:
    """An option for ``inject``: ``injection("fsync", "error=EIO", 2)``. strace counts calls per thread."""
    return f"{call}:{what}:when={when}"


@contextlib.contextmanager
def attached(
    pid: int, log: Path, trace: str, *inject: str, path: str | os.PathLike[str] | None = None
) -> Iterator[Trace]:
    """Attach strace to a running process and its future threads; yields once the process is being traced.
    With ``path``, only calls that name this path or a descriptor of it are traced."""
    program = needs.tool("strace", "strace")
    command = [program, "-f", "-y", "-s", "4096", "-o", str(log), "-e", f"trace={trace}"]
    for item in inject:
        command += ["-e", f"inject={item}"]
    if path is not None:
        command += ["-P", os.fspath(path)]
    with subprocess.Popen([*command, "-p", str(pid)], stderr=subprocess.PIPE, text=True) as process:
        try:
            _wait_for_attachment(process, pid)
            yield Trace(log, process)
        finally:
            # On SIGINT strace detaches and the traced process goes on; the test ends that process itself.
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            _end(process, pid)


def _end(process: subprocess.Popen[str], pid: int) -> None:
    """Wait for a strace that got a signal to end. It may not end if its process was killed in a held call."""
    for _ in range(60):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
            return
        if _ended(pid):
            break
    process.kill()


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _wait_for_attachment(process: subprocess.Popen[str], pid: int) -> None:
    assert process.stderr is not None
    deadline = time.monotonic() + 60
    seen = ""
    descriptor = process.stderr.fileno()
    while f"Process {pid} attached" not in seen:
        ready, _, _ = select.select([descriptor], [], [], max(0, deadline - time.monotonic()))
        piece = os.read(descriptor, 4096).decode(errors="replace") if ready else ""
        if not piece:
            raise AssertionError(f"strace did not attach to {pid}: {seen!r}")
        seen += piece


# strace delays a call by this many microseconds, and releases the call when strace ends.
_FOR_EVER = 3600 * 10**6


@dataclass
class Stop:
    """A process that will stop before its k-th call, and waits there, alive, until the ``with`` statement ends."""

    log: Path
    call: str
    when: int

    pid: int

    def standing(self) -> list[int]:
        """The threads that are now stopped before the call."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        begun = Counter(re.findall(rf"^(\d+)\s+{self.call}\(", text, re.MULTILINE))
        return [int(thread) for thread, count in begun.items() if count >= self.when]

    def reached(self) -> bool:
        """Whether a thread is now stopped before the call."""
        return bool(self.standing())

    def signal(self, number: int) -> None:
        """Send a signal to the stopped thread, which gets it after the ``with`` statement.

        A signal for the whole process may go to another thread, and strace loses it if it detaches at that moment.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.tgkill(self.pid, self.standing()[0], number) != 0:
            raise OSError(ctypes.get_errno(), "tgkill")

    def wait(self, seconds: float = 60.0) -> None:
        """Wait until the process is stopped before the call."""
        deadline = time.monotonic() + seconds
        while not self.reached():
            if time.monotonic() > deadline:
                raise AssertionError(f"no {self.call} number {self.when}: {self.log.read_text(errors='replace')}")
            time.sleep(0.005)


@contextlib.contextmanager
def stopping(
    pid: int, log: Path, call: str, when: int = 1, *inject: str, path: str | os.PathLike[str] | None = None
) -> Iterator[Stop]:
    """Stop a process before its ``when``-th ``call`` (that names ``path``), counted per thread."""
    log.unlink(missing_ok=True)
    names = ",".join({call, *(item.partition(":")[0] for item in inject)})
    hold = injection(call, f"delay_enter={_FOR_EVER}", when)
    with attached(pid, log, names, *inject, hold, path=path):
        yield Stop(log, call, when, pid)
