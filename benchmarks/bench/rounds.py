"""Interleaved rounds: each runs every contender once.

The next round begins with another contender and has the opposite order, so that no contender always follows the same
other contender. The speed of a shared disk drifts, so figures are medians over rounds. Before each load the page cache
is dropped or, for a hot load, filled with the files. Before each operation, the benchmark touches as much free memory
as the most wasteful contender takes. In the first round every result is compared with the state.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.device import back_memory, drop_caches, remove
from bench.process import OPERATIONS, ContenderError, Process, Request, say, system_calls
from fastckpt._tools.bench import caches

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.contenders import Spec
    from bench.measure import Sample
    from bench.states import Workload

    Samples = dict[str, dict[str, list[Sample]]]

# The free memory, as a multiple of the state, that is touched before each operation: for the loaded state, and for the
# page cache of contenders that read through it.
MEMORY = 2.25
# The comparison needs these contenders: their failure ends the run.
ESSENTIAL = ("raw", "fastckpt")


@dataclass
class Outcome:
    """The measurements of a run.

    Attributes:
        samples: the samples by contender and operation.
        not_run: the reason for each contender that is missing here or failed.
        notes: notes for readers, by contender.
        calls: the number of system calls by contender and operation, if counted.
        caches: how caches were dropped.
    """

    samples: Samples = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    caches: str = "not dropped"


@dataclass
class Rounds:
    """One run over one workload.

    Attributes:
        specs: the contenders to measure.
        workload: the state that contenders save.
        directory: the directory of the checkpoints.
        operations: some of ``OPERATIONS``; a save that is not among these is done but not recorded.
        rounds: the number of rounds.
        write: whether the pages of results are written, not only read.
        syscalls: whether one more round counts system calls.
        patience: the seconds that a contender has for an operation; None for no limit.
    """

    specs: list[Spec]
    workload: Workload
    directory: Path
    operations: tuple[str, ...] = OPERATIONS
    rounds: int = 5
    write: bool = False
    syscalls: bool = False
    patience: float | None = None
    outcome: Outcome = field(default_factory=Outcome)
    processes: dict[str, Process] = field(default_factory=dict)

    def run(self) -> Outcome:
        """Run all rounds.

        Raises:
            ContenderError: the raw device or fastckpt failed.
        """
        try:
            for spec in self.specs:
                self.processes[spec.name] = Process(spec, self.workload, self.patience)
            for spec in self.specs:
                self.guard(spec.name, self.processes[spec.name].wait_until_made)
                if spec.name in self.processes:
                    self.outcome.samples[spec.name] = {}
            for number in range(self.rounds):
                if not self.may_begin(number):
                    break
                for name in self.order(number):
                    self.guard(name, lambda name=name, number=number: self.turn(name, number))
            if self.syscalls:
                for name in [name for name in self.order(0) if name != "raw"]:
                    self.guard(name, lambda name=name: self.count_calls(name))
        finally:
            for process in self.processes.values():
                process.close()
        # The result has the order of the table, not of the turns.
        named = {spec.name: self.outcome.samples[spec.name] for spec in self.specs if spec.name in self.outcome.samples}
        self.outcome.samples = named
        return self.outcome

    def may_begin(self, number: int) -> bool:  # noqa: ARG002 - for those who have to end in time
        """Whether there is time for this round."""
        return True

    def give_up(self, name: str, error: ContenderError) -> None:
        """Leave this contender out of further rounds."""
        if name in ESSENTIAL:
            say(error.failure.details)
            raise error
        self.outcome.not_run[name] = error.failure.reason
        self.outcome.samples.pop(name, None)
        if process := self.processes.pop(name, None):
            process.close()
        say(f"not run: {error}")

    def order(self, number: int) -> list[str]:
        """Return the contenders of a round in their turn."""
        names = list(self.processes)
        turn = number % max(1, len(names))
        names = names[turn:] + names[:turn]
        return names if number % 2 == 0 else names[::-1]

    def guard(self, name: str, turn: Callable[[], None]) -> None:
        """Do a contender's turn; if the contender fails, leave it out of further rounds."""
        path = self.path(name)
        try:
            turn()
        except ContenderError as error:
            self.give_up(name, error)
        finally:
            for left in self.directory.glob(f"*{path.name}*"):
                remove(left)

    def saves(self, name: str) -> bool:
        """Whether this contender saves at all."""
        return next(spec for spec in self.specs if spec.name == name).contender.saves

    def path(self, name: str) -> Path:
        """Return where this contender saves."""
        return self.directory / name.replace(":", "-")

    def steps(self, name: str, *, compare: bool) -> list[Request]:
        """Return the requests of one turn; the first writes the files that the others read."""
        wanted = [operation for operation in OPERATIONS if operation == "save" or operation in self.operations]
        return [Request(operation, self.path(name), compare=compare, write=self.write) for operation in wanted]

    def make_ready(self, request: Request) -> None:
        """Bring disk and page cache into the state that the operation needs."""
        if request.operation == "save":
            # No write of an earlier turn may still be in flight.
            os.sync()
        elif request.operation == "hot":
            caches.warm(request.path)
        else:
            self.outcome.caches = drop_caches(request.path)
        back_memory(int(MEMORY * self.workload.bytes))

    def turn(self, name: str, number: int) -> None:
        """Let one contender do all operations once."""
        process, done = self.processes[name], []
        for request in self.steps(name, compare=number == 0):
            if name == "raw" and request.operation in ("into", "hot"):
                continue
            process.prepare(request)
            self.make_ready(request)
            sample = process.go()
            records = request.operation in self.operations
            if records and (request.operation != "save" or self.saves(name)):
                self.outcome.samples[name].setdefault(request.operation, []).append(sample)
                done.append(f"{request.operation} {sample.seconds:.3f} s")
        if process.note:
            self.outcome.notes[name] = process.note
        say(f"{self.workload.name}, round {number + 1} of {self.rounds}: {name:<20} {', '.join(done)}")

    def count_calls(self, name: str) -> None:
        """Let one contender do all operations once more, under strace."""
        for request in self.steps(name, compare=False):
            self.make_ready(request)
            calls = system_calls(self.processes[name], request)
            self.outcome.calls.setdefault(name, {})[request.operation] = calls
        say(f"{self.workload.name}, system calls: {name:<20} {self.outcome.calls[name]}")
