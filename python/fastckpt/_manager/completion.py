"""The waits of a run: for the last save on all ranks, for the copies, and at the end of the ``with`` statement."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastckpt.exceptions import RanksError

from .after_save import seconds_until
from .crew import SaveFailed, failed_with

if TYPE_CHECKING:
    from fastckpt._api.reports import SaveReport

    from .after_save import AfterSave
    from .crew import Crew
    from .drain import Drain
    from .preemption import Preemption
    from .saves import Saves
    from .step_boundary import StepBoundary

#: Seconds between two rounds of ranks that wait for a save, at first and at most.
_FIRST_LOOK, _LAST_LOOK = 0.02, 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Waits for the background work of a run in a directory.

    Attributes:
        drain: copies to the remote tier; None where this process does not.
        copies: whether any process copies to the remote tier.
        shared: whether several ranks save together.
    """

    directory: str
    ranks: Crew
    saves: Saves
    after_save: AfterSave
    drain: Drain | None
    preemption: Preemption
    boundary: StepBoundary
    copies: bool
    shared: bool

    def wait(self, timeout: float | None = None) -> SaveReport | None:
        """See :meth:`fastckpt.Manager.wait`."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        pending, signals = self.saves.pending, self.preemption.signals
        if self.shared:
            self._wait_for_all(end)
        if pending is not None:
            with signals.answered_by(signals.answer or self.preemption.settle):
                if not self.shared:
                    signals.answer_now()
                self.saves.wait(pending, end)
        self.after_save.wait(end)
        self._wait_for_copies(end)
        self.boundary.raise_stale()
        return self.saves.last_report()

    def end_block(self, error: BaseException | None) -> None:
        """End the manager's ``with`` statement, which may have raised ``error``: wait for background work.

        It answers signals that come during this wait, or came after the last step boundary: saves in flight become
        durable or are abandoned, and the signals are passed on.
        """
        signals = self.preemption.signals
        try:
            if error is not None or not self.shared:
                signals.answer = self.preemption.answer_at_end
                signals.answer_now()
            failure, why = self._finish(error), None
            if self.shared and not signals.exiting:
                if failure is not None:
                    why = f"its `with` statement ended with {type(failure).__name__}: {failure}"
                    self.ranks.leave(why)
                    self.boundary.miss(why)
                self.ranks.end(why)
                self.preemption.pass_on_at_end()
            self.ranks.end()
            if failure is not error and failure is not None:
                raise failure
        finally:
            try:
                if self.drain is not None:
                    # Without an error, all work is done, or has failed.
                    came = error is not None or signals.first is not None
                    self.drain.leave(signals.end if came else 0.0)
            finally:
                signals.answer = None
                signals.uninstall()
                if not signals.exiting:
                    # These signals came after the ranks exchanged theirs: no other rank learns of them.
                    self.preemption.pass_on_at_end()

    def _finish(self, error: BaseException | None) -> BaseException | None:
        """Wait for background work at the end of the ``with`` statement; returns the error that ends the statement."""
        try:
            if error is None or not self.shared:
                self.wait()
            else:
                # The other ranks may be in another call, so this one does not wait with them.
                self.preemption.settle()
                self.after_save.wait(math.inf)
        except Exception as failed:  # noqa: BLE001 - it is raised later, or in the log
            # Failures are in the log, and so is a save abandoned for a signal; the error that ends the ``with``
            # statement must not be lost.
            return failed if error is None and not isinstance(failed, CancelledError) else error
        return error

    def _wait_for_all(self, end: float) -> None:
        """Wait until the last save has ended on all ranks; after a failure, only for ranks that wait for it."""
        pending = self.saves.pending

        def has_failed(limit: float) -> BaseException | None:
            with contextlib.suppress(TimeoutError, CancelledError):
                return None if pending is None else pending.exception(seconds_until(limit))
            return None

        def watch() -> None:
            failure = has_failed(0.0)
            if failure is not None:
                raise SaveFailed(f"the save that it waited for has failed: {failure}")

        def is_saved(limit: float) -> bool:
            saved = pending is None or pending.finished.wait(seconds_until(limit))
            return saved and self.after_save.is_over(limit)

        try:
            self._wait_together(end, is_saved, watch)
        except SaveFailed:
            return
        except RanksError as reported:
            # If the save failed on all ranks, this rank knows it, or has raised the error before.
            if not failed_with(reported, SaveFailed) or (pending is not None and has_failed(end) is None):
                raise

    def _wait_for_copies(self, end: float) -> None:
        """Wait until all queued checkpoints are at the remote tier."""
        drain, signals = self.drain, self.preemption.signals
        if not self.copies:
            return
        if not self.shared:
            if drain is not None:
                # A signal is answered first, at the step boundary; then the process must end in time.
                drain.wait(end, lambda: bool(signals.pending) or time.monotonic() >= signals.end)
            return
        # The coordinator commits the copies: they are done when its drain is.
        leading = drain if self.ranks.leads else None
        with leading.hurry() if leading else contextlib.nullcontext():
            over = self._wait_together(end, leading.is_over if leading else lambda _: True)
        if over:
            self.ranks.first("wait: copies", leading.raise_failure if leading else lambda: None)

    def _wait_together(
        self, end: float, is_over: Callable[[float], bool], watch: Callable[[], None] | None = None
    ) -> bool:
        """Wait until a condition holds on all ranks, or a save in flight is abandoned on all of them for a signal.

        Returns:
            Whether the condition holds on all ranks.

        Raises:
            TimeoutError: the condition does not hold by ``end``. The work continues.
        """
        pause = _FIRST_LOOK
        while True:
            over = is_over(min(end, time.monotonic() + pause))
            agreed = self.boundary.ask("wait", 0, lambda: False, 0.0, over=over, watch=watch)
            if agreed.signals:
                self.preemption.settle()
            if agreed.signals or agreed.over:
                return agreed.over
            if end < math.inf and self.ranks.first("wait: timeout", lambda: time.monotonic() >= end):
                raise TimeoutError(f"wait: {self.directory}: saves in flight did not finish in time; they continue")
            pause = min(2 * pause, _LAST_LOOK)
