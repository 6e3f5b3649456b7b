"""The other views: all threads, the history of checkpoints, events."""

from __future__ import annotations

import time
from typing import Final

from fastckpt_top import text
from fastckpt_top.rows import Checkpoint, judge
from fastckpt_top.views.paint import VERDICT_STYLES, Frame, Line, scrolled
from fastckpt_top.views.side import checkpoint_target, event_line
from fastckpt_top.views.table import columns, thread_line

_WIDE: Final = 110


def paint(frame: Frame, room: int) -> list[Line]:
    """The body of a view: its head, and the part of its list that fits as far as it is scrolled.

    Args:
        frame: What to paint.
        room: Lines.
    """
    view = frame.ui.view
    top, lines = {"threads": _threads, "history": _history, "events": _events}[view](frame)
    if frame.height < 8:  # noqa: PLR2004
        top = []
    part, first = scrolled(lines, frame.ui.scroll.get(view, 0), room - len(top))
    frame.ui.scroll[view] = first
    return [*top, *part][:room]


def _threads(frame: Frame) -> tuple[list[Line], list[Line]]:
    cols = columns(frame.width)
    rows = frame.ui.rows(frame.model.rows)
    lines = [thread_line(frame, row, thread, cols, named=True) for row in rows for thread in row.threads]
    busy = sum(row.running for row in rows)
    name = Line(f" THREADS  {len(lines)} of {text.count(len(rows), 'rank')} ({busy} busy)", "head")
    if not cols.pid:
        return [name], lines or [Line(" no threads yet", "dim")]
    mode = "GB" if frame.ui.mode == "total" else "GB/s"
    head = (
        Line("  RANK THR       TID STATE ", "head")
        .add(f"{mode:>8}", "head")
        .add(" " + text.fit("of target", cols.bar, frame.glyphs), "head")
    )
    head.add("    %", "head").add(" " + " " * cols.spark)
    if cols.eta:
        head.add("    q latency", "head").add("           WAITS FOR" if cols.wait else " WAITS FOR", "head")
    return [name, head], lines or [Line(" no threads yet", "dim")]


def _history(frame: Frame) -> tuple[list[Line], list[Line]]:
    past = list(reversed(frame.model.past.checkpoints))
    width = frame.width
    name = Line(f" HISTORY  {text.count(len(past), 'operation')}", "head")
    head = Line("  WHEN    " if width >= 60 else " ", "head")  # noqa: PLR2004
    label = _label_width(width)
    head.add(f" OP     {text.fit('CHECKPOINT', label, frame.glyphs)}", "head")
    if width >= 50:  # noqa: PLR2004
        head.add("      GB   secs", "head")
    head.add("   GB/s     %", "head")
    if width >= _WIDE:
        head.add("   /GPU   peak  fsync  p99 ms  of target", "head")
    return [name, head], [_checkpoint_line(frame, one, label) for one in past] or [Line(" nothing yet", "dim")]


def _label_width(width: int) -> int:
    if width >= _WIDE:
        return max(14, min(28, width - 100))
    return max(6, min(28, width - (51 if width >= 60 else 40 if width >= 50 else 24)))  # noqa: PLR2004


def _checkpoint_line(frame: Frame, past: Checkpoint, label: int) -> Line:
    width = frame.width
    target = checkpoint_target(frame, past)
    verdict = judge(past.average, target)
    style = VERDICT_STYLES[verdict]
    line = Line(frame.glyphs.dead if past.error else frame.glyph(verdict), "bad" if past.error else style)
    if width >= 60:  # noqa: PLR2004
        line.add(time.strftime(" %H:%M:%S", time.localtime(past.end)), "dim")
    line.add(f" {past.kind:<6} ").add(text.fit(frame.say(past.label), label, frame.glyphs), "strong")
    if past.error:
        return line.add(f"  failed: {past.error}", "bad")
    if width >= 50:  # noqa: PLR2004
        line.add(f" {text.size(past.bytes):>7} {past.seconds:>6.1f}")
    fraction = past.average / target if target else None
    line.add(f" {text.rate(past.average):>6} {text.percent(fraction):>5}", style)
    if width >= _WIDE:
        gpus = frame.model.gpus or past.gpus or len(past.members)
        p99 = f"{past.p99_s * 1e3:.1f}" if past.p99_s else "-"
        peak = text.rate(past.peak or None)
        line.add(f" {text.rate(past.average / max(gpus, 1)):>6} {peak:>6} {text.brief(past.sync_s):>6} {p99:>7}", "dim")
        engines = ",".join(sorted(past.engines)) + (f" ({past.fallback})" if past.fallback else "")
        room = width - line.width - 24
        line.add("  ").add(text.bar(fraction, min(max(room, 8), 40), frame.glyphs.thin), style)
        line.add(f"  {engines}", "low" if past.fallback else "dim")
    return line


def _events(frame: Frame) -> tuple[list[Line], list[Line]]:
    events = list(frame.model.events)
    name = Line(f" EVENTS  {frame.model.event_count}, newest first", "head")
    return [name], [event_line(frame, event, frame.width) for event in reversed(events)] or [
        Line(" nothing yet", "dim")
    ]
