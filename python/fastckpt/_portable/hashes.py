"""Whether keys would crowd a hash table of Python (docs/format.md, 3.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The most steps per key on average, the bits of a hash that each jump adds, and the smallest table.
_STEPS, _SHIFT, _SMALLEST = 128, np.uint64(5), 8


def crowded(keys: Sequence[Any], *, neighbours: int) -> bool:
    """Whether inserting ``keys``, in this order, would take more than 128 steps per key."""
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)
    size = _SMALLEST
    while size // 4 <= len(hashes):
        if not _fits(hashes[: size // 3 * 2], size, neighbours):
            return True
        size *= 2
    return False


def _fits(hashes: np.ndarray[Any, Any], size: int, neighbours: int) -> bool:
    """Insert all keys at the same time, a step of each in turn.

    The first of several keys at one free place gets it. If they were inserted one after another, as in Python, some
    keys would have other places; the number of steps is about the same.
    """
    mask = np.uint64(size - 1)
    taken = np.zeros(size, bool)
    winner = np.empty(size, np.int64)
    rest = hashes
    at = rest & mask
    beside = np.zeros(len(at), np.int64)
    left = len(hashes) * _STEPS
    while len(at):
        # If several keys map to one place, the last one wins.
        winner[at[::-1]] = np.arange(len(at))[::-1]
        stay = taken[at] | (winner[at] != np.arange(len(at)))
        taken[at] = True
        rest, at, beside = rest[stay], at[stay], beside[stay]
        left -= len(at)
        if left < 0:
            return False
        # A set also tries the places after the first, if the table has room for all of them.
        near = (beside < neighbours) & (at + np.uint64(neighbours) - beside.astype(np.uint64) < size)
        shifted = rest >> _SHIFT
        start = at - beside.astype(np.uint64)
        jump = (start * np.uint64(5) + np.uint64(1) + shifted) & mask
        rest = np.where(near, rest, shifted)
        at = np.where(near, at + np.uint64(1), jump)
        beside = np.where(near, beside + 1, 0)
    return True
