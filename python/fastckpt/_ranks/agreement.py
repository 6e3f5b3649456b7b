"""Agrees on one table for all ranks, in one round if their tables are equal and in two if they differ.

For a save (loads do the same with :class:`.demands.Wanting`):

    agreement = Agreement(request, rank, size)
    verdict = operation.round("arrive", agreement.arrival(), combine=combine_arrivals, decide=agreement.decide)
    answer = None
    if agreement.is_open(verdict):
        offer = agreement.offer(verdict)
        answer = operation.round("tables", offer, combine=combine_offers, decide=agreement.unite)
    job = agreement.settle(verdict, answer)

``combine_arrivals`` and ``combine_offers`` are in :mod:`.offers`. Arrivals and verdicts are JSON of some 200 bytes;
offers and answers are bytes. Arrivals can be part of another value: ``combine_arrivals`` accepts a list of them.
``decide`` and ``unite`` run on the coordinator; the structure, which only the coordinator needs, is not sent.

The cost: a rank sends its own table once, compressed, if tables differ (about 10 bytes a tensor), and its spreads: a
few for meshes, and one for each :class:`fastckpt.distributed.Part` (about 16 bytes). The coordinator gets equal tables
and equal spreads only once. ``per_rank=`` never makes tables differ: its structures (which all go into the manifest)
are sent up one by one, and its tensors as lists; equal lists are sent only once.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt import _core
from fastckpt._state.collector import paused
from fastckpt._state.groups import split_model
from fastckpt._state.unflatten import is_tensor
from fastckpt._tensors.spread import Spread, pieces_of

from .describe import table_of
from .differences import Differences, Path
from .offers import CUTS, EQUAL, TABLES, Parts, Told, classes_of, compressed, expanded, offer_of, runs_of
from .table import decode, decode_spreads, digest, encode, encode_spreads, kinds_of, packed, unpacked
from .unite import SpreadLists, Variant, holders_of, unite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt._api.save_request import SaveRequest
    from fastckpt._tensors.movers import Range, Sources


class TensorOf(NamedTuple):
    """A tensor of the job, in the form for ``_core.Share.to_save``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    logical: tuple[str, tuple[int, ...]] | None
    spreads: tuple[int, ...]


class Holding(NamedTuple):
    """Memory of this rank, in the form for ``_core.RankSave``. The address is 0 if ``fill`` copies the bytes."""

    tensor: int
    part: int
    address: int
    nbytes: int


_ALL = slice(None)
#: The prefix of the names of the tensors of ``per_rank``.
PER_RANK = "per_rank."


class JobState:
    """The agreement of ranks about the state of their job, and the part of this rank.

    Attributes:
        tensors: the job's tensors, those of ``per_rank`` at the end.
        spreads: the spreads to which the tensors refer by number.
        held: the memories of this rank.
        prefix: the prefix of the model's tensor names.
        has_extras: whether there are tensors of ``per_rank``, which are never the model's.
        sources: copies the bytes of memories without an address; see :class:`fastckpt._api.save_request.SaveRequest`.
        structure: on the coordinator, the tokens of the state, JSON text.
        metadata: the structure of the metadata.
        per_rank: the list of the ``per_rank`` states; None if there are none.
    """

    def __init__(
        self, tensors: list[TensorOf], spreads: list[Spread], prefix: str, sources: Sources | None = None
    ) -> None:
        self.tensors = tensors
        self.spreads = spreads
        self.prefix = prefix
        self.sources = sources
        self.has_extras = False
        self.held: list[Holding] = []
        self.structure: str | None = None
        self.metadata: str | None = None
        self.per_rank: str | None = None
        #: For each memory in ``held``: the number of its source in ``sources``, and the part of that source.
        self._sources: list[tuple[int, slice]] = []

    def hold(self, tensor: int, part: int, address: int, nbytes: int, number: int, within: slice = _ALL) -> None:
        """Record a memory of this rank. Without an address, it is the slice ``within`` of source ``number``."""
        if nbytes:
            self.held.append(Holding(tensor, part, address, nbytes))
            self._sources.append((number, within))

    def fill(self, ranges: Sequence[Range]) -> None:
        """The core's callback for memories without an address, by the index in ``held``."""
        assert self.sources is not None  # noqa: S101 - what was copied has addresses
        found = self._sources
        self.sources.fill(
            [
                (found[index][0], (found[index][1].start or 0) + start, address, nbytes)
                for index, start, address, nbytes in ranges
            ]
        )

    def sum(self, index: int) -> int | None:
        """The checksum of a memory without an address, by the index in ``held``, if a device computes it."""
        assert self.sources is not None  # noqa: S101 - as above
        number, within = self._sources[index]
        return self.sources.sum(number) if within == _ALL else None

    @property
    def pulled(self) -> int:
        """Bytes of memories without an address."""
        return sum(holding.nbytes for holding in self.held if not holding.address)


class Agreement:
    """The agreement of one save.

    Args:
        request: the save of this rank.
        rank: this rank in the group.
        size: the number of ranks.
        operation: the word that error messages begin with.

    Attributes:
        table: the main part of the table of this rank.
        told: both parts of the table, as ranks exchange them.
    """

    def __init__(self, request: SaveRequest, rank: int, size: int, operation: str = "save") -> None:
        self.request = request
        self.rank = rank
        self.size = size
        self.operation = operation
        self.table = table_of(request.flat)
        self.told = Told.of(rank, encode(self.table), encode_spreads(request.spreads))
        #: The structure, for the coordinator.
        self._structure: str | None = None
        self._extras: list[Any] = []

    def arrival(self) -> list[Any]:
        """The first message: digests of both parts of the table, and whether there is a ``per_rank``."""
        return [*self.told.digests, self.request.per_rank is not None]

    def decide(self, combined: list[Any]) -> list[Any]:
        """The verdict on the arrivals: which parts differ, and whether there is a state per rank."""
        main, cuts, extra = combined
        return [TABLES if main is None else CUTS if cuts is None else EQUAL, extra]

    @staticmethod
    def is_open(verdict: list[Any]) -> bool:
        """Whether a second round is needed."""
        return verdict != [EQUAL, False]

    def offer(self, verdict: list[Any]) -> bytes:
        """The second message of this rank."""
        what, has_extras = verdict
        own = self.request.per_rank
        if not has_extras or own is None:
            return self.told.offer(what)
        tensors = json.dumps([tensor[:3] + tensor[5:] for tensor in own.tensors]).encode()
        tokens = own.structure().encode()
        names = digest(tensors), digest(tokens)
        return self.told.offer(what, [[self.rank, *names]], dict(zip(names, (tensors, tokens), strict=True)))

    def unite(self, combined: bytes) -> bytes:
        """The answer: everything that a rank needs beside its own table.

        Raises:
            ValueError: values of several ranks differ, or ``model_key`` leads to no mapping.
        """
        classes, extras, blobs = offer_of(combined)
        variants = classes_of(classes, blobs)
        parts: list[bytes] = []
        if not variants:
            parts += [b"", b""]
        elif len(variants) == 1:
            parts += self._unite_cuts(next(iter(variants.values())))
        else:
            tables = {main: Variant(decode(expanded(blobs[main])), spreads) for main, spreads in variants.items()}
            parts += self._unite_tables(tables)
        return packed(*parts, *self._unite_extras(extras, blobs))

    def _unite_cuts(self, spreads: list[tuple[list[Spread], list[int]]]) -> list[bytes]:
        """For ranks with equal main tables: the list of the parts on ranks, for each number of a spread."""
        variant = Variant(self.table, spreads)
        made = SpreadLists(self.size)
        # Spreads of tensors that only some ranks have may be numbered after or between those of the common tensors.
        used = {kind.spread for kind in variant.table.kinds} | {0}
        lists = [made.add(holders_of(variant, number if number in used else 0)) for number in range(1 + max(used))]
        differences = Differences(self.operation)
        for number, found in enumerate(lists):
            if found in made.without:
                spread, absent = made.without[found]
                index = next(
                    i for i, kind in enumerate(variant.table.kind) if variant.table.kinds[kind].spread == number
                )
                path = Path(None, variant.table.names[index])
                differences.absent(path, spread.ranks, absent, "on every rank of a mesh, save all its tensors")
        differences.raise_any()
        answer = json.dumps([[made.lists[each] for each in lists]]).encode()
        return [compressed(answer), compressed(encode_spreads(made.spreads))]

    def _unite_tables(self, variants: dict[str, Variant]) -> list[bytes]:
        """For ranks with different main tables: the tensors of the union, and the place of each rank's own in it."""
        united = unite(list(variants.values()), self.size, operation=self.operation)
        prefix = split_model(self.operation, united.flat, self.request.settings.files.model_key)
        self._structure = united.structure
        tensors = united.flat.tensors
        kinds, kind = kinds_of(
            (tensor.dtype, tensor.shape, tensor.logical, which)
            for tensor, which in zip(tensors, united.lists, strict=True)
        )
        # A rank finds its tensors in the union by name, except those in `others`.
        number_of = {tensor.name: number for number, tensor in enumerate(tensors)}
        others = {
            main: [
                [index, numbers]
                for index, (name, numbers) in enumerate(zip(variant.table.names, each, strict=True))
                if numbers != [number_of.get(name)]
            ]
            for (main, variant), each in zip(variants.items(), united.numbers, strict=True)
        }
        head = [united.spread_lists, [tensor.name for tensor in tensors], kinds, others, prefix]
        data = packed(json.dumps(head, separators=(",", ":")).encode(), kind.astype("<u4").tobytes())
        return [compressed(data), compressed(encode_spreads(united.spreads))]

    def _unite_extras(self, extras: list[Any], blobs: dict[str, bytes]) -> list[bytes]:
        """The ``per_rank`` tensors: lists of tensors, and the ranks that have each list."""
        lists: dict[str, list[int]] = {}
        self._extras = []
        for rank, tensors, tokens in sorted(extras):
            lists.setdefault(tensors, []).append(rank)
            self._extras.append((rank, blobs[tokens]))
        head = json.dumps([runs_of(ranks) for ranks in lists.values()])
        return [head.encode(), *(blobs[tensors] for tensors in lists)]

    @paused()
    def settle(self, verdict: list[Any], answer: bytes | None) -> JobState:
        """The agreement of all ranks, from the verdict and, if one was needed, the ``answer``."""
        what, _ = verdict
        main, cuts, *extras = [b"", b""] if answer is None else unpacked(answer)
        if what == TABLES:
            job = self._settle_tables(expanded(main), decode_spreads(expanded(cuts)))
        elif what == CUTS:
            job = self._settle_own(json.loads(expanded(main))[0], decode_spreads(expanded(cuts)))
        else:
            job = self._settle_own(None, [])
        if self.rank == 0:
            job.structure = self._structure or self.request.flat.structure()
            job.metadata = self.request.metadata.structure()
        if extras:
            self._settle_extras(job, extras)
        return job

    def _settle_own(self, lists: list[list[int]] | None, spreads: list[Spread]) -> JobState:
        """The case that all ranks have the same tensors."""
        request, flat = self.request, self.request.flat
        prefix = split_model(self.operation, flat, request.settings.files.model_key)
        if lists is None:
            spreads = [Spread(tuple(range(self.size))), *request.spreads]
            lists = [[number] for number in range(len(spreads))]
        own = [tuple(each) for each in lists]
        spread_of = flat.spreads.get
        job = JobState(
            [
                TensorOf(name, dtype, tuple(shape), logical_of(logical), own[spread_of(index, 0)])
                for index, (name, dtype, shape, _, _, logical) in enumerate(flat.tensors)
            ],
            spreads,
            prefix,
            request.sources,
        )
        self._hold(job, [[number] for number in range(len(flat.tensors))])
        return job

    def _settle_tables(self, main: bytes, spreads: list[Spread]) -> JobState:
        """The case that ranks have different tensors."""
        head, kind = unpacked(main)
        lists, names, kinds, others, prefix = json.loads(head)
        own = [tuple(each) for each in lists]
        made = [(dtype, tuple(shape), logical_of(logical), own[which]) for dtype, shape, logical, which in kinds]
        numbers = memoryview(kind).cast("I")
        job = JobState(
            [TensorOf(name, *made[number]) for name, number in zip(names, numbers, strict=True)],
            spreads,
            prefix,
            self.request.sources,
        )
        number_of = {name: number for number, name in enumerate(names)}
        mine = [[number_of.get(name, -1)] for name in self.table.names]
        for index, numbers_of_it in others[self.told.digests[0]]:
            mine[index] = numbers_of_it
        self._hold(job, mine)
        return job

    def _hold(self, job: JobState, numbers: list[list[int]]) -> None:
        """Record the memories of this rank: the positions of its tensors among those of the job."""
        request, flat = self.request, self.request.flat
        where = Parts(job.spreads, self.rank)
        tensors = job.tensors
        for index, (tensor, mine) in enumerate(zip(flat.tensors, numbers, strict=True)):
            for part, (address, nbytes, source) in enumerate(request.boxes.get(index, ())):
                for number in mine:
                    job.hold(number, part, address, nbytes, source)
            if not tensor.capacity:
                continue
            spread = flat.spreads.get(index, 0)
            wanted = request.spreads[spread - 1] if spread else None
            pieces = pieces_of(wanted, tensor.capacity)
            for number in mine:
                part = where.part(tensors[number].spreads, wanted)
                if len(pieces) == 1:
                    job.hold(number, part, tensor.address, tensor.capacity, index)
                    continue
                for more, (start, stop) in enumerate(pieces):
                    address = tensor.address and tensor.address + start
                    job.hold(number, part + more, address, stop - start, index, slice(start, stop))

    def _settle_extras(self, job: JobState, parts: list[bytes]) -> None:
        """Add the ``per_rank`` tensors."""
        head, *lists = parts
        runs = json.loads(head)
        by_rank = {
            rank: number for number, each in enumerate(runs) for start, stop in each for rank in range(start, stop)
        }
        tensors = [json.loads(each) for each in lists]
        taken = {tensor.name for tensor in job.tensors}
        first: dict[int, int] = {}
        for rank in sorted(by_rank):
            first[rank] = len(job.tensors)
            if not tensors[by_rank[rank]]:
                continue
            job.spreads.append(Spread((rank,)))
            mine = (len(job.spreads) - 1,)
            for name, dtype, shape, logical in tensors[by_rank[rank]]:
                job.has_extras = True
                whole = _unique(f"{PER_RANK}{rank}.{name}", taken)
                job.tensors.append(TensorOf(whole, dtype, tuple(shape), logical_of(logical), mine))
        own = self.request.per_rank
        if own is not None:
            behind = len(self.request.flat.tensors)
            for index, tensor in enumerate(own.tensors):
                job.hold(first[self.rank] + index, 0, tensor.address, tensor.capacity, behind + index)
        if self.rank == 0 and self._extras:
            job.per_rank = _list_of(self._extras, first, self.size)


def logical_of(value: Any) -> tuple[str, tuple[int, ...]] | None:
    """A logical dtype and shape, or None, from their JSON form."""
    return None if value is None else (value[0], tuple(value[1]))


def _unique(name: str, taken: set[str]) -> str:
    count, made = 1, name
    while made in taken:
        made = f"{name}~{count}"
        count += 1
    taken.add(made)
    return made


def _list_of(extras: list[Any], first: dict[int, int], size: int) -> str:
    """The structures of all ranks as a list, with the numbers of the tensors of the job."""
    structures = dict(extras)
    out: list[Any] = [["list", size]]
    for rank in range(size):
        if rank not in structures:
            out.append(None)
            continue
        for token in json.loads(structures[rank]):
            if is_tensor(token):
                token[1] += first[rank]
            out.append(token)
    return json.dumps(out, separators=(",", ":"))


def core_spread(spread: Spread) -> _core.Spread:
    """A spread in the core's form."""
    if spread.boxes is not None:
        return _core.Spread.boxes(list(zip(spread.ranks, spread.boxes, strict=True)))
    if spread.mesh:
        return _core.Spread.mesh(spread.ranks, spread.mesh, spread.placements)
    return _core.Spread.ranks(spread.ranks)
