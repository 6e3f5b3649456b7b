"""The live view, and the common frame of all views: running operations above, keys below."""

from __future__ import annotations

from typing import Final

from fastckpt_top import text
from fastckpt_top.views import cells, footer, graph, history, lists, operation, table, threads
from fastckpt_top.views import help as help_view
from fastckpt_top.views.boxes import beside, boxed
from fastckpt_top.views.paint import Frame, Line, Screen

WIDE: Final = 120
"""From this width on, the history is beside the ranks."""
HISTORY: Final = (34, 48)
"""Cells of the history: at least, and on the widest screens."""
GRAPH: Final = 6
"""Lines of the graph, borders included, where it must make room for the ranks."""
THREADS: Final = 4
"""With fewer lines the threads of the selected rank are not shown: a head, a thread, and the box."""
RANKS: Final = 8
"""The ranks get this many lines before the graph gets any."""
TINY: Final = 6
"""Below this height there are no keys."""


def paint(frame: Frame) -> Screen:
    """The whole screen.

    Returns:
        Lines that fill the frame exactly.
    """
    width, height = frame.width, frame.height
    if width < 1 or height < 1:
        return Screen([])
    if frame.ui.help:
        return Screen(help_view.lines(frame))
    if height == 1:
        return Screen([operation.one_line(frame)])
    bottom = [footer.bottom(frame)] if height >= TINY else []
    room = height - len(bottom)
    if not (frame.ops or frame.model.node.ranks or frame.model.rows) and frame.ui.view == "live":
        body = [operation.title(frame), *empty(frame)] if height > 2 else empty(frame)  # noqa: PLR2004
    elif frame.ui.view == "live":
        body = _live(frame, room)
    else:
        body = [operation.title(frame), *lists.paint(frame, room - 1)]
    lines = [*body[:room], *(Line() for _ in range(room - len(body))), *bottom]
    return Screen([line.fill(width) for line in lines])


def _live(frame: Frame, room: int) -> list[Line]:
    """Running operations, the graph, the ranks with the history beside them, the threads of the selected rank."""
    width = frame.width
    top = operation.block(frame, width)
    left = room - len(top)
    row = frame.ui.selection(frame.ui.shown(frame.model))
    if not boxed(frame):
        below = []
        if row is not None and left >= THREADS:  # a line has room for the most important thread
            below = [Line("  ").extend(cells.slowest_thread(row, width - 2)).fill(width)]
        return [*top, *table.block(frame, width, left - len(below)), *below]
    side = min(max(HISTORY[0], width // 4), HISTORY[1]) if width >= WIDE else 0
    high_graph, high_ranks, high_threads = share_out(
        left,
        table.wanted(frame, width - side),
        0 if row is None else threads.wanted(frame, row),
        graph=frame.ui.graph,
    )
    ranks = table.block(frame, width - side, high_ranks)
    return [
        *top,
        *(graph.block(frame, width, high_graph) if high_graph else ()),
        *(beside(ranks, history.block(frame, side, high_ranks)) if side else ranks),
        *(threads.block(frame, row, width, high_threads) if high_threads and row is not None else ()),
    ]


def share_out(room: int, ranks: int, threads: int, *, graph: bool) -> tuple[int, int, int]:
    """Lines of the graph, the ranks and the threads, borders included; together always `room`.

    Args:
        room: Lines.
        ranks: Lines that the ranks need.
        threads: Lines that the selected rank's threads need; 0 for none.
        graph: Whether there is a graph, which gets the remaining space; without it the ranks get it.
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
    """The text when there is no process: the places searched, and what to try."""
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
