"""Assigns processes to jobs, and computes the state of each job."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from fastckpt_top import derive
from fastckpt_top.rows import LEVELS, Job, Safe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastckpt_top.groups import Past
    from fastckpt_top.look import Look
    from fastckpt_top.rows import NodeOp, Row, Sentence
    from fastckpt_top.snapshot import Proc


class Jobs:
    """Gives each process its job.

    Processes started by one launcher, and those that share a process group, are one job. A job keeps its key, the name
    and the pid of its first process, even after that process is gone.
    """

    def __init__(self) -> None:
        self._key_of: dict[str, str] = {}
        self._launch_of: dict[str, int] = {}
        self._shared: set[int] = set()
        self._since: dict[str, int] = {}

    def since(self, key: str) -> int:
        """The place of a job among all, in the order in which they were first seen."""
        return self._since.get(key, 0)

    def united(self, procs: Iterable[Proc]) -> tuple[Proc, ...]:
        """The processes; those that wrappers, such as a shell for each rank, started one by one get a common launch.

        Such processes have the same number of ranks, one name, and overlapping lives. If a rank occurs twice, they keep
        their launches.
        """
        procs = tuple(procs)
        count = Counter(proc.header.launch for proc in procs)
        self._shared = {launch for launch in count if launch in self._shared or count[launch] > 1}
        like: dict[tuple[int, str, int], list[Proc]] = defaultdict(list)
        for proc in procs:
            header = proc.header
            if header.launch and header.launch not in self._shared and header.world > 1 and header.rank >= 0:
                like[header.uid, header.job, header.world].append(proc)
        found: dict[str, int] = {}
        for alike in like.values():
            for together in _at_one_time(alike):
                if len(together) > 1 and len({proc.header.rank for proc in together}) == len(together):
                    known = (self._launch_of[proc.key] for proc in together if proc.key in self._launch_of)
                    found |= dict.fromkeys((proc.key for proc in together), next(known, together[0].header.launch))
        self._launch_of = found
        return tuple(
            replace(proc, header=replace(proc.header, launch=found[proc.key])) if proc.key in found else proc
            for proc in procs
        )

    def assign(self, procs: Iterable[Proc]) -> dict[str, str]:
        """The job's key of each process, by process key."""
        procs = sorted(procs, key=derive.order)
        parts: list[tuple[set[str], list[Proc]]] = []
        for proc in procs:
            marks, members = _marks(proc), [proc]
            apart = []
            for other in parts:
                if other[0] & marks:
                    marks |= other[0]
                    members = other[1] + members
                else:
                    apart.append(other)
            parts = [*apart, (marks, members)]
        taken: set[str] = set()
        job_of: dict[str, str] = {}
        known, self._key_of = self._key_of, {}
        for marks, members in parts:
            old = sorted({known[mark] for mark in marks if mark in known} - taken)
            key = old[0] if old else _new_key(min(members, key=derive.order), taken | set(known.values()))
            taken.add(key)
            self._key_of |= dict.fromkeys(marks, key)
            job_of |= {proc.key: key for proc in members}
        newest = max(self._since.values(), default=0)
        self._since = {key: self._since.get(key, newest + 1 + place) for place, key in enumerate(sorted(taken))}
        return job_of


def _at_one_time(procs: list[Proc]) -> list[list[Proc]]:
    """Lists of processes whose lives overlap, as far as known."""
    parts: list[list[Proc]] = []
    until = float("-inf")
    for proc in sorted(procs, key=lambda proc: proc.header.real0_ns):
        if not parts or proc.header.real0_ns / 1e9 > until:
            parts.append([])
        parts[-1].append(proc)
        until = max(until, float("inf") if proc.alive else proc.touched)
    return parts


def _marks(proc: Proc) -> set[str]:
    """The features of which a process has at least one in common with the others of its job."""
    header = proc.header
    return {proc.team, f"job {header.job} {header.launch}"} if header.launch else {proc.team}


def _new_key(proc: Proc, taken: set[str]) -> str:
    key = first = f"{proc.header.job or 'job'}:{proc.header.pid}"
    number = 1
    while key in taken:  # pids are unique only within a namespace
        number += 1
        key = f"{first}.{number}"
    return key


def safe(past: Past, look: Look) -> dict[str, dict[str, Safe]]:
    """For each job, the last save, and the last drain that left a whole checkpoint at the remote."""
    found: dict[str, dict[str, Safe]] = {}
    for one in reversed(past.checkpoints):
        place = "remote" if one.whole and one.kind == "drain" else "local" if one.kind == "save" else ""
        key = next((job for member, _ in one.members if (job := look.job_of.get(member))), "")
        if place and key and not one.error:
            # Rounded down to milliseconds: an output that rounds it up could show a later second than the sentence.
            found.setdefault(key, {}).setdefault(place, Safe(one.label, one.step, int(one.end * 1000) / 1000))
    return found


def judged(ops: Iterable[NodeOp]) -> list[NodeOp]:
    """The operations by which a job is judged: the running ones, or else the last ended one; likewise for copies."""
    ops = list(ops)
    running = {(op.job_key, op.copies) for op in ops if op.running}
    return [op for op in ops if op.running or (op.job_key, op.copies) not in running]


def job(key: str, procs: Iterable[Proc], look: Look, rows: Iterable[Row], ops: Iterable[NodeOp], since: int = 0) -> Job:
    """The current state of a job.

    Args:
        key: Its key.
        procs: Its processes, at least one.
        look: The present.
        rows: Its rows.
        ops: Its operations: the running ones, oldest first, then the last that ended.
        since: The result of `Jobs.since`.
    """
    procs, ops = sorted(procs, key=derive.order), list(ops)
    alive = [proc for proc in procs if proc.alive]
    counted = alive or procs
    first = counted[0]
    return Job(
        key=key,
        name=first.header.job,
        pid=first.header.pid,
        user=first.user or str(first.header.uid),
        ranks=len(alive) + len({row.proc_key for row in rows if row.state == "DEAD"}),
        alive=len(alive),
        gpus=max(look.count_gpus(counted), *(op.gpus for op in ops if op.missing), 0),
        target=look.per_gpu(counted),
        active=any(op.running for op in ops),
        sentence=_foremost(judged(ops)),
        since=since,
    )


def _foremost(ops: list[NodeOp]) -> Sentence | None:
    """The first sentence of the most severe level."""
    said = [op.sentence for op in ops if op.sentence is not None]
    return max(said, key=lambda one: LEVELS.index(one.level), default=None)
