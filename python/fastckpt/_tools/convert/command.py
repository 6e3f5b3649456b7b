"""``fastckpt import`` and ``fastckpt export``."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastckpt._text import count, size
from fastckpt._tools.places import path

from .needs import FORMATS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from .convert import Converted


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommands; ``command(name, text, more)`` makes their parsers."""
    to = command(
        "import",
        "convert another format to a checkpoint",
        "SRC is a file of torch.save (no pickle is executed) or safetensors, or a directory of Hugging Face or "
        "torch.distributed.checkpoint.",
    )
    to.add_argument("path", metavar="SRC", type=path)
    to.add_argument("destination", metavar="CKPT", type=path, help="a new checkpoint")
    to.add_argument("--overwrite", action="store_true", help="replace CKPT if it exists")
    to.add_argument("--expand", action="store_true", help="write expanded and overlapping tensors in full")
    of = command("export", "convert a checkpoint to another format", "CKPT need not fit into memory.")
    of.add_argument("path", metavar="CKPT", type=path)
    of.add_argument("destination", metavar="DST", type=path)
    of.add_argument("--format", choices=tuple(FORMATS), help="needed where DST is a directory")
    of.add_argument("--overwrite", action="store_true", default=None, help="replace DST if it exists")
    of.add_argument("--keys", metavar="P", action="append", help="export only entries whose names match P")
    of.add_argument("--expand", action="store_true", default=None, help="write expanded tensors in full")
    of.add_argument("--strip-prefix", metavar="P", action="append", help="hf: remove this prefix from names")
    of.add_argument("--files", metavar="F", type=path, action="append", help="hf: also copy this file (LICENSE.txt)")
    of.add_argument("--shard-size", metavar="N", help="hf: bytes per file (5GB)")


def import_(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Import; return exit status, JSON document and lines."""
    # Only this command needs torch and safetensors.
    from . import convert  # noqa: PLC0415

    begin = time.perf_counter()
    done = convert.import_(options.path, options.destination, overwrite=options.overwrite, expand=options.expand)
    return 0, *_shown(options, done, time.perf_counter() - begin)


def export(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Export; return exit status, JSON document and lines."""
    from . import convert  # noqa: PLC0415

    begin = time.perf_counter()
    names = ("overwrite", "expand", "strip_prefix", "files", "shard_size")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    done = convert.export(options.path, options.destination, options.format, options.keys, given)
    return 0, *_shown(options, done, time.perf_counter() - begin)


def _shown(options: argparse.Namespace, done: Converted, seconds: float) -> tuple[dict[str, Any], list[str]]:
    paths = {"source": str(options.path), "target": str(options.destination)}
    what = f"{count(done.tensors, 'tensor')}, {size(done.bytes)}"
    lines = [f"{options.command}ed {options.path} to {options.destination}: {what} in {seconds:.3f} s"]
    if done.files:
        lines.append(f"with {', '.join(done.files)}")
    warnings = []
    if done.format == "hf" and "config.json" not in done.files:
        warnings.append("it has no config.json, which from_pretrained requires: add it with --files")
    return {**paths, **asdict(done), "seconds": seconds, "warnings": warnings}, [*lines, *warnings]
