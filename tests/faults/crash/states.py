"""States of a device with a volatile cache after a power cut, drawn from the log of :mod:`faults.crash.device`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .disks import PAGE

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator


@dataclass
class State:
    """A device after a cut.

    Attributes:
        image: the pages of the device.
        used: which pages are not all zeros.
        marks: the marks before the cut.
        how: a description of the cut and the losses.
    """

    image: np.ndarray
    used: np.ndarray
    marks: list[str]
    how: str


def cuts(log: list[Any], count: int, draw: random.Random) -> list[int]:
    """Return the ascending numbers of the entries before which the power fails. Half of the cuts are right after a
    mark, and a quarter right after a flush, to detect premature promises."""
    first = log.index(("mark", "mounted", None)) + 1
    after = {
        kind: [number + 1 for number in range(first, len(log)) if log[number][0] == kind] for kind in ("mark", "flush")
    }
    found = []
    for _ in range(count):
        near = draw.choice(("mark", "mark", "flush", ""))
        places = after.get(near) or [draw.randint(first, len(log))]
        found.append(min(len(log), draw.choice(places) + (draw.choice((0, 0, 1, 2, 5)) if near else 0)))
    return sorted(found)


def pieces(at: int, length: int) -> list[tuple[int, int]]:
    """Return the parts of a write (pages) that a device keeps whole or not at all."""
    bounds = [0, *range(PAGE - at % PAGE, length, PAGE), length]
    return list(pairwise(bounds))


def _kept(lost: list[tuple[int, int, bytes]], draw: random.Random) -> tuple[str, list[tuple[int, bytes]]]:
    """Return which pages of the writes that no flush covers are kept, in the order of their arrival."""
    how = draw.choice(("none", "all", "but one", "only one", "writes", "pages", "pages"))
    chance, one = draw.choice((0.1, 0.5, 0.9)), draw.randrange(max(1, len(lost)))
    found = []
    for place, (_, at, data) in enumerate(lost):
        whole = {"none": False, "all": True, "but one": place != one, "only one": place == one}
        keep = whole.get(how, draw.random() < chance)
        for start, end in pieces(at, len(data)):
            if draw.random() < chance if how == "pages" else keep:
                found.append((at + start, data[start:end]))
    return how, found


def after(base: bytes, log: list[Any], places: list[int], draw: random.Random) -> Iterator[State]:
    """Yield the states at these ascending cuts; each state is valid until the next one is requested."""
    stable = bytearray(base)
    pages = np.frombuffer(stable, np.uint8).reshape(-1, PAGE)
    used = pages.any(axis=1)
    open_writes: dict[int, tuple[int, int, bytes]] = {}
    marks: list[str] = []
    at = 0

    def put(offset: int, data: bytes) -> None:
        stable[offset : offset + len(data)] = data
        used[offset // PAGE : -(-(offset + len(data)) // PAGE)] = True

    for place in places:
        for number, (kind, what, data) in enumerate(log[at:place], at):
            if kind == "write":
                open_writes[number] = (number, what, data)
            elif kind == "mark":
                marks.append(what)
            else:
                for covered in what:
                    if covered in open_writes:
                        put(*open_writes.pop(covered)[1:])
        at = place
        how, kept = _kept(sorted(open_writes.values()), draw)
        before = [(offset, bytes(stable[offset : offset + len(data)])) for offset, data in kept]
        for offset, data in kept:
            put(offset, data)
        yield State(pages, used, list(marks), f"cut at {place} of {len(log)}, {len(open_writes)} open, kept: {how}")
        for offset, data in reversed(before):
            stable[offset : offset + len(data)] = data
