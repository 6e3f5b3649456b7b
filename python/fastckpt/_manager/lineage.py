"""The lineage of the checkpoints of a run: which one continues which.

A run that goes back to an older checkpoint leaves newer ones behind, and both branches are in one directory. Each save
records its place in its metadata: an *order*, which rises from save to save on any host, and the *forks* of its branch.
A fork is the order at which the run continued from an earlier checkpoint: checkpoints saved before it, with a higher
step or a later order than the earlier checkpoint, were left behind. So a checkpoint shows which others its branch has
left, even those that it never saw, and even if checkpoints in between were removed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

#: The key of the lineage in the metadata of a checkpoint.
KEY = "lineage"
#: The most forks that are recorded: retention has long removed what older forks left behind.
_MOST = 64
#: The limit of orders. Integers in metadata may be twice as large, which leaves room for all later orders.
_LIMIT = 2**62


class Fork(NamedTuple):
    """The start of a branch.

    Attributes:
        order: the order of its first checkpoint.
        step: the step of the checkpoint that it continues, or may continue.
        since: the order of that checkpoint, or the branch's own if unknown.
    """

    order: int
    step: int
    since: int


class Lineage(NamedTuple):
    """The place of one checkpoint in the lineage.

    Attributes:
        order: a number that is higher the later the checkpoint was saved.
        forks: the forks of its branch by rising order; at least one, unless no manager saved the checkpoint.
        files: the names of the files given with ``files=``.
    """

    order: int
    forks: tuple[Fork, ...] = ()
    files: tuple[str, ...] = ()

    def has_left(self, step: int, other: Lineage) -> bool:
        """Whether the branch of this checkpoint has left another checkpoint behind, that of ``step``."""
        # A checkpoint that no manager saved may have been rewritten since, even below the step that the branch
        # continues.
        after = other.order if other.forks else 0
        return any(other.order < at and (step > back or after > since) for at, back, since in self.forks)


def last(places: Iterable[Lineage]) -> Lineage:
    """The place of the last save; saves by managers count before all others."""
    return max(places, key=lambda place: (bool(place.forks), place.order), default=Lineage(0))


def of(metadata: Any, created: float) -> Lineage:
    """The place in a checkpoint's metadata; a checkpoint that no manager saved is placed by its time ``created``."""
    try:
        noted = metadata[KEY]
        return parse((noted["order"], noted["forks"], noted["files"]))
    except (TypeError, ValueError, LookupError):
        return Lineage(round(created * 1e6))


def parse(noted: Any) -> Lineage:
    """The place in a JSON value.

    Raises:
        TypeError: the value has the wrong form.
        ValueError: the value has the wrong form.
    """
    order, forks, files = noted
    return Lineage(_number(order), tuple(Fork(*map(_number, fork)) for fork in forks), tuple(map(str, files)))


def _number(noted: Any) -> int:
    if not -_LIMIT < noted < _LIMIT:
        raise ValueError(f"{noted} is out of range for an order or a step")
    return int(noted)


class History:
    """The place in the lineage of the next save of this process."""

    def __init__(self) -> None:
        self._order = 0
        self._forks: tuple[Fork, ...] = ()
        #: The last step that was saved, or restored; None before the first.
        self._step: int | None = None
        #: The order of the restored checkpoint; 0 if unknown.
        self._since = 0
        #: Whether the next save begins a branch, as far as this process knows.
        self._turns = True

    def see(self, order: int) -> None:
        """Record that a checkpoint of this order exists, so that the next save gets a higher one."""
        self._order = max(self._order, order)

    def resume(self, step: int, lineage: Lineage) -> None:
        """Record that the run continues from the checkpoint of a step."""
        self._step, self._forks, self._turns, self._since = step, lineage.forks, True, lineage.order
        self.see(lineage.order)

    def go_back(self, step: int) -> Lineage:
        """The place of the run until its next save: it has left all steps above the restored ``step``."""
        plan = self.plan(step + 1)
        return parse((plan["order"], plan["forks"], ()))

    def plan(self, step: int) -> dict[str, Any]:
        """The place in the lineage for the metadata of a save of ``step``."""
        # The clock orders only checkpoints that were never seen, such as those on a remote tier that does not answer.
        order, forks = time.time_ns() // 1000, self._forks
        if order <= self._order:
            # Two nodes that continue from one checkpoint need different orders: nothing else distinguishes their saves.
            order = self._order + 1 + secrets.randbits(20)
        if self._turns or self._step is None or step <= self._step:
            # A program that restores by other means is assumed to continue from the highest step below this one.
            back = step - 1 if self._step is None else min(self._step, step - 1)
            since = self._since if self._turns and self._since else order
            # A fork is omitted if the new fork leaves behind all checkpoints that the older one left.
            more = (fork for fork in forks if fork.step < back or fork.since < min(fork.order, since))
            forks = (*more, Fork(order, back, since))[-_MOST:]
        return {"order": order, "continues": self._step, "forks": [list(fork) for fork in forks]}

    def begin(self, step: int, plan: Mapping[str, Any]) -> None:
        """Record that a save begins with the planned place."""
        self._order, self._forks, _ = parse((plan["order"], plan["forks"], ()))
        self._step, self._turns = step, False
