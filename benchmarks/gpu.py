"""Saves from a device and loads to it, beside the link, the storage and the peers; `scripts/gpu` runs all parts.

    python benchmarks/gpu.py PART --directory DIR --size GB --json FILE

Parts:

- ``link``: the rates of pinned and pageable copies between host and device: the limit of everything else.
- ``disk``: save and load on ``--directory``: fastckpt and the installed peers, each in its own process,
  in turns with the storage alone and the link alone. Bars: at least 0.95 of the slower of the two.
- ``tmpfs``: the same as ``disk``, for a ``--directory`` in memory. Bars: at least 0.8 of the link.
- ``counts``: calls of the core into Python, bytes that the processor copied, how long the interpreter's lock was not
  available, and memory, for a state of large tensors and a state of very many small ones.
- ``training``: the cost of an asynchronous save for a training loop: stall, device time, step time.

Ratios are within one run, round by round; figures are medians. No round begins that would end after ``--seconds``. The
results are written to ``--json`` after each round. ``--device cpu`` tries the parts out without a GPU, and ``--device
standin`` measures the counts on the stand-in device of ``tests/harness`` (with ``PYTHONPATH=tests``). Bars that need a
GPU then count as not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fastckpt
from bench import GB, MB
from bench.device import back_memory, drop_caches
from bench.gpu_bars import count_bars, training_bars, transfer_bars
from bench.gpu_contenders import specs
from bench.gpu_device import DEVICES, Device, DeviceWorkload, available_memory, measure_link
from bench.process import ContenderError, Failure, Request, say
from bench.rounds import Outcome, Rounds
from bench.summary import spread, summarise
from fastckpt._tools.bench import raw

#: The number of tensors in the state of many small ones, and bytes of each; fewer tensors if time is short.
MANY, MANY_BYTES = 60_000, 16384
#: Bytes that measure the speed of the storage, and the share of the time for a round of all contenders at that speed.
PROBE, ROUND = 256 * MB, 0.2
#: The largest share of the time that one operation of one contender may take.
PATIENCE = 0.25
#: Shares of memory that a state may take: of the device's memory, which also holds gradients, products and a second
#: state, and of the host's memory, which also holds a snapshot and a file.
DEVICE_SHARE, HOST_SHARE = 0.35, 0.25


@dataclass
class DeviceRounds(Rounds):
    """Rounds that end in time, and continue without contenders that fail.

    Attributes:
        until: no round begins that would end after this moment (``time.monotonic``).
        tell: called with the outcome after each turn.
    """

    until: float = float("inf")
    tell: Any = None
    began: float = 0.0

    def may_begin(self, number: int) -> bool:
        now = time.monotonic()
        took, self.began = now - self.began, now
        return not number or now + took < self.until

    def turn(self, name: str, number: int) -> None:
        if time.monotonic() > self.until:
            # This applies even to the first round, in which the contenders with bars come first.
            if number == 0:
                raise ContenderError(name, Failure("the time was used up", ""))
            return
        super().turn(name, number)
        self.tell(self.outcome)

    def give_up(self, name: str, error: ContenderError) -> None:
        self.outcome.not_run[name] = error.failure.reason
        self.outcome.samples.pop(name, None)
        if process := self.processes.pop(name, None):
            process.close()
        say(f"not run: {error}")

    def steps(self, name: str, *, compare: bool) -> list[Request]:
        """Return the requests: only fastckpt also fills existing tensors."""
        wanted = ["save", "load", *(["into"] if name == "fastckpt" else [])]
        path = self.path(name)
        return [Request(each, path, compare=compare and each != "into") for each in wanted]

    def make_ready(self, request: Request) -> None:
        self.outcome.caches = drop_caches(request.path)
        back_memory(self.workload.bytes)


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda", choices=DEVICES)
    parser.add_argument("--size", type=float, default=2.0, help="GB of state (default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=Path(), help="where to save (default: here)")
    parser.add_argument("--seconds", type=float, default=120, help="seconds for all rounds (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="maximum number of rounds (default: %(default)s)")
    parser.add_argument("--peers", help="contenders by name, with commas (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures to this file, not to stdout")
    return parser.parse_args(words)


class Result:
    """The results of a part so far; each change is written to a file immediately."""

    def __init__(self, options: argparse.Namespace, device: Device) -> None:
        self.options = options
        self.found: dict[str, Any] = {"part": options.part, **device.about(), "fastckpt": fastckpt.__version__}
        self.found |= {"bars": [], "notes": [], "tables": [], "failed": ""}

    def put(self, **more: Any) -> None:
        """Add these results, and replace earlier results with the same names."""
        self.found |= more
        if self.options.json:
            # If the process is killed during the write, the old file remains.
            fresh = self.options.json.with_suffix(".new")
            fresh.write_text(json.dumps(self.found, indent=2) + "\n", "utf-8")
            fresh.replace(self.options.json)


def fit(device: Device, size: int, result: Result) -> int:
    """Return ``size``, or less if it does not fit into the device's and the host's memory."""
    room = int(min(DEVICE_SHARE * device.free_bytes(), HOST_SHARE * available_memory()))
    if room < size:
        result.found["notes"].append(f"{size / GB:.3g} GB did not fit into memory: {room / GB:.3g} GB")
    return min(size, room)


def storage_rate(directory: Path, size: int) -> float:
    """Return the lower of the write and the read rate of the storage, in bytes per second."""
    storage, file = raw.Device(), directory / "probe"
    try:
        seconds = max(
            transfer.run(time.monotonic())["seconds"] for transfer in (storage.write(file, size), storage.read(file))
        )
    finally:
        file.unlink(missing_ok=True)
    return size / seconds


# -- the parts ---------------------------------------------------------------------------------------------------------


def link(options: argparse.Namespace, device: Device, result: Result) -> None:
    """Measure the link."""
    rates = measure_link(device, int(options.size * GB), options.rounds)
    rows = [f"| {name} | {rate:.2f} |" for name, rate in rates.items()]
    result.put(rates=rates, tables=["| copy | GB/s |", "|---|---:|", *rows])


def transfers(options: argparse.Namespace, device: Device, result: Result, *, memory: bool) -> None:
    """Save and load, in turns with all contenders."""
    until = time.monotonic() + options.seconds
    names = tuple(options.peers.split(",")) if options.peers else ()

    def tell(outcome: Outcome) -> None:
        rounds = max((len(each) for one in outcome.samples.values() for each in one.values()), default=0)
        figures = {
            name: {operation: summarise(samples) for operation, samples in operations.items()}
            for name, operations in outcome.samples.items()
        }
        bars = [bar.document() for bar in transfer_bars(outcome, device.name, memory=memory)]
        failed = outcome.not_run.get("fastckpt", "")
        result.put(
            results=figures, not_run=outcome.not_run, rounds=rounds, caches=outcome.caches, bars=bars,
            failed=f"fastckpt: {failed}" if failed else "", tables=transfer_table(chosen, outcome, figures, rounds),
        )  # fmt: skip

    chosen = specs(device.name, names)
    ready = [spec for spec in chosen if importlib.util.find_spec(spec.contender.needs)]
    absent = {spec.name: f"{spec.contender.needs} is not installed" for spec in chosen if spec not in ready}
    size = fit(device, int(options.size * GB), result)
    most = int(storage_rate(options.directory, min(size, PROBE)) * ROUND * options.seconds / (2 * len(ready)))
    if most < size:
        result.found["notes"].append(f"the storage is slow: {most / GB:.3g} GB, for {size / GB:.3g} GB take too long")
        size = most
    workload = DeviceWorkload("model", size, device=device.name)
    rounds = DeviceRounds(
        specs=ready, workload=workload, directory=options.directory, operations=("save", "load", "into"),
        rounds=options.rounds, patience=max(20, PATIENCE * options.seconds), until=until, tell=tell,
        outcome=Outcome(not_run=absent),
    )  # fmt: skip
    tell(rounds.run())


def transfer_table(chosen: list[Any], outcome: Outcome, figures: dict[str, Any], rounds: int) -> list[str]:
    """Return the table of a part."""
    from bench.contenders import title

    lines = [
        f"Medians of {rounds} rounds; page cache {outcome.caches}; MB is host memory beyond the state.",
        "",
        "| | save, GB/s | range | load, GB/s | range | CPU s/GB save, load | MB save, load | |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    rows = [(title(spec), spec.name, "load") for spec in chosen if spec.name in figures]
    if "into" in figures.get("fastckpt", {}):
        rows.append(("**fastckpt**, `into=`", "fastckpt", "into"))
    for heading, name, load in rows:
        its = [figures[name].get("save" if load == "load" else ""), figures[name].get(load)]
        rates = [word for each in its for word in (rate(each), spread(each) if each else "-")]
        pairs = [
            ", ".join(amount(each, key) for each in its) for key in ("cpu_seconds_per_gigabyte", "extra_megabytes")
        ]
        lines.append(f"| {heading} | {' | '.join([*rates, *pairs])} | {outcome.notes.get(name, '')} |")
    titles = {spec.name: title(spec) for spec in chosen}
    missing = [f"- Not run: {titles[name]}: {reason}" for name, reason in outcome.not_run.items()]
    return [*lines, "", *missing]


def rate(figures: dict[str, Any] | None) -> str:
    """Return a rate for a table."""
    return f"{figures['gigabytes_per_second']:.2f}" if figures else "-"


def amount(figures: dict[str, Any] | None, key: str) -> str:
    """Return a figure that is not a rate for a table."""
    value = figures.get(key) if figures else None
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def counts(options: argparse.Namespace, device: Device, result: Result) -> None:
    """Count the costs of saves and loads for Python and the processor."""
    from bench.gpu_counts import measure_counts

    size = fit(device, int(options.size * GB), result)
    many = min(MANY, max(100, size // MANY_BYTES))
    workloads = {
        f"{size / GB:.3g} GB of large tensors": DeviceWorkload("model", size, device=device.name),
        f"{many} tensors of {MANY_BYTES} bytes": DeviceWorkload("many", MANY_BYTES, many, device=device.name),
    }
    states: dict[str, Any] = {}
    lines = [
        "| | s | calls/GB | ranges | copied/byte | CPU s/GB | extra MB | pinned MB | lock, s/s (idle) | worst, ms |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for what, workload in workloads.items():
        states[what] = measure_counts(device, workload, options.directory)
        for name, each in states[what].items():
            late, still, extra = each["lock"], each["lock_idle"], each["extra_megabytes"]
            lines.append(
                f"| {name}, {what} | {each['seconds']:.3f} | {each['calls_per_gigabyte']:.0f} | {each['ranges']} | "
                f"{each['copied_per_byte']:.2f} | {each['cpu_seconds_per_gigabyte']:.2f} | "
                f"{'-' if extra is None else f'{extra:.0f}'} | {each['pinned_megabytes']:.0f} | "
                f"{late['per_second']:.2f} ({still['per_second']:.2f}) | {late['worst_ms']:.1f} |"
            )
        result.put(states=states, tables=lines)
    warnings = {warning for each in states.values() for one in each.values() for warning in one["warnings"]}
    bars = [bar.document() for bar in count_bars(result.found)]
    result.put(bars=bars, notes=[*result.found["notes"], *sorted(warnings)])


def training(options: argparse.Namespace, device: Device, result: Result) -> None:
    """Measure the cost of a save for training."""
    from bench.gpu_training import Training, measure_training

    if device.name == "standin":
        raise SystemExit("training: the stand-in only copies: use --device cpu")
    until = time.monotonic() + options.seconds
    size = fit(device, int(options.size * GB), result)
    d2h = measure_link(device, min(size, GB), 3)["d2h, pinned"]

    def tell(found: dict[str, Any]) -> None:
        result.put(**found)
        if "alone" in found:
            result.put(bars=[bar.document() for bar in training_bars(result.found)], tables=training_table(found))
        ours = [f"{mode}: {why}" for mode, why in found["failed"].items() if mode in ("plain", "lazy")]
        # Readers of a part's result expect the failures of fastckpt under this name, so all failures get another name.
        result.put(left_out=found["failed"], failed="; ".join(ours))

    measure_training(Training(device, size), options.directory, until, tell, d2h, options.rounds)


def training_table(found: dict[str, Any]) -> list[str]:
    """Return the tables of the part."""
    about = (
        f"{found['bytes'] / GB:.2f} GB in {found['tensors']} tensors; a step takes {found['step'] * 1e3:.1f} ms, of "
        f"which {found['forward_backward'] * 1e3:.1f} before the update; the copy {found['copy'] * 1e3:.0f} ms at the "
        f"link's rate; a window of {found['steps']} steps {found['alone'] * 1e3:.0f} ms, within "
        f"{found['noise'] * 1e3:.0f}; {found['rounds']} rounds."
    )
    lines = [
        about,
        "",
        "| | first call, ms | call, ms | held in steps, ms | device time lost, ms | durable after, s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for mode, each in found["modes"].items():
        if "call" in each:
            figures = [each["first_call"], each["call"], each["held"], each["lost"]]
            cells = " | ".join(f"{1e3 * value:.2f}" for value in figures)
            lines.append(f"| {mode} | {cells} | {each['durable']:.2f} |")
    lines += ["", *(f"- Not run: {mode}: {why}" for mode, why in found["failed"].items())]
    if found.get("extra_bytes") is not None:
        lines.append(f"- Host memory beyond what training has: at most {found['extra_bytes'] / GB:.2f} GB.")
    if beside := found.get("beside"):
        lines.append(
            f"- A step beside a lazy save takes {beside['ratio']:.3f} of one alone ({beside['beside'] * 1e3:.1f} ms, "
            f"worst {beside['worst'] * 1e3:.1f}; {beside['steps']} steps)."
        )
    return lines


PARTS = {
    "link": link,
    "disk": partial(transfers, memory=False),
    "tmpfs": partial(transfers, memory=True),
    "counts": counts,
    "training": training,
}


def main(words: list[str]) -> int:
    """Measure one part."""
    options = parse(words)
    device = Device(options.device)
    result = Result(options, device)
    PARTS[options.part](options, device, result)
    result.put()
    if not options.json:
        print("\n".join(result.found["tables"]))
        for bar in result.found["bars"]:
            print(f"{bar['status']}: {bar['what']}: {bar['shown']} ({bar['sign']})")
    return 1 if result.found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
