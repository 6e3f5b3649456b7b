"""The output of a benchmark: tables, the machine, the JSON document."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import GB
from bench.contenders import OTHER, VARIANTS, Spec, title
from bench.process import OPERATION_TITLES, OPERATIONS
from bench.summary import is_mapped, spread

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.summary import Results

PACKAGES = (
    "fastckpt-io",
    "torch",
    "safetensors",
    "numpy",
    "torch_checkpointing",
    "runai-model-streamer",
    "fastsafetensors",
    "tensorizer",
    "deepspeed",
)
# The column, the key of its figure, and the digits.
SPEED = (
    ("GB/s", "gigabytes_per_second", 2),
    ("of raw", "of_raw", 2),
    ("CPU s/GB", "cpu_seconds_per_gigabyte", 2),
)
COST = (
    ("s", "seconds", 3),
    ("CPU s/GB", "cpu_seconds_per_gigabyte", 2),
    ("user", "user_seconds_per_gigabyte", 2),
    ("system", "system_seconds_per_gigabyte", 2),
    ("faults/GB", "minor_faults_per_gigabyte", 0),
    ("major", "major_faults_per_gigabyte", 0),
    ("calls/GB", "system_calls_per_gigabyte", 0),
    ("copied/byte", "copied_per_byte", 2),
    ("extra MB", "extra_megabytes", 0),
    ("mapped", "mapped_share", 2),
)


def number(value: float | None, digits: int = 2) -> str:
    """Return a figure for a table."""
    return "-" if value is None else f"{value:.{digits}f}"


def operations_of(results: Results) -> list[str]:
    """Return the operations that any contender did, in order."""
    return [operation for operation in OPERATIONS if any(operation in pair for pair in results.values())]


def name_of(name: str) -> str:
    """Return the title of the contender of this name."""
    known = {spec.name: spec for spec in (*VARIANTS.values(), OTHER)}
    return title(known.get(name, Spec(name)))


def speed_table(results: Results) -> list[list[str]]:
    """Return the table of one workload, head first: speed and CPU cost."""
    operations = operations_of(results)
    heads = [
        f"{OPERATION_TITLES[key]}, {column}" if column == "GB/s" else column
        for key in operations
        for column, _, _ in SPEED
    ]
    rows = [["", *heads]]
    for name, pair in results.items():
        cells = [number(pair.get(key, {}).get(figure), digits) for key in operations for _, figure, digits in SPEED]
        rows.append([name_of(name), *cells])
    return rows


def cost_table(results: Results, operation: str) -> list[list[str]]:
    """Return the costs of one operation for each contender, head first."""
    rows = [[OPERATION_TITLES[operation], *(column for column, _, _ in COST)]]
    for name, pair in results.items():
        if figures := pair.get(operation):
            rows.append([name_of(name), *(number(figures[figure], digits) for _, figure, digits in COST)])
    return rows


def many_table(results: Results, count: int, what: str) -> list[list[str]]:
    """Return the table of many small tensors, head first."""
    operations = operations_of(results)
    rows = [[what, *(f"{OPERATION_TITLES[operation]}, us a tensor" for operation in operations)]]
    for name, pair in results.items():
        seconds = [pair.get(operation, {}).get("seconds") for operation in operations]
        rows.append([name_of(name), *(number(None if one is None else one / count * 1e6, 1) for one in seconds)])
    return rows


def render(rows: list[list[str]], *, markdown: bool) -> str:
    """Return the table as Markdown or as aligned text."""
    if markdown:
        rule = ["---", *(["---:"] * (len(rows[0]) - 1))]
        return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])
    rows = [[cell.replace("**", "") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def not_run(reasons: dict[str, str], named: Callable[[str], str]) -> list[str]:
    """Return the contenders that did not run, one line per reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(named(name))
    return [f"Not run: {'; '.join(several)}: {reason}." for reason, several in names.items()]


def remarks(section: dict[str, Any]) -> list[str]:
    """Return the notes for readers of a workload's tables."""
    results = section["results"]
    lines = not_run(section["not_run"], name_of)
    lines += [f"{name_of(name)}: {note}." for name, note in section["notes"].items()]
    mapped = sorted(
        {name_of(name) for name, pair in results.items() if any(is_mapped(figures) for figures in pair.values())}
    )
    if mapped:
        lines.append(
            f"Mapped: {', '.join(mapped)}: the result is pages of the file, which the kernel copies only when "
            "a step first writes them (--touch write counts that)."
        )
    if raw := results.get("raw"):
        # A ratio above 1 means little if the device itself varied this much.
        ranges = [f"{spread(figures)} GB/s in the {OPERATION_TITLES[key]}" for key, figures in raw.items()]
        lines.append(f"The raw device alone ranged over {', '.join(ranges)}.")
    return [line.replace("**", "") for line in lines]


# -- the machine -------------------------------------------------------------------------------------------------------


def version(package: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def file_system(path: Path) -> str:
    """Return type and source of the file system that holds ``path``."""
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        source, place, kind = line.split()[:3]
        if path.resolve().is_relative_to(place) and len(place) >= len(best[0]):
            best = (place, f"{kind} on {source}")
    return best[1]


def machine(directory: Path) -> dict[str, Any]:
    """Return the facts on which the figures depend."""
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "cores": len(os.sched_getaffinity(0)),
        "memory_gigabytes": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB, 1),
        "file_system": file_system(directory),
        "load_average": os.getloadavg()[0],
    }


def machine_lines(about: dict[str, Any]) -> list[str]:
    """Return the machine in words."""
    lines = []
    if about["load_average"] > 0.5:
        lines.append(
            f"The machine was busy when this began (load average {about['load_average']:.1f}): do not quote these."
        )
    lines.append(
        f"{about['cores']} cores, {about['file_system']}, torch {about['packages']['torch']}, {about['system']}."
    )
    return lines


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Write the document if a file was given."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")
