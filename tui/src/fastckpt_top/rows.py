"""The rows of the views: plain values that the model refills in each update."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from fastckpt_top import segment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastckpt_top.targets import Target

GOOD_FROM: Final = 1.0
LOW_FROM: Final = 0.8
COPIES: Final = tuple(segment.KINDS[kind] for kind in segment.COPIES)
"""The names of the kinds that move a checkpoint between places: they have no target."""
LEVELS: Final = ("info", "warn", "bad")
"""The levels of a sentence: all is well, slow, broken."""


class Verdict(Enum):
    """How an average compares with its target."""

    GOOD = "ok"
    """At the target or above."""
    LOW = "near"
    """At least 80 % of the target."""
    BAD = "slow"
    """Below 80 % of the target."""
    QUIET = "-"
    """Nothing to judge."""
    FAILED = "failed"
    """The process died during the operation, or the operation failed."""


def judge(average: float | None, target: float) -> Verdict:
    """Compare an operation's average with its target, both in bytes/s."""
    if average is None or target <= 0:
        return Verdict.QUIET
    if average >= GOOD_FROM * target:
        return Verdict.GOOD
    return Verdict.LOW if average / target >= LOW_FROM - 1e-9 else Verdict.BAD


def share(part: float | None, whole: float) -> float | None:
    """A fraction, perhaps above 1; None if it is meaningless."""
    return part / whole if part is not None and whole > 0 else None


@dataclass(frozen=True, slots=True)
class Sentence:
    """The most important fact about an operation now, in words.

    Attributes:
        level: One of `LEVELS`.
        words: The same sentence at several lengths, the longest first; the last has at most 36 cells.
        row: The key of the row that it is about; empty if it is about none.
    """

    level: str
    words: tuple[str, ...]
    row: str = ""


@dataclass(frozen=True, slots=True)
class ThreadRow:
    """A worker thread of one operation.

    Attributes:
        index: Number within the operation, from 0.
        tid: Thread id.
        cpu: CPU it last ran on; None if unknown.
        state: `WRITE`, `READ`, `SOURCE`, `LIMIT`, `FSYNC`, `PEERS`, `ERROR`, `IDLE`, `DONE` in an ended operation.
        rate: Bytes/s over the last second; None if unknown.
        average: Bytes/s from the operation's start to now, or to its end; None if it has moved none.
        done: Bytes of this operation.
        in_flight: Requests in flight.
        latency_s: Mean over the last second; None if nothing completed.
        latency_max_s: Largest of this operation.
        p50_s: Median of this operation as far as it was watched; None if unknown.
        p99_s: The same for the 99th percentile.
        waits: Shares of the last second by what it waited for, as in `window.WAITS`; empty if unknown.
        target: Bytes/s that this thread should reach.
        slow: Whether it is clearly behind the other threads of its operation.
        retries: Retries since the process began; the next two also count from there.
        shorts: Short reads and writes.
        errors: Failed requests.
        spark: Bytes/s, one value per column.
    """

    index: int
    tid: int
    cpu: int | None
    state: str
    rate: float | None
    done: int
    in_flight: int
    latency_s: float | None
    latency_max_s: float
    waits: Mapping[str, float]
    target: float
    slow: bool
    retries: int
    shorts: int
    errors: int
    spark: tuple[float, ...]
    p50_s: float | None = None
    p99_s: float | None = None
    average: float | None = None

    @property
    def wait(self) -> str:
        """The thread's bottleneck: `source 42%`, `limit 80%`, `peers 75%`, `fsync`, `disk 97%`, or nothing."""
        return wait_text(*bottleneck(self.state, self.waits))


def bottleneck(state: str, waits: Mapping[str, float]) -> tuple[str, float | None]:
    """The cause that delays a thread or rank: the largest part of the last second, if it is significant.

    A bandwidth limit comes first, because it makes a worker wait only if nothing else is slower.

    Args:
        state: The state of the thread or rank. In fsync and commit there is no share: a wait is counted when it ends.
        waits: As `ThreadRow.waits`.

    Returns:
        `fsync`, `limit`, `source`, `disk`, `peers` or nothing, and the share of the time, None if it has none.
    """
    if state in ("FSYNC", "COMMIT"):
        return "fsync", None
    limit = waits.get("limit", 0.0)
    if limit > 0.3:  # noqa: PLR2004
        return "limit", limit
    kind = max(waits, key=lambda kind: waits[kind], default="")
    return (kind, waits[kind]) if kind and waits[kind] > 0.02 else ("", None)  # noqa: PLR2004


def wait_text(kind: str, share: float | None) -> str:
    """`disk 97%`, or only the kind if it has no share."""
    return kind if share is None else f"{kind} {round(share * 100)}%"


@dataclass(frozen=True, slots=True)
class Row:
    """One operation of one rank, or a rank without one.

    Attributes:
        key: The same in each update for the same thing.
        proc_key: The process.
        rank: The rank of the process; None if unknown.
        gpu: Index; None if it has none.
        pid: The pid of the process.
        job: Its label.
        alive: Whether it lives.
        kind: `save`, `load`, `verify`, `copy`, `drain`, `fetch`, or empty.
        running: Whether the operation continues.
        state: Six letters at most: the phase, or `WAIT` (for another rank), `STALL`, `DEAD`, `FAILED`, `IDLE`, `EXIT`.
        stalled_s: Seconds without a sign of life or progress; None if not stalled.
        hangs: The call to the storage that does not end, its file and when it began; empty if none is known.
        rate: Bytes/s over the last second; None if unknown or not moving data.
        average: Bytes/s of the operation so far, or in all.
        target: Bytes/s that this rank should reach.
        done: Bytes completed.
        total: Bytes in all; 0 if unknown.
        durable: Bytes known to be durable.
        progress: The progress of the copy while the state is `STAGE`; else that of the operation, which is 1 only when
            all bytes are written and being made durable.
        eta_s: Seconds until it is durable; None if unknown.
        elapsed_s: Seconds since its start, or its duration.
        phase_s: Seconds in the present phase.
        verdict: Its average against its target.
        straggler: Whether the node waits for it.
        engine: `uring`, `threads`, `buffered`, `unknown`, or empty.
        direct: Whether O_DIRECT is used.
        mixed: Whether part of the data goes through the page cache in spite of `direct`.
        fallback: Why the wanted engine does not run (`EPERM`); empty if it does.
        refused: The wanted features that do not run, as in `segment.REFUSALS`.
        asynchronous: Whether it is a `save_async`.
        step: Training step; None if unknown.
        label: Base name of the target path.
        path: The target path.
        device: Name of the device, else its number; empty if unknown.
        block_size: Bytes.
        queue_depth: Requests.
        files: Shards in all.
        files_done: Shards completed.
        error: errno name of a failure; empty if none.
        wait: The cause that holds up the operation.
        p50_s: Median latency of this operation as far as it was watched; None if unknown.
        p99_s: 99th percentile.
        histogram: Requests by latency (docs/telemetry.md 5.4).
        spark: Bytes/s, one value per column.
        threads: Its worker threads.
        job_key: The job that it belongs to.
        user: Name of its user, or the number if it has none.
        process_state: Letter of /proc/PID/stat: `R`, `S`, `D`, `T`; empty if unknown.
        wait_kind: `source`, `disk`, `limit`, `peers`, `fsync`, `memory`, or empty: the kind of `wait`.
        wait_share: Share of the last second spent with it; None if it has none.
        worst: How much the rank holds its job back; the largest value comes first.
    """

    key: str
    proc_key: str
    rank: int | None
    gpu: int | None
    pid: int
    job: str
    alive: bool
    kind: str = ""
    running: bool = False
    state: str = "IDLE"
    stalled_s: float | None = None
    hangs: str = ""
    rate: float | None = None
    average: float | None = None
    target: float = 0.0
    done: int = 0
    total: int = 0
    durable: int = 0
    progress: float | None = None
    eta_s: float | None = None
    elapsed_s: float | None = None
    phase_s: float | None = None
    verdict: Verdict = Verdict.QUIET
    straggler: bool = False
    engine: str = ""
    direct: bool = False
    mixed: bool = False
    fallback: str = ""
    refused: tuple[str, ...] = ()
    asynchronous: bool = False
    step: int | None = None
    label: str = ""
    path: str = ""
    device: str = ""
    block_size: int = 0
    queue_depth: int = 0
    files: int = 0
    files_done: int = 0
    error: str = ""
    wait: str = ""
    p50_s: float | None = None
    p99_s: float | None = None
    histogram: tuple[int, ...] = ()
    spark: tuple[float, ...] = ()
    threads: tuple[ThreadRow, ...] = ()
    job_key: str = ""
    user: str = ""
    process_state: str = ""
    wait_kind: str = ""
    wait_share: float | None = None
    worst: float = 0.0

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped its process."""
        return self.process_state in ("T", "t")

    @property
    def name(self) -> str:
        """The name in a sentence."""
        return f"rank {self.rank}" if self.rank is not None else f"pid {self.pid}"


class Safe(NamedTuple):
    """The last checkpoint that became durable in a place, and when, in seconds since the epoch."""

    label: str
    step: int | None
    real: float


@dataclass(frozen=True, slots=True)
class NodeOp:
    """One checkpoint operation of the node: the common work of its ranks.

    Attributes:
        kind: `save`, `load`, `verify`, `copy`, `drain`, `fetch`.
        label: Base name of the target path.
        step: Training step; None if unknown.
        running: Whether any rank is still working on it.
        phase: The least advanced phase of its running ranks; else `done`, `failed` or `died`.
        ranks: Ranks that take part.
        missing: Ranks of this machine that have not begun it.
        gpus: GPUs that the target is multiplied by.
        total: Bytes in all.
        done: Bytes completed.
        linked: Bytes of tensors in files that it took over from an earlier checkpoint.
        rate: Bytes/s of all ranks over the last second; None if none moves data.
        average: Bytes/s from the first rank's start to now, or to the last rank's end.
        peak: Largest `rate` seen.
        target: Bytes/s for all GPUs.
        target_name: Tier, or `custom`.
        progress: 0 to 1; of the copy into memory while `phase` is `stage`.
        eta_s: Seconds until the last rank is durable; None if unknown.
        no_eta: Why the ETA is unknown, in ten cells at most.
        elapsed_s: Seconds since the first rank's start, or the duration.
        started_real: Seconds since the epoch.
        last: The rank that the node waits for; empty if none is clearly behind.
        verdict: The average against the target.
        failed: Ranks that failed or died.
        job_key: The job that it belongs to.
        target_source: The origin of the target, as `Target.source`.
        changed: After a save, groups and the share of their bytes that has changed; empty if unknown.
        sentence: The most important fact about it; None if there is none.
        safe: `Job.safe` of its job, for a save that has ended and for drains.
    """

    kind: str
    label: str
    step: int | None
    running: bool
    phase: str
    ranks: int
    gpus: int
    total: int
    done: int
    rate: float | None
    average: float | None
    peak: float
    target: float
    target_name: str
    progress: float | None
    eta_s: float | None
    elapsed_s: float
    started_real: float
    last: str
    verdict: Verdict
    failed: int
    job_key: str = ""
    no_eta: str = ""
    target_source: str = "default"
    changed: tuple[tuple[str, float], ...] = ()
    sentence: Sentence | None = None
    linked: int = 0
    missing: tuple[int, ...] = ()
    safe: Mapping[str, Safe] = field(default_factory=dict)

    @property
    def copies(self) -> bool:
        """Whether its kind is one of `COPIES`."""
        return self.kind in COPIES

    @property
    def empty(self) -> bool:
        """Whether it ended well without bytes to move, so that there is no speed to judge."""
        return not (self.running or self.failed or self.done)


@dataclass(frozen=True, slots=True)
class Job:
    """The processes that one launcher started, or that share a process group.

    Attributes:
        key: The same in each update for the same job.
        name: Its label.
        pid: The pid of its first living process, or else of its first process.
        user: Name of its user, or the number if it has none.
        ranks: Its processes that live or died in an operation.
        alive: Those that live.
        gpus: GPUs that its targets are multiplied by.
        target: The target per GPU.
        active: Whether any of its operations runs.
        sentence: The most important fact about it now; None if there is none.
        since: Its place among all jobs, in the order in which they were first seen.
        safe: By place: at `local` the last save, at `remote` the last that a drain was seen to bring there.
    """

    key: str
    name: str
    pid: int
    user: str
    ranks: int
    alive: int
    gpus: int
    target: Target
    active: bool
    sentence: Sentence | None = None
    since: int = 0
    safe: Mapping[str, Safe] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """An event.

    Attributes:
        real: Seconds since the epoch.
        level: `info`, `warn` or `bad`.
        text: One line.
        job: Key of the job that it belongs to.
    """

    real: float
    level: str
    text: str
    job: str = ""


@dataclass(slots=True)
class Checkpoint:
    """An ended operation of the node, from the history records of its ranks.

    Attributes:
        kind: `save`, `load`, `verify`.
        label: Base name of the target path.
        step: Training step; None if unknown.
        start: Seconds since the epoch of the first rank's start.
        end: The same for the last rank's end.
        bytes: Bytes of all ranks.
        sync_s: Longest time in fsync and commit of a rank, seconds.
        peak: Sum of the ranks' rates, each in the best second of the rank, bytes/s.
        engines: Engines that ran.
        error: errno name of the first failure, `failed` without one, `rank 3 died`; empty if all went well.
        fallback: errno name of the first fallback; empty if none.
        members: Process key and operation of each rank.
        gpus: Members that have a GPU.
        p99_s: Largest 99th percentile of a rank, seconds; 0 if unknown.
        team: The common feature of its ranks: their process group, or the job's name.
        running: Whether a rank is still working on it.
        target: Its target in bytes/s while it ran; 0 if unknown.
        whole: For a copy, whether it left a whole checkpoint at its target path.
    """

    kind: str
    label: str
    step: int | None
    start: float
    end: float
    bytes: int = 0
    sync_s: float = 0.0
    peak: float = 0.0
    engines: set[str] = field(default_factory=set)
    error: str = ""
    fallback: str = ""
    members: set[tuple[str, int]] = field(default_factory=set)
    gpus: int = 0
    p99_s: float = 0.0
    team: str = ""
    running: bool = False
    target: float = 0.0
    whole: bool = False

    @property
    def seconds(self) -> float:
        """Duration."""
        return max(self.end - self.start, 1e-9)

    @property
    def average(self) -> float | None:
        """Bytes/s of all ranks; None if there was no byte to move."""
        return self.bytes / self.seconds if self.bytes else None
