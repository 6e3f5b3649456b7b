"""``fastckpt plan --simulate``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastckpt._text import table
from fastckpt._tools.places import option
from fastckpt._units import digits, seconds, show_seconds, show_share

from .plan import mttf_of, plan
from .simulate import DURATION, PARTED, Point, Simulation, simulate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MEASURED = (("write", "save"), ("read", "load"))

#: The number of simulated points in the table.
_EVERY = 4


def measured(file: Path, known: Mapping[str, Any]) -> dict[str, float]:
    """The speed at which one node writes and reads: the medians of ``fastckpt bench DIR``."""
    if others := [name for name in ("node_write", "node_read", "tier") if name in known]:
        raise ValueError(f"plan: --from gives the speed of a node: leave out {', '.join(map(option, others))}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["scores"]
        return {f"node_{kind}": 1e9 * float(found[of]["gigabytes_per_second"]["median"]) for kind, of in _MEASURED}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"plan: {file} is not a result of 'fastckpt bench DIR --json': make one ({error!r})") from None


def run(known: Mapping[str, Any], own: Mapping[str, Any], plot: Path | None) -> tuple[int, dict[str, Any], list[str]]:
    """Simulate a job; return exit status, JSON document and lines."""
    if plot is not None:
        from . import plots  # noqa: PLC0415

        plots.check(plot)
    if {"from", "cost"} <= own.keys():
        raise ValueError("plan: --cost and --from cannot be combined: leave one out")
    if "from" in own:
        known = {**measured(own["from"], known), **known}
    if "cost" not in own:
        planned = plan(**known)
        gpus, mttf = planned.layout.gpus, planned.mttf
        cost, lag, restart = planned.stall, planned.seconds - planned.stall, planned.restart + planned.restore_seconds
    else:
        if others := set(known) - {"gpus", "mttf_gpu", "mttf_cluster", "restart"}:
            raise ValueError(
                f"plan: --cost replaces the size and the speed: leave out {', '.join(map(option, sorted(others)))}"
            )
        if "gpus" not in known:
            raise ValueError("plan: --cost needs --gpus")
        gpus, cost, lag = known["gpus"], seconds("cost", own["cost"]), 0.0
        if gpus < 1:
            raise ValueError(f"plan: --gpus must be at least 1, not {gpus}")
        mttf = mttf_of(known.get("mttf_gpu"), known.get("mttf_cluster"), gpus)
        restart = seconds("restart", known["restart"]) if "restart" in known else 0.0
    result = simulate(
        cost=cost,
        accelerators=gpus,
        mttf_gpu=mttf * gpus,
        restart=restart,
        lag=lag,
        duration=seconds("duration", own["duration"]) if "duration" in own else DURATION,
        runs=own.get("runs", 100),
        seed=own.get("seed", 0),
        shape=own.get("weibull", 1.0),
        others=[("95 % rule", mttf / 20)] if mttf / 20 > cost else [],
    )
    if plot is not None:
        plots.plot_simulation(plot, result)
    return 0, result.to_dict(), lines(result)


def lines(result: Simulation) -> list[str]:
    """The result of a simulation as text."""
    lives = "exponential lives" if result.shape == 1 else f"Weibull lives of shape {result.shape:g}"
    lag = f", durable {show_seconds(result.lag)} later" if result.lag else ""
    seen = result.runs * result.duration / result.failures
    days = f"{result.duration / 86400:g} days"
    about = f"{result.accelerators:,} GPUs, {days}, {result.runs} runs (seed {result.seed}, {lives})"
    stops = f"a checkpoint stops training for {show_seconds(result.cost)}{lag}"
    head = [
        f"{about}: {result.failures:,} failures, one every {show_seconds(seen)}",
        f"{stops}; a restart takes {show_seconds(result.restart)}",
        "",
    ]

    def row(point: Point) -> tuple[str, ...]:
        return (
            point.name,
            show_seconds(point.interval),
            digits(point.interval / result.mttf),
            f"{100 * point.simulated:.2f} +- {100 * point.error:.2f}",
            f"{100 * point.formula:.2f}",
            f"{100 * point.first_order:.2f}",
        )

    titles = ("goodput, %", "interval", "of MTTF", "simulated", "Daly's model", "first order")
    shown = table([titles, *map(row, result.marks), *map(row, result.points[::_EVERY])], right=(1, 2, 3, 4, 5))
    chosen, best = result.mark("best_interval"), result.mark("simulated best")
    off, less = chosen.interval / result.best - 1, max(0.0, best.simulated - chosen.simulated)
    found = f"{show_seconds(result.best)} +- {show_seconds(result.best_error)}"
    worst = max(result.points, key=lambda point: abs(point.formula - point.simulated))
    wrong = f"{show_share(abs(worst.formula - worst.simulated))} +- {show_share(worst.error)} of goodput at most"
    ending = [
        "",
        f"best interval: {found} simulated",
        f"auto mode takes {show_seconds(chosen.interval)} ({100 * off:+.1f} %) and loses {show_share(less)} of goodput",
        f"Daly's model is off by {wrong}, at {show_seconds(worst.interval)}",
    ]
    if result.parts_at is not None:
        where = f"{show_seconds(result.parts_at)} on, {digits(result.parts_at / result.mttf)} of the MTTF"
        ending.append(f"the first-order formula is off by more than {show_share(PARTED)} of goodput from {where}")
    return [*head, *shown, *ending]
