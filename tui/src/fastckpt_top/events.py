"""Events, each reported once: starts, ends, deaths, failures, stalls, fallbacks."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final

from fastckpt_top import derive, phrases, text
from fastckpt_top.groups import errno_name
from fastckpt_top.operations import node_op
from fastckpt_top.rows import Event, share
from fastckpt_top.segment import ENGINES, FLAG_FALLBACK, KINDS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastckpt_top.groups import Group
    from fastckpt_top.look import Look
    from fastckpt_top.segment import Operation
    from fastckpt_top.tracks import OpTrack

KEPT: Final = 200
"""The most events that are kept."""


class Events:
    """The latest events.

    Attributes:
        kept: Oldest first.
        count: All events so far, even those no longer kept.
    """

    def __init__(self) -> None:
        self.kept: deque[Event] = deque(maxlen=KEPT)
        self.count = 0
        self._begun = False
        #: By process: the number of the last warning that was shown.
        self._warned: dict[str, int] = {}

    def tell(self, groups: Iterable[Group], look: Look) -> None:
        """Report news about these operations."""
        groups = list(groups)
        if not self._begun:
            self._begin(groups, look)
        for group in groups:
            if group.running and not group.was_running:
                group.was_running = True
                start_real = min(track.start_real for track in group.members.values())
                self._add(group, "info", f"{derive.title(group)} started", start_real)
        for group in groups:
            tracks = sorted(group.members.values(), key=lambda track: derive.order(track.proc))
            running = [track for track in tracks if track.running]
            self._tell_fallback(group, running, look)
            self._tell_stalls(group, running, look)
            self._tell_warning(group, tracks, look)
        for group in groups:
            if not group.told_end:
                self._tell_end(group, look)
            self._tell_change(group, look)

    def _begin(self, groups: list[Group], look: Look) -> None:
        """Mark operations that ended before the first look as reported: they are history, not news."""
        self._begun = True
        for group in groups:
            group.told_end = not group.running
            group.told_change = bool(node_op(group, look).changed)
            for track in group.members.values():
                self._warned[track.proc.key] = track.proc.process.warned

    def _add(self, group: Group, level: str, what: str, real: float, fold: str = "") -> None:
        """Report; an event replaces an earlier one with the same `fold` in an operation."""
        event = Event(real, level, what, group.job)
        before = group.folded.get(fold)
        if fold:
            group.folded[fold] = event
        if before is not None and before in self.kept:
            self.kept.remove(before)
        self.kept.append(event)
        self.count += 1

    def _tell_fallback(self, group: Group, running: list[OpTrack], look: Look) -> None:
        fell: dict[str, list[OpTrack]] = defaultdict(list)
        for track in running:
            if track.op.flags & FLAG_FALLBACK and not track.told_fallback:
                track.told_fallback = True
                fell[_fallback(track.op)].append(track)
        for words, those in fell.items():
            self._add(group, "warn", f"{_names(those)} {'runs' if len(those) == 1 else 'run'} {words}", look.real)

    def _tell_stalls(self, group: Group, running: list[OpTrack], look: Look) -> None:
        """Report at most two events per operation, however many of its ranks stall, and however often."""
        spans = {track: track.stalled(look.tracks[track.proc.key], look.mono) for track in running}
        still = [track for track in running if spans[track] is not None]
        new = [track for track in still if not track.told_stall]
        gone_on = [track for track in running if track.told_stall and track not in still]
        for track in running:
            track.told_stall = track in still
        if new:
            group.stalls.update(track.proc.key for track in new)
            those = [track for track in group.members.values() if track.proc.key in group.stalls]
            count = group.stalls.total()
            times = f" {count} times" if count > len(those) else ""
            longest = max(spans[track] or 0.0 for track in new)
            words = f"{_names(those)} stalled{times}: no progress for {longest:.0f} s"
            self._add(group, "warn", words, look.real, "stalled")
        if gone_on:
            left = f"; {_names(still)} {'does' if len(still) == 1 else 'do'} not yet" if still else ""
            words = f"{_names(gone_on)} {'goes' if len(gone_on) == 1 else 'go'} on{left}"
            self._add(group, "info", words, look.real, "goes on")

    def _tell_warning(self, group: Group, tracks: list[OpTrack], look: Look) -> None:
        said: dict[str, list[OpTrack]] = defaultdict(list)
        for track in tracks:
            process, key = track.proc.process, track.proc.key
            if process.warned > self._warned.get(key, 0):
                self._warned[key] = process.warned
                said[process.warning].append(track)
        for warning, those in said.items():
            self._add(group, "warn", f"{_names(those)}: {warning}", look.real)

    def _tell_end(self, group: Group, look: Look) -> None:
        lost: dict[tuple[bool, int], list[OpTrack]] = defaultdict(list)
        for track in sorted(group.members.values(), key=lambda track: derive.order(track.proc)):
            if track.failed and not track.told_end:
                track.told_end = True
                lost[track.died, track.op.error].append(track)
        for those in lost.values():
            self._add(group, "bad", _obituary(those), look.real)
        if group.running:
            return
        group.told_end = True
        op = node_op(group, look)
        if op.empty:
            self._add(
                group, "info", f"{derive.title(group)} done in {op.elapsed_s:.1f} s: {phrases.nothing(op)}", look.real
            )
        elif not op.failed:
            reached = "" if op.copies else f", {text.percent(share(op.average, op.target))} of target"
            speed = f"{text.rate(op.average)} GB/s{reached}"
            words = f"{derive.title(group)} done: {text.size(op.total)} GB in {op.elapsed_s:.1f} s, {speed}"
            self._add(group, "info", words, look.real)

    def _tell_change(self, group: Group, look: Look) -> None:
        op = node_op(group, look)
        if op.changed and not group.told_change:
            group.told_change = True
            shares = " and ".join(f"{_changed(part)} of the {name}" for name, part in op.changed)
            self._add(
                group, "warn" if phrases.still(op) else "info", f"{derive.title(group)}: {shares} changed", look.real
            )


def _changed(share: float) -> str:
    """A share in percent; only zero is shown as 0."""
    return "nothing" if share == 0 else f"{100 * share:.3g} %"


def _fallback(op: Operation) -> str:
    """`threads, not io_uring (EPERM: ...)`: the refused feature, and the usual cause."""
    why = errno_name(op.fallback_errno)
    hint = next((found for what in op.refused if (found := phrases.HINTS.get((what, why)))), "")
    reason = f"{why}: {hint}" if hint else why or "unknown cause"
    return phrases.instead(ENGINES.get(op.engine, "unknown"), op.refused, reason)


def _names(tracks: list[OpTrack]) -> str:
    return phrases.some([derive.name(track.proc) for track in tracks])


def _obituary(tracks: list[OpTrack]) -> str:
    """The text for ranks that died, or that failed for one reason."""
    first = tracks[0]
    name, kind = _names(tracks), KINDS.get(first.op.kind, "operation")
    if not first.died:
        return f"{name} {kind} failed: {errno_name(first.op.error) or 'see its log'}"
    done = text.percent(share(sum(track.done for track in tracks), sum(track.op.bytes_total for track in tracks)))
    pid = f" pid {first.proc.header.pid}" if len(tracks) == 1 else ""
    together = first.op.kind == Kind.SAVE and first.proc.process.group
    return f"{name}{pid} died in {kind} at {done}" + (": this checkpoint cannot be completed" if together else "")
