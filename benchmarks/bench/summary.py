"""Computes figures from samples: medians over rounds, and ratios to the raw device of the same rounds."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bench import GB, MB

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.measure import Sample
    from bench.rounds import Outcome
    from bench.states import Workload

    # By contender, operation and figure.
    Results = dict[str, dict[str, dict[str, Any]]]


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the counts, or None."""
    counted = [value for value in values if value is not None]
    return statistics.median(counted) if counted else None


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Return ``ours`` over ``theirs``, or None if one is missing."""
    return ours / theirs if ours is not None and theirs else None


def summarise(samples: list[Sample]) -> dict[str, Any]:
    """Return the figures of one contender and one operation.

    Memory is the largest of all rounds, since a first call allocates what later ones reuse; the rest are medians.
    """
    size = samples[0].bytes
    seconds = statistics.median(sample.seconds for sample in samples)
    gigabytes = size / GB
    extras = [sample.extra for sample in samples if sample.extra is not None]
    return {
        "bytes": size,
        "seconds": seconds,
        "gigabytes_per_second": gigabytes / seconds,
        "cpu_seconds_per_gigabyte": ratio(median(sample.cpu for sample in samples), gigabytes),
        "user_seconds_per_gigabyte": ratio(median(sample.user for sample in samples), gigabytes),
        "system_seconds_per_gigabyte": ratio(median(sample.system for sample in samples), gigabytes),
        "minor_faults_per_gigabyte": ratio(median(sample.minor for sample in samples), gigabytes),
        "major_faults_per_gigabyte": ratio(median(sample.major for sample in samples), gigabytes),
        "extra_megabytes": max(extras) / MB if extras else None,
        "mapped_share": ratio(median(sample.mapped for sample in samples), size),
        "copied_per_byte": ratio(median(sample.copied for sample in samples), size),
        "system_calls_per_gigabyte": None,
        "of_raw": None,
        "samples": [{**asdict(sample), "cpu": sample.cpu} for sample in samples],
    }


def summarise_all(outcome: Outcome) -> Results:
    """Return the figures of all contenders; loads into existing memory and cold loads share those of the raw device."""
    results = {
        name: {operation: summarise(samples) for operation, samples in operations.items()}
        for name, operations in outcome.samples.items()
    }
    for name, operations in results.items():
        for operation, figures in operations.items():
            raw = results.get("raw", {}).get("load" if operation == "into" else operation)
            figures["of_raw"] = ratio(figures["gigabytes_per_second"], raw["gigabytes_per_second"] if raw else None)
            calls = outcome.calls.get(name, {}).get(operation)
            figures["system_calls_per_gigabyte"] = ratio(calls, figures["bytes"] / GB)
    return results


def is_mapped(figures: dict[str, Any]) -> bool:
    """Whether most of a load's result is a mapping of the file."""
    return (figures.get("mapped_share") or 0) > 0.5


def section(workload: Workload, outcome: Outcome) -> dict[str, Any]:
    """Return the entry of one workload in the JSON document."""
    return {
        "workload": workload.name,
        "kind": workload.kind,
        "size": workload.size,
        "count": workload.count,
        "caches": outcome.caches,
        "not_run": outcome.not_run,
        "notes": outcome.notes,
        "results": summarise_all(outcome),
    }


def spread(figures: dict[str, Any]) -> str:
    """Return the slowest and the fastest rate of all rounds, in GB/s."""
    rates = [sample["bytes"] / sample["seconds"] / GB for sample in figures["samples"]]
    return f"{min(rates):.2f} to {max(rates):.2f}"
