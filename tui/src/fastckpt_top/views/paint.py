"""Lines of styled text. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fastckpt_top import text
from fastckpt_top.rows import Verdict
from fastckpt_top.views.colours import ANSI_DARK

if TYPE_CHECKING:
    from fastckpt_top.model import Model
    from fastckpt_top.rows import Event, Job, NodeOp
    from fastckpt_top.views.state import Ui

STYLES: Final = (*ANSI_DARK, "select")
"""Names that a line's parts may have; the canvas gives them colours."""

VERDICT_STYLES: Final = {
    Verdict.GOOD: "good",
    Verdict.LOW: "low",
    Verdict.BAD: "bad",
    Verdict.FAILED: "bad",
    Verdict.QUIET: "dim",
}


class Line:
    """One line of the screen, built from left to right.

    Attributes:
        parts: Text and name of its style.
        width: Cells so far.
        selected: The number of highlighted cells from the left.
    """

    __slots__ = ("parts", "selected", "width")

    def __init__(self, content: str = "", style: str = "text") -> None:
        self.parts: list[tuple[str, str]] = []
        self.width = 0
        self.selected = 0
        if content:
            self.add(content, style)

    def add(self, content: str, style: str = "text") -> Line:
        """Append text."""
        if content:
            self.parts.append((content, style))
            self.width += text.width(content)
        return self

    def extend(self, other: Line) -> Line:
        """Append another line's parts."""
        self.parts.extend(other.parts)
        self.width += other.width
        return self

    def fill(self, width: int, style: str = "text") -> Line:
        """Cut or pad to exactly `width` cells."""
        if self.width > width:
            kept: list[tuple[str, str]] = []
            left = width
            for content, name in self.parts:
                piece = text.cut(content, left)
                kept.append((piece, name))
                left -= text.width(piece)
                if piece != content:
                    break
            self.parts = kept
            self.width = width - left
        return self.add(" " * (width - self.width), style) if self.width < width else self

    @property
    def plain(self) -> str:
        """The text of the line without its styles."""
        return "".join(content for content, _ in self.parts)


@dataclass(slots=True)
class Screen:
    """A painted screen: its lines from top to bottom, each of full width."""

    lines: list[Line]

    @property
    def plain(self) -> str:
        """The text without styles, for tests and text screenshots."""
        return "\n".join(line.plain.rstrip() for line in self.lines) + "\n"


@dataclass(slots=True)
class Frame:
    """The inputs for painting a view.

    A function that paints a block gets a frame, and the width and height of the block, which it fills exactly.

    Attributes:
        model: The model to show.
        ui: The user's choices.
        glyphs: Characters.
        width: Cells.
        height: Lines.
        status: `live`, or the position of a replay.
        live: Whether live processes are shown, not a recording.
        frozen: Whether the screen is frozen while the processes continue.
    """

    model: Model
    ui: Ui
    glyphs: text.Glyphs
    width: int
    height: int
    status: str = "live"
    live: bool = True
    frozen: bool = False

    @property
    def job(self) -> Job | None:
        """The visible job: the chosen one while it exists, else the first; None if none is known."""
        key = self.ui.job_of(self.model)
        return next((job for job in self.model.jobs if job.key == key), None)

    @property
    def ops(self) -> list[NodeOp]:
        """The operations of the visible job: the running ones, then the last that ended."""
        job = self.job
        return [op for op in self.model.ops if job is None or op.job_key == job.key]

    @property
    def events(self) -> list[Event]:
        """The events of the visible job, the oldest first."""
        job = self.job if len(self.model.jobs) > 1 else None
        return [event for event in self.model.events if job is None or event.job in ("", job.key)]

    @property
    def main(self) -> NodeOp | None:
        """The most important operation of the visible job now."""
        return next(iter(self.ops), None)

    def glyph(self, verdict: Verdict) -> str:
        """The mark of a verdict."""
        glyphs = self.glyphs
        return {
            Verdict.GOOD: glyphs.good,
            Verdict.LOW: glyphs.low,
            Verdict.BAD: glyphs.bad,
            Verdict.FAILED: glyphs.dead,
            Verdict.QUIET: glyphs.quiet,
        }[verdict]

    def say(self, foreign: str) -> str:
        """A label, path or other foreign text in characters that this screen may show."""
        return text.ascii_only(foreign) if self.glyphs is text.ASCII else foreign


def scrolled(lines: list[Line], first: int, height: int) -> tuple[list[Line], int]:
    """The part of some lines that fits.

    Args:
        lines: All of them.
        first: The wanted first line.
        height: The available lines.

    Returns:
        The part, and its actual first line.
    """
    first = max(0, min(first, len(lines) - height))
    return lines[first : first + max(height, 0)], first
