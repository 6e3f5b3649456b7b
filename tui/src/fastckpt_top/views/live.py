"""The live view, and the frame that all views share: running operations above, keys below."""

from __future__ import annotations

from typing import Final

from fastckpt_top import text
from fastckpt_top.views import cells, footer, graph, history, lists, operation, table, threads
from fastckpt_top.views import help as help_view
from fastckpt_top.views.boxes import Block, beside, boxed, stack
from fastckpt_top.views.paint import Frame, Line, Screen

WIDE: Final = 120
"""From this width on the history stands beside the ranks."""
HISTORY: Final = (34, 48)
"""Its cells: at least, and on the widest screens."""
GRAPH: Final = 6
"""Lines of the graph, borders included, where it must make room for the ranks."""
THREADS: Final = 4
"""With fewer lines the threads of the selected rank are not shown: a head, a thread, and the box."""
RANKS: Final = 8
"""The ranks have so many lines before the graph has any."""
TINY: Final = 6
"""Below this height there are no keys."""


def paint(frame: Frame) -> Screen:
    """The whole screen.

    Args:
        frame: The frame to paint, and its size.

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
        screen.lines = [operation.one_line(frame)]
        return screen
    bottom: list[Line] = []
    if height >= TINY:
        line, zones = footer.bottom(frame)
        bottom = [line]
        screen.actions = [(height - 1, start, end, action) for start, end, action in zones]
    room = height - len(bottom)
    if not (frame.ops or frame.model.node.ranks or frame.model.rows) and frame.ui.view == "live":
        body = Block([operation.title(frame), *empty(frame)] if height > 2 else empty(frame))  # noqa: PLR2004
    elif frame.ui.view == "live":
        body = _live(frame, room)
    else:
        body = stack(Block([operation.title(frame)]), Block(lists.paint(frame, room - 1)))
    lines = [*body.lines[:room], *(Line() for _ in range(room - len(body.lines))), *bottom]
    screen.lines = [line.fill(width) for line in lines]
    screen.rows = {line: key for line, key in body.rows.items() if line < room}
    screen.actions += [action for action in body.actions if action[0] < room]
    return screen


def _live(frame: Frame, room: int) -> Block:
    """Running operations, the graph, the ranks with the history beside them, the threads of the selected rank."""
    width = frame.width
    top = operation.block(frame, width)
    left = room - len(top.lines)
    row = frame.ui.selection(frame.ui.shown(frame.model))
    if not boxed(frame):
        if frame.ui.layout == "graph":
            return stack(top, graph.block(frame, width, left))
        below = Block()
        if row is not None and left >= THREADS:  # a line has room for the thread that matters most
            below = Block([Line("  ").extend(cells.slowest_thread(frame, row, width - 2)).fill(width)])
        return stack(top, table.block(frame, width, left - len(below.lines)), below)
    if frame.ui.layout == "graph":
        return stack(top, graph.block(frame, width, left))
    side = min(max(HISTORY[0], width // 4), HISTORY[1]) if width >= WIDE else 0
    high_graph, high_ranks, high_threads = share_out(
        left,
        table.wanted(frame, width - side),
        0 if row is None else threads.wanted(frame, row),
        graph=frame.ui.layout == "all",
    )
    parts = [top]
    if high_graph:
        parts.append(graph.block(frame, width, high_graph))
    body = table.block(frame, width - side, high_ranks)
    parts.append(beside(body, history.block(frame, side, high_ranks)) if side else body)
    if high_threads and row is not None:
        parts.append(threads.block(frame, row, width, high_threads))
    return stack(*parts)


def share_out(room: int, ranks: int, threads: int, *, graph: bool) -> tuple[int, int, int]:
    """Lines of the graph, the ranks and the threads, borders included; together always `room`.

    Args:
        room: Lines.
        ranks: Lines that the ranks would like.
        threads: Lines that the selected rank's threads would like; 0 for none.
        graph: Whether there is a graph, which takes the remaining space; without it the ranks do.
    """
    high = min(GRAPH, room - RANKS) if graph and room >= RANKS + GRAPH - 1 else 0
    room -= high
    # If not all ranks fit, the threads get a third of the space.
    rows = ranks if ranks <= room else room - (min(threads, room // 3) if room >= 2 * RANKS else 0)
    below = min(threads, room - rows)
    below = below if below >= THREADS else 0
    spare = room - rows - below
    return (high + spare, rows, below) if high else (0, rows + spare, below)


def empty(frame: Frame) -> list[Line]:
    """The text when there is no process: where the monitor looked, and what to try."""
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
