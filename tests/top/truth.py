"""The expected outputs for a played history: from its events, the saves' reports and docs/monitoring.md alone."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from playing import Operation, Part, Process

MOST = 40_010_000
"""The most bytes of a rank whose size is unknown."""
HEADERS = 8192
"""The most bytes of headers in a save's files: a failed save does not report them."""


@dataclass
class Bounds:
    """The bounds of a figure, from two measurements."""

    least: float
    most: float

    def holds(self, value, slack=0.0):
        return value is not None and self.least - slack <= value <= self.most + slack


class Shown:
    """An operation that the monitor shows."""

    def __init__(self, operation, truth):
        self.operation, self.kind, self.label = operation, operation.kind, operation.label
        self.parts, self.running, self.step = operation.parts, operation.running, operation.step
        self.copies = self.kind == "drain"
        self.failed = sum(part.outcome not in ("ok", "running") for part in self.parts)
        self.died = [part.process for part in self.parts if part.outcome == "died"]
        self.phase = ("drain" if self.copies else "write") if self.running else "done"
        if not self.running and self.failed:
            self.phase = "died" if self.died else "failed"
        world = operation.job.world
        here = {part.process.rank for part in self.parts}
        expected = set(range(world)) if 2 * len(here) > world > 1 and not self.copies else set()
        self.missing = sorted(expected - here)
        team = {part.process for part in self.parts} | ({*truth.alive(operation.job)} if self.running else set())
        self.gpus = len(team) + len(set(self.missing) - {process.rank for process in team})
        name = "copied" if self.copies else "written"
        known = [part.told.get(name) for part in self.parts]
        sizes = [
            (size, size) if size is not None else (part.size, part.size + HEADERS) if part.planned else (0, MOST)
            for size, part in zip(known, self.parts, strict=True)
        ]
        mean = [sum(one) // len(sizes) * len(self.missing) for one in zip(*sizes, strict=True)]
        self.total = Bounds(*(sum(one) + more for one, more in zip(zip(*sizes, strict=True), mean, strict=True)))
        self.done = Bounds(sum(size or 0 for size in known), sum(most for _, most in sizes))
        self.linked = sum(part.told.get("linked", 0) for part in self.parts) if not self.copies else 0
        self.empty = self.phase == "done" and self.total.most == 0
        self.average = None
        if self.phase == "done" and not self.empty and not self.copies:
            self.average = Bounds(*(self.done.least / seconds for seconds in self._seconds()))

    @property
    def how(self):
        """How the history describes the end of the operation: empty after a success."""
        bad = next((part.outcome for part in self.parts if part.outcome not in ("ok", "died")), "")
        return "died" if self.died else f"failed: {bad}" if bad else ""

    def _seconds(self):
        """The most and the least seconds from the first rank's start to the last rank's end."""
        told = [part.told for part in self.parts]
        first, last = min(one["begun"] for one in told), max(one["ended"] for one in told)
        if not all("least" in one for one in told):
            return last - first, 1e-3
        lasts = max(one["begun"] + one["least"] for one in told)
        firsts = min(one["ended"] - one["least"] for one in told)
        return last - first, max(lasts - firsts, *(one["least"] for one in told), 1e-6)

    def reaches(self, target):
        """Whether the operation reaches a target per GPU; a running operation is known to be slow."""
        if self.average is None:
            return False
        wanted = target * self.gpus
        assert not self.average.least <= wanted <= self.average.most, "the target is too close to the average"
        return self.average.least > wanted

    def fine(self, target):
        return not self.failed and (self.empty or self.copies or self.reaches(target))

    def said(self, target, safe):
        """Level and pattern for the beginning of its sentence; None if it runs and its sentence depends on the time."""
        where = f" in {self.label}"
        if self.died:
            end = "cannot be completed" if self.running else "was not completed"
            end = ": it is not at its target" if self.copies else f": this checkpoint {end}"
            return "bad", re.escape(f"{_names(self.died)} died{end}")
        if self.failed:
            (bad,) = [part for part in self.parts if part.outcome not in ("ok", "running")]
            if len(self.parts) == 1:
                return "bad", re.escape(f"{bad.outcome}{where}: nothing was replaced") + "$"
            return "bad", re.escape(f"{_names([bad.process])}: {bad.outcome}{where}") + "$"
        if self.running:
            return None
        end = f"; {re.escape(safe)}$" if safe else ""
        count = f"{len(self.parts)} of {len(self.parts) + len(self.missing)} ranks"
        if self.missing:
            missing = [f"rank {rank}" for rank in self.missing]
            return "warn", re.escape(f"{self.label}: {count} took part; {_some(missing)} did not") + end
        if self.empty:
            return "info", re.escape(f"{self.label}: nothing to write, {gb(self.linked)} GB linked") + end
        if self.copies:
            size = gb(self.total.least)
            return "info", re.escape(f"drain of {self.label}: {size} of {size} GB, ") + ".*" + end
        if self.reaches(target):
            return "info", re.escape(f"{self.label} was on target: ") + ".*" + end
        return "warn", re.escape(f"{self.label} stayed below its target: ") + ".*" + end


def _names(processes):
    ordered = sorted(processes, key=_place)
    return _some([f"pid {one.pid}" if one.rank is None else f"rank {one.rank}" for one in ordered])


def _some(names):
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} ranks"


def _place(process):
    return (process.rank is None, -1 if process.rank is None else process.rank, process.pid)


def gb(count):
    return f"{count / 1e9:.2f}"


class Row(NamedTuple):
    """A process's part in a shown operation, and its possible states."""

    process: Process
    operation: Operation
    part: Part
    states: set[str]


class Truth:
    """The expected outputs of a first look now."""

    def __init__(self, jobs):
        self.jobs = [job for job in jobs if job.operations]
        over = [job for job in self.jobs if not self.alive(job)]
        last = max(over, key=lambda job: max(one.ended for one in job.operations), default=None)
        fell = [one for job in self.jobs for one in job.processes if one.died and not self.again(one)]
        self.dead = [job for job in over if job is not last and any(one.job is job for one in fell)]
        self.others = sum(one.job in self.dead for one in fell)
        self.operations = self._operations()
        names = dict.fromkeys(one.operation.job.launch for one in self.operations)
        by_launch = {job.launch: job for job in self.jobs}
        self.shown = [by_launch[launch] for launch in names]
        ended = [one for job in self.jobs for one in job.operations if not one.running]
        self.past = [Shown(one, self) for one in sorted(ended, key=lambda one: -one.ended)]

    @staticmethod
    def alive(job):
        """The living processes of a job that have begun to save."""
        return [process for process in job.processes if process.alive and process.parts]

    def again(self, process):
        """Whether an ended process has been started again since, alone or with its whole job."""

        def took_its_place(other):
            later = other.parts and other.parts[0][0].begun > process.parts[-1][0].ended
            same = other.job is process.job or process.rank is None or not self.alive(process.job)
            return later and same and other.rank == process.rank and (other.alive or not process.died)

        alike = [other for job in self.jobs if job.name == process.job.name for other in job.processes]
        return not process.alive and bool(process.parts) and any(map(took_its_place, alike))

    def _left(self, job):
        """Whether a job is neither shown nor judged any more."""
        if self.alive(job):
            return False
        last = max((one for one in job.operations), key=lambda one: one.ended)
        return job in self.dead or all(self.again(part.process) for part in last.parts)

    def _operations(self):
        """Running operations, oldest first and copies last; then each job's last ended operation and last copy."""
        running = [one for job in self.jobs for one in job.operations if one.running]
        running.sort(key=lambda one: (one.kind == "drain", one.begun))
        ended = []
        for job in self.jobs:
            if not self._left(job):
                over = [one for one in job.operations if not one.running]
                last = {one.kind == "drain": one for one in sorted(over, key=lambda one: one.ended)}
                latest = max((one.ended for one in over), default=0)
                ended += [(-latest, copies, one) for copies, one in last.items()]
        ended.sort(key=lambda one: one[:2])
        return [Shown(one, self) for one in (*running, *(one for _, _, one in ended))]

    def of(self, job):
        return [one for one in self.operations if one.operation.job is job]

    def judged(self, operations):
        running = {(one.operation.job.launch, one.copies) for one in operations if one.running}
        return [one for one in operations if one.running or (one.operation.job.launch, one.copies) not in running]

    def rows(self, job):
        """The job's rows by rank: the operations in which a process is or died, otherwise its last operation."""
        last = max(job.operations, key=lambda one: (not one.running, one.ended))
        busy = {part.process for one in job.operations if one.running for part in one.parts}
        members = set() if self.alive(job) else {part.process for part in last.parts}
        found = []
        for process in sorted((one for one in job.processes if one.parts), key=_place):
            there = process.died or process in busy or process in members
            if not process.alive and (self.again(process) or not there):
                continue
            at = [(op, part) for op, part in process.parts if part.outcome in ("running", "died")]
            ended = [one for one in process.parts if one not in at]
            newest = max(ended, key=lambda one: (one[0].kind != "drain", one[0].ended), default=None)
            if newest and (not at or at[0][0].kind == "drain" != newest[0].kind):
                at.append(newest)
            at.sort(key=lambda one: one[0].begun)
            found += [Row(process, op, part, self._states(op, part)) for op, part in at]
        return found

    @staticmethod
    def _states(operation, part):
        if part.outcome in ("running", "died"):
            moving = "drain" if operation.kind == "drain" else "write"
            return {"dead"} if part.outcome == "died" else {moving}
        if part.outcome != "ok":
            return {"failed"}
        if operation.running:
            return {"done"}
        return {"done", "idle"} if part.process.alive else {"exit"}

    def counts(self, job):
        """The number of the job's living and dead processes, and of the living ones."""
        alive = len(self.alive(job))
        return alive + len({row.process for row in self.rows(job) if row.states == {"dead"}}), alive

    def gpus(self, job):
        counted = self.alive(job) or {row.process for row in self.rows(job)}
        return max(len(counted), *(one.gpus for one in self.of(job) if one.missing), 0)

    def safe(self, job):
        """Where the last step is safe, with its label and the earliest and latest time at which it became safe."""
        found = {}
        for one in sorted(job.operations, key=lambda one: one.ended):
            if all(part.outcome == "ok" for part in one.parts):
                told = [part.told for part in one.parts]
                at = [each["safe"] if one.kind == "drain" else each["real"] for each in told]
                longest = max(each["ended"] - each["begun"] for each in told)
                place = "remote" if one.kind == "drain" else "local"
                found[place] = one.label, Bounds(max(at) - longest, max(at))
        return found

    def safely(self, one, tick):
        """The text that says where the last step is safe, with the times from the tick."""
        safe = self.safe(one.operation.job)
        if "local" not in safe or not ("remote" in safe or one.copies):
            return ""
        at = {place: time.strftime("%H:%M:%S", time.localtime(found["t"])) for place, found in tick["safe"].items()}
        there = at.get("remote", "not yet")
        if "remote" in safe and safe["remote"][0] != safe["local"][0]:
            there = f"not yet ({safe['remote'][0]} {at['remote']})"
        return f"last step safe at: local {at['local']}, remote {there}"

    def key(self, job):
        """The job's key in a first look at everything."""
        first = min((process for process in job.processes if process.parts), key=_place)
        return f"{job.name}:{first.pid}"

    def status(self, target):
        """The expected exit status of `--check`."""
        judged = self.judged(self.operations)
        return 3 if not judged else 0 if all(one.fine(target) for one in judged) else 1
