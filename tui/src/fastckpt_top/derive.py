"""Computes parts of the model from tracks and processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastckpt_top.rows import ThreadRow, bottleneck
from fastckpt_top.segment import FLAG_NO_WORKERS, KINDS, NONE_U32, PHASES, THREAD_STATES, Kind, Phase, ThreadState
from fastckpt_top.window import WAITS, percentile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastckpt_top.groups import Group
    from fastckpt_top.segment import Thread
    from fastckpt_top.snapshot import Proc
    from fastckpt_top.tracks import OpTrack, ThreadTrack

_RESTING: Final = (ThreadState.IDLE, ThreadState.FSYNC, ThreadState.PEERS)
"""The states in which a thread is not judged by its rate."""
_ORDER: Final = (Phase.PLAN, Phase.STAGE, Phase.READ, Phase.WRITE, Phase.FSYNC, Phase.COMMIT)


def thread_row(
    index: int, track: ThreadTrack, op: OpTrack, rate: float | None, target: float, floor: float, elapsed: float
) -> ThreadRow:
    """The figures of a thread after `elapsed` seconds of an operation; it is slow below a rate of `floor` bytes/s."""
    last = track.last
    latency, waits = None, {}
    ends = track.window.waits() if op.running and last.state != ThreadState.IDLE else None
    if ends is not None:
        old, new = ends
        span = new.mono - old.mono
        if new.requests > old.requests:
            latency = (new.latency_ns - old.latency_ns) / (new.requests - old.requests) / 1e9
        both = zip(WAITS, old.waits or (), new.waits or (), strict=True)
        waits = {kind: min(max((after - before) / span, 0.0), 1.0) for kind, before, after in both}
        if last.state == ThreadState.PEERS:  # a wait in progress is counted when it ends
            waits["peers"] = max(waits["peers"], 1.0 - sum(waits.values()) + waits["peers"])
    histogram, largest = track.histogram(), last.latency_max_ns / 1e9
    return ThreadRow(
        index=index,
        tid=last.tid,
        cpu=None if last.cpu == NONE_U32 else last.cpu,
        state=thread_state(last, op),
        rate=rate,
        average=last.bytes_op / elapsed if elapsed > 1e-3 and last.bytes_op else None,  # noqa: PLR2004
        done=last.bytes_op,
        in_flight=last.in_flight,
        latency_s=latency,
        latency_max_s=largest,
        waits=waits,
        target=target,
        slow=rate is not None and rate < floor and last.state not in _RESTING,
        retries=last.retries,
        shorts=last.shorts,
        errors=last.errors,
        spark=tuple(track.spark),
        p50_s=percentile(histogram, 0.5, largest),
        p99_s=percentile(histogram, 0.99, largest),
    )


def thread_state(thread: Thread, op: OpTrack) -> str:
    """As `ThreadRow.state`."""
    if not op.running:
        return "ERROR" if thread.state == ThreadState.ERROR else "DONE" if thread.bytes_op else "IDLE"
    if thread.state == ThreadState.IO:
        return "WRITE" if op.op.kind == Kind.SAVE else "READ"
    return THREAD_STATES.get(thread.state, "?").upper()


def row_wait(state: str, threads: tuple[ThreadRow, ...]) -> tuple[str, float | None]:
    """The cause that delays a rank, in the words of `bottleneck`, from the mean of its threads."""
    known = [waits for thread in threads if (waits := thread.waits)]
    total = {kind: sum(waits[kind] for waits in known) / len(known) for kind in (known[0] if known else ())}
    if {thread.state for thread in threads} - {"IDLE"} == {"FSYNC"}:
        state = "FSYNC"
    return bottleneck(state, total)


def held(track: OpTrack, *, silent: bool) -> str:
    """The cause of a rank's wait without progress: `disk`, `memory`, `source`, `fsync`; empty if unknown.

    The workers show the cause, not the letter of the process: a worker that waits for its ring sleeps (`S`), and one
    that waits for a page of its memory is `D`. A process that is `silent` may be frozen, together with its requests.
    """
    stuck, op = track.proc.state == "D", track.op
    doing = {thread.last.state for thread in track.threads.values()}
    flying = any(thread.last.state == ThreadState.IO and thread.last.in_flight for thread in track.threads.values())
    if flying and (stuck or not silent or op.flags & FLAG_NO_WORKERS):
        return "disk"
    if ThreadState.FSYNC in doing:
        return "fsync"
    if ThreadState.SOURCE in doing or op.phase == Phase.STAGE:
        return "memory" if stuck else "source"
    return "disk" if op.phase == Phase.COMMIT or stuck else ""


def progress(track: OpTrack) -> float | None:
    """The progress of an operation, 0 to 1: at most 0.99 until fsync begins; None while the size is unknown."""
    op = track.op
    if op.phase in (Phase.FSYNC, Phase.COMMIT, Phase.DONE):
        return 1.0
    if not op.bytes_total:
        return None
    return min(track.done / op.bytes_total, 0.99)


def staged(track: OpTrack) -> float | None:
    """The share of the state that has been copied, 0 to 1; None if it is unknown, or nothing is copied."""
    op = track.op
    if op.phase == Phase.PLAN:
        return None
    if op.phase != Phase.STAGE:
        return 1.0
    return min(op.bytes_staged / op.bytes_to_stage, 1.0) if op.bytes_to_stage else None


def phase(tracks: list[OpTrack]) -> str:
    """The least advanced phase of the running ranks; else `done`, `failed` or `died`."""
    running = [track.op.phase for track in tracks if track.running]
    if running:
        ranks: dict[int, int] = {phase: index for index, phase in enumerate(_ORDER)}
        return PHASES.get(min(running, key=lambda phase: ranks.get(phase, -1)), "unknown")
    if any(track.died for track in tracks):
        return "died"
    return "failed" if any(track.failed for track in tracks) else "done"


def order(proc: Proc) -> tuple[int, int, int]:
    """The sort key of processes: by rank, those without a rank last."""
    rank = proc.rank
    return (0 if rank >= 0 else 1, rank, proc.header.pid)


def name(proc: Proc) -> str:
    """The name of a process in a sentence."""
    return f"rank {proc.rank}" if proc.rank >= 0 else f"pid {proc.header.pid}"


def awaits(proc: Proc, ranks: Mapping[tuple[str, int], Proc]) -> str:
    """The rank, as `rank 3`, at the end of the chain of ranks for which a process waits; empty if it does not wait.

    Args:
        proc: The process.
        ranks: Processes by team and rank; those of other machines are missing.
    """
    found, seen = proc.waits_for, {proc.rank}
    while found is not None and found not in seen:
        seen.add(found)
        other = ranks.get((proc.team, found))
        if other is None or other.waits_for is None:
            break
        found = other.waits_for
    return "" if found is None else f"rank {found}"


def title(group: Group) -> str:
    """The name of an operation in a sentence."""
    return f"{KINDS.get(group.kind, 'operation')} {group.label}".strip()
