"""What all ranks agree on between two steps, and what is in flight meanwhile."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastckpt.exceptions import RanksError

from . import lineage
from .after_save import AfterSave, left_until
from .leftovers import Leftovers
from .lineage import History
from .ranks import Asked, SaveFailed, failed_of
from .run import Run
from .signals import Signals
from .step_timing import StepTiming

if TYPE_CHECKING:
    from fastckpt import keep as keeping
    from fastckpt._api.reports import SaveReport
    from fastckpt._background.pending import PendingSave

    from .calls import Calls
    from .directory import Directory
    from .place import Place
    from .ranks import Agreed, Ranks
    from .schedule import Schedule
    from .tier import Tier

logger = logging.getLogger("fastckpt")

#: Seconds for which ranks may go on without asking each other, at most; and into how many parts the grace period is cut
#: by their questions, at least.
APART = 1.0
_ROUNDS = 20
#: Seconds between two questions of ranks that wait for a save, at first and at most.
_FIRST_LOOK, _LAST_LOOK = 0.02, 1.0


class Boundary(Run):
    """What a manager knows between two steps.

    Args:
        local: as for :class:`.run.Run`.
        policies: likewise.
        ranks: likewise.
        remote: likewise.
        calls: what saves.
        when: which steps are saved.
        read_only: whether nothing may be written.
        stale: as for :class:`.after_save.AfterSave`.
    """

    def __init__(
        self,
        local: Tier[Directory],
        policies: Sequence[keeping.Policy] | None,
        ranks: Ranks,
        remote: Tier[Place] | None,
        calls: Calls,
        when: Schedule,
        *,
        read_only: bool,
        stale: str,
    ) -> None:
        super().__init__(local, policies, ranks, remote, read_only=read_only)
        self._calls = calls
        self._schedule = when
        self._timing = StepTiming()
        self._stale = stale
        self._leftovers = Leftovers(local.place)
        self._after_save = AfterSave(
            local.place,
            self._catalogue,
            self._retention,
            self._timing,
            self._leftovers,
            leads=ranks.leads,
            stale=stale,
            frozen=calls.options.get("frozen") or (),
        )
        self._signals = Signals(self._signal_came, shared=ranks.size > 1)
        #: The step that all ranks have agreed to save next.
        self._wanted: int | None = None
        #: The state that does not change at the moment: what saves it, for a signal that comes now.
        self._steady: Callable[[], object] | None = None
        #: The last save that was begun, and its step.
        self._pending: PendingSave | None = None
        #: The step that needs no further save: saved, being saved, or restored.
        self._saved: int | None = None
        #: What the next save continues; and what the metadata of the next one note of that, the same on all ranks.
        self._history = History()
        self._planned: dict[str, Any] = {}
        self._looked = False
        #: What it was at the last boundary, on all ranks: the next save may take files from that step.
        self._base: int | None = None
        #: The report of the last durable save.
        self._report: SaveReport | None = None

    def wait(self, timeout: float | None = None) -> SaveReport | None:
        """Wait until the last save is durable, and copied to the remote tier, and what is not kept is removed.

        For a signal of ``save_on_signal`` it waits no longer than the grace period allows, and gives the save up; it
        does not wait for copies then, which go on. Among several ranks all of them call it, and it returns when that
        holds on all.

        Args:
            timeout: seconds; None for as long as it takes.

        Returns:
            The report of the last save that became durable, or None.

        Raises:
            TimeoutError: it is not done in time. It goes on.
            CancelledError: it was given up for a signal.
            CheckpointError: with ``stale="raise"``, a trained group has not changed with the last save.
            Exception: the last save failed; or a copy did, also now, and the step is not at the remote tier.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        pending = self._pending
        if self._is_shared:
            self._wait_for_all(end)
        if pending is not None:
            around, self._steady = self._steady, self._steady or self._settle
            try:
                if not self._is_shared:
                    self._signal_came()
                self._report = pending.result(left_until(end))
            except Exception as error:
                # Once it is known to have failed, its step may be saved again, and is not a base.
                with contextlib.suppress(TimeoutError):
                    self._after_save.wait(end)
                if pending.done() and self._pending is pending:
                    # The first rank may have told the others of the step after this one had heard of the failure.
                    self._saved = None
                if failed_of(error, CancelledError) and not isinstance(error, CancelledError):
                    # Given up on all ranks, and this one has heard of another's first.
                    raise CancelledError(str(error)) from error
                raise
            finally:
                self._steady = around
                # A failure is told once.
                if pending.done():
                    self._pending = None
        self._after_save.wait(end)
        self._wait_for_copies(end)
        self._tell_stale()
        if self._report is not None:
            said = [self._after_save.said, self._leftovers.said]
            new = [text for text in said if text is not None and text not in self._report.warnings]
            self._leftovers.said = None
            self._report = replace(self._report, warnings=(*self._report.warnings, *new)) if new else self._report
        return self._report

    def _tell_stale(self) -> None:
        """Raise on all ranks what is to be raised of the last save."""
        if self._stale == "raise":
            self._ranks.first("stale", self._after_save.tell)

    # What happens.

    @property
    def _is_shared(self) -> bool:
        """Whether several ranks save together."""
        return self._ranks.size > 1 and not self._read_only

    @property
    def _in_flight(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def _plan(self, step: int) -> dict[str, Any]:
        """What a save of a step is to note of its place in the run."""
        files = sorted(self._calls.options.get("files") or ())
        of, shares = self._after_save.changed
        return {**self._history.plan(step), "files": files, "changed_of": of, "changed": dict(shares)}

    def _plan_first(self, step: int) -> dict[str, Any]:
        """Likewise, where there is time to look at what is there."""
        if not self._looked:
            self._looked = True
            steps = self.steps()
            for entry in self._catalogue.entries(steps).values():
                self._history.see(entry.lineage.order)
            self._history.see(self._catalogue.last.order)
            if steps and steps[-1] > step:
                logger.warning(
                    "%s: step %d is saved, and step %d of an earlier run is left behind: restore and retention follow "
                    "this run; restore(step=..., discard_newer=True) removes what it replaces",
                    *(self.directory, step, steps[-1]),
                )
        return self._plan(step)

    def _how(self, about: dict[str, Any], saved: int | None, plan: Mapping[str, Any]) -> dict[str, Any]:
        """What a save gets beside state and path, which begins now.

        Args:
            about: its metadata.
            saved: the step that it may take files from.
            plan: what it notes of its place in the run.
        """
        if plan:
            about[lineage.KEY] = plan
            self._history.begin(about["step"], plan)
        # Of a failed save nothing is there: then everything is written once.
        base = None if saved is None else self.path(saved)
        return {"base": base, **self._calls.options, "metadata": about}

    def _ask(
        self,
        operation: str,
        step: int,
        due: Callable[[], bool],
        apart: float,
        *,
        over: bool = True,
        plan: Callable[[], Any] = lambda: None,
        watch: Callable[[], None] | None = None,
    ) -> Agreed:
        """Agree with the other ranks on what happens at a boundary."""
        deadline = self._signals.deadline
        left = None if deadline == math.inf else deadline - time.monotonic()
        apart = min(apart, self._signals.grace / _ROUNDS)
        asked = Asked(step, self._signals.pending, left, self._saved, due, apart, over, plan, watch)
        agreed = self._ranks.decide(operation, asked)
        self._base = agreed.saved
        self._signals.agree(agreed.signals, agreed.left)
        if not self._ranks.leads:
            # What failed in the background, the ranks hear of at different times.
            self._saved = agreed.saved
        return agreed

    def _settle(self) -> None:
        """Wait for the save in flight, and give it up if it is not durable in time for the signals that have come."""
        pending = self._pending
        if pending is None:
            return
        try:
            failure = pending.exception(left_until(self._signals.deadline))
        except TimeoutError:
            # Where several ranks cancel it, one of them may hear of another's first.
            if pending.cancel() or failed_of(pending.exception(), CancelledError):
                self._pending = self._saved = None
                self._given_up(f"{pending.path} was not durable in time")
            return
        if failure is not None:
            self._saved = None

    def _miss(self, why: str) -> None:
        """This rank does not save the step that all have agreed to save: the others, which do, hear why."""
        step, self._wanted = self._wanted, None
        if step is None or not self._is_shared:
            return
        if self._signals.called:
            # Before they save for a signal they ask once more.
            self._ranks.leave(why)
        else:
            self._ranks.miss_save(self.path(step), why)

    def _wait_for_all(self, end: float) -> None:
        """Wait until the last save is over on all ranks; where it has failed, not for ranks that do not wait for it."""
        pending = self._pending

        def has_failed(limit: float) -> BaseException | None:
            with contextlib.suppress(TimeoutError, CancelledError):
                return None if pending is None else pending.exception(left_until(limit))
            return None

        def watch() -> None:
            failure = has_failed(0.0)
            if failure is not None:
                raise SaveFailed(f"the save that it waited for has failed: {failure}")

        try:
            self._wait_together(end, self._is_saved, watch)
        except SaveFailed:
            return
        except RanksError as told:
            # What has failed on all, this rank hears of itself, or has been told already.
            if not failed_of(told, SaveFailed) or (pending is not None and has_failed(end) is None):
                raise

    def _is_saved(self, limit: float) -> bool:
        """Whether the save in flight, and what follows it, is over on this rank by ``limit``."""
        pending = self._pending
        return (pending is None or pending.finished.wait(left_until(limit))) and self._after_save.is_over(limit)

    def _wait_for_copies(self, end: float) -> None:
        """Wait until all that waits is at the remote tier."""
        if self._remote is None or self._read_only:
            return
        drain = self._drain
        if not self._is_shared:
            if drain is not None:
                # Where a signal has come, the step boundary is more urgent; once it is answered, the process's end is.
                drain.wait(end, lambda: bool(self._signals.pending) or time.monotonic() >= self._signals.end)
            return
        # The first rank commits, so that what it has done is done.
        leading = drain if self._ranks.leads else None
        with leading.hurry() if leading else contextlib.nullcontext():
            over = self._wait_together(end, leading.is_over if leading else lambda _: True)
        if over:
            self._ranks.first("wait: copies", leading.tell if leading else lambda: None)

    def _wait_together(
        self, end: float, is_over: Callable[[float], bool], watch: Callable[[], None] | None = None
    ) -> bool:
        """Wait until something is over on all ranks, or a save in flight is given up on all for a signal.

        Args:
            end: until when, by ``time.monotonic``.
            is_over: whether it is over on this rank by such a time.
            watch: as :attr:`.ranks.Asked.watch`.

        Returns:
            Whether it is over.

        Raises:
            TimeoutError: not by ``end``. It goes on.
        """
        pause = _FIRST_LOOK
        while True:
            over = is_over(min(end, time.monotonic() + pause))
            agreed = self._ask("wait", 0, lambda: False, 0.0, over=over, watch=watch)
            if agreed.signals:
                self._settle()
            if agreed.signals or agreed.over:
                return agreed.over
            if end < math.inf and self._ranks.first("wait: timeout", lambda: time.monotonic() >= end):
                raise TimeoutError(f"wait: {self.directory}: what is in flight is not done in time; it goes on")
            pause = min(2 * pause, _LAST_LOOK)

    def _given_up(self, what: str) -> None:
        logger.error("%s: the save for %s is given up: %s", self.directory, self._signals.names(), what)

    def _signal_came(self) -> None:
        """In the handler, or at the begin of a steady stretch."""
        answer = self._steady
        if answer is not None and self._signals.pending:
            # A second signal meanwhile is only noted.
            self._steady = None
            try:
                answer()
            finally:
                self._steady = answer
