"""Checks that a file and other packages meet the needs of a conversion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt._portable.limits import MAX_HEADER
from fastckpt.exceptions import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

#: The most bytes of a safetensors header, and of an index.
HEADER = MAX_HEADER
MANIFEST = "fastckpt.json"
HUGGING_FACE_INDEX = "model.safetensors.index.json"
PICKLED = (".pt", ".pth", ".ckpt", ".bin")
#: The formats of an export, with options that only some have, and the formats that file names identify.
FORMATS = {
    "hf": ("overwrite", "strip_prefix", "files", "shard_size"),
    "safetensors": ("overwrite", "expand"),
    "torch": ("overwrite",),
    "dcp": ("expand",),
}
BY_NAME = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}


def torch_for(operation: str, source: Path) -> Any:
    """Return the module torch, or raise an error that says it is required."""
    try:
        from fastckpt._tensors import torch as ours  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise CheckpointError(
            f"cannot {operation} {source}: this needs PyTorch; pip install torch ({error})"
        ) from error
    module: Any = ours
    return module.torch


def unpickling_torch_for(source: Path) -> Any:
    """As :func:`torch_for`, for a version whose unpickler executes nothing: before 2.6 a file could execute code."""
    torch = torch_for("import", source)
    if tuple(int(part) for part in str(torch.__version__).split(".")[:2]) < (2, 6):
        raise CheckpointError(
            f"cannot import {source}: torch {torch.__version__} executes code that such a file names, even "
            "with weights_only=True (CVE-2025-32434): use torch 2.6 or later"
        )
    return torch


def refuse_growth(operation: str, source: Path, written: int, read: int) -> None:
    """Refuse to write many times the bytes that are read, unless requested.

    Args:
        operation: ``import`` or ``export``.
        source: its path.
        written: bytes of the tensors that would be written.
        read: bytes that the source has.
    """
    if written > 2 * read + (64 << 20):
        raise CheckpointError(
            f"cannot {operation} {source}: its {read} bytes would become {written}, because tensors in it "
            "overlap, or are expanded or tied: give --expand to write them all"
            + (", or choose tensors with --keys" if operation == "export" else "")
        )


def safetensors_for(operation: str, source: Path) -> ModuleType:
    """Return the module safetensors with its part for torch, or raise an error that says it is required."""
    torch_for(operation, source)
    try:
        import safetensors.torch  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise CheckpointError(
            f"cannot {operation} {source}: this needs the package safetensors; pip install safetensors ({error})"
        ) from error
    return safetensors


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message: some are a page long."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def regular(source: Path) -> None:
    """Refuse anything but a file: opening a pipe would block, and a device may be endless."""
    if not source.is_file():
        source.stat()  # raises if nothing is there
        raise CheckpointError(f"cannot import {source}: it is not a regular file; give a file or a directory")
