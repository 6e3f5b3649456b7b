"""The remote tier: which checkpoints it holds, the work after a copy, and the fetch for a restore."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from fastckpt._copy.copy import copy_checkpoint
from fastckpt._paths import AnyPath, is_url
from fastckpt._stores.urls import place_of
from fastckpt.exceptions import CheckpointError, CorruptCheckpointError

from . import lineage
from .arguments import keep_of
from .directory import Directory
from .prefix import Place, Prefix
from .tier import Tier, reasons_on_branch, write_latest

if TYPE_CHECKING:
    from fastckpt.keep import Policy

logger = logging.getLogger("fastckpt")

#: Errors of a local tier that has no room for a checkpoint, accepts none, or does not replace an existing one.
_NO_ROOM = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EFBIG", "EEXIST", "ENOTDIR", "ELOOP")
    if hasattr(errno, name)
}


def remote_of(remote: AnyPath | None, keep: Any, local: Tier[Directory]) -> Remote | None:
    """The tier of ``remote=`` and ``remote_keep=``; None without ``remote=``.

    Raises:
        ImportError: ``remote=`` is a URL, and the package for URLs is missing.
        TypeError: an argument has the wrong type.
        ValueError: ``remote=`` is not a place for checkpoints, or is the local tier's place.
    """
    policies = [] if keep is None else keep_of(keep, "remote_keep")
    if remote is None:
        if policies:
            raise ValueError("Manager: remote_keep= requires remote=")
        return None
    names, where = local.place.names, place_of("Manager", remote)
    place: Place = Directory(where, names)
    if is_url(where):
        from fastckpt._stores.objects import Objects  # noqa: PLC0415 - needs a package that not everybody has

        place = Prefix(Objects.at("Manager", where), names)
    if os.path.realpath(place.path) == os.path.realpath(local.place.path):
        raise ValueError(f"Manager: remote: {place.path} is the manager's directory: give another place")
    return Remote(place, policies, local)


class Remote(Tier[Place]):
    """The remote tier, to which checkpoints of the local one are copied."""

    def __init__(self, place: Place, policies: Sequence[Policy], local: Tier[Directory]) -> None:
        super().__init__(place, policies)
        self._local = local
        #: The number that the step in its ``latest`` had in the drain's queue.
        self._latest = -math.inf

    # For the drain.

    def lacks(self, step: int) -> bool:
        """Whether this tier lacks the local tier's save of a step."""
        here, there = (
            [entry.lineage.order for entry in tier.catalogue.entries([step]).values()] for tier in (self._local, self)
        )
        return not there or there != here

    def is_better(self, step: int) -> bool:
        """Whether this tier has a later save of a step, or one on the branch that has left the local save behind."""
        tiers = self._local, self
        here, there = (tier.catalogue.entries([step]).get(step) for tier in tiers)
        if here is None or there is None or there.lineage.order == here.lineage.order:
            return False
        tip = lineage.last(tier.catalogue.tip(tier.catalogue.entries(tier.place.look().steps)) for tier in tiers)
        left = [tip.has_left(step, each.lineage) for each in (here, there)]
        return left == [True, False] or (left[0] == left[1] and there.lineage.order > here.lineage.order)

    def unwanted(self, waiting: Mapping[int, int]) -> list[int]:
        """The waiting steps that this tier's policies would not keep; ``waiting`` has each step's number in the queue.

        Raises:
            OSError: this tier does not answer.
        """
        if not self.policies:
            return []
        # Later checkpoints of an earlier run do not count, as on the local tier.
        top = max(waiting, key=lambda step: waiting[step])
        there, pinned = self.place.look()
        known = self.catalogue.entries(step for step in there if step <= top)
        known.update(self._local.catalogue.entries(step for step in waiting if step <= top))
        known = {step: known[step] for step in sorted(known)}
        pinned = {*pinned, *self._local.place.look().pinned}
        try:
            wanted = reasons_on_branch(known, self._local.catalogue.tip(known), self.policies, pinned, time.time())
        except Exception:  # a policy of the caller
            logger.exception("%s: a policy raised, and everything is copied", self.place.path)
            return []
        return [step for step in waiting if step in wanted and not wanted[step]]

    def follow(self, step: int, number: int, *, was_there: bool, waits: Callable[[int], bool]) -> None:
        """Work after a copy to this tier: update ``latest``, copy the pin, remove older checkpoints and leftovers.

        ``number`` is the step's number in the queue; ``was_there`` is true if nothing had to be copied. A step that
        ``waits`` must still be copied. A checkpoint that the run has left does not count as the newest for retention.
        """
        local, place = self._local, self.place
        try:
            tip = lineage.last([local.catalogue.last, self.catalogue.last])
            left = any(tip.has_left(step, entry.lineage) for entry in local.catalogue.entries([step]).values())
            is_latest = number > self._latest and not left
            if is_latest:
                write_latest(place, step)
                self._latest, self._durable = number, step
            if local.place.is_pinned(step) and not place.is_pinned(step):
                place.pin(step)
            if (was_there and not is_latest) or (durable := self._durable) is None:
                # This is one of perhaps thousands that an earlier run copied: nothing has changed.
                return
            if self.policies:
                self.clear(durable)
            for each in (place, local.place):
                each.sweep_copies(lambda one: one < durable and not waits(one))
        except OSError as error:
            logger.warning("%s: the work after the copy of step %d failed: %s", place.path, step, error)

    def go_back(self, to: tuple[int | None, float] = (None, -math.inf)) -> tuple[int | None, float]:
        """Treat the next copied step as the last one of the run; returns the argument that undoes this."""
        before = self._durable, self._latest
        self._durable, self._latest = to
        return before

    # For a restore.

    def fetch(self, step: int, *, differs: bool, share: tuple[int, int] = (0, 1)) -> str:
        """Fetch the remote checkpoint of a step to the local tier; returns the place to load it from.

        Good files on the local tier are not fetched. The remote checkpoint is read instead if the local save of the
        step ``differs``, and so exists nowhere else, or if the local tier has no room, or may not or cannot be written.
        If several nodes each fetch a ``share`` of the files, this node is the first, which fetches missing ones.

        Raises:
            CorruptCheckpointError: the checkpoint is damaged on this tier, and the local tier has nothing of it.
            OSError: this tier does not answer, or has no such checkpoint.
        """
        here, there = self._local.place.path_of(step), self.place.path_of(step)
        if self._local.read_only or differs:
            return there
        sources = [here, there] if os.path.lexists(here) else [there]
        try:
            copied = copy_checkpoint(sources, here, operation="restore", overwrite=True, step=step, share=share)
        except CorruptCheckpointError:
            if len(sources) == 1:
                raise
            # The two saves differ: the step was saved again, but not copied again.
            return there
        except (OSError, ValueError) as error:
            # A ValueError means that the remote checkpoint cannot be copied.
            fails_here = str(getattr(error, "filename", None)).startswith(self._local.place.path + os.sep)
            if isinstance(error, OSError) and error.errno not in _NO_ROOM and not fails_here:
                raise
            logger.warning("%s: loading from %s instead: %s", here, there, error)
            return there
        logger.info("%s: fetched from %s: %.3f GB in %.2f s", here, there, copied.bytes / 1e9, copied.seconds)
        return here

    def fetch_share(self, step: int, *, differs: bool, share: tuple[int, int]) -> None:
        """Fetch a share of the files for the process that calls :meth:`fetch`, which then fetches the missing ones."""
        with contextlib.suppress(CheckpointError, CancelledError, OSError, ValueError):
            self.fetch(step, differs=differs, share=share)
