"""Identifies the call of the program that a rank is in, so that ranks notice when they are out of step."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

#: The number of values that distinguish a call from others, the length of their names and texts, and the largest
#: number.
_MARKS, _NAME, _LONGEST, _BITS = 16, 64, 32, 64
#: How many mappings of a state are looked into, and how many keys these have: larger ones are tables of tensors.
_MAPPINGS, _KEYS = 64, 64
#: The mark of a save's step: the first value that :func:`marks_of` is given.
STEP = "0.step"
#: How many directories above a path identify where it leads.
_LEVELS = 4


class Called(NamedTuple):
    """One call of one rank.

    Attributes:
        kind: the kind of call; empty if it ends whatever the others do.
        path: to what.
        place: where the path leads, by :func:`location_of`; None where that is not known.
        marks: values that are equal on all ranks that have them, by name: the step.
    """

    kind: str
    path: str
    place: list[Any] | None
    marks: Mapping[str, str]

    def is_other(self, other: Called) -> bool:
        """Whether these cannot be one call of all ranks. Two calls that nothing distinguishes can be one."""
        if not (self.kind and other.kind):
            return False
        if self.kind != other.kind or not self.leads_to(other):
            return True
        return any(other.marks.get(name, mark) != mark for name, mark in self.marks.items())

    def is_like(self, calls: Iterable[Called]) -> bool:
        """Whether nothing distinguishes this call from one of these."""
        return any(not self.is_other(each) for each in calls)

    def leads_to(self, other: Called) -> bool:
        """Whether the paths lead to one directory, as far as this host can see."""
        if self.path == other.path:
            return True
        if self.place is None or other.place is None:
            return False
        (host, *levels), (its_host, *its_levels) = self.place, other.place
        # Each host numbers its own devices. The ranks of a save prove later that they see one directory.
        first = 0 if host == its_host else 1
        return any(one[first:] == its[first:] for one in levels for its in its_levels)


def location_of(path: str, host: str) -> list[Any]:
    """The identity of a path: the host, and for the nearest existing directories device, inode, and the remaining path.

    For several, because the nearest may just have been made, or replaced.
    """
    levels: list[Any] = []
    at, rest = path, ""
    while len(levels) < _LEVELS:
        with contextlib.suppress(OSError, ValueError):
            found = os.stat(at)  # noqa: PTH116 - a path may be the user's bytes
            levels.append([found.st_dev, found.st_ino, rest])
        above, name = os.path.split(at)
        if above == at:
            break
        at, rest = above, f"{name}/{rest}"
    return [host, *levels]


def marks_of(*given: Any) -> dict[str, str]:
    """The first plain values in nested mappings: they are equal on all ranks that have them, and often differ by call.

    Those at the top come first, so that the counters of schedulers are among them. In lists of several ranks, one place
    may have different values.
    """
    marks: dict[str, str] = {}
    known: set[int] = set()
    todo = deque((str(number), state) for number, state in enumerate(given))
    while todo and len(marks) < _MARKS:
        name, value = todo.popleft()
        kind = type(value)
        if isinstance(value, dict):
            if dict.__len__(value) <= _KEYS and len(known) < _MAPPINGS and id(value) not in known:
                known.add(id(value))
                # The methods of a subclass are the user's.
                todo += ((f"{name}.{key}", each) for key, each in dict.items(value) if type(key) is str)
        # Of these types alone, likewise.
        elif (kind in {str, bool, float} or (kind is int and value.bit_length() <= _BITS)) and len(name) <= _NAME:
            marks[name] = repr(value[:_LONGEST] if kind is str else value)
    return marks
