"""The bars on the figures. ``--check`` exits with 1 when a bar is missed or was not measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bench import MB, MIB
from bench.summary import is_mapped, ratio

if TYPE_CHECKING:
    from bench.summary import Results


@dataclass(frozen=True)
class Bar:
    """An upper or lower limit of a figure.

    Attributes:
        what: a description of the figure.
        measured: the value of the figure, or None if the run lacks the data for it.
        limit: the value that the figure must reach or must not exceed.
        at_least: whether the figure must reach the limit; otherwise it must not exceed the limit.
    """

    what: str
    measured: float | None
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether the figure was measured and is good enough."""
        if self.measured is None:
            return False
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"{self.measured:.3g}"
        sign = "at least" if self.at_least else "at most"
        return f"{'met   ' if self.met else 'MISSED'}  {self.what}: {measured} ({sign} {self.limit:.3g})"

    def document(self) -> dict[str, Any]:
        """Return the bar's entry in the JSON document."""
        return {**asdict(self), "met": self.met}


def figure(results: Results, name: str, operation: str, key: str = "gigabytes_per_second") -> float | None:
    """Return one figure, or None where it was not measured."""
    value: float | None = results.get(name, {}).get(operation, {}).get(key)
    return value


def is_peer(name: str) -> bool:
    """Whether a contender is neither fastckpt nor the device."""
    return name != "raw" and not name.startswith("fastckpt")


def best_peer(results: Results, operation: str) -> tuple[str, float] | None:
    """Return the peer with the highest rate, and that rate."""
    rates = [(name, rate) for name in results if is_peer(name) for rate in [figure(results, name, operation)] if rate]
    return max(rates, key=lambda pair: pair[1], default=None)


def over_best(
    results: Results, operation: str, limit: float, peers_operation: str = "", ours: str = "fastckpt", among: str = ""
) -> Bar:
    """Return the bar on the rate of ``ours`` over the best peer's at ``peers_operation`` (default: ``operation``).

    The bar also shows the ratio of the raw device to that peer, because no contender can do much better. ``among``
    names the peers in ``results`` if some peers are missing there.
    """
    best = best_peer(results, peers_operation or operation)
    name, rate = best or ("the best peer", None)
    device = ratio(figure(results, "raw", "load" if operation == "into" else operation), rate)
    about = [among, name if best else "", f"the raw device {device:.3g}" if device else ""]
    who = "" if ours == "fastckpt" else f"{ours}, "
    what = f"{operation}: {who}times the best peer ({'; '.join(filter(None, about))})"
    return Bar(what.replace(" ()", ""), ratio(figure(results, ours, operation), rate), limit, at_least=True)


def hot_bars(results: Results) -> list[Bar]:
    """Return the bars on hot loads, which compare mapped loads with mapped loads and copies with copies.

    A peer that maps the file has not copied or checked anything yet, so it is compared with fastckpt's mapping load. If
    a load ends with writes, mapped pages are copied, too, and no contender counts as mapping.
    """
    peers = {name: figures for name, figures in results.items() if is_peer(name)}
    mapping = {name: figures for name, figures in peers.items() if is_mapped(figures.get("hot", {}))}
    copying = {name: figures for name, figures in peers.items() if name not in mapping}
    bars = []
    for ours, among, theirs in (("fastckpt", "that copy", copying), ("fastckpt:mmap-only", "that map", mapping)):
        if theirs or ours == "fastckpt":
            mine = {ours: results[ours]} if ours in results else {}
            bars.append(over_best({**theirs, **mine}, "hot", 1.0, ours=ours, among=among))
    return bars


def of_raw(results: Results, operation: str, limit: float, name: str = "fastckpt") -> Bar:
    """Return the bar on the ratio to the raw device."""
    measured = figure(results, name, operation, "of_raw")
    who = "" if name == "fastckpt" else f", {name}"
    return Bar(f"{operation}: ratio to the raw device{who}", measured, limit, at_least=True)


def cpu(results: Results, name: str, operation: str, limit: float) -> Bar:
    """Return the bar on CPU seconds per GB."""
    measured = figure(results, name, operation, "cpu_seconds_per_gigabyte")
    return Bar(f"{operation}: CPU seconds per GB, {name}", measured, limit, at_least=False)


def extra(results: Results, operation: str, mebibytes: int) -> Bar:
    """Return the bar on memory beyond the state."""
    measured = figure(results, "fastckpt", operation, "extra_megabytes")
    return Bar(f"{operation}: memory over the state, MB", measured, mebibytes * MIB / MB, at_least=False)


def engines(results: Results, operation: str) -> Bar:
    """Return the bar on the threads engine beside io_uring."""
    measured = ratio(figure(results, "fastckpt:threads", operation), figure(results, "fastckpt:uring", operation))
    return Bar(f"{operation}: threads engine over io_uring", measured, 0.95, at_least=True)


def disk_bars(results: Results) -> list[Bar]:
    """Return the bars on a large state on a disk: 2 GB or more, at least 5 rounds."""
    return [
        of_raw(results, "save", 0.95),
        of_raw(results, "save", 0.85, "fastckpt.torch"),
        over_best(results, "save", 1.5),
        cpu(results, "fastckpt:slabs", "save", 0.30),
        cpu(results, "fastckpt:zero-copy", "save", 0.18),
        extra(results, "save", 128),
        of_raw(results, "load", 0.95),
        over_best(results, "load", 1.0),
        over_best(results, "into", 1.3, "load"),
        cpu(results, "fastckpt", "load", 0.45),
        cpu(results, "fastckpt", "into", 0.18),
        extra(results, "load", 64),
        extra(results, "into", 64),
        *hot_bars(results),
        engines(results, "save"),
        engines(results, "load"),
    ]


def loop_bars(results: Results) -> list[Bar]:
    """Return the bars on a loop device over memory, where all costs are CPU costs."""
    return [
        bar
        for operation in ("save", "load")
        for bar in (of_raw(results, operation, 0.6), over_best(results, operation, 3.0))
    ]


def no_slower(results: Results, operations: tuple[str, ...], what: str) -> list[Bar]:
    """Return the bars on small states: no slower than safetensors plus fsync."""
    return [
        Bar(
            f"{operation} of {what}: seconds over those of safetensors",
            ratio(
                figure(results, "fastckpt", operation, "seconds"), figure(results, "safetensors", operation, "seconds")
            ),
            1.0,
            at_least=False,
        )
        for operation in operations
    ]
