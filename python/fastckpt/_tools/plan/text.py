"""A plan, and many of them, as tables for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fastckpt._text import table
from fastckpt._units import digits, show_bytes, show_rate, show_seconds, show_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .layout import Layout, Share
    from .plan import Plan


def _layout(layout: Layout) -> str:
    """The parallel layout in words."""
    cuts = [(layout.tp, "tensor"), (layout.pp, "pipeline"), (layout.dp, "data")]
    text = " x ".join(f"{size} {name}" for size, name in cuts)
    expert = f", {layout.ep} expert" if layout.ep > 1 else ""
    return f"{text}{expert}, ZeRO {layout.zero}"


def _share(share: Share) -> str:
    return f"{share.gpus:,} x {show_bytes(share.bytes)}"


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number:,} nodes"


def _rows(plan: Plan) -> list[tuple[str, str]]:
    """What a plan says, a line each."""
    layout = plan.layout
    known = "as given"
    if plan.parameters is not None and plan.bytes_per_parameter is not None:
        known = f"{digits(plan.parameters / 1e9)} B parameters, {plan.bytes_per_parameter:g} bytes each"
    nodes = -(-plan.writers // plan.gpus_per_node)
    standing = "" if plan.stall == plan.seconds else f", of which training stands still for {show_seconds(plan.stall)}"
    away = f" + {show_seconds(plan.restart)} to restart" if plan.restart else ""
    day = plan.checkpoints_per_day
    # As many as begin in a day; the small number is for rounding's sake.
    number = f"up to {math.ceil(day - 1e-9):,}" if day >= 10 else digits(day)  # noqa: PLR2004
    parts = [
        [
            "writing",
            f"{show_rate(plan.write_per_gpu)} for {'each' if len(plan.shares) == 1 else 'the busiest'} writing GPU",
            f"{show_rate(plan.write_per_node)} for its node",
            f"{show_rate(plan.write)} in all",
        ],
        ["failures", f"one every {show_seconds(plan.mttf)}", f"{digits(plan.failures_per_day)} a day"],
        ["interval", show_seconds(plan.interval), plan.interval_rule],
        [
            "",
            f"{show_seconds(plan.interval_goodput)} for {show_share(plan.goodput_wanted)} goodput",
            f"{show_seconds(plan.interval_young)} by Young",
            f"{show_seconds(plan.interval_daly)} by Daly",
            f"{show_seconds(plan.interval_best)} at best",
        ],
        [
            "a day",
            f"{number} checkpoints",
            show_bytes(plan.bytes_per_day),
            f"{show_rate(plan.sustained)} sustained",
        ],
        ["overhead", f"{show_share(plan.overhead)} of the time goes into checkpoints"],
        [
            "restore",
            f"{show_seconds(plan.restore_seconds)}{away}",
            f"{show_bytes(plan.restore_bytes)} read at {show_rate(plan.read)}",
            f"each byte {digits(plan.read_fan_out)} times",
        ],
        ["", f"{show_rate(plan.restore_rate)} to read it in the time of writing"],
        [
            "lost",
            f"{show_seconds(plan.lost_seconds)} of training with each failure",
            f"{digits(plan.lost_gpu_hours_per_day)} GPU hours a day with restarts",
        ],
        ["goodput", f"{show_share(plan.goodput)} of the time is training that is kept"],
    ]
    return [
        ("checkpoint", f"{show_bytes(plan.bytes)}: {known}"),
        ("GPUs", f"{layout.gpus:,} in {_nodes(plan.nodes)}: {_layout(layout)}"),
        ("writers", f"{plan.writers:,} in {_nodes(nodes)}: {' + '.join(map(_share, plan.shares))}"),
        ("takes", f"{show_seconds(plan.seconds)}{standing} ({plan.speed})"),
        *((name, ", ".join(words)) for name, *words in parts),
    ]


def plan_table(plan: Plan) -> list[str]:
    """The lines for one plan."""
    head = ("tier", "GB/s a GPU", "checkpoint", "restore", "interval", "goodput", "verdict")
    verdicts = [
        (
            verdict.tier,
            f"{verdict.write:g} / {verdict.read:g}",
            show_seconds(verdict.seconds),
            show_seconds(verdict.restore_seconds),
            show_seconds(verdict.interval),
            show_share(verdict.goodput),
            f"{'enough' if verdict.enough else 'not enough'}: {verdict.reason}",
        )
        for verdict in plan.verdicts
    ]
    return [*table(_rows(plan)), "", *table([head, *verdicts]), *(f"note: {note}" for note in plan.notes)]


def sweep_table(name: str, values: Sequence[str], plans: Sequence[Plan]) -> list[str]:
    """The lines for one plan a value."""
    head = (name, "size", "MTTF", "interval", "a day", "takes", "GB/s", "sustained", "overhead", "goodput")
    rows = [
        (
            value,
            show_bytes(plan.bytes),
            show_seconds(plan.mttf),
            show_seconds(plan.interval),
            digits(plan.checkpoints_per_day),
            show_seconds(plan.seconds),
            digits(plan.write),
            digits(plan.sustained),
            show_share(plan.overhead),
            show_share(plan.goodput),
        )
        for value, plan in zip(values, plans, strict=True)
    ]
    return table([head, *rows], right=range(len(head)))
