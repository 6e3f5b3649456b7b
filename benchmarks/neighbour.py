"""The effect of a save on other processes: the bandwidth of a reader of other files on the same disk during a save.

    python benchmarks/neighbour.py --size 2 --rounds 5 --check

A reader in a separate process endlessly reads a file with O_DIRECT, ``--reader-depth`` blocks of 4 MiB in flight, and
counts the bytes. Each round measures the reader alone, beside a save with ``bandwidth_limit`` at ``--share`` of the
disk's write rate (fio, median of three, at the start) and beside an unlimited save; and the limited save alone. Saves
run in a separate process, so that they share no interpreter. The bars: beside the limited save, the reader keeps at
least half of the rate that it has alone. The limited save alone is within a tenth of its limit; beside the reader it is
at most a tenth above. How far it stays below depends on the disk and its scheduler: mq-deadline serves reads first, and
a reader with several blocks in flight leaves little for a save. Figures are medians; ratios are from the same round.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from bench import BLOCK, GB, IN_FLIGHT, device, options, report
from bench.bars import Bar
from bench.contenders import Spec
from bench.process import Process, Request, say
from bench.states import Workload

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = options.parser(__doc__)
    parser.add_argument(
        "--size", type=float, default=2.0, help="GB of the state, and of the reader's file (default: 2)"
    )
    parser.add_argument("--share", type=float, default=0.5, help="share of the disk's write rate (default: 0.5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds to measure the reader alone (default: 2)")
    parser.add_argument("--reader-depth", type=options.positive, default=1, help="its blocks in flight (default: 1)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is not met")
    chosen = parser.parse_args()
    if chosen.size * GB < IN_FLIGHT * BLOCK or chosen.seconds <= 0 or not 0 < chosen.share <= 1:
        parser.error(f"--size must be at least {IN_FLIGHT * BLOCK / GB:.2f}, --seconds above 0, --share 0 to 1")
    if chosen.plot:
        parser.error("--plot is not supported here: there are only three figures")
    return chosen


def read_without_end(path: Path, depth: int, total: Any, may_read: Any) -> None:
    """Read a file repeatedly past the page cache, ``depth`` blocks in flight, and count into ``total``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    blocks = os.fstat(descriptor).st_size // BLOCK

    def work(first: int) -> None:
        buffer, block = mmap.mmap(-1, BLOCK), first
        while may_read.wait():
            moved = os.preadv(descriptor, [buffer], block % blocks * BLOCK)
            with total.get_lock():
                total.value += moved
            block += depth

    for first in range(depth):
        threading.Thread(target=work, args=(first,), daemon=True).start()
    # End when the parent has died: multiprocessing kills a daemon only if the parent ends normally.
    while os.getppid() != 1:
        time.sleep(0.5)


class Reader:
    """The reader's process, which counts from its creation on."""

    def __init__(self, path: Path, depth: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.total, self.may_read = context.Value("Q", 0), context.Event()
        self.may_read.set()
        arguments = (path, depth, self.total, self.may_read)
        self.process = context.Process(target=read_without_end, args=arguments, daemon=True)
        self.process.start()
        while not self.total.value:
            if not self.process.is_alive():
                raise SystemExit(f"the reader ended with status {self.process.exitcode}")
            time.sleep(0.05)

    def rate_while(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Return the reader's rate in bytes per second during the call, and the call's result.

        The measurement continues until a block was read: on a busy machine, that may take longer than a short call.
        """
        before, begin = self.total.value, time.perf_counter()
        result = call()
        while self.total.value == before and self.process.is_alive():
            time.sleep(0.001)
        return (self.total.value - before) / (time.perf_counter() - begin), result

    def pause_while(self, call: Callable[[], Any]) -> Any:
        """Return the call's result; the reader pauses meanwhile."""
        self.may_read.clear()
        # Let blocks in flight complete.
        time.sleep(0.1)
        try:
            return call()
        finally:
            self.may_read.set()

    def close(self) -> None:
        """End the reader."""
        self.process.kill()
        self.process.join()


def write_rate(directory: Path, size: int) -> float:
    """Return the disk's write rate in bytes per second: the median of three measurements."""
    seconds = []
    for _ in range(3):
        seconds.append(device.transfer(directory / "raw", size, "write")["seconds"])
        (directory / "raw").unlink()
    return size / statistics.median(seconds)


def run(chosen: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Measure; return the JSON document."""
    machine = report.machine(directory)
    size = int(chosen.size * GB) // BLOCK * BLOCK
    workload, disk = Workload("model", size), write_rate(directory, size)
    limit = disk * chosen.share
    specs = {"limited": Spec("fastckpt:limited", {"bandwidth_limit": limit}), "unlimited": Spec("fastckpt:unlimited")}
    device.transfer(directory / "other", size, "write")
    rounds: list[dict[str, float]] = []
    processes = {name: Process(spec, workload) for name, spec in specs.items()}
    reader = Reader(directory / "other", chosen.reader_depth)
    try:
        for process in processes.values():
            process.wait_until_made()
        for number in range(chosen.rounds):
            alone, _ = reader.rate_while(lambda: time.sleep(chosen.seconds))
            figures = {"alone": alone}
            path = directory / "limited"
            processes["limited"].prepare(Request("save", path))
            sample = reader.pause_while(processes["limited"].go)
            figures["limited save alone"] = sample.bytes / sample.seconds
            device.remove(path)
            for name in specs if number % 2 == 0 else reversed(specs):
                path = directory / name
                processes[name].prepare(Request("save", path))
                figures[f"beside {name}"], sample = reader.rate_while(processes[name].go)
                figures[f"{name} save"] = sample.bytes / sample.seconds
                device.remove(path)
            rounds.append(figures)
            told = ", ".join(f"{name} {rate / GB:.2f}" for name, rate in figures.items())
            say(f"round {number + 1} of {chosen.rounds}, GB/s: {told}")
    finally:
        reader.close()
        for process in processes.values():
            process.close()
    return {"machine": machine, "disk": disk, "limit": limit, "rounds": rounds}


def bars_of(document: dict[str, Any]) -> list[Bar]:
    """Return the bars; the rate of the limited save alone has two, an upper and a lower limit."""
    rounds, limit = document["rounds"], document["limit"]
    kept = statistics.median(one["beside limited"] / one["alone"] for one in rounds)
    beside = statistics.median(one["limited save"] for one in rounds) / limit
    rate = statistics.median(one["limited save alone"] for one in rounds) / limit
    return [
        Bar("reader beside a limited save, of what it reads alone", kept, 0.5, at_least=True),
        Bar("limited save alone, rate over the limit", rate, 1.1, at_least=False),
        Bar("limited save alone, rate over the limit", rate, 0.9, at_least=True),
        Bar("limited save beside the reader, rate over the limit", beside, 1.1, at_least=False),
    ]


def table(document: dict[str, Any]) -> list[list[str]]:
    """Return the medians, head first."""
    rows = [["", "reader, GB/s", "of alone", "save, GB/s", "of the limit"]]
    rounds = document["rounds"]

    def median(name: str, over: str = "") -> str:
        return report.number(statistics.median(one[name] / (one[over] if over else GB) for one in rounds))

    rows.append(["reader alone", median("alone"), "1.00", "-", "-"])
    of_limit = statistics.median(one["limited save alone"] for one in rounds) / document["limit"]
    rows.append(["limited save alone", "-", "-", median("limited save alone"), report.number(of_limit)])
    for name, title in (("limited", f"bandwidth_limit={document['limit'] / GB:.2f} GB/s"), ("unlimited", "no limit")):
        save = statistics.median(one[f"{name} save"] for one in rounds)
        of_limit = report.number(save / document["limit"]) if name == "limited" else "-"
        rows.append(
            [title, median(f"beside {name}"), median(f"beside {name}", "alone"), median(f"{name} save"), of_limit]
        )
    return rows


def main() -> int:
    """Run, print, and return the exit status."""
    chosen = parse_options()
    with options.working_directory(chosen, "neighbour") as directory:
        document = run(chosen, directory)
    bars = bars_of(document)
    document["bars"] = [bar.document() for bar in bars]
    report.write_json(chosen.json, document)
    print(report.render(table(document), markdown=chosen.markdown))
    print(f"\nThe disk writes {document['disk'] / GB:.2f} GB/s; medians of {chosen.rounds} rounds.")
    print("\n".join(report.machine_lines(document["machine"])))
    for bar in bars:
        say(str(bar))
    return 1 if chosen.check and not all(bar.met for bar in bars) else 0


if __name__ == "__main__":
    sys.exit(main())
