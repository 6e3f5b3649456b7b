"""Handles signals that announce the end of a run: each is recorded when it comes, then answered and passed on.

A signal is answered when the state is whole, within the grace period: the step is saved, or saves in flight become
durable or are abandoned. To pass it on is to let it have its effect without the manager. ``step_boundary`` decides
when the state is whole; ``completion`` handles waits and the end of a run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from fastckpt._api.progress import until

from .crew import failed_with
from .summons import Came

if TYPE_CHECKING:
    from .arguments import StepState
    from .crew import Crew
    from .saves import Saves

logger = logging.getLogger("fastckpt")

#: The share of the grace period for the save; the rest is for removing a save that takes longer, and for exit.
_SHARE = 0.9
#: The minimum time, in seconds, for a save that all ranks began in time.
_LEAST = 0.01


class Signals:
    """The signals that a manager answers.

    The handler takes no lock and logs nothing: it may interrupt anything in the main thread.

    Args:
        shared: whether a signal is answered only after all ranks have agreed on it.

    Attributes:
        answer: answers a signal when it comes, in the handler; None while the state may be inconsistent.
    """

    def __init__(self, *, shared: bool) -> None:
        self.answer: Callable[[], object] | None = None
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self.grace = math.inf
        self._exits = True
        self._over = False
        #: Signals that have come and are not answered yet, in order.
        self._pending: list[int] = []
        #: The number of signals that have come.
        self.came = 0
        #: The signals to answer.
        self._called: list[int] = [] if shared else self._pending
        #: The deadline of a save for these signals.
        self._deadline = math.inf
        #: Whether one of these signals has ended the run.
        self.exiting = False
        #: The deadline of the signals that were answered last.
        self._end = math.inf
        #: The first signal that was answered.
        self.first: signal.Signals | None = None

    def install(self, numbers: tuple[int, ...], grace: float | None, *, exits: bool) -> None:
        """Answer these signals from now on."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("save_on_signal: Python installs signal handlers in the main thread only: call it there")
        named = [signal.Signals(number) for number in numbers]
        self.grace = math.inf if grace is None else grace * _SHARE
        self._exits = exits
        for number in named:
            before = signal.signal(number, self._handle)
            if before != self._handle and (self._over or number not in self._before):
                self._before[number] = before
        self._over = False

    def uninstall(self) -> None:
        """Put the earlier handlers back, unless another one was installed since."""
        if os.getpid() != self._process or threading.current_thread() is not threading.main_thread():
            return
        self._over = True
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                # None means a handler that was not installed from Python: it cannot be restored.
                signal.signal(number, signal.SIG_DFL if before is None else before)

    @contextlib.contextmanager
    def answered_by(self, answer: Callable[[], object]) -> Iterator[None]:
        """A context in which a signal is answered when it comes."""
        around, self.answer = self.answer, answer
        try:
            yield
        finally:
            self.answer = around

    def answer_now(self) -> None:
        """Answer the signals that have come, if possible here: in the handler, or at the beginning of that context."""
        answer = self.answer
        if answer is not None and self._pending:
            # A second signal that arrives meanwhile is only recorded.
            self.answer = None
            try:
                answer()
            finally:
                self.answer = answer

    @property
    def pending(self) -> tuple[int, ...]:
        """The signals that have come and were not answered."""
        return tuple(self._pending)

    def told(self) -> Came:
        """The signals of this rank, for the others."""
        count = self.came
        left = None if self.deadline == math.inf else self.deadline - time.monotonic()
        return Came(count, self.pending, left)

    @property
    def called(self) -> bool:
        """Whether a signal must be answered."""
        return bool(self._called)

    @property
    def deadline(self) -> float:
        """When a save for the signals that have come must be done, by ``time.monotonic``."""
        return self._deadline if self._pending or self._called else math.inf

    @property
    def end(self) -> float:
        """The time until which other work may continue after the answered signals; infinite once the whole grace period
        is over and the process still lives.
        """  # noqa: D205 - two sentences that belong together
        over = self._end + self.grace * (1 / _SHARE - 1)
        return self._end if time.monotonic() < over else math.inf

    def agree(self, numbers: tuple[int, ...], left: float | None) -> None:
        """Record that all ranks must answer these signals, whichever rank got them; ``left`` seconds remain to save."""
        if self._called is self._pending:
            return
        deadline = min(self.deadline, math.inf if left is None else time.monotonic() + left)
        self._called[:] = numbers
        self._deadline = deadline

    def names(self) -> str:
        """The names of the signals that have come, for messages."""
        return " and ".join(signal.Signals(number).name for number in self._called or self._pending)

    def pass_on(self) -> None:
        """Let the answered signals have the effect that they have without the manager, each once.

        Raises:
            SystemExit: there was no handler for a signal whose default is to end the process.
        """
        if self._called:
            self._end = self.deadline
        while self._called:
            number = self._called.pop(0)
            if number in self._pending and self._called is not self._pending:
                self._pending.remove(number)
            if self.first is None:
                self.first = signal.Signals(number)
            before = self._before.get(number)
            if callable(before):
                before(number, None)
            elif before != signal.SIG_IGN and self._exits:
                self._called.clear()
                self._pending.clear()
                self.exiting = True
                raise SystemExit(128 + number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._in_child(number, frame)
            return
        if self._over:
            # The manager has ended, but a later handler's code has put this one back.
            self._default(number, frame)
            return
        if not self._pending:
            self._deadline = min(self.deadline, time.monotonic() + self.grace)
        if number not in self._pending:
            self._pending.append(number)
            self.came += 1
        self.answer_now()

    def _in_child(self, number: int, frame: FrameType | None) -> None:
        """In a forked child, save nothing, and let a signal that ends a process end the child.

        A notice such as SIGUSR1, which a scheduler sends to all processes of a job, does not end it: otherwise the
        program would lose its data-loader workers before it has saved.
        """
        ends = {signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", None)}
        if number in ends or callable(self._before.get(number)):
            self._default(number, frame)

    def _default(self, number: int, frame: FrameType | None) -> None:
        """Let the signal have its effect without this handler."""
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@dataclass(frozen=True, slots=True, eq=False)
class Preemption:
    """Answers signals in the run of a directory, in the same way on all ranks."""

    directory: str
    signals: Signals
    saves: Saves
    ranks: Crew

    def settle(self) -> None:
        """Wait for the saves in flight, and abandon those that do not become durable within the grace period."""
        for path in self.saves.settle(self.signals.deadline):
            self._given_up(f"{path} was not durable in time")

    def answer(self, step: int, given: StepState | None) -> bool:
        """Save for the signals that have come, unless the step is saved, and pass them on; returns whether it is saved.

        Args:
            step: the step.
            given: its state; None if no time is left to save.
        """
        signals, saves = self.signals, self.saves
        names, deadline = signals.names(), signals.deadline
        try:
            self.settle()
            saved, in_time, plan = saves.step, False, dict[str, Any]()
            if given is not None:
                saved, in_time, plan = self.ranks.first(
                    "steady: signal", lambda: (saves.step, time.monotonic() < deadline, saves.plan(step)), step=step
                )
                if not self.ranks.leads:
                    saves.step = saved
            if saved != step:
                if given is None or not in_time:
                    raise TimeoutError("no time is left")  # noqa: TRY301 - as a save does that is given up
                # A rank that has agreed to the save must take part, because the others wait for it.
                with until(max(deadline, time.monotonic() + _LEAST)):
                    logger.info("%s: saving step %d for %s", self.directory, step, names)
                    # Saved in this thread, because a signal handler cannot start a thread reliably.
                    saves.save_in_time(given, saved, plan)
        except Exception as error:
            if failed_with(error, TimeoutError):
                self._given_up(f"step {step}: {error}")
            else:
                # The end of the process may hide this message.
                logger.error("%s: the save for %s failed: %s", self.directory, names, error)  # noqa: TRY400 - it is raised
                raise
        finally:
            signals.pass_on()
        return saves.step == step

    def answer_at_end(self) -> None:
        """When no further step follows, pass on the signals that came; in a job, :meth:`pass_on_at_end` does that."""
        try:
            self.settle()
        finally:
            if self.ranks.size == 1:
                self.signals.pass_on()

    def pass_on_at_end(self) -> None:
        """Pass on the signals in a job, after the last round of the ranks."""
        # All ranks have agreed in `wait` on the signals known to any of them; a signal that came later concerns only
        # this rank.
        self.signals.pass_on()
        self.signals.agree(self.signals.pending, None)
        self.signals.pass_on()

    def _given_up(self, what: str) -> None:
        logger.error("%s: the save for %s was abandoned: %s", self.directory, self.signals.names(), what)
