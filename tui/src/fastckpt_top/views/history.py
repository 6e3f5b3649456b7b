"""The past: ended operations and events, as lines for the lists and as a block for the right side."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.rows import judge, share
from fastckpt_top.views import cells
from fastckpt_top.views.boxes import Block, inside, titled
from fastckpt_top.views.paint import VERDICT_STYLES, Frame, Line

if TYPE_CHECKING:
    from fastckpt_top.rows import Checkpoint, Event

KIND: Final = 6
SIZE: Final = 7
TOOK: Final = 6
SHORT_LABEL: Final = 5
TIGHT: Final = 36
"""In narrower lists a cell or two are taken from the figures, so that the duration fits."""
LONG_LABEL: Final = 28
OPTIONAL: Final = (
    ("percent", cells.PERCENT),
    ("took", TOOK),
    ("when", 8),
    ("size", SIZE),
    ("peak", cells.RATE),
    ("fsync", TOOK),
    ("p99", 7),
    ("bar", 12),
    ("engines", 18),
)
"""Columns that may be missing, the most important first."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The width of each column of ended operations, without the blank before it; 0 if it is left out."""

    width: int
    label: int
    rate: int
    percent: int
    took: int
    when: int
    size: int
    peak: int
    fsync: int
    p99: int
    bar: int
    engines: int


def columns(width: int) -> Columns:
    """Choose the columns for lines of so many cells. They depend on nothing else, so that they do not move."""
    tight = {"percent": cells.PERCENT - 1, "took": TOOK - 2} if width < TIGHT else {}
    rate = cells.RATE - 1 if tight else cells.RATE
    left = width - 1 - 1 - KIND - 1 - SHORT_LABEL - 1 - rate
    chosen = {column: 0 for column, _ in OPTIONAL}
    for column, wanted in OPTIONAL:
        size = tight.get(column, wanted)
        if size + 1 > left:
            break
        chosen[column] = size
        left -= size + 1
    label = SHORT_LABEL + min(max(left, 0), LONG_LABEL - SHORT_LABEL)
    if chosen["bar"]:
        chosen["bar"] += min(max(width - 1 - 1 - KIND - 1 - label - 1 - rate - _sum(chosen), 0), 24)
    return Columns(width, label, rate, **chosen)


def _sum(chosen: dict[str, int]) -> int:
    return sum(size + 1 for size in chosen.values() if size)


def head(frame: Frame, cols: Columns) -> Line:
    """The head of a list of ended operations."""
    line = Line(" ")
    for word, size, right in (
        ("WHEN", cols.when, False),
        ("OP", KIND, False),
        ("LABEL" if cols.label < len("CHECKPOINT") else "CHECKPOINT", cols.label, False),
        ("GB", cols.size, True),
        ("TOOK s"[: cols.took].strip(), cols.took, True),
        ("GB/s", cols.rate, True),
        ("%", cols.percent, True),
        ("peak", cols.peak, True),
        ("fsync", cols.fsync, True),
        ("p99 ms", cols.p99, True),
    ):
        if size:
            line.add(f" {word:>{size}}" if right else f" {word:<{size}}", "head")
    if cols.bar:
        line.add(" ").extend(cells.gauge_head(cols.bar, None, frame.glyphs))
    if cols.engines:
        line.add(" ENGINES", "head")
    return line.fill(cols.width)


def target_of(frame: Frame, past: Checkpoint) -> float:
    """Bytes/s that an ended operation should have reached: its target at the time, else today's for its GPUs."""
    if past.target:
        return past.target
    target = frame.model.node.target
    gpus = frame.model.gpus or past.gpus or len(past.members)
    return (target.save if past.kind == "save" else target.load) * gpus


def line(frame: Frame, past: Checkpoint, cols: Columns) -> Line:
    """One ended operation, judged by the target that it had."""
    target = target_of(frame, past)
    verdict = judge(past.average, target)
    style = VERDICT_STYLES[verdict]
    made = Line(frame.glyphs.dead if past.error else frame.glyph(verdict), "bad" if past.error else style)
    if cols.when:
        made.add(time.strftime(" %H:%M:%S", time.localtime(past.end)), "dim")
    made.add(f" {past.kind:<{KIND}} ").add(_label(frame, past, cols.label), "strong")
    if past.error:
        words = past.error if "died" in past.error or past.error == "failed" else f"failed: {past.error}"
        return made.add(" ").add(text.fit(frame.say(words), cols.width - made.width - 1, frame.glyphs), "bad")
    percent = cells.percent(share(past.average, target), cols.percent)
    p99 = f"{past.p99_s * 1e3:.1f}" if past.p99_s else "-"
    for words, size, name in (
        (cells.gb(past.bytes, cols.size), cols.size, "text"),
        (_took(past.seconds, cols.took), cols.took, "text"),
        (text.rate(past.average), cols.rate, style),
        (percent, cols.percent, style),
        (text.rate(past.peak or None), cols.peak, "dim"),
        (_took(past.sync_s, cols.fsync), cols.fsync, "dim"),
        (p99, cols.p99, "dim"),
    ):
        if size:
            made.add(f" {words:>{size}}", name)
    if cols.bar:
        made.add(" ").extend(cells.gauge(share(past.average, target), cols.bar, style, frame.glyphs))
    if cols.engines:
        words = ",".join(sorted(past.engines)) + (f" ({past.fallback})" if past.fallback else "")
        made.add(" ").add(text.fit(words, cols.engines, frame.glyphs), "low" if past.fallback else "dim")
    return made.fill(cols.width)


def event_lines(frame: Frame, event: Event, width: int, high: int = 1) -> list[Line]:
    """One event, in so many lines at most."""
    style = {"warn": "low", "bad": "bad"}.get(event.level, "text")
    sign = {"warn": frame.glyphs.warn, "bad": frame.glyphs.dead}.get(event.level, " ")
    when = time.strftime("%H:%M:%S", time.localtime(event.real))
    made = [Line(f"{when} ", "dim").add(sign, style).add(" ")]
    room, rest = max(width - made[0].width, 0), frame.say(event.text)
    while len(made) < high and text.width(rest) > room and (end := rest.rfind(" ", 0, room + 1)) > 0:
        made[-1].add(rest[:end], style)
        made.append(Line("  "))
        room, rest = max(width - 2, 0), rest[end + 1 :]
    made[-1].add(text.fit(rest, room, frame.glyphs), style)
    return [line.fill(width) for line in made]


def block(frame: Frame, width: int, height: int) -> Block:
    """The latest ended operations, and the latest events below them; the newest of each first.

    Args:
        frame: The frame to paint.
        width: Cells.
        height: Lines.

    Returns:
        Exactly `height` lines of `width` cells, in a box where the screen has room for boxes.
    """
    if height <= 0 or width <= 0:
        return Block()
    framed, inner, room = inside(frame, width, height)
    room -= not framed
    past = list(reversed(frame.model.past.checkpoints))
    events = list(reversed(frame.model.events))
    cols = columns(inner)
    made = [head(frame, cols)] if past else [Line("no operation has ended yet", "dim")]
    for_events = min(len(events), max(room - 1 - len(past), room // 3))
    past = past[: max(room - len(made) - for_events, 0)]
    made += [line(frame, one, cols) for one in past]
    made += [line for one in events for line in event_lines(frame, one, inner, 2)]
    made = made[: max(room, 0)]
    title = Line("history", "title").add(" and events" if for_events else "", "title")
    return titled(frame, made, title, Line("3 all", "dim"), width, height)


def _label(frame: Frame, past: Checkpoint, room: int) -> str:
    """The label in so many cells; if it is too long, the end of the step, which distinguishes one from the next."""
    label = frame.say(past.label)
    if text.width(label) > room and past.step is not None:
        return text.fit_front(str(past.step), room, frame.glyphs)
    return text.fit(label, room, frame.glyphs)


def _took(seconds: float, room: int) -> str:
    """Seconds in so many cells; a larger unit, `17m`, where they would not fit."""
    words = text.brief(seconds)
    if len(words) > room:
        words = f"{seconds:.{2 if seconds < 10 else 0}f}"  # noqa: PLR2004
    return words if len(words) <= room and seconds < 10_000 else text.ago(seconds)  # noqa: PLR2004
