"""Ranks of one host read each other's memory: a rank writes bytes of another to its file without a message.

Each rank puts its process, and the address of a random token, into the store of the gloo group. A pair needs no
messages if each has read the token of the other. Containers that do not see each other's processes, and systems that
forbid it (``process_vm_readv``), fail this test and use the network.
"""

from __future__ import annotations

import json
import os
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt import _core
from fastckpt._cgroups import local_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Swap = Callable[[Mapping[int, bytes], Mapping[int, int]], dict[int, bytes]]

#: In a group of up to this many ranks, each rank asks for the processes of all.
_FEW = 32
#: Bytes of an address.
_ADDRESS = 8


class Neighbours(NamedTuple):
    """The other ranks of a rank's host that may read its memory, and whose memory it may read.

    Attributes:
        processes: the process of each of these ranks, by rank.
        why: why other ranks of the host are left out; empty if none are.
    """

    processes: Mapping[int, int]
    why: str


class Shared(NamedTuple):
    """The reads of ranks of one host in each other's memory.

    Attributes:
        readers: the ranks that read this rank's memory.
        read: the ranks whose memory this rank reads.
        nbytes: the bytes that this rank reads there.
        why: why bytes of other ranks of its host are sent as messages; empty if none are.
    """

    readers: list[int]
    read: list[int]
    nbytes: int
    why: str


def neighbours(rank: int, ranks: tuple[int, ...], host: str, store: Any) -> Neighbours:
    """Find out which ranks can read each other's memory.

    Args:
        rank: this rank of the gloo group.
        ranks: the rank of each member in the default group.
        host: the name of this rank's host.
        store: the store of the gloo group; all ranks call this at about the same time.

    Raises:
        RuntimeError: a rank has not arrived.
    """
    near = _near(rank, ranks)
    if not near:
        return Neighbours({}, "")
    token = None if os.environ.get("FASTCKPT_CMA") == "0" else _core.process_token()
    place, own = token or (0, b"")
    store.set(f"process/{rank}", json.dumps([host, near, os.getpid(), place, list(own)]))
    found, whys = {}, []
    for other, said in zip(near, store.multi_get([f"process/{other}" for other in near]), strict=True):
        there, theirs, process, place, content = json.loads(said)
        if there == host and rank in theirs:
            why = _refusal(process, place, bytes(content)) if own and content else "FASTCKPT_CMA=0"
            if why:
                whys.append(f"rank {other}: {why}")
            else:
                found[other] = process
    store.set(f"reads/{rank}", json.dumps(list(found)))
    both = {}
    for other, said in zip(near, store.multi_get([f"reads/{other}" for other in near]), strict=True):
        if other in found and rank in json.loads(said):
            both[other] = found[other]
        elif other in found:
            whys.append(f"rank {other} cannot read the memory of this rank")
    return Neighbours(both, whys[0] if whys else "")


def share(engine: _core.RankSave, near: Neighbours, swap: Swap) -> Shared:
    """Arrange that bytes between this rank and others are read from memory where possible.

    Args:
        engine: the save of this rank, before its first message.
        near: the result of :func:`neighbours`.
        swap: a function that swaps bytes with ranks, made of :func:`.exchange.swapped`.
    """
    tables = {mate: (array("Q", own), count) for mate, own, count in engine.addresses(list(near.processes))}
    sent = {mate: own.tobytes() for mate, (own, _) in tables.items() if own}
    found = swap(sent, {mate: _ADDRESS * count for mate, (_, count) in tables.items() if count})
    readers = [mate for mate, (own, _) in tables.items() if own and all(own)]
    given = {mate: list(array("Q", content)) for mate, content in found.items()}
    read = {mate: their for mate, their in given.items() if all(their)}
    nbytes = engine.share(set(readers), [(mate, near.processes[mate], their) for mate, their in read.items()])
    elsewhere = next(
        (f"rank {mate}: not all that it gives is in host memory" for mate in given if mate not in read), ""
    )
    return Shared(readers, list(read), nbytes, near.why or elsewhere)


def _refusal(process: int, place: int, token: bytes) -> str:
    """Why the memory of a process cannot be read; empty if it can."""
    try:
        return "" if _core.reads_process(process, place, token) else "it is in another container"
    except OSError as error:
        return f"{error.strerror} (process_vm_readv)"


def _near(rank: int, ranks: tuple[int, ...]) -> list[int]:
    """The ranks that may be on this host: all if they are few, or those that launchers place there."""
    local = local_ranks()
    if len(ranks) <= _FEW:
        local = None
    elif local is None:
        return []
    own = ranks[rank]
    return [
        other for other, each in enumerate(ranks) if other != rank and (local is None or each // local == own // local)
    ]
