"""Estimates when a rank will be durable, and which one the others wait for."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING, Final

from fastckpt_top.segment import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastckpt_top.groups import Group
    from fastckpt_top.look import Look
    from fastckpt_top.tracks import OpTrack

BEHIND: Final = 1.25
"""Late is an ETA above the median times this; slow is a rate of a rank or thread below the median divided by this."""
QUIET_S: Final = 1.0
"""Seconds at the start of an operation in which there is no ETA and no straggler."""
_SECONDS_BEHIND: Final = 0.5
"""Seconds by which the ETA of a straggler must exceed the median."""
_STICKY: Final = 1.1
"""Another rank replaces a straggler when its ETA is this many times as long."""


def phase_start(track: OpTrack) -> float:
    """When the current phase began, on the reader's clock."""
    return track.start + max(track.op.t_phase_mono_ns - track.op.t_start_mono_ns, 0) / 1e9


def eta(track: OpTrack, look: Look) -> float | None:
    """Seconds until a rank is durable; 0 for ended and waiting ranks; None if unknown, and while it stalls."""
    if not track.running or track.proc.waits_for is not None:
        return 0.0
    elapsed = track.elapsed(look.mono)
    op, known = track.op, look.tracks.get(track.proc.key)
    if known is not None and track.stalled(known, look.mono) is not None:
        return None
    sync = known.sync_s if known is not None and op.kind == Kind.SAVE else None
    if op.phase == Phase.COMMIT:
        return 0.0
    if op.phase == Phase.FSYNC:
        return max(sync - (look.mono - phase_start(track)), 0.0) if sync is not None else None
    rate, average = track.rate(), track.average(look.mono)
    if elapsed < QUIET_S or not op.bytes_total or rate is None or average is None:
        return None
    blend = (rate + average) / 2
    return max(op.bytes_total - track.done, 0) / blend + (sync or 0.0)


def straggler(group: Group, etas: Mapping[tuple[str, int], float | None], look: Look) -> OpTrack | None:
    """The rank that the others wait for, by their reports or by its ETA; None if none is clearly behind."""
    waited_for = _awaited(group, look)
    if waited_for is not None:
        return waited_for
    known = [
        (eta, track) for track in group.members.values() if (eta := etas[track.key]) is not None and not track.failed
    ]
    if len(known) < 2:  # noqa: PLR2004
        return None
    longest, track = max(known, key=lambda pair: pair[0])
    before = group.straggler
    if before is not None and before.running and not before.failed:  # two similar ranks must not alternate
        its = etas.get(before.key)
        if its is not None and longest <= its * _STICKY:
            longest, track = its, before
    median = statistics.median(eta for eta, _ in known)
    return track if track.running and longest > BEHIND * median and longest - median > _SECONDS_BEHIND else None


def _awaited(group: Group, look: Look) -> OpTrack | None:
    """The rank for which most of the others report a wait, if it is here and working."""
    waits = Counter(
        rank for track in group.members.values() if track.running and (rank := track.proc.waits_for) is not None
    )
    at_work = {
        track.proc.rank: track
        for track in group.members.values()
        if track.running and track.proc.waits_for is None and track.elapsed(look.mono) >= QUIET_S
    }
    return next((at_work[rank] for rank, _ in waits.most_common() if rank in at_work), None)
