"""The speed of a load from an object store, beside the store's own client.

    python benchmarks/stores.py --size 1 --rounds 7 --check

In each round, all three ways read the same objects, and a different way is first:

- **client**: ``obstore.get_range``, 8 MiB at a time, in as many threads as a load has. It checks nothing, and the bytes
  stay in the client's memory;
- **load**: ``fastckpt.load`` into new memory, with every byte compared with its checksum;
- **into**: the same load with ``into=``, into existing tensors.

``--store http`` (the default) reads over HTTP from a server on loopback that acts like S3
(``bench/object_server.py``, in a separate process, from the page cache). ``--store files`` has the client read files
itself, without a network: nothing waits, so the overhead of a load counts most. All use memory that the host backs
(benchmarks/README.md). ``--url`` is the place of an existing checkpoint in a real store. GB is 10^9 bytes; the
processor time of this process is printed beside the speed. ``--check`` exits with 1 when a load has less than 0.75 of
the client's speed, or less than 0.9 with ``into=``, by the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import obstore
import obstore.store
import torch

import fastckpt
from bench.device import back_memory
from bench.object_server import served
from bench.rounds import MEMORY
from fastckpt._stores import files, objects

GB = 10**9
#: The least share of the client's speed.
BARS = {"load": 0.75, "into": 0.9}


def read_all(place: objects.Objects) -> int:
    """Read all shards below ``place`` with the client alone, and keep all bytes until the end; return their number."""
    parts = [
        (name, start, min(objects.PART, size - start))
        for name, size in place.sizes().items()
        if name.endswith(".safetensors")
        for start in range(0, size, objects.PART)
    ]

    def read(part: tuple[str, int, int]) -> obstore.Bytes:
        name, start, length = part
        return obstore.get_range(place._store, place._key(name), start=start, length=length)  # noqa: SLF001

    with ThreadPoolExecutor(files.StoredFiles.threads) as pool:
        return sum(map(len, list(pool.map(read, parts))))


def measure(url: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the GB/s and the CPU seconds per GB of each round, by way of loading."""
    place = objects.Objects.at("benchmark", url)

    def load(**options: Any) -> int:
        reports: list[fastckpt.types.LoadReport] = []
        fastckpt.load(url, io=fastckpt.IO(on_report=reports.append), **options)
        return reports[0].bytes

    ways = {"client": lambda: read_all(place), "load": load}
    target = fastckpt.load(url)
    ways["into"] = lambda: load(into=target)
    memory = int(MEMORY * sum(place.sizes().values()))
    samples: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(-1, rounds):
        for turn in range(len(ways)):
            way = list(ways)[(number + turn) % len(ways)]
            back_memory(memory)
            began, used = time.perf_counter(), time.process_time()
            size = ways[way]() / GB
            seconds, used = time.perf_counter() - began, time.process_time() - used
            if number >= 0:  # the first round opens connections
                samples[way].append(size / seconds)
                cpu[way].append(used / size)
    return samples, cpu


def main() -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1.0, help="GB of the checkpoint (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--store", choices=["http", "files"], default="http")
    parser.add_argument("--url", help="a checkpoint in a real store; credentials come from the environment")
    parser.add_argument("--directory", type=Path, help="directory of the files (default: a temporary directory)")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        url = options.url
        if url is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.directory)))
            rows = max(1, int(options.size * GB) // 16 // (4096 * 2))
            state = {f"layers.{index}": torch.empty(rows, 4096, dtype=torch.bfloat16) for index in range(16)}
            for tensor in state.values():
                tensor.view(torch.int16).random_()
            fastckpt.save(state, root / "bucket" / "c")
            url = "s3://bucket/c"
            if options.store == "http":
                endpoint = stack.enter_context(served(root))
                os.environ.update(
                    AWS_ENDPOINT_URL=endpoint, AWS_ALLOW_HTTP="true", AWS_REGION="us-east-1", AWS_SKIP_SIGNATURE="true"
                )
            else:
                url = "memory://bucket/c"
                objects._memories["bucket"] = obstore.store.LocalStore(root / "bucket")  # noqa: SLF001
        samples, cpu = measure(url, options.rounds)
    medians = {way: statistics.median(speeds) for way, speeds in samples.items()}
    ratios = {
        way: statistics.median(a / b for a, b in zip(samples[way], samples["client"], strict=True)) for way in BARS
    }
    if options.json:
        print(
            json.dumps({"samples": samples, "cpu": cpu, "medians": medians, "ratios": ratios, "bars": BARS}, indent=2)
        )
    else:
        for way, speed in medians.items():
            spread = f"from {min(samples[way]):.2f} to {max(samples[way]):.2f}"
            print(f"{way:8} {speed:6.2f} GB/s ({spread}), {statistics.median(cpu[way]):.2f} CPU s/GB")
        for way, ratio in ratios.items():
            print(f"{way} / client: {ratio:.2f} (bar {BARS[way]})")
    return int(options.check and any(ratios[way] < bar for way, bar in BARS.items()))


if __name__ == "__main__":
    sys.exit(main())
