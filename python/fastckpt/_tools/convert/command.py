"""``fastckpt convert``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastckpt._text import count, size
from fastckpt._units import bytes_of
from fastckpt.exceptions import CheckpointError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

_ABOUT = (
    "SRC is a file of torch.save (no pickle is executed) or safetensors, or a directory of Hugging Face or "
    "torch.distributed.checkpoint, and DST a new checkpoint; or SRC is a checkpoint and DST one .safetensors file. "
    "With --to hf, SRC is a checkpoint that need not fit into memory, and DST a directory."
)
_FOR_HF = ("strip", "file", "shard_size")


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = command("convert", "convert other formats to a checkpoint, or a checkpoint to others", _ABOUT)
    parser.add_argument("path", metavar="SRC", type=Path)
    parser.add_argument("destination", metavar="DST", type=Path)
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists")
    parser.add_argument(
        "--keys",
        metavar="P",
        action="append",
        help="from a checkpoint: only tensors of these names",
    )
    parser.add_argument(
        "--expand",
        action="store_true",
        help="write expanded and overlapping tensors in full",
    )
    parser.add_argument("--to", choices=["hf"], help="write a directory for Hugging Face's readers")
    parser.add_argument("--strip", metavar="P", action="append", help="with --to hf: remove this prefix from names")
    parser.add_argument(
        "--file",
        metavar="F",
        type=Path,
        action="append",
        help="with --to hf: also copy this file (such as LICENSE.txt)",
    )
    parser.add_argument("--shard-size", metavar="N", help="with --to hf: bytes per file (5GB)")


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Convert, and report it."""
    # Only this command needs torch and safetensors.
    from .convert import convert  # noqa: PLC0415

    to_hugging_face = None
    if options.to == "hf":
        to_hugging_face = {
            "strip": options.strip or [],
            "files": options.file or [],
            "shard_size": bytes_of("convert: --shard-size", options.shard_size or "5GB"),
        }
    elif given := [name for name in _FOR_HF if getattr(options, name) is not None]:
        raise CheckpointError(f"convert: --{given[0].replace('_', '-')} requires --to hf")
    done = convert(
        options.path,
        options.destination,
        keys=options.keys,
        overwrite=options.overwrite,
        expand=options.expand,
        to_hugging_face=to_hugging_face,
    )
    what = f"{count(done.tensors, 'tensor')}, {size(done.bytes)}"
    lines = [f"converted {done.source} to {done.destination}: {what} in {done.seconds:.3f} s"]
    if done.files:
        lines.append(f"with {', '.join(done.files)}")
    if to_hugging_face is not None and "config.json" not in done.files:
        lines.append("it has no config.json, which from_pretrained requires: add it with --file")
    return 0, asdict(done), lines
