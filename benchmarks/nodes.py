"""Compares the defaults on several kinds of nodes with the best manual setting.

    sudo python benchmarks/nodes.py --size 0.25 --rounds 5 --markdown

Each situation has its own processes, one per rank: bound to some processors (taskset), with the variables of
torchrun, in a control group with a quota (version 1), on a file system mounted for it: ext4 on a loop device,
tmpfs, overlay, or one in user space that answers each request after ``--delay`` milliseconds, in parallel. All
ranks together save a state of ``--size``, each its share to its own path, and load it again; then all of them load
one checkpoint as large as a share (``same``). The settings of ``SETTINGS`` take turns; then the fastest of them takes
turns with the defaults. An operation lasts as long as on its slowest rank. Figures are medians over the rounds; the
page cache is dropped before each load. ``GB/s`` is the rate of all ranks together. ``of best`` divides the rate of the
defaults by that of the fastest setting. A busy machine distorts this ratio, but not the choices of the defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from bench import GB
from bench.loop import command, mounted, unmount
from bench.options import positive
from bench.report import number, render

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS: dict[str, tuple[str, int | None]] = {
    "default": ("auto", None),
    **{f"uring, {threads}": ("uring", threads) for threads in (1, 2, 4, 8)},
    **{f"threads, {threads}": ("threads", threads) for threads in (4, 12, 24)},
    "buffered, 4": ("buffered", 4),
}


@dataclass(frozen=True)
class Situation:
    """A node: its file system, the processors of its ranks, their number, and their group's quota in processors."""

    files: str
    bound: str = ""
    ranks: int = 1
    quota: float | None = None

    def __str__(self) -> str:
        quota = f", quota {self.quota:g}" if self.quota else ""
        return f"{self.files}, cores {self.bound or 'all'}, ranks {self.ranks}{quota}"


def situations() -> list[Situation]:
    """Return each file system with all processors, with one, and with a quota, each with one rank and with eight."""
    nodes = [("", None), ("0", None), ("", 1.5)]
    return [
        Situation(files, bound, ranks, quota)
        for files in ("ext4", "tmpfs", "overlay", "fuse")
        for bound, quota in nodes
        for ranks in (1, 8)
    ]


@contextmanager
def file_system(kind: str, size: int, delay: float) -> Iterator[Path]:
    """Mount a file system of this kind, and unmount it afterwards."""
    with ExitStack() as undo:
        if kind == "ext4":
            yield undo.enter_context(mounted(size))
            return
        base = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="fastckpt-node-")))
        point = base / "mnt"
        point.mkdir()
        if kind == "fuse":
            daemon = [sys.executable, str(Path(__file__).parent / "bench" / "late_files.py"), str(point), str(delay)]
            beside = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "tests")}
            child = undo.enter_context(subprocess.Popen(daemon, stdout=subprocess.PIPE, text=True, env=beside))
            if child.stdout is None or child.stdout.readline() != "mounted\n":
                raise OSError("no file system in user space: it needs root and /dev/fuse")
        elif kind == "tmpfs":
            command("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(point))
        else:
            for part in ("lower", "upper", "work"):
                (base / part).mkdir()
            layers = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
            command("mount", "-t", "overlay", "-o", layers, "overlay", str(point))
        undo.callback(unmount, point)
        yield point


@contextmanager
def limited(quota: float | None) -> Iterator[list[Path]]:
    """Make a control group with this quota; yield the files to which a process writes its number."""
    if quota is None:
        yield []
        return
    group = Path("/sys/fs/cgroup/cpu") / f"fastckpt-node-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text(f"{quota * 100_000:.0f}")
        yield [group / "cgroup.procs"]
    finally:
        group.rmdir()


class Ranks:
    """The processes of a situation, which all run the same commands at the same time."""

    def __init__(self, situation: Situation, options: argparse.Namespace, groups: list[Path], undo: ExitStack) -> None:
        bound = ["taskset", "-c", situation.bound] if situation.bound else []
        each = int(options.size * GB) // situation.ranks // options.tensors
        order = {"groups": [str(group) for group in groups], "tensors": options.tensors, "bytes": each}
        self.pipes: list[tuple[IO[str], IO[str]]] = []
        for rank in range(situation.ranks):
            said = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": situation.ranks,
                "LOCAL_WORLD_SIZE": situation.ranks,
            }
            child = subprocess.Popen(
                [*bound, sys.executable, __file__, "--rank", json.dumps(order)],
                env=os.environ | {name: str(value) for name, value in said.items()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            undo.enter_context(child)
            undo.callback(child.kill)
            self.pipes.append((cast("IO[str]", child.stdin), cast("IO[str]", child.stdout)))

    def tell(self, rank: int, *order: str) -> None:
        """Have a process begin an operation with a setting, at a path."""
        print(json.dumps(order), file=self.pipes[rank][0], flush=True)

    def told(self, rank: int) -> tuple[float, str]:
        """Wait for the operation; return its seconds, and the engine and threads that it used."""
        seconds, chosen = json.loads(self.pipes[rank][1].readline())
        return seconds, chosen

    def do(self, operation: str, setting: str, point: Path) -> tuple[float, str]:
        """Have all processes do an operation; return the seconds of the slowest, and what the last rank used."""
        if operation != "save":
            Path("/proc/sys/vm/drop_caches").write_text("1")
        for rank in range(len(self.pipes)):
            self.tell(rank, operation, setting, str(point / ("same" if operation == "same" else f"rank-{rank}")))
        told = [self.told(rank) for rank in range(len(self.pipes))]
        return max(seconds for seconds, _ in told), told[-1][1]


def medians(
    ranks: Ranks, point: Path, kinds: list[str], settings: list[str], rounds: int
) -> dict[str, dict[str, float]]:
    """Return the median seconds of each operation with each setting; the settings take turns."""
    seconds: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in settings} for kind in kinds}
    for turn in range(rounds):
        for name in [*settings[turn % len(settings) :], *settings[: turn % len(settings)]]:
            for kind in kinds:
                seconds[kind][name].append(ranks.do(kind, name, point)[0])
    return {kind: {name: statistics.median(each) for name, each in by.items()} for kind, by in seconds.items()}


def measured(situation: Situation, point: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one situation: all settings in turn, then the fastest of each operation beside the defaults."""
    kinds = ["save", "load", *(["same"] if situation.ranks > 1 else [])]
    found: dict[str, Any] = {}
    with limited(situation.quota) as groups, ExitStack() as undo:
        ranks = Ranks(situation, options, groups, undo)
        if "same" in kinds:
            ranks.tell(0, "save", "default", str(point / "same"))
            ranks.told(0)
        # The very first operation uses files and memory that were never touched, so its time does not count.
        chosen = {kind: ranks.do(kind, "default", point)[1] for kind in kinds}
        by_hand = medians(ranks, point, kinds, [name for name in SETTINGS if name != "default"], options.rounds)
        for kind, seconds in by_hand.items():
            best = min(seconds, key=seconds.__getitem__)
            # The fastest of eight settings was also lucky, so it is measured again, as often as the defaults.
            again = medians(ranks, point, [kind], ["default", best], 2 * options.rounds + 1)[kind]
            rates = {name: options.size / median for name, median in (seconds | again).items()}
            found[kind] = {"chosen": chosen[kind], "best": best, "rates": rates}
    return found


def rank_of_node(order: dict[str, Any]) -> None:
    """Do an operation for each line of standard input; print its seconds, and the engine and threads that it used."""
    for group in order["groups"]:
        Path(group).write_text(str(os.getpid()))
    import numpy as np

    import fastckpt

    state = {f"w{name}": np.full(order["bytes"], name, np.uint8) for name in range(order["tensors"])}
    for line in sys.stdin:
        operation, setting, path = json.loads(line)
        engine, threads = SETTINGS[setting]
        reports: list[Any] = []
        io = fastckpt.IO(engine, threads=threads, on_report=reports.append)  # type: ignore[arg-type]
        begin = time.perf_counter()
        if operation == "save":
            fastckpt.save(state, path, io=io)
        else:
            fastckpt.load(path, io=io)
        took = time.perf_counter() - begin
        print(json.dumps([took, f"{reports[0].engine}, {reports[0].threads}"]), flush=True)


def main() -> None:
    """Measure all situations and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=0.25, help="GB of the state of all ranks (default: 0.25)")
    parser.add_argument("--tensors", type=positive, default=8, help="arrays of a rank (default: 8)")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds (default: 3)")
    parser.add_argument("--delay", type=float, default=5.0, help="milliseconds of the slow file system (default: 5)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--only", default="", metavar="TEXT", help="only situations whose names contain TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_of_node(json.loads(options.rank))
        return
    for number_ in (signal.SIGTERM, signal.SIGHUP):  # so that mounts are undone after an interrupt
        signal.signal(number_, lambda got, _: sys.exit(128 + got))
    rows = [["situation", "operation", "default", "GB/s", "best by hand", "GB/s", "of best"]]
    figures = {}
    for situation in situations():
        if options.only not in str(situation):
            continue
        with file_system(situation.files, int(options.size * GB * 2.5) + (128 << 20), options.delay) as point:
            figures[str(situation)] = found = measured(situation, point, options)
        for kind, told in found.items():
            rates, best = told["rates"], told["best"]
            of_best = number(rates["default"] / rates[best])
            shown = [told["chosen"], number(rates["default"]), best, number(rates[best]), of_best]
            rows.append([str(situation), kind, *shown])
    print(render(rows, markdown=options.markdown))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
