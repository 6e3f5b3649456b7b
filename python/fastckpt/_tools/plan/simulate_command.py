"""The command ``fastckpt simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import JOB_HELP, add_job_options, job, option

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from .simulate import Point, Simulation

HELP = f"""usage: fastckpt simulate OPTION...

Simulate months of training with failures, and compare the goodput with the
formulas of 'fastckpt plan'. Nothing is written.

{JOB_HELP}
or        --cost TIME that a checkpoint stops training, with --gpus
or        --from FILE, the speed of a node from 'fastckpt bench DIR --json'
runs      --days N (90), --runs N (100), --seed N (0), --weibull SHAPE (1):
          GPUs fail early (below 1) or wear out (above 1)
output    --json; --plot FILE

example:
  fastckpt simulate --cost 50s --gpus 24000 --mttf-cluster 124min
  fastckpt simulate --params 405B --gpus 16384 --tp 8 --pp 16 --node-write 4GB/s
docs/sizing.md explains every line of the output."""

_MEASURED = (("write", "save"), ("read", "load"))

#: How many of the simulated points the table shows.
_EVERY = 4


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; ``command(name, text, page)`` makes its parser."""
    parser = command("simulate", "simulate months of training with failures", page=HELP)
    add_job_options(parser)
    parser.add_argument("--cost")
    parser.add_argument("--from", dest="measured", type=Path)
    parser.add_argument("--days", type=float, default=90.0)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weibull", type=float, default=1.0)
    parser.add_argument("--plot", type=Path)


def measured(file: Path, known: Mapping[str, Any]) -> dict[str, float]:
    """The speed at which one node writes and reads, by the medians of a measurement of ``fastckpt bench DIR``.

    Args:
        file: the output of its ``--json``.
        known: other arguments of the job.

    Returns:
        ``node_write`` and ``node_read``, in bytes per second.

    Raises:
        ValueError: it is not such a file, or the job has these values already.
        OSError: it cannot be read.
    """
    import json  # noqa: PLC0415

    others = [option(name) for name in ("node_write", "node_read", "tier") if name in known]
    if others:
        raise ValueError(f"simulate: --from gives the speed of a node: leave out {', '.join(others)}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["scores"]
        return {f"node_{kind}": 1e9 * float(found[of]["gb_per_s"]["median"]) for kind, of in _MEASURED}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"simulate: {file} is not a result of 'fastckpt bench DIR --json': make one ({error!r})"
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
            names = ", ".join(map(option, sorted(set(known) - allowed)))
            raise ValueError(f"simulate: --cost replaces the size and the speed: leave out {names}")
        if "gpus" not in known:
            raise ValueError("simulate: --cost needs --gpus")
        gpus, cost, lag = known["gpus"], seconds("cost", options.cost), 0.0
        if gpus < 1:
            raise ValueError(f"simulate: --gpus must be at least 1, not {gpus}")
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
    """The result of a simulation, for people."""
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
