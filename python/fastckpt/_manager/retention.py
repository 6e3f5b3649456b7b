"""Which checkpoints of a run go, and their removal.

Nothing is removed but older steps than a checkpoint that has just become durable, so whatever happens to the removal,
and however many managers work on one directory, the newest durable checkpoint is there: each of them removes only what
is older than one of its own, and that one is still there or has a newer one above it.

``fastckpt.remove`` renames first, in one durable step, and removes the files after that: half a checkpoint never has
its name, and what a killed process leaves the next save sweeps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from fastckpt._api.manage import remove
from fastckpt.keep import Policy, Saved

if TYPE_CHECKING:
    from .catalogue import Catalogue
    from .tier import Place


logger = logging.getLogger("fastckpt")


def reasons(
    saved: Sequence[Saved], policies: Sequence[Policy], pinned: Collection[int], now: float
) -> dict[int, list[str]]:
    """Why each checkpoint stays; one without a reason may go.

    Args:
        saved: the checkpoints that count, by rising step; the last of them is durable.
        policies: what is to stay; without one all stay.
        pinned: steps that stay anyway.
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


class Retention:
    """Removes what no policy wants to keep, after a checkpoint has become durable.

    Args:
        directory: the run.
        catalogue: what its checkpoints say of themselves.
        policies: what is to stay; without one all stays.
    """

    def __init__(self, directory: Place, catalogue: Catalogue, policies: Sequence[Policy]) -> None:
        self._directory = directory
        self.catalogue = catalogue
        self._policies = policies
        self._lock = threading.Lock()
        #: Held while one loses its name: who sets a pin waits.
        self.removing = threading.Lock()
        #: Steps that could not be loaded. They stay, and they count for nothing, until they are saved again.
        self.damaged: set[int] = set()
        self._warned: set[int] = set()
        #: The step that became durable last.
        self._durable: int | None = None
        #: Whether a step must stay for another reason: it is still to be copied.
        self.held: Callable[[int], bool] = lambda step: False  # noqa: ARG005 - what is asked

    def clear(self, durable: int) -> None:
        """Remove what is older than the checkpoint of step ``durable`` and is not kept; failures are logged."""
        with self._lock:
            self._durable = durable
            self.damaged.discard(durable)
            steps, pinned = self._directory.look()
            if self._policies and durable in steps:
                older = [step for step in steps if step <= durable and step not in self.damaged]
                saved = self.catalogue.of(older)
                try:
                    kept = reasons(saved, self._policies, pinned, time.time())
                except Exception:  # a policy of the caller's
                    logger.exception("%s: a policy raised, and nothing is removed", self._directory.path)
                    return
                # Its entry is the last one, unless it was replaced or removed at this moment.
                if saved and saved[-1].step == durable:
                    steps = self._remove(steps, [step for step, why in kept.items() if not why])
            try:
                self.catalogue.write(steps)
            except OSError as error:
                logger.warning("%s: what its checkpoints say is not cached: %s", self._directory.path, error)

    def again(self) -> None:
        """Remove what may go now that fewer are held."""
        if self._durable is not None:
            self.clear(self._durable)

    def _remove(self, steps: list[int], go: list[int]) -> list[int]:
        gone = set()
        for step in go:
            path = self._directory.path_of(step)
            try:
                with self.removing:
                    # It may have been pinned meanwhile: removals take a while.
                    if self._directory.is_pinned(step) or self.held(step):
                        continue
                    remove(path, everything=True)
            except FileNotFoundError:  # another manager was first
                gone.add(step)
            except OSError as error:
                # It is tried again after each save.
                if step not in self._warned:
                    self._warned.add(step)
                    logger.warning("%s: not kept, but it cannot be removed: %s", path, error)
            else:
                gone.add(step)
                logger.info("%s: removed, no policy keeps it", path)
        return [step for step in steps if step not in gone]
