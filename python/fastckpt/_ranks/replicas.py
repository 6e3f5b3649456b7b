"""Copies of the same tensors on several ranks are compared before a byte is written.

Each rank sums its parts (``_core.Replicas``), and one number for all ranks with the same parts is sent with the round
in which the ranks meet at the workspace. Only if two numbers differ, two more rounds determine the different tensors,
and how much of them differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt import _core

from .differences import named
from .offers import ranks_of, runs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .peers import Operation
    from .ranks import Ranks
    from .session import Session

#: Beyond these numbers, tensors are counted, not listed, and the bytes of different ranks are not examined.
_LISTED, _SIDES = 10, 4
#: Bytes of a tensor that ranks send each other to measure the difference.
_SHOWN = 16 << 10
#: The most bytes of a text for the monitor.
_TOLD = 64
_REMEDIES = (
    "find out why copies that should be equal differ (a missing all-reduce, BatchNorm's statistics, a faulty "
    "device), or pass ranks=Ranks(replicas='first') or Ranks(on_difference='warn') to save the copies of "
    "the lowest rank"
)
_NAMES = (
    "tensors of different experts or pipeline stages need separate names (for optimizers, torch's "
    "get_optimizer_state_dict gives them), or pass values that belong to one rank as per_rank= of "
    "fastckpt.distributed.save"
)


class Comparison:
    """The comparison of the parts that this rank and others hold.

    Args:
        engine: the save of this rank, which holds the memory.
        share: the boxes of all ranks.
        ranks: the ``ranks=`` of the call: the ranks that save, and how much they compare.
        seed: the seed of the samples, equal on all ranks, and different for each save.
        sum_of: see ``_core.RankSave.replicas``.
        tick: called meanwhile.
    """

    def __init__(
        self,
        engine: _core.RankSave,
        share: _core.Share,
        ranks: Ranks,
        seed: int,
        sum_of: Callable[[int, int], int | None] | None,
        tick: Callable[[int, int], None],
    ) -> None:
        self.engine = engine
        self.share = share
        self.ranks = ranks
        self.replicas = engine.replicas(ranks.replicas, seed, sum_of, tick)

    def offer(self) -> list[Any]:
        """The message to the coordinator: for each set of ranks with the same parts, its number, size and sum."""
        return [[number, size, [[total, 1]]] for number, size, total in self.replicas.digests()]

    def differing(self, session: Session, operation: Operation, path: str, numbers: list[int]) -> tuple[list[int], str]:
        """The different tensors, and a sentence about them. All ranks call it if some tensors differ.

        Raises:
            ValueError: this rank leads, and a difference is an error.
            RanksError: another rank leads, and a difference is an error.
        """
        cells = {
            f"{tensor} {start} {cell}": {f"{total:x}": [[session.group.rank, session.group.rank + 1]]}
            for tensor, start, cell, total in self.replicas.of_holders(numbers)
        }
        found = operation.round("replicas", cells, combine=_united, decide=_that_differ)
        shown = {
            key: {str(session.group.rank): self.engine.compared(self.replicas, _cell(key), _SHOWN)}
            for key, sides in _listed(found)
            if session.group.rank in [side[0] for side in sides[:_SIDES]]
        }
        text = operation.round(
            "differences", shown, combine=_joined, decide=lambda shown: self._decide(session, path, found, shown)
        )
        tensors = sorted({_cell(key)[0] for key, _ in found})
        if not session.group.rank:
            _core.warn(_in_short([self.share.about(tensor)[0] for tensor in tensors]))
        return tensors, text

    def _decide(self, session: Session, path: str, found: list[list[Any]], shown: dict[str, dict[str, bytes]]) -> str:
        tensors: dict[int, list[list[int]]] = {}
        for key, sides in found:
            known = tensors.setdefault(_cell(key)[0], [])
            known.extend([] for _ in range(len(sides) - len(known)))
            for side, ranks in zip(known, sides, strict=False):
                side.extend(rank for rank in ranks if rank not in side)
        lines, apart = [], False
        for key, sides in _listed(found):
            tensor = _cell(key)[0]
            name, size, groups = self.share.about(tensor)
            whom = tensors[tensor]
            if len(groups) > 1 and not set(groups[0]) & set(groups[1]):
                whom, apart = groups, True
            views = [shown[key][str(side[0])] for side in sides[:_SIDES] if str(side[0]) in shown.get(key, {})]
            lines.append(f"{name}: {', '.join(_held_by(session, ranks) for ranks in whom)}{_measured(views, size)}")
        if len(tensors) > len(lines):
            lines.append(f"and {len(tensors) - len(lines)} more")
        told = "\n  ".join(lines)
        if self.ranks.on_difference == "warn":
            return f"ranks hold different values of one tensor; the lowest rank's were saved, whole:\n  {told}"
        raise ValueError(
            f"save: {path}: ranks hold different values of one tensor, and fastckpt cannot tell which is right: "
            f"{_NAMES if apart else f'{_REMEDIES}; {_NAMES}'}:\n  {told}"
        )


def _in_short(names: list[str]) -> str:
    """The monitor's text about different tensors: the end of the first name, and the number of others."""
    said = "ranks differ in "
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    name, room = names[0].encode(), _TOLD - len((said + more).encode())
    if len(name) > room:
        name = b"..." + name[len(name) - room + 3 :]
    return f"{said}{name.decode(errors='ignore')}{more}"


def combine_holders(offers: Sequence[list[Any]]) -> list[Any]:
    """Combine offers; complete sets of agreeing ranks are left out."""
    holders: dict[int, tuple[int, dict[int, int]]] = {}
    for offer in offers:
        for number, size, sums in offer:
            known = holders.setdefault(number, (size, {}))[1]
            for total, count in sums:
                known[total] = known.get(total, 0) + count
    return [
        [number, size, [list(pair) for pair in sums.items()]]
        for number, (size, sums) in holders.items()
        if len(sums) > 1 or sum(sums.values()) < size
    ]


def holders_that_differ(offer: list[Any]) -> list[int]:
    """The numbers of sets of ranks with the same parts that do not agree, from the offers of all ranks."""
    return [number for number, _, sums in offer if len(sums) > 1]


def not_compared(share: _core.Share) -> list[str]:
    """The warning in the report of a save that saves everything from the lowest ranks."""
    count = share.replicated()
    if not count:
        return []
    named_so = f"{count} tensors that several ranks hold were" if count > 1 else "a tensor that several ranks hold was"
    return [f"replicas='first': {named_so} not compared: the value of the lowest rank that has it was saved"]


def _cell(key: str) -> tuple[int, int, int]:
    tensor, start, cell = map(int, key.split())
    return tensor, start, cell


def _united(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums of cells, and which ranks found them."""
    out: dict[str, Any] = {}
    for one in found:
        for key, sums in one.items():
            known = out.setdefault(key, {})
            for total, runs in sums.items():
                known[total] = runs_of(ranks_of(known.get(total, [])) + ranks_of(runs))
    return out


def _that_differ(found: dict[str, Any]) -> list[list[Any]]:
    """The different cells, in order, each with its groups of agreeing ranks, the group of the lowest rank first."""
    differing = [(key, sorted(map(ranks_of, sums.values()))) for key, sums in found.items() if len(sums) > 1]
    return [[key, sides] for key, sides in sorted(differing, key=lambda one: _cell(one[0]))]


def _listed(found: list[list[Any]]) -> list[tuple[str, list[list[int]]]]:
    """The first cell of each tensor that is listed."""
    first: dict[int, tuple[str, list[list[int]]]] = {}
    for key, sides in found:
        first.setdefault(_cell(key)[0], (key, sides))
    return list(first.values())[:_LISTED]


def _joined(shown: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for one in shown:
        for key, views in one.items():
            out.setdefault(key, {}).update(views)
    return out


def _held_by(session: Session, ranks: Sequence[int]) -> str:
    hosts = sorted({session.peers.host_of(rank) for rank in ranks} - {""})
    more = f" and {len(hosts) - 1} more hosts" if len(hosts) > 1 else ""
    return f"one value on {named(sorted(ranks))}{f' ({hosts[0]}{more})' if hosts else ''}"


def _measured(views: list[bytes], size: int) -> str:
    """The number of differing elements among those that ranks have sent each other."""
    if not views:
        return ""
    count = len(views[0]) // size
    elements = range(0, count * size, size)
    differ = sum(len({view[start : start + size] for view in views}) > 1 for start in elements)
    if not differ:
        return f"; they differ, but not in the {count} elements looked at"
    return f"; {differ} of the {count} elements looked at differ"
