"""The rates of the node over the last minutes, in columns of equal length."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from fastckpt_top.tracks import COLUMN_S

KEPT_S: Final = 1200.0
"""The most seconds in the graph."""


class Series:
    """Rates of the node, one value per column of `COLUMN_S`, aligned to the clock.

    Attributes:
        written: Bytes/s written; `read` is the same for reads.
        index: The number of the newest column, counted from the clock's zero; None before the first one.
    """

    def __init__(self) -> None:
        columns = int(KEPT_S / COLUMN_S)
        self.written: deque[float] = deque(maxlen=columns)
        self.read: deque[float] = deque(maxlen=columns)
        self.index: int | None = None

    def add(self, mono: float, written: float, read: float) -> int:
        """Add a measurement.

        Args:
            mono: Reader's clock, seconds.
            written: Bytes/s.
            read: Bytes/s.

        Returns:
            The number of new columns: 0 if it falls into a column that has a value, which stays.
        """
        now = math.floor(mono / COLUMN_S)
        count = 1 if self.index is None else min(now - self.index, self.written.maxlen or 1)
        if count < 1:
            return 0
        self.index = now
        self.written.extend([written] * count)
        self.read.extend([read] * count)
        return count

    def cells(self, seconds: float, cells: int) -> tuple[list[float], list[float]]:
        """The last `seconds` in `cells` equal parts.

        A part begins at a multiple of its length on the clock, so that past columns do not change. Its value is the
        mean over it: a shorter peak is lowered, not lost.

        Args:
            seconds: The seconds before now that the parts cover.
            cells: Number of parts.

        Returns:
            Bytes/s written and read, oldest first; fewer than `cells` values if less is known.
        """
        if self.index is None or cells < 1 or seconds <= 0:
            return [], []
        length = seconds / cells / COLUMN_S
        first, end = self.index + 1 - len(self.written), self.index + 1
        last = math.ceil(end / length - 1e-9)
        spans = []
        for cell in range(max(last - cells, math.floor(first / length)), last):
            low, high = max(cell * length, first), min((cell + 1) * length, end)
            if high - low > 1e-9:  # noqa: PLR2004
                spans.append((low - first, high - first))
        return _means(list(self.written), spans), _means(list(self.read), spans)


def _means(values: list[float], spans: list[tuple[float, float]]) -> list[float]:
    """Means over parts of a step function whose steps are 1 long."""
    means = []
    for low, high in spans:
        inside = range(int(low), math.ceil(high - 1e-9))
        weighed = (values[step] * (min(step + 1, high) - max(step, low)) for step in inside)
        means.append(sum(weighed) / (high - low))
    return means
