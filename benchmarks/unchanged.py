"""The cost of a save that is mostly or completely unchanged from its base, beside the same save in full.

    python benchmarks/unchanged.py --size 1 --rounds 17 --check
    python benchmarks/unchanged.py --ranks 4 --spread columns --size 1 --rounds 17 --check

In each round, the same state is saved in three ways, and a different way is first:

- **full**: without a base;
- **same**: with a base, and nothing has changed;
- **tuned**: with a base, and one percent of the bytes have changed, as in a fine-tune of a few layers.

The base of a round is the save of the previous round in the same way. The bytes written are the bytes of all files that
the new directory shares with no other. About every sixteenth save reads a file of its base again, which is part of the
mean, so pass at least 17 rounds. With ``--ranks``, several processes save together: each saves its rows or columns, or
all have copies of everything; CPU seconds are the sum over all. GB is 10^9 bytes.

``--check`` exits with 1 when a bar is missed: ``same`` takes at most a quarter of the time and a hundredth of the bytes
of ``full``, ``tuned`` at most a twentieth of the bytes.
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
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fastckpt

GB = 10**9
#: Bars as parts of the costs of a full save: time, bytes, and bytes with one percent changed.
SECONDS, BYTES, TUNED = 0.25, 0.01, 0.05
WAYS = ("full", "same", "tuned")
#: By the spread of tensors over ranks: the dimension along which they are cut, if any.
SPREADS = {"rows": 0, "columns": 1, "copies": None}


def make_state(size: int, dim: int | None) -> dict[str, dict[str, torch.Tensor]]:
    """Return a state of about ``size`` bytes, of which ``head`` is one percent; on ranks cut along ``dim``."""
    layers, columns = 99, 1024
    rows = max(1, size // 100 // (columns * 2))
    shape = [rows, columns]
    if dim is not None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        shape[dim] = -(-shape[dim] // mesh.size())
    torch.manual_seed(0 if dim is None else dist.get_rank())
    model = {}
    for name in (*(f"layers.{index}.weight" for index in range(layers)), "head.weight"):
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        tensor.view(torch.int16).random_()
        model[name] = tensor if dim is None else DTensor.from_local(tensor, mesh, [Shard(dim)], run_check=False)
    return {"model": model}


def own_bytes(path: Path) -> int:
    """Return the bytes of the files in ``path`` that have no other name."""
    return sum(entry.stat().st_size for entry in path.iterdir() if entry.stat().st_nlink == 1)


def together() -> None:
    """Wait for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def summed(seconds: float) -> float:
    """Return the sum over the ranks, if there are any."""
    total = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def measure(directory: Path, size: int, rounds: int, dim: int | None) -> dict[str, list[dict[str, float]]]:
    """Return the seconds, the CPU seconds and the bytes written of each save, by way; called by all ranks."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    save = fastckpt.distributed.save if dist.is_initialized() else fastckpt.save
    state = make_state(size, dim)
    head = torch.zeros_like(state["model"]["head.weight"])
    states = {"full": state, "same": state, "tuned": {"model": {**state["model"], "head.weight": head}}}
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    last: dict[str, Path | None] = dict.fromkeys(WAYS)
    # The first two saves of a chain detect the unchanged tensors, and are not measured.
    for number in range(-2, rounds):
        for turn in range(len(WAYS)):
            way = WAYS[(number + turn) % len(WAYS)]
            head.add_(1)
            together()
            base, path = last[way], directory / f"{way}-{number}"
            cpu, began = time.process_time(), time.perf_counter()
            report = save(states[way], path, base=None if way == "full" else base)
            sample = {"seconds": time.perf_counter() - began, "cpu": summed(time.process_time() - cpu)}
            sample["bytes"] = float(own_bytes(path))
            together()
            if base is not None:
                if report.warnings:
                    raise RuntimeError(f"{way}: {report.warnings}")
                if first:
                    shutil.rmtree(base)
            last[way] = path
            if number >= 0:
                samples[way].append(sample)
    return samples


def rank(number: int, ranks: int, directory: Path, size: int, rounds: int, dim: int | None) -> None:
    """Measure as one of several ranks; rank 0 writes the result."""
    store = dist.FileStore(str(directory / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=number, world_size=ranks)
    samples = measure(directory, size, rounds, dim)
    if number == 0:
        (directory / "samples.json").write_text(json.dumps(samples), encoding="utf-8")
    dist.destroy_process_group()


def measure_ranks(
    directory: Path, size: int, rounds: int, ranks: int, dim: int | None
) -> dict[str, list[dict[str, float]]]:
    """Return what :func:`measure` returns, for several processes that save together."""
    torch.multiprocessing.spawn(rank, (ranks, directory, size, rounds, dim), ranks)
    return json.loads((directory / "samples.json").read_text(encoding="utf-8"))


def main() -> int:
    """Measure, print, and return whether the bars were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1.0, help="GB of the state (default: 1)")
    parser.add_argument("--rounds", type=int, default=17, help="rounds (default: 17)")
    parser.add_argument("--ranks", type=int, default=1, help="processes that save together (default: 1)")
    parser.add_argument("--spread", choices=SPREADS, default="rows", help="how ranks hold tensors (default: rows)")
    parser.add_argument("--dir", type=Path, help="where to save (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fastckpt-unchanged-", dir=options.dir) as directory:
        what = (Path(directory), int(options.size * GB), options.rounds)
        if options.ranks > 1:
            samples = measure_ranks(*what, options.ranks, SPREADS[options.spread])
        else:
            samples = measure(*what, None)
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
