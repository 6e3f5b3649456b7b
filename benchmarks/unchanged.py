"""What a save costs of which most, or all, is as its base has it, beside the same save in full.

    python benchmarks/unchanged.py --size 1 --rounds 17 --check

In each round the same state is saved three ways, which take turns to be first:

- **full**: without a base;
- **same**: with a base, and nothing has changed;
- **tuned**: with a base, and one percent of the bytes have changed, as in a fine-tune of a few layers.

The base of a round is what the round before wrote in the same way. The bytes written are those of all files that the
new directory shares with no other. About every sixteenth save reads a file of its base again, and that is part of the
mean: give at least 17 rounds. GB is 10^9 bytes. ``--check`` exits with 1 when a bar is missed: ``same`` takes at most a
quarter of the time and a hundredth of the bytes of ``full``, ``tuned`` at most a twentieth of the bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import fastckpt

GB = 10**9
#: Parts of what a full save takes: time, bytes, and bytes with one percent trained.
SECONDS, BYTES, TUNED = 0.25, 0.01, 0.05
WAYS = ("full", "same", "tuned")


def make_state(size: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return a state of about ``size`` bytes, of which ``head`` is one percent."""
    layers, columns = 99, 1024
    rows = max(1, size // 100 // (columns * 2))
    model = {f"layers.{index}.weight": torch.empty(rows, columns, dtype=torch.bfloat16) for index in range(layers)}
    model["head.weight"] = torch.empty(rows, columns, dtype=torch.bfloat16)
    for tensor in model.values():
        tensor.view(torch.int16).random_()
    return {"model": model}


def own_bytes(path: Path) -> int:
    """Return the bytes of the files in ``path`` that have no other name."""
    return sum(entry.stat().st_size for entry in path.iterdir() if entry.stat().st_nlink == 1)


def measure(directory: Path, size: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the seconds, the CPU seconds and the bytes written of each save, by way."""
    state = make_state(size)
    head = torch.zeros_like(state["model"]["head.weight"])
    states = {"full": state, "same": state, "tuned": {"model": {**state["model"], "head.weight": head}}}
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    last: dict[str, Path | None] = dict.fromkeys(WAYS)
    # The first two saves of a chain find out what does not change.
    for number in range(-2, rounds):
        for turn in range(len(WAYS)):
            way = WAYS[(number + turn) % len(WAYS)]
            head.add_(1)
            base, path = last[way], directory / f"{way}-{number}"
            cpu, began = time.process_time(), time.perf_counter()
            report = fastckpt.save(states[way], path, base=None if way == "full" else base)
            sample = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
            sample["bytes"] = float(own_bytes(path))
            if base is not None:
                if report.warnings:
                    raise RuntimeError(f"{way}: {report.warnings}")
                shutil.rmtree(base)
            last[way] = path
            if number >= 0:
                samples[way].append(sample)
    return samples


def main() -> int:
    """Measure, print, and say whether the bars were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1.0, help="GB of the state (default: 1)")
    parser.add_argument("--rounds", type=int, default=17, help="rounds (default: 17)")
    parser.add_argument("--dir", type=Path, help="where to save (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fastckpt-unchanged-", dir=options.dir) as directory:
        samples = measure(Path(directory), int(options.size * GB), options.rounds)
    if options.json:
        options.json.write_text(json.dumps(samples, indent=1), encoding="utf-8")
    means = {
        way: {name: statistics.fmean(sample[name] for sample in all_) for name in all_[0]}
        for way, all_ in samples.items()
    }
    full = means["full"]
    print("| way | seconds | of full | median of full | CPU s | bytes written | of full |")
    print("|---|---|---|---|---|---|---|")
    medians = {way: statistics.median(sample["seconds"] for sample in all_) for way, all_ in samples.items()}
    for way, mean in means.items():
        print(
            f"| {way} | {mean['seconds']:.3f} | {mean['seconds'] / full['seconds']:.3f} "
            f"| {medians[way] / medians['full']:.3f} | {mean['cpu']:.3f} | {mean['bytes']:,.0f} "
            f"| {mean['bytes'] / full['bytes']:.5f} |"
        )
    met = (
        means["same"]["seconds"] <= SECONDS * full["seconds"]
        and means["same"]["bytes"] <= BYTES * full["bytes"]
        and means["tuned"]["bytes"] <= TUNED * full["bytes"]
    )
    print("bars: met" if met else "bars: missed")
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
