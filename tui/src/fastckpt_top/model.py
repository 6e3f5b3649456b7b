"""From snapshots to what is shown: rates, averages, ETA, verdicts, stragglers, stalls, events.

Pure: no I/O, no clock of its own.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from fastckpt_top import derive, text
from fastckpt_top.groups import Group, Past, errno_name
from fastckpt_top.rows import Event, Job, NodeOp, Row, ThreadRow, Verdict, judge
from fastckpt_top.segment import (
    ENGINES,
    FLAG_ASYNC,
    FLAG_DIRECT,
    FLAG_FALLBACK,
    FLAG_MIXED,
    KINDS,
    PHASES,
    Kind,
    Phase,
    ThreadState,
)
from fastckpt_top.targets import DEFAULT_TIER, TIERS, Target, tier
from fastckpt_top.tracks import COLUMN_S, COLUMNS, MOVING, PREPARING, OpTrack, ProcTrack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastckpt_top.snapshot import Proc, Snapshot

EVENTS: Final = 200
"""Events that are kept."""
BEHIND: Final = 1.25
"""How many times the median a rank's ETA is when the node waits for it; likewise a thread's rate below the median."""
QUIET_S: Final = 1.0
"""No ETA and no straggler in this first part of an operation, seconds."""
LINGER_S: Final = 30.0
"""How long a process that exited in order stays in the table, seconds."""
POST_MORTEM_S: Final = 600.0
"""How long one that died in an operation does, seconds after the file was last touched."""
DONE_S: Final = 10.0
"""How long a rank says DONE before it says IDLE, seconds."""
GROUPS: Final = 16
"""Ended operations that are kept."""


@dataclass(frozen=True, slots=True)
class Node:
    """The machine at a glance.

    Attributes:
        host: Its name.
        ranks: Processes with a segment that live or died in an operation.
        alive: Those that live.
        gpus: GPUs that targets are multiplied by.
        job: Label and pid of the first process; empty without one.
        version: Its fastckpt.
        save_rate: Bytes/s being written by all ranks.
        load_rate: Bytes/s being read.
        target: Per GPU.
        active: Whether any operation runs.
        fallbacks: `rank 6 threads (EPERM)` of each running operation that fell back.
    """

    host: str = ""
    ranks: int = 0
    alive: int = 0
    gpus: int = 0
    job: str = ""
    version: str = ""
    save_rate: float = 0.0
    load_rate: float = 0.0
    target: Target = tier(DEFAULT_TIER, "default")  # noqa: RUF009  (frozen)
    active: bool = False
    fallbacks: tuple[str, ...] = ()


class Model:
    """Everything the views show, filled anew by `update`.

    Args:
        target: What the user asked for; None to follow the processes.
        gpus: Number of GPUs that the target is multiplied by; None to count them.

    Attributes:
        mono: Reader's clock of the last snapshot, seconds.
        real: Its time, seconds since the epoch.
        node: The machine.
        rows: One a rank and operation, in order of rank.
        jobs: Jobs, those with a running operation first, the oldest of these first.
        ops: Operations of the node: the running ones, then the last that ended.
        events: The latest, oldest first.
        event_count: Events ever, also those no longer kept.
        past: History.
        save_graph: Bytes/s written, one value a column; `load_graph` likewise.
        problems: Files that could not be read, and why.
        places: Directories that were looked at.
        snapshot: The last one.
    """

    def __init__(self, target: Target | None = None, gpus: int | None = None) -> None:
        self.target = target
        self.gpus = gpus
        self.mono = 0.0
        self.real = 0.0
        self.node = Node()
        self.rows: list[Row] = []
        self.jobs: list[Job] = []
        self.ops: list[NodeOp] = []
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self.event_count = 0
        self.past = Past()
        self.save_graph: deque[float] = deque(maxlen=COLUMNS)
        self.load_graph: deque[float] = deque(maxlen=COLUMNS)
        self.problems: tuple[tuple[str, str], ...] = ()
        self.places: tuple[str, ...] = ()
        self.snapshot: Snapshot | None = None
        self._procs: dict[str, ProcTrack] = {}
        self._ops: dict[tuple[str, int], OpTrack] = {}
        self._groups: list[Group] = []
        self._column: float | None = None
        self._told = False
        self._living: set[tuple[int, str, int, int]] = set()

    def update(self, snapshot: Snapshot) -> None:
        """Take in what one look found."""
        mono = snapshot.mono
        self.snapshot, self.mono, self.real = snapshot, mono, snapshot.real
        self.problems, self.places = snapshot.problems, snapshot.places
        self._living = {(p.header.uid, p.header.job, p.rank, p.header.launch) for p in snapshot.procs if p.alive}
        self._track(snapshot)
        self._forget(snapshot)
        self.past.add(snapshot.procs, self._groups, derive.name)
        self._tell()
        self._refresh_node(snapshot)
        self._push_columns()
        self._refresh_ops()
        self._refresh_rows(snapshot)

    def set_target(self, target: Target | None) -> None:
        """Change the target; what is shown follows at once."""
        self.target = target
        if self.snapshot is not None:
            self._refresh_node(self.snapshot)
            self._refresh_ops()
            self._refresh_rows(self.snapshot)

    @property
    def main(self) -> NodeOp | None:
        """The operation that matters most now: the oldest running one, else the last that ended."""
        return self.ops[0] if self.ops else None

    # --- remembering -----------------------------------------------------------------------------------------------

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
                elif proc.alive or known.running or known.proc is not proc:  # the dead do not change
                    known.update(proc, op, mono, before)
        # By their starts, and when it is known which have ended: who attaches late meets many operations at once.
        for known in sorted(new, key=lambda one: one.start):
            self._join(known)

    def _forget(self, snapshot: Snapshot) -> None:
        """Let go of processes whose segments are gone, and of operations that theirs no longer show."""
        keys = {proc.key for proc in snapshot.procs}
        present = {(proc.key, op.op_id) for proc in snapshot.procs for op in proc.operations}
        for key in [key for key in self._ops if key not in present]:
            gone = self._ops.pop(key)
            if gone.running:  # the segment was removed under a running operation
                gone.died = True
                gone.end = gone.changed
        for name in [name for name in self._procs if name not in keys]:
            del self._procs[name]

    def _join(self, track: OpTrack) -> None:
        nearest = min(
            (group for group in self._groups if group.takes(track)),
            key=lambda group: abs(group.start - track.start),
            default=None,
        )
        if nearest is None:
            self._groups.append(Group(track))
        else:
            nearest.members[track.proc.key] = track

    # --- events ----------------------------------------------------------------------------------------------------

    def _event(self, level: str, what: str, real: float | None = None) -> None:
        self.events.append(Event(self.real if real is None else real, level, what))
        self.event_count += 1

    def _tell(self) -> None:
        if not self._told:  # what had ended before anybody looked is history, and no news
            self._told = True
            for group in self._groups:
                group.told_end = not group.running
        for group in self._groups:
            if group.running and not group.was_running:
                group.was_running = True
                start_real = min(track.start_real for track in group.members.values())
                self._event("info", f"{derive.title(group)} started", start_real)
        for track in self._ops.values():
            if track.running:
                self._tell_trouble(track)
        for group in self._groups:
            if not group.told_end:
                self._tell_end(group)

    def _tell_trouble(self, track: OpTrack) -> None:
        op, name = track.op, derive.name(track.proc)
        if op.flags & FLAG_FALLBACK and not track.told_fallback:
            track.told_fallback = True
            self._event("warn", f"{name} {derive.fallback(op.fallback_errno, ENGINES.get(op.engine, 'unknown'))}")
        stalled = track.stalled(self._procs[track.proc.key], self.mono)
        if stalled is not None and not track.told_stall:
            track.told_stall = True
            self._event("warn", f"{name} stalled: no progress for {stalled:.0f} s")
        elif stalled is None and track.told_stall:
            track.told_stall = False
            self._event("info", f"{name} goes on")

    def _tell_end(self, group: Group) -> None:
        for track in group.members.values():
            if track.failed and not track.told_end:
                track.told_end = True
                self._event("bad", self._obituary(track))
        if group.running:
            return
        group.told_end = True
        op = self._node_op(group)
        if not op.failed:
            share = text.percent(derive.share(op.average, op.target))
            speed = f"{text.rate(op.average)} GB/s, {share} of target"
            self._event(
                "info", f"{derive.title(group)} done: {text.size(op.total)} GB in {op.elapsed_s:.1f} s, {speed}"
            )

    def _obituary(self, track: OpTrack) -> str:
        kind = KINDS.get(track.op.kind, "operation")
        name = derive.name(track.proc)
        if track.died:
            share = derive.share(track.done, track.op.bytes_total)
            died = f"{name} pid {track.proc.header.pid} died in {kind} at {text.percent(share)}"
            together = track.op.kind == Kind.SAVE and track.proc.process.group
            return f"{died}: this checkpoint cannot be completed" if together else died
        return f"{name} {kind} failed: {errno_name(track.op.error) or 'see its log'}"

    # --- the node --------------------------------------------------------------------------------------------------

    def _refresh_node(self, snapshot: Snapshot) -> None:
        alive = [proc for proc in snapshot.procs if proc.alive]
        died = {track.proc.key for track in self._ops.values() if track.died and self._shown(track.proc)}
        save = load = 0.0
        fallbacks = []
        for track in self._ops.values():
            if not track.running:
                continue
            moved = track.rate() or 0.0
            if track.op.kind == Kind.SAVE:
                save += moved
            else:
                load += moved
            if track.op.flags & FLAG_FALLBACK:
                why = errno_name(track.op.fallback_errno) or "unknown cause"
                fallbacks.append(f"{derive.name(track.proc)} {ENGINES.get(track.op.engine, 'unknown')} ({why})")
        first = min(alive, key=derive.order, default=None)
        self.node = Node(
            host=snapshot.host,
            ranks=len(alive) + len(died),
            alive=len(alive),
            gpus=self._count_gpus(alive),
            job=f"{first.header.job}({first.header.pid})" if first and first.header.job else "",
            version=first.header.version if first else "",
            save_rate=save,
            load_rate=load,
            target=self.target or self._asked(alive),
            active=any(track.running for track in self._ops.values()),
            fallbacks=tuple(sorted(fallbacks)),
        )

    def _count_gpus(self, procs: list[Proc]) -> int:
        return self.gpus if self.gpus is not None else self._count_ranks(procs)

    @staticmethod
    def _count_ranks(procs: list[Proc]) -> int:
        """Those that have a GPU, or all if none has."""
        with_gpu = sum(proc.header.gpu >= 0 for proc in procs)
        return with_gpu or len(procs)

    @staticmethod
    def _asked(procs: list[Proc]) -> Target:
        """The target that the processes ask for, idle ones too."""
        save = max((proc.process.target_save for proc in procs), default=0)
        load = max((proc.process.target_load for proc in procs), default=0)
        for proc in procs:
            for op in proc.operations:
                if op.running and op.target:
                    save, load = (max(save, op.target), load) if op.kind == Kind.SAVE else (save, max(load, op.target))
        if not save and not load:
            return tier(DEFAULT_TIER, "default")
        for name, (tier_save, tier_load) in TIERS.items():
            if save in (0, tier_save) and load in (0, tier_load):
                return tier(name, "process")
        light_save, light_load = TIERS[DEFAULT_TIER]
        return Target(save or light_save, load or light_load, "custom", "process")

    def _push_columns(self) -> None:
        if self._column is None:
            self._column = self.mono
            count = 1
        else:
            count = round((self.mono - self._column) / COLUMN_S)
            if count < 1:
                return
            self._column = self.mono if count > COLUMNS else self._column + count * COLUMN_S
            count = min(count, COLUMNS)
        self.save_graph.extend([self.node.save_rate] * count)
        self.load_graph.extend([self.node.load_rate] * count)
        for track in self._ops.values():  # the ended too, so that all rows show the same time
            running = track.running
            track.spark.extend([(track.rate() or 0.0) if running else 0.0] * count)
            for thread in track.threads.values():
                thread.spark.extend([(thread.window.rate() or 0.0) if running else 0.0] * count)

    # --- operations of the node ------------------------------------------------------------------------------------

    def _refresh_ops(self) -> None:
        self._prune()
        running = sorted((group for group in self._groups if group.running), key=lambda group: group.start)
        ended = max((group for group in self._groups if not group.running), key=lambda group: group.end, default=None)
        self.ops = [self._node_op(group) for group in running]
        if ended is not None:
            self.ops.append(self._node_op(ended))

    def _prune(self) -> None:
        """Forget ended operations beyond the last few, unless they are the last of a living process."""
        ended = sorted((group for group in self._groups if not group.running), key=lambda group: group.end)
        alive = {name for name, track in self._procs.items() if track.alive}
        gone = {id(group) for group in ended[:-GROUPS] if not alive & group.members.keys()}
        if gone:
            self._groups = [group for group in self._groups if id(group) not in gone]

    def _node_op(self, group: Group) -> NodeOp:
        tracks = list(group.members.values())
        running = [track for track in tracks if track.running]
        if running or not group.gpus:
            alive = {
                proc.key: proc
                for proc in (self.snapshot.procs if self.snapshot else ())
                if proc.alive and running and proc.team == group.team
            }
            procs = list((alive | {track.proc.key: track.proc for track in tracks}).values())
            group.gpus, group.ranks = self._count_gpus(procs), self._count_ranks(procs)
        rates = [rate for track in running if (rate := track.rate()) is not None]
        rate = sum(rates) if rates else None
        elapsed = (self.mono if running else group.end) - group.start
        failed = sum(track.failed for track in tracks)
        done = sum(track.done for track in tracks)
        average = done / elapsed if elapsed > 1e-3 and done else None  # noqa: PLR2004
        group.peak = max(group.peak, rate or 0.0, average or 0.0)
        target, target_name = self._target_of(group)
        if running:
            group.target = target
        etas = {track.key: self._eta(track) for track in tracks}
        last = group.straggler = self._straggler(group, etas)
        known = [eta for track in running if (eta := etas[track.key]) is not None]
        total = sum(track.op.bytes_total for track in tracks)
        progress = [derive.progress(track) for track in tracks]
        verdict = (
            Verdict.FAILED if failed else judge(average, target) if not running or elapsed >= QUIET_S else Verdict.QUIET
        )
        return NodeOp(
            kind=KINDS.get(group.kind, "unknown"),
            label=group.label,
            step=group.step if group.step >= 0 else None,
            running=bool(running),
            phase=derive.phase(tracks),
            ranks=len(tracks),
            gpus=group.gpus,
            total=total,
            done=done,
            rate=rate,
            average=average,
            peak=group.peak,
            target=target,
            target_name=target_name,
            progress=min(sum(p or 0.0 for p in progress) / len(progress), 1.0) if total else None,
            eta_s=max(known) if known and len(known) == len(running) and not failed else None,
            elapsed_s=max(elapsed, 0.0),
            started_real=min(track.start_real for track in tracks),
            last=derive.name(last.proc) if last else "",
            last_rate=last.rate() if last else None,
            phases=derive.phase_counts(running),
            verdict=verdict,
            failed=failed,
        )

    def _target_of(self, group: Group) -> tuple[float, str]:
        """Bytes/s for all GPUs, and the tier's name."""
        if self.target is not None:
            return self.target.of(group.kind) * group.gpus, self.target.name
        asked = max(track.op.target for track in group.members.values())
        if asked:
            column = 0 if group.kind == Kind.SAVE else 1
            name = next((name for name, pair in TIERS.items() if pair[column] == asked), "custom")
            return float(asked * group.gpus), name
        own = self._asked([track.proc for track in group.members.values()])
        return own.of(group.kind) * group.gpus, own.name

    def _eta(self, track: OpTrack) -> float | None:
        """Seconds until a rank is durable. Ended ranks, and those that only wait for others: 0."""
        if not track.running or track.proc.waits_for is not None:
            return 0.0
        elapsed = track.elapsed(self.mono)
        op = track.op
        sync = self._procs[track.proc.key].sync_s if op.kind == Kind.SAVE and track.proc.key in self._procs else None
        if op.phase == Phase.COMMIT:
            return 0.0
        if op.phase == Phase.FSYNC:
            return max(sync - (self.mono - self._phase_start(track)), 0.0) if sync is not None else None
        rate, average = track.rate(), track.average(self.mono)
        if elapsed < QUIET_S or not op.bytes_total or rate is None or average is None:
            return None
        blend = (rate + average) / 2
        return max(op.bytes_total - track.done, 0) / blend + (sync or 0.0)

    @staticmethod
    def _phase_start(track: OpTrack) -> float:
        return track.start + max(track.op.t_phase_mono_ns - track.op.t_start_mono_ns, 0) / 1e9

    def _straggler(self, group: Group, etas: dict[tuple[str, int], float | None]) -> OpTrack | None:
        awaited = self._awaited(group)
        if awaited is not None:
            return awaited
        known = [
            (eta, track)
            for track in group.members.values()
            if (eta := etas[track.key]) is not None and not track.failed
        ]
        if len(known) < 2:  # noqa: PLR2004
            return None
        eta, track = max(known, key=lambda pair: pair[0])
        median = statistics.median(eta for eta, _ in known)
        return track if track.running and eta > BEHIND * median and eta - median > 0.5 else None  # noqa: PLR2004

    def _awaited(self, group: Group) -> OpTrack | None:
        """The rank for which most of the others wait, by their own word, if it is here and at work."""
        waits = Counter(
            rank for track in group.members.values() if track.running and (rank := track.proc.waits_for) is not None
        )
        at_work = {
            track.proc.rank: track
            for track in group.members.values()
            if track.running and track.proc.waits_for is None and track.elapsed(self.mono) >= QUIET_S
        }
        return next((at_work[rank] for rank, _ in waits.most_common() if rank in at_work), None)

    # --- rows ------------------------------------------------------------------------------------------------------

    def _shown(self, proc: Proc) -> bool:
        track = self._procs.get(proc.key)
        if proc.alive or track is None:
            return True
        if proc.rank >= 0 and self._restarted(proc):
            return False
        if any(op.running for op in proc.operations):
            return track.died is not None or self.real - proc.touched < POST_MORTEM_S
        return track.died is not None and self.mono - track.died < LINGER_S

    def _restarted(self, dead: Proc) -> bool:
        """Whether a rank's job has been started again: by its launcher, or anew since all of it is gone."""
        header = dead.header
        launches = {launch for *rank, launch in self._living if rank == [header.uid, header.job, dead.rank]}
        return header.launch in launches or (
            bool(launches) and all(header.launch != launch for *_, launch in self._living)
        )

    def _refresh_rows(self, snapshot: Snapshot) -> None:
        groups = {track.key: group for group in self._groups for track in group.members.values()}
        ranks = {(proc.team, proc.rank): proc for proc in snapshot.procs if proc.alive}
        rows: list[Row] = []
        for proc in sorted(snapshot.procs, key=derive.order):
            if not self._shown(proc):
                continue
            tracks = [self._ops[proc.key, op.op_id] for op in proc.operations if (proc.key, op.op_id) in self._ops]
            shown = [track for track in tracks if track.running or track.died]
            if not shown and tracks:
                shown = [max(tracks, key=lambda track: track.end or 0.0)]
            rows.extend(
                self._row(track, groups.get(track.key) or Group(track), ranks)
                for track in sorted(shown, key=lambda track: track.op.op_id)
            )
            if not shown:
                rows.append(
                    replace(
                        derive.bare(proc),
                        state="WAIT" if proc.waits_for is not None else "IDLE" if proc.alive else "EXIT",
                        wait=derive.awaits(proc, ranks),
                        target=self._idle_target(),
                    )
                )
        self.rows = rows

    def _idle_target(self) -> float:
        return self.node.target.save * self.node.gpus / self.node.ranks if self.node.ranks else 0.0

    def _row(self, track: OpTrack, group: Group, ranks: Mapping[tuple[str, int], Proc]) -> Row:
        op, proc = track.op, track.proc
        target = self._target_of(group)[0] / group.ranks
        average = track.average(self.mono)
        elapsed = track.elapsed(self.mono)
        stalled = track.stalled(self._procs[proc.key], self.mono)
        threads = self._threads(track, target)
        histogram = track.histogram()
        state = self._state(track, stalled)
        judged = not track.running or (elapsed >= QUIET_S and op.phase not in PREPARING)
        return replace(
            derive.bare(proc),
            key=f"{proc.key}/{op.op_id}",
            kind=KINDS.get(op.kind, "unknown"),
            running=track.running,
            state=state,
            stalled_s=stalled,
            rate=track.rate(),
            average=average,
            target=target,
            done=track.done,
            total=op.bytes_total,
            durable=op.bytes_durable,
            progress=derive.progress(track),
            eta_s=self._eta(track) if track.running else None,
            elapsed_s=elapsed,
            phase_s=max(self.mono - self._phase_start(track), 0.0) if track.running else None,
            verdict=Verdict.FAILED if track.failed else judge(average, target) if judged else Verdict.QUIET,
            straggler=group.straggler is track,
            engine=ENGINES.get(op.engine, "unknown"),
            direct=bool(op.flags & FLAG_DIRECT),
            mixed=bool(op.flags & FLAG_MIXED),
            fallback=(errno_name(op.fallback_errno) or "unknown") if op.flags & FLAG_FALLBACK else "",
            asynchronous=bool(op.flags & FLAG_ASYNC),
            step=op.step if op.step >= 0 else None,
            label=op.label,
            path=op.path,
            st_dev=op.st_dev,
            block_size=op.block_size,
            queue_depth=op.queue_depth,
            files=op.files_total,
            files_done=op.files_done,
            error=(errno_name(op.error) or "failed") if op.phase == Phase.FAILED else "",
            wait=derive.awaits(proc, ranks) or (derive.row_wait(state, threads) if track.running else ""),
            p50_s=derive.latency(histogram, 0.5, threads),
            p99_s=derive.latency(histogram, 0.99, threads),
            histogram=histogram,
            spark=tuple(track.spark)[-derive.SPARK :],
            threads=threads,
        )

    def _state(self, track: OpTrack, stalled: float | None) -> str:
        op = track.op
        if track.died or op.phase == Phase.FAILED:
            return "DEAD" if track.died else "FAILED"
        if track.proc.waits_for is not None:
            return "WAIT"
        if not op.running:
            recent = track.end is not None and self.mono - track.end < DONE_S
            return "EXIT" if not track.proc.alive else "DONE" if recent else "IDLE"
        if stalled is not None:
            return "STALL"
        verifying = op.kind == Kind.VERIFY and op.phase == Phase.READ
        return "VERIFY" if verifying else PHASES.get(op.phase, "?").upper()[:6]

    def _threads(self, track: OpTrack, target: float) -> tuple[ThreadRow, ...]:
        slots = sorted(track.threads.items())
        moving = track.running and track.op.phase in MOVING
        # A thread that has no more to do shows no rate: what is left of it in the window would look like a slow disk.
        busy = {slot for slot, thread in slots if moving and thread.last.state != ThreadState.IDLE}
        rates = {slot: thread.window.rate() if slot in busy else None for slot, thread in slots}
        known = [rate for rate in rates.values() if rate is not None]
        floor = statistics.median(known) / BEHIND if len(known) > 1 and track.elapsed(self.mono) >= QUIET_S else 0.0
        share = target / len(slots) if slots else 0.0
        return tuple(
            derive.thread_row(index, slot, thread, track, rates[slot], share, floor)
            for index, (slot, thread) in enumerate(slots)
        )
