"""Boxes around lines, and pieces that fit into a line. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.views.paint import Line

if TYPE_CHECKING:
    from fastckpt_top.views.paint import Frame

BOXED_WIDTH: Final = 60
BOXED_HEIGHT: Final = 16
"""A screen of fewer columns or lines has no boxes, which would take room from the contents."""
BORDERS: Final = 2
"""Lines of a box's borders."""
SIDES: Final = 4
"""Cells of a box's borders, and of the space within them."""


def boxed(frame: Frame) -> bool:
    """Whether the screen has room for boxes."""
    return frame.width >= BOXED_WIDTH and frame.height >= BOXED_HEIGHT


def inside(frame: Frame, width: int, height: int) -> tuple[bool, int, int]:
    """Whether a block of this size gets a box, and the cells and lines of its contents."""
    framed = boxed(frame) and height > BORDERS
    return (True, width - SIDES, height - BORDERS) if framed else (False, width, height)


def box(
    frame: Frame,
    lines: list[Line],
    title: Line,
    note: Line,
    width: int,
    height: int,
    foot: tuple[Line, Line] | None = None,
) -> list[Line]:
    """Draw a box around lines, or put them below their title if a block of this size gets no box.

    Args:
        frame: The source of the characters.
        lines: The contents, of any width: cut or padded to the room from `inside`.
        title: The text in the upper border at the left; it is cut if it does not fit.
        note: The text in the upper border at the right; it is left out if it does not fit beside the title.
        width: Cells, borders included.
        height: Lines, borders included.
        foot: The text in the lower border at the left and at the right, by the same rules.
    """
    if not inside(frame, width, height)[0]:
        made = [title, *lines]
        return [line.fill(width) for line in (*made, *(Line() for _ in range(height - len(made))))]
    glyphs = frame.glyphs
    made = [_border(frame, glyphs.corners[:2], title, note, width)]
    for index in range(height - 2):
        inner = lines[index] if index < len(lines) else Line()
        line = Line(glyphs.column + " ", "dim")
        chosen = inner.selected
        line.extend(inner.fill(width - SIDES)).add(" " + glyphs.column, "dim")
        line.selected = width if chosen else 0
        made.append(line)
    made.append(_border(frame, glyphs.corners[2:], *(foot or (Line(), Line())), width))
    return made


def _border(frame: Frame, corners: str, title: Line, note: Line, width: int) -> Line:
    rule = frame.glyphs.rule
    room = width - 8
    line = Line(corners[0] + rule, "dim")
    if title.width > room:
        title = Line().extend(title).fill(max(room, 0))
    if title.width:
        line.add(" ", "dim").extend(title).add(" ", "dim")
    space = width - line.width - 2
    if note.width and note.width + 3 <= space:
        line.add(rule * (space - note.width - 2), "dim").add(" ", "dim").extend(note).add(" ", "dim")
        space = 0
    return line.add(rule * (space + 1), "dim").add(corners[1], "dim")


def beside(left: list[Line], right: list[Line]) -> list[Line]:
    """Two blocks of lines of equal height side by side."""
    made = []
    for first, second in zip(left, right, strict=True):
        line = Line().extend(first).extend(second)
        line.selected = first.selected
        made.append(line)
    return made


def by_rank(pieces: list[tuple[int, Line]], room: int, between: Line) -> Line:
    """The pieces that fit, in order; the most important one that does not fit is left out with all that matter less.

    Args:
        pieces: Numbers and texts: the lower the number, the more a text matters; empty ones are left out.
        room: Cells.
        between: The text between two pieces.
    """
    kept = []
    for rank, piece in sorted((pair for pair in pieces if pair[1].width), key=lambda pair: pair[0]):
        room -= piece.width + between.width
        if room + between.width < 0:
            break
        kept.append(rank)
    line = Line()
    for rank, piece in pieces:
        if rank in kept and piece.width:
            line.extend(between if line.width else Line()).extend(piece)
    return line


def words(variants: tuple[str, ...], width: int) -> str:
    """The first wording, longest first, that fits; if none does, the last one, cut."""
    for variant in variants:
        if text.width(variant) <= width:
            return variant
    return text.fit(variants[-1], width) if variants and width > 0 else ""
