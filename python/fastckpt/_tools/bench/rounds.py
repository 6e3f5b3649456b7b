"""Runs alternating rounds of plain and checkpoint transfers, in a directory that is removed afterwards."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import fastckpt
from fastckpt._text import count
from fastckpt._tools.scratch import scratch

from . import caches
from .rank import Request, Spec
from .ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .shapes import Share

_DROPPED = "dropped through /proc/sys/vm/drop_caches"
_FORGOTTEN = "dropped file by file with posix_fadvise (/proc/sys/vm/drop_caches is not writable)"


@dataclass(frozen=True, slots=True)
class Run:
    """What to measure.

    Attributes:
        directory: the directory of the benchmark.
        shares: the shares of the ranks.
        rounds: how many rounds.
        io: how ranks read and write.
        target: for the live counters of each rank, as for :func:`fastckpt.tools.set_target`.
        hot: whether there are hot loads.
    """

    directory: Path
    shares: Sequence[Share]
    rounds: int
    io: fastckpt.IO
    target: str = "light"
    hot: bool = True


@dataclass(slots=True)
class Measured:
    """The measurements.

    Attributes:
        samples: by operation and round, the samples of all ranks.
        caches: how caches were dropped before cold operations.
    """

    samples: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)
    caches: str = ""


def measure(run: Run, said: Callable[[str], None]) -> Measured:
    """Run all rounds.

    Every other round begins with the checkpoint instead of the plain file, because whichever comes second finds the
    disk in another state, and the speed of a shared disk drifts.

    Args:
        run: the benchmark to measure.
        said: called with a line about each operation.

    Raises:
        RankError: a rank failed or died.
        OSError: no file can be made in the directory.
    """
    measured = Measured()
    with scratch(run.directory, "bench") as (directory, ending):
        specs = [_spec(run, directory, rank) for rank in range(len(run.shares))]
        for spec in specs:
            spec.directory.mkdir()
        said(f"starting {count(len(specs), 'rank')}")
        ranks = Ranks(f"bench {run.directory}", specs)
        ending.callback(ranks.close)
        ranks.start()
        parts = [("raw_write", "raw_read"), ("save", "load", *(("hot",) if run.hot else ()))]
        for number in range(1, run.rounds + 1):
            for part in parts if number % 2 else reversed(parts):
                for operation in part:
                    samples = _once(ranks, operation, number, measured)
                    measured.samples.setdefault(operation, []).append(samples)
                    slowest = max(sample["seconds"] for sample in samples)
                    said(f"round {number} of {run.rounds}: {operation.replace('_', ' ')} {slowest:.3f} s")
                ranks.remove(number)
    return measured


def _once(ranks: Ranks, operation: str, number: int, measured: Measured) -> list[dict[str, Any]]:
    # No earlier write or removal may still be in flight to the disk, and only clean pages can be dropped.
    os.sync()
    dropped = operation in ("raw_read", "load") and caches.drop()
    if operation == "load":
        measured.caches = _DROPPED if dropped else _FORGOTTEN
    return ranks.ask(Request(operation, number, forget=operation in ("raw_read", "load") and not dropped))


def _spec(run: Run, directory: Path, rank: int) -> Spec:
    world = str(len(run.shares))
    labels = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return Spec(
        rank=rank,
        directory=directory / f"rank-{rank}",
        share=run.shares[rank],
        io=run.io,
        target=run.target,
        environment={**labels, "FASTCKPT_JOB": os.environ.get("FASTCKPT_JOB") or "fastckpt-bench"},
    )
