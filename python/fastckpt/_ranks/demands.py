"""Turns a load request of one rank into the parts of the checkpoint that it needs.

A load calls :func:`demands` once it has the manifest. The result goes through the same rounds as the table of a save:

    wanted = demands(reader, path, settings, into, rank, ranks)      # by the thread whose streams devices wait for
    agreement = Wanting(wanted)
    verdict = operation.round("wanted", agreement.arrival(), combine=combine_wanted, decide=agreement.decide)
    answer = operation.round("demands", agreement.offer(verdict), combine=combine_offers, decide=agreement.unite)
        # only if agreement.is_open(verdict)
    agreed = agreement.settle(verdict, answer)
    share = _core.Share.to_load(reader, agreed.wanted, spreads, size)
    _core.RankLoad(share, rank, reader, agreed.requests, agreed.drain, ...).read(tick)
    state = wanted.build()
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastckpt._api.destinations import Targets, Whole
from fastckpt._api.prepare import Prepared, prepare
from fastckpt._state.collector import paused
from fastckpt._tensors.spread import pieces_of
from fastckpt._tensors.spreads import Spreads
from fastckpt._text import count
from fastckpt.exceptions import StructureMismatchError

from .differences import Differences, Path
from .offers import (
    CUTS,
    EQUAL,
    TABLES,
    Parts,
    Told,
    classes_of,
    combine_arrivals,
    compressed,
    expanded,
    offer_of,
)
from .table import decode_spreads, encode_spreads, packed, unpacked
from .unite import Holder, SpreadLists

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt import _core
    from fastckpt._api.load_settings import LoadSettings
    from fastckpt._tensors import memory as _memory
    from fastckpt._tensors.movers import Range
    from fastckpt._tensors.spread import Spread

_LISTED = 20


class Demand(NamedTuple):
    """Memory to be filled with this rank's part of a tensor of the checkpoint.

    Attributes:
        tensor: the number of the tensor in the checkpoint.
        spread: the number of its spread among those of this rank; 0 if the rank has all of it.
        address: the address of the lowest byte; 0 if ``targets.drain`` receives the bytes.
        nbytes: the writable bytes there; 0 for an empty part.
        strides: see ``_core.ReadRequest``.
    """

    tensor: int
    spread: int
    address: int
    nbytes: int
    strides: Sequence[int] | None


class RankTargets(Targets):
    """Collects the requests of a rank as demands.

    Attributes:
        demands: the demands; movers have the same numbers.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.demands: list[Demand] = []

    def _request(
        self,
        index: int,
        address: int,
        room: int,
        whole: Whole | None,
        *,
        mover: _memory.Mover | None = None,
        layout: np.ndarray[Any, Any] | None = None,
    ) -> None:
        # A demand is made even for no bytes: all ranks of a mesh must name the tensors that are spread over it.
        if room or whole is not None:
            if mover is not None:
                self.push(len(self.demands), mover, room)
            strides = None if layout is None else layout.strides
            self.demands.append(Demand(index, 0 if whole is None else whole.spread, address, room, strides))


class Demands:
    """The demands of one rank.

    Attributes:
        rank: this rank in the group.
        size: the number of ranks.
        reader: the checkpoint.
        path: its path, for messages.
        prepared: the load, before anything is read.
        spreads: the spreads of the tensors of ``into`` that are spread.
        told: the demands as ranks exchange them: the wanted tensors with the numbers of their spreads, and then the
            spreads.
    """

    def __init__(
        self, rank: int, size: int, reader: _core.Reader, path: str, prepared: Prepared, spreads: list[Spread]
    ) -> None:
        self.rank = rank
        self.size = size
        self.reader = reader
        self.path = path
        self.prepared = prepared
        self.spreads = spreads
        wanted: dict[int, tuple[int, ...]] = {}
        for tensor, spread, *_ in self.targets.demands:
            wanted[tensor] = (*wanted.get(tensor, ()), spread)
        kinds: dict[tuple[int, ...], int] = {}
        #: For each wanted tensor, by its number: the number of the list of spreads in which ranks want it.
        self.wanted = {tensor: kinds.setdefault(wanted[tensor], len(kinds)) for tensor in sorted(wanted)}
        self.kinds = list(kinds)
        self.told = Told.of(rank, _encode(self.wanted, self.kinds), encode_spreads(spreads))

    @property
    def targets(self) -> RankTargets:
        """The memory to fill; its ``drain`` is that of a load of one process."""
        targets = self.prepared.targets
        assert isinstance(targets, RankTargets)  # noqa: S101 - `demands` made it so
        return targets

    @property
    def missing(self) -> tuple[str, ...]:
        """The names that only ``into`` has, if ``strict`` is unset."""
        return self.prepared.missing

    def build(self) -> Any:
        """Return the state after everything has been read. See :meth:`.Prepared.build`."""
        return self.prepared.build()

    def unwanted(self) -> str | None:
        """The chosen tensors that this rank does not want, as a :func:`bitmap`."""
        return bitmap(self.prepared.unwanted, len(self.targets.stored))

    def names_of(self, unwanted: str | None) -> tuple[str, ...]:
        """The names of the tensors in a bitmap."""
        return tuple(self.targets.stored[number].name for number in numbers_in(unwanted))


def demands(
    reader: _core.Reader, path: str, settings: LoadSettings, into: Any, rank: int, ranks: Sequence[int]
) -> Demands:
    """Compare the load request of a rank with the checkpoint.

    Args:
        reader: the checkpoint.
        path: its path, for messages.
        settings: the options of the load.
        into: the state to fill, whose tensors may be DTensors; None for a new one.
        rank: this rank in the group.
        ranks: the global ranks of the group, in its order.

    Raises:
        RuntimeError: the caller's current stream of a device that takes part is being captured into a graph.
        StructureMismatchError: ``into`` does not fit. Tensors that only the checkpoint has are not a mismatch: other
            ranks may want them.
        Exception: any error that a load of one process raises before it reads.
    """
    spreads = Spreads(ranks, rank)
    prepared = prepare(reader, path, settings, into, target=RankTargets, spreads=spreads, shared=True)
    prepared.targets.begin("load")
    return Demands(rank, len(ranks), reader, path, prepared, spreads.found)


def bitmap(numbers: set[int], size: int) -> str | None:
    """The bitmap of numbers below ``size``, as text; None if there are no numbers."""
    if not numbers:
        return None
    bits = np.zeros(size, np.bool_)
    bits[list(numbers)] = True
    return base64.b85encode(compressed(np.packbits(bits).tobytes())).decode()


def numbers_in(text: str | None) -> list[int]:
    """The numbers in a bitmap."""
    return [] if text is None else np.flatnonzero(np.unpackbits(_bits(text))).tolist()


def common(bitmaps: Sequence[str | None]) -> str | None:
    """The bitmap of the numbers in all of these bitmaps."""
    distinct = set(bitmaps)
    first = bitmaps[0]
    if None in distinct or len(distinct) == 1 or first is None:
        return None if None in distinct else first
    bits = np.bitwise_and.reduce([_bits(text) for text in distinct if text is not None])
    return base64.b85encode(compressed(bits.tobytes())).decode() if bits.any() else None


def _bits(text: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(expanded(base64.b85decode(text)), np.uint8)


def combine_wanted(arrivals: Sequence[list[Any]]) -> list[Any]:
    """Combine the demands of several ranks."""
    return [*combine_arrivals([arrival[:-1] for arrival in arrivals]), common([arrival[-1] for arrival in arrivals])]


class Request(NamedTuple):
    """A request for ``_core.RankLoad``; ``tensor`` is the position in :attr:`Shared.wanted`."""

    tensor: int
    part: int
    address: int
    nbytes: int
    strides: Sequence[int] | None


class Shared:
    """The agreement of all ranks, and the demands of this rank.

    Attributes:
        wanted: numbers of tensors of the checkpoint that any rank wants, ascending, and for each the numbers of the
            spreads.
        spreads: the spreads that the numbers refer to.
        requests: the memories of this rank.
        drain: receives ranges of memories without an address: their first number is the index in ``requests``.
    """

    def __init__(self, wanted: list[tuple[int, tuple[int, ...]]], spreads: list[Spread], demands: Demands) -> None:
        self.wanted = wanted
        self.spreads = spreads
        self.requests: list[Request] = []
        #: For each of ``requests``: the number of its demand, and the offset of the request in the demand's memory.
        self._numbers: list[tuple[int, int]] = []
        parts = Parts(spreads, demands.rank)
        position = {tensor: index for index, (tensor, _) in enumerate(wanted)}
        self._targets = targets = demands.targets
        seen: dict[tuple[int, int], int] = {}
        for index, (tensor, spread, address, nbytes, strides) in enumerate(targets.demands):
            wish = demands.spreads[spread - 1] if spread else None
            # `seen` counts equal demands: a tensor that is stored once can be wanted several times.
            alike = (tensor, 0 if wish is None or wish.is_whole else spread if wish.boxes is None else -1)
            before = seen.get(alike, 0)
            pieces = pieces_of(wish, nbytes)
            seen[alike] = before + len(pieces)
            if nbytes:
                at = position[tensor]
                part = parts.part(wanted[at][1], wish, before)
                for more, (start, stop) in enumerate(pieces):
                    place = address and address + start
                    self.requests.append(
                        Request(at, part + more, place, stop - start, strides if len(pieces) == 1 else None)
                    )
                    self._numbers.append((index, start))

    def drain(self, ranges: Sequence[Range]) -> None:
        """The core's callback for requests without an address."""
        found = self._numbers
        self._targets.drain(
            [(found[index][0], found[index][1] + start, address, nbytes) for index, start, address, nbytes in ranges]
        )


class Wanting:
    """The agreement of one load: like :class:`.agreement.Agreement`, with the same rounds.

    Args:
        local: the demands of this rank.
    """

    def __init__(self, local: Demands) -> None:
        self.local = local

    def arrival(self) -> list[Any]:
        """The first message: digests of the demands, whether the load is strict, and tensors unwanted here."""
        return [*self.local.told.digests, self.local.prepared.settings.strict, self.local.unwanted()]

    def decide(self, combined: list[Any]) -> list[Any]:
        """The verdict: which parts differ, and which tensors no rank wants.

        Raises:
            StructureMismatchError: there is a tensor that no rank wants, and a rank's load is strict.
        """
        main, cuts, strict, unwanted = combined
        local = self.local
        if unwanted is not None and strict:
            names = local.names_of(unwanted)
            shown = list(names[:_LISTED])
            if len(names) > _LISTED:
                shown.append(f"and {len(names) - _LISTED} more")
            error = StructureMismatchError(
                f"load: no rank has a destination in into= for {count(len(names), 'tensor')} of {local.path}, and "
                'nothing was changed: give a state with these tensors, load only others, as in keys="model.*", or skip '
                "these with strict=False:\n  " + "\n  ".join(shown)
            )
            error.differences = tuple(f"{name}: missing from into=" for name in names)
            raise error
        return [TABLES if main is None else CUTS if cuts is None else EQUAL, unwanted]

    @staticmethod
    def is_open(verdict: list[Any]) -> bool:
        """Whether a second round is needed."""
        return bool(verdict[0] != EQUAL)

    def offer(self, verdict: list[Any]) -> bytes:
        """The second message, to the coordinator."""
        return self.local.told.offer(verdict[0])

    def unite(self, combined: bytes) -> bytes:
        """The answer: the demands of all ranks.

        Raises:
            ValueError: a rank of a mesh does not want a tensor that other ranks of the mesh want.
        """
        classes, _, blobs = offer_of(combined)
        local = self.local
        holders: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        variants = list(classes_of(classes, blobs).items())
        for number, (main, _) in enumerate(variants):
            wanted, kinds = (local.wanted, local.kinds) if len(variants) == 1 else _decode(expanded(blobs[main]))
            for tensor, kind in wanted.items():
                holders.setdefault(tensor, []).append((number, kinds[kind]))
        made = SpreadLists(local.size)
        known: dict[tuple[Any, ...], int] = {}
        lists: dict[int, int] = {}
        differences = Differences("load")
        for tensor in sorted(holders):
            key = tuple(holders[tensor])
            found = known.get(key)
            if found is None:
                found = known[key] = made.add(
                    holder for number, spreads in key for holder in _holders(variants[number][1], spreads)
                )
            lists[tensor] = found
            if found in made.without:
                spread, absent = made.without[found]
                name = local.targets.stored[tensor].name
                differences.absent(
                    Path(None, name), spread.ranks, absent, "on every rank of a mesh, pass all its tensors in into="
                )
        differences.raise_any()
        return packed(compressed(_encode(lists, made.lists)), compressed(encode_spreads(made.spreads)))

    @paused()
    def settle(self, _: list[Any], answer: bytes | None) -> Shared:
        """The agreement of all ranks, from the verdict and, if one was needed, the ``answer``."""
        local = self.local
        if answer is not None:
            main, cuts = unpacked(answer)
            lists, kinds = _decode(expanded(main))
            return Shared(
                [(tensor, kinds[kind]) for tensor, kind in lists.items()], decode_spreads(expanded(cuts)), local
            )
        everyone = list(range(local.size))
        made = SpreadLists(local.size)
        every = [made.add(_holders([(local.spreads, everyone)], spreads)) for spreads in local.kinds]
        return Shared([(tensor, made.lists[every[kind]]) for tensor, kind in local.wanted.items()], made.spreads, local)


def _holders(variants: Sequence[tuple[list[Spread], list[int]]], numbers: tuple[int, ...]) -> list[Holder]:
    """The boxes of a tensor that ranks with these spreads want, by the numbers of the spreads."""
    out = []
    for spreads, ranks in variants:
        seen: dict[Spread | None, int] = {}
        for number in numbers:
            spread = spreads[number - 1] if number else None
            alike = None if spread is None or spread.is_whole else spread
            out.append(Holder(spread, seen.get(alike, 0), ranks))
            seen[alike] = seen.get(alike, 0) + 1
    return out


def _encode(wanted: dict[int, int], kinds: Sequence[tuple[int, ...]]) -> bytes:
    return packed(
        json.dumps(kinds).encode(),
        np.fromiter(wanted.keys(), "<u4", len(wanted)).tobytes(),
        np.fromiter(wanted.values(), "<u4", len(wanted)).tobytes(),
    )


def _decode(data: bytes) -> tuple[dict[int, int], list[tuple[int, ...]]]:
    kinds, tensors, kind = unpacked(data)
    wanted = dict(zip(np.frombuffer(tensors, "<u4").tolist(), np.frombuffer(kind, "<u4").tolist(), strict=True))
    return wanted, [tuple(each) for each in json.loads(kinds)]
