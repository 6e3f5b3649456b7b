"""The past: ended operations and events, as lines for the lists and as a block for the right side."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.rows import COPIES, Verdict, judge, share
from fastckpt_top.views import cells
from fastckpt_top.views.boxes import box, inside
from fastckpt_top.views.columns import Column, Columns
from fastckpt_top.views.paint import VERDICT_STYLES, Frame, Line

if TYPE_CHECKING:
    from fastckpt_top.rows import Checkpoint, Event

TIGHT: Final = 36
"""In lists narrower than this, the figures have a cell or two less, so that the duration fits."""
OPTIONAL: Final = ("percent", "took", "when", "size", "peak", "fsync", "p99", "bar", "engines")
"""Columns that may be missing, the most important first."""


def columns(width: int) -> Columns:
    """Choose the columns for lines of this many cells."""
    tight = width < TIGHT
    every = (
        Column("when", "WHEN", 8),
        Column("kind", "OP", 6),
        Column("label", "LABEL", 5, most=28),
        Column("size", "GB", 7, right=True),
        Column("took", "TOOK" if tight else "TOOK s", 4 if tight else 6, right=True),
        Column("rate", "GB/s", cells.RATE - tight, right=True),
        Column("percent", "%", cells.PERCENT - tight, right=True),
        Column("peak", "peak", cells.RATE, right=True),
        Column("fsync", "fsync", 6, right=True),
        Column("p99", "p99 ms", 7, right=True),
        Column("bar", "", 12, most=36),
        Column("engines", "ENGINES", 18),
    )
    return Columns(every, OPTIONAL, width)


def head(frame: Frame, cols: Columns) -> Line:
    """The head of a list of ended operations."""
    heads: dict[str, str | Line] = {}
    if cols["label"] >= len("CHECKPOINT"):
        heads["label"] = "CHECKPOINT"
    if cols["bar"]:
        heads["bar"] = cells.gauge_head(cols["bar"], None, frame.glyphs)
    return cols.head(heads)


def target_of(frame: Frame, past: Checkpoint) -> float:
    """The target of an ended operation in bytes/s: the one at the time, else the current one for its GPUs."""
    if past.target or past.kind in COPIES:
        return past.target
    target = frame.model.node.target
    gpus = frame.model.gpus or past.gpus or len(past.members)
    return (target.save if past.kind == "save" else target.load) * gpus


def line(frame: Frame, past: Checkpoint, cols: Columns) -> Line:
    """One ended operation, judged by its target."""
    reached = share(past.average, target := target_of(frame, past))
    verdict = Verdict.FAILED if past.error else judge(past.average, target)
    style = VERDICT_STYLES[verdict]
    label, peak = _label(frame, past, cols["label"]), past.peak or None
    engines = ",".join(sorted(past.engines)) + (f" ({past.fallback})" if past.fallback else "")
    parts: dict[str, tuple[str, str] | Line] = {
        "when": (time.strftime("%H:%M:%S", time.localtime(past.end)), "dim"),
        "kind": (past.kind, "text"),
        "label": Line(label, "strong"),
        "size": (cells.gb(past.bytes, cols["size"]), "text"),
        "took": (_took(past.seconds, cols["took"]), "text"),
        "rate": (text.rate(past.average), style),
        "percent": (cells.percent(reached, cols["percent"]), style),
        "peak": (text.rate(peak), "dim"),
        "fsync": (_took(past.sync_s, cols["fsync"]), "dim"),
        "p99": (f"{past.p99_s * 1e3:.1f}" if past.p99_s else "-", "dim"),
        "bar": cells.gauge(reached, cols["bar"], style, frame.glyphs),
        "engines": Line(text.fit(engines, cols["engines"], frame.glyphs), "low" if past.fallback else "dim"),
    }
    made = cols.row(Line(frame.glyph(verdict), style), parts)
    if not past.error:
        return made
    words = past.error if "died" in past.error or past.error == "failed" else f"failed: {past.error}"
    made.fill(cols.places()["label"][1] + 1)
    return made.add(" ").add(text.fit(frame.say(words), cols.width - made.width - 1, frame.glyphs), "bad")


def event_lines(frame: Frame, event: Event, width: int, high: int = 1) -> list[Line]:
    """One event, in at most this many lines."""
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


def block(frame: Frame, width: int, height: int) -> list[Line]:
    """The latest ended operations, and below them the latest events; the newest of each first."""
    if height <= 0 or width <= 0:
        return []
    framed, inner, room = inside(frame, width, height)
    room -= not framed
    past = list(reversed(frame.model.past.checkpoints))
    events = frame.events[::-1]
    cols = columns(inner)
    made = [head(frame, cols)] if past else [Line("no operation has ended yet", "dim")]
    for_events = min(len(events), max(room - 1 - len(past), room // 3))
    past = past[: max(room - len(made) - for_events, 0)]
    made += [line(frame, one, cols) for one in past]
    made += [line for one in events for line in event_lines(frame, one, inner, 2)]
    made = made[: max(room, 0)]
    title = Line("history", "title").add(" and events" if for_events else "", "title")
    return box(frame, made, title, Line("press 3: all", "dim"), width, height)


def _label(frame: Frame, past: Checkpoint, room: int) -> str:
    """The label in this many cells; if it is too long, the end of the step, which distinguishes steps."""
    label = frame.say(past.label)
    if text.width(label) > room and past.step is not None:
        return text.fit_front(str(past.step), room, frame.glyphs)
    return text.fit(label, room, frame.glyphs)


def _took(seconds: float, room: int) -> str:
    """Seconds in this many cells; a larger unit, `17m`, if they do not fit."""
    words = text.brief(seconds)
    if len(words) > room:
        words = f"{seconds:.{2 if seconds < 10 else 0}f}"  # noqa: PLR2004
    return words if len(words) <= room and seconds < 10_000 else text.ago(seconds)  # noqa: PLR2004
