"""The parent's view of all ranks: it starts, instructs and ends them together."""

from __future__ import annotations

import multiprocessing
import signal
import time
from multiprocessing import connection as pipes
from typing import TYPE_CHECKING, Any

from fastckpt.exceptions import CheckpointError

from .rank import Failure, Request, serve

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from .rank import Spec

#: Seconds between the signal and the start: by then the signal must have reached every rank.
_LEAD = 0.01
#: Seconds after which a killed rank that still exists must be waiting for a device.
_STUCK = 60


class RankError(CheckpointError):
    """A rank failed or died, so the benchmark has ended."""


class Ranks:
    """The processes of a benchmark; :meth:`close` leaves none behind."""

    def __init__(self, what: str, specs: Sequence[Spec]) -> None:
        self._what = what
        self._specs = specs
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []

    def start(self) -> None:
        """Start the processes; each has its state on return. The caller must :meth:`close` them even after an error."""
        # Not "fork": a lock that another thread of the parent holds would stay locked in the child forever.
        context = multiprocessing.get_context("spawn")
        # Ctrl-C must not reach the ranks while they import: they start with SIGINT blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for spec in self._specs:
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs, spec), daemon=True)
                self._pipes.append(ours)
                self._processes.append(process)
                try:
                    process.start()
                finally:
                    # Only the rank has the other end, so its death closes the pipe.
                    theirs.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._answers("starting")

    def ask(self, request: Request) -> list[dict[str, Any]]:
        """Make all ranks prepare, then begin at the same moment; returns their samples, by rank.

        Raises:
            RankError: a rank failed or died.
        """
        doing = f"{request.operation.replace('_', ' ')} in round {request.round}"
        self._tell(request)
        self._answers(doing)
        self._tell(time.monotonic() + _LEAD)
        return self._answers(doing)

    def remove(self, number: int) -> None:
        """Make all ranks remove their files of a round."""
        self._tell(Request("remove", number))
        self._answers("removing the files")

    def _tell(self, message: Any) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(message)
            except OSError:  # noqa: PERF203 - one per rank
                self._died(rank, "waiting")

    def _answers(self, doing: str) -> list[Any]:
        """Receive one answer from each rank, in the order of arrival, and raise the first failure."""
        answers: list[Any] = [None] * len(self._pipes)
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            for pipe in pipes.wait(list(waiting)):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):
                    self._died(rank, doing)
                if isinstance(answers[rank], Failure):
                    raise RankError(f"{self._what}: rank {rank}: {answers[rank].reason}")
        return answers

    def _died(self, rank: int, doing: str) -> None:
        process = self._processes[rank]
        process.join(_STUCK)
        code = process.exitcode
        how = f"ended with status {code}"
        if code is None:
            how = "does not answer"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        why = ": short of memory? See the kernel's log, and give a smaller --size" if code == -signal.SIGKILL else ""
        raise RankError(f"{self._what}: rank {rank} (process {process.pid}) {how} while {doing}{why}")

    def close(self) -> None:
        """End all ranks, whatever they are doing."""
        for process in self._processes:
            if process.pid is not None:
                process.kill()
        for process in self._processes:
            if process.pid is not None:
                process.join(_STUCK)
        for pipe in self._pipes:
            pipe.close()
