"""Draws a screen for the documents as SVG that looks the same in browsers, in an `<img>`, and in librsvg.

Text stays text. Characters that must join their neighbours without a seam (blocks, lines, braille dots) are drawn, and
so are the marks, which few fonts have in the width of a cell. Nothing is fetched, and no font is needed: each character
has its own x.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from fastckpt_top.text import clean, width

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.color import Color
    from rich.segment import Segment
    from rich.style import Style
    from rich.terminal_theme import TerminalTheme
    from textual.widget import Widget

CELL: Final = (8, 16)
"""Width and height of a cell, both divisible by 8."""
BASE: Final = 12
"""The base line, from the top of a cell."""
MARGIN: Final = 12
_FONTS: Final = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
_FONT_SIZE: Final = 13.3333
"""Most fonts are 0.6 times as wide as high. librsvg places words, not characters: this size keeps its columns."""

# Weight of the arms to the left, right, top and bottom: 0 none, 1 light, 2 heavy.
_LIGHT: Final = {
    "─": "1100", "│": "0011", "┌": "0101", "┐": "1001", "└": "0110", "┘": "1010", "├": "0111", "┤": "1011",
    "┬": "1101", "┴": "1110", "┼": "1111", "╴": "1000", "╶": "0100", "╵": "0010", "╷": "0001",
}  # fmt: skip
_HEAVY: Final = {"━": "2200", "┃": "0022", "╸": "2000", "╺": "0200", "╹": "0020", "╻": "0002"}
_ARMS: Final = _LIGHT | _HEAVY
_ARM_RECTS: Final = (
    ((0, 8, 4, 1), (0, 7, 4, 3)),
    ((4, 8, 4, 1), (4, 7, 4, 3)),
    ((4, 0, 1, 9), (3, 0, 3, 10)),
    ((4, 8, 1, 8), (3, 7, 3, 9)),
)
"""The light and the heavy arm of each side: left edge, upper edge, width, height. Vertical arms cover the middle."""
_DASHES: Final = {"┈": 1, "┄": 2}
"""Length of the dashes of a dashed line."""
_SHADES: Final = {"░": 0.25, "▒": 0.5, "▓": 0.75}
_ARCS: Final = {
    "╭": "m8 8.5h-.5q-3 0-3 3v4.5",
    "╮": "m0 8.5h1.5q3 0 3 3v4.5",
    "╰": "m8 8.5h-.5q-3 0-3-3v-5.5",
    "╯": "m0 8.5h1.5q3 0 3-3v-5.5",
}
_RING: Final = "m.8 8a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0zm1 0a2.2 2.2 0 1 0 4.4 0a2.2 2.2 0 1 0-4.4 0z"
_MARKS: Final = {
    "●": "m.8 8a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z",
    "○": _RING,
    "◐": _RING + "m2.2-2.2a2.2 2.2 0 0 0 0 4.4z",
    "■": "m1 5h6v6h-6z",
    "▲": "m.5 11.5h7l-3.5-7z",
    "▼": "m.5 4.5h7l-3.5 7z",
    "▴": "m1.5 10h5l-2.5-4.5z",
    "▾": "m1.5 6h5l-2.5 4.5z",
}
_BRAILLE: Final = 0x2800
_BRAILLE_DOTS: Final = ((1, 2), (1, 6), (1, 10), (5, 2), (5, 6), (5, 10), (1, 14), (5, 14))
"""The place of the dot of each bit; the dots are 2 by 2."""


def of(widget: Widget) -> str:
    """Draw the contents of a widget; see `svg`."""
    lines = [widget.render_line(y) for y in range(widget.size.height)]
    return svg(lines, widget.app.ansi_theme, "fastckpt-top")


def svg(lines: Sequence[Iterable[Segment]], theme: TerminalTheme, title: str) -> str:
    """Draw a screen.

    Args:
        lines: The screen's lines as drawn for a terminal, with their styles; a Textual `Strip` is one.
        theme: The colours that a style may leave to the terminal.
        title: The text for readers who cannot see the picture.

    Returns:
        An XML document without script, style sheet, or anything that would have to be fetched.
    """
    ink = _Ink(theme)
    for line in lines:
        ink.line(line)
    back = ink.background()
    size = ink.cells * CELL[0] + 2 * MARGIN, len(lines) * CELL[1] + 2 * MARGIN
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{size[0]}" height="{size[1]}"'
        f' viewBox="{-MARGIN} {-MARGIN} {size[0]} {size[1]}">'
    )
    frame = (
        f'<rect x="{0.5 - MARGIN}" y="{0.5 - MARGIN}" width="{size[0] - 1}" height="{size[1] - 1}" rx="8"'
        f' fill="{back}" stroke="{theme.foreground_color.hex}" stroke-opacity=".3"/>'
    )
    parts = (
        '<?xml version="1.0" encoding="UTF-8"?>',
        opening,
        f"<title>{escape(clean(title))}</title>",
        frame,
        '<g shape-rendering="crispEdges">',
        *ink.behind.paths(but=_fill(back)),
        *ink.front.paths(),
        "</g>",
        *(f'<path {how} d="{"".join(places)}"/>' for how, places in ink.marks.items()),
        f'<g xml:space="preserve" font-family="{_FONTS}" font-size="{_FONT_SIZE}">',
        *ink.texts,
        "</g>",
        "</svg>",
    )
    return "\n".join(parts) + "\n"


class _Runs:
    """Rectangles and dashed lines. Shapes that continue one another are merged, so that there is no seam."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[tuple[int, int], list[list[int]]]] = {}

    def add(self, how: str, x: int, y: int, wide: int, high: int, gap: int = 0) -> None:
        """Draw.

        Args:
            how: The attributes to paint with.
            x: Left edge.
            y: Upper edge.
            wide: Width.
            high: Height.
            gap: The gap between two dashes of a dashed line; 0 for a rectangle.
        """
        runs = self._runs.setdefault(how, {}).setdefault((y, high), [])
        if runs and runs[-1][0] + runs[-1][1] + gap == x:
            runs[-1][1] += gap + wide
        else:
            runs.append([x, wide])

    def area(self) -> dict[str, int]:
        """The shapes that are painted with the same attributes."""
        return {
            how: sum(high * wide for (_, high), runs in rows.items() for _, wide in runs)
            for how, rows in self._runs.items()
        }

    def paths(self, but: str = "") -> Iterator[str]:
        """Return one path for each set of attributes.

        Args:
            but: Attributes that are left out.
        """
        for how, rows in self._runs.items():
            if how == but:
                continue
            dashed = how.startswith("stroke")
            pieces = []
            for (y, high), runs in rows.items():
                for x, wide in runs:
                    pieces.append(f"M{x} {y + high / 2:g}h{wide}" if dashed else f"M{x} {y}h{wide}v{high}h{-wide}z")
            yield f'<path {how} d="{"".join(pieces)}"/>'


class _Ink:
    """The shapes so far, sorted by their attributes, so that each colour is named once.

    Args:
        theme: The colours that a style may leave to the terminal.

    Attributes:
        behind: Backgrounds of cells.
        front: Blocks, lines and dots.
        marks: Shapes with curves or slopes, by their attributes.
        texts: An element for each line with text.
        cells: Width of the longest line.
    """

    def __init__(self, theme: TerminalTheme) -> None:
        self._theme = theme
        self._lines = 0
        self.behind = _Runs()
        self.front = _Runs()
        self.marks: dict[str, list[str]] = {}
        self.texts: list[str] = []
        self.cells = 0

    def background(self) -> str:
        """The colour behind most cells."""
        area = self.behind.area()
        return max(area, key=area.__getitem__).split('"')[1] if area else self._theme.background_color.hex

    def line(self, segments: Iterable[Segment]) -> None:
        """Draw the next line. A drawn character is a space in the text, so that columns keep their places."""
        y = self._lines * CELL[1]
        self._lines += 1
        x = 0
        words: list[tuple[str, list[int], list[str]]] = []
        for segment in segments:
            color, back, weight = self._look(segment.style)
            how = _fill(color) + weight
            for char in "" if segment.control else clean(segment.text):
                wide = width(char) * CELL[0]
                self.behind.add(_fill(back), x, y, wide, CELL[1])
                if char == " " or self._draw(char, color, x, y):
                    if not words:
                        words.append((how, [], []))
                    words[-1][2].append(" ")
                else:
                    if not words or words[-1][0] != how or not words[-1][1] or words[-1][2][-1] == " ":
                        words.append((how, [], []))
                    words[-1][1].extend([x] * (1 if ord(char) <= 0xFFFF else 2))  # noqa: PLR2004  (UTF-16 counts)
                    words[-1][2].append(char)
                x += wide
        self.cells = max(self.cells, x // CELL[0])
        if any(places for _, places, _ in words):
            self.texts.append(f'<text y="{y + BASE}">{"".join(map(_word, words))}</text>')

    def _look(self, style: Style | None) -> tuple[str, str, str]:
        """The colour, the background, and the attribute for the weight."""

        def of(color: Color | None, *, foreground: bool) -> str:
            if color is None:
                return (self._theme.foreground_color if foreground else self._theme.background_color).hex
            return color.get_truecolor(self._theme, foreground=foreground).hex

        if style is None:
            return of(None, foreground=True), of(None, foreground=False), ""
        front, back = of(style.color, foreground=True), of(style.bgcolor, foreground=False)
        if style.reverse:
            front, back = back, front
        return front, back, ' font-weight="bold"' if style.bold else ""

    def _draw(self, char: str, color: str, x: int, y: int) -> bool:
        """Draw a character that is a shape; return False to leave it to the font."""
        if char < "\u2500":
            return False
        fill = _fill(color)
        if char in _MARKS:
            self.marks.setdefault(fill + ' fill-rule="evenodd"', []).append(f"M{x} {y}{_MARKS[char]}")
        elif char in _ARCS:
            self.marks.setdefault(f'fill="none" stroke="{color}"', []).append(f"M{x} {y}{_ARCS[char]}")
        elif char in _SHADES:
            self.front.add(f'{fill} fill-opacity="{_SHADES[char]}"', x, y, *CELL)
        elif char in _DASHES or _BRAILLE <= ord(char) <= _BRAILLE + 0xFF:
            self._dashes(char, color, x, y)
        else:
            rects = _rects(char)
            for left, top, wide, high in rects:
                self.front.add(fill, x + left, y + top, wide, high)
            return bool(rects)
        return True

    def _dashes(self, char: str, color: str, x: int, y: int) -> None:
        if char in _DASHES:
            dash = _DASHES[char]
            how = f'stroke="{color}" stroke-width="1" stroke-dasharray="{dash}"'
            self.front.add(how, x, y + CELL[1] // 2, CELL[0] - dash, 1, gap=dash)
            return
        how = f'stroke="{color}" stroke-width="2" stroke-dasharray="2"'
        for bit, (left, top) in enumerate(_BRAILLE_DOTS):
            if ord(char) >> bit & 1:
                self.front.add(how, x + left, y + top, 2, 2, gap=2)


def _rects(char: str) -> list[tuple[int, int, int, int]]:
    """Left edge, upper edge, width and height, in its cell, of each rectangle that a character is; else none."""
    wide, high = CELL
    if char in _ARMS:
        return [_ARM_RECTS[side][int(weight) - 1] for side, weight in enumerate(_ARMS[char]) if weight != "0"]
    number = ord(char) - 0x2580
    if 1 <= number <= 8:  # noqa: PLR2004  (lower eighths)
        return [(0, high - 2 * number, wide, 2 * number)]
    if 9 <= number <= 15:  # noqa: PLR2004  (left eighths)
        return [(0, 0, 16 - number, high)]
    return {0: [(0, 0, 8, 8)], 16: [(4, 0, 4, 16)], 20: [(0, 0, 8, 2)], 21: [(7, 0, 1, 16)]}.get(number, [])


def _fill(color: str) -> str:
    return f'fill="{color}"'


def _word(word: tuple[str, list[int], list[str]]) -> str:
    how, places, chars = word
    if not places:
        return "".join(chars)
    return f'<tspan x="{" ".join(map(str, places))}" {how}>{escape("".join(chars), quote=False)}</tspan>'
