"""Reuse of an earlier checkpoint by a save of many ranks: the rounds ``base`` and ``compared``.

The coordinator opens the base, and sends its manifest to the others. Each rank sums its part, and the sums are combined
on their way up: 24 bytes for each tensor, and 16 for each block that several ranks have parts of. The coordinator links
the unchanged files, and all ranks lay out the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._tensors.ranges import range_of

from .attention import Attention
from .exchange import Link, LostError, first_lost, lost_by, passed_on, raise_lost

if TYPE_CHECKING:
    from .peers import Operation
    from .session import Session


def take_over(
    session: Session, operation: Operation, path: str, base: str, earlier: _core.RankBase, timeout: float
) -> _core.Share | None:
    """Compare with the base, and link the unchanged files. Every rank calls it.

    Problems with the base become warnings in the report, and more is written.

    Args:
        session: the process group.
        operation: the operation, in its body.
        path: the checkpoint's directory, absolute.
        base: the directory of the earlier checkpoint, on rank 0.
        earlier: the base on this rank, made from the share that was laid out without a base.
        timeout: the operation's timeout, in seconds.

    Returns:
        The layout of the files that are not linked; None if the base is unusable.

    Raises:
        RanksError: another rank failed, or does not answer.
        Exception: this rank failed.
    """
    try:
        with range_of("fastckpt.compare"):
            return _share(session, operation, path, base, earlier, timeout)
    except BaseException:
        # The broadcast may be incomplete, here or on another rank.
        session.link.drop()
        raise


def _share(
    session: Session, operation: Operation, path: str, base: str, earlier: _core.RankBase, timeout: float
) -> _core.Share | None:
    """The rounds of the reuse."""
    rank = session.group.rank
    attention = Attention(operation, timeout)
    opened: list[bytes] = []

    def decide(offered: list[Any]) -> list[Any] | None:
        hosts, offer = offered
        manifest = earlier.open(base)
        if manifest is None:
            return None
        opened.append(manifest)
        # On one host there may be nothing else to send.
        name = "" if len(hosts) == 1 else Link.agree([True, offer[1]])
        return [name, len(manifest) if name else manifest]

    answer = operation.round(
        "base", [[session.group.host], session.link.offer(needed=True)], combine=_combine_hosts, decide=decide
    )
    if answer is None:
        return None
    name, manifest = answer
    found: dict[str, Any]
    try:
        group = session.link.meet(name, timeout, attention.meanwhile)
        if group is not None:
            manifest = passed_on(group, opened[0] if opened else None, manifest, attention.limit, attention.meanwhile)
        if rank:
            earlier.know(base, manifest)
        found = {"sums": earlier.compare(lambda *_: attention.meanwhile())}
    except LostError as error:
        found = lost_by(session.name(rank), error)
    told = operation.round(
        "compared", found, combine=_combine_sums, decide=lambda found: _take(found, path, earlier, operation)
    )
    if rank:
        earlier.follow(told)
    return earlier.share()


def _combine_hosts(offers: list[list[Any]]) -> list[Any]:
    """Combine offers: up to two hosts, and the gloo group."""
    return [sorted({host for hosts, _ in offers for host in hosts})[:2], Link.combine([offer for _, offer in offers])]


def _combine_sums(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the sums of a rank and of those below it."""
    return first_lost(found) or {"sums": _core.RankBase.merge([one["sums"] for one in found])}


def _take(found: dict[str, Any], path: str, earlier: _core.RankBase, operation: Operation) -> bytes:
    """At the coordinator, once all have compared: link the unchanged files."""
    raise_lost(found)
    return earlier.take(path, found["sums"], lambda *_: operation.alive())
