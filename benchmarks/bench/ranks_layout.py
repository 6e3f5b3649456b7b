"""Which part of a checkpoint each rank writes and reads: the core's own plan for many ranks, without bytes of tensors.

The model has 70 billion parameters in bfloat16, a copy of them in float32 and two moments of Adam: 988 GB, in files of
5 GB. The figures are taken from ``--sample`` ranks, spread over all of them. Each save, and each load by the ranks that
saved, has a row with teams, and up to 1,024 ranks a row without teams. The last row is for a format with one file for
each rank. A run is a range of a file with one writer or reader; whole is the part of the bytes of a save that is in
whole grains of 4 MiB with one writer each. The bytes that travel are given as a multiple of the state, and those of the
busiest rank as a multiple of the mean. The time and the memory of a plan (this process's peak) are for one rank.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import measure, report
from bench.bars import Bar
from fastckpt import _core

if TYPE_CHECKING:
    from collections.abc import Callable

    Spread = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[str, int, int], ...]]

#: Llama 70B: layers, width, width of the feed-forward part, width of keys and values, vocabulary.
LAYERS, WIDTH, WIDE, NARROW, VOCABULARY = 80, 8192, 28672, 1024, 128256
#: Copies of the parameters, by dtype: weights, the copy of the optimizer, two moments.
COPIES = (("model", "BF16"), ("master", "F32"), ("first", "F32"), ("second", "F32"))
#: The parts of a layer that are experts in a mixture of experts, and how many experts there are.
PARTS, EXPERTS = ("gate", "up", "down"), 64
SAMPLE = 128
GRAIN = 4 << 20
#: The number of files of the checkpoint.
FILES = 216
#: The numbers of ranks that are examined.
RANKS = (64, 512, 1024, 8192, 16384)
MIB = 1 << 20


def shapes() -> list[tuple[str, tuple[int, ...], str]]:
    """Return each tensor's name, shape, and how tensor parallelism cuts it: by rows, by columns or not at all."""
    layers = [
        ("q", (WIDTH, WIDTH), "rows"),
        ("k", (NARROW, WIDTH), "rows"),
        ("v", (NARROW, WIDTH), "rows"),
        ("o", (WIDTH, WIDTH), "columns"),
        ("norm1", (WIDTH,), ""),
        ("norm2", (WIDTH,), ""),
        ("gate", (WIDE, WIDTH), "rows"),
        ("up", (WIDE, WIDTH), "rows"),
        ("down", (WIDTH, WIDE), "columns"),
    ]
    inner = [(f"layers.{at:02}.{name}", shape, cut) for at in range(LAYERS) for name, shape, cut in layers]
    return [
        ("embed", (VOCABULARY, WIDTH), "rows"),
        *inner,
        ("norm", (WIDTH,), ""),
        ("head", (VOCABULARY, WIDTH), "rows"),
    ]


def fsdp2(ranks: int) -> Callable[[str, str], Spread]:
    """Cut each tensor by rows over all ranks."""
    return lambda _, __: (tuple(range(ranks)), (ranks,), (("shard", 0, 0),))


def hsdp(ranks: int) -> Callable[[str, str], Spread]:
    """Keep eight copies, each cut by rows."""
    return lambda _, __: (tuple(range(ranks)), (8, ranks // 8), (("replicate", 0, 0), ("shard", 0, 0)))


def tp_fsdp(ranks: int) -> Callable[[str, str], Spread]:
    """Use tensor parallelism over 8 ranks, and cut the rows of each part over the other ranks."""

    def spread(_: str, cut: str) -> Spread:
        placements: tuple[tuple[str, int, int], ...] = (("shard", 0, 0), ("replicate", 0, 0))
        if cut == "rows":
            placements = (("strided", 0, 8), ("shard", 0, 0))
        elif cut == "columns":
            placements = (("shard", 0, 0), ("shard", 1, 0))
        return tuple(range(ranks)), (ranks // 8, 8), placements

    return spread


def ep_fsdp(ranks: int) -> Callable[[str, str], Spread]:
    """Cut experts over 64 ranks and each one's rows over the others; cut all else by rows over all ranks."""
    whole = fsdp2(ranks)

    def spread(name: str, cut: str) -> Spread:
        if name.rpartition(".")[2] not in PARTS:
            return whole(name, cut)
        return tuple(range(ranks)), (ranks // EXPERTS, EXPERTS), (("shard", 1, 0), ("shard", 0, 0))

    return spread


def pp_fsdp(ranks: int) -> Callable[[str, str], Spread]:
    """Make eight stages of ten layers; each stage cuts its tensors by rows."""

    def spread(name: str, _: str) -> Spread:
        layer = name.split(".")[1] if name.startswith("layers.") else "0" if name == "embed" else str(LAYERS - 1)
        first = int(layer) * 8 // LAYERS * (ranks // 8)
        return tuple(range(first, first + ranks // 8)), (ranks // 8,), (("shard", 0, 0),)

    return spread


#: How many kinds of teams a rank may be in, by kind of job: tensors with different cuts have different teams.
TEAMS = {"TP8 x FSDP": 3, "EP64 x FSDP": 3}
#: Kinds of jobs.
KINDS = {
    "FSDP2": fsdp2,
    "HSDP 8 x N/8": hsdp,
    "TP8 x FSDP": tp_fsdp,
    "EP64 x FSDP": ep_fsdp,
    "PP8 x FSDP": pp_fsdp,
}


def layout(kind: str, ranks: int, team: int) -> tuple[_core.Share, int]:
    """Return the layout of a job and its bytes. ``team``: ranks per team; 0: as many as pieces need; 1: none."""
    spread_of = KINDS[kind](ranks)
    numbers: dict[Spread, int] = {}
    tensors = []
    total = 0
    for copy, dtype in COPIES:
        for name, shape, cut in shapes():
            number = numbers.setdefault(spread_of(name, cut), len(numbers))
            total += math.prod(shape) * (2 if dtype == "BF16" else 4)
            sizes = shape
            if kind.startswith("EP") and name.rpartition(".")[2] in PARTS:
                # Each expert has an equal part of the inner width.
                sizes = (EXPERTS, *(size // EXPERTS if size == WIDE else size for size in shape))
            tensors.append((f"{copy}.{name}", dtype, sizes, None, (number,)))
    spreads = [_core.Spread.mesh(*spread) for spread in numbers]
    options = _core.SaveOptions(shard_size=5_000_000_000)
    return _core.Share.to_save(tensors, spreads, ranks, options, 4096, 0 if team == 1 else GRAIN, team), total


def points(kind: str, ranks: int, team: int, sample: int) -> list[dict[str, Any]]:
    """Return the figures of the save and the load of a job, with teams as in :func:`layout`."""
    measure.give_back_freed_memory()
    measure.reset_peak()
    began = time.process_time()
    share, total = layout(kind, ranks, team)
    seconds = time.process_time() - began
    chosen = sorted({int(rank) for rank in np.linspace(0, ranks - 1, min(ranks, sample))})
    points = []
    for load in (False, True):
        began = time.process_time()
        share.figures(0, load=load)
        planned = seconds + time.process_time() - began
        memory = measure.status("VmHWM")
        found = [share.figures(rank, load=load) for rank in chosen]
        point: dict[str, Any] = {
            "kind": kind,
            "what": "load" if load else "save",
            "how": "teams" if team == 0 else "in place",
            **of(found, ranks, total),
            "plan_cpu": planned,
            "plan_memory": memory,
        }
        if not load:
            runs = np.array([run[1:] for rank in chosen for run in share.ranges(rank)])
            grains = runs[:, 1] // GRAIN - -(-runs[:, 0] // GRAIN)
            point["whole"] = float(np.maximum(grains, 0).sum() * GRAIN / (runs[:, 1] - runs[:, 0]).sum())
        points.append(point)
    return points


def of(found: list[dict[str, int]], ranks: int, total: int) -> dict[str, Any]:
    """Return the figures of a job of ``total`` bytes, estimated from a sample of its ranks."""

    def every(name: str) -> Any:
        return np.array([one[name] for one in found], dtype=float)

    return {
        "ranks": ranks,
        "team": found[0]["team"],
        "runs": float(every("ranges").mean()),
        "run_bytes": float(every("bytes").sum() / every("ranges").sum()),
        "files": float(every("files").mean()),
        "files_max": float(every("files").max()),
        "opens": float(every("files").mean() * ranks),
        "peers": float(every("peers").mean()),
        "peers_p95": float(np.quantile(every("peers"), 0.95)),
        "peers_max": float(every("peers").max()),
        "travels": float(every("bytes_received").mean() * ranks / total),
        "busiest": float(every("bytes").max() / every("bytes").mean()),
        "state_bytes": total,
    }


def alone(kind: str, ranks: int, total: int) -> dict[str, Any]:
    """Return the figures of a format with a file for each rank: one run, and no exchange with other ranks."""
    duties = {"ranges": 1, "files": 1, "bytes": total // ranks, "peers": 0, "bytes_received": 0, "team": "a file each"}
    return {
        "kind": kind,
        "what": "either",
        "how": "a file each",
        **of([duties], ranks, total),
        "plan_cpu": 0.0,
        "plan_memory": 0,
    }


def bars(one: dict[str, Any]) -> list[Bar]:
    """Return the bars on the figures of a job with teams."""
    ranks, team, load = one["ranks"], one["team"], one["what"] == "load"
    name = f"{one['kind']}, {ranks:,} ranks, {one['what']}"
    copies = 8 if load and one["kind"].startswith("HSDP") else None
    files = TEAMS.get(one["kind"], 1) * (FILES / team + 2)
    if ranks >= 2048:
        files = min(files, 16 if one["kind"].startswith("TP") else 8)
    most = [
        ("files of any rank", one["files_max"], files),
        ("opens", one["opens"], 100_000),
        ("peers of 95 % of the ranks", one["peers_p95"], 3 * team + 128),
        ("peers of any rank", one["peers_max"], 400 + ranks / team),
        ("CPU s of a plan", one["plan_cpu"], 2),
        ("MiB of memory of a plan", one["plan_memory"] and one["plan_memory"] / MIB, 1024),
    ]
    if ranks <= 8192:
        travels = copies or (0.4 if team == 1 else 1.02 if ranks <= 1024 else 1.15)
        most.append(("states that travel", one["travels"], travels))
        most.append(("bytes of the busiest rank, of the mean", one["busiest"], 1.15 if ranks <= 1024 else 1.4))
    found = [Bar(f"{name}: {what}", figure, limit, at_least=False) for what, figure, limit in most]
    if not load:
        found.append(Bar(f"{name}: MiB of a run, mean", one["run_bytes"] / MIB, GRAIN / MIB, at_least=True))
        found.append(Bar(f"{name}: part of the bytes in whole grains", one["whole"], 0.99, at_least=True))
    return found


def line(one: dict[str, Any]) -> str:
    """Return one point as a row of a table."""
    cells = [
        one["kind"],
        one["what"],
        f"{one['ranks']:,}",
        one["team"],
        f"{one['runs']:,.0f}",
        f"{one['run_bytes'] / MIB:.2f}",
        f"{one['whole']:.2%}" if "whole" in one else "",
        f"{one['files']:.0f} / {one['files_max']:.0f}",
        f"{one['opens']:,.0f}",
        f"{one['peers']:.0f} / {one['peers_p95']:.0f} / {one['peers_max']:.0f}",
        f"{one['travels']:.2f}",
        f"{one['busiest']:.2f}",
        f"{one['plan_cpu']:.2f}",
        f"{one['plan_memory'] / MIB:.0f}" if one["plan_memory"] else "",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


HEAD = (
    "| job | | ranks | team | runs a rank | MiB a run | whole | files: mean / most | opens | "
    "peers: mean / p95 / most | travels | busiest | plan, CPU s | MiB |\n|---|---|" + 12 * "---:|"
)


def main() -> int:
    """Print the requested table."""
    parser = argparse.ArgumentParser(prog="ranks.py --layout", description=__doc__)
    parser.add_argument("--layout", action="store_true", help="this")
    parser.add_argument("--ranks", type=_numbers, default=RANKS, help="numbers, such as 64,512 (default: 64 to 16384)")
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=list(KINDS), help="kinds of jobs (default: all)"
    )
    parser.add_argument("--sample", type=int, default=SAMPLE, help=f"ranks that are examined (default: {SAMPLE})")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures into FILE, SVG or PNG (matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is not met")
    chosen = parser.parse_args()
    print(HEAD)
    found: list[dict[str, Any]] = []
    for kind in chosen.kinds:
        for ranks in chosen.ranks:
            rows = points(kind, ranks, 0, chosen.sample)
            # Without teams, a rank has one run per tensor: above 1024 ranks, too many runs to lay out, and all alike.
            if ranks <= 1024:
                alike = rows[1]["team"] == 1
                rows += points(kind, ranks, 1, chosen.sample)[: 1 if alike else 2]
            rows.append(alone(kind, ranks, rows[0]["state_bytes"]))
            found += rows
            print("\n".join(map(line, rows)), flush=True)
    if chosen.plot:
        draw(chosen.plot, found)
    demands = [bar for one in found if one["how"] == "teams" for bar in bars(one)]
    missed = [bar for bar in demands if not bar.met]
    print("\n".join([f"{len(demands) - len(missed)} of {len(demands)} bars are met.", *map(str, missed)]))
    report.write_json(chosen.json, {"points": found, "bars": [bar.document() for bar in demands]})
    return int(chosen.check and bool(missed))


def draw(path: Path, found: list[dict[str, Any]]) -> None:
    """Draw the runs, opens, peers and travelling bytes of a save, by ranks."""
    from bench import plot

    first = found[0]["kind"]

    def curves(name: str, scale: float = 1) -> dict[tuple[str, str], list[tuple[float, float]]]:
        lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for one in found:
            # Without teams, the figures of all kinds of jobs are alike, so only one is drawn.
            if one["what"] != "load" and (one["how"] == "teams" or one["kind"] == first) and one[name]:
                lines.setdefault((one["kind"], one["how"]), []).append((one["ranks"], one[name] / scale))
        return lines

    plot.curves(
        path,
        [
            {"title": title, "x": "ranks", "y": y, "log": "xy", "lines": curves(name, scale)}
            for title, y, name, scale in (
                ("mean run", "MiB", "run_bytes", MIB),
                ("opens of files, all ranks", "opens", "opens", 1),
                ("peers of a rank, mean", "ranks", "peers", 1),
                ("bytes that travel", "states", "travels", 1),
            )
        ],
        "Who writes a model of 70 billion parameters with Adam, 988 GB",
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
