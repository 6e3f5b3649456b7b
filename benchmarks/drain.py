"""How much a drain to a remote tier slows training, and how fast the drain is.

    python benchmarks/drain.py --size 2 --rounds 5 --json drain.json
    python benchmarks/drain.py --url s3://bucket/benchmark

Two things are measured, each as a ratio within one run:

- **Step time** of a training loop, matrix products on one thread of about 50 ms, while ``Manager(remote=)`` drains a
  checkpoint to another directory of the same disk, against the same loop undisturbed. The bandwidth limit of the drain
  is a quarter of the rate of a save to this disk in the same run. In a control, another process moves the same bytes at
  the same rate by direct reads and writes, and does nothing else: its cost is the part that the machine causes. Rounds
  alternate.
- **Rate** of a drain without a limit to an object store, against the store's own client: ``obstore.put`` of the same
  files in sequence, each in parallel parts. The default store, ``memory://``, measures only the reads of the local disk
  and the checksums. Rounds alternate, and the files are dropped from the page cache first.

Medians; GB is 10^9 bytes. ``--check`` exits with 1 when a bar is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import obstore
import obstore.store
import torch

import fastckpt

if TYPE_CHECKING:
    from collections.abc import Callable

GB = 10**9
#: Bars: step time over undisturbed step time, rate over the client's rate.
STEP, RATE = 1.05, 0.8
#: Approximate seconds of one step.
STEP_SECONDS = 0.05
#: The client's settings for a large object: bytes of a part, and parts in flight.
PART, AT_ONCE = 8 << 20, 8


def make_run(directory: Path, size: int) -> tuple[Path, float]:
    """Make a local tier with a checkpoint of about ``size`` bytes; return it and the save's bytes per second."""
    count = max(1, size // (64 << 20))
    generator = np.random.default_rng(0)
    state = {f"w{index}": generator.integers(0, 256, 64 << 20, np.uint8) for index in range(count)}
    rates = []
    for name in ("warm-up", "again", "step-00000001"):
        report = fastckpt.save(
            state, directory / name, files=fastckpt.Files(shard_size="1GB"), metadata={"step": 1, "metrics": {}}
        )
        rates.append(report.bytes / report.seconds)
        if name != "step-00000001":
            fastckpt.remove(directory / name)
    return directory, statistics.median(rates[1:])


def forget(directory: Path) -> None:
    """Drop all files below ``directory`` from the page cache."""
    for file in directory.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def step_of(seconds: float) -> Callable[[], float]:
    """Return a step of about ``seconds`` on one thread, which returns how long it took."""
    torch.set_num_threads(1)
    width, turns = 512, 1
    left, right = torch.randn(width, width), torch.randn(width, width)

    def step() -> float:
        began = time.perf_counter()
        for _ in range(turns):
            torch.mm(left, right)
        return time.perf_counter() - began

    for _ in range(20):
        step()
    turns = max(1, round(seconds / statistics.median(step() for _ in range(50))))
    return step


#: Copies the files of a directory at a given rate, past the page cache, and never looks at their bytes.
_MOVER = """
import mmap, os, sys, time
source, target, limit, block = sys.argv[1], sys.argv[2], float(sys.argv[3]), 8 << 20
os.mkdir(target)
memory, due = mmap.mmap(-1, block), time.monotonic()
for name in os.listdir(source):
    reading = os.open(os.path.join(source, name), os.O_RDONLY | os.O_DIRECT)
    writing = os.open(os.path.join(target, name), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    size, start = os.fstat(reading).st_size, 0
    os.posix_fallocate(writing, 0, max(1, size))
    while start < size:
        time.sleep(max(0.0, due - time.monotonic()))
        got = os.preadv(reading, [memory], start)
        os.pwritev(writing, [memoryview(memory)[: -(-got // 4096) * 4096]], start)
        start, due = start + got, max(due, time.monotonic() - 0.1) + got / limit
    os.fsync(writing)
    os.close(reading)
    os.close(writing)
"""


def measure_steps(local: Path, directory: Path, limit: float, rounds: int) -> dict[str, Any]:
    """Measure step times with and without a drain, in turns."""
    step = step_of(STEP_SECONDS)
    size = sum(file.stat().st_size for file in local.rglob("*") if file.is_file())
    remote = directory / "remote"

    def drain() -> list[float]:
        with fastckpt.Manager(local, ranks="alone", remote=remote, remote_bandwidth_limit=limit) as manager:
            done = threading.Thread(target=manager.wait)
            done.start()
            taken = []
            while done.is_alive():
                taken.append(step())
        return taken

    def control() -> list[float]:
        command = [sys.executable, "-c", _MOVER, str(local / "step-00000001"), str(remote), str(limit)]
        with subprocess.Popen(command) as mover:
            taken = []
            while mover.poll() is None:
                taken.append(step())
        if mover.returncode:
            raise RuntimeError("the control has failed")
        return taken

    ratios: dict[str, list[float]] = {"drain": [], "control": []}
    seconds: dict[str, list[float]] = {"alone": [], "drain": [], "control": []}
    rates = []
    for number in range(rounds):
        both = [("drain", drain), ("control", control)]
        for name, run in both[:: 1 if number % 2 else -1]:
            undisturbed = [step() for _ in range(20)]
            began = time.perf_counter()
            disturbed = run()
            if name == "drain":
                rates.append(size / (time.perf_counter() - began))
            shutil.rmtree(remote)
            undisturbed += [step() for _ in range(20)]
            seconds["alone"].append(statistics.median(undisturbed))
            seconds[name].append(statistics.median(disturbed))
            ratios[name].append(seconds[name][-1] / seconds["alone"][-1])
    return {
        "seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "ratio": statistics.median(ratios["drain"]),
        "control": statistics.median(ratios["control"]),
        "ratios": ratios,
        "limit_gb_s": limit / GB,
        "drained_gb_s": statistics.median(rates) / GB,
    }


def measure_rate(local: Path, url: str, rounds: int) -> dict[str, Any]:
    """Measure the rates of a drain to an object store and of the store's client, in turns."""
    files = sorted(file for file in (local / "step-00000001").iterdir() if file.is_file())
    size = sum(file.stat().st_size for file in files)

    def client(place: str) -> float:
        scheme, _, rest = place.partition("://")
        bucket, _, prefix = rest.partition("/")
        is_memory = scheme == "memory"
        store: Any = obstore.store.MemoryStore() if is_memory else obstore.store.from_url(f"{scheme}://{bucket}")
        began = time.perf_counter()
        for file in files:
            obstore.put(store, f"{prefix}/{file.name}", file, chunk_size=PART, max_concurrency=AT_ONCE)
        taken = time.perf_counter() - began
        obstore.delete(store, [f"{prefix}/{file.name}" for file in files])
        return taken

    def ours(place: str) -> float:
        began = time.perf_counter()
        with fastckpt.Manager(local, ranks="alone", remote=place):
            pass
        taken = time.perf_counter() - began
        fastckpt.remove(f"{place}/step-00000001")
        return taken

    seconds: dict[str, list[float]] = {"fastckpt": [], "obstore.put": []}
    for number in range(rounds + 1):
        both = [("fastckpt", ours), ("obstore.put", client)]
        for name, run in both[:: 1 if number % 2 else -1]:
            forget(local)
            taken = run(f"{url}/{uuid.uuid4().hex}")
            if number:  # the first round warms up
                seconds[name].append(taken)
    rates = {name: size / GB / statistics.median(taken) for name, taken in seconds.items()}
    return {
        "url": url,
        "bytes": size,
        "gb_s": rates,
        "ratio": statistics.median(
            theirs / mine for mine, theirs in zip(seconds["fastckpt"], seconds["obstore.put"], strict=True)
        ),
    }


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1.0, help="GB of a checkpoint (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(), help="directory on the disk to measure")
    parser.add_argument("--url", default="memory://benchmark/drain", help="an object store (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is not met")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="drain-") as name:
        local, written = make_run(Path(name) / "local", int(options.size * GB))
        result: dict[str, Any] = {
            "write_gb_s": written / GB,
            "rate": measure_rate(local, options.url, options.rounds),
            "steps": measure_steps(local, Path(name), written / 4, options.rounds),
            "fastckpt": fastckpt.__version__,
            "obstore": obstore.__version__,
        }
    missed = []
    if result["steps"]["ratio"] > STEP:
        missed.append(
            f"step time is {result['steps']['ratio']:.3f} of undisturbed, limit {STEP}; "
            f"that of the control is {result['steps']['control']:.3f}"
        )
    if result["rate"]["ratio"] < RATE:
        missed.append(f"rate is {result['rate']['ratio']:.2f} of that of obstore.put, limit {RATE}")
    result["missed"] = missed
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    for each in missed:
        print(f"bar missed: {each}", file=sys.stderr)
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
