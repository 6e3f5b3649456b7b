"""The bars on figures of a device: each bar is met, missed, or not measured for a given reason."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench import GB
from bench.bars import Bar

if TYPE_CHECKING:
    from bench.rounds import Outcome

#: Bytes of the state for which the stall of a lazy save has a limit, and the limit in milliseconds.
STALL_BYTES, STALL_MS = 9.5 * GB, 5.0
CALLS, COPIED = 70.0, 0.0
#: The minimum bytes of a state for the bar on calls: in a smaller state, the partly filled last call weighs too much.
CALLS_BYTES = 0.5 * GB
DISK, TMPFS = 0.95, 0.8


@dataclass(frozen=True)
class DeviceBar(Bar):
    """A bar that may not have been measured.

    Attributes:
        absent: why the figure does not count, or an empty string.
    """

    absent: str = ""

    @property
    def status(self) -> str:
        """``met``, ``missed`` or ``not run``."""
        if self.measured is None or self.absent:
            return "not run"
        return "met" if self.met else "missed"

    def document(self) -> dict[str, Any]:
        shown = "-" if self.measured is None else f"{self.measured:.3g}"
        sign = f"{'at least' if self.at_least else 'at most'} {self.limit:.3g}"
        why = {"status": self.status + (f": {self.absent}" if self.absent else ""), "shown": shown, "sign": sign}
        return {**super().document(), **why, "met": self.status == "met"}


def elsewhere(device: str) -> str:
    """Return why a figure from this device is not valid for a GPU, or an empty string."""
    return "" if device == "cuda" else f"measured on {device}, not on a GPU"


def ratios(outcome: Outcome, operation: str, limits: tuple[str, ...]) -> float | None:
    """Return the median over rounds of fastckpt's rate over the lowest rate of ``limits`` in the same round."""

    def rates(name: str) -> list[float]:
        return [sample.bytes / sample.seconds for sample in outcome.samples.get(name, {}).get(operation, [])]

    columns = [rates(name) for name in ("fastckpt", *limits)]
    found = [ours / min(theirs) for ours, *theirs in zip(*columns, strict=False)]
    return statistics.median(found) if found else None


def transfer_bars(outcome: Outcome, device: str, *, memory: bool) -> list[DeviceBar]:
    """Return the bars on saves and loads: relative to storage and link on a disk, and to the link in memory."""
    limits, least = (("link",), TMPFS) if memory else (("raw", "link"), DISK)
    place, of = ("tmpfs", "the pinned link") if memory else ("disk", "min(storage, link)")
    return [
        DeviceBar(f"{what}, {place}: ratio to {of}", ratios(outcome, operation, limits), least, True, elsewhere(device))
        for operation, what in (("save", "save from the device"), ("load", "load to the device"))
    ]


def count_bars(found: dict[str, Any]) -> list[DeviceBar]:
    """Return the bars on counts; these bars apply to any device except the CPU."""
    absent = "the CPU is not a separate device" if found["device"] == "cpu" else ""
    states = found["states"]
    bars = []
    for state, operations in states.items():
        for name, each in operations.items():
            what = f"{name}, {state}"
            # Only an asynchronous save makes no calls: it requests all copies when it starts.
            unseen = "" if each["calls"] or name == "save_async" else "no call was seen, so they were not counted"
            unseen = unseen or ("" if each["bytes"] >= CALLS_BYTES else "the state is too small")
            bars.append(
                DeviceBar(
                    f"{what}: calls into Python per GB", each["calls_per_gigabyte"], CALLS, False, absent or unseen
                )
            )
            if name.startswith("save"):
                bars.append(
                    DeviceBar(f"{what}: host bytes copied per byte", each["copied_per_byte"], COPIED, False, absent)
                )
    return bars


def training_bars(found: dict[str, Any]) -> list[DeviceBar]:
    """Return the bars on the stall of a lazy save, and on the device's time."""
    absent = elsewhere(found["device"])
    lazy = found["modes"].get("lazy", {})
    stall = lost = None
    if "held" in lazy:
        stall = 1e3 * max(lazy["call"] + lazy["held"], lazy.get("reported", 0.0))
        lost = lazy["lost"]
    small = "" if found["bytes"] >= STALL_BYTES else f"the state has only {found['bytes'] / GB:.3g} GB"
    # Windows differ by chance; a difference within the noise does not count.
    hidden = max(0.0, found["copy"] - found["forward_backward"]) + found.get("noise", 0.0)
    what = "save_async(io=IO(lazy=True)), then a step"
    return [
        DeviceBar(f"{what}, 10 GB: stall of the host, ms", stall, STALL_MS, False, absent or small),
        DeviceBar(f"{what}: device time lost, s (limit: copy not hidden, plus noise)", lost, hidden, False, absent),
    ]
