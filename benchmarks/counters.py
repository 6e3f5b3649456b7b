"""The cost of the live counters: the same save with and without counters, in turn.

    python benchmarks/counters.py --size 1 --rounds 10

Two processes hold the same state, one with FASTCKPT_TOP=0; the saves take turns, so that disk drift affects both.
Prints the median seconds and CPU seconds of each, their spread as a measure of noise, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

SAVER = """
import json, resource, sys, time
import numpy as np
import fastckpt

state = {"weights": np.random.default_rng(0).integers(0, 256, int(sys.argv[2]), np.uint8)}
for _ in sys.stdin:
    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = fastckpt.save(state, sys.argv[1]).seconds
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"seconds": seconds, "cpu": cpu}), flush=True)
"""


def saver(directory: Path, size: int, counters: str) -> subprocess.Popen[str]:
    """Start a process that saves on command."""
    command = [sys.executable, "-c", SAVER, str(directory / f"counters-{counters}"), str(size)]
    environment = {**os.environ, "FASTCKPT_TOP": counters}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def save(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Have the process save once."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the saver has no pipes")
    process.stdin.write("\n")
    process.stdin.flush()
    return dict(json.loads(process.stdout.readline()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1.0, help="GB (10^9 bytes) of the state")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--directory", type=Path, default=Path("target/counters"))
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    try:
        savers = {counters: saver(args.directory, int(args.size * 1e9), counters) for counters in ("1", "0")}
        for process in savers.values():
            save(process)  # warms up: staging buffers, page tables
        figures: dict[str, list[dict[str, Any]]] = {"1": [], "0": []}
        for round_ in range(args.rounds):
            for counters in ("1", "0") if round_ % 2 else ("0", "1"):
                figures[counters].append(save(savers[counters]))
    finally:
        for process in savers.values():
            process.kill()
            process.wait()
        shutil.rmtree(args.directory)
    for figure, unit in (("seconds", "s"), ("cpu", "CPU s")):
        on, off = ([one[figure] for one in figures[counters]] for counters in ("1", "0"))
        ratio = statistics.median(on) / statistics.median(off)
        print(
            f"{unit}: counters on {statistics.median(on):.3f} ({min(on):.3f} to {max(on):.3f}), "
            f"off {statistics.median(off):.3f} ({min(off):.3f} to {max(off):.3f}), ratio of medians {ratio:.3f}"
        )


if __name__ == "__main__":
    main()
