"""Events, each reported once: starts, ends, deaths, failures, stalls, fallbacks."""

from __future__ import annotations

from collections import deque
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
"""Events that are kept."""


class Events:
    """The latest events.

    Attributes:
        kept: Oldest first.
        count: Events ever, also those no longer kept.
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
                self._add("info", f"{derive.title(group)} started", start_real)
        for group in groups:
            for track in group.members.values():
                if track.running:
                    self._tell_trouble(track, look)
                self._tell_warning(track, look)
        for group in groups:
            if not group.told_end:
                self._tell_end(group, look)
            self._tell_change(group, look)

    def _begin(self, groups: list[Group], look: Look) -> None:
        """Operations that had ended before the first look are history, not news."""
        self._begun = True
        for group in groups:
            group.told_end = not group.running
            group.told_change = bool(node_op(group, look).changed)
            for track in group.members.values():
                self._warned[track.proc.key] = track.proc.process.warned

    def _add(self, level: str, what: str, real: float) -> None:
        self.kept.append(Event(real, level, what))
        self.count += 1

    def _tell_trouble(self, track: OpTrack, look: Look) -> None:
        op, name = track.op, derive.name(track.proc)
        if op.flags & FLAG_FALLBACK and not track.told_fallback:
            track.told_fallback = True
            self._add("warn", f"{name} {_fallback(op)}", look.real)
        stalled = track.stalled(look.tracks[track.proc.key], look.mono)
        if stalled is not None and not track.told_stall:
            track.told_stall = True
            self._add("warn", f"{name} stalled: no progress for {stalled:.0f} s", look.real)
        elif stalled is None and track.told_stall:
            track.told_stall = False
            self._add("info", f"{name} goes on", look.real)

    def _tell_warning(self, track: OpTrack, look: Look) -> None:
        process, key = track.proc.process, track.proc.key
        if process.warned > self._warned.get(key, 0):
            self._warned[key] = process.warned
            self._add("warn", f"{derive.name(track.proc)}: {process.warning}", look.real)

    def _tell_end(self, group: Group, look: Look) -> None:
        for track in group.members.values():
            if track.failed and not track.told_end:
                track.told_end = True
                self._add("bad", _obituary(track), look.real)
        if group.running:
            return
        group.told_end = True
        op = node_op(group, look)
        if op.empty:
            self._add("info", f"{derive.title(group)} done in {op.elapsed_s:.1f} s: {phrases.nothing(op)}", look.real)
        elif not op.failed:
            reached = text.percent(share(op.average, op.target))
            speed = f"{text.rate(op.average)} GB/s, {reached} of target"
            words = f"{derive.title(group)} done: {text.size(op.total)} GB in {op.elapsed_s:.1f} s, {speed}"
            self._add("info", words, look.real)

    def _tell_change(self, group: Group, look: Look) -> None:
        op = node_op(group, look)
        if op.changed and not group.told_change:
            group.told_change = True
            shares = " and ".join(f"{_changed(part)} of the {name}" for name, part in op.changed)
            self._add("warn" if phrases.still(op) else "info", f"{derive.title(group)}: {shares} changed", look.real)


def _changed(share: float) -> str:
    """Percent; only zero is shown as 0."""
    return "nothing" if share == 0 else f"{100 * share:.3g} %"


def _fallback(op: Operation) -> str:
    """`runs threads, not io_uring (EPERM: ...)`: what was refused, and the usual cause."""
    why = errno_name(op.fallback_errno)
    hint = next((found for what in op.refused if (found := phrases.HINTS.get((what, why)))), "")
    reason = f"{why}: {hint}" if hint else why or "unknown cause"
    return f"runs {phrases.instead(ENGINES.get(op.engine, 'unknown'), op.refused, reason)}"


def _obituary(track: OpTrack) -> str:
    kind = KINDS.get(track.op.kind, "operation")
    name = derive.name(track.proc)
    if track.died:
        done = text.percent(share(track.done, track.op.bytes_total))
        died = f"{name} pid {track.proc.header.pid} died in {kind} at {done}"
        together = track.op.kind == Kind.SAVE and track.proc.process.group
        return f"{died}: this checkpoint cannot be completed" if together else died
    return f"{name} {kind} failed: {errno_name(track.op.error) or 'see its log'}"
