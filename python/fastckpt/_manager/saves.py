"""The saves of a run: the save in flight, the step that needs none, and the next save's place in the lineage."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastckpt import distributed
from fastckpt._api.files import check_files
from fastckpt._api.save import save
from fastckpt._background.save_async import save_async

from . import lineage
from .after_save import seconds_until
from .crew import failed_with
from .lineage import History, Lineage

if TYPE_CHECKING:
    from fastckpt._api.reports import SaveReport
    from fastckpt._background.pending import PendingSave

    from .after_save import AfterSave
    from .arguments import StepState
    from .candidates import Candidates
    from .crew import Crew
    from .stale import StaleAlarm
    from .step_timing import StepTiming

logger = logging.getLogger("fastckpt")


@dataclass(slots=True, eq=False)
class Saves:
    """The saves that this process has begun.

    Attributes:
        options: further arguments for each save.
        asynchronous: whether the saves continue in the background.
        pending: the last save in the background, until it is known to be over.
        step: the step that needs no further save: saved, being saved, or restored.
        report: the report of the last durable save.
    """

    candidates: Candidates
    ranks: Crew
    options: Mapping[str, Any]
    timing: StepTiming
    alarm: StaleAlarm
    after_save: AfterSave
    asynchronous: bool
    pending: PendingSave | None = field(default=None, init=False)
    step: int | None = field(default=None, init=False)
    report: SaveReport | None = field(default=None, init=False)
    #: Earlier saves that were in flight when the last one began.
    _before: list[PendingSave] = field(default_factory=list, init=False)
    _history: History = field(default_factory=History, init=False)
    _looked: bool = field(default=False, init=False)

    def path_of(self, step: int) -> str:
        """The path of the checkpoint of a step."""
        return self.candidates.local.place.path_of(step)

    @property
    def in_flight(self) -> bool:
        """Whether a save is running in the background."""
        return self.pending is not None and not self.pending.done()

    def resume(self, step: int, path: str, place: Lineage) -> None:
        """Record that training continues from the checkpoint of a step at ``path``."""
        self._history.resume(step, place)
        self.alarm.resume(step, path)
        self.timing.resume(step)
        self.step = step

    def place_after(self, step: int, place: Lineage) -> Lineage:
        """The place in the lineage until the next save, if the run goes back to the checkpoint of a step."""
        history = History()
        history.see(self.candidates.order)
        history.resume(step, place)
        return history.go_back(step)

    def look(self, step: int) -> None:
        """Look for other saves before the first save, on the local tier only: the remote may not answer for minutes."""
        if self._looked:
            return
        local = self.candidates.local
        try:
            steps = local.place.look().steps
            local.catalogue.entries(steps)
        except OSError as error:
            # An error on one rank would leave the others waiting. If it persists, the save reports it on all ranks.
            logger.warning("%s: cannot look for an earlier run before the first save: %s", local.place.path, error)
            return
        self._looked = True
        if steps and steps[-1] > step:
            logger.warning(
                "%s: the run goes on with step %d, and step %d of an earlier run is left behind: restore and retention "
                "follow this run; restore(step=..., discard_newer=True) removes what it replaces",
                *(local.place.path, step, steps[-1]),
            )

    def plan(self, step: int) -> dict[str, Any]:
        """The place in the lineage for the metadata of a save of a step; a signal handler may call this, too."""
        self._history.see(self.candidates.order)
        files = sorted(check_files("save", self.options.get("files")).beside or ())
        of, shares = self.alarm.changed
        return {**self._history.plan(step), "files": files, "changed_of": of, "changed": dict(shares)}

    def begin(self, given: StepState, base: int | None, plan: Mapping[str, Any]) -> None:
        """Save a state, in the background or in the call, based on the step ``base``, and record its ``plan``."""
        try:
            if self.asynchronous:
                self._save_async(given, base, plan)
            else:
                self.after_save.after(given.metadata, *self._save(given, base, plan))
        finally:
            self.timing.leave()

    def save_in_time(self, given: StepState, base: int | None, plan: Mapping[str, Any]) -> None:
        """Save in the call because time is short: without a bandwidth limit, and without removing old checkpoints."""
        began, report = self._save(given, base, plan, io=replace(self.options["io"], bandwidth_limit=None))
        self.after_save.note(given.metadata, began, report, report.seconds)

    def settle(self, end: float) -> list[str]:
        """Wait for the saves in flight, and abandon those that are not durable by ``end``; returns their paths."""
        given_up = []
        before = [one for one in self._before if not one.done()]
        for pending in filter(None, (*before, self.pending)):
            is_last = pending is self.pending
            try:
                if pending.exception(seconds_until(end)) is not None and is_last:
                    self.step = None
            except TimeoutError:
                # If several ranks cancel this save, one of them may learn of another's cancellation first.
                if pending.cancel() or failed_with(pending.exception(), CancelledError):
                    given_up.append(pending.path)
                    if is_last:
                        self.pending = self.step = None
        return given_up

    def wait(self, pending: PendingSave, end: float) -> None:
        """Wait for the last save.

        Raises:
            TimeoutError: the save is not durable by ``end``. It continues.
            CancelledError: the save was abandoned.
            Exception: the save failed.
        """
        try:
            self.report = pending.result(seconds_until(end))
        except Exception as error:
            # Once the failure is known on this rank, the step may be saved again, and it is not used as a base.
            with contextlib.suppress(TimeoutError):
                self.after_save.wait(end)
            if pending.done() and self.pending is pending:
                # The coordinator may have told the others of the step after this rank had learned of the failure.
                self.step = None
            if failed_with(error, CancelledError) and not isinstance(error, CancelledError):
                # All ranks have abandoned the save, and this one learned of another's decision first.
                raise CancelledError(str(error)) from error
            raise
        finally:
            # Each failure is reported once.
            if pending.done():
                self.pending = None

    def last_report(self) -> SaveReport | None:
        """The report of the last durable save, with later warnings."""
        if self.report is not None:
            new = [text for text in self.after_save.warnings() if text not in self.report.warnings]
            self.report = replace(self.report, warnings=(*self.report.warnings, *new))
        return self.report

    def _how(self, given: StepState, base: int | None, plan: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a save that begins now, except state and path."""
        if plan:
            given.metadata[lineage.KEY] = plan
            self._history.begin(given.step, plan)
        # After a failed save there is no base, so the next save writes everything.
        path = None if base is None else self.path_of(base)
        how = {"base": path, **self.options, "metadata": given.metadata}
        together = self.ranks.grouped or given.per_rank is not None
        return how | {"per_rank": given.per_rank, **self.ranks.arguments} if together else how

    def _save(
        self, given: StepState, base: int | None, plan: Mapping[str, Any], **more: Any
    ) -> tuple[float, SaveReport]:
        how = self._how(given, base, plan) | more
        call: Callable[..., SaveReport] = distributed.save if "per_rank" in how else save
        began = self.timing.begin()
        report = call(given.state, self.path_of(given.step), **how)
        self.pending, self.report, self.step = None, report, given.step
        return began, report

    def _save_async(self, given: StepState, base: int | None, plan: Mapping[str, Any]) -> None:
        how = self._how(given, base, plan)
        call: Callable[..., PendingSave] = distributed.save_async if "per_rank" in how else save_async
        began = self.timing.begin()
        try:
            pending = call(given.state, self.path_of(given.step), **how)
        except BaseException as error:
            # If the error is that of an earlier save, this save has begun.
            begun = getattr(error, "pending_save", None)
            if begun is not None:
                self._follow(given, began, begun)
            raise
        self._follow(given, began, pending)

    def _follow(self, given: StepState, began: float, pending: PendingSave) -> None:
        self._before = [one for one in (*self._before, self.pending) if one is not None and not one.done()]
        self.pending, self.step = pending, given.step

        def failed() -> None:
            if self.step == given.step:
                self.step = None

        self.after_save.follow(given.metadata, began, pending, failed)
