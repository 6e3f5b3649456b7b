"""The graph: bytes/s written and read over time, on a linear axis with round numbers. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.views.boxes import BORDERS, SIDES, box, by_rank
from fastckpt_top.views.paint import Frame, Line

if TYPE_CHECKING:
    from collections.abc import Sequence

ZOOMS: Final = (60.0, 120.0, 300.0, 600.0)
"""Seconds that the graph shows; the first are shown until the user chooses."""
_GUTTER: Final = 6
"""Cells of the labels at the axis."""
_HEADROOM: Final = 1.04
"""The axis goes a little beyond the target, so that the target's line is never the upper edge."""
_STEPS: Final = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""Labels are multiples of one of these numbers times a power of ten."""
_TIMES: Final = (5, 10, 15, 30, 60, 120, 300)
_LABELS: Final = 4
"""The wanted number of labels beside the 0."""
_LEAST: Final = 4e6
"""Bytes/s to which the axis goes at least, so that its labels fit into their cells."""
_APART: Final = 12
"""Cells between two times at the axis, at least."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis whose labels are round numbers.

    Attributes:
        top: Bytes/s of the full height.
        labels: One per line, the top line first, in GB/s: the value of the line's upper edge; empty if that is not a
            round number.
    """

    top: float
    labels: tuple[str, ...]


def axis(need: float, height: int) -> Axis:
    """Choose the axis that shows `need` with the least room above it, and has at least two labels besides 0.

    Args:
        need: Bytes/s that must fit, positive.
        height: Lines of the plot, positive.
    """
    every = max(round(height / _LABELS), 1)
    least = need / height * every / text.GB * (1 - 1e-9)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(number * power for number in _STEPS if number * power >= least)
    decimals = next((count for count in range(10) if math.isclose(step, round(step, count), rel_tol=1e-6)), 10)
    labels = [""] * height
    for edge in range(every, height + 1, every):
        labels[height - edge] = f"{edge // every * step:.{decimals}f}"
    return Axis(step / every * height * text.GB, tuple(labels))


def block(frame: Frame, width: int, height: int) -> list[Line]:
    """The graph of the node, in a box."""
    inner = width - SIDES
    lines, seconds = height - BORDERS, frame.ui.zoom_s or ZOOMS[0]
    cells = inner - _GUTTER - 1
    if lines < 3 or cells < _APART:  # noqa: PLR2004  (two lines of plot and the axis)
        return [Line().fill(width) for _ in range(height)]
    written, read = frame.model.series(seconds, cells)
    target = _target(frame)
    painted = plot(frame, written, read, target, cells, lines - 1)
    painted.append(_times(frame, seconds / cells, cells))
    name = Line("GB/s of the node" if width >= 72 else "GB/s", "head")  # noqa: PLR2004
    return box(frame, painted, name, _legend(frame, target, seconds, width - name.width - 9), width, height)


def plot(
    frame: Frame, written: Sequence[float], read: Sequence[float], target: float, cells: int, height: int
) -> list[Line]:
    """The plot with its labels, without the time axis.

    In each column the lower of the two series is in front, so that the tops of both are visible.

    Args:
        frame: The source of the characters.
        written: Bytes/s, one value per column, the newest last.
        read: The same for reads.
        target: The line in bytes/s; 0 for none.
        cells: Columns.
        height: Lines.
    """
    glyphs = frame.glyphs
    scale = axis(max(_HEADROOM * target, *written, *read, _LEAST), height)
    columns = [_column(pair, scale.top, height, frame) for pair in _padded(written, read, cells)]
    at = target / scale.top * height  # in lines above the bottom
    target_row = min(math.ceil(at) - 1, height - 1) if target > 0 else -1
    quarter = min(int((at - target_row) * len(glyphs.level)), len(glyphs.level) - 1)
    lines = []
    for row in range(height - 1, -1, -1):
        blank = (glyphs.level[quarter], "target") if row == target_row else (" ", "text")
        line = Line(f"{scale.labels[height - 1 - row]:>{_GUTTER}}", "dim").add(*blank)  # even if bars hide the line
        for (char, style), run in groupby(column[row] if row < len(column) else blank for column in columns):
            line.add(char * len(list(run)), style)
        lines.append(line)
    return lines


def _column(pair: tuple[float, float], top: float, height: int, frame: Frame) -> list[tuple[str, str]]:
    """The cells of a column from below: the lower series, and above it the higher one."""
    bars = sorted(zip(pair, (frame.glyphs.spark, frame.glyphs.dotted), ("graph", "read"), strict=True))
    cells: list[tuple[str, str]] = []
    for value, parts, style in bars:
        full, rest = divmod(text.level(value, top, (len(parts) - 1) * height), len(parts) - 1)
        cells += [(parts[-1], style)] * (full - len(cells))
        if rest and full >= len(cells):
            cells.append((parts[rest], style))
    return cells


def _padded(written: Sequence[float], read: Sequence[float], cells: int) -> list[tuple[float, float]]:
    pairs = list(zip_longest(reversed(written), reversed(read), fillvalue=0.0))[:cells]
    return [(0.0, 0.0)] * (cells - len(pairs)) + pairs[::-1]


def _target(frame: Frame) -> float:
    """Bytes/s that the node should reach in its current work; 0 if several jobs have separate targets."""
    model = frame.model
    if len(model.jobs) > 1:
        return 0.0
    return frame.main.target if frame.main is not None else model.node.target.save * model.node.gpus


def _times(frame: Frame, each: float, cells: int) -> Line:
    """The time axis: `0 ---- -20 s ---- -10 ---- now`."""
    glyphs = frame.glyphs
    step = next((time for time in _TIMES if time / each >= _APART), _TIMES[-1])
    marks = list(glyphs.rule * cells)
    for number in range(1, int(cells * each // step) + 1):
        time = number * step
        word = f" -{text.clock(time)} " if step >= 60 else f" -{time} s "  # noqa: PLR2004
        start = cells - round(time / each) - len(word) // 2
        if start >= 0:
            marks[start : start + len(word)] = word
    marks[-4:] = " now"
    return Line(f"{0:>{_GUTTER}} ", "dim").add("".join(marks), "dim")


def _legend(frame: Frame, target: float, seconds: float, room: int) -> Line:
    glyphs = frame.glyphs
    pieces = [
        (0, Line(glyphs.spark[-1], "graph").add(" written", "dim")),
        (1, Line(glyphs.dotted[-1], "read").add(" read", "dim")),
        (2, Line(glyphs.level[1], "target").add(f" target {text.rate(target)}", "dim") if target > 0 else Line()),
        (3, Line("z", "key").add(f" zoom {seconds / 60:.0f} min", "dim")),
    ]
    return by_rank(pieces, room, Line("  "))
