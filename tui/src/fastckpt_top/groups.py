"""Combines the work of ranks into operations of the node: running ones, and ended ones from history records."""

from __future__ import annotations

import errno
from collections import Counter
from typing import TYPE_CHECKING, Final

from fastckpt_top.rows import Checkpoint
from fastckpt_top.segment import ENGINES, FLAG_FALLBACK, FLAG_WHOLE, KINDS, History

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from fastckpt_top.rows import Event, NodeOp, Sentence
    from fastckpt_top.snapshot import Proc
    from fastckpt_top.tracks import OpTrack

TOGETHER_S: Final = 5.0
"""If a rank begins at most this many seconds after the others have ended, it still belongs to their operation."""
KEPT: Final = 500
"""The most checkpoints in the history."""
MOST_RANKS: Final = 1024
"""The most ranks of one machine that are accepted."""
KNOWN: Final = 256
"""The most remembered records of a process: several times the number in a segment."""


def errno_name(number: int) -> str:
    """`EPERM` for 1; `errno 9999` for numbers that this system does not know; empty for 0."""
    return errno.errorcode.get(number, f"errno {number}") if number else ""


def remembered(seen: frozenset[int], proc: Proc) -> frozenset[int]:
    """The operations of a process whose records were read before, and those whose records it has now.

    Operations that have left their segment do not come back: old ones are forgotten, so that they do not accumulate.
    """
    now = frozenset(record.op_id for record in proc.history)
    both = seen | now
    return both if len(both) <= KNOWN else now


class Group:
    """One operation of the node.

    Attributes:
        team: The common feature of the ranks: their process group, or the job's name.
        kind: The kind, as a number of the segment.
        label: Base name of the target path.
        step: Training step, -1 if unknown.
        copies: Whether it moves a checkpoint from one place to another.
        members: Process -> its track.
        peak: Largest rate of all ranks together, bytes/s.
        gpus: GPUs while it ran; 0 if not yet known.
        target: Their target in bytes/s while it was seen running; 0 if it was not.
        ranks: Ranks that these GPUs belong to, including those that had not joined yet.
        straggler: The rank that the node waits for; None if none is clearly behind.
        told_end: Whether its end was reported; `told_change` is the same for its changes.
        was_running: Whether it was ever seen running.
        job: The key of its job.
        causes: How often each cause was seen to hold it back.
        said: The sentence about it, and the facts from which it was made.
        stalls: By process, how often it stood still.
        folded: The last event of each kind of which only the last is kept.
    """

    def __init__(self, track: OpTrack) -> None:
        self.shared = self.team, self.kind, self.label, self.step = track.shared
        self.copies = track.copies
        self.members: dict[str, OpTrack] = {track.proc.key: track}
        self.peak = 0.0
        self.gpus = 0
        self.target = 0.0
        self.ranks = 1
        self.straggler: OpTrack | None = None
        self.told_end = self.told_change = False
        self.was_running = False
        self.job = ""
        self.causes: Counter[str] = Counter()
        self.said: tuple[NodeOp, Sentence | None] | None = None
        self.stalls: Counter[str] = Counter()
        self.folded: dict[str, Event] = {}

    @property
    def keys(self) -> list[tuple[str, int]]:
        """The keys of each rank's part: process and operation."""
        return [track.key for track in self.members.values()]

    @property
    def running(self) -> bool:
        """Whether the operation continues on any rank."""
        return any(track.running for track in self.members.values())

    @property
    def start(self) -> float:
        """When the first rank started, on the reader's clock."""
        return min(track.start for track in self.members.values())

    @property
    def end(self) -> float:
        """When the last rank ended, on the reader's clock; meaningless while one runs."""
        return max(track.end if track.end is not None else track.start for track in self.members.values())

    @property
    def failed(self) -> bool:
        """Whether a rank failed or died in the operation."""
        return any(track.failed for track in self.members.values())

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of this machine that have not begun the operation (docs/telemetry.md 5.1).

        They are expected to follow if the process group has all ranks, or if more than half of those here have begun.
        """
        procs = [track.proc for track in self.members.values()]
        header, process = procs[0].header, procs[0].process
        local = min(header.local_world, header.world, MOST_RANKS)
        together = process.group_size == header.world if process.group else 2 * len(procs) > local
        first = 0 if local == header.world else header.rank - header.local_rank
        if not 0 <= first <= header.rank or not together or self.copies:
            return ()
        return tuple(sorted({*range(first, first + local)} - {proc.header.rank for proc in procs}))

    def takes(self, track: OpTrack) -> bool:
        """Whether another rank's operation, of the same team, kind, label and step, is part of this one.

        Operations of a new process of the same rank belong to another attempt, and so do those that processes without a
        rank begin after one has failed. The time of a rank's death is only known to be between two looks: an operation
        that another rank began in that time is still part of this one.
        """
        rank = track.proc.rank
        ranks = {member.proc.rank for member in self.members.values()}
        if track.proc.key in self.members or (rank >= 0 and rank in ranks):
            return False
        last = track.end if track.end is not None else float("inf")
        first_end = float("inf") if self.running else self.end
        lost = [member.lost for member in self.members.values() if member.lost is not None and rank >= 0]
        slack = 0.0 if rank < 0 and (self.failed or track.failed) else TOGETHER_S
        return track.start <= max(first_end + slack, *lost, self.start) and last >= self.start - slack


class Past:
    """The history of the node's operations.

    Attributes:
        checkpoints: The checkpoints on which no rank is working, the newest last.
    """

    def __init__(self) -> None:
        self.checkpoints: list[Checkpoint] = []
        self._all: list[Checkpoint] = []
        self._of: dict[tuple[str, int], Checkpoint] = {}
        self._seen: dict[str, frozenset[int]] = {}

    def add(self, procs: Iterable[Proc], groups: Iterable[Group], name: Callable[[Proc], str]) -> None:
        """Add the new records of these processes, and the ends of ranks that leave no record.

        Args:
            procs: Processes, with their records.
            groups: The operations that are known, running and ended.
            name: Returns the name of a process.
        """
        groups = list(groups)
        self._add(procs, {key: group for group in groups for key in group.keys})
        for group in groups:
            self._settle(group, name)
        self._all.sort(key=lambda checkpoint: checkpoint.end)
        for checkpoint in self._all[:-KEPT]:
            for member in checkpoint.members:
                self._of.pop(member, None)
        del self._all[:-KEPT]
        self.checkpoints = [checkpoint for checkpoint in self._all if not checkpoint.running]

    def _settle(self, group: Group, name: Callable[[Proc], str]) -> None:
        """Add to the history what records lack: a dead rank leaves no record, and a working rank has none yet."""
        tracks = list(group.members.values())
        dead = sorted(name(track.proc) for track in tracks if track.died)
        known = (self._of[track.key] for track in tracks if track.key in self._of)
        checkpoint = next(known, None)
        if checkpoint is None:
            if not dead or group.running:
                return
            begun = min(track.start_real for track in tracks)
            kind, step = KINDS.get(group.kind, "unknown"), group.step if group.step >= 0 else None
            checkpoint = Checkpoint(kind, group.label, step, begun, begun + group.end - group.start, team=group.team)
            self._all.append(checkpoint)
        checkpoint.running = group.running
        checkpoint.target = group.target
        for track in tracks:
            checkpoint.members.add(track.key)
            self._of[track.key] = checkpoint
        if dead and "died" not in checkpoint.error:
            checkpoint.error = f"{', '.join(dead)} died"

    def _add(self, procs: Iterable[Proc], group_of: Mapping[tuple[str, int], Group]) -> None:
        new: list[tuple[Proc, History]] = []
        for proc in procs:
            seen = self._seen.get(proc.key, frozenset())
            fresh = [(proc, record) for record in proc.history if record.op_id not in seen]
            if fresh:
                new += fresh
                self._seen[proc.key] = remembered(seen, proc)
        for proc, record in sorted(new, key=lambda pair: pair[1].t_start_real_ns):
            self._join(proc, record, group_of.get((proc.key, record.op_id)))

    def _find(self, proc: Proc, record: History, start: float, end: float) -> Checkpoint | None:
        """The checkpoint of a record whose operation was never seen."""
        mine = (proc.team, KINDS.get(record.kind, "unknown"), record.label, record.step if record.step >= 0 else None)
        for checkpoint in reversed(self._all):
            same = mine == (checkpoint.team, checkpoint.kind, checkpoint.label, checkpoint.step)
            together = start <= checkpoint.end + TOGETHER_S and end >= checkpoint.start - TOGETHER_S
            others = all(key != proc.key or number == record.op_id for key, number in checkpoint.members)
            if same and together and others:
                return checkpoint
        return None

    def _join(self, proc: Proc, record: History, group: Group | None) -> None:
        kind = KINDS.get(record.kind, "unknown")
        start = record.t_start_real_ns / 1e9
        end = start + record.dur_ns / 1e9
        step = record.step if record.step >= 0 else None
        if group is not None:
            checkpoint = next((self._of[key] for key in group.keys if key in self._of), None)
        else:
            checkpoint = self._find(proc, record, start, end)
        if checkpoint is None:
            checkpoint = Checkpoint(kind, record.label, step, start, end, team=proc.team)
            self._all.append(checkpoint)
        checkpoint.start = min(checkpoint.start, start)
        checkpoint.end = max(checkpoint.end, end)
        checkpoint.bytes += record.bytes
        checkpoint.sync_s = max(checkpoint.sync_s, record.sync_ns / 1e9)
        checkpoint.peak += record.peak_bps
        checkpoint.engines.add(ENGINES.get(record.engine, "unknown"))
        checkpoint.p99_s = max(checkpoint.p99_s, record.p99_us / 1e6)
        checkpoint.members.add((proc.key, record.op_id))
        self._of[proc.key, record.op_id] = checkpoint
        checkpoint.gpus += proc.header.gpu >= 0
        checkpoint.whole |= bool(record.flags & FLAG_WHOLE)
        if record.result != 1 and not checkpoint.error:
            checkpoint.error = errno_name(record.error) or "failed"
        if record.flags & FLAG_FALLBACK and not checkpoint.fallback:
            checkpoint.fallback = errno_name(record.fallback_errno) or "yes"
