"""Values that several ranks bring: the lowest rank's is saved, and no difference goes unsaid.

Tensors and arrays in values are compared as any other tensors, by their bytes, where ranks have the same ones; a value
in which they have others is found here. So are numbers, texts and bytes that differ. These are a warning: torch's DCP
saves one rank's, and programs rely on it for times, counts and pickles, whose bytes vary with the identity of objects.

A value travels as its key, its rank, its tokens, its tensors (:meth:`._values.Given.about`), and if it has any, the
runs of ranks that have these. Beside them travel, by the key, the lowest ranks with other plain parts and with
other tensors than the lowest rank that has the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt._ranks.offers import runs_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fastckpt._ranks.replicas import Policy

#: By the key of a value, the rank that differs in plain parts, and the one in tensors; None where none does.
Differing = dict[str, list[int | None]]
#: Beyond this number, keys are counted, not listed.
_LISTED = 10


def united(values: Iterable[list[Any]], said: Iterable[Differing]) -> tuple[list[list[Any]], Differing]:
    """The values of several ranks, each once, with all ranks that have its tensors; and where ranks differ."""
    differing: Differing = {}

    def note(key: str, ranks: Sequence[int | None]) -> None:
        pairs = zip(differing.get(key, (None, None)), ranks, strict=True)
        differing[key] = [min((rank for rank in pair if rank is not None), default=None) for pair in pairs]

    for one in said:
        for key, ranks in one.items():
            note(key, ranks)
    found: dict[str, list[Any]] = {}
    for value in values:
        key = value[0]
        first, other = sorted((found.get(key, value), value), key=lambda one: one[1])
        unlike = [_plain(first) != _plain(other), _tensors(first) != _tensors(other)]
        if any(unlike):
            note(key, [other[1] if differs else None for differs in unlike])
        found[key] = first
        if _tensors(first) and not unlike[1]:
            found[key] = [*first[:-1], runs_of(sorted({*ranks_of(first[-1]), *ranks_of(other[-1])}))]
    return list(found.values()), differing


def _plain(value: list[Any]) -> list[Any]:
    _, _, tokens, tensors, *_ = value
    return [tokens, *(digest for *_, digest in tensors if digest is not None)]


def _tensors(value: list[Any]) -> list[Any]:
    return [about for *about, digest in value[3] if digest is None]


def ranks_of(runs: Sequence[Sequence[int]]) -> list[int]:
    """The ranks in half-open runs."""
    return [rank for start, stop in runs for rank in range(start, stop)]


def shared(value: list[Any], differing: Differing) -> list[Any]:
    """A value with tensors, as all ranks hear of it: its key, the ranks that have these tensors, and the tensors."""
    key, rank, _, tensors, runs = value
    return [key, runs if differing.get(key, (None, None))[1] is None else [[rank, rank + 1]], tensors]


def warnings_of(
    values: Sequence[list[Any]], differing: Mapping[str, Sequence[int | None]], policy: Policy
) -> list[str]:
    """What the reports say about values that differ.

    Raises:
        ValueError: ranks have different tensors in a value, and the policy makes that an error.
    """
    if policy.replicas == "first":
        return []
    lowest = {key: rank for key, rank, *_ in values}
    plain, tensors = [
        [
            f"{key!r} (rank {ranks[which]} has another than rank {lowest[key]})"
            for key, ranks in sorted(differing.items())
            if ranks[which] is not None
        ]
        for which in (0, 1)
    ]
    said = "tensors in a value differ between ranks in number, name, dtype or shape"
    if tensors and policy.on_difference == "raise":
        raise ValueError(
            f"dcp.save: {said}: {_listed(tensors)}: give values of different ranks keys of their own, or pass "
            "replicas='first' or on_difference='warn' to save the lowest rank's"
        )
    return [
        f"{what}; the lowest rank's were saved: {_listed(keys)}"
        for what, keys in ((said, tensors), ("values differ between ranks", plain))
        if keys
    ]


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
    return f"{', '.join(keys[:_LISTED])}{more}"
