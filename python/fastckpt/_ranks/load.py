"""All ranks of a process group read a checkpoint: each byte is usually read by one rank, which sends it to the others.

If all ranks are on one host, and the checkpoint is in its page cache, each rank reads its own part from there, which
takes half the CPU time of messages. From storage they read it once, with direct I/O, and send the bytes to each other:
reading through the page cache together is slower, because the ranks wait for each other's pages.

From an object store each rank reads its own part, on any number of hosts: a store serves many readers at once, and the
network of a rank that reads for others would limit all.
"""

from __future__ import annotations

import mmap
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt import _core
from fastckpt._api import in_flight
from fastckpt._api.build_report import build_report, with_warnings
from fastckpt._api.destinations import read_targets
from fastckpt._api.io import give_report, most_staging, refuse_mmap
from fastckpt._api.load import Loaded
from fastckpt._api.outcome import Attempt, conclude
from fastckpt._api.progress import ticker
from fastckpt._api.reports import LoadReport
from fastckpt._paths import AnyPath, is_url
from fastckpt._stores.reader import open_reader
from fastckpt._tensors.ranges import range_of

from .agreement import core_spread
from .attention import Attention
from .boxes import Boxed
from .calls import Call
from .demands import Wanting, combine_wanted, demands
from .exchange import Exchange, Link, LostError, carried, first_lost, lost_by, passed_on, raise_lost
from .offers import combine_offers
from .ranks import check_ranks
from .residency import is_resident
from .session import session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastckpt._api.destinations import Drain, Targets
    from fastckpt._api.io import IO
    from fastckpt._api.load_settings import LoadSettings

    from .demands import Demands
    from .peers import Operation
    from .session import Session
    from .torch_distributed import DataGroup

#: Engines with which ranks of a host read through its page cache: 1 only if that cache has the checkpoint, 2 always.
_CACHED = {"auto": 1, "buffered": 2}


class Opened(NamedTuple):
    """A checkpoint that all ranks have opened.

    Attributes:
        reader: the checkpoint.
        apart: whether each rank reads its own part: through the page cache of their common host, or from an object
            store.
        group: the group for the bytes; None if no bytes are sent.
        verify: whether any rank verifies checksums; if so, each rank compares what it reads.
        grain: bytes of a grain, if bytes are sent (``_core.Share.to_load``).
        team: the ranks of a team, if bytes are sent.
    """

    reader: _core.Reader
    apart: bool
    group: DataGroup | None
    verify: bool
    grain: int
    team: int


def load_on_ranks(path: AnyPath, into: Any, ranks: Any, settings: Callable[[], LoadSettings]) -> Loaded:
    """:func:`fastckpt.distributed.load`.

    Args:
        path: see :func:`fastckpt.distributed.load`.
        into: see :func:`fastckpt.distributed.load`.
        ranks: see :func:`fastckpt.distributed.load`.
        settings: a function that returns the settings. All ranks learn of its errors.
    """
    began = time.perf_counter()
    together = check_ranks("load", ranks)
    call = Call("load", session("load", together.process_group), path, together.timeout)
    with range_of("fastckpt.distributed.load"), Attempt("load", call.path), call.operation as operation:
        call.check()
        checked = settings()
        refuse_mmap("load", checked.io)
        in_flight.wait_for_paths(call.path)
        state, fields, reader = _load(call, operation, checked, into)
    report = conclude(build_report(LoadReport, call.path, began, fields))
    give_report(checked.io, report)
    return Loaded(state, report, reader)


def _load(
    call: Call, operation: Operation, settings: LoadSettings, into: Any
) -> tuple[Any, dict[str, Any], _core.Reader]:
    """Load the request of this rank, while the others load theirs: all rounds of a load.

    Returns:
        The state, the fields of the report, and the checkpoint.

    Raises:
        RanksError: another rank failed, or does not answer.
        Exception: this rank failed.
    """
    session = call.session
    attention = Attention(operation, call.timeout)
    whole = False
    try:
        try:
            opened = open_checkpoint(call, operation, attention, settings.io)
        except LostError as error:
            _want(operation, lost_by(session.name(session.group.rank), error), None)
            raise
        wanted = demands(opened.reader, call.path, settings, into, session.group.rank, session.group.ranks)
        with ticker("load", call.path, shown=settings.io.progress) as tick:
            fields, unexpected = _read(call, operation, opened, wanted, attention, tick)
        whole = True
    finally:
        if not whole:
            session.link.drop()
    state = wanted.build()
    more = {"missing": wanted.missing, "unexpected": unexpected}
    fields |= more | {"rank": session.group.rank, "ranks": session.group.size}
    return state, fields, opened.reader


def open_checkpoint(call: Call, operation: Operation, attention: Attention, io: IO) -> Opened:
    """Open the checkpoint on all ranks: the round ``arrive``. One rank reads the manifest and sends it to the others.

    Args:
        call: the call.
        operation: the operation of the call.
        attention: the attention of the operation.
        io: how this rank's bytes move.
    """
    session = call.session
    readers: list[_core.Reader] = []

    def decide(arrived: list[Any]) -> list[Any]:
        hosts, least, verify, offer = arrived
        reader = open_reader("load", call.path)
        readers.append(reader)
        one = len(hosts) == 1
        apart = is_url(call.path) or (one and (least > 1 or (least > 0 and is_resident(call.path, reader))))
        manifest = reader.manifest()
        # On one host there may be nothing else to send.
        name = "" if (apart and one) or session.group.size == 1 else Link.agree([True, offer[1]])
        # This is always evaluated: an invalid variable must be an error in every load, or in none.
        teams = (0, 1) if is_url(call.path) else _core.aggregation(call.path, mmap.PAGESIZE)
        return [apart, name, verify, *teams, len(manifest) if name else manifest]

    apart, name, verify, grain, team, manifest = operation.round(
        "arrive",
        [[session.group.host], _CACHED.get(io.engine, 0), io.verify, session.link.offer(needed=True)],
        combine=_combine_arrivals,
        decide=decide,
    )
    group = session.link.meet(name, call.timeout, attention.meanwhile)
    if group is not None:
        manifest = passed_on(
            group, readers[0].manifest() if readers else None, manifest, attention.limit, attention.meanwhile
        )
    reader = readers[0] if readers else open_reader("load", call.path, manifest=manifest)
    return Opened(reader, apart, group, verify, grain, team)


def _combine_arrivals(arrivals: list[Any]) -> list[Any]:
    """Combine arrivals: up to two hosts, the least use of the page cache, any verification, and the gloo group."""
    hosts, caches, checks, offers = zip(*arrivals, strict=True)
    return [sorted({host for each in hosts for host in each})[:2], min(caches), any(checks), Link.combine(offers)]


def _read(
    call: Call,
    operation: Operation,
    opened: Opened,
    wanted: Demands,
    attention: Attention,
    tick: Callable[[int, int], None],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Agree on the parts to load, and load them; returns data for the report, and names that no rank wants."""
    session, settings, targets = call.session, wanted.prepared.settings, wanted.targets
    agreement = Wanting(wanted)
    share: _core.Share | None = None
    outcome: dict[str, Any] = {}
    verdict = _want(operation, {"wanted": agreement.arrival()}, agreement)
    reading = Reading(opened.reader, targets, replace(settings.io, verify=opened.verify), attention, tick)
    if opened.apart or session.group.size == 1:
        boxed = Boxed(targets.demands, targets.stored, wanted.spreads, session.group.rank, targets.drain)
        alone = session.group.size == 1 or is_url(call.path)
        own = apart(reading, boxed.requests, boxed.drain, cached=not alone)
        boxed.finish()
    else:
        answer = None
        if agreement.is_open(verdict):
            offer = agreement.offer(verdict)
            answer = operation.round("demands", offer, combine=combine_offers, decide=agreement.unite)
        agreed = agreement.settle(verdict, answer)
        spreads = [core_spread(each) for each in agreed.spreads]
        share = _core.Share.to_load(
            opened.reader,
            agreed.wanted,
            spreads,
            session.group.size,
            apart=True,
            grain=opened.grain,
            team=opened.team,
        )
        requests = [
            (agreed.wanted[at][0], part, address, nbytes, strides)
            for at, part, address, nbytes, strides in agreed.requests
        ]
        own, outcome = through_messages(session, opened.group, reading, share, requests, agreed.drain)
    done(operation, opened.reader, share, outcome)
    return own, wanted.names_of(verdict[1])


def _want(operation: Operation, value: dict[str, Any], agreement: Wanting | None) -> Any:
    """The round ``wanted``. A rank that did not receive the manifest reports that another rank is the cause."""

    def combine(values: list[dict[str, Any]]) -> dict[str, Any]:
        lost = first_lost(values)
        return lost or {"wanted": combine_wanted([each["wanted"] for each in values])}

    def decide(combined: dict[str, Any]) -> Any:
        raise_lost(combined)
        assert agreement is not None  # noqa: S101 - a rank without an agreement reports a lost exchange
        return agreement.decide(combined["wanted"])

    return operation.round("wanted", value, combine=combine, decide=decide)


class Reading(NamedTuple):
    """How a rank reads.

    Attributes:
        reader: the checkpoint.
        targets: receives the bytes of requests without an address.
        io: how its bytes move.
        attention: watches other ranks meanwhile.
        tick: called with bytes done and bytes in total.
    """

    reader: _core.Reader
    targets: Targets
    io: IO
    attention: Attention
    tick: Callable[[int, int], None]

    def progress(self, done: int, total: int) -> None:
        """The core's callback."""
        self.attention(done)
        self.tick(done, total)


def apart(
    reading: Reading, requests: Sequence[_core.ReadRequest], drain: Drain | None = None, *, cached: bool
) -> dict[str, Any]:
    """Read the request of this rank, as if it were the only one.

    With ``cached``, pages that another rank of the host has read are in the page cache.
    """
    before = _storage_reads()
    with range_of("fastckpt.read"):
        own = read_targets(
            reading.reader,
            reading.targets,
            requests,
            drain,
            io=replace(reading.io, engine="buffered") if cached else reading.io,
            tick=reading.progress,
        )
    after = _storage_reads()
    read = own["bytes"] if not cached or before is None or after is None else after - before
    return {**own, "bytes_storage": read, "bytes_peers": 0, "bytes_sent": 0}


def _storage_reads() -> int | None:
    """Bytes that this process has read from storage so far; None if the system does not report them."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(": ")
            if name == "read_bytes":
                return int(value)
    return None


def through_messages(
    session: Session,
    group: DataGroup | None,
    reading: Reading,
    share: _core.Share,
    requests: Sequence[tuple[int, int, int, int, Sequence[int] | None]],
    drain: Drain,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read this rank's share, and send others what they want; returns its report, and its message to the others.

    Args:
        session: the process group.
        group: the group for the bytes; None if no bytes are sent.
        reading: how this rank reads.
        share: the duties of all ranks.
        requests: tensor, part, address, bytes and strides of each memory of this rank.
        drain: receives the bytes of those without an address.
    """
    attention, rank = reading.attention, session.group.rank
    with reading.targets.lent() as staging:
        engine = _core.RankLoad(
            share,
            rank,
            reading.reader,
            requests,
            drain if reading.targets.movers else None,
            verify=reading.io.verify,
            io=reading.io.engine,
            threads=reading.io.threads,
            most_staging=most_staging(reading.io),
            staging=staging.core,
        )
        exchange = None
        try:
            if group is not None:
                exchange = attention.exchange = Exchange(group, engine.mail, session.name, attention.limit)
            try:
                with range_of("fastckpt.read"):
                    own = carried(lambda: dict(engine.read(reading.progress)), exchange, attention)
            except LostError as error:
                # Another rank is the cause, and reports it itself; if none does, this error is the cause.
                return {}, lost_by(session.name(rank), error)
            storage, peers, sent, pieces = (own.pop(name) for name in ("storage", "peers", "sent", "pieces"))
            more = {"bytes_storage": storage, "bytes_peers": peers, "bytes_sent": sent}
            return with_warnings(own, staging.warnings) | more, {"pieces": pieces}
        finally:
            if exchange is not None:
                exchange.end("the load has failed", attention.operation.alive)
            engine.close()


def done(operation: Operation, reader: _core.Reader, share: _core.Share | None, outcome: dict[str, Any]) -> None:
    """The round ``done``: check that blocks that several ranks have read in parts match their checksums."""

    def combine(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
        lost = first_lost(outcomes)
        if lost or share is None:
            return lost
        return {"pieces": share.merge([outcome["pieces"] for outcome in outcomes])}

    def decide(outcome: dict[str, Any]) -> None:
        raise_lost(outcome)
        if share is not None:
            share.compare(reader, outcome["pieces"])

    operation.round("done", outcome, combine=combine, decide=decide)
