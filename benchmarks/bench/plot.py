"""Plots of the figures. Light cards with dark ink, so that they look the same on any page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.process import OPERATION_TITLES
from bench.report import name_of, operations_of
from bench.summary import is_mapped

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.summary import Results

CARD, INK, FAINT = "#fbfbfa", "#24292f", "#d8d8d4"
OURS, PEER, DEVICE = "#0b7285", "#b7bcc2", "#5c636a"
# Colours that are distinct for colour-blind eyes (Okabe and Ito, 2008).
LINES = ("#0b7285", "#d55e00", "#cc79a7", "#009e73", "#e69f00", "#56b4e9", "#5c636a")
DASHES = ("-", "--", ":", "-.")


def pyplot() -> Any:
    """Return matplotlib's pyplot without a display.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install --group benchmark") from None
    mpl.use("Agg")
    mpl.rcParams.update(
        {
            "figure.facecolor": CARD,
            "axes.facecolor": CARD,
            "axes.edgecolor": FAINT,
            "axes.labelcolor": INK,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "lines.linewidth": 1.6,
            # Text stays text, for small files in the reader's fonts. A fixed salt gives equal files for equal figures.
            "svg.fonttype": "none",
            "svg.hashsalt": "fastckpt",
        }
    )
    import matplotlib.pyplot as plt

    return plt


def write(figure: Any, path: Path) -> None:
    """Write the figure without a date, and close it."""
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata, dpi=150, bbox_inches="tight", pad_inches=0.15)
    pyplot().close(figure)


def bars(path: Path, results: Results, heading: str) -> None:
    """Draw each operation's rate, and below it its CPU cost, a bar for each contender."""
    plt = pyplot()
    operations = operations_of(results)
    names = [name for name in results if results[name]]
    rows = [
        ("GB/s, more is better", "gigabytes_per_second"),
        ("CPU s per GB, less is better", "cpu_seconds_per_gigabyte"),
    ]
    height = 0.9 + 0.24 * len(names)
    figure, axes = plt.subplots(
        2, len(operations), figsize=(3.0 * len(operations) + 1.6, 2 * height), sharey=True, squeeze=False
    )
    places = list(range(len(names)))[::-1]
    for row, (label, key) in enumerate(rows):
        for column, operation in enumerate(operations):
            axis = axes[row][column]
            values = [results[name].get(operation, {}).get(key) for name in names]
            colours = [DEVICE if name == "raw" else OURS if name.startswith("fastckpt") else PEER for name in names]
            drawn = axis.barh(places, [value or 0 for value in values], color=colours, height=0.72)
            for bar, name in zip(drawn, names, strict=True):
                if is_mapped(results[name].get(operation, {})):
                    bar.set(hatch="////", edgecolor=CARD, linewidth=0)
            top = max((value for value in values if value), default=1)
            axis.set_xlim(0, top * 1.22)
            for place, value in zip(places, values, strict=True):
                text = "none" if value is None else f"{value:.2f}"
                axis.text((value or 0) + top * 0.02, place, text, va="center", fontsize=8)
            axis.set_yticks(places, [name_of(name).replace("**", "") for name in names])
            axis.tick_params(axis="y", length=0)
            axis.set_xlabel(label)
            if row == 0:
                axis.set_title(OPERATION_TITLES[operation], loc="left")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (DEVICE, PEER, OURS)]
    handles.append(plt.Rectangle((0, 0), 1, 1, facecolor=PEER, edgecolor=CARD, hatch="////", linewidth=0))
    labels = ["raw device", "peers", "fastckpt", "mapped: pages of the file, not yet the process's own"]
    figure.legend(handles, labels, loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=4)
    figure.tight_layout()
    figure.suptitle(heading, x=0.01, y=1.0, ha="left", va="bottom", fontsize=11)
    write(figure, path)


def curves(path: Path, panels: Sequence[dict[str, Any]], heading: str) -> None:
    """Draw one panel for each entry: ``title``, ``x`` and ``y`` (labels), ``log`` and ``lines``.

    ``lines`` maps ``(contender, quantity)`` to points (x, y). Each contender has a colour, each quantity a dash. Words
    on the x axis have equal distances. ``log`` names the logarithmic axes: ``x``, ``xy`` or nothing.
    """
    plt = pyplot()
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.3 * rows), squeeze=False)
    for spare in axes.flat[len(panels) :]:
        spare.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        whos = list(dict.fromkeys(who for who, _ in panel["lines"]))
        whats = list(dict.fromkeys(what for _, what in panel["lines"]))
        for (who, what), points in panel["lines"].items():
            axis.plot(
                [x for x, _ in points],
                [y for _, y in points],
                marker="o",
                ms=4,
                color=LINES[whos.index(who) % len(LINES)],
                linestyle=DASHES[whats.index(what) % len(DASHES)],
                label=f"{who}: {what}",
            )
        scale(axis, panel)
        axis.set_title(panel["title"], loc="left")
        axis.set_xlabel(panel["x"])
        axis.set_ylabel(panel["y"])
        axis.grid(axis="y", color=FAINT, linewidth=0.6)
        axis.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.tight_layout()
    figure.suptitle(heading, x=0.01, y=1.0, ha="left", va="bottom", fontsize=11)
    write(figure, path)


def scale(axis: Any, panel: dict[str, Any]) -> None:
    """Set the scales of a panel; a logarithmic x has ticks at the points."""
    if "x" in panel.get("log", ""):
        axis.set_xscale("log")
        marks = sorted({x for points in panel["lines"].values() for x, _ in points})
        axis.set_xticks(marks, [f"{mark:,g}" if mark < 10_000 else f"{mark:,.0f}" for mark in marks])
        axis.minorticks_off()
    if "y" in panel.get("log", ""):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    else:
        axis.set_ylim(bottom=0)
