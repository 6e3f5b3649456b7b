"""The model's memory between two snapshots: one track per process, operation and thread."""

from __future__ import annotations

from collections import deque
from operator import sub
from typing import TYPE_CHECKING, Final

from fastckpt_top.segment import COPIES, FEATURE_HEARTBEAT, HISTOGRAM_BUCKETS, Kind, Phase, Thread, ThreadState
from fastckpt_top.window import Sample, Window

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastckpt_top.segment import Operation
    from fastckpt_top.snapshot import Proc

COLUMNS: Final = 64
"""Columns of a spark that are kept; the widest shown spark has 60."""
COLUMN_S: Final = 0.5
"""Seconds per column, whatever the interval of looks."""
HEARTBEAT_STALL_S: Final = 2.0
"""If there is no heartbeat for this many seconds during an operation, the process counts as stopped."""
PROGRESS_STALL_S: Final = 3.0
"""If no byte moves for this many seconds while writing or reading, the I/O counts as stuck."""
COPY_STALL_S: Final = 10.0
"""The same for a copy, because a store may take a while to accept a part."""
MOVING: Final = (Phase.WRITE, Phase.READ, Phase.COPY, Phase.DRAIN, Phase.FETCH)
"""Phases in which bytes move to or from the storage, so that a rate over the last second is meaningful."""
PREPARING: Final = (Phase.PLAN, Phase.STAGE)
"""Phases in which nothing is written yet, and in which a process may be silent (docs/telemetry.md 5.3)."""
_HELD: Final = frozenset("TtD")
"""States in which a process can do nothing: stopped, traced, or waiting in the kernel."""
_SYNCING: Final = {ThreadState.FSYNC, ThreadState.PEERS}
"""States in which a worker may stay long without a byte."""
_SEED_S: Final = 2.0


class ProcTrack:
    """A process.

    Attributes:
        alive: Whether it lived in the last snapshot.
        died: Reader's clock when its death was seen; None while it lives or if it was dead from the first.
        seen_alive: Whether it was ever seen alive.
        sync_s: Duration of fsync and commit in its latest save; None if unknown.
    """

    def __init__(self, mono: float) -> None:
        self.alive = True
        self.died: float | None = None
        self.seen_alive = False
        self.sync_s: float | None = None
        self._held: float | None = None
        self._threads: dict[int, Thread] = {}
        self._heartbeat = -1
        self._beat = mono

    def update(self, proc: Proc, mono: float) -> Mapping[int, Thread]:
        """Process a snapshot; return the thread slots of the previous one."""
        before, self._threads = self._threads, dict(proc.threads)
        if proc.process.heartbeat != self._heartbeat:
            self._heartbeat = proc.process.heartbeat
            self._beat = mono
            self._held = None
        if proc.state not in _HELD:
            self._held = None
        elif self._held is None:
            self._held = mono
        if proc.alive:
            self.seen_alive = True
        elif self.alive and self.seen_alive:
            self.died = mono
        self.alive = proc.alive
        return before

    def silent_s(self, proc: Proc, mono: float) -> float:
        """Seconds since the last sign of life; 0 if the process gives none."""
        return mono - self._beat if proc.header.features & FEATURE_HEARTBEAT else 0.0

    def held_s(self, mono: float) -> float:
        """Seconds for which the process has been stopped or held by the kernel, without a sign of life."""
        return 0.0 if self._held is None else mono - self._held

    def begin(self, mono: float) -> None:
        """Record that an operation is seen for the first time: silence counts only from here on."""
        self._beat = mono


class ThreadTrack:
    """A thread slot while it counts for one operation.

    All counters of a slot except `bytes_op` count for the process: their values at the beginning of the operation must
    be known.

    Args:
        thread: The slot.
        before: The slot before the operation; None if unknown.
    """

    def __init__(self, thread: Thread, before: Thread | None) -> None:
        self.window = Window()
        self.spark: deque[float] = deque(maxlen=COLUMNS)
        first = thread.bytes_ever == thread.bytes_op
        if before is not None and before.bytes_ever != thread.bytes_ever - thread.bytes_op:
            before = None  # another operation has used the slot meanwhile
        self._before = before
        self._known = first or before is not None
        self.base = before.latency_hist if before else (0,) * HISTOGRAM_BUCKETS if first else thread.latency_hist
        self.last = thread

    def begin(self, mono: float) -> None:
        """Record that the operation began now: the first sample of the window."""
        if self._before is not None:
            self.window.add(_sample(self._before, mono, 0))
        elif self._known:
            self.window.add(Sample(mono, 0))
        else:
            self.window.add(Sample(mono, 0, self.last.requests, waits=None))

    def update(self, thread: Thread, mono: float) -> None:
        """Process a snapshot."""
        self.last = thread
        self.window.add(_sample(thread, mono, thread.bytes_op))

    def histogram(self) -> tuple[int, ...]:
        """Requests by latency since this track began."""
        found = tuple(map(sub, self.last.latency_hist, self.base))
        return found if min(found) >= 0 else tuple(max(count, 0) for count in found)


class OpTrack:
    """One operation of one process.

    Attributes:
        proc: The process, as of the last snapshot.
        op: The operation.
        copies: Whether it moves a checkpoint from one place to another, without workers.
        start: Its start on the reader's clock, seconds.
        start_real: Its start, seconds since the epoch.
        end: Its end on the reader's clock; None while it runs.
        done: Bytes completed.
        window: The samples for its rate.
        spark: Bytes/s, one value per column.
        threads: Slot -> its track.
        changed: Reader's clock when something last moved.
        died: Whether its process died under it.
        lost: Reader's clock when the death was noticed, which is later than `end`; None if it was not watched.
        told_fallback: Whether the fallback was reported; `told_stall` and `told_end` are the same for their events.
    """

    def __init__(self, proc: Proc, op: Operation, mono: float, real: float) -> None:
        self.proc = proc
        self.op = op
        self.copies = op.kind in COPIES
        self.start = mono - _elapsed(proc, op, mono)
        self.start_real = real - (mono - self.start)
        self.end: float | None = None
        self.done = 0
        self.window = Window()
        self.spark: deque[float] = deque(maxlen=COLUMNS)
        self.threads: dict[int, ThreadTrack] = {}
        self.changed = mono
        self.died = False
        self.lost: float | None = None
        self.told_fallback = False
        self.told_stall = False
        self.told_end = False
        self._state: tuple[int, ...] = ()
        if proc.same_clock and (op.phase in (Phase.WRITE, Phase.READ) or not proc.alive):
            self.changed = min(max(_latest(proc, op) / 1e9, self.start), mono)
        if op.running and mono - self.start < _SEED_S:
            self.window.add(Sample(self.start, 0))

    @property
    def key(self) -> tuple[str, int]:
        """Process and operation."""
        return self.proc.key, self.op.op_id

    @property
    def shared(self) -> tuple[str, int, str, int]:
        """The common features of the ranks of one operation: their team, its kind, label and step."""
        return self.proc.team, self.op.kind, self.op.label, self.op.step

    @property
    def running(self) -> bool:
        """Whether the operation continues."""
        return self.op.running and not self.died

    @property
    def failed(self) -> bool:
        """Whether the operation failed, or its process died under it."""
        return self.died or self.op.phase == Phase.FAILED

    @property
    def sized(self) -> bool:
        """Whether the number of its bytes is known, even if it is 0: it is once the operation has been planned."""
        return bool(self.op.bytes_total) or not (self.failed or self.op.phase in PREPARING)

    def update(self, proc: Proc, op: Operation, mono: float, before: Mapping[int, Thread]) -> None:
        """Process a snapshot; `before` are the process's thread slots of the previous one."""
        self.proc, self.op = proc, op
        slots = [(slot, thread) for slot, thread in proc.threads if thread.op_id == op.op_id]
        for slot, thread in slots:
            track = self.threads.get(slot)
            if track is None:
                track = self.threads[slot] = ThreadTrack(thread, before.get(slot))
                if op.running and mono - self.start < _SEED_S:
                    track.begin(self.start)
            track.update(thread, mono)
        copied = op.bytes_durable if self.copies else 0
        counted = copied + sum(track.last.bytes_op for track in self.threads.values())
        self.done = max(self.done, counted)
        if op.phase == Phase.DONE:
            self.done = op.bytes_total
        if op.running and not proc.alive and not self.died:
            self.died = True
            self.end = self.changed
            self.lost = mono if self._state else None
        if not op.running and self.end is None:
            self.end = self.start + max(op.t_end_mono_ns - op.t_start_mono_ns, 0) / 1e9
        state = (self.done, op.bytes_staged, op.bytes_durable, op.files_done, op.phase)
        if state != self._state:
            if self._state:
                self.changed = mono
            self._state = state
        if self.running:
            self.window.add(Sample(mono, counted, sum(track.last.requests for track in self.threads.values())))

    def rate(self) -> float | None:
        """Bytes/s over the last second; None unless bytes are being moved."""
        return self.window.rate() if self.running and self.op.phase in MOVING else None

    def elapsed(self, mono: float) -> float:
        """Seconds since the start, or the duration of an ended operation."""
        return max((mono if self.end is None else self.end) - self.start, 0.0)

    def average(self, mono: float) -> float | None:
        """Bytes/s since the start; None at the very start, and for an operation that died."""
        elapsed = self.elapsed(mono)
        return None if self.died or elapsed < 1e-3 or not self.done else self.done / elapsed  # noqa: PLR2004

    @property
    def hangs(self) -> str:
        """The call to the storage that a save waits for, and since when, in the producer's words; or empty."""
        said = self.proc.process.warning
        return said if self.running and self.op.kind == Kind.SAVE and said.startswith("has hung since ") else ""

    def stalled(self, track: ProcTrack, mono: float) -> float | None:
        """Seconds without progress or sign of life, if that is too long; else None.

        Waiting for others is not a stall. Neither is silence while a save is prepared, unless the kernel reports that
        the process is stopped or held.
        """
        if not self.running or self.proc.waits_for is not None:
            return None
        if self.hangs:
            return mono - self.changed
        silent = track.held_s(mono) if self.op.phase in PREPARING else track.silent_s(self.proc, mono)
        if silent >= HEARTBEAT_STALL_S:
            return silent
        if self.op.phase not in MOVING or (self.copies and self.done >= self.op.bytes_total):
            return None  # the processes of other nodes may have more to copy
        doing = {thread.last.state for thread in self.threads.values()} - {ThreadState.IDLE}
        if ThreadState.LIMIT in doing or (doing and doing <= _SYNCING):
            return None
        still = mono - self.changed
        return still if still >= (COPY_STALL_S if self.copies else PROGRESS_STALL_S) else None

    def histogram(self) -> tuple[int, ...]:
        """Requests by latency as far as this operation was watched."""
        total = [0] * HISTOGRAM_BUCKETS
        for track in self.threads.values():
            for index, count in enumerate(track.histogram()):
                total[index] += count
        return tuple(total)


def _sample(thread: Thread, mono: float, done: int) -> Sample:
    parts = (thread.limit_wait_ms / 1e3, thread.fsync_wait_ms / 1e3, thread.peer_wait_ms / 1e3)
    waits = (thread.busy_ns / 1e9, thread.source_wait_ns / 1e9, *parts)
    return Sample(mono, done, thread.requests, thread.latency_sum_ns, waits)


def _latest(proc: Proc, op: Operation) -> int:
    """The process's own clock when it last did something for an operation, nanoseconds."""
    progress = (thread.last_progress_mono_ns for _, thread in proc.threads if thread.op_id == op.op_id)
    return max(op.t_phase_mono_ns, *progress, 0)


def _elapsed(proc: Proc, op: Operation, mono: float) -> float:
    """Seconds from an operation's start to now. The reader's clock is used only if it is also the process's."""
    if proc.same_clock:
        return max(mono - op.t_start_mono_ns / 1e9, 0.0)
    return max(_latest(proc, op) - op.t_start_mono_ns, op.t_end_mono_ns - op.t_start_mono_ns, 0) / 1e9
