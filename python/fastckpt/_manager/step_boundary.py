"""At a step boundary, where the state is whole, all ranks agree on what to save, and answer signals."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .arguments import state_of, step_of
from .crew import Agreed, Asked

if TYPE_CHECKING:
    from .crew import Crew
    from .preemption import Preemption
    from .saves import Saves
    from .schedule import Schedule
    from .stale import StaleAlarm
    from .step_timing import StepTiming

#: The least seconds for which ranks continue without asking each other, unless one calls.
_APART = 1.0
#: Seconds between two checks by the coordinator whether a policy wants a step that all would pass.
_LOOK = 0.1


@dataclass(slots=True, eq=False)
class StepBoundary:
    """The step boundaries of a run."""

    ranks: Crew
    schedule: Schedule
    timing: StepTiming
    saves: Saves
    alarm: StaleAlarm
    preemption: Preemption
    #: The step that all ranks agreed to save next, the last of these steps, and its place in the lineage.
    _wanted: int | None = field(default=None, init=False)
    _agreed: int | None = field(default=None, init=False)
    _plan: dict[str, Any] = field(default_factory=dict, init=False)
    #: The step that needed no further save on any rank at the last boundary: the next save may link its files.
    _base: int | None = field(default=None, init=False)
    #: The notice that is called at each boundary; its earlier results; the step of the last call, and whether it
    #: returned a new result.
    notice: Callable[[], object] | None = field(default=None, init=False)
    _heard: list[object] = field(default_factory=list, init=False)
    _news: tuple[int | None, bool] = field(default=(None, False), init=False)
    #: When the coordinator next checks whether a policy wants a step.
    _looks: float = field(default=0.0, init=False)

    def should_save(self, step: int, *, force: bool = False) -> bool:
        """Whether all ranks save the step, for a policy or for a signal."""
        self._reach(step)
        self._wanted = None
        news = self._has_news(step)
        if self._passes(step, needed=force or news or self.schedule.due_by_step()):
            return False
        saves = self.saves

        def due() -> bool:
            return force or (step != saves.step and (news or self.schedule.due(in_flight=saves.in_flight)))

        def plan() -> dict[str, Any]:
            saves.look(step)
            return saves.plan(step)

        apart = _APART if self.schedule.may_wait else 0.0
        agreed = self.ask("should_save", step, due, apart, plan=plan)
        # Before ranks save for a signal, they ask each other again: here only about a step that may be saved.
        if agreed.signals and (self.ranks.size == 1 or step == self._agreed):
            if step == agreed.saved:
                self.preemption.settle()
            # The save that was running may have failed.
            saved, in_time = self.ranks.first(
                "should_save: signal",
                lambda: (saves.step, time.monotonic() < self.preemption.signals.deadline),
                step=step,
            )
            if not self.ranks.leads:
                saves.step = saved
            if step == saved or not in_time:
                self.preemption.answer(step, None)
                return force
        if agreed.due:
            self._wanted, self._agreed, self._plan = step, step, agreed.plan
        return agreed.due

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
        per_rank: Any,
        *,
        force: bool,
    ) -> bool:
        """See :meth:`fastckpt.Manager.save`."""
        step = step_of("save", step)
        try:
            given = state_of(step, state, metrics, metadata, per_rank)
        except Exception:
            if self.ranks.size > 1 and step != self._wanted:
                # The other ranks ask whether to save the step, and wait for this rank's part in that round.
                self.should_save(step, force=force)
            raise
        # Ranks ask each other once about a step to save; one process checks again.
        if (self.ranks.size == 1 or step != self._wanted) and not self.should_save(step, force=force):
            return False
        # From here on, the save reports any failure to the others, or all ranks raise.
        self._wanted = None
        if self.preemption.signals.called:
            return self.preemption.answer(step, given)
        self.raise_stale()
        self.saves.begin(given, self._base, self._plan)
        return True

    @contextlib.contextmanager
    def steady(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None,
        per_rank: Any,
    ) -> Iterator[None]:
        """See :meth:`fastckpt.Manager.steady`."""
        given = state_of(step_of("steady", step), state, metrics, metadata, per_rank)
        self._reach(step)
        if self.ranks.leads:
            # Look here, because a signal handler has no time for it.
            self.saves.look(step)

        def answer() -> object:
            return self.preemption.answer(step, given)

        def answer_together() -> None:
            if not self._passes(step) and self.ask("steady", step, lambda: False, _APART).signals:
                answer()

        if self.ranks.size > 1:
            answer_together()
            yield
            answer_together()
            return
        with self.preemption.signals.answered_by(answer):
            # The signal may have come before this context.
            self.preemption.signals.answer_now()
            yield

    def ask(self, operation: str, step: int, due: Callable[[], bool], apart: float, **more: Any) -> Agreed:
        """Agree with the other ranks on the next action; the arguments are those of :class:`.crew.Asked`."""
        signals = self.preemption.signals
        if (call := self.ranks.take_call()) is not None:
            signals.agree(call.signals, call.left)
            if not set(signals.pending) <= set(call.signals):
                # Another signal has come since the call.
                self.ranks.urge()
            # ``answer`` asks the coordinator which step is saved.
            return Agreed(call.signals, call.left, self.saves.step, due=True, over=False, plan={})
        left = None if signals.deadline == math.inf else signals.deadline - time.monotonic()
        asked = Asked(step, signals.pending, left, self.saves.step, due, apart, **more)
        agreed = self.ranks.decide(operation, asked)
        self._base = agreed.saved
        signals.agree(agreed.signals, agreed.left)
        if not self.ranks.leads:
            # Ranks learn of a failure in the background at different times.
            self.saves.step = agreed.saved
        return agreed

    def _has_news(self, step: int) -> bool:
        """Whether the notice has returned a new result at this step; it is called once per step."""
        if self.notice is not None and step != self._news[0]:
            said = self.notice()
            self._news = step, bool(said) and said not in self._heard
            if self._news[1]:
                self._heard.append(said)
        return self._news[1]

    def _passes(self, step: int, *, needed: bool = False) -> bool:
        """Whether all ranks pass this boundary without a round, because none needs one or has called for it."""
        if not self.ranks.passes(needed=needed):
            return False
        if self.ranks.leads and time.monotonic() >= self._looks:
            self._looks = time.monotonic() + _LOOK
            if step != self.saves.step and self.schedule.due(in_flight=self.saves.in_flight):
                self.ranks.urge()
        return True

    def raise_stale(self) -> None:
        """Raise on all ranks the pending error of the last save."""
        if self.alarm.raises:
            self.ranks.first("stale", self.alarm.raise_once)

    def miss(self, why: str) -> None:
        """Tell the other ranks why this one does not save the step that all agreed to save."""
        step, self._wanted = self._wanted, None
        if step is None or self.ranks.size == 1:
            return
        if self.preemption.signals.called:
            # Before ranks save for a signal, they ask each other again.
            self.ranks.leave(why)
        else:
            self.ranks.miss_save(self.saves.path_of(step), why)

    def _reach(self, step: int) -> None:
        self.timing.reach(step, in_flight=self.saves.in_flight)
        if step != self._wanted:
            self.miss(f"it has gone on to step {step} without the save")
