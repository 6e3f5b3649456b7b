"""Tests whether ``fastckpt bench`` and fio agree on the raw device: both write and read equally many bytes, in turns.

    python benchmarks/raw.py DIR --size 1GB --rounds 5

Both have the same block size and depth, direct I/O, memory in huge pages, a preallocated file, and a
sync at the end. The order changes from round to round. The medians and their ratio are printed; the exit status is 1 if
a ratio is off by more than ``--within`` (default 0.1, that is 10 %). fio must be installed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.device import fio
from fastckpt._tools.bench import caches, raw
from fastckpt._units import bytes_of


def ours(device: raw.Device, path: Path, size: int, kind: str) -> float:
    """Return the seconds of the package's own transfer."""
    transfer = device.write(path, size) if kind == "write" else device.read(path)
    return float(transfer.run(time.monotonic())["seconds"])


def turns(directory: Path, size: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each transfer, by kind and by tool."""
    device = raw.Device()
    found: dict[str, dict[str, list[float]]] = {kind: {"ours": [], "fio": []} for kind in ("write", "read")}
    for number in range(rounds):
        for who in ("ours", "fio") if number % 2 == 0 else ("fio", "ours"):
            path = directory / f"{who}-{number}"
            for kind in ("write", "read"):
                os.sync()
                if kind == "read":
                    caches.drop()
                taken = ours(device, path, size, kind) if who == "ours" else fio(path, size, kind)["seconds"]
                found[kind][who].append(taken)
            path.unlink()
    return found


def main() -> int:
    """Compare, print, and return whether they agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", default="1GiB", help="bytes of a transfer, a multiple of 4 MiB (default: 1GiB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--within", type=float, default=0.1)
    options = parser.parse_args()
    size = bytes_of("--size", options.size) // raw.BLOCK * raw.BLOCK
    with TemporaryDirectory(prefix=".raw-", dir=options.directory) as scratch:
        found = turns(Path(scratch), size, options.rounds)
    worst = 0.0
    for kind, seconds in found.items():
        medians = {who: size / statistics.median(each) / 1e9 for who, each in seconds.items()}
        ratio = medians["ours"] / medians["fio"]
        worst = max(worst, abs(ratio - 1))
        every = "; ".join(f"{who} " + " ".join(f"{size / one / 1e9:.2f}" for one in seconds[who]) for who in seconds)
        print(f"{kind}: ours {medians['ours']:.2f} GB/s, fio {medians['fio']:.2f} GB/s, ratio {ratio:.3f} ({every})")
    return worst > options.within


if __name__ == "__main__":
    sys.exit(main())
