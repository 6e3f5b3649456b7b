"""The live view, and the frame that all views share: title above, message and keys below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.views import help as help_view
from fastckpt_top.views import lists
from fastckpt_top.views.header import graph, keys, message, one_line, op_lines, title
from fastckpt_top.views.paint import Frame, Line, Screen
from fastckpt_top.views.side import pane, panel
from fastckpt_top.views.table import Columns, columns, head, rows

if TYPE_CHECKING:
    from fastckpt_top.rows import Row

WIDE: Final = 140
"""From this width on there is a panel at the right."""
PANEL: Final = 48
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
    wide = frame.width >= WIDE
    cols = columns(frame.width - PANEL - 1 if wide else frame.width)
    shown = frame.ui.rows(frame.model.rows)
    table: list[Line] = []
    if frame.height >= TINY:
        table.append(head(frame, cols))
    left = room - len(lines) - len(table)
    selected = frame.ui.selection(shown)
    below = _pane(frame, selected, cols, shown, left)
    left -= len(below)
    body = rows(frame, shown, cols)
    first = _first(frame, body, selected, left)
    for index, (line, key) in enumerate(body[first : first + max(left, 0)]):
        screen.rows[above + len(lines) + len(table) + index] = key
        table.append(line)
    if not body and left > 0:
        table.append(
            Line(
                f"  no rank matches {frame.say(frame.ui.filter)!r}" if frame.ui.filter else "  no running operation",
                "dim",
            )
        )
    if below:
        table += [Line() for _ in range(room - len(lines) - len(table) - len(below))]
        table += below
    if wide:
        table = _beside(frame, table, selected, room - len(lines), cols.width)
    return [*lines, *table]


def _pane(frame: Frame, row: Row | None, cols: Columns, shown: list[Row], left: int) -> list[Line]:
    """The selected rank's threads, if there is room left by the table and it does not show them itself."""
    if row is None or not row.threads or frame.height < LOW or frame.width < 60 or frame.ui.open(row):  # noqa: PLR2004
        return []
    table = sum(1 + (len(r.threads) if frame.ui.open(r) else 0) for r in shown)
    height = min(len(row.threads) + 1, max(left - table, left // 3))
    return pane(frame, row, cols, height) if height >= 3 else []  # noqa: PLR2004


def _first(frame: Frame, body: list[tuple[Line, str]], selected: Row | None, height: int) -> int:
    """First line of the table, so that the selected row is to be seen; it moves no more than it must."""
    first = frame.ui.scroll.get("live", 0)
    at = next((index for index, (line, _) in enumerate(body) if line.selected), 0)
    last = at
    if selected is not None and frame.ui.open(selected):
        last = min(at + len(selected.threads), at + height - 1)
    first = max(min(first, at), last - height + 1, 0)
    first = max(0, min(first, len(body) - height))
    frame.ui.scroll["live"] = first
    return first


def _beside(frame: Frame, table: list[Line], selected: Row | None, height: int, width: int) -> list[Line]:
    right = panel(frame, selected, PANEL, height)
    joined = []
    for index in range(height):
        left = table[index] if index < len(table) else Line()
        line = left.fill(width)
        joined.append(line.add(frame.glyphs.column, "dim").extend(right[index]))
    return joined


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
