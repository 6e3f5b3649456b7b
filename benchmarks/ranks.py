"""Several ranks save and load one checkpoint: fastckpt.distributed, torch.distributed.checkpoint, the raw device.

    python benchmarks/ranks.py --size 4 --rounds 5 --markdown --json ranks.json --check
    python benchmarks/ranks.py --aggregate off,8,auto --ranks 8 --kinds short --dir /mnt/shared
    python benchmarks/ranks.py --layout          # which rank writes what, for 64 to 16,384 ranks; has its own options
    python benchmarks/ranks.py --simulate        # 8 to 16,384 ranks in one process; has its own options
    python benchmarks/ranks.py --store           # 1,000 clients on one real TCPStore; has its own options

How it measures, and why:

- **The state** is a Llama-shaped model in bfloat16, of random bytes, in a gloo group of ``--ranks`` processes: rows by
  rank as in FSDP2 (``fsdp``), columns as in tensor parallelism (``column``), or all of it on every rank
  (``replicas``, a quarter of the size). ``many`` is ``--tensors`` tensors of 512 bytes, by rows, and ``short`` is
  tensors of which each rank has 32 or 64 KiB of rows.
- **Durable**: fastckpt's save is durable when it returns. DCP's ``FileSystemWriter`` syncs its files (``sync_files``),
  and the directory is synced afterwards. The directory of DCP's Hugging Face writer, which consolidates the ranks'
  files into whole tensors, is synced afterwards with its contents.
- **Raw** is fio with direct io_uring, 4 MiB blocks and a sync at the end, timed by fio. The best of several settings
  (jobs, depth) is found first, and takes its turn in every round.
- **Interleaved**: each round runs every contender once and begins with another one; figures are medians over rounds.
- **Teams** (``--aggregate off,4,auto``): fastckpt alone, with each of these values of ``FASTCKPT_AGGREGATE``: how
  many ranks collect their pieces before they write. In ``4-sent``, ranks do not read each other's memory.
- **Cold**: the page cache is dropped before each load. Loads fill existing tensors. In the first round the result is
  compared with the state, outside the timing.
- **CPU** is the time of all ranks. **Written** and **read** are the kernel's counts for all ranks (/proc/self/io).
  **Extra** is the peak of the resident set minus its size before: the largest of all ranks.
- **Coordination** is fastckpt's save of ``many`` without the phases that move bytes, beside ``dcp.save`` with a writer
  that writes nothing.

GB is 10^9 bytes. ``--check`` exits with 1 when a bar is missed or was not measured.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
from typing import TYPE_CHECKING, Any

from bench import GB, MB, device, options, report
from bench.bars import Bar
from bench.process import say
from bench.ranks_contenders import LOADS, SAVES, loads, title
from bench.ranks_fio import Fio
from bench.ranks_world import Call, World
from bench.rounds import MEMORY
from bench.summary import ratio

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    Calls = dict[tuple[str, str, str], list[Call]]

#: A state that every rank has entirely gets a quarter of the size, so that the job's memory stays the same.
SHARE = {"replicas": 4}


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = options.parser(__doc__)
    words = options.several(str)
    parser.add_argument("--size", type=float, default=4.0, help="GB of the state (default: 4)")
    parser.add_argument("--ranks", type=options.positive, default=4, help="processes (default: 4)")
    parser.add_argument("--tensors", type=int, default=10_000, help="tensors in the state 'many' (default: 10000)")
    parser.add_argument("--saves", type=words, default=list(SAVES), help="contenders that save (default: all)")
    parser.add_argument("--loads", type=words, default=list(LOADS), help="contenders that load (default: all)")
    parser.add_argument(
        "--kinds",
        type=words,
        default=["fsdp", "column", "replicas", "many"],
        help="kinds of states (default: all but short)",
    )
    parser.add_argument(
        "--aggregate", type=words, metavar="TEAMS", help="measure fastckpt alone, with these teams of ranks"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is not met")
    chosen = parser.parse_args()
    if chosen.aggregate:
        chosen.saves = [f"fastckpt:{team}" for team in chosen.aggregate]
        chosen.loads = chosen.saves if chosen.loads else []
        chosen.kinds = [kind for kind in chosen.kinds if kind != "many"]
    return chosen


class Run:
    """One run of the benchmark: the options, the ranks, and the results."""

    def __init__(self, chosen: argparse.Namespace, directory: Path) -> None:
        self.chosen, self.directory = chosen, directory
        self.world = World(chosen.ranks)
        self.calls: Calls = {}
        self.fio: Fio | None = None
        self.size = int(chosen.size * GB)

    def warm_up(self) -> None:
        """Have every contender do everything once with a small state, so that late imports and allocations are done."""
        self.world.make("fsdp", MB, loads=True)
        for name in {*self.chosen.saves, *self.chosen.loads}:
            path = self.directory / f"warm-{name}"
            self.world.call("save", name, path)
            if loads(name):
                self.world.call("load", name, path)
            device.remove(path)

    def do(self, kind: str, action: str, name: str, path: Path) -> Call:
        """Do one call on all ranks; before that, wait for a quiet disk, empty the page cache and touch free memory."""
        device.drop_caches(path) if action == "load" else os.sync()
        device.back_memory(int(MEMORY * self.world.state_bytes))
        done = self.world.call(action, name, path)
        self.calls.setdefault((kind, action, name), []).append(done)
        rate = done.state_bytes / done.seconds / GB
        say(f"{kind:<9} {action} {name:<9} {done.seconds:7.3f} s  {rate:6.2f} GB/s")
        return done

    def large(self, kind: str) -> None:
        """Save and load a large state in rounds."""
        chosen, size = self.chosen, self.size // SHARE.get(kind, 1)
        nbytes = self.world.make(kind, size, loads=True)
        savers = [name for name in chosen.saves if kind == "fsdp" or loads(name)]
        raw = [] if chosen.aggregate else ["fio"]
        if raw and self.fio is None:
            self.fio = Fio.best(self.directory, nbytes, chosen.ranks)
        for number in range(chosen.rounds):
            names = [*raw, *savers]
            turn = number % len(names)
            names = (names[turn:] + names[:turn])[:: 1 if number % 2 == 0 else -1]
            for name in names:
                path = self.directory / f"{kind}-{name}"
                if name == "fio":
                    for action, seconds in self.fio.run(path, nbytes).items():
                        call = Call(seconds, 0.0, None, nbytes, nbytes, nbytes)
                        self.calls.setdefault((kind, action, "fio"), []).append(call)
                        say(f"{kind:<9} {action} fio       {seconds:7.3f} s  {nbytes / seconds / GB:6.2f} GB/s")
                    continue
                self.do(kind, "save", name, path)
                if name in chosen.loads and loads(name):
                    self.do(kind, "load", name, path)
                    if number == 0 and any(wrong := self.world.ask("compare")):
                        raise SystemExit(f"{name} did not load what was saved: {wrong}")
                device.remove(path)

    def many(self) -> None:
        """Save many small tensors, and plan a save of them."""
        self.world.make("many", 0, self.chosen.tensors)
        # One call more than the rounds: the first call allocates memory that later calls reuse.
        for number in range(self.chosen.rounds + 1):
            for action, name in (("save", "fastckpt"), ("plan", "dcp")):
                path = self.directory / f"many-{name}"
                self.do("many", action, name, path)
                if path.exists():
                    device.remove(path)
            if number == 0:
                for action, name in (("save", "fastckpt"), ("plan", "dcp")):
                    self.calls["many", action, name].clear()


def figures(calls: list[Call]) -> dict[str, Any]:
    """Return the figures of one contender: medians over rounds; for memory, the largest of all."""
    nbytes = calls[0].state_bytes
    seconds = statistics.median(call.seconds for call in calls)
    return {
        "bytes": nbytes,
        "seconds": seconds,
        "gigabytes_per_second": nbytes / seconds / GB,
        "cpu_seconds_per_gigabyte": statistics.median(call.cpu for call in calls) / (nbytes / GB),
        "written_per_byte": statistics.median(call.written for call in calls) / nbytes,
        "read_per_byte": statistics.median(call.read for call in calls) / nbytes,
        "extra_megabytes": max((call.extra for call in calls if call.extra is not None), default=0) / MB,
        "coordination_seconds": statistics.median(coordination(call) for call in calls),
        "samples": [vars(call) for call in calls],
    }


def coordination(call: Call) -> float:
    """Return the seconds of a call without the phases in which rank 0 wrote, read or synced bytes."""
    moving = ("write", "read", "sync", "fsync")
    return call.seconds - sum(seconds for phase, seconds in call.notes.get("phases", {}).items() if phase in moving)


def bars(found: dict[str, dict[str, Any]]) -> list[Bar]:
    """Return the bars on the figures."""

    def get(kind: str, action: str, name: str, figure: str = "gigabytes_per_second") -> float | None:
        return found.get(f"{kind} {action} {name}", {}).get(figure)

    ours, raw = get("fsdp", "save", "fastckpt"), get("fsdp", "save", "fio")
    dcp, hugging = get("fsdp", "save", "dcp"), get("fsdp", "save", "dcp_hf")
    of_raw, of_dcp = ratio(ours, raw), ratio(ours, dcp)
    less = None if of_raw is None or of_dcp is None else max(of_dcp / 2, of_raw / 0.9)
    made = [
        Bar("save: ratio to the raw device", of_raw, 0.85, at_least=True),
        Bar("save: over 2 times DCP's rate or 0.9 of raw, whichever is less", less, 1.0, at_least=True),
        Bar("save: times DCP with consolidation", ratio(ours, hugging), 8.0, at_least=True),
        Bar(
            "save: bytes written by the ranks a byte", get("fsdp", "save", "fastckpt", "written_per_byte"), 1.01, False
        ),
        Bar("load: times DCP's reader", ratio(get("fsdp", "load", "fastckpt"), get("fsdp", "load", "dcp")), 2.0, True),
    ]
    made += [
        Bar(f"load, {kind}: bytes read a byte", get(kind, "load", "fastckpt", "read_per_byte"), 1.05, at_least=False)
        for kind in ("replicas", "column")
    ]
    plan = ratio(
        get("many", "save", "fastckpt", "coordination_seconds"), get("many", "plan", "dcp", "coordination_seconds")
    )
    return [*made, Bar("coordination without bytes over DCP's planning", plan, 0.25, at_least=False)]


def table(found: dict[str, dict[str, Any]], kind: str, action: str) -> list[list[str]]:
    """Return the costs of one kind of state and one action for each contender, head first."""
    raw = found.get(f"{kind} {action} fio", {}).get("gigabytes_per_second")
    rows = [[f"{kind}, {action}", "s", "GB/s", "of raw", "CPU s/GB", "written/byte", "read/byte", "extra MB a rank"]]
    for key, each in found.items():
        of, what, name = key.split()
        if (of, what) != (kind, action):
            continue
        rate = each["gigabytes_per_second"]
        cells = [each["seconds"], rate, ratio(rate, raw)]
        if name != "fio":
            cells += [each["cpu_seconds_per_gigabyte"], each["written_per_byte"], each["read_per_byte"]]
            cells.append(each["extra_megabytes"])
        cells += [None] * (len(rows[0]) - 1 - len(cells))
        rows.append([title(name), *(report.number(cell, 0 if cell and cell > 100 else 2) for cell in cells)])
    return rows


def main() -> int:
    """Measure, print, and return whether the bars are met."""
    for own, module in (("layout", "layout"), ("simulate", "simulation"), ("store", "store")):
        if f"--{own}" in sys.argv[1:]:
            return int(importlib.import_module(f"bench.ranks_{module}").main())
    chosen = parse_options()
    with options.working_directory(chosen, "ranks") as directory:
        about = report.machine(directory)
        run = Run(chosen, directory)
        try:
            run.warm_up()
            for kind in chosen.kinds:
                run.many() if kind == "many" else run.large(kind)
        finally:
            run.world.close()
    found = {" ".join(key): figures(calls) for key, calls in run.calls.items()}
    demands = [] if chosen.aggregate else bars(found)
    for line in report.machine_lines(about):
        print(line)
    print(f"{chosen.ranks} ranks, {chosen.rounds} rounds; fio: {run.fio}.")
    for kind in chosen.kinds:
        for action in ("save", "load", "plan"):
            rows = table(found, kind, action)
            if len(rows) > 1:
                print("\n" + report.render(rows, markdown=chosen.markdown))
    print()
    for bar in demands:
        print(bar)
    document = {
        "machine": about,
        "ranks": chosen.ranks,
        "fio": str(run.fio),
        "results": found,
        "bars": [bar.document() for bar in demands],
    }
    report.write_json(chosen.json, document)
    return int(chosen.check and not all(bar.met for bar in demands))


if __name__ == "__main__":
    sys.exit(main())
