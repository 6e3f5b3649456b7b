"""The command ``fastckpt bench --simulate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .command import add_job_options, job

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from pathlib import Path

    from .simulate import Point, Simulation

EXAMPLE = """example:
  Three months of Llama 3 405B on 16,384 GPUs whose nodes write 4 GB/s each:
    fastckpt bench --simulate --params 405B --gpus 16384 --tp 8 --pp 16 --node-write 4 --restart 5min
  Checkpoints of 50 s on 24,000 GPUs, 124 minutes between failures:
    fastckpt bench --simulate --cost 50s --gpus 24000 --mttf-cluster 124min"""

_MEASURED = (("write", "save"), ("read", "load"))

#: How many of the simulated points the table shows.
_EVERY = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the simulation: the job's, as ``fastckpt plan`` has them, and its own."""
    from argparse import RawDescriptionHelpFormatter  # noqa: PLC0415 - the caller has it already
    from pathlib import Path  # noqa: PLC0415

    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = EXAMPLE
    add_job_options(parser)
    group = parser.add_argument_group("simulation")
    group.add_argument(
        "--cost", metavar="TIME", help="how long a checkpoint stops training, instead of a size and speed"
    )
    group.add_argument(
        "--from",
        metavar="FILE",
        dest="measured",
        type=Path,
        help="what one node writes and reads, as 'fastckpt bench DIR --json' measured it",
    )
    group.add_argument("--days", metavar="N", type=float, default=90.0, help="days of each run (default: 90)")
    group.add_argument("--runs", metavar="N", type=int, default=100, help="how many runs (default: 100)")
    group.add_argument("--seed", metavar="N", type=int, default=0, help="of the random numbers (default: 0)")
    group.add_argument(
        "--weibull",
        metavar="SHAPE",
        type=float,
        default=1.0,
        help="GPUs that fail early (below 1) or wear out (above 1)",
    )
    group.add_argument("--plot", metavar="FILE", type=Path, help="draw goodput over the interval; needs matplotlib")


def given(options: argparse.Namespace) -> list[str]:
    """The options of the simulation and of its job that were given."""
    names = [f"--{name.replace('_', '-')}" for name in job(options)]
    own = {"days": 90.0, "runs": 100, "seed": 0, "weibull": 1.0, "cost": None}
    names += [f"--{name}" for name, default in own.items() if getattr(options, name) != default]
    return names + ["--from"] * (options.measured is not None)


def measured(file: Path, known: Mapping[str, Any]) -> dict[str, float]:
    """What one node writes and reads, by the medians of a measurement of ``fastckpt bench DIR``.

    Args:
        file: what its ``--json`` printed.
        known: what else is said of the job.

    Returns:
        ``node_write`` and ``node_read``, in GB/s of 10^9 bytes.

    Raises:
        ValueError: it is no such file, or the job says the same otherwise.
        OSError: it cannot be read.
    """
    import json  # noqa: PLC0415

    others = [f"--{name.replace('_', '-')}" for name in ("node_write", "node_read", "tier") if name in known]
    if others:
        raise ValueError(f"bench --simulate: --from says what a node writes and reads: leave out {', '.join(others)}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["scores"]
        return {f"node_{kind}": float(found[of]["gb_per_s"]["median"]) for kind, of in _MEASURED}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"bench --simulate: {file} is no result of 'fastckpt bench DIR --json': make one ({error!r})"
        ) from None


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Simulate a job: exit status, document, lines."""
    from fastckpt._units import seconds  # noqa: PLC0415

    from .plan import mttf_of, plan  # noqa: PLC0415 - imported here, so that the other commands start without it
    from .simulate import simulate  # noqa: PLC0415

    if options.plot is not None:
        from . import plots  # noqa: PLC0415

        plots.check(options.plot)
    known = job(options)
    if options.measured is not None:
        known = {**measured(options.measured, known), **known}
    if options.cost is None:
        planned = plan(**known)
        gpus, mttf = planned.layout.gpus, planned.mttf
        cost, lag, restart = planned.stall, planned.seconds - planned.stall, planned.restart + planned.restore_seconds
    else:
        allowed = {"gpus", "mttf_gpu", "mttf_cluster", "restart"}
        if set(known) - allowed:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(set(known) - allowed))
            raise ValueError(f"bench --simulate: --cost stands for the size and the speed: leave out {names}")
        if "gpus" not in known:
            raise ValueError("bench --simulate: --cost needs --gpus")
        gpus, cost, lag = known["gpus"], seconds("cost", options.cost), 0.0
        if gpus < 1:
            raise ValueError(f"bench --simulate: --gpus must be at least 1, not {gpus}")
        mttf = mttf_of(known.get("mttf_gpu"), known.get("mttf_cluster"), gpus)
        restart = seconds("restart", known["restart"]) if "restart" in known else 0.0
    result = simulate(
        cost=cost,
        accelerators=gpus,
        mttf_gpu=mttf * gpus,
        restart=restart,
        lag=lag,
        days=options.days,
        runs=options.runs,
        seed=options.seed,
        shape=options.weibull,
        others=[("95 % rule", mttf / 20)] if mttf / 20 > cost else [],
    )
    if options.plot is not None:
        plots.plot_simulation(options.plot, result)
    return 0, result.to_dict(), lines(result)


def lines(result: Simulation) -> list[str]:
    """What a simulation found, for people."""
    from fastckpt._text import table  # noqa: PLC0415
    from fastckpt._units import digits, show_seconds, show_share  # noqa: PLC0415

    from .simulate import PARTED  # noqa: PLC0415

    lives = "exponential lives" if result.shape == 1 else f"Weibull lives of shape {result.shape:g}"
    lag = f", durable {show_seconds(result.lag)} later" if result.lag else ""
    seen = result.runs * result.days * 86400 / result.failures
    about = f"{result.accelerators:,} GPUs, {result.days:g} days, {result.runs} runs (seed {result.seed}, {lives})"
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
