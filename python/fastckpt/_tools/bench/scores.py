"""Scores of samples: the slowest rank's time and throughput, against the plain file and against a target.

As in MLPerf Storage, all ranks begin together, and the duration and the throughput of the slowest rank count. All
functions depend only on their arguments. GB is 10^9 bytes.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: For each round, the samples of all ranks, each of which has at least ``bytes`` and ``seconds``.
Rounds: TypeAlias = "Sequence[Sequence[Mapping[str, Any]]]"

#: The plain transfer with which each operation is compared. A hot load need not use the device at all.
_AGAINST = {"save": "raw_write", "load": "raw_read"}


def spread(values: Iterable[float]) -> dict[str, float]:
    """Least, median and greatest of some values."""
    known = sorted(values)
    return {"min": known[0], "median": statistics.median(known), "max": known[-1]}


def _rate(sample: Mapping[str, Any]) -> float:
    return float(sample["bytes"] / max(sample["seconds"], 1e-9) / 1e9)


def score(rounds: Rounds) -> dict[str, Any]:
    """The score of one operation.

    Returns:
        ``bytes`` of all ranks in a round, ``rounds``; ``seconds`` of the slowest rank and ``first_seconds``, those of
        the first round; ``gigabytes_per_second``, all bytes over the slowest rank's seconds;
        ``slowest_rank_gigabytes_per_second``, the least throughput of a rank; ``rank_gigabytes_per_second``, the median
        of each rank, by rank; ``slowest_rank``, the one that was slowest most often; ``thread_gigabytes_per_second``,
        over all threads of all rounds, None if none ran. Each spread is over the rounds.
    """
    slowest = [max(samples, key=lambda sample: sample["seconds"]) for samples in rounds]
    last = [list(samples).index(sample) for samples, sample in zip(rounds, slowest, strict=True)]
    threads = [
        moved / max(sample["seconds"], 1e-9) / 1e9
        for samples in rounds
        for sample in samples
        for moved in sample.get("thread_bytes") or ()
    ]
    return {
        "bytes": statistics.median_high([sum(sample["bytes"] for sample in samples) for samples in rounds]),
        "rounds": len(rounds),
        "seconds": spread(sample["seconds"] for sample in slowest),
        "first_seconds": slowest[0]["seconds"],
        "gigabytes_per_second": spread(
            sum(sample["bytes"] for sample in samples) / max(sample["seconds"], 1e-9) / 1e9
            for samples, sample in zip(rounds, slowest, strict=True)
        ),
        "slowest_rank_gigabytes_per_second": spread(min(map(_rate, samples)) for samples in rounds),
        "rank_gigabytes_per_second": [statistics.median(map(_rate, samples)) for samples in zip(*rounds, strict=True)],
        "slowest_rank": Counter(last).most_common(1)[0][0],
        "thread_gigabytes_per_second": spread(threads) if threads else None,
    }


def scores(samples: Mapping[str, Rounds]) -> dict[str, dict[str, Any]]:
    """The score of each operation, with ``of_raw``: its median throughput over that of the plain transfer, or None."""
    found = {operation: score(rounds) for operation, rounds in samples.items()}
    for operation, result in found.items():
        raw = found.get(_AGAINST.get(operation, ""))
        result["of_raw"] = raw and result["gigabytes_per_second"]["median"] / raw["gigabytes_per_second"]["median"]
    return found


def verdict(found: Mapping[str, Mapping[str, Any]], target: tuple[float, float], gpus: int) -> dict[str, Any]:
    """Whether saves and cold loads, by their medians, reach a target.

    Args:
        found: the scores.
        target: GB/s per GPU of saves and of loads, 0.0 for none.
        gpus: GPUs that share the storage.

    Returns:
        ``gpus``, ``met``; ``write`` and ``read``, each with ``needed`` and ``reached`` (GB/s per GPU) and ``met``.
    """
    parts = {
        kind: {"needed": needed, "reached": found[operation]["gigabytes_per_second"]["median"] / gpus}
        for kind, operation, needed in (("write", "save", target[0]), ("read", "load", target[1]))
    }
    judged = {kind: {**part, "met": part["reached"] >= part["needed"]} for kind, part in parts.items()}
    return {"gpus": gpus, "met": all(part["met"] for part in judged.values()), **judged}


def engine(rounds: Rounds) -> dict[str, Any]:
    """How an operation ran, over all ranks and rounds.

    Returns:
        ``engines`` (how many times each), ``fallbacks`` (why the engine that ran was not the requested one, each once),
        ``threads`` (of a rank), ``paths`` (all blocks by I/O path and reason), ``copied`` (all bytes that the CPU
        copied), ``resident`` (the share of the files that was in the page cache before, or None).
    """
    every = [sample for samples in rounds for sample in samples]
    paths: Counter[str] = Counter()
    for sample in every:
        paths.update(sample["paths"])
    resident = [sample.get("resident") for sample in every]
    known = [share for share in resident if share is not None]
    return {
        "engines": dict(Counter(sample["engine"] for sample in every)),
        "fallbacks": sorted({sample["fallback"] for sample in every if sample["fallback"]}),
        "threads": sorted({sample["threads"] for sample in every}),
        "paths": dict(paths.most_common()),
        "copied": sum(sample["copied"] for sample in every),
        "resident": spread(known) if len(known) == len(resident) else None,
    }
