"""The tree in which ranks report: rank 0 at the top, each rank with up to ``FAN_IN`` below it."""

from __future__ import annotations

#: The most ranks that report to one. 16,384 ranks are three levels deep.
FAN_IN = 32


def above(rank: int) -> int:
    """Return the rank to which ``rank`` reports. Rank 0 reports to none."""
    return (rank - 1) // FAN_IN


def below(rank: int, size: int) -> range:
    """Return the ranks that report to ``rank`` in a group of ``size``."""
    first = rank * FAN_IN + 1
    return range(min(first, size), min(first + FAN_IN, size))


def count_below(rank: int, size: int) -> int:
    """Return how many ranks report to ``rank``, at any distance."""
    total, first, last = 0, rank * FAN_IN + 1, rank * FAN_IN + FAN_IN
    while first < size:
        total += min(last, size - 1) - first + 1
        first, last = first * FAN_IN + 1, last * FAN_IN + FAN_IN
    return total
