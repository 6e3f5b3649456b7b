"""Work after a checkpoint becomes durable: update ``latest``, measure, remove old checkpoints."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastckpt._api.event import Event
from fastckpt.keep import Saved

from . import lineage
from .catalogue import Entry
from .tier import write_hint

if TYPE_CHECKING:
    from fastckpt._api.reports import SaveReport
    from fastckpt._background.pending import PendingSave

    from .directory import Directory
    from .drain import Drain
    from .leftovers import Leftovers
    from .stale import StaleAlarm
    from .step_timing import StepTiming
    from .tier import Tier


def seconds_until(end: float) -> float | None:
    """Seconds from now to ``end``, by ``time.monotonic``; None if ``end`` is infinite."""
    return None if end == math.inf else max(0.0, end - time.monotonic())


@dataclass(slots=True, eq=False)
class AfterSave:
    """Does the work after a durable save, outside the training thread if possible.

    Attributes:
        drain: copies to the remote tier; None where this process copies nothing.
        leads: whether this rank writes ``latest`` and removes checkpoints; the other ranks only measure.
    """

    local: Tier[Directory]
    timing: StepTiming
    alarm: StaleAlarm
    leftovers: Leftovers
    drain: Drain | None
    leads: bool
    #: One event for each piece of work in progress, set when that piece is done.
    _open: list[Event] = field(default_factory=list, init=False)
    # Reentrant: a signal handler that saves may run in between.
    _lock: Any = field(default_factory=threading.RLock, init=False)
    #: When the save that the file ``latest`` names began.
    _latest: float = field(default=-math.inf, init=False)

    def follow(self, about: dict[str, Any], began: float, pending: PendingSave, failed: Callable[[], None]) -> None:
        """Do the work after a background save in its thread, once it is durable; if it fails, call ``failed``."""
        done = Event()

        def ended(pending: PendingSave) -> None:
            try:
                # Failures are not raised here: the next save, wait, or the end of the process reports them.
                if pending.progress().phase == "done":
                    report = pending.result()
                    self.note(about, began, report, report.stall)
                    self._copy()
                    self._clear(about["step"])
                else:
                    failed()
            finally:
                done.set()

        pending.add_done_callback(ended)
        self._note_open(done)

    def after(self, about: dict[str, Any], began: float, report: SaveReport) -> None:
        """Do the work after a durable save of the calling thread, with the removals in another thread."""
        self.note(about, began, report, report.seconds)
        self._copy()
        if not self.leads:
            return
        done = Event()

        def clear() -> None:
            try:
                self._clear(about["step"])
            finally:
                done.set()

        try:
            threading.Thread(target=clear, name="fastckpt-retention").start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            clear()
        self._note_open(done)

    def note(self, about: dict[str, Any], began: float, report: SaveReport, stall: float) -> None:
        """Do all of the work except removals and copies to the remote tier, which this only requests."""
        step = about["step"]
        if self.drain is not None:
            self.drain.add(step)
        if self.leads:
            # Not under `_lock`: a signal handler takes `_lock`, perhaps while its thread holds the catalogue's lock.
            created = time.time() - report.seconds
            self.local.catalogue.add(Entry(Saved(step, created, about["metrics"]), lineage.of(about, created)))
        with self._lock:
            self.timing.durable(began, stall)
            if not self.leads:
                return
            # If two saves end at nearly the same time, the later one may get here first.
            if began < self._latest:
                return
            self._latest = began
            write_hint(self.local.place, step)

    def is_over(self, end: float) -> bool:
        """Whether all of the work is done before ``end``."""
        return all(done.wait(seconds_until(end)) for done in tuple(self._open))

    def wait(self, end: float) -> None:
        """Wait until all of the work is done.

        Raises:
            TimeoutError: the work is not done by ``end``. It continues.
        """
        if not self.is_over(end):
            raise TimeoutError(
                f"wait: {self.local.place.path}: old checkpoints are still being removed; the removal continues"
            )

    def warnings(self) -> list[str]:
        """The warnings for the report of the last save."""
        found = [self.alarm.warning, self.leftovers.warning]
        self.leftovers.warning = None
        return [text for text in found if text is not None]

    def _clear(self, step: int) -> None:
        if self.leads:
            self.alarm.compare(step)
            self.local.clear(step)
            self.leftovers.clear()

    def _copy(self) -> None:
        if self.drain is not None:
            self.drain.start()

    def _note_open(self, done: Event) -> None:
        """Add an event once its thread has begun. Before that, an interrupt could leave an event that nothing sets."""
        self._open = [*(one for one in self._open if not one.is_set()), done]
