"""How often to save, and what it costs: the standard formulas.

All times are in seconds. An *interval* runs from the start of one checkpoint to the start of the next: training, and
then the checkpoint's cost, for which training stops. Young's and Daly's own formulas give the training time alone.
"""

from __future__ import annotations

import math

#: Seconds between failures of one accelerator, as MLCommons assumes.
MTTF_GPU = 50_000 * 3600.0
#: A number below this, without a unit, is meant in hours: no job with so many failures would be planned.
LEAST_MTTF = 600.0


def cluster_mttf(mttf: float, accelerators: int) -> float:
    """Mean time to failure of a cluster: ``mttf / accelerators``.

    Source: the failure rate of independent parts is the sum of their rates; Micron and Lightbits quote 124 minutes
    for 24,000 accelerators (49,600 h each); MLCommons assumes 50,000 h.

    Args:
        mttf: the MTTF of one accelerator.
        accelerators: the number that must all run.
    """
    return mttf / accelerators


def goodput_rule(goodput: float, mttf: float) -> float:
    """The interval that puts 1 - goodput of the time between failures at risk: ``(1 - goodput) * mttf``.

    Source: Micron and Lightbits: 20 checkpoints between failures give 95 % good throughput. The formula counts a whole
    interval as lost with each failure; half of it is lost on average, and the other half remains for the checkpoints
    and the restart.

    Args:
        goodput: the share of the time that training should get, between 0 and 1.
        mttf: the MTTF of the cluster.
    """
    return (1 - goodput) * mttf


def young(cost: float, mttf: float) -> float:
    """The best training time between checkpoints, to first order: ``sqrt(2 * cost * mttf)``.

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.

    Args:
        cost: seconds for which a checkpoint stops training.
        mttf: the MTTF of the cluster.
    """
    return math.sqrt(2 * cost * mttf)


def daly(cost: float, mttf: float) -> float:
    """The best training time between checkpoints, to higher order.

    ``sqrt(2 * cost * mttf) * (1 + sqrt(x) / 3 + x / 9) - cost`` with ``x = cost / (2 * mttf)``; ``mttf`` if
    ``cost >= 2 * mttf``.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems 22, 2006.

    Args:
        cost: seconds for which a checkpoint stops training.
        mttf: the MTTF of the cluster.
    """
    if cost >= 2 * mttf:
        return mttf
    x = cost / (2 * mttf)
    return math.sqrt(2 * cost * mttf) * (1 + math.sqrt(x) / 3 + x / 9) - cost


def best_interval(cost: float, mttf: float, restart: float = 0.0) -> float:
    """The interval, from start to start, that loses the least time.

    The exact minimum of :func:`expected_goodput`, for any ratio of cost and MTTF: the root of ``(1 - (interval - cost)
    / mttf) * exp(interval / mttf) = 1``, by Newton's method.

    Source: the complete model of Daly (2006), of which :func:`daly` is the expansion for ``cost < 2 * mttf``.

    Args:
        cost: seconds for which a checkpoint stops training.
        mttf: the MTTF of the cluster.
        restart: seconds to detect a failure, restart and load. Each failure costs them, however often one saves: with
            random failures they do not change the best interval.

    Raises:
        ValueError: cost or MTTF is not more than 0, restart is negative, or one is not finite.
    """
    for name, value in (("cost", cost), ("mttf", mttf)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"best_interval: {name} must be more than 0 s, not {value!r}")
    if not (restart >= 0 and math.isfinite(restart)):
        raise ValueError(f"best_interval: restart must be at least 0 s, not {restart!r}")
    dump = cost / mttf
    # In units of the MTTF: dump - x - expm1(-x) = 0. The function is concave and falling, and Young's interval is above
    # the root; from there Newton's steps never overshoot, and end where rounding stops them.
    x = dump + math.sqrt(2 * dump)
    while True:
        step = (dump - x - math.expm1(-x)) / math.expm1(-x)
        if not x - step < x:
            return x * mttf
        x -= step


def expected_goodput(interval: float, cost: float, mttf: float, restart: float = 0.0, lag: float = 0.0) -> float:
    """The share of time that goes into training that no failure undoes, with random failures.

    ``(interval - cost) / (mttf * exp((restart + lag) / mttf) * (exp(interval / mttf) - 1))``: failures may come at any
    time, even during a checkpoint and the restart.

    Source: Daly (2006), the complete cost function, as time solved for over time elapsed. If each checkpoint is durable
    only ``lag`` seconds after training continues, that counts like a longer restart.

    Args:
        interval: from the start of one checkpoint to the start of the next.
        cost: seconds for which a checkpoint stops training.
        mttf: the MTTF of the cluster.
        restart: seconds to detect a failure, restart and load.
        lag: seconds from when training continues until the checkpoint is durable.

    Returns:
        0 to 1; 0 if checkpoints leave no time for training.
    """
    if interval <= cost:
        return 0.0
    exponent = (restart + lag + interval) / mttf
    # The divisor below overflows only where the result has long been practically 0.
    if exponent > 700:  # noqa: PLR2004 - the logarithm of the largest float is 709
        return 0.0
    return (interval - cost) / mttf / (math.exp((restart + lag) / mttf) * math.expm1(interval / mttf))


def first_order_goodput(interval: float, cost: float, mttf: float, restart: float = 0.0) -> float:
    """The goodput to first order: ``1 - cost / interval - (interval / 2 + restart) / mttf``.

    Source: Young (1974): a checkpoint's cost in each interval, and with each failure half an interval. The formula
    holds while the interval is much smaller than the MTTF.

    Args:
        interval: from the start of one checkpoint to the start of the next.
        cost: seconds for which a checkpoint stops training.
        mttf: the MTTF of the cluster.
        restart: seconds to detect a failure, restart and load.

    Returns:
        At most 1; it may be below 0 outside its range.
    """
    return 1 - cost / interval - (interval / 2 + restart) / mttf


def lost_work(interval: float, mttf: float, lag: float = 0.0) -> float:
    """Mean seconds between the last durable checkpoint and a failure, with random failures.

    ``mttf - interval * exp(-lag / mttf) / (exp(interval / mttf) - 1)``, which is half an interval plus the lag while
    both are much smaller than the MTTF.

    Source: the mean time to a failure, less the mean number of whole intervals before it (a geometric distribution).

    Args:
        interval: from the start of one checkpoint to the start of the next.
        mttf: the MTTF of the cluster.
        lag: seconds from when training continues until a checkpoint is durable.
    """
    if interval / mttf > 700:  # noqa: PLR2004 - as above: no interval is ever completed
        return mttf
    return mttf - interval * math.exp(-lag / mttf) / math.expm1(interval / mttf)
