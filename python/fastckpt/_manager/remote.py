"""What the remote tier is to hold: which checkpoints it is better off without, and what follows when it has one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from . import lineage
from .retention import reasons_on_branch, write_latest

if TYPE_CHECKING:
    from .directory import Directory
    from .prefix import Place
    from .tier import Tier

logger = logging.getLogger("fastckpt")


class Remote:
    """The remote tier, as the drain sees it.

    Args:
        local: the tier that checkpoints are copied from.
        tier: the one that they are copied to.
    """

    def __init__(self, local: Tier[Directory], tier: Tier[Place]) -> None:
        self._local, self._tier = local, tier
        self.place = tier.place
        #: The number of the step that its ``latest`` names, in the order in which steps were queued.
        self._latest = -math.inf
        #: The last step that became durable there by this process.
        self._durable: int | None = None

    def is_older(self, step: int) -> bool:
        """Whether it lacks a step, or has an earlier save of it than the local tier."""
        here, there = (
            [entry.lineage.order for entry in tier.catalogue.entries([step]).values()]
            for tier in (self._local, self._tier)
        )
        return there < here

    def is_better(self, step: int) -> bool:
        """Whether it has a later save of a step, or one of the branch that goes on, which left the local one."""
        tiers = self._local, self._tier
        here, there = (tier.catalogue.entries([step]).get(step) for tier in tiers)
        if here is None or there is None or there.lineage.order == here.lineage.order:
            return False
        tip = lineage.last(tier.catalogue.tip(tier.catalogue.entries(tier.place.look().steps)) for tier in tiers)
        left = [tip.has_left(step, each.lineage) for each in (here, there)]
        return left == [True, False] or (left[0] == left[1] and there.lineage.order > here.lineage.order)

    def unwanted(self, waiting: Mapping[int, int]) -> list[int]:
        """Those of the steps that wait, each with its number, which its policies would not keep.

        Raises:
            OSError: it does not answer.
        """
        if not self._tier.policies:
            return []
        # What an earlier run saved beyond it counts for nothing, as for the local tier.
        top = max(waiting, key=lambda step: waiting[step])
        there, pinned = self.place.look()
        known = self._tier.catalogue.entries(step for step in there if step <= top)
        known.update(self._local.catalogue.entries(step for step in waiting if step <= top))
        known = {step: known[step] for step in sorted(known)}
        pinned = {*pinned, *self._local.place.look().pinned}
        try:
            tip = self._local.catalogue.tip(known)
            wanted = reasons_on_branch(known, tip, self._tier.policies, pinned, time.time())
        except Exception:  # a policy of the caller's
            logger.exception("%s: a policy raised, and everything is copied", self.place.path)
            return []
        return [step for step in waiting if step in wanted and not wanted[step]]

    def follow(self, step: int, number: int, *, was_there: bool, waits: Callable[[int], bool]) -> None:
        """A checkpoint is whole there: have ``latest`` name it, pin it, and remove older ones and what copies left.

        Args:
            step: which.
            number: its number among the steps that were queued.
            was_there: whether nothing had to be copied.
            waits: whether a step is still to be copied.
        """
        local, place = self._local.place, self.place
        try:
            is_latest = number > self._latest
            if is_latest:
                write_latest(place, step)
                self._latest, self._durable = number, step
            if local.is_pinned(step) and not place.is_pinned(step):
                place.pin(step)
            if was_there and not is_latest:
                # One of thousands, perhaps, that an earlier run has copied: nothing has changed.
                return
            durable = step if self._durable is None else self._durable
            if self._tier.policies:
                self._tier.retention.clear(durable)
            for each in (place, local):
                each.sweep_copies(lambda one: one < durable and not waits(one))
        except OSError as error:
            logger.warning("%s: what follows the copy of step %d failed: %s", place.path, step, error)

    def go_back(self) -> None:
        """Steps are removed: nothing older goes for what was durable until now."""
        self._durable, self._latest = None, -math.inf
