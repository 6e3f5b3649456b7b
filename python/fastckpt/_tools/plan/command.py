"""The command ``fastckpt plan``: the formulas, or with ``--simulate`` months of training with failures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt._tools.places import option, path

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

HELP = """usage: fastckpt plan OPTION...

Plan checkpoints: their size, how often to save, how fast storage must be.
Numbers take units: 405B parameters, 13.8TB, 105GiB, 124min, 273GB/s, 95%.

size      --params N | --config FILE (config.json) | --checkpoint DIR |
          --size BYTES; and --expert-params N, --weights bf16|fp16|fp32|fp8,
          --master fp32|bf16|none, --optimizer adamw|adam|adam8bit|sgd|lion|
          muon|adafactor|none
layout    --gpus N, --tp N, --pp N, --dp N, --ep N, --zero 0..3,
          --gpus-per-node N (8); --max-in-flight N (1) saves in the background
failures  --mttf-gpu TIME (50000h) | --mttf-cluster TIME, --restart TIME
storage   --tier light|medium|high (light) for each GPU, or rates: --write,
          --read of all, --node-write, --node-read of a node; --stall TIME
interval  --goodput SHARE | --overhead SHARE | --interval TIME (the best);
          --target-seconds TIME that a checkpoint may take
failing   --simulate months of it; --cost TIME of a save, with --gpus, replaces
          the size, --from FILE of 'bench DIR --json' the speed; --duration TIME
          (90d), --runs N (100), --seed N (0), --weibull SHAPE (1; below: early)
output    --json; --quiet; --plot FILE; --sweep gpus=1000,2000|1000:64000:x2

  fastckpt plan --config config.json --gpus 16384 --tp 8 --pp 16 --tier light
  fastckpt plan --simulate --cost 50s --gpus 24000 --mttf-cluster 124min
docs/sizing.md explains every option and every line of the output."""

_RULES = ("goodput", "overhead", "interval", "target_seconds")
_WORDS = (
    *("params", "config", "checkpoint", "size", "expert_params", "weights", "master", "optimizer"),
    *("mttf_gpu", "mttf_cluster", "restart", "write", "read", "node_write", "node_read", "tier", "stall"),
)
#: The options of ``--simulate``, and their types.
_SIMULATED: dict[str, Callable[[str], Any]] = {
    "cost": str,
    "from": path,
    "duration": str,
    "runs": int,
    "seed": int,
    "weibull": float,
}
_NUMBERS = ("gpus", "tp", "pp", "dp", "ep", "zero", "gpus_per_node", "max_in_flight")


def job(options: argparse.Namespace, names: tuple[str, ...] = _WORDS + _NUMBERS) -> dict[str, Any]:
    """The description of a job, as arguments of :func:`fastckpt.tools.plan`."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; ``command(name, text, page)`` makes its parser."""
    parser = command("plan", "plan the size, the interval and the storage of checkpoints", page=HELP)
    for name in (*_WORDS, *_RULES, "sweep"):
        parser.add_argument(option(name))
    for name, kind in (dict.fromkeys(_NUMBERS, int) | _SIMULATED | {"plot": path}).items():
        parser.add_argument(option(name), type=kind)
    parser.add_argument("--simulate", action="store_true")


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Compute a plan, or a sweep of plans; return exit status, JSON document and lines."""
    # Imported here, so that the other commands start without these modules.
    from . import sweep as sweeping  # noqa: PLC0415
    from .plan import plan  # noqa: PLC0415
    from .record import plan_table  # noqa: PLC0415
    from .sweep_table import sweep_table  # noqa: PLC0415

    refused = (*_RULES, "sweep") if options.simulate else tuple(_SIMULATED)
    if given := job(options, refused):
        how = "cannot be combined with" if options.simulate else "requires"
        raise ValueError(f"plan: {option(next(iter(given)))} {how} --simulate: leave it out")
    if options.simulate:
        from . import simulate_command  # noqa: PLC0415

        return simulate_command.run(job(options), job(options, tuple(_SIMULATED)), options.plot)
    known = {**job(options), **job(options, _RULES)}
    if options.sweep is None:
        if options.plot is not None:
            raise ValueError("plan: --plot draws a sweep: give --sweep, as in --sweep gpus=1000:64000:x2")
        result = plan(**known)
        return 0, result.to_dict(), plan_table(result)
    name, values = sweeping.parse(options.sweep)
    if options.plot is not None:
        from . import plots  # noqa: PLC0415

        plots.check(options.plot)
    plans = sweeping.sweep(name, values, known)
    if options.plot is not None:
        plots.plot_sweep(options.plot, name, values, plans)
    document = {"sweep": name, "values": values, "plans": [each.to_dict() for each in plans]}
    return 0, document, sweep_table(name, values, plans)
