"""A checkpoint written by all ranks of a process group: the steps between the rounds of the protocol.

:func:`write_checkpoint` is what saves share: that of states (:func:`save_order`) and that of
torch.distributed.checkpoint (``fastckpt.dcp``). It takes the job-wide share, which every rank has made alike, what this
rank holds, and the texts of the checkpoint.
"""

from __future__ import annotations

import errno
import json
import mmap
import secrets
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt import _core
from fastckpt._api.build_report import with_warnings
from fastckpt._api.lent import lent
from fastckpt._api.reuse import flags_of
from fastckpt._api.save import step_of, warn_of_types
from fastckpt._api.tailor import Tailor
from fastckpt._state.registry import Types
from fastckpt._tensors.ranges import range_of

from .agreement import PER_RANK, Agreement
from .attention import Attention
from .called import marks_of
from .describe import Local, describe
from .exchange import Exchange, Link, LostError, carried, first_lost, lost_by, raise_lost
from .offers import combine_arrivals, combine_offers
from .replicas import Comparison, Policy, combine_teams, not_compared, teams_that_differ
from .reuse import take_over

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fastckpt._api.save_settings import SaveSettings
    from fastckpt._tensors.movers import Range
    from fastckpt._tensors.spread import Spread

    from .peers import Operation
    from .session import Session

#: How many warnings of all ranks a report has.
_WARNINGS = 16


class Texts(NamedTuple):
    """What a checkpoint says of its state, as JSON texts; ``per_rank`` is None where no rank has a state of its own."""

    structure: str
    metadata: str
    per_rank: str | None = None


class Portion(NamedTuple):
    """What one rank brings to a save.

    Attributes:
        share: who has what of which tensor, equal on all ranks.
        held: number of the tensor, number of the part, address and bytes of each part that this rank has; the address
            is 0 where ``fill`` brings the bytes. The caller keeps the memory alive and unchanged.
        fill: takes ranges ``(index in held, start, address, nbytes)``, and copies these bytes of the parts to the
            addresses; called by threads.
        options: how it is saved.
        base: what ``share`` was laid out beside, if anything was taken over from an earlier checkpoint.
        plain: the share that was laid out without a base; None if that is ``share``.
        sum: the CRC-64 of all bytes of a part without an address, by its index in held, where its device makes that;
            else None.
    """

    share: _core.Share
    held: Sequence[tuple[int, int, int, int]]
    fill: Callable[[Sequence[Range]], None] | None
    options: _core.SaveOptions
    base: _core.RankBase | None = None
    plain: _core.Share | None = None
    sum: Callable[[int], int | None] | None = None

    def sum_of(self) -> Callable[[int, int], int | None] | None:
        """What the core asks for the sums of parts, by tensor and part."""
        summed = self.sum
        if summed is None:
            return None
        places = {(tensor, part): index for index, (tensor, part, *_) in enumerate(self.held)}
        return lambda tensor, part: summed(places[tensor, part])

    def first(self, tensors: Sequence[int]) -> Portion:
        """The same without a base, with these tensors taken from their lowest ranks."""
        return self._replace(share=(self.plain or self.share).first(tensors), base=None, plain=None)


class Compared(NamedTuple):
    """How ranks compare what several of them hold: by what policy, and what samples are drawn by."""

    policy: Policy
    seed: int


class Written(NamedTuple):
    """What was done.

    Attributes:
        own: what :class:`fastckpt._api.rank_reports.RankSaveReport` is made of.
        whole: the core's report of the whole checkpoint.
        beside: seconds by phase, of what neither of them has.
    """

    own: dict[str, Any]
    whole: Mapping[str, Any]
    beside: Mapping[str, float] = MappingProxyType({})


@dataclass(slots=True)
class Order:
    """A save of a state, checked and described, before any other rank has heard of it.

    Attributes:
        call: the word that error messages begin with.
        local: what this rank saves.
        settings: how.
        tailor: what is left out and cast.
        step: the training step, for the live counters.
        marks: what tells this save from others to the same path.
        policy: how what several ranks hold is compared.
        operation: for the live counters, of a save in the background.
    """

    call: str
    local: Local
    settings: SaveSettings
    tailor: Tailor
    step: int | None
    marks: dict[str, str]
    policy: Policy
    operation: _core.Operation | None = None

    def said(self, rank: int, path: str) -> list[list[list[Any]]]:
        """What a rank says of what has to be equal beside the state, in a save to ``path``: its terms, and its step.

        The coordinator's files and metadata count. A rank may have none, but ranks at different steps are in two calls.
        """
        terms = {
            f"{name}=": getattr(record, name)
            for record in (self.settings, self.policy)
            for name, one in record.options().items()
            if one.alike
        }
        base = self.settings.base
        if base is not None and Path(base).parent == Path(path).parent:
            terms["base="] = Path(base).name  # the directory may have another name on each rank
        step = self.step
        steps = [] if step is None else [[rank, json.dumps({"metadata['step']": step})]]
        return [[[rank, json.dumps(terms, sort_keys=True)]], steps]


def order(
    operation: str, session: Session, state: Any, metadata: Any, per_rank: Any, settings: SaveSettings, policy: Policy
) -> Order:
    """Describe the state of this rank. Call it from what the user calls.

    Raises:
        UnsupportedTypeError: the state or the metadata holds what cannot be stored.
    """
    tailor = Tailor(operation, settings.exclude, settings.dtype)
    local = describe(
        state,
        session.group.rank,
        session.group.ranks,
        operation=operation,
        metadata=metadata,
        per_rank=per_rank,
        model_key=settings.model_key,
        tailor=tailor,
        types=Types(operation, settings.registry),
        default=settings.default,
    )
    warn_of_types(
        operation, *(flat for flat in (local.flat, local.about, local.extra) if flat is not None), stacklevel=4
    )
    # What is left out may differ between ranks.
    step = step_of(metadata)
    marks = marks_of({"step": step}, None if tailor.excluded else state)
    return Order(operation, local, settings.for_writing(), tailor, step, marks, policy)


def save_order(
    session: Session,
    operation: Operation,
    path: str,
    order: Order,
    *,
    began: float,
    timeout: float,
    tick: Callable[[int, int], None] | None,
) -> Written:
    """Agree with the other ranks on what the state is, and write it; see :func:`write_checkpoint`.

    ``began`` is when the program called (``time.perf_counter``).
    """
    agreement = Agreement(order.local)
    operation.mark(order.marks)
    verdict, seed, page = operation.round(
        "arrive",
        [agreement.arrival(), *order.said(session.group.rank, path), order.tailor.unused, mmap.PAGESIZE],
        combine=_combine_calls,
        decide=lambda arrived: _decide(agreement, path, arrived),
    )
    answer = None
    if agreement.is_open(verdict):
        offer = agreement.offer(verdict)
        answer = operation.round("tables", offer, combine=combine_offers, decide=agreement.unite)
    agreed = agreement.settle(verdict, answer)
    pulled = agreed.pulled
    devices = agreed.sources.devices if pulled and agreed.sources is not None else ()
    with lent(devices, pulled) as staging:
        options = order.settings.core(
            model_prefix=agreed.prefix,
            training_prefix=PER_RANK if agreed.has_extras else "",
            frozen=flags_of(order.call, order.settings.frozen, [tensor.name for tensor in agreed.tensors]),
            staging=staging.core,
            elapsed=time.perf_counter() - began,
            step=order.step,
            operation=order.operation,
        )
        share = order.policy.dealt(
            _core.Share.to_save(
                agreed.tensors, [core_spread(each) for each in agreed.spreads], session.group.size, options, page
            )
        )
        portion = Portion(
            share, agreed.held, agreed.fill if pulled else None, options, sum=agreed.sum if pulled else None
        )
        # Only the coordinator has them.
        texts = Texts(agreed.structure or "", agreed.metadata or "", agreed.per_rank)
        compared = None
        if order.settings.base is not None:
            portion, compared = take_over(session, operation, path, order.settings.base, portion, timeout)
            portion = portion._replace(plain=share)
        try:
            written = write_checkpoint(
                session,
                operation,
                path,
                portion,
                texts,
                timeout=timeout,
                compared=Compared(order.policy, seed),
                bandwidth=order.settings.bandwidth_limit,
                tick=tick,
            )
        finally:
            if portion.base is not None:
                portion.base.close()
        own = with_warnings(written.own, staging.warnings, order.tailor.warnings)
        return written._replace(own=own, beside={} if compared is None else {"compare": compared})


def core_spread(spread: Spread) -> _core.Spread:
    """A spread as the core takes it."""
    if spread.mesh:
        return _core.Spread.mesh(spread.ranks, spread.mesh, spread.placements)
    return _core.Spread.ranks(spread.ranks)


def _combine_calls(calls: list[Any]) -> list[Any]:
    """What several ranks say when they arrive.

    Their tables, terms and steps that differ, unused patterns, and the largest of their memory pages.
    """
    arrivals, terms, steps, unused, pages = zip(*calls, strict=True)
    in_all = [text for text in unused[0] if all(text in others for others in unused)]
    return [combine_arrivals(arrivals), _first_two(terms), _first_two(steps), in_all, max(pages)]


def _first_two(said: Sequence[list[list[Any]]]) -> list[list[Any]]:
    """Two ranks that say different things, and what they say; or one."""
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
    return [agreement.decide(arrival), secrets.randbits(63), page]


def write_checkpoint(
    session: Session,
    operation: Operation,
    path: str,
    portion: Portion,
    texts: Texts,
    *,
    timeout: float,
    compared: Compared | None,
    bandwidth: float | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> Written:
    """Write a checkpoint together: the rounds ``created``, ``joined`` and ``done``. Every rank calls it.

    It is durable, and has its name, when this returns on any rank. On an error nothing has been committed, unless
    the error says that the outcome is not known.

    Args:
        session: the process group.
        operation: the operation, in its body; the caller's rounds may have come before.
        path: the checkpoint's directory, absolute.
        portion: what this rank brings.
        texts: what the checkpoint says of its state. Only those of the coordinator are used. A manifest that they make
            too large is refused before a byte is written.
        timeout: that of the operation, in seconds.
        compared: how what several ranks hold is compared; None where it has been.
        bandwidth: bytes per second to which the options of this rank limit it.
        tick: called with bytes written and bytes to write by this rank.

    Raises:
        RanksError: another rank failed, or does not answer.
        Exception: this rank failed.
    """
    engine = _core.RankSave(
        portion.share, session.group.rank, portion.held, portion.fill, portion.options, portion.base
    )
    exchange: Exchange | None = None
    whole = False
    made: list[tuple[int, int]] = []
    attention = Attention(operation, timeout, bandwidth)
    noted: list[str] = []
    try:
        mail = engine.mail
        comparison = None
        if compared is not None:
            comparison = Comparison(
                engine,
                portion.share,
                compared.policy,
                compared.seed,
                portion.sum_of(),
                lambda *_: attention.meanwhile(),
            )
            noted += not_compared(portion.share) if compared.policy.replicas == "first" else []
        name, meeting, teams = operation.round(
            "created",
            [
                session.link.offer(needed=bool(mail.outgoing() or mail.incoming())),
                [[session.group.rank, portion.share.digest()]],
                [] if comparison is None else comparison.offer(),
            ],
            combine=_combine_created,
            decide=lambda offered: _create(engine, path, offered, texts, made),
        )
        if comparison is not None and teams:
            tensors, text = comparison.differing(session, operation, path, teams)
            engine.close()
            written = write_checkpoint(
                session,
                operation,
                path,
                portion.first(tensors),
                texts,
                timeout=timeout,
                compared=None,
                bandwidth=bandwidth,
                tick=tick,
            )
            whole = True
            return written._replace(own=with_warnings(written.own, noted, [text]))
        if session.group.rank:
            _join(session, engine, path, name)
        operation.round("joined", None, combine=_nothing)
        group = session.link.meet(meeting, timeout, attention.meanwhile)
        if group is not None:
            exchange = Exchange(group, mail, session.name, attention.limit)
            attention.exchange = exchange
        own: dict[str, Any] = {}
        try:
            own = _write(engine, exchange, attention, tick)
            outcome: dict[str, Any] = {"pieces": engine.pieces(), "saved": figures(own)}
        except LostError as error:
            # The cause is another rank, which says so itself; where none does, this is the cause.
            outcome = lost_by(session.name(session.group.rank), error)
        done = time.perf_counter()
        answer = operation.round(
            "done",
            outcome,
            combine=lambda outcomes: _combine(portion.share, outcomes),
            decide=lambda outcome: _commit(engine, outcome, texts, lambda *_: operation.alive()),
            is_done=lambda: _identity(path) in made,
        )
        whole = True
        fields = _fields(session, own, answer, time.perf_counter() - done)
        return Written(with_warnings(fields, noted), answer)
    finally:
        if exchange is not None and not whole:
            exchange.end("the save has failed", operation.alive)
            session.link.drop()
        engine.close(committed=whole)


def _join(session: Session, engine: _core.RankSave, path: str, name: str) -> None:
    """Open the directory that the coordinator has made: the proof that this rank sees the same file system."""
    try:
        engine.join(path, name)
    except FileNotFoundError as error:
        text = (
            f"save: {path} is not on a file system shared with {session.name(0)}: {session.name(session.group.rank)} "
            "does not see what was made there: give a path that leads to one directory on all hosts"
        )
        raise FileNotFoundError(errno.ENOENT, text, name) from error


def _write(
    engine: _core.RankSave,
    exchange: Exchange | None,
    attention: Attention,
    tick: Callable[[int, int], None] | None,
) -> dict[str, Any]:
    """Write what belongs to this rank, and see all messages off."""

    def each(done: int, total: int) -> None:
        attention(done, total)
        if tick is not None:
            tick(done, total)

    try:
        with range_of("fastckpt.write"):
            return carried(lambda: dict(engine.write(each)), exchange, attention)
    except FileNotFoundError as error:
        # The coordinator has made the files. It removes them when the save has failed, and then tells the others.
        raise LostError(f"the files of the save have gone: {error}") from error


def _combine_created(offers: list[list[Any]]) -> list[Any]:
    """What several ranks say before there is a workspace: their gloo groups, and the first of each kind of shares."""
    links, shares, teams = zip(*offers, strict=True)
    return [Link.combine(links), _first_two(shares), combine_teams(teams)]


def _create(
    engine: _core.RankSave, path: str, offered: list[Any], texts: Texts, made: list[tuple[int, int]]
) -> list[Any]:
    """At the coordinator: the name of the workspace, the gloo group to use, and the teams of ranks that differ.

    The identity of the workspace goes to ``made``. Where ranks differ, nothing is made.
    """
    offer, shares, teams = offered
    if len(shares) > 1:
        raise ValueError(
            f"save: {path}: ranks {shares[0][0]} and {shares[1][0]} would lay out its files differently: give the same "
            "shard_size=, the same FASTCKPT_BLOCK_SIZE and the same version of fastckpt to all ranks"
        )
    engine.check(*texts)
    differing = teams_that_differ(teams)
    if differing:
        return ["", "", differing]
    name = engine.create(path)
    made += filter(None, [_identity(Path(path).with_name(name))])
    return [name, Link.agree(offer), []]


def _identity(path: str | Path) -> tuple[int, int] | None:
    """Which directory a path names: a rename keeps it. None where there is none."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _nothing(_: list[Any]) -> None:
    """Some rounds only say that all are there."""


def _fields(session: Session, own: dict[str, Any], whole: Mapping[str, Any], commit: float) -> dict[str, Any]:
    """What the report of this rank is made of."""
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
    """What of a rank's report is added up over the ranks."""
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
    """What several ranks did together: bytes add up, seconds pass at the same time, and the first says the engine."""
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
    """The outcomes of a rank and of those below it as one."""
    lost = first_lost(outcomes)
    if lost:
        return lost
    return {
        "pieces": share.merge([outcome["pieces"] for outcome in outcomes]),
        "saved": add_up([outcome["saved"] for outcome in outcomes]),
    }


def _commit(
    engine: _core.RankSave, outcome: dict[str, Any], texts: Texts, tick: Callable[[int, int], None]
) -> Mapping[str, Any]:
    """At the coordinator, once all ranks have written: seal and publish."""
    raise_lost(outcome)
    with range_of("fastckpt.commit"):
        return engine.commit(outcome["pieces"], *texts, outcome["saved"], tick)
