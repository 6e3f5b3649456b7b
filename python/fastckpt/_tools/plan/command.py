"""The command ``fastckpt plan``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

EXAMPLE = """example:
  A trillion parameters on 3072 GPUs, storage that writes 273 GB/s, a checkpoint every 4 hours:
    fastckpt plan --size 13.8TB --tp 8 --pp 64 --dp 6 --write 273 --interval 4h
  The best interval for Llama 3 405B on 16,384 GPUs, by its config, if storage keeps to NVIDIA's light tier:
    fastckpt plan --config config.json --gpus 16384 --tp 8 --pp 16 --tier light
  How that changes with the number of GPUs:
    fastckpt plan --params 405B --goodput 0.95 --write 500 --sweep gpus=1000:64000:x2 --plot gpus.svg

Numbers take units: 405B parameters, 13.8TB or 105GiB, 124min, 50000h, 273GB/s, 95%.
docs/sizing.md explains every line of the output."""

_JOB: dict[str, tuple[tuple[str, str | type[int], str], ...]] = {
    "size": (
        ("--params", "N", "parameters of the model, as in 405B"),
        ("--config", "FILE", "count them from a Hugging Face config.json"),
        ("--checkpoint", "DIR", "a checkpoint that exists: its files are the size"),
        ("--size", "BYTES", "the size itself, as in 13.8TB"),
        ("--expert-params", "N", "how many of --params belong to routed experts"),
        ("--weights", "TYPE", "precision of the weights: bf16 (default), fp16, fp32, fp8"),
        ("--master", "TYPE", "of the master weights: fp32, bf16, none (default: fp32; none for fp32 weights)"),
        ("--optimizer", "NAME", "adamw (default), adam, adam8bit, sgd, lion, muon, adafactor, none"),
    ),
    "layout": (
        ("--gpus", int, "all GPUs"),
        ("--tp", int, "tensor parallelism"),
        ("--pp", int, "pipeline parallelism"),
        ("--dp", int, "data parallelism (default: what the GPUs leave)"),
        ("--ep", int, "expert parallelism, a divisor of --dp"),
        ("--zero", int, "ZeRO stage 0 to 3 (default: 0 with --tp or --pp, else 3, which is FSDP)"),
        ("--gpus-per-node", int, "GPUs of a node (default: 8)"),
    ),
    "failures": (
        ("--mttf-gpu", "TIME", "mean time to failure of a GPU, in hours (default: 50000h)"),
        ("--mttf-cluster", "TIME", "of the whole cluster instead, in hours, or as in 124min"),
        ("--restart", "TIME", "seconds to notice a failure and start again, without the reading"),
    ),
    "storage": (
        ("--write", "GB/s", "what it writes in all"),
        ("--read", "GB/s", "what it reads in all (default: as written)"),
        ("--node-write", "GB/s", "what one node writes; the slower of the two counts"),
        ("--node-read", "GB/s", "what one node reads (default: as --node-write)"),
        ("--tier", "NAME", "light, medium or high instead: GB/s for each GPU (default: light)"),
        ("--stall", "TIME", "how long training stands still for a checkpoint (default: until it is durable)"),
    ),
}
_RULES = (
    ("--goodput", "SHARE", "time wanted for training, as in 0.95: (1 - SHARE) of the MTTF"),
    ("--overhead", "SHARE", "time that checkpoints may take, as in 0.05: the stall / SHARE"),
    ("--interval", "TIME", "the interval itself, as in 4h, from start to start (default: the best)"),
)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a job, which :func:`job` reads back."""
    for title, options in _JOB.items():
        group = parser.add_argument_group(title)
        for name, kind, text in options:
            if isinstance(kind, str):
                group.add_argument(name, metavar=kind, help=text)
            else:
                group.add_argument(name, metavar="N", type=kind, help=text)


def job(options: argparse.Namespace) -> dict[str, Any]:
    """What was said of a job, as arguments of :func:`fastckpt.plan`."""
    names = [name[2:].replace("-", "_") for group in _JOB.values() for name, *_ in group]
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fastckpt plan``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLE
    add_job_options(parser)
    group = parser.add_argument_group("interval (one of)")
    for name, kind, text in _RULES:
        group.add_argument(name, metavar=kind, help=text)
    group.add_argument("--target-seconds", metavar="TIME", help="how long a checkpoint may take")
    group = parser.add_argument_group("many plans")
    group.add_argument(
        "--sweep", metavar="NAME=VALUES", help="gpus=1000,2000 or gpus=1000:8000:1000 or gpus=1000:64000:x2"
    )
    group.add_argument("--plot", metavar="FILE", type=Path, help="draw the sweep; needs matplotlib")


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """A plan, or a sweep of them: exit status, document, lines."""
    # Imported here, so that the other commands start without it.
    from . import sweep as sweeping  # noqa: PLC0415
    from .plan import plan  # noqa: PLC0415
    from .text import plan_table, sweep_table  # noqa: PLC0415

    rules = ("goodput", "overhead", "interval", "target_seconds")
    known = {**job(options), **{name: getattr(options, name) for name in rules if getattr(options, name) is not None}}
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
