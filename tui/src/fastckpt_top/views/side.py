"""The panel at the right of wide screens: history, the selected rank, events. And the pane of threads below."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastckpt_top import text
from fastckpt_top.rows import judge
from fastckpt_top.views.paint import VERDICT_STYLES, Frame, Line
from fastckpt_top.views.table import engine, thread_line

if TYPE_CHECKING:
    from fastckpt_top.rows import Checkpoint, Event, Row
    from fastckpt_top.views.table import Columns


def panel(frame: Frame, row: Row | None, width: int, height: int) -> list[Line]:
    """History, selection and events, one below the other.

    Args:
        frame: What to paint.
        row: The selected row.
        width: Cells.
        height: Lines.
    """
    past = frame.model.past.checkpoints
    selected = _selected(frame, row, width) if row is not None else []
    left = height - len(selected) - 3
    shown = max(3, min(len(past), left // 2))
    lines = [Line(" " + text.fit("HISTORY", width - 38), "head").add("            GB   secs   GB/s     %", "dim")]
    lines += [_history_line(frame, checkpoint, width) for checkpoint in reversed(past[-shown:])] or [
        Line(" nothing yet", "dim")
    ]
    if selected:
        lines += [Line(), *selected]
    lines += [Line(), Line(" EVENTS", "head")]
    room = max(height - len(lines), 0)
    lines += [event_line(frame, event, width) for event in reversed(list(frame.model.events)[-room:] if room else [])]
    lines += [Line() for _ in range(height - len(lines))]
    return [line.fill(width) for line in lines[:height]]


def _history_line(frame: Frame, past: Checkpoint, width: int) -> Line:
    target = checkpoint_target(frame, past)
    verdict = judge(past.average, target)
    line = Line(" ").add(text.fit(frame.say(past.label), width - 38, frame.glyphs))
    line.add(f" {past.kind:<6}", "dim")
    if past.error:
        return line.add(f" {past.error}", "bad")
    line.add(f" {text.size(past.bytes):>6} {past.seconds:>6.1f} {text.rate(past.average):>6}")
    line.add(f" {text.percent(past.average / target if target else None):>5}", VERDICT_STYLES[verdict])
    return line.add(" ").add(frame.glyph(verdict), VERDICT_STYLES[verdict])


def checkpoint_target(frame: Frame, past: Checkpoint) -> float:
    """Bytes/s that an ended operation should have reached: what was the target then, else today's for its GPUs."""
    if past.target:
        return past.target
    target = frame.model.node.target
    gpus = frame.model.gpus or past.gpus or len(past.members)
    return (target.save if past.kind == "save" else target.load) * gpus


def _selected(frame: Frame, row: Row, width: int) -> list[Line]:
    lines = [Line(" SELECTED", "head").add(f"  {row.name}  pid {row.pid}  uid {row.uid}  {frame.say(row.job)}", "dim")]
    if not row.kind:
        return [*lines, Line(" no operation yet", "dim")]
    direct = "direct + cached" if row.mixed else "direct" if row.direct else "through the cache"
    fallback = f"  fallback {row.fallback}" if row.fallback else ""
    major, minor = row.st_dev >> 8 & 0xFFF, row.st_dev & 0xFF
    device = f"  dev {major}:{minor}" if row.st_dev else ""
    lines.append(Line(" path   ", "dim").add(text.fit_front(frame.say(row.path), width - 9, frame.glyphs)))
    lines.append(
        Line(" files  ", "dim").add(
            f"{row.files_done} of {row.files} done{device}  {text.size(row.durable)} GB durable"
        )
    )
    lines.append(Line(" engine ", "dim").add(f"{row.engine}, {direct}").add(fallback, "low"))
    lines.append(
        Line(" block  ", "dim").add(
            f"{text.block(row.block_size)}, {row.queue_depth} in flight, {text.count(len(row.threads), 'thread')}"
        )
    )
    if row.p50_s is not None and row.p99_s is not None:
        worst = max((thread.latency_max_s for thread in row.threads), default=0.0)
        words = f"p50 {row.p50_s * 1e3:.1f}  p99 {row.p99_s * 1e3:.1f}  max {worst * 1e3:.1f} ms"
        lines.append(Line(" lat    ", "dim").add(words))
        top = float(max(row.histogram, default=0))
        bars = text.spark([float(count) for count in row.histogram], len(row.histogram), top, frame.glyphs)
        lines.append(Line("        64us ", "dim").add(bars, "graph").add(" 1s (log2)", "dim"))
    counts = [sum(values) for values in zip(*((t.retries, t.shorts, t.errors) for t in row.threads), strict=True)] or [
        0,
        0,
        0,
    ]
    words = f"{counts[0]} retries, {counts[1]} short, {counts[2]} errors"
    lines.append(Line(" ever   ", "dim").add(words, "bad" if counts[2] else "text"))
    return lines


def event_line(frame: Frame, event: Event, width: int) -> Line:
    """One event."""
    style = {"warn": "low", "bad": "bad"}.get(event.level, "text")
    mark = {"warn": frame.glyphs.warn, "bad": frame.glyphs.dead}.get(event.level, " ")
    when = time.strftime("%H:%M:%S", time.localtime(event.real))
    line = Line(f" {when} ", "dim").add(mark, style).add(" ")
    return line.add(text.fit(frame.say(event.text), max(width - line.width, 0), frame.glyphs), style)


def pane(frame: Frame, row: Row, cols: Columns, height: int) -> list[Line]:
    """The selected rank's threads, below a table that does not show them."""
    glyphs = frame.glyphs
    words = [
        row.name,
        text.count(len(row.threads), "thread"),
        f"{text.block(row.block_size)} blocks",
        f"QD {row.queue_depth}",
    ]
    words += [engine(row), frame.say(row.path)]
    line = Line(f"{glyphs.rule} ", "dim")
    line.add(
        text.fit(
            f" {glyphs.middot} ".join(words),
            min(frame.width - 3, sum(map(text.width, words)) + 3 * len(words) - 3),
            glyphs,
        )
    )
    line.add(" ").add(glyphs.rule * max(frame.width - line.width, 0), "dim")
    lines = [line.fill(frame.width)]
    room = height - 1
    threads = row.threads if len(row.threads) <= room else row.threads[: room - 1]
    lines += [thread_line(frame, row, thread, cols) for thread in threads]
    if len(threads) < len(row.threads):
        lines.append(Line(f"     {len(row.threads) - len(threads)} more: t shows all", "dim").fill(cols.width))
    return lines[:height]
