"""Exchange of the ranks' tables: two digests first, the tables only if the digests differ."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

from .table import decode_spreads, digest, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt._tensors.spread import Spread

#: Verdicts: the tables are equal; only the spreads differ; the tables differ.
EQUAL, CUTS, TABLES = "equal", "cuts", "tables"
_LEVEL = 1


class Told(NamedTuple):
    """The parts of a rank's table that it can send.

    Attributes:
        rank: this rank in the group.
        main: the main part, encoded.
        cuts: the spreads, encoded.
        digests: the digests of both.
    """

    rank: int
    main: bytes
    cuts: bytes
    digests: tuple[str, str]

    @classmethod
    def of(cls, rank: int, main: bytes, cuts: bytes) -> Told:
        """Make the record, with the digests."""
        return cls(rank, main, cuts, (digest(main), digest(cuts)))

    def offer(self, what: str, extras: Sequence[Any] = (), blobs: dict[str, bytes] | None = None) -> bytes:
        """The second message to the coordinator, after this verdict, with the ``per_rank`` state."""
        classes: dict[str, list[int]] = {}
        sent = dict(blobs or {})
        main, cuts = self.digests
        if what == TABLES:
            sent[main] = compressed(self.main)
        if what != EQUAL:
            classes[f"{main} {cuts}"] = [self.rank]
            sent[cuts] = compressed(self.cuts)
        return _offer(classes, extras, sent)


def compressed(data: bytes) -> bytes:
    """``data``, compressed."""
    return zlib.compress(data, _LEVEL)


def expanded(data: bytes) -> bytes:
    """The inverse of :func:`compressed`."""
    return zlib.decompress(data)


def combine_arrivals(arrivals: Sequence[list[Any]]) -> list[Any]:
    """Combine arrivals: a digest is None if they differ."""
    main, cuts, extra = arrivals[0]
    for other_main, other_cuts, other_extra in arrivals[1:]:
        main = main if main == other_main else None
        cuts = cuts if cuts == other_cuts else None
        extra = extra or other_extra
    return [main, cuts, extra]


def combine_offers(offers: Sequence[bytes]) -> bytes:
    """Combine offers: each table is contained once."""
    if len(offers) == 1:
        return offers[0]
    classes: dict[str, list[int]] = {}
    extras: list[Any] = []
    blobs: dict[str, bytes] = {}
    for offer in offers:
        more, own, these = offer_of(offer)
        for name, ranks in more.items():
            classes.setdefault(name, []).extend(ranks)
        extras += own
        blobs.update(these)
    return _offer(classes, extras, blobs)


def _offer(classes: dict[str, list[int]], extras: Sequence[Any], blobs: dict[str, bytes]) -> bytes:
    head = json.dumps([{name: runs_of(ranks) for name, ranks in classes.items()}, list(extras), list(blobs)])
    return packed(head.encode(), *blobs.values())


def offer_of(offer: bytes) -> tuple[dict[str, list[int]], list[Any], dict[str, bytes]]:
    """The ranks of each class of equal tables, the ``per_rank`` states, and the contents by digest."""
    head, *blobs = unpacked(offer)
    classes, extras, names = json.loads(head)
    ranks = {name: ranks_of(runs) for name, runs in classes.items()}
    return ranks, extras, dict(zip(names, blobs, strict=True))


def runs_of(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks as half-open runs."""
    out: list[list[int]] = []
    for rank in sorted(ranks):
        if out and out[-1][1] == rank:
            out[-1][1] += 1
        else:
            out.append([rank, rank + 1])
    return out


def ranks_of(runs: Sequence[Sequence[int]]) -> list[int]:
    """The ranks in half-open runs."""
    return [rank for start, stop in runs for rank in range(start, stop)]


def classes_of(
    classes: dict[str, list[int]], blobs: dict[str, bytes]
) -> dict[str, list[tuple[list[Spread], list[int]]]]:
    """The spreads of the ranks with a main part, by its digest, in the order of the ranks."""
    out: dict[str, list[tuple[list[Spread], list[int]]]] = {}
    for name, ranks in sorted(classes.items(), key=lambda one: min(one[1])):
        main, cuts = name.split()
        out.setdefault(main, []).append((decode_spreads(expanded(blobs[cuts])), sorted(ranks)))
    return out


class Parts:
    """Finds the part of a rank if it is in several spreads of a tensor.

    Args:
        spreads: all spreads.
        rank: the rank.
    """

    def __init__(self, spreads: Sequence[Spread], rank: int) -> None:
        self.spreads = spreads
        self.inside = [rank in spread.ranks for spread in spreads]
        #: Results of :meth:`part` by its arguments: a spread by its id, as its hash is slow. Callers keep it alive.
        self._known: dict[tuple[tuple[int, ...], int, int], int] = {}

    def part(self, numbers: tuple[int, ...], wanted: Spread | None, before: int = 0) -> int:
        """The number of the rank's part that equals ``wanted``, or is whole; skip the first ``before`` of these."""
        if wanted is not None and wanted.boxes is not None:  # the last spread has all boxes, in the order of memory
            return sum(self.inside[number] and self.spreads[number].boxes is None for number in numbers) + before
        if wanted is not None and wanted.is_whole:
            wanted = None
        known = self._known.get((numbers, id(wanted), before))
        if known is None:
            mine = [self.spreads[number] for number in numbers if self.inside[number]]
            like = [at for at, one in enumerate(mine) if (one.is_whole if wanted is None else one == wanted)]
            known = self._known[numbers, id(wanted), before] = like[before]
        return known
