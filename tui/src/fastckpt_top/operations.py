"""Makes the node's operations: the common work of the ranks on one checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastckpt_top import derive, estimate
from fastckpt_top.look import count_ranks
from fastckpt_top.rows import NodeOp, Verdict, judge
from fastckpt_top.segment import KINDS, PHASES, Kind, Phase

if TYPE_CHECKING:
    from fastckpt_top.groups import Group
    from fastckpt_top.look import Look
    from fastckpt_top.tracks import OpTrack


def node_op(group: Group, look: Look) -> NodeOp:
    """The current state of an operation, without its sentence; updates the group's peak, GPUs, target, straggler."""
    tracks = list(group.members.values())
    running, missing = [track for track in tracks if track.running], group.missing
    if running or not group.gpus:
        procs = {proc.key: proc for proc in look.procs if proc.alive and running and proc.team == group.team}
        procs |= {track.proc.key: track.proc for track in tracks}
        absent = {*missing} - {proc.header.rank for proc in procs.values()}
        group.ranks = count_ranks(procs.values()) + len(absent)
        group.gpus = look.gpus if look.gpus is not None else group.ranks
    rates = [rate for track in running if (rate := track.rate()) is not None]
    rate = sum(rates) if rates else None
    elapsed = (look.mono if running else group.end) - group.start
    failed = sum(track.failed for track in tracks)
    done = sum(track.done for track in tracks)
    average = done / elapsed if elapsed > 1e-3 and done else None  # noqa: PLR2004
    group.peak = max(group.peak, rate or 0.0, average or 0.0)
    per_gpu = look.target_of(group)
    target = per_gpu.of(group.kind) * group.gpus
    if running:
        group.target = target
    etas = {track.key: estimate.eta(track, look) for track in tracks}
    last = group.straggler = estimate.straggler(group, etas, look)
    known = [eta for track in running if (eta := etas[track.key]) is not None]
    sizes = _sizes(tracks, len(missing))
    phase = derive.phase(tracks)
    eta = max(known) if known and len(known) == len(running) and not failed and not missing else None
    unknown = [track for track in running if etas[track.key] is None]
    early = bool(running) and elapsed < estimate.QUIET_S
    return NodeOp(
        kind=KINDS.get(group.kind, "unknown"),
        label=group.label,
        step=group.step if group.step >= 0 else None,
        running=bool(running),
        phase=phase,
        ranks=len(tracks),
        gpus=group.gpus,
        total=sum(sizes),
        done=done,
        rate=rate,
        average=average,
        peak=group.peak,
        target=target,
        target_name=per_gpu.name,
        progress=_progress(tracks, copying=phase == PHASES[Phase.STAGE], sizes=sizes),
        eta_s=eta,
        no_eta="" if eta is not None or not running else "never" if failed else _no_eta(unknown, look),
        elapsed_s=max(elapsed, 0.0),
        started_real=min(track.start_real for track in tracks),
        last=derive.name(last.proc) if last else "",
        verdict=Verdict.FAILED if failed else Verdict.QUIET if early else judge(average, target),
        failed=failed,
        job_key=group.job,
        target_source=per_gpu.source,
        missing=missing,
        linked=sum(track.op.bytes_linked for track in tracks),
        changed=() if running or group.kind != Kind.SAVE or failed else _changed(group),
    )


def _no_eta(unknown: list[OpTrack], look: Look) -> str:
    """The reason why no ETA is known, given the ranks whose own ETA is unknown."""
    if any(track.stalled(look.tracks[track.proc.key], look.mono) is not None for track in unknown):
        return "stalled"
    if not unknown:
        return "incomplete"
    syncing = all(track.op.phase in (Phase.FSYNC, Phase.COMMIT) for track in unknown)
    return "in fsync" if syncing else "just begun"


def _changed(group: Group) -> tuple[tuple[str, float], ...]:
    """The changes of a save, as the rank that compares reports them."""
    blocks = [track.proc.process for track in group.members.values()]
    shares = next((one.shares for one in blocks if one.changed and one.changed_step == group.step), {})
    return tuple(shares.items())


def _sizes(tracks: list[OpTrack], missing: int) -> list[int]:
    """The bytes of each rank, including those that have not begun; an unknown size is the mean of the others."""
    known = [track.op.bytes_total for track in tracks if track.sized]
    mean = sum(known) // len(known) if known else 0
    return [track.op.bytes_total if track.sized else mean for track in tracks] + [mean] * missing


def _progress(tracks: list[OpTrack], *, copying: bool, sizes: list[int]) -> float | None:
    """The share that is done, 0 to 1: of the copy into memory, or of all bytes; None while no size is known."""
    if copying and any(track.op.bytes_to_stage for track in tracks):
        return sum(derive.staged(track) or 0.0 for track in tracks) / len(sizes)
    if not any(sizes):
        return None
    parts = [(derive.progress(track) or 0.0) * size for track, size in zip(tracks, sizes, strict=False)]
    return min(sum(parts) / sum(sizes), 1.0)
