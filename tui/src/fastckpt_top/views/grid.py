"""Ranks as cells of a grid, where there are more than lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastckpt_top.views import cells
from fastckpt_top.views.boxes import Block
from fastckpt_top.views.paint import Frame, Line

if TYPE_CHECKING:
    from fastckpt_top.rows import Row


def cell(rank: int) -> int:
    """Cells of one rank, whose longest name has so many: mark, selection, name, level, percentage, fallback."""
    return 2 + 1 + rank + 2 + cells.PERCENT + 1


def across(rank: int, width: int) -> int:
    """How many ranks are shown side by side.

    Args:
        rank: Cells of the longest name.
        width: Cells of a line.
    """
    return max(width // cell(rank), 1)


def block(frame: Frame, rows: list[Row], chosen: Row | None, rank: int, width: int, height: int) -> tuple[Block, int]:
    """A grid of ranks, in their order from top to bottom and then from left to right.

    If it does not hold them all, it shows the part with the selected one; the worst if none is selected.

    Args:
        frame: The frame to paint.
        rows: The ranks.
        chosen: The selected one.
        rank: Cells of the longest name.
        width: Cells of a line.
        height: Lines.

    Returns:
        The grid, and how many ranks it shows.
    """
    wide = across(rank, width)
    high = min(height, -(-len(rows) // wide))
    page = wide * high
    if page <= 0:
        return Block(), 0
    at = next((index for index, row in enumerate(rows) if row is chosen), 0)
    part = rows[at // page * page :][:page]
    made = Block()
    size = cell(rank)
    for y in range(high):
        line = Line()
        for x in range(wide):
            if x * high + y >= len(part):
                break
            row = part[x * high + y]
            start = line.width
            line.extend(_rank(frame, row, rank, selected=row is chosen))
            made.actions.append((y, start, start + size - 1, f"select({row.key!r})"))
        made.lines.append(line.fill(width))
    return made, len(part)


def _rank(frame: Frame, row: Row, rank: int, *, selected: bool) -> Line:
    """`▼>r48 ▃  58%!`: its mark, its share of the target as a level and a number, and whether it fell back."""
    found = cells.figure(frame, row)
    line = Line(frame.glyph(found.verdict), found.mark_style).add(frame.glyphs.select if selected else " ", "key")
    name = cells.name(row) if row.rank is None else f"r{row.rank}"
    line.add(f"{name:>{rank + 1}}", "key" if selected else "strong" if row.straggler else "text")
    state = cells.state(row)
    if cells.STATE_STYLES.get(state) == "bad":
        line.add(f" {state:>{cells.PERCENT + 1}}", "bad")
    else:
        line.add(" ").add(cells.level(found.share, frame.glyphs), found.style)
        line.add(cells.percent(found.share), found.style)
    return line.add("!" if row.fallback else " ", "low")
