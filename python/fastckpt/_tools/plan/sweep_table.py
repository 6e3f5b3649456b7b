"""Many plans as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastckpt._text import table
from fastckpt._units import digits, show_bytes, show_seconds, show_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .record import Plan


def sweep_table(name: str, values: Sequence[str], plans: Sequence[Plan]) -> list[str]:
    """The lines of the table, one per plan."""
    head = (name, "size", "MTTF", "interval", "a day", "takes", "GB/s", "sustained", "overhead", "goodput")
    rows = [
        (
            value,
            show_bytes(plan.bytes),
            show_seconds(plan.mttf),
            show_seconds(plan.interval),
            digits(plan.checkpoints_per_day),
            show_seconds(plan.seconds),
            digits(plan.write / 1e9),
            digits(plan.sustained / 1e9),
            show_share(plan.overhead),
            show_share(plan.goodput),
        )
        for value, plan in zip(values, plans, strict=True)
    ]
    return table([head, *rows], right=range(len(head)))
