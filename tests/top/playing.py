"""Plays jobs with real processes, waits for each act, and keeps the events and the reports."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field

from producer import BASES, LAYOUT

MB = 10**6
SLOW = 20_000
"""The bytes/s at which a save of megabytes lasts longer than any test looks at it."""
WRITE, DRAIN = 3, 10
"""Phases from docs/telemetry.md, section 5.3."""


@dataclass
class Part:
    """One operation of one process, as the process reports it, or as a kill ends it.

    Attributes:
        process: The process.
        outcome: `running`, `ok`, `died`, or the name of an errno.
        size: Bytes of the state.
        told: The report's contents.
    """

    process: Process
    outcome: str
    size: int
    told: dict = field(default_factory=dict)

    @property
    def planned(self):
        """Whether the size is known: a process with a file size limit fails before it plans."""
        return self.outcome in ("ok", "running", "died")


@dataclass
class Operation:
    """An operation of a job's ranks together; `begun` and `ended` are event numbers of the history."""

    job: Job
    kind: str
    label: str
    step: int | None
    begun: int
    ended: int = 0
    parts: list[Part] = field(default_factory=list)

    @property
    def running(self):
        return any(part.outcome == "running" for part in self.parts)


@dataclass
class Job:
    """The processes of one launcher."""

    name: str
    launch: int
    world: int
    processes: list[Process] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    @property
    def living(self):
        return [process for process in self.processes if process.alive]


class Process:
    """A process, with or without a rank."""

    def __init__(self, children, place, job, number):
        environment = {"FASTCKPT_TOP_DIR": str(place), "FASTCKPT_JOB": job.name}
        environment |= {"SLURM_JOB_ID": str(job.launch), "SLURM_STEP_ID": "0"}
        if number is not None:
            environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(number))
            environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job.world))
        self.child = children.start("top.played:rank", environment=environment)
        self.job, self.rank, self.pid, self.place = job, number, self.child.pid, place
        self.alive = True
        self.size = self.fill = 0
        self.parts: list[tuple[Operation, Part]] = []

    @property
    def died(self):
        return any(part.outcome == "died" for _, part in self.parts)

    def at_work(self, phase):
        """Wait until an operation in the process's segment is in a phase."""
        ends = time.monotonic() + 60
        base, stride = BASES["operation"]
        while True:
            for path in self.place.glob(f"{self.pid}-*.seg"):
                data = path.read_bytes()
                at = (base + slot * stride + LAYOUT["operation"]["phase"][0] for slot in range(7))
                if any(struct.unpack_from("<I", data, offset)[0] == phase for offset in at):
                    return
            assert time.monotonic() < ends, f"process {self.pid} does not reach phase {phase}"
            time.sleep(0.002)


class Play:
    """Plays jobs, and records the events."""

    def __init__(self, children, place, directory, rng):
        self._children, self._place, self._directory, self.rng = children, place, directory, rng
        self.jobs: list[Job] = []
        self._count = self._fill = 0

    def now(self):
        self._count += 1
        return self._count

    def job(self, name, world=1):
        """Add a job with its own launcher."""
        self.jobs.append(Job(name, 1000 + len(self.jobs), world))
        return self.jobs[-1]

    def start(self, job, ranks=(None,)):
        job.processes += [Process(self._children, self._place, job, number) for number in ranks]

    def save(self, job, label, same=None, held=(), failing=()):
        """The living ranks save together; `same` is the label of their previous save, if nothing has changed."""
        step = int(label[5:]) if label.startswith("step-") else None
        operation = Operation(job, "save", label, step, self.now())
        job.operations.append(operation)
        self._fill = self._fill % 250 + 1
        for process in job.living:
            size = process.size if same else self.rng.randrange(10, 40) * MB
            fill = process.fill if same else self._fill
            process.size, process.fill = size, fill
            order = {"path": self._path(process, label), "size": size, "fill": fill, "step": step}
            order |= {"base": self._path(process, same)} if same else {}
            order |= {"limit": SLOW} if process in held else {"room": MB} if process in failing else {}
            operation.parts.append(Part(process, "running", size))
            process.parts.append((operation, operation.parts[-1]))
            process.child.channel.send(order)
        for part in operation.parts:
            if part.process in held:
                part.process.at_work(WRITE)
            else:
                part.told = part.process.child.next()
                part.outcome = part.told["outcome"]
        operation.ended = self.now()
        return operation

    def _path(self, process, label):
        return str(self._directory / str(process.job.launch) / str(process.rank) / label)

    def drain(self, job, step, *, held):
        """The job's process saves a step of its run and drains it."""
        (process,) = job.living
        size, run = self.rng.randrange(10, 40) * MB, self._directory / str(job.launch)
        self._fill = self._fill % 250 + 1
        order = {"path": str(run / "run"), "remote": str(run / "remote"), "size": size, "fill": self._fill}
        process.child.channel.send({**order, "step": step, "limit": SLOW if held else None})
        told = process.child.next()
        if held:
            process.at_work(DRAIN)
        for kind, outcome in (("save", "ok"), ("drain", "running" if held else "ok")):
            operation = Operation(job, kind, f"step-{step:08d}", step, self.now(), self.now())
            operation.parts.append(Part(process, outcome, size, told))
            job.operations.append(operation)
            process.parts.append((operation, operation.parts[-1]))

    def kill(self, process):
        """Kill the process by SIGKILL, within its current operation if there is one."""
        process.child.kill()
        process.alive = False
        for operation, part in process.parts:
            if part.outcome == "running":
                assert process.child.drain() == [], "the process was killed after the operation, not in it"
                part.outcome, operation.ended = "died", self.now()

    def end(self, job):
        """End the job's living processes normally."""
        for process in job.living:
            process.child.channel.send(None)
            process.child.outcome()
            process.alive = False

    def over(self):
        """End everything."""
        for job in self.jobs:
            for process in job.living:
                process.child.kill()
