"""The one widget: draws painted lines, line by line, with the theme's colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from fastckpt_top.text import width as width_of
from fastckpt_top.views import colours
from fastckpt_top.views.live import paint
from fastckpt_top.views.paint import STYLES, Frame, Line, Screen

if TYPE_CHECKING:
    from collections.abc import Callable

_PREFIX: Final = "canvas--"


class Canvas(Widget):
    """Paints the whole screen once per tick, and draws only the requested lines.

    Args:
        frame: Makes the frame to paint, given width and height in cells.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {_PREFIX + name for name in STYLES}
    DEFAULT_CSS = """
    Canvas { width: 1fr; height: 1fr; color: $foreground; background: $background; }
    Canvas > .canvas--text { color: $foreground; }
    Canvas > .canvas--dim { color: $foreground 75%; }
    Canvas > .canvas--strong { color: $foreground; text-style: bold; }
    Canvas > .canvas--title { color: $text-primary; text-style: bold; }
    Canvas > .canvas--head { color: $text-primary; }
    Canvas > .canvas--good { color: $text-success; }
    Canvas > .canvas--low { color: $text-warning; }
    Canvas > .canvas--bad { color: $text-error; }
    Canvas > .canvas--graph { color: $text-primary; }
    Canvas > .canvas--read { color: $foreground 80%; }
    Canvas > .canvas--target { color: $text-warning; }
    Canvas > .canvas--key { color: $text-primary; text-style: bold; }
    Canvas > .canvas--select { background: $foreground 14%; }
    """

    def __init__(self, frame: Callable[[int, int], Frame]) -> None:
        super().__init__()
        self._make_frame = frame
        self._painted: Screen | None = None
        self._painted_size = (0, 0)
        self._style_cache: dict[tuple[str, bool], Style] = {}

    @property
    def _palette(self) -> dict[str, str] | None:
        """Rich styles that replace those of the theme; None if the theme's styles are used."""
        if not colours.ansi(self.app.theme):
            return None
        return colours.ANSI_DARK if self.app.current_theme.dark else colours.ANSI_LIGHT

    def painted(self) -> Screen:
        """The last painted screen, painted now if there is none."""
        size = (self.size.width, self.size.height)
        if self._painted is None or self._painted_size != size:
            self._painted = paint(self._make_frame(*size))
            self._painted_size = size
        return self._painted

    def repaint(self) -> None:
        """Repaint after a change of the model or of the user's choice."""
        self._painted = None
        self.refresh()

    def restyle(self) -> None:
        """Repaint after a change of the theme."""
        self._style_cache.clear()
        self.repaint()

    def notify_style_update(self) -> None:
        """Look up the colours again after a change of the style sheet."""
        super().notify_style_update()
        self._style_cache.clear()

    def render_line(self, y: int) -> Strip:
        """Draw one line."""
        lines = self.painted().lines
        width = self.size.width
        base = self._style_of("text", selected=False)
        if y >= len(lines):
            return Strip.blank(width, base)
        line = lines[y]
        strip = Strip([Segment(text, self._style_of(name, selected=chosen)) for text, name, chosen in _parts(line)])
        return strip.adjust_cell_length(width, base)

    def _style_of(self, name: str, *, selected: bool) -> Style:
        key = (name, selected)
        style = self._style_cache.get(key)
        if style is None:
            # A style always has both colours, because Textual's monochrome filter needs them.
            palette = self._palette
            if palette is not None:  # the terminal's own colours cannot be mixed
                style = Style(bgcolor="default") + Style.parse(palette[name]) + Style(underline=selected)
            else:
                style = self._theme_style(name, selected=selected)
            self._style_cache[key] = style
        return style

    def _theme_style(self, name: str, *, selected: bool) -> Style:
        background = self.background_colors[1]
        mono = self.app.no_color and name != "dim"
        styles = self.get_component_styles(_PREFIX + ("text" if mono else name))
        if selected:
            background += self.get_component_styles(_PREFIX + "select").background
        style = Style(color=(background + styles.color).rich_color, bgcolor=background.rich_color) + styles.text_style
        return style + Style.parse(colours.MONO.get(name, "")) if mono else style


def _parts(line: Line) -> list[tuple[str, str, bool]]:
    """A line's parts, and whether they are highlighted. Neighbours of one style are joined, which draws faster."""
    joined: list[tuple[str, str, bool]] = []
    at = 0
    for content, name in line.parts:
        chosen = at < line.selected
        at += width_of(content)
        if joined and joined[-1][1:] == (name, chosen):
            joined[-1] = (joined[-1][0] + content, name, chosen)
        else:
            joined.append((content, name, chosen))
    return joined
