"""The other views: all threads, the history of operations, events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastckpt_top import text
from fastckpt_top.views import cells, history, threads
from fastckpt_top.views.boxes import box, inside
from fastckpt_top.views.paint import Frame, Line, scrolled
from fastckpt_top.views.table import TINY

if TYPE_CHECKING:
    from collections.abc import Callable


def paint(frame: Frame, room: int) -> list[Line]:
    """The body of a view: its head, and the visible part of its list."""
    if room <= 0:
        return []
    view = frame.ui.view
    framed, inner, height = inside(frame, frame.width, room)
    views: dict[str, Callable[[Frame, int], tuple[Line, Line, list[Line]]]] = {
        "threads": _threads,
        "history": _history,
        "events": _events,
    }
    title, head, lines = views[view](frame, inner)
    top = [head] if head.width and height >= TINY else []
    if not framed and height > TINY:
        top.insert(0, title)
    part, first = scrolled(lines, frame.ui.scroll.get(view, 0), height - len(top))
    frame.ui.scroll[view] = first
    body = [*top, *(part or [Line(" nothing yet", "dim")])][:height]
    if not framed:
        return body
    dash = "-" if frame.glyphs is text.ASCII else "\N{EN DASH}"
    note = f"{first + 1}{dash}{first + len(part)} of {len(lines)}" if part else ""
    return box(frame, body, title, Line(note, "dim"), frame.width, room)


def _threads(frame: Frame, width: int) -> tuple[Line, Line, list[Line]]:
    rows = frame.ui.shown(frame.model)
    cols = threads.columns(width, max([3, *(len(cells.name(row)) for row in rows)]))
    lines = [threads.thread_line(frame, row, thread, cols) for row in rows for thread in row.threads]
    title = Line(f"{text.count(len(lines), 'thread')} of {text.count(len(rows), 'rank')}", "title")
    busy = sum(row.running for row in rows)
    title.add(f" {frame.glyphs.middot} {busy} busy", "dim")
    return title, cells.head(frame, cols, {thread.target for row in rows for thread in row.threads}), lines


def _history(frame: Frame, width: int) -> tuple[Line, Line, list[Line]]:
    past = list(reversed(frame.model.past.checkpoints))
    cols = history.columns(width)
    title = Line("history", "title").add(f" {frame.glyphs.middot} {text.count(len(past), 'operation')}", "dim")
    return title, history.head(frame, cols), [history.line(frame, one, cols) for one in past]


def _events(frame: Frame, width: int) -> tuple[Line, Line, list[Line]]:
    events = [line for event in reversed(frame.events) for line in history.event_lines(frame, event, width)]
    count = text.count(len(events), "event")
    return Line("events", "title").add(f" {frame.glyphs.middot} {count}, newest first", "dim"), Line(), events
