"""A run that may be ended from outside: it saves first, where the state is whole."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastckpt._api.progress import until
from fastckpt._api.save import save
from fastckpt._units import seconds

from .aftermath import Aftermath, left_until
from .arguments import IN_BACKGROUND, metadata_of, step_of
from .cadence import Cadence
from .run import Run
from .signals import Signals

if TYPE_CHECKING:
    from fastckpt import keep as keeping
    from fastckpt._api.reports import SaveReport
    from fastckpt._background.pending import PendingSave

    from .directory import Directory

logger = logging.getLogger("fastckpt")


class Preemption(Run):
    """What a manager does when a signal comes.

    Args:
        directory: as for :class:`.run.Run`.
        policies: likewise.
        options: further arguments for the saves.
        read_only: whether nothing may be written.
    """

    def __init__(
        self,
        directory: Directory,
        policies: Sequence[keeping.Policy] | None,
        options: Mapping[str, Any],
        *,
        read_only: bool,
    ) -> None:
        super().__init__(directory, policies, read_only=read_only)
        self._options = dict(options)
        self._cadence = Cadence()
        self._aftermath = Aftermath(directory, self._catalogue, self._retention, self._cadence)
        self._signals = Signals(self._signal_came)
        #: The state that does not change at the moment: what saves it, for a signal that comes now.
        self._steady: Callable[[], object] | None = None
        #: The last save that was begun, and its step.
        self._pending: PendingSave | None = None
        #: The step that needs no further save: saved, being saved, or restored.
        self._saved: int | None = None
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
    ) -> Iterator[None]:
        """A stretch in which ``state`` does not change: an evaluation, a wait for data, a compilation.

        A signal that comes in it, or has come before it, is answered at once, from the signal handler: ``state`` is
        saved as the checkpoint of ``step``, unless it is saved already. Elsewhere a handler cannot know whether a step
        is half done. Give the state as :meth:`save` gets it, made at the begin.
        """
        self._check("steady")
        about = metadata_of(step_of("steady", step), metrics, metadata)
        self._cadence.reach(step, in_flight=self._in_flight)
        around, self._steady = self._steady, lambda: self._answer(step, state, about)
        try:
            # It may have come before.
            self._signal_came()
            yield
        finally:
            self._steady = around

    # What happens.

    @property
    def _in_flight(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def _how(self) -> dict[str, Any]:
        """What a save gets beside state, path and metadata."""
        # Of a failed save nothing is there: then everything is written once.
        base = None if self._saved is None else self.path(self._saved)
        return {"base": base, **self._options}

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

    def _answer(self, step: int, state: Any, about: dict[str, Any] | None = None) -> bool:
        """Save for the signals that have come, unless it is saved, and pass them on; whether it is durable.

        Without ``about`` no time is left to save.
        """
        names, deadline = self._signals.names(), self._signals.deadline
        try:
            self._settle()
            if self._saved != step:
                with until(deadline if about is not None else 0.0):
                    logger.info("%s: saving step %d for %s", self.directory, step, names)
                    began = self._cadence.begin()
                    # In this thread: Python's threads cannot be started reliably in a signal handler.
                    here = {key: value for key, value in self._how().items() if key not in IN_BACKGROUND}
                    report = save(state, self.path(step), metadata=about, **{**here, "bandwidth_limit": None})
                self._pending, self._report, self._saved = None, report, step
                # Removing old checkpoints is left to the next run: time is short.
                self._aftermath.note(about or {}, began, report, report.seconds)
        except TimeoutError as error:
            self._given_up(f"step {step}: {error}")
        except Exception as error:
            # The end of the process may hide it.
            logger.error("%s: the save for %s failed: %s", self.directory, names, error)  # noqa: TRY400 - it is raised
            raise
        finally:
            self._signals.pass_on()
        return self._saved == step

    def _answer_at_end(self) -> None:
        """Pass on the signals that have come when there will be no further step."""
        try:
            self._settle()
        finally:
            self._signals.pass_on()

    def _settle(self) -> None:
        """Wait for the save in flight, and give it up if it is not durable in time for the signals that have come."""
        pending = self._pending
        if pending is None:
            return
        try:
            failure = pending.exception(left_until(self._signals.deadline))
        except TimeoutError:
            if pending.cancel():
                self._pending = self._saved = None
                self._given_up(f"{pending.path} was not durable in time")
            return
        if failure is not None:
            self._saved = None

    def _given_up(self, what: str) -> None:
        logger.error("%s: the save for %s is given up: %s", self.directory, self._signals.names(), what)
