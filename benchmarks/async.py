"""How long an asynchronous save stops training, and when the checkpoint is durable, beside the peers.

    python benchmarks/async.py --size 2 --rounds 5 --markdown --json async.json
    python benchmarks/async.py --peers-path DIR     # where ``pip install --target DIR torch_checkpointing`` went

Four things are measured, each as a ratio within one run:

- **Stall** of ``save_async`` against one memcpy of the same state into existing memory, with the same number of
  threads (``ctypes.memmove``, tensors divided among the threads); both run in every round. The first save is left out,
  because it touches its memory for the first time.
- **Lazy stall**: the stall with ``IO(lazy=True)``, in milliseconds, and how long a step right after the call waits.
- **Peers**: ``torch.distributed.checkpoint.async_save`` in one process, writing with as many threads, with its default
  stager and with a stager that is kept, as its documentation advises; and torch_checkpointing's asynchronous mode if it
  is installed: the seconds until the call returns, and until the checkpoint is durable. The peers sync nothing, or not
  everything, so only their time to durability includes an fsync of every file and directory. Contenders take turns, and
  each round begins with a different contender.
- **Step time** of a training loop of matrix products with and without a save in the background,
  ``IO(threads=1, nice=10)``; torch may use all cores of the machine. The stall is not part of a step and is reported
  beside it.

Medians; GB is 10^9 bytes. ``--check`` exits with 1 when a bar is not met.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fastckpt

if TYPE_CHECKING:
    from collections.abc import Callable

    State = dict[str, torch.Tensor]

GB = 10**9
#: Bars: stall over memcpy, lazy stall in seconds, step time over that of the undisturbed loop.
STALL, LAZY, STEP = 1.05, 0.020, 1.25


def make_state(size: int) -> State:
    """Return a state of about ``size`` bytes: matrices of bfloat16 and single precision, and small vectors."""
    state: State = {}
    total, index = 0, 0
    while total < size:
        rows = 4096 if size >= GB else 512
        for name, tensor in (
            ("weight", torch.empty(rows, 4096, dtype=torch.bfloat16)),
            ("exp_avg", torch.empty(rows, 4096)),
            ("bias", torch.empty(4096)),
        ):
            tensor.view(torch.int16).random_()
            state[f"layers.{index}.{name}"] = tensor
            total += tensor.nbytes
        index += 1
    return state


def sync(path: Path) -> None:
    """Make everything under ``path`` durable."""
    for each in [path, *path.rglob("*")]:
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class Memcpy:
    """Copies a state into existing memory."""

    def __init__(self, state: State) -> None:
        self.pairs = [(torch.zeros_like(tensor), tensor) for tensor in state.values()]

    def __call__(self, threads: int) -> float:
        def work(part: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            for target, source in part:
                ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

        began = time.perf_counter()
        workers = [threading.Thread(target=work, args=(self.pairs[first::threads],)) for first in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - began


def ours(state: State, path: Path, *, threads: int, lazy: bool = False, at_once: bool = False) -> tuple[float, float]:
    """Return the seconds until the call returns (``at_once``: until the state may change) and until durability."""
    began = time.perf_counter()
    pending = fastckpt.save_async(state, path, io=fastckpt.IO(lazy=lazy, threads=threads))
    if at_once:
        pending.wait_staged()
    stall = time.perf_counter() - began
    pending.result()
    return stall, time.perf_counter() - began


def dcp(state: State, path: Path, *, threads: int, stager: Any = None) -> tuple[float, float]:
    """torch.distributed.checkpoint. Without a ``stager``, each save makes a new stager."""
    from torch.distributed import checkpoint

    writer = checkpoint.FileSystemWriter(path, thread_count=threads, sync_files=True)
    began = time.perf_counter()
    future = checkpoint.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
    stall = time.perf_counter() - began
    getattr(future, "upload_completion", future).result()
    sync(path)
    return stall, time.perf_counter() - began


def kept_stager() -> Any:
    """A stager of torch.distributed.checkpoint that copies within the call, into memory that it keeps."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    # All off: shared memory is for a writer in another process, and the other options are for devices.
    return DefaultStager(StagingOptions(False, False, False, False))


class TorchCheckpointing:
    """torch_checkpointing's manager, which saves asynchronously. Without CUDA it must stage within the call."""

    def __init__(self) -> None:
        from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False)
        config = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            # torch_checkpointing's direct I/O writes from unaligned addresses, which ext4 refuses.
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self.manager: Any = config.build()

    def __call__(self, state: State, path: Path) -> tuple[float, float]:
        began = time.perf_counter()
        written = self.manager.save(str(path), {"state": state})
        stall = time.perf_counter() - began
        written.result()
        sync(path)
        return stall, time.perf_counter() - began

    def close(self) -> None:
        """End the process of the manager."""
        with suppress(Exception):
            self.manager.close()


def contenders(threads: int) -> dict[str, Callable[[State, Path], tuple[float, float]]]:
    """Return all contenders that can run here."""
    found: dict[str, Any] = {
        "fastckpt": partial(ours, threads=threads),
        "fastckpt, lazy": partial(ours, threads=threads, lazy=True),
        "fastckpt, lazy, a step at once": partial(ours, threads=threads, lazy=True, at_once=True),
        "torch.distributed.checkpoint": partial(dcp, threads=threads),
        "torch.distributed.checkpoint, stager kept": partial(dcp, threads=threads, stager=kept_stager()),
    }
    try:
        found["torch_checkpointing"] = TorchCheckpointing()
    except Exception as error:  # noqa: BLE001 - whatever keeps it from running is told
        print(f"left out: torch_checkpointing: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def measure_saves(state: State, directory: Path, rounds: int, threads: int) -> dict[str, Any]:
    """Measure stall, time to durability and memcpy in interleaved rounds."""
    memcpy = Memcpy(state)
    runners = contenders(threads)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    copies: list[float] = []
    broken: set[str] = set()
    names = list(runners)
    for number in range(rounds + 1):
        order = names[number % len(names) :] + names[: number % len(names)]
        for name in order if number % 2 else order[::-1]:
            if name in broken:
                continue
            path = directory / "checkpoint"
            copy = memcpy(threads)
            try:
                sample = runners[name](state, path)
            except Exception as error:  # noqa: BLE001 - a peer that fails is told, and left out
                print(f"left out: {name}: {type(error).__name__}: {str(error)[-300:]}", file=sys.stderr)
                broken.add(name)
                continue
            finally:
                shutil.rmtree(path, ignore_errors=True)
            if number:  # the first round warms up
                samples[name].append(sample)
                copies.append(copy)
    for runner in runners.values():
        if isinstance(runner, TorchCheckpointing):
            runner.close()
    size = sum(tensor.nbytes for tensor in state.values())
    copy = statistics.median(copies)
    result: dict[str, Any] = {"bytes": size, "threads": threads, "memcpy": copy, "memcpy_gb_s": size / GB / copy}
    result["contenders"] = {
        name: {
            "stall": statistics.median(stall for stall, _ in each),
            "stall_of_memcpy": statistics.median(stall for stall, _ in each) / copy,
            "durable": statistics.median(durable for _, durable in each),
        }
        for name, each in samples.items()
        if each
    }
    return result


def measure_steps(state: State, directory: Path, rounds: int, threads: int) -> dict[str, Any]:
    """Measure step times of a loop with and without saves in the background, in turns."""
    width = 768
    weights = [torch.randn(width, width, requires_grad=True) for _ in range(6)]
    inputs = torch.randn(256, width)
    optimizer = torch.optim.SGD(weights, lr=1e-6)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        x = inputs
        for weight in weights:
            x = torch.tanh(x @ weight)
        x.sum().backward()
        optimizer.step()
        return time.perf_counter() - began

    for _ in range(20):
        step()
    alone: list[float] = []
    beside: list[float] = []
    stalls: list[float] = []
    durable: list[float] = []
    fastckpt.save_async(state, directory / "steps", io=fastckpt.IO(threads=threads, nice=10)).result()
    for _ in range(rounds):
        alone.extend(step() for _ in range(60))
        began = time.perf_counter()
        pending = fastckpt.save_async(state, directory / "steps", io=fastckpt.IO(threads=threads, nice=10))
        stalls.append(time.perf_counter() - began)
        while not pending.done():
            beside.append(step())
        durable.append(pending.result().seconds)
    shutil.rmtree(directory / "steps")
    mean = statistics.fmean
    return {
        "alone": statistics.median(alone),
        "beside": statistics.median(beside),
        "ratio": statistics.median(beside) / statistics.median(alone),
        "mean_ratio": mean(beside) / mean(alone),
        "worst_beside": max(beside),
        "steps_beside": len(beside),
        "stall": statistics.median(stalls),
        "durable": statistics.median(durable),
        "threads": threads,
    }


def bars(result: dict[str, Any]) -> list[str]:
    """Return the bars that were not met."""
    missed = []
    saves, steps = result["saves"], result["steps"]
    found = saves["contenders"]
    mine = found["fastckpt"]
    if mine["stall_of_memcpy"] > STALL:
        missed.append(f"stall is {mine['stall_of_memcpy']:.2f} of one memcpy, limit {STALL}")
    if found["fastckpt, lazy"]["stall"] > LAZY:
        missed.append(f"lazy stall is {found['fastckpt, lazy']['stall'] * 1e3:.1f} ms, limit {LAZY * 1e3:.0f} ms")
    if steps["ratio"] > STEP:
        missed.append(f"step time is {steps['ratio']:.2f} of undisturbed, limit {STEP}")
    for peer in (
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint, stager kept",
        "torch_checkpointing",
    ):
        missed.extend(
            f"{what}: {mine[what]:.2f} s, {peer} {found[peer][what]:.2f} s"
            for what in ("stall", "durable")
            if peer in found and mine[what] >= found[peer][what]
        )
    return missed


def markdown(result: dict[str, Any]) -> str:
    """Return the result as tables."""
    saves, steps = result["saves"], result["steps"]
    memcpy = f"one memcpy {saves['memcpy']:.3f} s ({saves['memcpy_gb_s']:.1f} GB/s)"
    lines = [
        f"{saves['bytes'] / GB:.2f} GB, {saves['threads']} threads, {memcpy}",
        "",
        "| | stall, s | of one memcpy | durable after, s |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {each['stall']:.3f} | {each['stall_of_memcpy']:.2f} | {each['durable']:.2f} |"
        for name, each in saves["contenders"].items()
    ]
    lines += [
        "",
        "| step time | ms |",
        "|---|---:|",
        f"| undisturbed | {steps['alone'] * 1e3:.1f} |",
        f"| beside a save (threads={steps['threads']}, nice=10) | {steps['beside'] * 1e3:.1f} |",
        f"| ratio of medians; of means | {steps['ratio']:.2f}; {steps['mean_ratio']:.2f} |",
        f"| stall of each save | {steps['stall'] * 1e3:.0f} |",
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=2.0, help="GB of state (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dir", type=Path, default=Path(), help="directory on the storage to measure")
    parser.add_argument("--peers-path", type=Path, help="directory with peers that are not installed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is not met")
    options = parser.parse_args()
    if options.peers_path:
        sys.path.append(str(options.peers_path))
    warnings.filterwarnings("ignore", module="torch")
    state = make_state(int(options.size * GB))
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="async-") as name:
        directory = Path(name)
        result = {
            "saves": measure_saves(state, directory, options.rounds, options.threads),
            "steps": measure_steps(state, directory, options.rounds, 1),
            "torch": torch.__version__,
            "fastckpt": fastckpt.__version__,
        }
    missed = bars(result)
    result["missed"] = missed
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(markdown(result) if options.markdown else json.dumps(result, indent=2))
    for each in missed:
        print(f"bar missed: {each}", file=sys.stderr)
    with suppress(Exception):
        fastckpt.background.drain()
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
