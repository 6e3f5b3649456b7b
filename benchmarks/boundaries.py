"""The cost of a step boundary of a manager in a job of several ranks.

    torchrun --nproc-per-node 4 benchmarks/boundaries.py --steps 2000

Each rank calls ``should_save`` at the end of steps that only sleep, in two ways: with policies that let ranks pass most
boundaries without asking each other (``Every(steps=...)`` and a signal to listen for), and with a custom policy, for
which ranks ask at each boundary. All ranks meet before each boundary, so their waits for each other do not count. Rank
0 prints the microseconds that a boundary and a step take.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import tempfile
import time

import torch.distributed as dist

import fastckpt
from fastckpt import when


class Never:
    """A custom policy, whose rule the manager cannot predict."""

    def due(self, moment: when.Moment) -> bool:
        """Whether to save the step."""
        return moment.step < 0


def measure(directory: str, policy: when.Policy, steps: int, pause: float) -> dict[str, float]:
    """Return the microseconds of a boundary (mean, median and 99th percentile) and of a step."""
    spent, slept = [], 0.0
    with fastckpt.Manager(directory, save_when=policy) as manager:
        manager.save_on_signal(signal.SIGUSR1)
        manager.should_save(0)
        for step in range(1, steps + 1):
            began = time.perf_counter()
            time.sleep(pause)
            slept += time.perf_counter() - began
            dist.barrier()
            began = time.perf_counter()
            manager.should_save(step)
            spent.append(time.perf_counter() - began)
    return {
        "mean": 1e6 * statistics.fmean(spent),
        "median": 1e6 * statistics.median(spent),
        "p99": 1e6 * statistics.quantiles(spent, n=100)[-1],
        "step": 1e6 * slept / steps,
    }


def main() -> None:
    """Measure both ways on all ranks, and print the result of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="boundaries measured in each way")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds of a step")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    ways = {"passes": when.Every(steps=10**9), "asks": Never()}
    found = {way: measure(name[0], policy, arguments.steps, arguments.pause) for way, policy in ways.items()}
    if dist.get_rank() == 0:
        print(json.dumps({"ranks": dist.get_world_size(), **found}, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
