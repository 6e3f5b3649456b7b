"""Drawn trials: the gate always runs the same part of them; ``FASTCKPT_TEST_RUNS=all`` runs all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable
from typing import TypeVar

First = TypeVar("First")
Second = TypeVar("Second")


def one_in(step: int) -> int:
    """The step from one trial to the next: ``step`` in the gate, 1 if all trials are requested."""
    return 1 if os.environ.get("FASTCKPT_TEST_RUNS") == "all" else step


def some(values: Iterable[First]) -> list[First]:
    """Each second value in the gate, and all values if all trials are requested."""
    return list(values)[:: one_in(2)]


def pairs(firsts: Collection[First], seconds: Collection[Second]) -> list[tuple[First, Second]]:
    """In the gate, pairs that have each value at least once; all pairs if all trials are requested."""
    if one_in(2) == 1:
        return list(itertools.product(firsts, seconds))
    number = max(len(firsts), len(seconds))
    return list(itertools.islice(zip(itertools.cycle(firsts), itertools.cycle(seconds), strict=False), number))
