"""Plots of a sweep and of a simulation, drawn with matplotlib, which the rest of a plan does not need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .record import Plan
    from .simulate import Simulation

#: The curves of a sweep's plot, each on separate axes.
_CURVES: tuple[tuple[str, Callable[[Plan], float]], ...] = (
    ("interval, min", lambda plan: plan.interval / 60),
    ("a checkpoint takes, s", lambda plan: plan.seconds),
    ("sustained over the day, GB/s", lambda plan: plan.sustained / 1e9),
    ("goodput, %", lambda plan: 100 * plan.goodput),
)

#: Values that span at least this ratio are drawn on a logarithmic axis.
_DECADE = 10


def _matplotlib() -> Any:
    try:
        from matplotlib import figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(f"a plot needs matplotlib: pip install matplotlib ({error})") from error
    return figure


def check(file: Path) -> None:
    """Refuse, before anything is calculated, a picture that could not be drawn.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the name's suffix is not a format of matplotlib.
        FileNotFoundError: the file's directory does not exist.
    """
    formats = _matplotlib().Figure().canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        raise ValueError(f"plot {file}: the suffix must be one of {', '.join(sorted(formats))}")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"plot {file}: its directory does not exist: create it")


def plot_sweep(file: Path, name: str, values: Sequence[str], plans: Sequence[Plan]) -> None:
    """Draw the results for each value of a sweep.

    Args:
        file: the file to write; its suffix sets the format.
        name: the swept argument.
        values: its values, as they were written.
        plans: the plan of each.
    """
    picture = _matplotlib().Figure(figsize=(9, 6), layout="constrained")
    numbers = _numbers(values)
    for axes, (title, value) in zip(picture.subplots(2, 2).flat, _CURVES, strict=True):
        axes.plot(numbers or range(len(values)), [value(plan) for plan in plans], marker="o")
        if numbers is None:
            axes.set_xticks(range(len(values)), values)
        elif max(numbers) >= _DECADE * min(numbers):
            axes.set_xscale("log")
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel(name.replace("_", " "))
        axes.grid(alpha=0.3)
    picture.savefig(file)


def _numbers(values: Sequence[str]) -> list[float] | None:
    """The values as numbers; None if they have units."""
    try:
        return [float(value) for value in values]
    except ValueError:
        return None


def plot_simulation(file: Path, result: Simulation) -> None:
    """Draw the goodput at each interval: as simulated, by Daly's model and to first order.

    Args:
        file: the file to write; its suffix sets the format.
        result: the result to draw.
    """
    picture = _matplotlib().Figure(figsize=(8, 5), layout="constrained")
    axes = picture.subplots()
    minutes = [point.interval / 60 for point in result.points]
    shown = [100 * point.simulated for point in result.points]
    errors = [100 * point.error for point in result.points]
    axes.errorbar(minutes, shown, yerr=errors, fmt="o", markersize=3, label="simulated")
    axes.plot(minutes, [100 * point.formula for point in result.points], label="Daly's model")
    axes.plot(minutes, [100 * point.first_order for point in result.points], "--", label="first order")
    # The marks mostly overlap: dashes of different lengths make all of them visible.
    for index, mark in enumerate(result.marks):
        style = (0, (2 + 2 * index, 2)) if index else "-"
        axes.axvline(mark.interval / 60, color=f"C{3 + index}", linewidth=1, linestyle=style, label=mark.name)
    axes.set(xscale="log", xlabel="interval, min", ylabel="goodput, %", ylim=(max(0.0, min(shown) - 5), max(shown) + 2))
    axes.grid(alpha=0.3)
    axes.legend()
    picture.savefig(file)
