"""The theme for a terminal, and the colours of the styles if a theme's cannot be distinguished. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ANSI_DARK: Final = {
    "text": "default",
    "dim": "default",
    "strong": "bold default",
    "title": "bold bright_cyan",
    "head": "cyan",
    "good": "green",
    "low": "yellow",
    "bad": "bold bright_red",
    "graph": "bright_blue",
    "read": "bright_cyan",
    "target": "bright_magenta",
    "key": "bold cyan",
}
"""Styles in the 16 colours on a dark ground, in rich's words. `dim` avoids SGR 2, which not all terminals have."""
ANSI_LIGHT: Final = ANSI_DARK | {
    "title": "bold blue",
    "head": "blue",
    "low": "magenta",
    "bad": "bold red",
    "graph": "blue",
    "read": "cyan",
    "target": "bright_black",
    "key": "bold blue",
}
"""Yellow and the bright colours cannot be read on white."""
MONO: Final = dict.fromkeys(("strong", "title", "head", "bad", "key"), "bold")
"""Styles without colours: everything has the colour of the text, bad values are bold, and only `dim` is paler."""


def ansi(theme: str) -> bool:
    """Whether a theme uses the terminal's own 16 colours."""
    return "ansi" in theme


def default(themes: Iterable[str], environ: Mapping[str, str], *, sixteen: bool) -> str:
    """The theme for a terminal if the user has chosen none."""
    bright = environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")  # the background is last: `0;15`
    wanted = ["textual-light" if bright else "textual-dark"]
    if sixteen:
        wanted = ["ansi-light" if bright else "ansi-dark", "textual-ansi", *wanted]
    have = set(themes)
    return next((name for name in wanted if name in have), "")


def choices(themes: Iterable[str], *, sixteen: bool) -> list[str]:
    """The themes to choose from, in order: on a terminal of 16 colours only those that it can show."""
    every = sorted(themes)
    return [name for name in every if ansi(name)] if sixteen and any(map(ansi, every)) else every
