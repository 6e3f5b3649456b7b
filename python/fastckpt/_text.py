"""Readable text: sizes, counts, tables, similar names. The API and the tools share it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence


def size(count: int) -> str:
    """``count`` bytes in the largest decimal unit that keeps a leading digit."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:  # noqa: PLR2004 - the step between decimal units
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def count(number: int, noun: str) -> str:
    """``1 shard``, ``2 shards``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


#: The most names that are compared for similarity: the comparison is slow, and a checkpoint may have 100,000 names.
_KNOWN = 5000

#: A longer cell overflows its column without widening it: one long name would pad every other row.
_WIDEST = 100


def natural(name: str) -> tuple[object, ...]:
    """A key that sorts names by their numbers: ``step-900`` before ``step-1000``."""
    parts = re.split("([0-9]+)", name)
    return (*(int(part) if index % 2 else part for index, part in enumerate(parts)), name)


def visible(text: str) -> str:
    """``text`` on one line, safe for a terminal.

    Characters that could move the cursor, reverse the direction or not be encoded are escaped as in Python.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shortened(text: str, most: int) -> str:
    """``text``, cut to a number of characters; dots show that it was cut."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def table(rows: Iterable[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return lines with aligned columns of visible text; those in ``right`` are aligned to the right."""
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [min(max(map(len, column)), _WIDEST) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def suggest(name: str, names: Sequence[str]) -> str:
    """A few names like ``name``, for an error message."""
    import difflib  # noqa: PLC0415 - needed for an error only

    close = difflib.get_close_matches(name, names[:_KNOWN], n=3, cutoff=0.5)
    return f"; similar: {', '.join(map(repr, close))}" if close else f" of the {len(names)}"
