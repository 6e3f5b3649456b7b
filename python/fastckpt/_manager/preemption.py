"""A run that may be ended from outside: it saves first, where the state is whole."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from fastckpt._api.progress import until
from fastckpt._units import seconds

from .aftermath import Aftermath, left_until
from .agreement import Asked, failed_of
from .arguments import metadata_of, step_of
from .cadence import Cadence
from .run import Run
from .signals import Signals

if TYPE_CHECKING:
    from fastckpt import keep as keeping
    from fastckpt._api.reports import SaveReport
    from fastckpt._background.pending import PendingSave

    from .agreement import Agreed, Alone
    from .calls import Calls
    from .directory import Directory

logger = logging.getLogger("fastckpt")

#: Seconds for which ranks may go on without asking each other, at most; and into how many parts the grace period is cut
#: by their questions, at least.
APART = 1.0
_ROUNDS = 20
#: Seconds that a save gets which all ranks have begun in time.
_LEAST = 0.01
#: Seconds between two questions of ranks that wait for a save, at first and at most.
_FIRST_LOOK, _LAST_LOOK = 0.02, 1.0


class Preemption(Run):
    """What a manager does when a signal comes.

    Args:
        directory: as for :class:`.run.Run`.
        policies: likewise.
        agree: likewise.
        calls: what saves.
        read_only: whether nothing may be written.
    """

    def __init__(
        self,
        directory: Directory,
        policies: Sequence[keeping.Policy] | None,
        agree: Alone,
        calls: Calls,
        *,
        read_only: bool,
    ) -> None:
        super().__init__(directory, policies, agree, read_only=read_only)
        self._calls = calls
        self._cadence = Cadence()
        self._aftermath = Aftermath(directory, self._catalogue, self._retention, self._cadence, leads=agree.leads)
        self._signals = Signals(self._signal_came, shared=agree.size > 1)
        #: The state that does not change at the moment: what saves it, for a signal that comes now.
        self._steady: Callable[[], object] | None = None
        #: The last save that was begun, and its step.
        self._pending: PendingSave | None = None
        #: The step that needs no further save: saved, being saved, or restored.
        self._saved: int | None = None
        #: What it was at the last boundary, on all ranks: the next save may take files from that step.
        self._base: int | None = None
        #: The report of the last durable save.
        self._report: SaveReport | None = None

    def save_on_signal(self, *signals: int, grace: float | str | None = None, exit: bool = True) -> None:  # noqa: A002 - reads best
        """Save when one of these signals comes, at the next step boundary, and then do what the signal would have done.

        At the next call of :meth:`should_save` or :meth:`save` the step is saved; within :meth:`steady`, at once. When
        the checkpoint is durable, or given up, the handler that the signal had before is called. Without one the
        process ends by SystemExit with 128 + its number. In a forked child nothing is saved, and the signal does what
        it did before, but SIGUSR1 and the like, which do not end a child. Call it in the main thread, after others have
        installed their handlers.

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
        is half done. Give the state as :meth:`save` gets it, made at the begin.

        Among several ranks no handler can act alone: there a signal is answered at the begin or the end of the stretch,
        by all of them.
        """
        self._check("steady")
        about = metadata_of(step_of("steady", step), metrics, metadata)
        self._cadence.reach(step, in_flight=self._in_flight)
        if self._is_shared:
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

    @property
    def _is_shared(self) -> bool:
        """Whether several ranks save together."""
        return self._agree.size > 1 and not self._read_only

    @property
    def _in_flight(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def _how(self, about: Mapping[str, Any], saved: int | None) -> dict[str, Any]:
        """What a save gets beside state and path; ``saved`` is the step that it may take files from."""
        # Of a failed save nothing is there: then everything is written once.
        base = None if saved is None else self.path(saved)
        return {"base": base, **self._calls.options, "metadata": about}

    def _ask(self, operation: str, step: int, due: Callable[[], bool], apart: float, *, over: bool = True) -> Agreed:
        """Agree with the other ranks on what happens at a boundary."""
        deadline = self._signals.deadline
        left = None if deadline == math.inf else deadline - time.monotonic()
        asked = Asked(
            step, self._signals.pending, left, self._saved, due, min(apart, self._signals.grace / _ROUNDS), over
        )
        agreed = self._agree.decide(operation, asked)
        self._base = agreed.saved
        self._signals.agree(agreed.signals, agreed.left)
        if not self._agree.leads:
            # What failed in the background, the ranks hear of at different times.
            self._saved = agreed.saved
        return agreed

    def _answer_together(self, step: int, state: Any, about: dict[str, Any], per_rank: Any) -> None:
        """Answer what has come to any rank, at a place to which all of them come."""
        if not self._agree.skips() and self._ask("steady", step, lambda: False, APART).signals:
            self._answer(step, state, about, per_rank)

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

    def _answer(self, step: int, state: Any, about: dict[str, Any] | None = None, per_rank: Any = None) -> bool:
        """Save for the signals that have come, unless it is saved, and pass them on; whether it is durable.

        Without ``about`` no time is left to save.
        """
        names, deadline = self._signals.names(), self._signals.deadline
        try:
            self._settle()
            if self._saved != step:
                in_time = about is not None and self._agree.first(lambda: time.monotonic() < deadline)
                # Who has agreed to save takes part: the others wait for this rank.
                with until(max(deadline, time.monotonic() + _LEAST) if in_time else 0.0):
                    logger.info("%s: saving step %d for %s", self.directory, step, names)
                    began = self._cadence.begin()
                    # In this thread: Python's threads cannot be started reliably in a signal handler.
                    how = {**self._how(about or {}, self._saved), "bandwidth_limit": None}
                    report = self._calls.save(state, self.path(step), per_rank, how)
                self._pending, self._report, self._saved = None, report, step
                # Removing old checkpoints is left to the next run: time is short.
                self._aftermath.note(about or {}, began, report, report.seconds)
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
        """The block has ended, with ``failure`` on this rank: answer what has come to any rank, or tell the others."""
        signals = self._signals
        if not self._is_shared or signals.exiting:
            return
        if failure is not None:
            self._agree.leave(failure)
            signals.agree(signals.pending, None)
        elif signals.installed:
            self._ask("Manager", 0, lambda: False, 0.0)
        signals.pass_on()

    def _answer_at_end(self) -> None:
        """Pass on the signals that have come when there will be no further step; among several ranks, not yet."""
        try:
            self._settle()
        finally:
            if self._agree.size == 1:
                self._signals.pass_on()

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

    def _is_saved(self, limit: float) -> bool:
        """Whether the save in flight, and what follows it, is over on this rank by ``limit``."""
        pending = self._pending
        return (pending is None or pending.finished.wait(left_until(limit))) and self._aftermath.is_over(limit)

    def _wait_together(self, end: float, is_over: Callable[[float], bool]) -> bool:
        """Wait until something is over on all ranks, or a save in flight is given up on all for a signal.

        Args:
            end: until when, by ``time.monotonic``.
            is_over: whether it is over on this rank by such a time.

        Returns:
            Whether it is over.

        Raises:
            TimeoutError: not by ``end``. It goes on.
        """
        pause = _FIRST_LOOK
        while True:
            over = is_over(min(end, time.monotonic() + pause))
            agreed = self._ask("wait", 0, lambda: False, 0.0, over=over)
            if agreed.signals:
                self._settle()
            if agreed.signals or agreed.over:
                return agreed.over
            if end < math.inf and self._agree.first(lambda: time.monotonic() >= end):
                raise TimeoutError(f"wait: {self.directory}: what is in flight is not done in time; it goes on")
            pause = min(2 * pause, _LAST_LOOK)

    def _given_up(self, what: str) -> None:
        logger.error("%s: the save for %s is given up: %s", self.directory, self._signals.names(), what)
