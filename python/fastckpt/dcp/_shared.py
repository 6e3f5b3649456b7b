"""A load of several ranks: each byte is read from the storage once, by one rank, which passes it on.

Where all ranks are on one host, the page cache does that.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt import _core
from fastckpt._api.build_report import with_warnings
from fastckpt._ranks.attention import Attention
from fastckpt._ranks.exchange import Exchange, Link, LostError, carried, lost_by
from fastckpt._ranks.load import combine_pieces, compare_pieces
from fastckpt._ranks.session import session
from fastckpt.exceptions import ReplacedCheckpointError

from ._together import gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastckpt._api.destinations import Targets
    from fastckpt._ranks.peers import Operation
    from fastckpt._ranks.session import Session
    from fastckpt._tensors.movers import Range

    from ._fill import Request

_CACHED = frozenset({"auto", "buffered"})


class Asked(NamedTuple):
    """What one rank reads, and how.

    Attributes:
        reader: the checkpoint.
        path: its directory.
        requests: the boxes.
        targets: take the bytes of those without an address, by their numbers.
        verify: compare them with their checksums.
        io: the engine.
        threads: how many read, or None.
        tick: called with bytes.
    """

    reader: _core.Reader
    path: str
    requests: Sequence[Request]
    targets: Targets
    verify: bool
    io: str
    threads: int | None
    tick: Callable[[int, int], None]

    @property
    def drain(self) -> Callable[[Sequence[Range]], None] | None:
        """The core's callback, where there are such."""
        return self.targets.drain if self.targets.movers else None


def read_alone(asked: Asked, io: str | None = None) -> dict[str, Any]:
    """Read boxes, whatever other ranks do; the core's report."""
    with asked.targets.lent() as staging:
        report = asked.reader.read(
            [_core.ReadRequest(*request) for request in asked.requests],
            verify=asked.verify,
            io=io or asked.io,
            threads=asked.threads,
            drain=asked.drain,
            tick=asked.tick,
            staging=staging.core,
        )
        return with_warnings(report, staging.warnings)


def read_together(asked: Callable[[], Asked], path: str, group: Any, timeout: float, label: str) -> dict[str, Any]:
    """Read boxes with the other ranks: every rank calls it.

    Args:
        asked: makes out what this rank reads; what it raises reaches the other ranks.
        path: the checkpoint's directory.
        group: the process group.
        timeout: seconds of silence that are waited for.
        label: of this load, the same on all ranks.

    Returns:
        What a report of this rank is made of.

    Raises:
        RanksError: another rank failed, or does not answer.
        ReplacedCheckpointError: ranks have opened different checkpoints.
    """
    here = session("dcp.load", group)
    with here.peers.operation("load", path, timeout, label) as operation:
        mine = asked()
        manifest = hashlib.sha256(mine.reader.manifest()).hexdigest()
        cached, name = operation.round(
            "arrive",
            [[here.group.host], mine.io in _CACHED, [manifest], here.link.offer(needed=True)],
            combine=_combine,
            decide=lambda arrived: _decide(path, arrived),
        )
        attention = Attention(operation, timeout)
        more = {"rank": here.group.rank, "ranks": here.group.size, "missing": (), "unexpected": ()}
        if cached:
            own = read_alone(mine, "buffered")
            operation.round("done", None, combine=lambda _: None)
            return own | more | {"bytes_storage": own["bytes"], "bytes_peers": 0, "bytes_sent": 0}
        with mine.targets.lent() as staging:
            own = _by_messages(here, operation, mine, name, staging.core, attention, timeout)
            return with_warnings(own, staging.warnings) | more


def _combine(arrivals: list[Any]) -> list[Any]:
    """Up to two hosts, whether all may read through the page cache, up to two manifests, and the gloo groups."""
    hosts = sorted({host for hosts, _, _, _ in arrivals for host in hosts})[:2]
    manifests = sorted({one for _, _, manifests, _ in arrivals for one in manifests})[:2]
    offers = Link.combine([offer for *_, offer in arrivals])
    return [hosts, all(may for _, may, _, _ in arrivals), manifests, offers]


def _decide(path: str, arrived: list[Any]) -> list[Any]:
    hosts, may, manifests, offer = arrived
    if len(manifests) > 1:
        raise ReplacedCheckpointError(f"load: {path}: another save replaced it while the ranks opened it: load again")
    cached = may and len(hosts) == 1
    return [cached, "" if cached else Link.agree(offer)]


def _by_messages(
    here: Session,
    operation: Operation,
    asked: Asked,
    name: str,
    staging: _core.Memory | None,
    attention: Attention,
    timeout: float,
) -> dict[str, Any]:
    rank = here.group.rank
    whole = False
    exchange: Exchange | None = None
    engine: _core.RankLoad | None = None
    try:
        group = here.link.meet(name, timeout, attention.meanwhile)
        boxes = [[request.tensor, [[start, stop] for start, stop, _ in request.box]] for request in asked.requests]
        answer = operation.round("demands", [[rank, boxes]], combine=gathered, decide=_unite)
        wanted = _wanted(json.loads(answer))
        share = _core.Share.to_load(asked.reader, *wanted, here.group.size, apart=True)
        # A rank's boxes of a tensor are its parts, in the order in which it asks for them.
        counts: Counter[int] = Counter()
        requests = []
        for request in asked.requests:
            part = counts[request.tensor]
            counts[request.tensor] += 1
            requests.append((request.tensor, part, request.address, request.capacity, request.strides))
        engine = _core.RankLoad(
            share,
            rank,
            asked.reader,
            requests,
            asked.drain,
            verify=asked.verify,
            io=asked.io,
            threads=asked.threads,
            staging=staging,
        )
        running = engine
        if group is not None:
            exchange = attention.exchange = Exchange(group, engine.mail, here.name, attention.limit)
        own: dict[str, Any] = {}
        outcome: dict[str, Any] = {}

        def each(done: int, total: int) -> None:
            attention(done)
            asked.tick(done, total)

        try:
            own = carried(lambda: dict(running.read(each)), exchange, attention)
            outcome = {"pieces": own.pop("pieces")}
        except LostError as error:
            # The cause is another rank, which says so itself; where none does, this is the cause.
            outcome = lost_by(here.name(rank), error)
        operation.round(
            "done",
            outcome,
            combine=lambda outcomes: combine_pieces(share, outcomes),
            decide=lambda outcome: compare_pieces(share, asked.reader, outcome),
        )
        whole = True
    finally:
        if exchange is not None and not whole:
            exchange.end("the load has failed", operation.alive)
        if not whole:
            here.link.drop()
        if engine is not None:
            engine.close()
    storage, peers, sent = (own.pop(key) for key in ("storage", "peers", "sent"))
    return own | {"bytes_storage": storage, "bytes_peers": peers, "bytes_sent": sent}


def _unite(demands: list[Any]) -> str:
    """What all ranks want: for each tensor, ranks and boxes."""
    found: dict[int, list[Any]] = {}
    for rank, boxes in demands:
        for tensor, box in boxes:
            found.setdefault(tensor, []).append([rank, box])
    return json.dumps(sorted(found.items()), separators=(",", ":"))


def _wanted(united: list[Any]) -> tuple[list[tuple[int, list[int]]], list[_core.Spread]]:
    """What ``Share.to_load`` takes: tensors that are cut alike have one spread."""
    spreads: dict[Any, int] = {}
    wanted = []
    for tensor, holders in united:
        boxes = tuple((holder, tuple((start, stop) for start, stop in box)) for holder, box in holders)
        wanted.append((tensor, [spreads.setdefault(boxes, len(spreads))]))
    return wanted, [_core.Spread.boxes(boxes) for boxes in spreads]
