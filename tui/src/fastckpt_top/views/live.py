"""The live view, and the frame that all views share: title above, message and keys below."""

from __future__ import annotations

from typing import Final

from fastckpt_top import text
from fastckpt_top.views import help as help_view
from fastckpt_top.views import history, lists, table, threads
from fastckpt_top.views.boxes import beside, stack
from fastckpt_top.views.header import graph, keys, message, one_line, op_lines, title
from fastckpt_top.views.paint import Frame, Line, Screen

WIDE: Final = 120
"""From this width on the history stands at the right."""
LOW: Final = 20
"""Below this height there is no graph and no pane."""
TINY: Final = 8
"""Below this height there are no keys and no table head."""


def paint(frame: Frame) -> Screen:
    """The whole screen.

    Args:
        frame: What to paint, and how large.

    Returns:
        Exactly as many lines as the frame is high, each as wide as it.
    """
    screen = Screen()
    width, height = frame.width, frame.height
    if width < 1 or height < 1:
        return screen
    if frame.ui.help:
        screen.lines = help_view.lines(frame)
        return screen
    if height == 1:
        screen.lines = [one_line(frame)]
        return screen
    top = [title(frame)] if height > 2 else []  # noqa: PLR2004
    bottom: list[Line] = []
    if height >= TINY:
        line, zones = keys(frame)
        screen.actions = [(height - 1, start, end, action) for start, end, action in zones]
        bottom = [message(frame), line]
        if height < 12 and not bottom[0].plain.strip():  # noqa: PLR2004
            bottom = [line]
    room = height - len(top) - len(bottom)
    body = _live(frame, screen, len(top), room) if frame.ui.view == "live" else lists.paint(frame, room)
    body = body[:room] + [Line().fill(width) for _ in range(room - len(body))]
    screen.lines = [line.fill(width) for line in (*top, *body, *bottom)]
    return screen


def _live(frame: Frame, screen: Screen, above: int, room: int) -> list[Line]:
    if not frame.model.node.ranks and not frame.model.rows:
        return empty(frame)[:room]
    lines = op_lines(frame)[:room]
    if frame.ui.full:
        return [*lines, *graph(frame, room - len(lines))]
    if frame.height >= LOW:
        lines += graph(frame, 4 if frame.height < 32 else 6)  # noqa: PLR2004
    left = room - len(lines)
    side = min(max(34, frame.width // 4), 48) if frame.width >= WIDE else 0
    row = frame.ui.selection(frame.ui.shown(frame.model))
    below = threads.wanted(frame, row) if row is not None and frame.height >= LOW else 0
    high = max(min(table.wanted(frame, frame.width - side), left - min(below, left // 3)), 0)
    ranks = table.block(frame, frame.width - side, high)
    body = beside(ranks, history.block(frame, side, high)) if side else ranks
    if row is not None and left - high > 3:  # noqa: PLR2004
        body = stack(body, threads.block(frame, row, frame.width, left - high))
    screen.rows |= {line + above + len(lines): key for line, key in body.rows.items()}
    screen.actions += [(y + above + len(lines), start, end, what) for y, start, end, what in body.actions]
    return [*lines, *body.lines]


def empty(frame: Frame) -> list[Line]:
    """What to show when there is no process: where one looked, and what to try."""
    places = frame.model.places or ("no directory",)
    lines = [
        Line(),
        Line(f" No fastckpt process {'any more' if frame.model.past.checkpoints else 'yet'}.", "strong").add(
            " It is shown as soon as one saves or loads.", "dim"
        ),
        Line(),
        Line(" Looked at:", "head"),
        *(Line(f"   {frame.say(text.clean(place))}") for place in places[:8]),
        *(
            Line(f"   {frame.glyphs.warn} {frame.say(path)}: {reason}", "low")
            for path, reason in frame.model.problems[:8]
        ),
        Line(),
        Line(" If it should be there:", "head"),
        Line("   the same user? otherwise --all-users as root"),
        Line("   in a container? share /dev/shm, or FASTCKPT_TOP_DIR"),
        Line("   FASTCKPT_TOP=0 in its environment turns it off"),
        Line("   fastckpt-top --demo shows what it looks like"),
    ]
    if frame.height < 12:  # noqa: PLR2004
        lines = lines[1:2] + lines[3:]
    return [line.fill(frame.width) for line in lines]
