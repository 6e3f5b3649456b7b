"""What follows when a checkpoint is durable: the hint, the measurements, and the removal of older ones."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._api.event import Event
from fastckpt._api.reports import SaveReport
from fastckpt._background.pending import PendingSave
from fastckpt.exceptions import CheckpointError
from fastckpt.keep import Saved

from . import lineage
from .catalogue import Entry
from .retention import write_hint
from .stale import Sums, alarm, changed, sums_of

if TYPE_CHECKING:
    from .catalogue import Catalogue
    from .directory import Directory
    from .drain import Drain
    from .leftovers import Leftovers
    from .retention import Retention
    from .step_timing import StepTiming


logger = logging.getLogger("fastckpt")


def left_until(end: float) -> float | None:
    """Seconds from now to ``end``, by ``time.monotonic``; None if it never comes."""
    return None if end == math.inf else max(0.0, end - time.monotonic())


class AfterSave:
    """Does what follows a durable save, outside the thread that trains wherever it can.

    Args:
        directory: the run.
        catalogue: what its checkpoints say of themselves.
        retention: what removes older ones.
        timing: what measures.
        leftovers: what watches those of killed saves.
        leads: whether this rank writes and removes; the others measure.
        stale: what follows where a trained group has not changed: ``warn``, ``raise`` or ``ignore``.
        frozen: patterns of tensors that are not trained.
    """

    def __init__(
        self,
        directory: Directory,
        catalogue: Catalogue,
        retention: Retention,
        timing: StepTiming,
        leftovers: Leftovers,
        *,
        leads: bool,
        stale: str,
        frozen: Sequence[str] | str,
    ) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._retention = retention
        self._timing = timing
        self._leftovers = leftovers
        self._leads = leads
        self._stale = stale
        self._frozen = frozen
        #: The last step that was saved or restored, and where it lies, or its checksums.
        self._before: tuple[int, str | Sums] | None = None
        #: The last step that was compared with the one before, and the share of each group that has changed.
        self.changed: tuple[int | None, dict[str, float]] = None, {}
        #: What was not as it should be, for the report; and not yet raised.
        self.said: str | None = None
        self._alarm: str | None = None
        #: What copies checkpoints to the remote tier.
        self.drain: Drain | None = None
        #: What is under way.
        self._open: list[Event] = []
        # Reentrant: a signal handler that saves may come in between.
        self._lock = threading.RLock()
        #: When the save began that the file ``latest`` names.
        self._latest = -math.inf

    def follow(self, about: dict[str, Any], began: float, pending: PendingSave, failed: Callable[[], None]) -> None:
        """When a save in the background is durable, do what follows in its thread; if it fails, call ``failed``."""
        done = self._begin()

        def ended(pending: PendingSave) -> None:
            try:
                # Nobody asks for a failure here: the next save, wait, or the end of the process tells it.
                if pending.progress().phase == "done":
                    report = pending.result()
                    self.note(about, began, report, report.stall)
                    self._copy()
                    if self._leads:
                        self._clear(about)
                else:
                    failed()
            finally:
                done.set()

        pending.add_done_callback(ended)

    def after(self, about: dict[str, Any], began: float, report: SaveReport) -> None:
        """A save of the calling thread is durable: what follows, with the removals in another thread."""
        self.note(about, began, report, report.seconds)
        self._copy()
        if not self._leads:
            return
        done = self._begin()

        def clear() -> None:
            try:
                self._clear(about)
            finally:
                done.set()

        try:
            threading.Thread(target=clear, name="fastckpt-retention").start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            clear()

    def note(self, about: dict[str, Any], began: float, report: SaveReport, stall: float) -> None:
        """All of it but the removals, and the copies to the remote tier, which this only asks for."""
        step = about["step"]
        if self.drain is not None:
            self.drain.add(step)
        with self._lock:
            self._timing.durable(began, stall)
            if not self._leads:
                return
            created = time.time() - report.seconds
            self._catalogue.add(Entry(Saved(step, created, about["metrics"]), lineage.of(about, created)))
            # Two saves may end at nearly the same time, and the later one may be here first.
            if began < self._latest:
                return
            self._latest = began
            write_hint(self._directory, step)

    def resume(self, step: int, path: str) -> None:
        """Training goes on from the checkpoint of a step, which lies at ``path``."""
        self._before = step, path

    def tell(self) -> None:
        """Raise once what is to be raised.

        Raises:
            CheckpointError: a trained group has not changed.
        """
        text, self._alarm = self._alarm, None
        if text is not None and self._stale == "raise":
            raise CheckpointError(text)

    def _watch(self, about: dict[str, Any]) -> None:
        """Compare a checkpoint with the one before it."""
        step, path = about["step"], self._directory.path_of(about["step"])
        try:
            now, before = sums_of(path, frozen=self._frozen), self._before
            # Of two saves that end at nearly the same time the earlier one may be here last.
            if before is None or step > before[0]:
                self._before = step, now
            if before is None or step <= before[0]:
                return
            since, sums = before
            shares = changed(sums_of(sums, frozen=self._frozen) if isinstance(sums, str) else sums, now)
        except (CheckpointError, OSError) as error:
            logger.debug("%s: not compared with the one before: %s", path, error)
            return
        self.changed = step, shares
        _core.set_changed(step, shares.get("model"), shares.get("optimizer"))
        for entry in self._catalogue.entries([step]).values():
            self._catalogue.add(entry._replace(saved=replace(entry.saved, changed=shares)))
        self.said = None if self._stale == "ignore" else alarm(path, since, now, shares)
        if self.said is not None:
            self._alarm = self.said
            logger.warning("%s", self.said)

    def is_over(self, end: float) -> bool:
        """Whether all of it is done by then."""
        return all(done.wait(left_until(end)) for done in tuple(self._open))

    def wait(self, end: float) -> None:
        """Wait until all of it is done.

        Raises:
            TimeoutError: not by then.
        """
        if not self.is_over(end):
            raise TimeoutError(f"wait: {self._directory.path}: old checkpoints are still being removed; it goes on")

    def _clear(self, about: dict[str, Any]) -> None:
        self._watch(about)
        self._retention.clear(about["step"])
        self._leftovers.clear()

    def _copy(self) -> None:
        if self.drain is not None:
            self.drain.start()

    def _begin(self) -> Event:
        done = Event()
        self._open = [*(one for one in self._open if not one.is_set()), done]
        return done
