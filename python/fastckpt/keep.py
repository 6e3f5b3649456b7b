"""Which checkpoints a :class:`fastckpt.Manager` keeps.

fastckpt.Manager("runs/gpt", keep=[keep.Last(3), keep.Best(2, "loss"), keep.Every(steps=10_000)])

A checkpoint stays as long as one policy of the list keeps it. The newest checkpoint and the pinned ones always stay. A
policy is any object with ``kept(saved, now)`` as :class:`Policy` describes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from fastckpt._units import LEAST_AGE, seconds, show_seconds

__all__ = ["Best", "Every", "Last", "Policy", "Saved", "Steps", "Younger", "parse"]


@dataclass(frozen=True, slots=True)
class Saved:
    """The facts about one checkpoint that a policy can use.

    Attributes:
        step: the training step of the checkpoint.
        created: when its save began, in seconds since 1970.
        metrics: the metrics that were saved with it.
        changed: for the groups ``model`` and ``optimizer``, the share of the bytes in tensors that differ from the
            previous checkpoint; empty if unknown.
    """

    step: int
    created: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    changed: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Policy(Protocol):
    """Decides which checkpoints are kept."""

    def kept(self, saved: Sequence[Saved], now: float) -> set[int]:
        """The steps that must stay.

        Args:
            saved: the checkpoints that seem loadable, by rising step.
            now: seconds since 1970.

        Returns:
            The steps of those that it keeps.
        """


@dataclass(frozen=True, slots=True)
class Last:
    """Keeps the last checkpoints, by step.

    Args:
        count: how many.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> from fastckpt.keep import Last, Saved
        >>> Last(2).kept([Saved(step=step, created=0.0) for step in (10, 20, 30)], now=0.0)
        {20, 30}
    """

    count: int = 1

    def __post_init__(self) -> None:
        _at_least_one("keep.Last: count", self.count)

    def kept(self, saved: Sequence[Saved], now: float) -> set[int]:  # noqa: ARG002 - the protocol
        """The steps that must stay."""
        return {one.step for one in saved[-self.count :]}

    def __str__(self) -> str:
        return f"last={self.count}"


@dataclass(frozen=True, slots=True)
class Best:
    """Keeps the ``count`` best checkpoints by a metric. Checkpoints without it, or with NaN or infinity, do not count.

    Args:
        count: how many.
        metric: the name of the metric, as in ``Manager.save(..., metrics={"loss": 1.5})``.
        mode: ``min`` if less is better, or ``max``. Among equals, the later wins.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> from fastckpt.keep import Best, Saved
        >>> saved = [Saved(step=step, created=0.0, metrics={"loss": 5.0 / step}) for step in (10, 20)]
        >>> Best(1, "loss").kept(saved, now=0.0)
        {20}
    """

    count: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _at_least_one("keep.Best: count", self.count)
        if self.mode not in {"min", "max"}:
            raise ValueError(f'keep.Best: mode must be "min" or "max", not {self.mode!r}')
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"keep.Best: metric must be the name of a metric, not {self.metric!r}")

    def ranked(self, saved: Sequence[Saved]) -> list[Saved]:
        """The checkpoints that have the metric, the best first."""
        sign = 1 if self.mode == "min" else -1
        having = [one for one in saved if math.isfinite(one.metrics.get(self.metric, math.nan))]
        return sorted(having, key=lambda one: (sign * one.metrics[self.metric], -one.step))

    def kept(self, saved: Sequence[Saved], now: float) -> set[int]:  # noqa: ARG002 - the protocol
        """The steps that must stay."""
        return {one.step for one in self.ranked(saved)[: self.count]}

    def __str__(self) -> str:
        return f"best={self.count}:{self.metric}:{self.mode}"


class Every:
    """Keeps one checkpoint of each interval of training.

    Args:
        steps: keep each checkpoint whose step is a multiple of this.
        time: keep the first, and then each that began at least this long after the last kept one: seconds, or a string
            with a unit (``"30min"``, ``"6h"``). Give one of the two.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> from fastckpt.keep import Every, Saved
        >>> Every(steps=20).kept([Saved(step=step, created=0.0) for step in (10, 20, 30)], now=0.0)
        {20}
    """

    __slots__ = ("steps", "time")

    def __init__(self, steps: int | None = None, *, time: float | str | None = None) -> None:
        self.steps, self.time = steps_or_time("keep.Every", steps, time)

    def kept(self, saved: Sequence[Saved], now: float) -> set[int]:  # noqa: ARG002 - the protocol
        """The steps that must stay."""
        if self.steps is not None:
            return {one.step for one in saved if one.step % self.steps == 0}
        # The oldest stays, so each call finds the same checkpoints. If the clock was set back, or an older step was
        # saved again, the time since the last kept one is unknown: a checkpoint in doubt stays.
        found, last = set(), -math.inf
        for one in saved:
            if not 0 <= one.created - last < (self.time or 0.0):
                found.add(one.step)
                last = one.created
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Every) and (self.steps, self.time) == (other.steps, other.time)

    def __hash__(self) -> int:
        return hash((self.steps, self.time))

    def __repr__(self) -> str:
        return f"Every(steps={self.steps})" if self.steps is not None else f"Every(time={self.time:g})"

    def __str__(self) -> str:
        return f"every={self.steps}" if self.steps is not None else f"every={self.time:g}s"


class Younger:
    """Keeps the two newest checkpoints, and those whose save began less than ``age`` before the newest one's.

    Args:
        age: seconds, or ``"2h"``. Times are by the clocks of the hosts that saved, so a stopped run does not age. If
            the clock of the newest one's host is ahead, all others seem older by that; the one before it stays.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> from fastckpt.keep import Saved, Younger
        >>> saved = [Saved(step=step, created=3600.0 * step) for step in range(6)]
        >>> Younger("4h").kept(saved, now=3600.0 * 6)
        {2, 3, 4, 5}
    """

    __slots__ = ("age",)

    def __init__(self, age: float | str) -> None:
        self.age = seconds("keep.Younger: age", age, LEAST_AGE)

    def kept(self, saved: Sequence[Saved], now: float) -> set[int]:
        """The steps that must stay."""
        end = min(now, saved[-1].created) if saved else now
        two = {one.step for one in saved[-2:]}
        return two | {one.step for one in saved if end - one.created < self.age}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Younger) and self.age == other.age

    def __hash__(self) -> int:
        return hash(self.age)

    def __repr__(self) -> str:
        return f"Younger({show_seconds(self.age)!r})"

    def __str__(self) -> str:
        return f"younger={self.age:g}s"


class Steps:
    """Keeps the checkpoints of these steps.

    Args:
        steps: their numbers.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> from fastckpt.keep import Saved, Steps
        >>> Steps(10, 20).kept([Saved(step=step, created=0.0) for step in (20, 30)], now=0.0)
        {20}
    """

    __slots__ = ("steps",)

    def __init__(self, *steps: int) -> None:
        self.steps = named_steps("keep.Steps", steps)

    def kept(self, saved: Sequence[Saved], now: float) -> set[int]:  # noqa: ARG002 - the protocol
        """The steps that must stay."""
        return {one.step for one in saved if one.step in self.steps}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steps) and self.steps == other.steps

    def __hash__(self) -> int:
        return hash(self.steps)

    def __repr__(self) -> str:
        return f"Steps({', '.join(map(str, sorted(self.steps)))})"

    def __str__(self) -> str:
        return f"steps={','.join(map(str, sorted(self.steps)))}"


def parse(text: str) -> Policy:
    """The policy that ``str(policy)`` names, in the notation of the command line.

    >>> from fastckpt.keep import parse
    >>> parse("best=2:loss:min")
    Best(count=2, metric='loss', mode='min')

    Args:
        text: ``last=3``, ``best=2:loss:min``, ``every=1000`` (steps), ``every=6h``, ``younger=2h``, or
            ``steps=100,200``.

    Returns:
        The policy.

    Raises:
        ValueError: ``text`` is none of these.
    """
    name, _, value = text.partition("=")
    make = _PARSERS.get(name)
    if make is None or not value:
        raise ValueError(
            f"keep: {text!r} is not a policy: give last=3, best=2:loss:min, every=1000 (steps), every=6h, younger=2h "
            "or steps=100,200"
        )
    try:
        return make(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"keep: {text!r}: {error}") from None


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def _parse_best(value: str) -> Best:
    count, _, rest = value.partition(":")
    metric, colon, mode = rest.rpartition(":")
    # A metric's name may contain colons.
    return Best(_whole(count), metric, mode) if colon and mode in {"min", "max"} else Best(_whole(count), rest)  # type: ignore[arg-type]


_PARSERS: dict[str, Callable[[str], Policy]] = {
    "last": lambda value: Last(_whole(value)),
    "best": _parse_best,
    "every": lambda value: Every(steps=int(value)) if value.isdecimal() else Every(time=value),
    "younger": Younger,
    "steps": lambda value: Steps(*map(_whole, value.split(","))),
}


def _at_least_one(what: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{what} must be an integer of at least 1, not {value!r}")


def named_steps(what: str, steps: Sequence[int]) -> frozenset[int]:
    """The steps that a policy names."""
    if not steps or any(type(step) is not int or step < 0 for step in steps):
        raise ValueError(f"{what}: give one or more non-negative integers, not {steps!r}")
    return frozenset(steps)


def steps_or_time(what: str, steps: int | None, time: float | str | None) -> tuple[int | None, float | None]:
    """Check that exactly one of ``steps`` and ``time`` is given."""
    if (steps is None) == (time is None):
        raise ValueError(f"{what}: give either steps= or time=")
    if time is not None:
        return None, seconds(f"{what}: time", time)
    _at_least_one(f"{what}: steps", steps)
    return steps, None


def __dir__() -> list[str]:
    return sorted(__all__)
