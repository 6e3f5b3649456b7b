"""Values that several ranks bring: the lowest rank's is saved, and no difference goes unsaid.

Tensors and arrays in values are compared as any other tensors, by their bytes, where ranks have the same ones; a value
in which they have others is found here. So are numbers, texts and bytes that differ. These are a warning: torch's DCP
saves one rank's, and programs rely on it for times, counts and pickles, whose bytes vary with the identity of objects.

A value travels as its key, its rank, its tokens, its tensors (:meth:`._values.Given.about`), and if it has any, the
runs of ranks that have these. Beside them travel differences from the lowest rank that has the value: its key, what
differs, and the first rank that does.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from fastckpt._ranks.offers import runs_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fastckpt._ranks.replicas import Policy

#: What differs: tokens and bytes; number, names, dtypes and shapes of tensors.
PLAIN, TENSORS = 0, 1
#: Beyond this number, keys are counted, not listed.
_LISTED = 10


def united(values: Iterable[list[Any]], said: Iterable[list[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
    """The values of several ranks, each once, with all ranks that have its tensors; and the differences."""
    found: dict[str, list[Any]] = {}
    noted = []
    for value in values:
        key = value[0]
        first, other = sorted((found.get(key, value), value), key=lambda one: one[1])
        noted += [[key, what, other[1]] for what in (PLAIN, TENSORS) if _part(first, what) != _part(other, what)]
        found[key] = first
        if _part(first, TENSORS) and _part(first, TENSORS) == _part(other, TENSORS):
            found[key] = [*first[:-1], runs_of(sorted({*ranks_of(first[-1]), *ranks_of(other[-1])}))]
    # A rank that differs from one that differs itself is above that, and does not count.
    least: dict[tuple[str, int], int] = {}
    for key, what, rank in chain(*said, noted):
        least[key, what] = min(rank, least.get((key, what), rank))
    return list(found.values()), [[*which, rank] for which, rank in least.items()]


def _part(value: list[Any], what: int) -> list[Any]:
    _, _, tokens, tensors, *_ = value
    if what == TENSORS:
        return [about for *about, digest in tensors if digest is None]
    return [tokens, *(digest for *_, digest in tensors if digest is not None)]


def ranks_of(runs: Sequence[Sequence[int]]) -> list[int]:
    """The ranks in half-open runs."""
    return [rank for start, stop in runs for rank in range(start, stop)]


def with_tensors(values: Sequence[list[Any]], differing: Sequence[list[Any]]) -> list[list[Any]]:
    """What all ranks hear of values with tensors: the key, the ranks that have these tensors, and the tensors."""
    apart = {key for key, what, _ in differing if what == TENSORS}
    return [
        [key, [[rank, rank + 1]] if key in apart else runs[0], tensors]
        for key, rank, _, tensors, *runs in values
        if tensors
    ]


def warnings_of(values: Sequence[list[Any]], differing: Sequence[list[Any]], policy: Policy) -> list[str]:
    """What the reports say about values that differ.

    Raises:
        ValueError: ranks have different tensors in a value, and the policy makes that an error.
    """
    if policy.replicas == "first":
        return []
    lowest = {key: rank for key, rank, *_ in values}
    plain, tensors = [
        [
            f"{key!r} (rank {rank} has another than rank {lowest[key]})"
            for key, of, rank in sorted(differing)
            if of == what
        ]
        for what in (PLAIN, TENSORS)
    ]
    said = "tensors in a value differ between ranks in number, name, dtype or shape"
    if tensors and policy.on_difference == "raise":
        raise ValueError(
            f"dcp.save: {said}: {_listed(tensors)}: give values of different ranks keys of their own, or pass "
            "replicas='first' or on_difference='warn' to save the lowest rank's"
        )
    sorts = ((said, tensors), ("values differ between ranks", plain))
    return [f"{what}; the lowest rank's were saved: {_listed(keys)}" for what, keys in sorts if keys]


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
    return f"{', '.join(keys[:_LISTED])}{more}"
