"""Text for terminals: cleaning, cell widths, numbers, bars, sparks. Pure: without Textual and the model."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from collections.abc import Sequence

GB: Final = 1e9
"""Bytes of a GB, the unit of storage targets."""

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of graphics: by default those for Unicode terminals."""

    bar: str = " ▏▎▍▌▋▊▉█"
    """Parts of a full cell from empty to full, for bars that grow to the right."""
    full: str = "▆"
    """A full cell of a bar in a row: lower than the line, so that the bars of neighbouring rows do not run together."""
    spark: str = " ▁▂▃▄▅▆▇█"
    """Parts of a full cell from empty to full, for columns."""
    dotted: str = " ⣀⣤⣶⣿"
    """Like `spark`, for a second series in the same graph."""
    level: str = "⡀⠄⠂⠁"
    """A dotted line in the lowest to the highest quarter of a cell."""
    track: str = "░"
    """The part of a bar that is not filled."""
    mark: str = "│"
    """The mark of a bar's target."""
    good: str = "●"
    low: str = "◐"
    bad: str = "▼"
    quiet: str = "·"
    dead: str = "x"
    select: str = ">"
    rule: str = "─"
    column: str = "│"
    corners: str = "╭╮╰╯"
    """The corners of a box: upper left and right, lower left and right."""
    ellipsis: str = "…"
    live: str = "●"
    pause: str = "■"
    warn: str = "!"
    middot: str = "·"
    times: str = "\N{MULTIPLICATION SIGN}"


UNICODE: Final = Glyphs()
ASCII: Final = Glyphs(
    bar=" #",
    full="#",
    spark=" .:-=+*#",
    dotted=" ,o0",
    level="_~~^",
    track=".",
    mark="|",
    good="*",
    low="o",
    bad="v",
    quiet=".",
    rule="-",
    column="|",
    corners="++++",
    ellipsis="~",
    live="*",
    pause="=",
    middot="-",
    times="x",
)


def clean(text: str) -> str:
    """Make a foreign string safe to show.

    Args:
        text: Anything that a process wrote into its segment.

    Returns:
        The text with control, format (bidirectional too), surrogate and unassigned characters replaced and combining
        ones left out, so that each character is one or two cells wide.
    """
    if text.isascii() and text.isprintable():
        return text
    kept = []
    for char in text:
        category = unicodedata.category(char)
        if category in ("Mn", "Me"):
            continue
        kept.append(_REPLACEMENT if category[0] == "C" or category in ("Zl", "Zp") else char)
    return "".join(kept)


def ascii_only(text: str) -> str:
    """Replace each character beyond ASCII by a question mark."""
    return text if text.isascii() else text.encode("ascii", "replace").decode("ascii")


def width(text: str) -> int:
    """The terminal cells of a cleaned text."""
    return len(text) if text.isascii() else cell_len(text)


def cut(text: str, cells: int) -> str:
    """The beginning of `text` that fits into `cells` cells; a blank replaces half of a wide character."""
    return text if width(text) <= cells else set_cell_size(text, max(cells, 0))


def fit(text: str, cells: int, glyphs: Glyphs = UNICODE) -> str:
    """Cut or pad to exactly `cells` cells.

    Args:
        text: Cleaned text.
        cells: Wanted width; 0 or less gives the empty string.
        glyphs: The characters, with the ellipsis.

    Returns:
        The text, with an ellipsis if it was cut.
    """
    if cells <= 0:
        return ""
    have = width(text)
    if have > cells:
        text = cut(text, cells - len(glyphs.ellipsis)) + glyphs.ellipsis
        have = width(text)
    return text + " " * (cells - have)


def fit_front(text: str, cells: int, glyphs: Glyphs = UNICODE) -> str:
    """Like `fit`, but a long text loses its beginning, for paths."""
    if width(text) <= cells:
        return fit(text, cells, glyphs)
    tail = text
    while tail and width(tail) > cells - len(glyphs.ellipsis):
        tail = tail[1:]
    return fit(glyphs.ellipsis + tail, cells, glyphs)


def bar(fraction: float | None, cells: int, parts: str) -> str:
    """A bar that grows to the right, on a fixed scale.

    Args:
        fraction: 0 to 1; beyond is clipped; None or nan gives an empty bar.
        cells: Width.
        parts: Characters from empty to full, such as `Glyphs.bar`.

    Returns:
        Exactly `cells` characters.
    """
    if cells <= 0:
        return ""
    if fraction is None or not math.isfinite(fraction):
        return " " * cells
    count = round(min(max(fraction, 0.0), 1.0) * cells * (len(parts) - 1))
    if count == 0 and fraction > 0:
        count = 1  # a value above 0 is visible
    full, rest = divmod(count, len(parts) - 1)
    text = parts[-1] * full + (parts[rest] if rest else "")
    return text.ljust(cells)


def spark(values: Sequence[float], cells: int, top: float, glyphs: Glyphs = UNICODE) -> str:
    """One column per value on the fixed scale 0..`top`, newest at the right.

    The highest column is lower than a line, so that columns of neighbouring lines do not run together.

    Args:
        values: Samples, oldest first; the last `cells` are shown.
        cells: Width.
        top: Value of a full column, in the unit of `values`; 0 or less shows nothing.
        glyphs: The characters.

    Returns:
        Exactly `cells` characters.
    """
    if cells <= 0:
        return ""
    shown = values[-cells:]
    levels = len(glyphs.spark) - 2
    text = "".join(glyphs.spark[level(value, top, levels)] for value in shown)
    return text.rjust(cells)


def level(value: float, top: float, levels: int) -> int:
    """The number of levels for a value, all of them for `top`; at least one for a value above 0."""
    if top <= 0 or not value > 0:
        return 0
    return min(levels, max(1, round(value / top * levels)))


def rate(bytes_per_second: float | None, decimals: int = 2) -> str:
    """GB/s without the unit; '-' for unknown. Large values have fewer decimals than small ones."""
    if bytes_per_second is None or not math.isfinite(bytes_per_second):
        return "-"
    value = bytes_per_second / GB
    if value >= 1000:  # noqa: PLR2004
        return f"{value:.0f}"
    if value >= 100 and decimals > 1:  # noqa: PLR2004
        return f"{value:.1f}"
    if 0 < value < 0.0995:  # noqa: PLR2004
        decimals += 1
    return f"{value:.{decimals}f}"


def rates(average: float | None, target: float) -> tuple[str, str]:
    """Two rates to compare, GB/s without the unit, with as many decimals as needed; `-` for no target."""
    if target <= 0:
        return rate(average), "-"
    for decimals in range(2, 6):
        words = rate(average, decimals), rate(target, decimals)
        if words[0] != words[1]:
            return words
    return rate(average), rate(target)


def size(count: float | None) -> str:
    """GB without the unit, one decimal at 10 GB or more, none at 1000 GB or more; '-' for unknown."""
    if count is None or not math.isfinite(count):
        return "-"
    value = count / GB
    return f"{value:.0f}" if value >= 999.95 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"  # noqa: PLR2004


def percent(fraction: float | None) -> str:
    """Whole percent, never rounded up, so that 100 % means reached; '-' for unknown."""
    if fraction is None or not math.isfinite(fraction):
        return "-"
    share = math.floor(fraction * 100 + 1e-9)
    return f"{share}%" if share <= 999 else ">999%"  # noqa: PLR2004  (five cells at most)


def clock(seconds: float | None) -> str:
    """`mm:ss`, or `h:mm:ss` for one hour or more; `--:--` for unknown."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return "--:--"
    whole = int(seconds)
    if whole >= 360_000:  # noqa: PLR2004
        return f"{whole // 86_400}d"
    if whole >= 3600:  # noqa: PLR2004
        return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 60:02d}:{whole % 60:02d}"


def count(number: int, what: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def brief(seconds: float) -> str:
    """A duration in five cells at most, with three digits: `0.004`, `1.25`, `61.0`."""
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}"  # noqa: PLR2004


def ago(seconds: float) -> str:
    """A duration in its largest sensible unit: `7s`, `12m`, `3h`, `2d`."""
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(max(seconds, 0))}s"


def block(count: int) -> str:
    """A block size in binary units: `4 MiB`; '-' for 0."""
    if count <= 0:
        return "-"
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= length:
            value = count / length
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
    return f"{count} B"
