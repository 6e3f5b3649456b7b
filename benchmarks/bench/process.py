"""One process for each contender, with its own state: it starts fresh and lives for all rounds, like a training job."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contenders import Contender, Spec, environment, knows
from bench.measure import Sample, measure, with_notes
from bench.states import Workload, differences, total_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

# The shortest time limit in seconds for the import of a contender's libraries.
IMPORTS = 120

# The operations of a round, in order. Cold and hot loads differ only by what the parent does with the page cache.
OPERATIONS = ("save", "load", "into", "hot")
OPERATION_TITLES = {"save": "save", "load": "cold load", "into": "cold load, into=", "hot": "hot load"}


@dataclass(frozen=True)
class Request:
    """A request for one operation.

    Attributes:
        operation: one of ``OPERATIONS``.
        path: the checkpoint's directory.
        compare: whether the result is compared with the state, outside the timing.
        write: whether the result's pages are written, not only read.
    """

    operation: str
    path: Path
    compare: bool = False
    write: bool = False


@dataclass(frozen=True)
class Failure:
    """Why a contender's process cannot continue: one line, and the traceback."""

    reason: str
    details: str


class ContenderError(Exception):
    """A contender cannot be constructed here or has failed; ``failure`` describes why."""

    def __init__(self, name: str, failure: Failure) -> None:
        super().__init__(f"{name}: {failure.reason}")
        self.failure = failure


# -- in the contender's process ----------------------------------------------------------------------------------------


def prepared(contender: Contender, workload: Workload, request: Request) -> Callable[[], Sample]:
    """Prepare the operation; return a function that does it."""
    path, raw = request.path, contender.is_device
    if request.operation == "save":
        # The state exists only while it is needed, so that any number of contenders fit into memory.
        state = workload.make()
        return lambda: timed_save(contender, state, path)
    target = workload.make_blank() if request.operation == "into" and not raw else None
    expected = workload.make() if request.compare and not raw else None
    return lambda: timed_load(contender, request, target, expected)


def timed_save(contender: Contender, state: Any, path: Path) -> Sample:
    """Save and measure."""
    sample, notes = measure(lambda: contender.save(state, path))
    contender.take_notes()
    return with_notes(sample, total_bytes(state), notes)


def timed_load(contender: Contender, request: Request, target: Any, expected: Any) -> Sample:
    """Load, touch every page, and measure; then compare with ``expected``, outside the timing."""

    def load() -> Any:
        loaded = contender.load(request.path) if target is None else contender.load_into(request.path, target)
        contender.finish(loaded, write=request.write)
        return loaded

    if contender.is_device:
        sample, notes = measure(lambda: contender.load(request.path))
        return with_notes(sample, 0, notes)
    sample, loaded = measure(load, contender.kept if target is None else lambda _: 0)
    sample = with_notes(sample, total_bytes(loaded), contender.take_notes())
    difference = None if expected is None else differences(expected, loaded)
    del loaded
    contender.release()
    if difference:
        raise ValueError(f"{request.path}: {request.operation}: {difference} from what was saved")
    return sample


def made(spec: Spec, workload: Workload) -> Contender:
    """Return the contender.

    Raises:
        ImportError: the contender's library is missing. ValueError: the contender cannot store the workload's state, or
        would ignore a variable of its environment.
    """
    if spec.site:
        import fastckpt

        if not Path(fastckpt.__file__).is_relative_to(spec.site):
            raise ValueError(f"it imported {fastckpt.__file__}, which is not in {spec.site}")
    for variable in spec.environment:
        if not knows(variable):
            raise ValueError(f"this build of fastckpt does not read {variable}")
    contender = spec.contender(**spec.options)
    if workload.kind not in contender.kinds:
        raise ValueError(contender.refusal)
    return contender


def serve(connection: Connection, spec: Spec, workload: Workload) -> None:
    """Answer the parent until it closes the pipe: a :class:`Request` is prepared, then ``go`` does it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        contender = made(spec, workload)
        connection.send(None)
        first = True
        while True:
            request = connection.recv()
            if first and request.operation == "save":
                contender.warm_up(request.path.with_name(f"{request.path.name}-probe"))
                first = False
            operation = prepared(contender, workload, request)
            connection.send(contender.note)
            connection.recv()
            sample = operation()
            del operation
            contender.release()
            connection.send(sample)
    except (EOFError, ConnectionError):
        pass
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it
        first_line = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
        connection.send(Failure(f"{type(error).__name__}: {first_line}", traceback.format_exc()))


# -- in the parent -----------------------------------------------------------------------------------------------------


class Process:
    """A contender's process, seen from the parent.

    Args:
        spec: the contender.
        workload: what it saves.
        patience: seconds to wait for an answer; None to wait forever.

    Raises:
        ContenderError: from every method, if the contender cannot continue. ``close`` must still be called.
    """

    def __init__(self, spec: Spec, workload: Workload, patience: float | None = None) -> None:
        self.patience = patience
        context = multiprocessing.get_context("spawn")
        self.name, self.note = spec.name, ""
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, spec, workload), daemon=True)
        with environment(spec):
            self.process.start()
        theirs.close()

    def wait_until_made(self) -> None:
        """Return once its libraries are imported; several processes may import at the same time."""
        self.receive(IMPORTS)

    def receive(self, least: float = 0) -> Any:
        """Return the answer of the process; wait at least ``least`` seconds for it, even with less patience."""
        patience = None if self.patience is None else max(self.patience, least)
        if not self.connection.poll(patience):
            self.process.kill()
            reason = f"it did not answer for {patience:.0f} s"
            raise ContenderError(self.name, Failure(reason, reason))
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            reason = f"its process ended with status {self.process.exitcode}"
            raise ContenderError(self.name, Failure(reason, reason)) from None
        if isinstance(answer, Failure):
            raise ContenderError(self.name, answer)
        return answer

    def send(self, message: Request | None) -> None:
        """Send a message to the process; if it has ended, raise its last message or its status as the failure."""
        try:
            self.connection.send(message)
        except ConnectionError:
            self.receive()
            raise

    def prepare(self, request: Request) -> None:
        """Have the process prepare the operation."""
        self.send(request)
        self.note = self.receive()

    def go(self) -> Sample:
        """Do the prepared operation."""
        self.send(None)
        sample: Sample = self.receive()
        return sample

    def ask(self, request: Request) -> Sample:
        """Have the process prepare the operation and do it."""
        self.prepare(request)
        return self.go()

    def close(self) -> None:
        """End the process, but after its current call: that might write into a directory that is being removed."""
        self.connection.close()
        self.process.join(timeout=30)
        self.process.kill()
        self.process.join()


def system_calls(process: Process, request: Request) -> int:
    """Return how many system calls the operation made, all threads, counted by strace.

    The number includes some twenty reads below /proc by the benchmark. strace is slow: it stops each call twice.
    """
    process.prepare(request)
    command = ["strace", "-c", "-f", "-U", "calls,name", "-p", str(process.process.pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    if tracer.stderr is None:
        raise RuntimeError("strace has no stderr")
    try:
        # One line for each attached thread; the first is for the process itself.
        first = tracer.stderr.readline()
        if "attached" not in first:
            raise OSError(f"strace could not attach to {process.name}: {first.strip()}")
        process.go()
    finally:
        tracer.send_signal(signal.SIGINT)
        output = tracer.communicate()[1]
    return total_calls(output)


def total_calls(output: str) -> int:
    """Return the number in the total line of ``strace -c -U calls,name``."""
    for line in reversed(output.splitlines()):
        words = line.split()
        if len(words) == 2 and words[1] == "total":
            return int(words[0])
    raise ValueError(f"strace printed no total: {output[-300:]}")


def say(text: str) -> None:
    """Report progress on stderr, which does not mix with the result."""
    print(text, file=sys.stderr, flush=True)
