"""The result of a plan of a job's checkpoints, as numbers and as a table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fastckpt import _interval as formulas
from fastckpt._text import table
from fastckpt._units import digits, show_bytes, show_rate, show_seconds, show_share

from .layout import Layout, Share  # noqa: TC001 - a public record's types can be looked up

_DAY = 86400.0
#: Bytes of staging buffers that a rank may use beside the copies of its state; the core has this limit.
BUFFERS = 96 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a plan with the storage of one of NVIDIA's tiers.

    Attributes:
        tier: its name.
        write: bytes per second for each GPU that writes.
        read: bytes per second for each GPU.
        seconds: the duration of a checkpoint, which is that of the busiest GPU.
        restore_seconds: the time to read it back.
        interval: seconds from checkpoint to checkpoint, by the plan's rule.
        goodput: the share of time spent on training that no failure undoes.
        enough: whether it meets the request: the seconds if they were given, else the goodput.
        reason: the reason, in words.
    """

    tier: str
    write: float
    read: float
    seconds: float
    restore_seconds: float
    interval: float
    goodput: float
    enough: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The size of a job's checkpoints, the interval between them, and the speed that the storage needs.

    Rates are in bytes per second, times in seconds. Intervals run from the start of one checkpoint to the
    start of the next.

    Attributes:
        bytes: size of a checkpoint.
        parameters: the number of the model's parameters, or None if only bytes are known.
        bytes_per_parameter: as used in the calculation, or None.
        layout: the parallel layout.
        gpus_per_node: GPUs of a node.
        max_in_flight: the most saves in the background at a time.
        shares: the bytes of each rank, the busiest first.
        write: total rate of writing during a checkpoint, bytes per second.
        read: total rate of reading during a restore, bytes per second.
        speed: the source of these two rates, in words.
        seconds: seconds until a checkpoint is durable.
        stall: seconds of these for which training stops.
        mttf: mean time between failures of the cluster.
        goodput_wanted: the requested share of time, or 0.95.
        interval: seconds from checkpoint to checkpoint.
        interval_rule: the source of the interval, in words.
        interval_goodput: the interval for the wanted goodput, ``(1 - goodput) * mttf``.
        interval_young: Young's interval plus the stall.
        interval_daly: Daly's interval plus the stall.
        interval_best: the exact minimum of Daly's model.
        restore_bytes: the bytes that all GPUs together read to restore.
        restore_seconds: how long that takes.
        restart: further seconds that a failure costs: to notice it, and to restart.
        verdicts: the results with storage of each tier.
        notes: assumptions and omissions.
    """

    bytes: int
    parameters: int | None
    bytes_per_parameter: float | None
    layout: Layout
    gpus_per_node: int
    max_in_flight: int
    shares: tuple[Share, ...]
    write: float
    read: float
    speed: str
    seconds: float
    stall: float
    mttf: float
    goodput_wanted: float
    interval: float
    interval_rule: str
    interval_goodput: float
    interval_young: float
    interval_daly: float
    interval_best: float
    restore_bytes: int
    restore_seconds: float
    restart: float
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    @property
    def writers(self) -> int:
        """GPUs that write."""
        return sum(share.gpus for share in self.shares)

    @property
    def writers_per_node(self) -> int:
        """GPUs that write in a node full of writers."""
        return min(self.gpus_per_node, self.shares[0].gpus)

    @property
    def nodes(self) -> int:
        """All nodes."""
        return -(-self.layout.gpus // self.gpus_per_node)

    @property
    def rank_bytes(self) -> float:
        """Bytes of the state of a rank, which it reads to restore: ``restore_bytes / gpus``."""
        return self.restore_bytes / self.layout.gpus

    @property
    def memory_per_node(self) -> float:
        """The most host memory of saves in the background on a node, in bytes, as derived in docs/sizing.md."""
        return min(self.gpus_per_node, self.layout.gpus) * (self.max_in_flight * self.rank_bytes + BUFFERS)

    @property
    def write_per_gpu(self) -> float:
        """Bytes per second of the busiest writing GPU, if all end together: ``share / seconds``."""
        return self.shares[0].bytes / self.seconds

    @property
    def write_per_node(self) -> float:
        """Bytes per second of a node full of writing GPUs."""
        return self.write_per_gpu * self.writers_per_node

    @property
    def checkpoints_per_day(self) -> float:
        """Checkpoints per day: ``86400 / interval``."""
        return _DAY / self.interval

    @property
    def bytes_per_day(self) -> float:
        """Bytes written per day: checkpoints per day times their size."""
        return self.bytes * self.checkpoints_per_day

    @property
    def sustained(self) -> float:
        """Bytes per second written on average over the day: ``bytes / interval``."""
        return self.bytes / self.interval

    @property
    def overhead(self) -> float:
        """The share of time for which training stops to save: ``stall / interval``."""
        return self.stall / self.interval

    @property
    def read_fan_out(self) -> float:
        """How often a restore reads each byte of the checkpoint."""
        return self.restore_bytes / self.bytes

    @property
    def restore_rate(self) -> float:
        """Bytes per second to restore in the time that a checkpoint took: ``write * read_fan_out``."""
        return self.write * self.read_fan_out

    @property
    def failures_per_day(self) -> float:
        """Failures per day: ``86400 / mttf``."""
        return _DAY / self.mttf

    @property
    def lost_seconds(self) -> float:
        """Mean seconds between the last durable checkpoint and a failure, with random failures."""
        return formulas.lost_work(self.interval, self.mttf, self.seconds - self.stall)

    @property
    def lost_gpu_hours_per_day(self) -> float:
        """GPU hours per day that failures cost: lost training, and restarts."""
        return (
            self.layout.gpus * self.failures_per_day * (self.lost_seconds + self.restart + self.restore_seconds) / 3600
        )

    @property
    def goodput(self) -> float:
        """The share of time spent on training that no failure undoes, by Daly's complete cost function."""
        away = self.restart + self.restore_seconds
        return formulas.expected_goodput(self.interval, self.stall, self.mttf, away, self.seconds - self.stall)

    def to_dict(self) -> dict[str, Any]:
        """All attributes and derived numbers, as JSON values."""
        document = asdict(self)
        derived = [name for name, value in vars(Plan).items() if isinstance(value, property)]
        document.update({name: getattr(self, name) for name in sorted(derived)})
        return document

    def __str__(self) -> str:
        return "\n".join(plan_table(self))


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
    """The text of a plan, line by line."""
    layout = plan.layout
    known = "as given"
    if plan.parameters is not None and plan.bytes_per_parameter is not None:
        known = f"{digits(plan.parameters / 1e9)} B parameters, {plan.bytes_per_parameter:g} bytes each"
    nodes = -(-plan.writers // plan.gpus_per_node)
    standing = "" if plan.stall == plan.seconds else f", of which training stands still for {show_seconds(plan.stall)}"
    away = f" + {show_seconds(plan.restart)} to restart" if plan.restart else ""
    day = plan.checkpoints_per_day
    # The number of checkpoints that begin in a day; the small constant absorbs rounding.
    number = f"up to {math.ceil(day - 1e-9):,}" if day >= 10 else digits(day)  # noqa: PLR2004
    ranks, copies = min(plan.gpus_per_node, layout.gpus), f"{plan.max_in_flight} x " * (plan.max_in_flight > 1)
    node = f"{ranks} x ({copies}{show_bytes(plan.rank_bytes)} + {show_bytes(BUFFERS)})"
    parts = [
        [
            "writing",
            f"{show_rate(plan.write_per_gpu)} for {'each' if len(plan.shares) == 1 else 'the busiest'} writing GPU",
            f"{show_rate(plan.write_per_node)} for its node",
            f"{show_rate(plan.write)} in all",
        ],
        ["memory", f"{show_bytes(plan.memory_per_node)} of a node for saves in the background: {node}"],
        ["failures", f"one every {show_seconds(plan.mttf)}", f"{digits(plan.failures_per_day)} a day"],
        ["interval", show_seconds(plan.interval), plan.interval_rule],
        [
            "",
            f"{show_seconds(plan.interval_goodput)} by the {show_share(plan.goodput_wanted)} rule",
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
            f"{verdict.write / 1e9:g} / {verdict.read / 1e9:g}",
            show_seconds(verdict.seconds),
            show_seconds(verdict.restore_seconds),
            show_seconds(verdict.interval),
            show_share(verdict.goodput),
            f"{'enough' if verdict.enough else 'not enough'}: {verdict.reason}",
        )
        for verdict in plan.verdicts
    ]
    return [*table(_rows(plan)), "", *table([head, *verdicts]), *(f"note: {note}" for note in plan.notes)]
