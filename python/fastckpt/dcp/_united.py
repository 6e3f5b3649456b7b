"""Values of several ranks: the lowest rank's is saved, and every difference is reported.

Different tensors and arrays in values are an error, as for other tensors, unless ``on_difference`` makes it a warning.
Different numbers, strings and bytes are a warning: torch's DCP saves those of one rank, and programs rely on that for
times, counts and pickles, whose bytes vary with the identity of objects.

A value is sent as its key, its rank, and the data to compare: its tokens, its tensors (:meth:`._values.Given.about`),
and digests of its long bytes and tensors, if any (empty if the rank compares nothing). With the values, differences
from the lowest rank with the value are sent: the key, what differs, and the first rank that differs. So no message
grows with the ranks.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fastckpt._ranks.ranks import Ranks

#: Kinds of differences: tokens and bytes; tensors, and their descriptions.
PLAIN, TENSORS = 0, 1
#: Beyond this number, keys are counted, not listed.
_LISTED = 10


def united(values: Iterable[list[Any]], said: Iterable[list[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
    """The values of several ranks, each once, and the differences."""
    found: dict[str, list[Any]] = {}
    noted = []
    for value in values:
        key = value[0]
        known = found.setdefault(key, value)
        first, other = (value, known) if value[1] < known[1] else (known, value)
        found[key] = first
        if first[2] != other[2]:
            noted += [[key, what, other[1]] for what in _differing(first[2], other[2])]
    # Only the lowest differing rank counts. A rank that was compared with a differing rank is above that rank.
    least: dict[tuple[str, int], int] = {}
    for key, what, rank in chain(*said, noted):
        least[key, what] = min(rank, least.get((key, what), rank))
    return list(found.values()), [[*which, rank] for which, rank in least.items()]


def _differing(first: list[Any], other: list[Any]) -> Iterator[int]:
    """The kinds of contents that differ between two values."""
    (one, _, *mine), (another, _, *theirs) = first, other
    # If only one rank compares, the options differ, which ends the save.
    if one != another or (mine[:1] != theirs[:1] and "" not in mine + theirs):
        yield PLAIN
    if mine[1:] != theirs[1:] and "" not in mine + theirs:
        yield TENSORS


def warnings_of(path: str, values: Sequence[list[Any]], differing: Sequence[list[Any]], ranks: Ranks) -> list[str]:
    """The warnings in the reports about different values.

    Raises:
        ValueError: ranks have different tensors in a value, and ``ranks`` makes this an error.
    """
    if ranks.replicas == "first":
        return []
    lowest = {key: rank for key, rank, *_ in values}
    plain, tensors = [
        [
            f"{key!r} (rank {rank}'s differs from rank {lowest[key]}'s)"
            for key, of, rank in sorted(differing)
            if of == what
        ]
        for what in (PLAIN, TENSORS)
    ]
    said = "tensors or arrays in values differ between ranks"
    if tensors and ranks.on_difference == "raise":
        raise ValueError(
            f"dcp.save: {path}: {said}: {_listed(tensors)}: give values of different ranks separate keys, or pass "
            "ranks=Ranks(replicas='first') or Ranks(on_difference='warn') to save the lowest rank's"
        )
    sorts = ((said, tensors), ("values differ between ranks", plain))
    return [f"{what}; the lowest rank's were saved: {_listed(keys)}" for what, keys in sorts if keys]


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
    return f"{', '.join(keys[:_LISTED])}{more}"
