"""A run that may be ended from outside: it saves first, where the state is whole."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from typing import Any

from fastckpt._api.progress import until
from fastckpt._units import seconds

from .arguments import metadata_of, step_of
from .ranks import failed_of
from .step_boundary import APART, Boundary

logger = logging.getLogger("fastckpt")

#: Seconds that a save gets which all ranks have begun in time.
_LEAST = 0.01


class Preemption(Boundary):
    """What a manager does when a signal comes; the arguments are those of :class:`.step_boundary.Boundary`."""

    def save_on_signal(self, *signals: int, grace: float | str | None = None, exit: bool = True) -> None:  # noqa: A002 - reads best
        """Save when one of these signals comes, at the next step boundary, and then do what the signal would have done.

        At the next call of :meth:`should_save` or :meth:`save` the step is saved; within :meth:`steady`, at once. When
        the checkpoint is durable, or given up, the handler that the signal had before is called. Without one the
        process ends by SystemExit with 128 + its number. In a forked child nothing is saved, and the signal does what
        it did before, but SIGUSR1 and the like, which do not end a child. Call it in the main thread, after others have
        installed their handlers.

        Among several ranks, a signal to one of them is answered by all, which save the same step; each then does what
        it would have done had the signal come to itself.

        Args:
            signals: numbers; SIGTERM without any.
            grace: how long after a signal the process may live: seconds, or a string with a unit (``"25s"``). A save
                that is not durable after nine tenths of it is given up, and nothing of it stays. None: without limit.
            exit: False: where there was no handler, go on; the loop ends when :attr:`preempted` says so.

        Raises:
            RuntimeError: not the main thread, or the manager is read-only.
            ValueError: a number is of no signal that Python has a name for.
        """
        self._check("save_on_signal")
        from signal import SIGTERM  # noqa: PLC0415 - beside the argument of that name

        limit = None if grace is None else seconds("save_on_signal: grace", grace)
        self._signals.install(tuple(signals) or (SIGTERM,), limit, exits=bool(exit))

    @property
    def preempted(self) -> int | None:
        """The first signal of :meth:`save_on_signal` that was answered, or None: now the loop may end.

        Not before the checkpoint is durable, or given up: a loop that ends when it is set has saved.
        """
        return self._signals.first

    @contextlib.contextmanager
    def steady(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        per_rank: Any = None,
    ) -> Iterator[None]:
        """A stretch in which ``state`` does not change: an evaluation, a wait for data, a compilation.

        A signal that comes in it, or has come before it, is answered at once, from the signal handler: ``state`` is
        saved as the checkpoint of ``step``, unless it is saved already. Elsewhere a handler cannot know whether a step
        is half done. Give the state as :meth:`save` gets it, made at its beginning.

        Among several ranks no handler can act alone: there all of them answer a signal together, at the beginning or
        the end of the stretch.
        """
        self._check("steady")
        about = metadata_of(step_of("steady", step), metrics, metadata)
        self._timing.reach(step, in_flight=self._in_flight)
        if self._is_shared:
            if step != self._wanted:
                self._miss(f"it has gone on to step {step} without the save")
            self._answer_together(step, state, about, per_rank)
            yield
            self._answer_together(step, state, about, per_rank)
            return
        around, self._steady = self._steady, lambda: self._answer(step, state, about, per_rank)
        try:
            # It may have come before.
            self._signal_came()
            yield
        finally:
            self._steady = around

    # What happens.

    def _is_wanted(self, step: int, *, force: bool) -> bool:
        """Whether all ranks save the step, for a policy or for a signal; it is a step boundary."""
        self._timing.reach(step, in_flight=self._in_flight)
        if step != self._wanted:
            self._miss(f"it has gone on to step {step} without the save")
        self._wanted = None
        if not (force or self._schedule.due_by_step(self._timing.place())) and self._ranks.skips():
            return False

        def due() -> bool:
            return force or (step != self._saved and self._schedule.due(self._timing.moment(in_flight=self._in_flight)))

        apart = APART if self._schedule.may_wait else 0.0
        agreed = self._ask("should_save", step, due, apart, plan=lambda: self._plan_first(step))
        if agreed.signals:
            if step == agreed.saved:
                self._settle()
            # What was being saved may have failed.
            if not self._ranks.first(
                "should_save: signal", lambda: step != self._saved and time.monotonic() < self._signals.deadline
            ):
                self._answer(step, None)
                return force
        self._wanted, self._planned = (step, agreed.plan) if agreed.due else (None, {})
        return agreed.due

    def _answer_together(self, step: int, state: Any, about: dict[str, Any], per_rank: Any) -> None:
        """Answer what has come to any rank, at a place to which all of them come."""
        if not self._ranks.skips() and self._ask("steady", step, lambda: False, APART).signals:
            self._answer(step, state, about, per_rank)

    def _answer(self, step: int, state: Any, about: dict[str, Any] | None = None, per_rank: Any = None) -> bool:
        """Save for the signals that have come, unless it is saved, and pass them on; whether it is durable.

        Without ``about`` no time is left to save.
        """
        names, deadline = self._signals.names(), self._signals.deadline
        try:
            self._settle()
            saved, in_time = self._saved, False
            plan: dict[str, Any] = {}
            if about is not None:
                saved, in_time, plan = self._ranks.first(
                    "steady: signal", lambda: (self._saved, time.monotonic() < deadline, self._plan(step))
                )
            if saved != step:
                # Who has agreed to save takes part: the others wait for this rank.
                with until(max(deadline, time.monotonic() + _LEAST) if in_time else 0.0):
                    logger.info("%s: saving step %d for %s", self.directory, step, names)
                    began = self._timing.begin()
                    # In this thread: Python's threads cannot be started reliably in a signal handler.
                    how = {**self._how(about or {}, saved, plan), "bandwidth_limit": None}
                    report = self._calls.save(state, self.path(step), per_rank, how)
                self._pending, self._report, self._saved = None, report, step
                # Removing old checkpoints is left to the next run: time is short.
                self._after_save.note(about or {}, began, report, report.seconds)
        except Exception as error:
            if failed_of(error, TimeoutError):
                self._given_up(f"step {step}: {error}")
            else:
                # The end of the process may hide it.
                logger.error("%s: the save for %s failed: %s", self.directory, names, error)  # noqa: TRY400 - it is raised
                raise
        finally:
            self._signals.pass_on()
        return self._saved == step

    def _end_together(self, failure: BaseException | None) -> None:
        """The block has ended, with ``failure`` on this rank: tell the others, and pass on what has come."""
        signals = self._signals
        if not self._is_shared or signals.exiting:
            return
        if failure is not None:
            why = f"its block has ended with {type(failure).__name__}: {failure}"
            self._ranks.leave(why)
            self._miss(why)
        # On what had come to any rank, all have agreed in `wait`; what has come to this one since is its own.
        signals.pass_on()
        signals.agree(signals.pending, None)
        signals.pass_on()

    def _end(self, error: BaseException | None) -> None:
        """Wait for what is in flight; ``error`` has ended the block."""
        failure = error
        try:
            if error is None or not self._is_shared:
                self.wait()
            else:
                # The others may be elsewhere.
                self._settle()
                self._after_save.wait(math.inf)
        except Exception as failed:  # noqa: BLE001 - it is raised below, or in the log
            # What failed is in the log, and so is what was given up for a signal; the error that ends the block must
            # not be lost.
            if error is None and not isinstance(failed, CancelledError):
                failure = failed
        self._end_together(failure)
        if failure is not error and failure is not None:
            raise failure

    def _answer_at_end(self) -> None:
        """Pass on the signals that have come when there will be no further step; among several ranks, not yet."""
        try:
            self._settle()
        finally:
            if self._ranks.size == 1:
                self._signals.pass_on()
