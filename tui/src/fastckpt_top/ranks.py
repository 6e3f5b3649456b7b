"""Makes the rows: one per operation of a rank, with its threads."""

from __future__ import annotations

import os
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from fastckpt_top import derive, estimate
from fastckpt_top.groups import errno_name
from fastckpt_top.rows import Row, ThreadRow, Verdict, judge, wait_text
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
from fastckpt_top.tracks import HEARTBEAT_STALL_S, MOVING, PREPARING
from fastckpt_top.window import percentile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from fastckpt_top.groups import Group
    from fastckpt_top.look import Look
    from fastckpt_top.snapshot import Proc
    from fastckpt_top.tracks import OpTrack

    Places: TypeAlias = Mapping[tuple[str, int], Proc]

DONE_S: Final = 10.0
"""Seconds for which a rank shows DONE before IDLE, once the others are done, too."""


def places(look: Look) -> Places:
    """The living processes by team and rank."""
    return {(proc.team, proc.rank): proc for proc in look.procs if proc.alive}


def _bare(proc: Proc, look: Look, target: float) -> Row:
    """A row with only its process."""
    header = proc.header
    return Row(
        key=proc.key,
        proc_key=proc.key,
        rank=proc.rank if proc.rank >= 0 else None,
        gpu=header.gpu if header.gpu >= 0 else None,
        pid=header.pid,
        job=header.job,
        alive=proc.alive,
        user=proc.user or str(header.uid),
        process_state=proc.state if proc.alive else "",
        job_key=look.job_of.get(proc.key, ""),
        target=target,
    )


def idle_row(proc: Proc, look: Look, places: Places, target: float) -> Row:
    """A rank without an operation, with its target in bytes/s for a save."""
    wait = derive.awaits(proc, places)
    state = "WAIT" if proc.waits_for is not None else "IDLE" if proc.alive else "EXIT"
    return replace(_bare(proc, look, target), state=state, wait=wait, wait_kind="peers" if wait else "")


def row(track: OpTrack, group: Group, look: Look, places: Places) -> Row:
    """A rank's part in an operation.

    Args:
        track: The part.
        group: The operation, with its straggler, GPUs and ranks up to date.
        look: The current look.
        places: The result of `places`.
    """
    op, proc = track.op, track.proc
    target = look.target_of(group).of(group.kind) * group.gpus / group.ranks
    average = track.average(look.mono)
    elapsed = track.elapsed(look.mono)
    stalled = track.stalled(look.tracks[proc.key], look.mono) if proc.key in look.tracks else None
    rows = threads(track, target, look)
    histogram, largest = track.histogram(), max((thread.latency_max_s for thread in rows), default=0.0)
    state = _state(track, group, stalled, look)
    judged = not track.running or (elapsed >= estimate.QUIET_S and op.phase not in PREPARING)
    wait = derive.awaits(proc, places)
    kind, share = ("peers", None) if wait else derive.row_wait(state, rows) if track.running else ("", None)
    if stalled is not None:  # the counters include a wait only when it ends
        silent = look.tracks[proc.key].silent_s(proc, look.mono) >= HEARTBEAT_STALL_S
        kind, share = "disk" if track.hangs else derive.held(track, silent=silent), None
    made = replace(
        _bare(proc, look, target),
        key=f"{proc.key}/{op.op_id}",
        kind=KINDS.get(op.kind, "unknown"),
        running=track.running,
        state=state,
        stalled_s=stalled,
        hangs=track.hangs,
        rate=track.rate(),
        average=average,
        done=track.done,
        total=op.bytes_total,
        durable=op.bytes_durable,
        progress=derive.staged(track) if op.phase == Phase.STAGE else derive.progress(track),
        eta_s=estimate.eta(track, look) if track.running else None,
        elapsed_s=elapsed,
        phase_s=max(look.mono - estimate.phase_start(track), 0.0) if track.running else None,
        verdict=Verdict.FAILED if track.failed else judge(average, target) if judged else Verdict.QUIET,
        straggler=group.straggler is track,
        engine="" if track.copies else ENGINES.get(op.engine, "unknown"),
        direct=bool(op.flags & FLAG_DIRECT),
        mixed=bool(op.flags & FLAG_MIXED),
        fallback=(errno_name(op.fallback_errno) or "unknown") if op.flags & FLAG_FALLBACK else "",
        refused=op.refused,
        asynchronous=bool(op.flags & FLAG_ASYNC),
        step=op.step if op.step >= 0 else None,
        label=op.label,
        path=op.path,
        device=(look.devices.get(op.st_dev) or f"{os.major(op.st_dev)}:{os.minor(op.st_dev)}") if op.st_dev else "",
        block_size=op.block_size,
        queue_depth=op.queue_depth,
        files=op.files_total,
        files_done=op.files_done,
        error=(errno_name(op.error) or "failed") if op.phase == Phase.FAILED else "",
        wait=wait or wait_text(kind, share),
        wait_kind=kind,
        wait_share=share,
        p50_s=percentile(histogram, 0.5, largest),
        p99_s=percentile(histogram, 0.99, largest),
        histogram=histogram,
        spark=tuple(track.spark),
        threads=rows,
    )
    return replace(made, worst=worst(made))


def worst(row: Row) -> float:
    """How much a rank delays its job: dead, failed, stalled, the straggler, the rest.

    Within each of these, the remaining time and the shortfall from its target count. Idle ranks have 0.
    """
    if row.state in ("DEAD", "FAILED"):  # a dead rank comes first: the others failed because it died
        return 5000.0 if row.state == "DEAD" else 4000.0
    if not row.running:
        return 0.0
    if row.stalled_s is not None:
        return 3000.0 + min(row.stalled_s, 999.0)
    if row.wait_kind == "peers":
        return 1.0
    rate = row.rate if row.rate is not None else row.average
    short = 0.0 if rate is None or row.target <= 0 else max(1.0 - rate / row.target, 0.0)
    left = 0.0 if row.eta_s is None else row.eta_s / (row.eta_s + 10.0)
    return (2000.0 if row.straggler else 10.0) + 400.0 * short + 500.0 * left


def _state(track: OpTrack, group: Group, stalled: float | None, look: Look) -> str:
    op = track.op
    if track.died or op.phase == Phase.FAILED:
        return "DEAD" if track.died else "FAILED"
    if track.proc.waits_for is not None:
        return "WAIT"
    if not op.running:
        recent = track.proc.alive and track.end is not None and look.mono - track.end < DONE_S
        return "DONE" if group.running or recent else "IDLE" if track.proc.alive else "EXIT"
    if stalled is not None:
        return "STALL"
    verifying = op.kind == Kind.VERIFY and op.phase == Phase.READ
    return "VERIFY" if verifying else PHASES.get(op.phase, "unknown").upper()[:6]


def threads(track: OpTrack, target: float, look: Look) -> tuple[ThreadRow, ...]:
    """The threads of a rank's operation, whose target is `target` bytes/s."""
    slots = [thread for _, thread in sorted(track.threads.items())]
    elapsed = track.elapsed(look.mono)
    moving = track.running and track.op.phase in MOVING
    # A thread without further work shows no rate: what is left in the window would look like a slow disk.
    busy = [moving and thread.last.state != ThreadState.IDLE for thread in slots]
    rates = [thread.window.rate() if at_work else None for thread, at_work in zip(slots, busy, strict=True)]
    known = [rate for rate in rates if rate is not None]
    late = len(known) > 1 and elapsed >= estimate.QUIET_S
    floor = statistics.median(known) / estimate.BEHIND if late else 0.0
    share = target / len(slots) if slots else 0.0
    return tuple(
        derive.thread_row(index, thread, track, rate, share, floor, elapsed)
        for index, (thread, rate) in enumerate(zip(slots, rates, strict=True))
    )
