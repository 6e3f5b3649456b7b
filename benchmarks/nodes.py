"""What ``auto`` chooses on nodes of several kinds, and what it reaches beside the best setting by hand.

    sudo python benchmarks/nodes.py --size 0.25 --rounds 5 --markdown

Each situation is a process of its own: bound to some processors (taskset), one of several ranks (LOCAL_WORLD_SIZE), in
a control group with a quota (version 1), on a file system that is mounted for it: ext4 on a loop device, tmpfs,
overlay, or one in user space that answers each request after ``--delay`` milliseconds, all at the same time. It saves
and loads a state of ``--tensors`` arrays, with the defaults and with each setting of ``SETTINGS``, which take turns.
Figures are medians over the rounds; the page cache is dropped before each load. ``of best`` is the rate of the defaults
divided by that of the fastest setting. On a machine with other work it says little; what was chosen does not depend on
that.
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
from typing import TYPE_CHECKING, Any

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
    """A node: its file system, the processors of the rank, the ranks, and the quota of their group in processors."""

    files: str
    bound: str = ""
    ranks: int = 1
    quota: float | None = None

    def __str__(self) -> str:
        quota = f", quota {self.quota:g}" if self.quota else ""
        return f"{self.files}, cores {self.bound or 'all'}, ranks {self.ranks}{quota}"


def situations() -> list[Situation]:
    """Each file system, with all processors and with one; with a quota; alone and as one of eight ranks."""
    nodes = [("", None), ("0", None), ("", 1.5)]
    return [
        Situation(files, bound, ranks, quota)
        for files in ("ext4", "tmpfs", "overlay", "fuse")
        for bound, quota in nodes
        for ranks in (1, 8)
    ]


@contextmanager
def file_system(kind: str, size: int, delay: float) -> Iterator[Path]:
    """Mount one of the kind; it is gone afterwards."""
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
    """Make a control group with this quota; yield the files that a process writes its number to."""
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


def measured(situation: Situation, point: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one situation in a process of its own."""
    with limited(situation.quota) as groups:
        bound = ["taskset", "-c", situation.bound] if situation.bound else []
        order = {"point": str(point), "groups": [str(group) for group in groups], **vars(options)}
        done = subprocess.run(
            [*bound, sys.executable, __file__, "--one", json.dumps(order, default=str)],
            env=os.environ | {"LOCAL_WORLD_SIZE": str(situation.ranks)},
            stdout=subprocess.PIPE,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def one(order: dict[str, Any]) -> dict[str, Any]:
    """What a process of one situation does: all settings in turn."""
    for group in order["groups"]:
        Path(group).write_text(str(os.getpid()))
    import numpy as np

    import fastckpt

    each = int(order["size"] * GB) // order["tensors"]
    state = {f"w{name}": np.full(each, name, np.uint8) for name in range(order["tensors"])}
    path = Path(order["point"]) / "rank-0"
    seconds: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in SETTINGS} for kind in ("save", "load")}
    chosen = {}
    turns = list(SETTINGS.items())
    for turn in range(-1, order["rounds"]):
        for name, (engine, threads) in [*turns[turn % len(turns) :], *turns[: turn % len(turns)]]:
            reports: list[Any] = []
            io = fastckpt.IO(engine, threads=threads, on_report=reports.append)  # type: ignore[arg-type]
            begin = time.perf_counter()
            fastckpt.save(state, path, io=io)
            seconds["save"][name].append(time.perf_counter() - begin)
            Path("/proc/sys/vm/drop_caches").write_text("1")
            begin = time.perf_counter()
            fastckpt.load(path, io=io)
            seconds["load"][name].append(time.perf_counter() - begin)
            if turn < 0:  # the first of all finds files and memory that nothing has touched
                for kind in seconds:
                    seconds[kind][name].clear()
            if name == "default":
                chosen = {kind: f"{r.engine}, {r.threads}" for kind, r in zip(("save", "load"), reports, strict=True)}
    rates = {
        kind: {name: order["size"] / statistics.median(samples) for name, samples in by.items()}
        for kind, by in seconds.items()
    }
    return {"chosen": chosen, "rate": rates}


def main() -> None:
    """Measure all situations and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=0.25, help="GB of the state (default: 0.25)")
    parser.add_argument("--tensors", type=positive, default=8, help="arrays of the state (default: 8)")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds (default: 3)")
    parser.add_argument("--delay", type=float, default=5.0, help="milliseconds of the slow file system (default: 5)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--only", default="", metavar="TEXT", help="situations whose name has TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(json.loads(options.one))))
        return
    for number_ in (signal.SIGTERM, signal.SIGHUP):  # what is mounted goes, interrupted or not
        signal.signal(number_, lambda got, _: sys.exit(128 + got))
    rows = [["situation", "operation", "default", "GB/s", "best by hand", "GB/s", "of best"]]
    figures = {}
    for situation in situations():
        if options.only not in str(situation):
            continue
        with file_system(situation.files, int(options.size * GB * 2.5) + (128 << 20), options.delay) as point:
            figures[str(situation)] = found = measured(situation, point, options)
        for kind, rates in found["rate"].items():
            best = max((name for name in rates if name != "default"), key=rates.__getitem__)
            of_best = rates["default"] / rates[best]
            shown = [number(rates["default"]), best, number(rates[best]), number(of_best)]
            rows.append([str(situation), kind, found["chosen"][kind], *shown])
    print(render(rows, markdown=options.markdown))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
