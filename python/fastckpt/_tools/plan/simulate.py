"""Simulates months of training with failures many times, to check the formulas.

Accelerators fail independently and are replaced by new ones. A failure stops all of them; the job restarts, reads the
last durable checkpoint, and loses the work after it. Failures may come at any time, even during a checkpoint or a
restart. All intervals are tried on the same failures (common random numbers), so that differences between them are due
to the interval and not to chance.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt import _interval as formulas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: Seconds of a run: 90 days.
DURATION = 90 * 86400.0

#: With fewer failures in all runs, the best interval is unknown.
_FEWEST = 300
#: More failures would cost memory and minutes for meaningless digits.
_MOST = 20_000_000

#: Groups of runs whose scatter gives the standard errors.
_GROUPS = 10

#: The difference of goodput beyond which the first-order formula counts as wrong.
PARTED = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The goodput at one interval.

    Attributes:
        name: the origin of the interval, or empty.
        interval: seconds from the start of one checkpoint to the next.
        simulated: mean share of time spent on training that no failure undid.
        error: its standard error.
        formula: :func:`fastckpt._interval.expected_goodput`, as in a plan.
        first_order: :func:`fastckpt._interval.first_order_goodput`.
    """

    name: str
    interval: float
    simulated: float
    error: float
    formula: float
    first_order: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The result of months of training; times in seconds.

    Attributes:
        cost: seconds for which a checkpoint stops training.
        mttf: mean time between failures of the cluster, for the formulas; the given one if lives are exponential, else
            the observed one.
        restart: the time from a failure until training continues.
        lag: the time from when training continues until the checkpoint is durable.
        accelerators: the number of simulated ones.
        duration: the length of each run.
        runs: the number of runs.
        seed: the seed of the random numbers.
        shape: Weibull shape of the accelerators' lives; 1 is exponential.
        failures: the number of failures in all runs together.
        best: the interval with the least loss.
        best_error: its standard error.
        marks: that interval, and those that the formulas would choose.
        points: goodput over a range of intervals.
        parts_at: the interval from which the first-order formula is wrong by :data:`PARTED`; None if it never is.
    """

    cost: float
    mttf: float
    restart: float
    lag: float
    accelerators: int
    duration: float
    runs: int
    seed: int
    shape: float
    failures: int
    best: float
    best_error: float
    marks: tuple[Point, ...]
    points: tuple[Point, ...]
    parts_at: float | None

    def mark(self, name: str) -> Point:
        """The mark with this name."""
        return next(mark for mark in self.marks if mark.name == name)

    def to_dict(self) -> dict[str, Any]:
        """The whole result, as JSON values."""
        return asdict(self)


def gaps(
    random: np.random.Generator, accelerators: int, mttf: float, horizon: float, shape: float = 1.0
) -> NDArray[np.float64]:
    """Draw the times between the failures of a cluster, from start to end.

    Args:
        random: the generator to draw from.
        accelerators: their number; each has its own life, new at the start and after each failure.
        mttf: mean time to failure of one accelerator, in seconds.
        horizon: seconds that are simulated.
        shape: Weibull shape; 1 is exponential, less means early failures, more means wear.

    Returns:
        Seconds, shape (failures + 1,): up to the first failure, between failures, and from the last to the end.
    """
    scale = mttf / math.gamma(1 + 1 / shape)
    times = scale * random.weibull(shape, accelerators)
    failed = []
    while (times := times[times < horizon]).size:
        failed.append(times)
        times = times + scale * random.weibull(shape, times.size)
    ends = np.sort(np.concatenate([*failed, [0.0, horizon]]))
    return np.diff(ends)


def kept(lengths: NDArray[np.float64], interval: float, cost: float, away: float) -> NDArray[np.float64]:
    """Seconds of training that are not lost, in each period between failures.

    Args:
        lengths: seconds between failures.
        interval: from the start of one checkpoint to the start of the next.
        cost: seconds of each interval that are not training.
        away: seconds after a failure, before the first interval, and until its checkpoint is durable.

    Returns:
        Seconds, of the shape of ``lengths``: only whole intervals count.
    """
    return np.asarray(np.floor(np.maximum(lengths - away, 0.0) / interval) * (interval - cost))


class _Runs:
    """The failures of all runs, and the goodput of an interval on them."""

    def __init__(self, lengths: Sequence[NDArray[np.float64]], horizon: float, cost: float, away: float) -> None:
        self.failures = sum(map(len, lengths)) - len(lengths)
        self._lengths = np.concatenate(lengths)
        self._starts = np.cumsum([0, *map(len, lengths[:-1])])
        self._horizon, self._cost, self._away = horizon, cost, away

    def goodput(self, interval: float) -> NDArray[np.float64]:
        """The goodput of each run."""
        trained = kept(self._lengths, interval, self._cost, self._away)
        return np.asarray(np.add.reduceat(trained, self._starts) / self._horizon)

    def best(self, start: float) -> tuple[float, float]:
        """The training time between checkpoints that loses the least, and its standard error.

        The goodput is flat around its best and noisy because whole intervals are counted, so the highest of many values
        could be anywhere near it. A cubic in the logarithm of the training time is fitted to values over a factor of
        two to either side, and its maximum is used; the range is moved until it is centred.

        Args:
            start: where to centre the range first.
        """
        centre = start
        for _ in range(4):
            trained = centre * np.geomspace(0.5, 2.0, 41)
            values = np.stack([self.goodput(time + self._cost) for time in trained], axis=1)
            logs = np.log(trained / centre)
            centre = centre * math.exp(_top(logs, values.mean(axis=0)))
        groups = [group.mean(axis=0) for group in np.array_split(values, min(_GROUPS, len(values)))]
        tops = [_top(logs, group) for group in groups]
        return centre, centre * float(np.std(tops, ddof=1)) / math.sqrt(len(tops))


def _top(logs: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """The maximum of a cubic through noisy values."""
    fine = np.linspace(logs[0], logs[-1], 4001)
    return float(fine[np.polyval(np.polyfit(logs, values, 3), fine).argmax()])


def simulate(
    *,
    cost: float,
    accelerators: int,
    mttf_gpu: float,
    restart: float = 0.0,
    lag: float = 0.0,
    duration: float = DURATION,
    runs: int = 100,
    seed: int = 0,
    shape: float = 1.0,
    others: Sequence[tuple[str, float]] = (),
) -> Simulation:
    """Simulate months of training, find the best interval, and compare it with those of the formulas.

    Args:
        cost: seconds for which a checkpoint stops training.
        accelerators: the number of accelerators that train.
        mttf_gpu: mean time to failure of one accelerator, in seconds.
        restart: seconds from a failure until training continues from the last checkpoint.
        lag: seconds from when training continues until a checkpoint is durable.
        duration: seconds of each run.
        runs: the number of runs, at least 10.
        seed: the seed of the random numbers; the same seed gives the same result.
        shape: Weibull shape of an accelerator's life; 1 is exponential, which the formulas assume.
        others: names and intervals, in seconds, to compare as well.

    Raises:
        ValueError: a number is out of range, or there are too few failures for a result, or too many.
    """
    numbers = {"cost": cost, "mttf_gpu": mttf_gpu, "duration": duration, "weibull": shape}
    numbers |= {"restart": restart, "lag": lag}
    for name, value in numbers.items():
        if not (math.isfinite(value) and (value > 0 or (value == 0 and name in ("restart", "lag")))):
            raise ValueError(f"plan: --simulate: {name} must be more than 0, not {value!r}")
    if accelerators < 1 or runs < _GROUPS or seed < 0:
        raise ValueError(f"plan: --simulate: give at least 1 accelerator and {_GROUPS} runs, and a seed of 0 or more")
    mttf = formulas.cluster_mttf(mttf_gpu, accelerators)
    expected = runs * duration / mttf
    if not _FEWEST <= expected <= _MOST:
        advice = "simulate longer, or more runs" if expected < _FEWEST else "simulate shorter, or fewer runs"
        raise ValueError(f"plan: --simulate: {expected:,.0f} failures are expected over all runs: {advice}")
    drawn = [gaps(np.random.default_rng([seed, run]), accelerators, mttf_gpu, duration, shape) for run in range(runs)]
    played = _Runs(drawn, duration, cost, restart + lag)
    if shape != 1 and played.failures:
        # New accelerators that fail early or late differ in rate from old ones. The formulas get the observed rate,
        # as a job that counts its failures would: the remaining difference from the simulation is due to the shape.
        mttf = runs * duration / played.failures

    def point(name: str, interval: float) -> Point:
        values = played.goodput(interval)
        return Point(
            name=name,
            interval=interval,
            simulated=float(values.mean()),
            error=float(values.std(ddof=1)) / math.sqrt(runs),
            formula=formulas.expected_goodput(interval, cost, mttf, restart, lag),
            first_order=formulas.first_order_goodput(interval, cost, mttf, restart + lag),
        )

    # A coarse scan over all sensible intervals, so that no formula determines the start of the search.
    rough = np.geomspace(min(cost, mttf) / 10, 3 * mttf, 60)
    trained, error = played.best(float(rough[np.argmax([played.goodput(time + cost).mean() for time in rough])]))
    best = trained + cost
    marks = [
        ("simulated best", best),
        ("best_interval", formulas.best_interval(cost, mttf, restart)),
        ("Daly", formulas.daly(cost, mttf) + cost),
        ("Young", formulas.young(cost, mttf) + cost),
        *others,
    ]
    points = tuple(point("", float(time) + cost) for time in np.geomspace(trained / 8, max(8 * trained, 2 * mttf), 33))
    apart = [p.interval for p in points if p.interval > best and abs(p.first_order - p.simulated) > PARTED]
    return Simulation(
        cost=cost,
        mttf=mttf,
        restart=restart,
        lag=lag,
        accelerators=accelerators,
        duration=duration,
        runs=runs,
        seed=seed,
        shape=shape,
        failures=played.failures,
        best=best,
        best_error=error,
        marks=tuple(point(*mark) for mark in marks),
        points=points,
        parts_at=apart[0] if apart else None,
    )
