"""Ranks as cells of a grid, if there are more ranks than lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fastckpt_top.views import cells
from fastckpt_top.views.paint import Frame, Line

if TYPE_CHECKING:
    from fastckpt_top.rows import Row


MOST: Final = 8
"""Cells for the threads of a rank, at most."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a grid.

    Attributes:
        rank: Cells of the longest name.
        threads: Cells for the threads of a rank; 1 for the rank as a whole.
        percent: Cells of its share in percent; 0 if it is left out.
        width: Cells of a line.
    """

    rank: int
    threads: int
    percent: int
    width: int

    @property
    def cell(self) -> int:
        """Cells of one rank: mark, selection, name, threads, percentage, fallback."""
        return 2 + 1 + self.rank + 1 + self.threads + self.percent + 1

    @property
    def across(self) -> int:
        """The number of ranks side by side."""
        return max(self.width // self.cell, 1)

    def lines(self, ranks: int) -> int:
        """The lines for this many ranks."""
        return -(-ranks // self.across)


def size(rows: list[Row], rank: int, width: int, height: int) -> Size:
    """The size with a cell for each thread, or one for some of them, if that leaves room for all ranks."""
    most = max(1, min(max((len(row.threads) for row in rows), default=1), MOST))
    few = min(most, 4)
    tried = ((most, cells.PERCENT), (few, cells.PERCENT), (few, 0))
    sizes = [Size(rank, threads, percent, width) for threads, percent in tried]
    return next((one for one in sizes if one.lines(len(rows)) <= height), sizes[-1])


def block(frame: Frame, rows: list[Row], chosen: Row | None, size: Size, height: int) -> tuple[list[Line], int]:
    """A grid of ranks, in their order from top to bottom and then from left to right.

    If it does not hold all of them, it shows the part with the selected one, or with the worst if none is selected.

    Returns:
        The grid, and the number of ranks in it.
    """
    high = min(height, size.lines(len(rows)))
    page = size.across * high
    if page <= 0:
        return [], 0
    at = next((index for index, row in enumerate(rows) if row is chosen), 0)
    part = rows[at // page * page :][:page]
    made = []
    for y in range(high):
        line = Line()
        for row in part[y::high]:
            line.extend(_rank(frame, row, size, selected=row is chosen))
        made.append(line.fill(size.width))
    return made, len(part)


def _rank(frame: Frame, row: Row, size: Size, *, selected: bool) -> Line:
    """`▼>r48 ▃▃▂▃  58%!`: its mark, its threads' shares or its own, its share in percent, and whether it fell back."""
    found = cells.figure(row)
    line = Line(frame.glyph(found.verdict), found.mark_style).add(frame.glyphs.select if selected else " ", "key")
    name = cells.name(row) if row.rank is None else f"r{row.rank}"
    line.add(f"{name:>{size.rank + 1}}", "key" if selected else "strong" if row.straggler else "text")
    state = cells.state(row)
    if cells.STATE_STYLES.get(state) == "bad":
        room = size.percent + size.threads
        line.add(f" {state[:room]:>{room}}", "bad")
    else:
        line.add(" ")
        if size.threads == 1:
            line.add(cells.level(found.share, frame.glyphs), found.style)
        else:
            line.extend(cells.threads(frame, row, size.threads))
        line.add(cells.percent(found.share) if size.percent else "", found.style)
    return line.add("!" if row.fallback else " ", "low")
