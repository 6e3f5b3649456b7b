"""The columns of a list: which of them fit into a line, their heads, and the cells of a row. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastckpt_top import text
from fastckpt_top.views.paint import Line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    Part: TypeAlias = tuple[str, str] | Line


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        name: Its name.
        head: The word above it.
        size: Cells, without the blank before it.
        right: Whether it is aligned to the right.
        least: The fewest cells if there is no room for all; 0 if the column needs all.
        most: The most cells if there is room; 0 if the column does not grow.
    """

    name: str
    head: str
    size: int
    right: bool = False
    least: int = 0
    most: int = 0


class Columns:
    """The columns that fit. They depend only on these arguments, so that they do not move.

    Args:
        every: All columns, from left to right. Before the first one is a mark of one cell.
        optional: Names of those that may be missing, the most important first.
        width: Cells of a line.

    Attributes:
        width: Cells of a line.
    """

    def __init__(self, every: Sequence[Column], optional: Sequence[str], width: int) -> None:
        self.width = width
        self._every = {column.name: column for column in every}
        self._cells = {column.name: column.size for column in every if column.name not in optional}
        left = width - 1 - sum(size + 1 for size in self._cells.values())
        for name in optional:
            column = self._every[name]
            size = min(column.size, left - 1)
            if size < (column.least or column.size):
                break
            self._cells[name] = size
            left -= size + 1
        growing = [column for column in every if column.most and self[column.name]]
        for number, column in enumerate(growing):
            more = max(min(left // (len(growing) - number), column.most - self[column.name]), 0)
            self._cells[column.name] += more
            left -= more

    def __getitem__(self, name: str) -> int:
        """Cells of a column, without the blank before it; 0 if it is left out."""
        return self._cells.get(name, 0)

    def places(self) -> dict[str, tuple[int, int]]:
        """First and last cell of each column, the blank before it included."""
        found, at = {}, 1
        for name in self._every:
            if self[name]:
                found[name] = (at, at + self[name])
                at += self[name] + 1
        return found

    def head(self, heads: Mapping[str, str | Line]) -> Line:
        """The head of the list; for some columns, `heads` replace their words."""
        parts: dict[str, Part] = {}
        for name, column in self._every.items():
            word = heads.get(name, column.head)
            parts[name] = word if isinstance(word, Line) else (word, "head")
        return self.row(Line(" "), parts)

    def row(self, mark: Line, parts: Mapping[str, Part], sign: str = " ") -> Line:
        """A line of the list.

        Args:
            mark: A mark of one cell.
            parts: A word and its style, or a piece of a line, of each column that is not left out.
            sign: The text in place of the blank before the first column.
        """
        line = mark.add(sign, "key")
        for name, column in self._every.items():
            size = self[name]
            if not size:
                continue
            part = parts[name]
            blank = line.width > 1 + len(sign)
            if isinstance(part, Line):
                line.add(" " if blank else "").extend(part.fill(size))
                continue
            word, style = part
            room = size + blank
            word = word.rjust(room) if column.right else word.ljust(size).rjust(room)
            line.add(text.cut(word, room), style)
        return line.fill(self.width)
