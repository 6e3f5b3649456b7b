"""Makes rows from snapshots: keeps track of processes and operations, and refills the contents of the views.

This module is pure: it does no I/O and reads no clock.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from fastckpt_top import derive, operations, ranks
from fastckpt_top.events import Events
from fastckpt_top.groups import Group, Past
from fastckpt_top.jobs import Jobs, job, safe
from fastckpt_top.look import Look
from fastckpt_top.segment import COPIES, Kind
from fastckpt_top.sentence import cause, sentence
from fastckpt_top.series import Series
from fastckpt_top.targets import DEFAULT_TIER, Target, tier
from fastckpt_top.tracks import COLUMNS, OpTrack, ProcTrack

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Mapping, Sequence

    from fastckpt_top.rows import Event, Job, NodeOp, Row, Safe
    from fastckpt_top.snapshot import Proc, Snapshot

LINGER_S: Final = 30.0
"""Seconds for which a process that exited cleanly stays in the table beside live ones of its job."""
POST_MORTEM_S: Final = 600.0
"""The same for a process that died in an operation, and for a process of a finished job, after its end."""
GROUPS: Final = 16
"""The least number of ended operations to keep."""


@dataclass(frozen=True, slots=True)
class Node:
    """A summary of the machine.

    Attributes:
        host: Its name.
        ranks: Processes with a segment that live or died in an operation.
        alive: Those that live.
        gpus: GPUs that targets are multiplied by.
        job: Label and pid of the first process; empty without one.
        save_rate: Bytes/s being written by all ranks.
        load_rate: Bytes/s being read.
        target: Per GPU.
        active: Whether any operation runs.
    """

    host: str = ""
    ranks: int = 0
    alive: int = 0
    gpus: int = 0
    job: str = ""
    save_rate: float = 0.0
    load_rate: float = 0.0
    target: Target = tier(DEFAULT_TIER, "default")  # noqa: RUF009  (frozen)
    active: bool = False


class Model:
    """Everything the views show, refilled by `update`.

    Args:
        target: The user's target; None to follow the processes.
        gpus: Number of GPUs that the target is multiplied by; None to count them.
        job: Name or key of the only job that is looked at; empty for all.

    Attributes:
        mono: Reader's clock of the last snapshot, seconds.
        real: Its time, seconds since the epoch.
        node: The machine.
        rows: One for each rank and operation, in order of rank.
        jobs: Jobs, those with a running operation first, the oldest of these first.
        job_of: Process key -> key of its job, for every process that the last look found.
        ops: Running operations of all jobs, the oldest first, copies after the others; then each job's last ended
            operation and last ended copy, the latest job first.
        others: The number of processes that died in jobs that are over, except the last such job; one line reports it.
        past: History.
        problems: Files that could not be read, and why.
        places: Directories that were looked at.
        snapshot: The last one; if one job is wanted, without the processes of the others.
    """

    def __init__(self, target: Target | None = None, gpus: int | None = None, job: str = "") -> None:
        self.target = target
        self.gpus = gpus
        self.job = job
        self.mono = 0.0
        self.real = 0.0
        self.node = Node()
        self.rows: list[Row] = []
        self.jobs: list[Job] = []
        self.ops: list[NodeOp] = []
        self.past = Past()
        self.others = 0
        self.problems: tuple[tuple[str, str], ...] = ()
        self.places: tuple[str, ...] = ()
        self.snapshot: Snapshot | None = None
        self._events = Events()
        self._series = Series()
        self._jobs = Jobs()
        self.job_of: dict[str, str] = {}
        self._procs: dict[str, ProcTrack] = {}
        self._ops: dict[tuple[str, int], OpTrack] = {}
        self._groups: list[Group] = []
        self._living: list[Proc] = []
        self._alike: defaultdict[tuple[int, int, str], list[Proc]] = defaultdict(list)
        self._at_work: set[str] = set()
        self._dead_jobs: set[str] = set()
        self._over: set[str] = set()
        self._safe: dict[str, dict[str, Safe]] = {}

    def update(self, snapshot: Snapshot) -> None:
        """Process the result of one look."""
        snapshot = self._wanted(snapshot)
        self.snapshot, self.mono, self.real = snapshot, snapshot.mono, snapshot.real
        self.problems, self.places = snapshot.problems, snapshot.places
        self._living = [proc for proc in snapshot.procs if proc.alive]
        self._alike = defaultdict(list)
        for proc in snapshot.procs:
            self._alike[proc.rank, proc.header.uid, proc.header.job].append(proc)
        self._track(snapshot)
        self._forget(snapshot)
        self.past.add(snapshot.procs, self._groups, derive.name)
        look = self._look(snapshot)
        for group in self._groups:
            group.job = next((job for key in group.members if (job := look.job_of.get(key))), group.job)
        self._events.tell(self._groups, look)
        self._at_work = {key for group in self._groups if group.running for key in group.members}
        self._set_aside(look)
        self._prune()
        self._refresh_node(look)
        self._push_columns()
        self._refresh(look)

    def set_target(self, target: Target | None) -> None:
        """Change the target; the screen follows at once."""
        self.target = target
        if self.snapshot is not None:
            look = self._look(self.snapshot)
            self._refresh_node(look)
            self._refresh(look)

    def frozen(self) -> Model:
        """Its current contents, as a separate model that does not change."""
        kept = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list) or name in ("past", "_events", "_series"):
                setattr(kept, name, copy.deepcopy(value))
        return kept

    @property
    def main(self) -> NodeOp | None:
        """The most important operation: the oldest running one, else the last ended one."""
        return self.ops[0] if self.ops else None

    @property
    def events(self) -> deque[Event]:
        """The latest events, the oldest first."""
        return self._events.kept

    @property
    def event_count(self) -> int:
        """All events so far, even those no longer kept."""
        return self._events.count

    def series(self, seconds: float, cells: int) -> tuple[list[float], list[float]]:
        """Bytes/s written and read by the node, as means over equal parts of the last `seconds`; see `Series.cells`."""
        return self._series.cells(seconds, cells)

    # --- remembering -----------------------------------------------------------------------------------------------

    def _wanted(self, snapshot: Snapshot) -> Snapshot:
        """Assign each process to its job, and leave out other jobs than the requested one."""
        snapshot = replace(snapshot, procs=self._jobs.united(snapshot.procs))
        self.job_of = self._jobs.assign(snapshot.procs)
        if not self.job:
            return snapshot
        kept = tuple(proc for proc in snapshot.procs if self.job in (self.job_of[proc.key], proc.header.job))
        return replace(snapshot, procs=kept)

    def _look(self, snapshot: Snapshot) -> Look:
        own = (self._procs, self.job_of, self.target, self.gpus)
        return Look(snapshot.mono, snapshot.real, snapshot.procs, *own, snapshot.devices)

    def _track(self, snapshot: Snapshot) -> None:
        mono = snapshot.mono
        new: list[OpTrack] = []
        for proc in snapshot.procs:
            track = self._procs.get(proc.key)
            if track is None:
                track = self._procs[proc.key] = ProcTrack(mono)
            before = track.update(proc, mono)
            saves = [record.sync_ns for record in proc.history if record.kind == Kind.SAVE and record.result == 1]
            if saves:
                track.sync_s = saves[-1] / 1e9
            for op in proc.operations:
                key = (proc.key, op.op_id)
                known = self._ops.get(key)
                if known is None:
                    known = self._ops[key] = OpTrack(proc, op, mono, snapshot.real)
                    track.begin(mono)
                    known.update(proc, op, mono, before)
                    new.append(known)
                elif proc.alive or known.running or known.proc is not proc:  # dead processes do not change
                    known.update(proc, op, mono, before)
        # New operations join groups by start, once it is known which have ended: a monitor that starts late finds many.
        alike: defaultdict[tuple[str, int, str, int], list[Group]] = defaultdict(list)
        for group in self._groups if new else ():
            alike[group.shared].append(group)
        for known in sorted(new, key=lambda one: one.start):
            self._join(known, alike[known.shared])

    def _forget(self, snapshot: Snapshot) -> None:
        """Forget processes whose segments are gone, and operations that their segments no longer show."""
        keys = {proc.key for proc in snapshot.procs}
        present = {(proc.key, op.op_id) for proc in snapshot.procs for op in proc.operations}
        for key in [key for key in self._ops if key not in present]:
            gone = self._ops.pop(key)
            if gone.running:  # the segment was removed under a running operation
                gone.died = True
                gone.end = gone.changed
        for name in [name for name in self._procs if name not in keys]:
            del self._procs[name]

    def _join(self, track: OpTrack, alike: list[Group]) -> None:
        takers = (group for group in alike if group.takes(track))
        nearest = min(takers, key=lambda group: abs(group.start - track.start), default=None)
        if nearest is None:
            self._groups.append(Group(track))
            alike.append(self._groups[-1])
        else:
            nearest.members[track.proc.key] = track

    def _prune(self) -> None:
        """Forget ended operations beyond the last few, unless they are the last of a job or of a living process."""
        ended = sorted((group for group in self._groups if not group.running), key=lambda group: group.end)
        last: dict[tuple[str, bool], Group] = {}
        for group in ended:
            alive = [(key, group.copies) for key in group.members if key in self._procs and self._procs[key].alive]
            last |= dict.fromkeys(alive, group)
            if alive or not self._is_past(group):
                last[group.job, group.copies] = group
        kept = {id(group) for group in (*ended[-GROUPS:], *last.values())}
        self._groups = [group for group in self._groups if group.running or id(group) in kept]

    def _set_aside(self, look: Look) -> None:
        """Find the jobs that died without a live process, except the last one to end."""
        alive = {look.job_of[proc.key] for proc in look.procs if proc.alive}
        over = [group for group in self._groups if not group.running and group.job not in alive]
        last = max(over, key=lambda group: group.end, default=None)
        self._dead_jobs = set()
        died = [look.job_of[proc.key] for proc in look.procs if proc.died and self._shown(proc)]
        self._dead_jobs = {*died} - alive - {"" if last is None else last.job}
        self.others = sum(job in self._dead_jobs for job in died)
        lasts = {group.job: group for group in sorted(over, key=lambda group: group.end)}
        self._over = {key for group in lasts.values() if not self._is_past(group) for key in group.members}

    def _push_columns(self) -> None:
        count = self._series.add(self.mono, self.node.save_rate, self.node.load_rate)
        count = min(count, COLUMNS)
        for track in self._ops.values():  # ended ones, too, so that all rows show the same time
            running = track.running
            track.spark.extend([(track.rate() or 0.0) if running else 0.0] * count)
            for thread in track.threads.values():
                thread.spark.extend([(thread.window.rate() or 0.0) if running else 0.0] * count)

    # --- what is shown ---------------------------------------------------------------------------------------------

    def _refresh(self, look: Look) -> None:
        shown = {look.job_of[proc.key] for proc in look.procs if self._shown(proc)}
        running = [group for group in self._groups if group.running]
        ended = sorted((group for group in self._groups if not group.running), key=lambda group: -group.end)
        ended = [group for group in ended if group.job in shown or not self._is_past(group)] or ended[:1]
        last = {(group.job, group.copies): group for group in reversed(ended)}
        latest = {group.job: group.end for group in reversed(ended)}
        groups = sorted(running, key=lambda group: (group.copies, group.start))
        groups += sorted(last.values(), key=lambda group: (-latest[group.job], group.copies))
        self._safe = safe(self.past, look)
        # The straggler, GPUs and target of an operation follow from its rows, which come first.
        made = [operations.node_op(group, look) for group in groups]
        self._refresh_rows(look, groups)
        rows = {row.key: row for row in self.rows}
        self.ops = [self._said(op, group, rows, look) for op, group in zip(made, groups, strict=True)]
        self._refresh_jobs(look, groups)

    def _refresh_node(self, look: Look) -> None:
        alive = [proc for proc in look.procs if proc.alive]
        died = {track.proc.key for track in self._ops.values() if track.died and self._shown(track.proc)}
        moving = [track for track in self._ops.values() if track.running and track.op.kind not in COPIES]
        written = sum(track.rate() or 0.0 for track in moving if track.op.kind == Kind.SAVE)
        read = sum(track.rate() or 0.0 for track in moving if track.op.kind != Kind.SAVE)
        first = min(alive, key=derive.order, default=None)
        self.node = Node(
            host=self.snapshot.host if self.snapshot is not None else "",
            ranks=len(alive) + len(died),
            alive=len(alive),
            gpus=look.count_gpus(alive),
            job=f"{first.header.job}({first.header.pid})" if first and first.header.job else "",
            save_rate=written,
            load_rate=read,
            target=look.per_gpu(alive),
            active=any(track.running for track in self._ops.values()),
        )

    def _shown(self, proc: Proc) -> bool:
        track = self._procs.get(proc.key)
        if proc.alive or track is None:
            return True
        if self.job_of.get(proc.key) in self._dead_jobs or self._restarted(proc):
            return False
        if proc.key in self._at_work:  # a save is shown with all of its ranks, until the last of them is done
            return True
        if proc.died:
            return track.died is not None or self.real - proc.touched < POST_MORTEM_S
        return proc.key in self._over or (track.died is not None and self.mono - track.died < LINGER_S)

    def _is_past(self, group: Group) -> bool:
        """Whether a job without a shown process has left the list."""
        if group.job in self._dead_jobs or self.mono - group.end >= POST_MORTEM_S:
            return True
        return all(self._restarted(track.proc) for track in group.members.values())

    def _restarted(self, dead: Proc) -> bool:
        """Whether a rank's job has been restarted: by its launcher, or after all of its processes were gone.

        Without a rank: whether a process of the same name has begun since this one last did something. The new process
        may have ended by now, unless this one died.
        """
        header = dead.header
        same = self._alike[dead.rank, header.uid, header.job]
        alike = [one for one in same if one.alive or (one.header.real0_ns / 1e9 > dead.touched and not dead.died)]
        if dead.rank < 0:
            ops = (self._ops.get((dead.key, op.op_id)) for op in dead.operations)
            ends = [self.real - self.mono + op.end for op in ops if op is not None and op.end is not None]
            return any(proc.header.real0_ns / 1e9 > max(dead.touched, *ends, 0) for proc in alike)
        launches = {proc.header.launch for proc in alike}
        return header.launch in launches or (
            bool(launches) and all(header.launch != proc.header.launch for proc in self._living)
        )

    def _refresh_rows(self, look: Look, known: Sequence[Group]) -> None:
        groups = {track.key: group for group in self._groups for track in group.members.values()}
        fresh = {id(group) for group in known}
        places = ranks.places(look)
        targets = self._idle_targets(look)
        rows: list[Row] = []
        for proc in sorted(look.procs, key=derive.order):
            if not self._shown(proc):
                continue
            tracks = [self._ops[proc.key, op.op_id] for op in proc.operations if (proc.key, op.op_id) in self._ops]
            shown = [track for track in tracks if track.running or track.died]
            ended = [track for track in tracks if not track.running and not track.died]
            last = max(ended, key=lambda track: (not track.copies, track.end or 0.0), default=None)
            if last and (not shown or (all(track.copies for track in shown) and not last.copies)):
                shown.append(last)  # beside a copy, the last save or load is shown
            for track in sorted(shown, key=lambda track: track.op.op_id):
                group = groups.get(track.key) or Group(track)
                if id(group) not in fresh:
                    fresh.add(id(group))
                    operations.node_op(group, look)
                rows.append(ranks.row(track, group, look, places))
            if not shown:
                rows.append(ranks.idle_row(proc, look, places, targets[look.job_of[proc.key]]))
        self.rows = rows

    @staticmethod
    def _idle_targets(look: Look) -> dict[str, float]:
        """Bytes/s that a rank of each job should reach when it saves."""
        procs: dict[str, list[Proc]] = defaultdict(list)
        for proc in look.procs:
            procs[look.job_of[proc.key]].append(proc)
        targets = {}
        for key, members in procs.items():
            counted = [proc for proc in members if proc.alive] or members
            targets[key] = look.per_gpu(counted).save * look.count_gpus(counted) / len(counted)
        return targets

    def _said(self, op: NodeOp, group: Group, rows: Mapping[str, Row], look: Look) -> NodeOp:
        """An operation with its sentence; the sentence of an ended one is made once."""
        if group.kind == Kind.DRAIN or (group.kind == Kind.SAVE and not op.running):
            op = replace(op, safe=self._safe.get(op.job_key, {}))
        if group.said is not None and group.said[0] == op:
            return replace(op, sentence=group.said[1])
        places = ranks.places(look)
        own = [
            rows.get(f"{track.proc.key}/{track.op.op_id}") or ranks.row(track, group, look, places)
            for track in sorted(group.members.values(), key=lambda track: derive.order(track.proc))
        ]
        if op.running:
            group.causes[cause(op, own)] += 1
        held = next((words for words, _ in group.causes.most_common(1)), "")
        group.said = (op, sentence(op, own, held))
        return replace(op, sentence=group.said[1])

    def _refresh_jobs(self, look: Look, groups: Sequence[Group]) -> None:
        procs: dict[str, dict[str, Proc]] = defaultdict(dict)
        for proc in look.procs:
            if self._shown(proc):
                procs[look.job_of[proc.key]][proc.key] = proc
        for group in groups:
            if group.job not in procs:  # the job is over, and its processes are gone
                tracks = group.members.values()
                procs[group.job] = {track.proc.key: replace(track.proc, alive=False) for track in tracks}
        made = {
            key: job(
                key,
                members.values(),
                look,
                [row for row in self.rows if row.job_key == key],
                [op for op in self.ops if op.job_key == key],
                self._jobs.since(key),
            )
            for key, members in procs.items()
        }
        # Jobs have the order of their operations, running ones first. Jobs without any come last, by their first rank.
        order = {key: index for index, key in reversed(list(enumerate(op.job_key for op in self.ops)))}
        jobs = [replace(one, safe=self._safe.get(key, {})) for key, one in made.items()]
        self.jobs = sorted(jobs, key=lambda one: order.get(one.key, len(order)))
