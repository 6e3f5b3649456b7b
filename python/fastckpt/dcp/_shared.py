"""A load of several ranks: each byte is read from the storage once, by one rank, which sends it to the others.

If all ranks are on one host, they read through the page cache instead, which has the same effect.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._ranks.attention import Attention
from fastckpt._ranks.exchange import Link
from fastckpt._ranks.load import Reading, apart, done, through_messages
from fastckpt.exceptions import ReplacedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastckpt._ranks.peers import Operation
    from fastckpt._ranks.session import Session

    from ._fill import Request

_CACHED = frozenset({"auto", "buffered"})


def read_together(
    here: Session,
    operation: Operation,
    path: str,
    timeout: float,
    asked: Callable[[Attention], tuple[Reading, Sequence[Request]]],
) -> dict[str, Any]:
    """Read boxes with the other ranks: every rank calls it.

    Args:
        here: the process group.
        operation: the common operation of the ranks, which has been entered.
        path: the checkpoint's directory.
        timeout: the most seconds of silence of a rank.
        asked: computes the reads of this rank.

    Returns:
        The fields of this rank's report.

    Raises:
        RanksError: another rank failed, or does not answer.
        ReplacedCheckpointError: ranks have opened different checkpoints.
    """
    attention = Attention(operation, timeout)
    reading, requests = asked(attention)
    manifest = hashlib.sha256(reading.reader.manifest()).hexdigest()
    cached, name, verify, grain, team = operation.round(
        "arrive",
        [[here.group.host], reading.io.engine in _CACHED, reading.io.verify, [manifest], here.link.offer(needed=True)],
        combine=_combine,
        decide=lambda arrived: _decide(path, arrived),
    )
    # One rank may read for another, whose bytes must be verified.
    reading = reading._replace(io=replace(reading.io, verify=verify))
    share: _core.Share | None = None
    outcome: dict[str, Any] = {}
    whole = False
    try:
        if cached:
            own = apart(reading, [_core.ReadRequest(*request) for request in requests], cached=True)
        else:
            group = here.link.meet(name, timeout, attention.meanwhile)
            asks = [[request.tensor, [[start, stop] for start, stop, _ in request.box]] for request in requests]
            answer = operation.round("demands", [[here.group.rank, asks]], combine=gathered, decide=_unite)
            wanted, spreads = _wanted(json.loads(answer))
            share = _core.Share.to_load(
                reading.reader, wanted, spreads, here.group.size, apart=True, grain=grain, team=team
            )
            # A rank's boxes of a tensor are its parts, in the order of its requests.
            parts: Counter[int] = Counter()
            mine = []
            for tensor, address, capacity, _, strides in requests:
                mine.append((tensor, parts[tensor], address, capacity, strides))
                parts[tensor] += 1
            own, outcome = through_messages(here, group, reading, share, mine, reading.targets.drain)
        done(operation, reading.reader, share, outcome)
        whole = True
    finally:
        if not whole:
            here.link.drop()
    return own | {"rank": here.group.rank, "ranks": here.group.size}


def gathered(lists: list[list[Any]]) -> list[Any]:
    """Merge lists of pairs of rank and value, in the order of the ranks."""
    return sorted((one for each in lists for one in each), key=lambda one: one[0])


def _combine(arrivals: list[Any]) -> list[Any]:
    """Combine: up to two hosts, whether all may read cached pages, whether any verifies, two manifests, gloo groups."""
    hosts, may, checks, manifests, offers = zip(*arrivals, strict=True)
    two = [sorted(set(chain.from_iterable(each)))[:2] for each in (hosts, manifests)]
    return [two[0], all(may), any(checks), two[1], Link.combine(offers)]


def _decide(path: str, arrived: list[Any]) -> list[Any]:
    hosts, may, verify, manifests, offer = arrived
    if len(manifests) > 1:
        raise ReplacedCheckpointError(f"load: {path}: another save replaced it while the ranks opened it: load again")
    cached = may and len(hosts) == 1
    return [cached, "" if cached else Link.agree(offer), verify, *_core.aggregation(path, mmap.PAGESIZE)]


def _unite(demands: list[Any]) -> str:
    """The requests of all ranks: for each tensor, ranks and boxes."""
    found: dict[int, list[Any]] = {}
    for rank, boxes in demands:
        for tensor, box in boxes:
            found.setdefault(tensor, []).append([rank, box])
    return json.dumps(sorted(found.items()), separators=(",", ":"))


def _wanted(united: list[Any]) -> tuple[list[tuple[int, list[int]]], list[_core.Spread]]:
    """The arguments of ``Share.to_load``: tensors that are cut in the same way have one spread."""
    spreads: dict[Any, int] = {}
    wanted = []
    for tensor, holders in united:
        boxes = tuple((holder, tuple((start, stop) for start, stop in box)) for holder, box in holders)
        wanted.append((tensor, [spreads.setdefault(boxes, len(spreads))]))
    return wanted, [_core.Spread.boxes(boxes) for boxes in spreads]
