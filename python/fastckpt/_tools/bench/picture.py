"""Draws the result of a benchmark with matplotlib, which the rest of the benchmark does not need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt._text import count
from fastckpt._tools.plan.plots import check

from .text import TITLES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["check", "draw"]


def draw(file: Path, document: Mapping[str, Any]) -> None:
    """Draw the throughput of each operation: the median as a bar, every round as a dot, the target as lines.

    Args:
        file: the file to write; its suffix sets the format. :func:`check` has been called.
        document: the result.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - only for a picture

    picture = Figure(figsize=(9, 5), layout="constrained")
    axes = picture.subplots()
    names = [name for name in TITLES if name in document["scores"]]
    for at, name in enumerate(names):
        rates = [
            sum(sample["bytes"] for sample in samples) / max(sample["seconds"] for sample in samples) / 1e9
            for samples in document["samples"][name]
        ]
        colour = "0.75" if name.startswith("raw") else "C0"
        axes.bar(at, document["scores"][name]["gigabytes_per_second"]["median"], color=colour, width=0.6)
        axes.plot([at] * len(rates), rates, "o", color="black", markersize=4)
    target = document["target"]
    for kind, colour in (("write", "C3"), ("read", "C2")):
        if rate := target[kind]["needed"] * target["gpus"]:
            label = f"target {target['name']}, {kind}: {rate:g} GB/s for {count(target['gpus'], 'GPU')}"
            axes.axhline(rate, color=colour, linestyle="--", linewidth=1, label=label)
    axes.set_xticks(range(len(names)), [TITLES[name] for name in names])
    axes.set(ylabel="GB/s of all ranks, by the slowest", ylim=(0, None))
    axes.set_title(document["directory"]["path"], fontsize="medium")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    picture.savefig(file)
