"""When a :class:`fastckpt.Manager` saves.

fastckpt.Manager("runs/gpt", save_when=[when.Every(steps=1000), when.Every(time="10min"), when.First()])

A step is saved if one policy of the list selects it. A pending signal of ``Manager.save_on_signal``, or news of
``Manager.save_on``, also saves it. A policy is any object with ``due(moment)``: :class:`Policy`.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fastckpt._interval import LEAST_MTTF, MTTF_GPU, best_interval, cluster_mttf
from fastckpt._units import fraction, seconds, show_seconds, show_share

from .keep import named_steps, steps_or_time

__all__ = ["Auto", "Continuously", "Every", "First", "Moment", "Policy", "Steps"]

logger = logging.getLogger("fastckpt")

#: The relative change of the interval that the log reports.
_CHANGED = 0.1


@dataclass(frozen=True, slots=True)
class Moment:
    """The facts that a policy can use for its decision.

    Attributes:
        step: the training step.
        previous: the last earlier step that the manager knows, or None.
        first: the first step that this manager was asked about.
        since: seconds since the last save began, or since the manager was made.
        in_flight: whether a save is still being written.
        step_seconds: the duration of a step, or None before it is known.
        cost: seconds of training that a save costs, or None before the first save is durable.
        durable_seconds: seconds from the start of a save until it is durable, or None before the first one is.
    """

    step: int
    previous: int | None
    first: int
    since: float
    in_flight: bool
    step_seconds: float | None
    cost: float | None
    durable_seconds: float | None


@runtime_checkable
class Policy(Protocol):
    """Decides when to save."""

    def due(self, moment: Moment) -> bool:
        """Whether to save the step. The manager may call this twice for one step.

        Args:
            moment: the facts about the step.

        Returns:
            Whether it is due.
        """


class Every:
    """Saves at regular intervals.

    Args:
        steps: at each multiple of this, or at the first step beyond it if the loop skips steps.
        time: this long after the last save began: seconds, or a string with a unit (``"10min"``). Give one of the two.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> import fastckpt
        >>> manager = fastckpt.Manager("runs/gpt", save_when=fastckpt.when.Every(steps=100))
        >>> [step for step in range(1, 301) if manager.should_save(step)]
        [100, 200, 300]
    """

    __slots__ = ("steps", "time")

    def __init__(self, steps: int | None = None, *, time: float | str | None = None) -> None:
        self.steps, self.time = steps_or_time("when.Every", steps, time)

    def due(self, moment: Moment) -> bool:
        """Whether to save the step."""
        if self.steps is None:
            return moment.since >= (self.time or 0.0)
        if moment.previous is None:
            return moment.step > 0 and moment.step % self.steps == 0
        return moment.step // self.steps > moment.previous // self.steps

    def __repr__(self) -> str:
        return f"Every(steps={self.steps})" if self.steps is not None else f"Every(time={self.time:g})"


class Steps:
    """Saves these steps.

    Args:
        steps: their numbers.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> import fastckpt
        >>> manager = fastckpt.Manager("runs/gpt", save_when=fastckpt.when.Steps(1, 50))
        >>> [step for step in range(1, 101) if manager.should_save(step)]
        [1, 50]
    """

    __slots__ = ("steps",)

    def __init__(self, *steps: int) -> None:
        self.steps = named_steps("when.Steps", steps)

    def due(self, moment: Moment) -> bool:
        """Whether to save the step."""
        return moment.step in self.steps

    def __repr__(self) -> str:
        return f"Steps({', '.join(map(str, sorted(self.steps)))})"


@dataclass(frozen=True, slots=True)
class First:
    """Saves the first step that the manager is asked about, which shows at once whether saving works."""

    def due(self, moment: Moment) -> bool:
        """Whether to save the step."""
        return moment.step == moment.first


class Continuously:
    """Saves as soon as the last save is durable.

    Args:
        apart: at least this long after the last save began: seconds, or a string with a unit; None for no minimum.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> import fastckpt
        >>> manager = fastckpt.Manager("runs/gpt", save_when=fastckpt.when.Continuously(apart="1h"))
        >>> manager.should_save(1)  # an hour after the last save, or after the manager was made
        False
    """

    __slots__ = ("apart",)

    def __init__(self, apart: float | str | None = None) -> None:
        self.apart = 0.0 if apart is None else seconds("when.Continuously: apart", apart)

    def due(self, moment: Moment) -> bool:
        """Whether to save the step."""
        return not moment.in_flight and moment.since >= self.apart

    def __repr__(self) -> str:
        return f"Continuously(apart={self.apart:g})"


class Auto:
    """Saves at the interval that loses the least time, as measured; the policy of ``Manager(save_when="auto")``.

    The interval is the optimum that ``fastckpt.tools.plan`` computes from the measured cost of a save and the mean time
    to failure: too many saves cost time, too few lose work. The interval is never so short that saves cost more than
    ``overhead`` of the time, nor shorter than the time until a save is durable. It is rounded to whole steps. If
    checkpoints become durable only some seconds after training continues, the optimum stays the same.

    The second step that the manager is asked about is saved, to have a measurement. The log (``fastckpt``, INFO) shows
    the interval and the reason, and again when it changes by more than a tenth.

    Args:
        mttf: mean time to failure of the whole job: seconds, or a string with a unit (``"90min"``, ``"6h"``). None for
            50,000 h per process of the job, as MLCommons assumes for an accelerator.
        overhead: the share of the time that saves may cost, between 0 and 1.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> import fastckpt
        >>> round(fastckpt.when.Auto(mttf="6h").interval(cost=2.0, durable_seconds=30.0))
        295
    """

    def __init__(self, mttf: float | str | None = None, overhead: float | str = 0.05) -> None:
        #: Whether the mean time to failure is assumed per process.
        self.assumes = mttf is None
        self.mttf = MTTF_GPU if mttf is None else seconds("when.Auto: mttf", mttf, LEAST_MTTF)
        self.overhead = fraction("when.Auto: overhead", overhead)
        self._said: float | None = None

    def due(self, moment: Moment) -> bool:
        """Whether to save the step."""
        if moment.in_flight:
            return False
        if moment.cost is None or moment.durable_seconds is None:
            return moment.step > moment.first
        least, best = self._limits(moment.cost, moment.durable_seconds)
        interval = max(least, best)
        self._tell(interval, least, best, moment)
        # Save at this step or the next, whichever is closer to the interval; but the limit is hard.
        return moment.since >= max(least, interval - (moment.step_seconds or 0.0) / 2)

    def interval(self, cost: float, durable_seconds: float) -> float:
        """Seconds from the start of a save to the start of the next.

        Args:
            cost: seconds of training that a save costs.
            durable_seconds: seconds from the start of a save until it is durable.

        Returns:
            The interval, seconds.
        """
        return max(self._limits(cost, durable_seconds))

    def _limits(self, cost: float, durable_seconds: float) -> tuple[float, float]:
        # A copy that takes no time has the measured cost 0.
        cost = max(cost, 1e-6)
        return max(cost / self.overhead, durable_seconds), best_interval(cost, self.mttf)

    def _tell(self, interval: float, least: float, best: float, moment: Moment) -> None:
        if self._said is not None and abs(interval - self._said) <= _CHANGED * self._said:
            return
        self._said = interval
        cost, durable = moment.cost or 0.0, moment.durable_seconds or 0.0
        if best >= least:
            why = f"the optimum for a mean time to failure of {show_seconds(self.mttf)}"
        elif least > durable:
            why = f"the optimum is {show_seconds(best)}, but overhead={show_share(self.overhead)}"
        else:
            why = f"the optimum is {show_seconds(best)}, but a save is durable only after {show_seconds(durable)}"
        steps = f", about {max(1, round(interval / moment.step_seconds))} steps" if moment.step_seconds else ""
        logger.info(
            'save_when="auto": a save every %s%s: a save costs %s of training and is durable after %s; %s',
            *(show_seconds(interval), steps, show_seconds(cost), show_seconds(durable), why),
        )

    def __repr__(self) -> str:
        return f"Auto(mttf={self.mttf:g}, overhead={self.overhead:g})"


def of_job(policy: Policy, ranks: int) -> Policy:
    """A policy for a job of several processes: ``Auto`` without ``mttf`` assumes an accelerator per process."""
    if not isinstance(policy, Auto) or not policy.assumes:
        return policy
    own = copy.copy(policy)
    own.mttf = cluster_mttf(policy.mttf, ranks)
    return own


def __dir__() -> list[str]:
    return sorted(__all__)
