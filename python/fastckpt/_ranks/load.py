"""A checkpoint read by all ranks of a process group: each byte once, by one rank, which passes it on.

Where all ranks are on one host, and the checkpoint is in its page cache, each rank reads what it wants from there: that
takes half the time of the processor that messages take. From storage they read it once, with direct I/O, and pass it
on: to read it through the page cache together is slower, for the ranks wait for each other's pages.

From an object store each rank reads what it wants, wherever it runs: a store serves many readers at a time, and one
that read for others would make its own network the limit of all.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt import _core
from fastckpt._api.build_report import with_warnings
from fastckpt._api.progress import ticker
from fastckpt._paths import is_url
from fastckpt._stores.reader import open_reader
from fastckpt._tensors.ranges import range_of

from .agreement import core_spread
from .attention import Attention
from .boxes import Boxed
from .demands import Wanting, combine_wanted, demands
from .exchange import Exchange, Link, LostError, carried, first_lost, lost_by, passed_on, raise_lost
from .offers import combine_offers
from .residency import is_resident

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastckpt._api.prepare import Wishes

    from .calls import Call
    from .demands import Demands, Shared
    from .peers import Operation
    from .torch_distributed import DataGroup

#: The engines with which ranks of one host read through its page cache: where it has the checkpoint, and always.
_CACHED = {"auto": 1, "buffered": 2}


class Read(NamedTuple):
    """What was done.

    Attributes:
        state: the state, with what is in ``into`` filled.
        fields: what :class:`fastckpt._api.rank_reports.RankLoadReport` is made of.
    """

    state: Any
    fields: dict[str, Any]


class Opened(NamedTuple):
    """A checkpoint that all ranks have opened.

    Attributes:
        reader: the checkpoint.
        apart: whether each rank reads what it wants: through the page cache of the one host that they are on, or from
            an object store.
        group: what bytes travel in; None where they do not.
    """

    reader: _core.Reader
    apart: bool
    group: DataGroup | None


def load_wishes(call: Call, operation: Operation, wishes: Wishes, *, stacklevel: int) -> Read:
    """Load what this rank wants, while the others load what they want: all rounds of a load.

    Raises:
        RanksError: another rank failed, or does not answer.
        Exception: this rank failed.
    """
    session = call.session
    attention = Attention(operation, call.timeout)
    whole = False
    try:
        try:
            opened = open_checkpoint(call, operation, attention, caches=_CACHED.get(wishes.io, 0))
        except LostError as error:
            _want(operation, lost_by(session.name(session.group.rank), error), None)
            raise
        wanted = demands(
            opened.reader, call.path, wishes, session.group.rank, session.group.ranks, stacklevel=stacklevel + 1
        )
        with ticker("load", call.path, shown=wishes.progress) as tick:
            fields, unexpected = _read(call, operation, opened, wanted, attention, tick)
        whole = True
    finally:
        if not whole:
            session.link.drop()
    state = wanted.build()
    more = {"missing": wanted.missing, "unexpected": unexpected}
    return Read(state, fields | more | {"rank": session.group.rank, "ranks": session.group.size})


def open_checkpoint(call: Call, operation: Operation, attention: Attention, *, caches: int) -> Opened:
    """Open the checkpoint on all ranks: the round ``arrive``. One reads the manifest, and passes it on.

    Args:
        call: the call.
        operation: its operation.
        attention: that of the operation.
        caches: whether this rank reads through the page cache: 0 for no, 1 if that has the checkpoint, 2 for yes.
    """
    session = call.session
    readers: list[_core.Reader] = []

    def decide(arrived: list[Any]) -> list[Any]:
        hosts, least, offer = arrived
        reader = open_reader("load", call.path)
        readers.append(reader)
        one = len(hosts) == 1
        apart = is_url(call.path) or (one and (least > 1 or (least > 0 and is_resident(call.path, reader))))
        manifest = reader.manifest()
        # On one host nothing else may have to travel.
        name = "" if (apart and one) or session.group.size == 1 else Link.agree([True, offer[1]])
        return [apart, name, len(manifest) if name else manifest]

    apart, name, manifest = operation.round(
        "arrive",
        [[session.group.host], caches, session.link.offer(needed=True)],
        combine=_combine_arrivals,
        decide=decide,
    )
    group = session.link.meet(name, call.timeout, attention.meanwhile)
    if group is not None:
        manifest = passed_on(group, readers[0].manifest() if readers else None, manifest, attention)
    reader = readers[0] if readers else open_reader("load", call.path, manifest=manifest)
    return Opened(reader, apart, group)


def _combine_arrivals(arrivals: list[Any]) -> list[Any]:
    """What several ranks say: up to two hosts, the least that one makes of the page cache, and the gloo group."""
    hosts = sorted({host for hosts, _, _ in arrivals for host in hosts})[:2]
    return [hosts, min(least for _, least, _ in arrivals), Link.combine([offer for _, _, offer in arrivals])]


def _read(
    call: Call,
    operation: Operation,
    opened: Opened,
    wanted: Demands,
    attention: Attention,
    tick: Callable[[int, int], None],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Agree on what is wanted, and bring it; what the report is made of, and the names of what nobody wants."""
    agreement = Wanting(wanted)
    share: _core.Share | None = None
    outcome: dict[str, Any]
    verdict = _want(operation, {"wanted": agreement.arrival()}, agreement)
    unexpected = wanted.names_of(verdict[1])

    def each(done: int, total: int) -> None:
        attention(done)
        tick(done, total)

    with wanted.targets.lent() as staging:
        if opened.apart or call.session.group.size == 1:
            own, outcome = _apart(call, opened, wanted, staging.core, each), {}
        else:
            answer = None
            if agreement.is_open(verdict):
                offer = agreement.offer(verdict)
                answer = operation.round("demands", offer, combine=combine_offers, decide=agreement.unite)
            agreed = agreement.settle(verdict, answer)
            share = _core.Share.to_load(
                opened.reader,
                agreed.wanted,
                [core_spread(each) for each in agreed.spreads],
                call.session.group.size,
                apart=True,
            )
            own, outcome = _through_messages(call, opened, wanted, (share, agreed, staging.core), attention, each)
        own = with_warnings(own, staging.warnings)
    operation.round(
        "done",
        outcome,
        combine=lambda outcomes: combine_pieces(share, outcomes),
        decide=lambda outcome: compare_pieces(share, opened.reader, outcome),
    )
    return own, unexpected


def _want(operation: Operation, value: dict[str, Any], agreement: Wanting | None) -> Any:
    """The round ``wanted``. A rank that could not be passed the manifest says that: the cause is another one."""

    def combine(values: list[dict[str, Any]]) -> dict[str, Any]:
        lost = first_lost(values)
        return lost or {"wanted": combine_wanted([each["wanted"] for each in values])}

    def decide(combined: dict[str, Any]) -> Any:
        raise_lost(combined)
        assert agreement is not None  # noqa: S101 - who has none has lost
        return agreement.decide(combined["wanted"])

    return operation.round("wanted", value, combine=combine, decide=decide)


def combine_pieces(share: _core.Share | None, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """What several ranks say at the end: that an exchange broke off, or checksums of their parts of shared blocks."""
    lost = first_lost(outcomes)
    if lost or share is None:
        return lost
    return {"pieces": share.merge([outcome["pieces"] for outcome in outcomes])}


def compare_pieces(share: _core.Share | None, reader: _core.Reader, outcome: dict[str, Any]) -> None:
    """At the coordinator, once all ranks have read: are those blocks what was written?"""
    raise_lost(outcome)
    if share is not None:
        share.compare(reader, outcome["pieces"])


def _apart(
    call: Call,
    opened: Opened,
    wanted: Demands,
    staging: _core.Memory | None,
    tick: Callable[[int, int], None],
) -> dict[str, Any]:
    """Read what this rank wants, as if it were alone; what another rank of the host has read is in the page cache."""
    wishes, targets, group = wanted.prepared.wishes, wanted.targets, call.session.group
    boxed = Boxed(targets.demands, targets.stored, wanted.spreads, group.rank, targets.drain)
    alone = group.size == 1 or is_url(call.path)
    before = _storage_reads()
    with range_of("fastckpt.read"):
        own: dict[str, Any] = dict(
            opened.reader.read(
                boxed.requests,
                verify=wishes.verify,
                io=wishes.io if alone else "buffered",
                threads=wishes.threads,
                drain=boxed.drain,
                tick=tick,
                staging=staging,
            )
        )
        boxed.finish()
    after = _storage_reads()
    read = own["bytes"] if alone or before is None or after is None else after - before
    return own | {"bytes_storage": read, "bytes_peers": 0, "bytes_sent": 0}


def _storage_reads() -> int | None:
    """Bytes that this process has made its storage read so far; None where the system does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(": ")
            if name == "read_bytes":
                return int(value)
    return None


def _through_messages(
    call: Call,
    opened: Opened,
    wanted: Demands,
    agreed: tuple[_core.Share, Shared, _core.Memory | None],
    attention: Attention,
    tick: Callable[[int, int], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what falls to this rank, keep its own, and pass on the rest; what it did, and what it tells the others."""
    session, wishes = call.session, wanted.prepared.wishes
    group = session.group
    share, shared, staging = agreed
    engine = _core.RankLoad(
        share,
        group.rank,
        opened.reader,
        [
            (shared.wanted[at][0], part, address, nbytes, strides)
            for at, part, address, nbytes, strides in shared.requests
        ],
        shared.drain if wanted.targets.movers else None,
        verify=wishes.verify,
        io=wishes.io,
        threads=wishes.threads,
        staging=staging,
    )
    exchange = None
    try:
        if opened.group is not None:
            exchange = attention.exchange = Exchange(opened.group, engine.mail, session.name, attention.limit)
        try:
            with range_of("fastckpt.read"):
                own = carried(lambda: dict(engine.read(tick)), exchange, attention)
        except LostError as error:
            # The cause is another rank, which says so itself; where none does, this is the cause.
            return {}, lost_by(session.name(group.rank), error)
        storage, peers, sent, pieces = (own.pop(name) for name in ("storage", "peers", "sent", "pieces"))
        return own | {"bytes_storage": storage, "bytes_peers": peers, "bytes_sent": sent}, {"pieces": pieces}
    finally:
        if exchange is not None:
            exchange.end("the load has failed", attention.operation.alive)
        engine.close()
