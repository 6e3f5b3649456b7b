"""``fastckpt copy``: copies a checkpoint to another directory or object store."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import fastckpt

from .places import place

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; ``command(name, text, more)`` makes its parser."""
    parser = command(
        "copy",
        "copy a checkpoint to another directory or object store",
        "Every shard is compared with its checksum on the way. The copy appears whole or not at all. If it is cut "
        "short, the same command continues the copy. Does nothing if TARGET holds this checkpoint already. "
        "Exits with 1 if SOURCE is damaged.",
    )
    parser.add_argument("path", metavar="SOURCE", type=place, help="a checkpoint: its directory or URL")
    parser.add_argument("target", metavar="TARGET", type=place, help="the directory or URL of the copy")
    parser.add_argument("--overwrite", action="store_true", help="replace another checkpoint at TARGET")
    parser.add_argument("--bandwidth-limit", metavar="RATE", help="the most bytes per second, as in 500MB/s")


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Copy; return exit status, JSON document and lines."""
    report = fastckpt.copy(
        options.path,
        options.target,
        overwrite=options.overwrite,
        io=fastckpt.IO(bandwidth_limit=options.bandwidth_limit, progress=options.progress),
    )
    document = {**asdict(report), "gigabytes_per_second": report.gigabytes_per_second}
    return 0, document, [str(report)]
