"""A save of all ranks of a process group: the steps between the rounds of the protocol."""

from __future__ import annotations

import errno
import json
import mmap
import secrets
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._api.build_report import with_warnings
from fastckpt._api.io import bytes_per_second
from fastckpt._api.write import Agreed
from fastckpt._tensors.ranges import range_of

from .agreement import PER_RANK, Agreement, core_spread
from .attention import Attention
from .exchange import Exchange, Link, LostError, carried, first_lost, lost_by, raise_lost, swapped
from .near import share as share_memory
from .offers import combine_arrivals, combine_offers
from .ranks import Ranks, alike
from .replicas import Comparison, combine_holders, holders_that_differ, not_compared
from .reuse import take_over

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fastckpt._api.save_request import SaveRequest

    from .agreement import JobState, TensorOf
    from .peers import Operation
    from .session import Session
    from .torch_distributed import DataGroup

_REPEATED = (
    "nothing distinguishes this save from an earlier one to the same path, so a rank that misses a call cannot be "
    "noticed, and its part may be of another step: pass metadata={'step': step}, or give each save its own path"
)
#: The most warnings of all ranks in one report.
_WARNINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedByRanks(Agreed):
    """The agreement of the ranks. Only the coordinator has the texts.

    Attributes:
        spreads: the spreads to which the tensors refer by number.
        grains: bytes of the largest memory page that a rank's kernel has, bytes of a grain, and the ranks of a team
            (``_core.Share.to_save``).
        seed: the seed for drawing samples of what several ranks hold.
        held: for each part that this rank has: the number of the tensor, the number of the part, the address, and the
            bytes; the address is 0 if ``fill`` copies the bytes.
        sum: returns the CRC-64 of all bytes of a part without an address, by its index in ``held``, if its device
            computes it, else None.
        per_rank: the structure of the ``per_rank`` states, JSON; None if there are none.
    """

    spreads: Sequence[_core.Spread]
    grains: tuple[int, int, int]
    seed: int
    held: Sequence[tuple[int, int, int, int]]
    sum: Callable[[int], int | None] | None = None
    per_rank: str | None = None

    @property
    def texts(self) -> tuple[str, str, str | None]:
        """The JSON texts of the checkpoint."""
        return self.structure, self.metadata, self.per_rank

    def sum_of(self) -> Callable[[int, int], int | None] | None:
        """The callback with which the core requests the sums of parts, by tensor and part."""
        summed = self.sum
        if summed is None:
            return None
        places = {(tensor, part): index for index, (tensor, part, *_) in enumerate(self.held)}
        return lambda tensor, part: summed(places[tensor, part])


class ProcessGroup:
    """The ranks of a process group, in one save. Every rank makes the same calls.

    Args:
        session: the process group.
        operation: the common operation of its ranks, in its body; the caller's rounds may have come before.
        ranks: the ``ranks=`` of the call.
    """

    def __init__(self, session: Session, operation: Operation, ranks: Ranks) -> None:
        self.session = session
        self.operation = operation
        self.ranks = ranks

    def agree(self, request: SaveRequest) -> AgreedByRanks:
        """Agree on the state of the job: the rounds ``arrive`` and ``tables``.

        Raises:
            RanksError: another rank failed, or does not answer.
            KeyError: a pattern matches nothing on any rank.
            ValueError: values of several ranks differ, or ``model_key`` leads to no mapping.
        """
        group, operation, path = self.session.group, self.operation, request.path
        agreement = Agreement(request, group.rank, group.size, request.operation)
        unused = [] if request.tailor is None else request.tailor.unused
        verdict, seed, grains = operation.round(
            "arrive",
            [agreement.arrival(), *self._terms(request), unused, mmap.PAGESIZE],
            combine=_combine_calls,
            decide=lambda arrived: _decide(agreement, path, arrived),
        )
        answer = None
        if agreement.is_open(verdict):
            offer = agreement.offer(verdict)
            answer = operation.round("tables", offer, combine=combine_offers, decide=agreement.unite)
        job = agreement.settle(verdict, answer)
        pulled = job.pulled
        tensors, spreads = self._spread(job)
        return AgreedByRanks(
            prefix=job.prefix,
            training_prefix=PER_RANK if job.has_extras else "",
            frozen=request.flags(tensor.name for tensor in job.tensors),
            tensors=tensors,
            spreads=spreads,
            grains=tuple(grains),
            seed=seed,
            structure=job.structure or "",
            metadata=job.metadata or "",
            per_rank=job.per_rank,
            held=job.held,
            fill=job.fill if pulled else None,
            sum=job.sum if pulled else None,
            devices=job.sources.devices if pulled and job.sources is not None else (),
            pulled=pulled,
        )

    def _spread(self, job: JobState) -> tuple[list[TensorOf], list[_core.Spread]]:
        """The tensors, and the spreads to which their numbers refer, in the core's form."""
        return job.tensors, [core_spread(each) for each in job.spreads]

    def _terms(self, request: SaveRequest) -> list[list[list[Any]]]:
        """The values of a rank, besides the state, that must be equal on all: its options, and its step.

        Files and metadata come from the coordinator: a rank may have no step, but different steps mean different calls.
        """
        rank = self.session.group.rank
        terms = request.settings.alike() | alike(self.ranks)
        base = request.base
        if base is not None and Path(base).parent == Path(request.path).parent:
            terms["base="] = Path(base).name  # the directory may have another name on each rank
        step = request.step
        steps = [] if step is None else [[rank, json.dumps({"metadata['step']": step})]]
        return [[[rank, json.dumps(terms, sort_keys=True)]], steps]

    def write(
        self,
        request: SaveRequest,
        agreed: AgreedByRanks,
        options: _core.SaveOptions,
        progress: Callable[[int, int], None],
    ) -> Mapping[str, Any]:
        """Write a checkpoint together, with a base if there is one.

        It is durable, and has its name, when this returns on any rank. On an error nothing has been committed, unless
        the error says that the outcome is unknown.

        Raises:
            RanksError: another rank failed, or does not answer.
            Exception: this rank failed.
        """
        size = self.session.group.size
        share = _core.Share.to_save(agreed.tensors, agreed.spreads, size, options, *agreed.grains)
        if self.ranks.replicas == "first":
            share = share.first(None)
        if request.base is None:
            return self._write(request, agreed, options, progress, share, share)
        began = time.perf_counter()
        parts = (agreed.held, agreed.fill, options, request.owners())
        base = _core.RankBase(share, self.session.group.rank, *parts)
        try:
            beside = take_over(self.session, self.operation, request.path, request.base, base, self.ranks.timeout)
            compared = time.perf_counter() - began
            own = self._write(request, agreed, options, progress, beside or share, share, base)
        finally:
            base.close()
        phases = {**own["phases"], "compare": compared}
        return {**own, "phases": phases, "seconds": own["seconds"] + compared}

    def _repeated(self) -> list[str]:
        """The warning for the first save of a process group that nothing distinguishes from an earlier save."""
        if not self.operation.is_repeated or self.session.has_warned:
            return []
        self.session.has_warned = True
        return [_REPEATED]

    def _write(
        self,
        request: SaveRequest,
        agreed: AgreedByRanks,
        options: _core.SaveOptions,
        progress: Callable[[int, int], None],
        share: _core.Share,
        plain: _core.Share | None,
        base: _core.RankBase | None = None,
    ) -> dict[str, Any]:
        """The rounds ``created``, ``joined`` and ``done``.

        A manifest that the texts make too large is refused before a byte is written.

        Args:
            request: the save.
            agreed: the agreement of the ranks.
            options: how it is saved.
            progress: called with bytes written and bytes to write by this rank.
            share: the boxes and duties of all ranks, equal on all ranks.
            plain: the same, laid out without a base; None if copies on several ranks have been compared.
            base: the base of the layout, if files were taken over from an earlier checkpoint.
        """
        session, operation, timeout, path = self.session, self.operation, self.ranks.timeout, request.path
        rank = session.group.rank
        engine = _core.RankSave(share, rank, agreed.held, agreed.fill, options, base, request.owners())
        group = None
        whole = False
        made: list[tuple[int, int]] = []
        attention = Attention(operation, timeout, bytes_per_second(request.settings.io))
        noted = self._repeated()
        try:
            mail = engine.mail
            comparison = None
            if plain is not None:
                comparison = Comparison(
                    engine, share, self.ranks, agreed.seed, agreed.sum_of(), lambda *_: attention.meanwhile()
                )
                noted += not_compared(share) if self.ranks.replicas == "first" else []
            name, meeting, differing = operation.round(
                "created",
                [
                    session.link.offer(needed=bool(mail.outgoing() or mail.incoming())),
                    [[rank, share.digest()]],
                    [] if comparison is None else comparison.offer(),
                ],
                combine=_combine_created,
                decide=lambda offered: _create(engine, path, offered, agreed.texts, made),
            )
            if comparison is not None and plain is not None and differing:
                tensors, text = comparison.differing(session, operation, path, differing)
                engine.close()
                # Write without a base, and take these tensors from their lowest ranks.
                own = self._write(request, agreed, options, progress, plain.first(tensors), None)
                whole = True
                return with_warnings(own, noted, [text])
            allocated = _join(session, engine, path, name, attention) if rank else {}
            operation.round("joined", allocated, combine=first_lost, decide=raise_lost)
            group = session.link.meet(meeting, timeout, attention.meanwhile)
            own, outcome = _outcome(session, engine, group, attention, progress)
            done = time.perf_counter()
            answer = operation.round(
                "done",
                outcome,
                combine=lambda outcomes: _combine(share, outcomes),
                decide=lambda outcome: _commit(engine, outcome, agreed.texts, lambda *_: operation.alive()),
                is_done=lambda: _identity(path) in made,
            )
            whole = True
            fields = _fields(session, own, answer, time.perf_counter() - done)
            if attention.exchange is not None and attention.exchange.shared is not None:
                *_, fields["bytes_host"], fields["host_fallback"] = attention.exchange.shared
            return with_warnings(fields, noted)
        finally:
            if group is not None and not whole:
                if attention.exchange is not None:
                    attention.exchange.end("the save has failed", operation.alive)
                session.link.drop()
            engine.close(committed=whole)


def _combine_calls(calls: list[Any]) -> list[Any]:
    """Combine several arrivals.

    Return the tables, terms and steps that differ, the unused patterns, and the largest memory page.
    """
    arrivals, terms, steps, unused, pages = zip(*calls, strict=True)
    in_all = [text for text in unused[0] if all(text in others for others in unused)]
    return [combine_arrivals(arrivals), first_two(terms), first_two(steps), in_all, max(pages)]


def first_two(said: Sequence[list[list[Any]]]) -> list[list[Any]]:
    """Two ranks with different values, and these values; one rank and value if all are equal."""
    kinds: dict[Any, int] = {}
    for rank, what in chain.from_iterable(said):
        kinds.setdefault(what, rank)
    return sorted([rank, what] for what, rank in kinds.items())[:2]


def _decide(agreement: Agreement, path: str, arrived: list[Any]) -> list[Any]:
    arrival, *compared, unused, page = arrived
    for said in compared:
        if len(said) > 1:
            (first, own), (second, other) = [(rank, json.loads(text)) for rank, text in said]
            name = next(name for name in own if own[name] != other[name])
            raise ValueError(
                f"save: {path}: {name} differs between ranks: {own[name]!r} on rank {first}, {other[name]!r} on rank "
                f"{second}: give the same on all ranks"
            )
    if unused:
        raise KeyError(f"save: {path}: {unused[0]} matches nothing on any rank")
    return [agreement.decide(arrival), secrets.randbits(63), [page, *_core.aggregation(path, page)]]


def _join(session: Session, engine: _core.RankSave, path: str, name: str, attention: Attention) -> dict[str, Any]:
    """Open the coordinator's directory, which proves a shared file system; allocate files; return the loss, if any."""
    try:
        engine.join(path, name)
    except FileNotFoundError as error:
        text = (
            f"save: {path} is not on a file system shared with {session.name(0)}: {session.name(session.group.rank)} "
            "does not see what was made there: give a path that leads to one directory on all hosts"
        )
        raise FileNotFoundError(errno.ENOENT, text, name) from error
    try:
        engine.allocate(lambda *_: attention.meanwhile())
    except FileNotFoundError as error:
        # The coordinator was interrupted, and has removed the directory.
        gone = LostError(f"the directory of the save has disappeared: {error}")
        return lost_by(session.name(session.group.rank), gone)
    return {}


def _outcome(
    session: Session,
    engine: _core.RankSave,
    group: DataGroup | None,
    attention: Attention,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The core's report of what this rank has written, and its message to the others."""
    limit, attend = attention.limit, attention.meanwhile
    try:
        if group is not None:
            shared = share_memory(engine, group.near, lambda *swap: swapped(group, swap, limit, attend))
            attention.exchange = Exchange(group, engine.mail, session.name, limit, shared)
        own = _write(engine, attention.exchange, attention, progress)
    except LostError as error:
        # Another rank is the cause, and reports it itself; if none does, this error is the cause.
        return {}, lost_by(session.name(session.group.rank), error)
    return own, {"pieces": engine.pieces(), "saved": figures(own)}


def _write(
    engine: _core.RankSave,
    exchange: Exchange | None,
    attention: Attention,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write this rank's share, and complete all messages."""

    def each(done: int, total: int) -> None:
        attention(done, total)
        progress(done, total)

    try:
        with range_of("fastckpt.write"):
            return carried(lambda: dict(engine.write(each)), exchange, attention)
    except FileNotFoundError as error:
        # The coordinator removes the files after the save has failed, and then informs the others.
        raise LostError(f"the files of the save have disappeared: {error}") from error


def _combine_created(offers: list[list[Any]]) -> list[Any]:
    """Combine offers made before there is a workspace: their gloo groups, and the first of each kind of shares."""
    links, shares, holders = zip(*offers, strict=True)
    return [Link.combine(links), first_two(shares), combine_holders(holders)]


def _create(
    engine: _core.RankSave,
    path: str,
    offered: list[Any],
    texts: tuple[str, str, str | None],
    made: list[tuple[int, int]],
) -> list[Any]:
    """At the coordinator: the name of the workspace, the gloo group to use, and the numbers of ranks that differ.

    The identity of the workspace is appended to ``made``. If ranks differ, no workspace is made.
    """
    offer, shares, holders = offered
    if len(shares) > 1:
        raise ValueError(
            f"save: {path}: ranks {shares[0][0]} and {shares[1][0]} would lay out its files differently: give the same "
            "Files(shard_size=), the same FASTCKPT_BLOCK_SIZE and the same version of fastckpt to all ranks"
        )
    engine.check(*texts)
    differing = holders_that_differ(holders)
    if differing:
        return ["", "", differing]
    name = engine.create(path)
    made += filter(None, [_identity(Path(path).with_name(name))])
    return [name, Link.agree(offer), []]


def _identity(path: str | Path) -> tuple[int, int] | None:
    """The identity of the directory at a path, which a rename keeps; None if there is no directory."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _fields(session: Session, own: dict[str, Any], whole: Mapping[str, Any], commit: float) -> dict[str, Any]:
    """The fields of the report of this rank."""
    fields = {name: value for name, value in own.items() if name not in {"sent", "received"}}
    return fields | {
        "phases": {**own["phases"], "commit": commit},
        "seconds": own["seconds"] + commit,
        "warnings": tuple(dict.fromkeys([*own["warnings"], *whole["warnings"]])),
        "shards": whole["shards"],
        "tensors": whole["tensors"],
        "linked_files": whole["linked_files"],
        "linked_bytes": whole["linked_bytes"],
        "rank": session.group.rank,
        "ranks": session.group.size,
        "bytes_total": whole["bytes"],
        "bytes_sent": own["sent"],
        "bytes_received": own["received"],
    }


def figures(own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a rank's report that are added up over the ranks."""
    return {
        "bytes": own["bytes"],
        "seconds": own["seconds"],
        "threads": own["threads"],
        "engine": own["engine"],
        "fallback": own["fallback"],
        "warnings": list(own["warnings"]),
        "phases": dict(own["phases"]),
        "blocks": dict(own["blocks"]),
        "paths": dict(own["paths"]),
        "copied": own["copied"],
        "sent": own["sent"],
        "received": own["received"],
    }


def add_up(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The combined report of several ranks: bytes add up, seconds run in parallel, the engine is the first rank's."""
    out = dict(reports[0])
    for name in ("bytes", "threads", "copied", "sent", "received"):
        out[name] = sum(report[name] for report in reports)
    out["seconds"] = max(report["seconds"] for report in reports)
    for name, join in (("phases", max), ("blocks", _sum), ("paths", _sum)):
        joined: dict[str, Any] = {}
        for report in reports:
            for key, value in report[name].items():
                joined[key] = join(joined[key], value) if key in joined else value
        out[name] = joined
    out["warnings"] = list(dict.fromkeys(text for report in reports for text in report["warnings"]))[:_WARNINGS]
    return out


def _sum(one: int, other: int) -> int:
    return one + other


def _combine(share: _core.Share, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the outcomes of a rank and of those below it."""
    lost = first_lost(outcomes)
    if lost:
        return lost
    return {
        "pieces": share.merge([outcome["pieces"] for outcome in outcomes]),
        "saved": add_up([outcome["saved"] for outcome in outcomes]),
    }


def _commit(
    engine: _core.RankSave,
    outcome: dict[str, Any],
    texts: tuple[str, str, str | None],
    tick: Callable[[int, int], None],
) -> Mapping[str, Any]:
    """At the coordinator, once all ranks have written: seal and publish."""
    raise_lost(outcome)
    with range_of("fastckpt.commit"):
        return engine.commit(outcome["pieces"], *texts, outcome["saved"], tick)
