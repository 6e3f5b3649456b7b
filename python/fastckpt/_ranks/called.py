"""Identifies the current call of a rank, so that ranks notice when they are out of step."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

#: The limits of the values that distinguish a call: their count, the length of names and strings, and the largest
#: number.
_MARKS, _NAME, _LONGEST, _BITS = 16, 64, 32, 64
#: The most mappings of a state that are searched, and the most keys in them: larger ones are tables of tensors.
_MAPPINGS, _KEYS = 64, 64
#: The mark of a save's step: the first argument of :func:`marks_of`.
STEP = "0.step"
#: The number of directories above a path that identify its place.
_LEVELS = 4


class Called(NamedTuple):
    """One call of one rank.

    Attributes:
        kind: the kind of call; empty for a call that ends whatever the others do.
        path: the path of the call.
        place: the identity of the path, by :func:`location_of`; None if unknown.
        marks: values that are equal on all ranks that have them, by name: the step.
    """

    kind: str
    path: str
    place: list[Any] | None
    marks: Mapping[str, str]

    def is_other(self, other: Called) -> bool:
        """Whether these cannot be the same call of all ranks. Two indistinguishable calls can be the same."""
        if not (self.kind and other.kind):
            return False
        if self.kind != other.kind or not self.leads_to(other):
            return True
        return any(other.marks.get(name, mark) != mark for name, mark in self.marks.items())

    def is_like(self, calls: Iterable[Called]) -> bool:
        """Whether nothing distinguishes this call from one of ``calls``."""
        return any(not self.is_other(each) for each in calls)

    def leads_to(self, other: Called) -> bool:
        """Whether the paths lead to one directory, as far as this host can determine."""
        if self.path == other.path:
            return True
        if self.place is None or other.place is None:
            return False
        (host, *levels), (its_host, *its_levels) = self.place, other.place
        # Each host numbers its own devices. The ranks of a save check later that they see one directory.
        first = 0 if host == its_host else 1
        return any(one[first:] == its[first:] for one in levels for its in its_levels)


def location_of(path: str, host: str) -> list[Any]:
    """The identity of a path: the host, and for the nearest existing directories device, inode, and the remaining path.

    It covers several directories, because the nearest one may just have been made or replaced.
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

    Values at the top come first, so that the counters of schedulers are among them. In lists, a position may have
    different values on different ranks.
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
                # The methods of a subclass are the user's code: dict's own are called.
                todo += ((f"{name}.{key}", each) for key, each in dict.items(value) if type(key) is str)
        # The type must be exactly one of these: a subclass may run the user's code.
        elif (kind in {str, bool, float} or (kind is int and value.bit_length() <= _BITS)) and len(name) <= _NAME:
            marks[name] = repr(value[:_LONGEST] if kind is str else value)
    return marks
