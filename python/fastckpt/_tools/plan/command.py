"""The command ``fastckpt plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

#: The options that describe a job, which ``fastckpt simulate`` takes as well.
JOB_HELP = """\
size      --params N | --config FILE (config.json) | --checkpoint DIR |
          --size BYTES; and --expert-params N, --weights bf16|fp16|fp32|fp8,
          --master fp32|bf16|none, --optimizer adamw|adam|adam8bit|sgd|lion|
          muon|adafactor|none
layout    --gpus N, --tp N, --pp N, --dp N, --ep N, --zero 0..3,
          --gpus-per-node N (8)
failures  --mttf-gpu TIME (50000h) | --mttf-cluster TIME, --restart TIME
storage   --tier light|medium|high (light) for each GPU, or rates: --write,
          --read of all, --node-write, --node-read of a node; --stall TIME"""

HELP = f"""usage: fastckpt plan OPTION...

Plan checkpoints: their size, how often to save, how fast storage must be.
Numbers take units: 405B parameters, 13.8TB, 105GiB, 124min, 273GB/s, 95%.

{JOB_HELP}
interval  --goodput SHARE | --overhead SHARE | --interval TIME (the best);
          --target-seconds TIME that a checkpoint may take
output    --json; --sweep gpus=1000,2000 | gpus=1000:64000:x2; --plot FILE

example:
  fastckpt plan --size 13.8TB --tp 8 --pp 64 --dp 6 --write 273GB/s
  fastckpt plan --config config.json --gpus 16384 --tp 8 --pp 16 --tier light
  fastckpt plan --params 405B --goodput 95% --sweep gpus=1000:64000:x2
docs/sizing.md explains every option and every line of the output."""

_RULES = ("goodput", "overhead", "interval", "target_seconds")
_WORDS = (
    *("params", "config", "checkpoint", "size", "expert_params", "weights", "master", "optimizer"),
    *("mttf_gpu", "mttf_cluster", "restart", "write", "read", "node_write", "node_read", "tier", "stall"),
)
_NUMBERS = ("gpus", "tp", "pp", "dp", "ep", "zero", "gpus_per_node")


def option(name: str) -> str:
    """The option that sets an argument of :func:`fastckpt.tools.plan`."""
    return f"--{name.replace('_', '-')}"


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a job, which :func:`job` reads back."""
    for name in _WORDS:
        parser.add_argument(option(name))
    for name in _NUMBERS:
        parser.add_argument(option(name), type=int)


def job(options: argparse.Namespace, names: tuple[str, ...] = _WORDS + _NUMBERS) -> dict[str, Any]:
    """The description of a job, as arguments of :func:`fastckpt.tools.plan`."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; ``command(name, text, page)`` makes its parser."""
    parser = command("plan", "plan the size, the interval and the storage of checkpoints", page=HELP)
    add_job_options(parser)
    for name in _RULES:
        parser.add_argument(option(name))
    parser.add_argument("--sweep")
    parser.add_argument("--plot", type=Path)


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """A plan, or a sweep of them: exit status, document, lines."""
    # Imported here, so that the other commands start without it.
    from . import sweep as sweeping  # noqa: PLC0415
    from .plan import plan  # noqa: PLC0415
    from .record import plan_table  # noqa: PLC0415
    from .sweep_table import sweep_table  # noqa: PLC0415

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
