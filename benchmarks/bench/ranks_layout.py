"""Who writes what of one checkpoint, for many ranks: the core's own plan, without a byte of tensors.

The model has 70 billion parameters in bfloat16, a copy of them in float32 and two moments of Adam: 988 GB, in files of
5 GB. The figures are taken from 128 ranks, spread over all of them. Up to 1,024 ranks a second row shows what each rank
writes in place; the last line says what a format with one file per rank writes. A run is a range of a file with one
writer.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import report
from fastckpt import _core

if TYPE_CHECKING:
    from collections.abc import Callable

    Spread = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[str, int, int], ...]]

#: Layers, width, width of the feed-forward part, width of keys and values, vocabulary: those of Llama 70B.
LAYERS, WIDTH, WIDE, NARROW, VOCABULARY = 80, 8192, 28672, 1024, 128256
#: Copies of the parameters, by dtype: weights, the copy of the optimizer, two moments.
COPIES = (("model", "BF16"), ("master", "F32"), ("first", "F32"), ("second", "F32"))
SAMPLE = 128
GRAIN = 4 << 20
#: Kinds of jobs, and how many ranks they are looked at with.
RANKS = (64, 512, 1024, 8192, 16384)
MIB = 1 << 20


def shapes() -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape, and how tensor parallelism cuts it: by rows, by columns or not at all."""
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


def fsdp2(ranks: int) -> Callable[[str], Spread]:
    """Rows over all ranks."""
    return lambda _: (tuple(range(ranks)), (ranks,), (("shard", 0, 0),))


def hsdp(ranks: int) -> Callable[[str], Spread]:
    """Eight copies, each by rows."""
    return lambda _: (tuple(range(ranks)), (8, ranks // 8), (("replicate", 0, 0), ("shard", 0, 0)))


def tp_fsdp(ranks: int) -> Callable[[str], Spread]:
    """Tensor parallelism over 8 ranks, and rows of what each has over the others."""

    def spread(cut: str) -> Spread:
        placements: tuple[tuple[str, int, int], ...] = (("shard", 0, 0), ("replicate", 0, 0))
        if cut == "rows":
            placements = (("strided", 0, 8), ("shard", 0, 0))
        elif cut == "columns":
            placements = (("shard", 0, 0), ("shard", 1, 0))
        return tuple(range(ranks)), (ranks // 8, 8), placements

    return spread


KINDS = {"FSDP2": fsdp2, "HSDP 8 x N/8": hsdp, "TP8 x FSDP": tp_fsdp}


def point(kind: str, ranks: int, team: int) -> dict[str, Any]:
    """Figures of one job with teams of so many ranks: 0 for as many as the pieces need, 1 for none."""
    spread_of = KINDS[kind](ranks)
    numbers: dict[Spread, int] = {}
    tensors = []
    total = 0
    for copy, dtype in COPIES:
        for name, shape, cut in shapes():
            number = numbers.setdefault(spread_of(cut), len(numbers))
            tensors.append((f"{copy}.{name}", dtype, shape, None, (number,)))
            total += math.prod(shape) * (2 if dtype == "BF16" else 4)
    began = time.process_time()
    spreads = [_core.Spread.mesh(*spread) for spread in numbers]
    options = _core.SaveOptions(shard_size=5_000_000_000)
    share = _core.Share.to_save(tensors, spreads, ranks, options, 4096, 0 if team == 1 else GRAIN, team)
    share.figures(0, load=False)
    seconds = time.process_time() - began
    chosen = sorted({int(rank) for rank in np.linspace(0, ranks - 1, min(ranks, SAMPLE))})
    found = [share.figures(rank, load=False) for rank in chosen]

    def every(name: str) -> Any:
        return np.array([one[name] for one in found], dtype=float)

    return {
        "kind": kind,
        "ranks": ranks,
        "team": found[0]["team"],
        "runs": every("ranges").mean(),
        "run_bytes": every("bytes").sum() / every("ranges").sum(),
        "files": every("files").mean(),
        "files_max": every("files").max(),
        "opens": every("files").mean() * ranks,
        "peers": every("peers").mean(),
        "peers_p95": float(np.quantile(every("peers"), 0.95)),
        "peers_max": every("peers").max(),
        "travels": every("bytes_received").mean() * ranks / total,
        "busiest": every("bytes").max() / (total / ranks),
        "plan_cpu": seconds,
        "state_bytes": total,
    }


def line(one: dict[str, Any]) -> str:
    """One point as a row of a table."""
    cells = [
        one["kind"],
        f"{one['ranks']:,}",
        one["team"],
        f"{one['runs']:,.0f}",
        f"{one['run_bytes'] / MIB:.2f}",
        f"{one['files']:.0f} / {one['files_max']:.0f}",
        f"{one['opens']:,.0f}",
        f"{one['peers']:.0f} / {one['peers_p95']:.0f} / {one['peers_max']:.0f}",
        f"{one['travels']:.2f}",
        f"{one['busiest']:.2f}",
        f"{one['plan_cpu']:.2f}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


HEAD = (
    "| job | ranks | team | runs a rank | MiB a run | files: mean / most | opens | peers: mean / p95 / most | "
    "travels | busiest | plan, CPU s |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def main() -> int:
    """Print the table of what the command line asks for."""
    parser = argparse.ArgumentParser(prog="ranks.py --layout", description=__doc__)
    parser.add_argument("--layout", action="store_true", help="this")
    parser.add_argument("--ranks", type=_numbers, default=RANKS, help="as in 64,512 (default: 64 to 16384)")
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=list(KINDS), help="of jobs (default: all)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    chosen = parser.parse_args()
    print(HEAD)
    found = []
    for kind in chosen.kinds:
        for ranks in chosen.ranks:
            for team in (0, 1):
                # In place there is a run for each rank and tensor: too many to lay out, and each alike.
                if team and ranks > 1024:
                    continue
                found.append(point(kind, ranks, team))
                print(line(found[-1]), flush=True)
    state = found[0]["state_bytes"]
    alone = ", ".join(f"{ranks:,}: {state / ranks / MIB:,.0f} MiB" for ranks in chosen.ranks)
    print(f"A file for each rank: one run and one file a rank, nothing travels; by ranks, {alone}.")
    report.write_json(chosen.json, {"points": found})
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
