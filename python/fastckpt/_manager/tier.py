"""A tier of a run, local or remote: a place for checkpoints, which of them are removed, and why the rest stay.

Only steps older than a checkpoint that has just become durable are removed. So whatever happens to the removal, and
however many managers use one directory, the newest durable checkpoint stays: each manager removes only steps older than
one of its own checkpoints, which still exists or has a newer one above it.

``fastckpt.remove`` renames first, in one durable step, and removes the files after that: half a checkpoint never has
its name, and the next save removes what a killed process left. Other files in a checkpoint are kept.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from fastckpt.exceptions import CheckpointError, NotACheckpointError

from .arguments import texts_of
from .catalogue import Catalogue
from .directory import LATEST
from .prefix import Place

if TYPE_CHECKING:
    from fastckpt.keep import Policy, Saved

    from .catalogue import Entry
    from .lineage import Lineage

_P = TypeVar("_P", bound=Place)

logger = logging.getLogger("fastckpt")


def reasons(
    saved: Sequence[Saved], policies: Sequence[Policy], pinned: Collection[int], now: float
) -> dict[int, list[str]]:
    """Why each checkpoint stays; one without a reason may be removed.

    Args:
        saved: the checkpoints that count, by rising step; the last of them is durable.
        policies: the policies that decide what stays; without any, all checkpoints stay.
        pinned: steps that stay whatever the policies decide.
        now: seconds since 1970.
    """
    found: dict[int, list[str]] = {one.step: [] for one in saved}
    for policy in policies:
        for step in policy.kept(saved, now):
            if step in found:
                found[step].append(str(policy))
    for step in pinned:
        if step in found:
            found[step].append("pinned")
    if saved and not found[saved[-1].step]:
        found[saved[-1].step].append("newest")
    if not policies:
        for why in found.values():
            why.append("no policy")
    return found


def reasons_on_branch(
    entries: Mapping[int, Entry], tip: Lineage, policies: Sequence[Policy], pinned: Collection[int], now: float
) -> dict[int, list[str]]:
    """Like :func:`reasons`, but checkpoints that the branch of ``tip`` has left do not count; only pins keep them."""
    left = {step for step, entry in entries.items() if tip.has_left(step, entry.lineage)}
    found = reasons([entry.saved for step, entry in entries.items() if step not in left], policies, pinned, now)
    return found | {step: ["pinned"] if step in pinned else [] for step in left}


def write_latest(place: Place, step: int) -> None:
    """Write the name of a step's checkpoint to ``latest``.

    Raises:
        OSError: the file cannot be written.
    """
    place.replace(LATEST, f"{place.names.name_of(step)}\n".encode(), durable=True)


def write_hint(place: Place, step: int) -> None:
    """Like :func:`write_latest`, but errors are logged."""
    try:
        write_latest(place, step)
    except OSError as error:
        logger.warning("%s: the file latest is not written: %s", place.path, error)


class Tier(Generic[_P]):
    """One tier: a place, and the policies that decide what stays there; without any, all stays.

    The place is not accessed before it is needed: it may be far away.
    """

    def __init__(self, place: _P, policies: Sequence[Policy], *, read_only: bool = False) -> None:
        self.place, self.policies, self.read_only = place, policies, read_only
        self._catalogue: Catalogue | None = None
        self._making, self._lock = threading.Lock(), threading.Lock()
        #: Held while a checkpoint is renamed for its removal: setting a pin waits for it.
        self._removing = threading.Lock()
        #: Steps that could not be loaded. They stay, but do not count, until they are saved again.
        self.damaged: set[int] = set()
        self._warned: set[int] = set()
        #: The last step that this process has made durable.
        self._durable: int | None = None
        #: Whether a step must stay because it must still be copied.
        self.held: Callable[[int], bool] = lambda step: False  # noqa: ARG005 - what is asked

    @property
    def catalogue(self) -> Catalogue:
        """The facts in the checkpoints."""
        # The manager makes the local tier's catalogue at its start, so no signal handler waits here for its own thread.
        if self._catalogue is None:
            with self._making:
                texts = None if self.read_only else texts_of(self.policies)
                self._catalogue = self._catalogue or Catalogue(self.place, texts)
        return self._catalogue

    @property
    def order(self) -> int:
        """The highest order of any save known here; a signal handler may call this, too."""
        return 0 if self._catalogue is None else self._catalogue.order

    def kept(self, policies: Sequence[Policy]) -> dict[int, list[str]]:
        """Why each checkpoint stays if these policies decide; one without a reason is removed after the next save."""
        steps, pinned = self.place.look()
        return self.reasons(self.catalogue.entries(steps), policies, pinned)

    def reasons(
        self, entries: Mapping[int, Entry], policies: Sequence[Policy], pinned: Collection[int]
    ) -> dict[int, list[str]]:
        """Why each of these checkpoints stays, as in :meth:`kept`."""
        found = reasons_on_branch(entries, self.catalogue.tip(entries), policies, pinned, time.time())
        newest = max(self.catalogue.own(entries), default=-1)
        for step, why in found.items():
            if not why and self.held(step):
                why.append("not yet at the remote")
            if not why and step > newest:
                why.append("left behind, until the run has passed it")
        return found

    def pin(self, step: int) -> bool:
        """Pin a checkpoint; returns whether it exists."""
        # This waits for a removal in progress; another process may still remove the checkpoint until it sees the pin.
        name = self.place.names.name_of(step)
        with self._removing:
            if self.place.identity(name) is None:
                return False
            self.place.pin(step)
            there = self.place.identity(name) is not None
            if not there:
                self.place.unpin(step)
            return there

    def clear(self, durable: int) -> None:
        """Remove unneeded checkpoints older than that of step ``durable``; failures are logged."""
        with self._lock:
            self._durable = durable
            self.damaged.discard(durable)
            steps, pinned = self.place.look()
            if self.policies and durable in steps:
                older = [step for step in steps if step <= durable and step not in self.damaged]
                entries = self.catalogue.entries(older)
                # Nothing is removed if that checkpoint was replaced or removed at this moment.
                if durable in entries:
                    try:
                        tip = entries[durable].lineage
                        kept = reasons_on_branch(entries, tip, self.policies, pinned, time.time())
                    except Exception:  # a policy of the caller
                        logger.exception("%s: a policy raised, and nothing is removed", self.place.path)
                        return
                    go = [step for step, why in kept.items() if not why]
                    steps = self._remove(steps, {step: entries[step].lineage.files for step in go})
            try:
                self.catalogue.write(steps)
            except OSError as error:
                logger.warning("%s: the facts about its checkpoints are not cached: %s", self.place.path, error)

    def clear_again(self) -> None:
        """Remove checkpoints that are no longer held."""
        if self._durable is not None:
            self.clear(self._durable)

    def _remove(self, steps: list[int], go: Mapping[int, Collection[str]]) -> list[int]:
        gone = set()
        for step, files in go.items():
            path = self.place.path_of(step)
            try:
                with self._removing:
                    # The step may have been pinned meanwhile, because removals take time.
                    if self.place.is_pinned(step) or self.held(step):
                        continue
                    self._take(step, files)
            except (CheckpointError, OSError) as error:
                # Warn once for each step, because the removal is tried again after each save.
                if step not in self._warned:
                    self._warned.add(step)
                    logger.warning("%s: not kept, but it cannot be removed: %s", path, error)
            else:
                gone.add(step)
                logger.info("%s: removed, no policy keeps it", path)
        return [step for step in steps if step not in gone]

    def remove_beyond(self, step: int, held: Collection[int]) -> None:
        """Remove all checkpoints above a step, the highest first, and write the step to ``latest``.

        Args:
            step: the step that the run goes back to.
            held: steps that are pinned on another tier. They stay, and so do checkpoints that are pinned here.

        Raises:
            OSError: a checkpoint cannot be removed, or the place does not answer.
        """
        steps, pinned = self.place.look()
        entries = self.catalogue.entries(steps)
        for one in reversed([one for one in steps if one > step]):
            why = "it is pinned"
            if one not in pinned and one not in held:
                try:
                    self._take(one, entries[one].lineage.files if one in entries else ())
                    continue
                except NotACheckpointError as error:
                    why = str(error)
            logger.warning("%s stays: %s", self.place.path_of(one), why)
        if step in steps:
            write_hint(self.place, step)

    def _take(self, step: int, files: Collection[str]) -> None:
        with contextlib.suppress(FileNotFoundError):  # another manager has removed it
            kept = self.place.remove(step, files)
            if kept:
                path = self.place.path_of(step)
                logger.warning("%s: removed, except files that fastckpt did not write (%s)", path, kept)
