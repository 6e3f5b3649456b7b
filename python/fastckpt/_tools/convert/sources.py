"""Reads the state from a file or directory of another format. No pickle is ever executed."""

from __future__ import annotations

import errno
import json
import os
import re
from typing import TYPE_CHECKING, Any

from fastckpt._foreign import file_format
from fastckpt.exceptions import CheckpointError, CorruptCheckpointError, UnsupportedTypeError

from . import pickled as _pickled
from .needs import (
    HEADER,
    HUGGING_FACE_INDEX,
    MANIFEST,
    PICKLED,
    first_line,
    regular,
    safetensors_for,
    unpickling_torch_for,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def read(source: Path) -> tuple[Any, Mapping[str, Any] | None]:
    """Return the state and the metadata in ``source``."""
    if source.is_dir():
        return _read_hugging_face(source)
    regular(source)
    written_by = file_format(source)
    if written_by == "safetensors" or (written_by is None and source.suffix == ".safetensors"):
        return _read_safetensors(source)
    if written_by == "torch.save" or source.suffix in PICKLED:
        return _read_pickled(source), None
    known = ", ".join((".safetensors", *PICKLED))
    raise CheckpointError(
        f"cannot import {source}: its kind is unknown; it neither begins like a file of torch.save or safetensors, "
        f"nor has one of the endings {known}, and a checkpoint is a directory with {MANIFEST}"
    )


def _read_pickled(source: Path) -> Any:
    """Return the content of a file of ``torch.save``, if it consists of tensors and plain containers only."""
    torch = unpickling_torch_for(source)
    try:
        _pickled.check(source)
        with _pickled.bounded(source.stat().st_size):
            return _pickled.load(torch, source)
    except MemoryError as error:
        raise CheckpointError(f"cannot import {source}: it has changed meanwhile: import it again") from error
    except _pickled.RefusedError as error:
        if error.kind == "UnpicklingError":
            raise UnsupportedTypeError(
                f"cannot import {source}: it is damaged, or holds more than tensors and plain containers, and "
                "fastckpt never executes what a pickle names; if you trust the file, load it with "
                "torch.load(weights_only=False) and give the state to fastckpt.save. "
                f"torch says: {_refusal(error)}"
            ) from error
        if error.kind is None:
            raise CheckpointError(
                f"cannot import {source}: {error}; if you trust the file, load it with torch.load and give the state "
                "to fastckpt.save"
            ) from error
        # For a truncated archive, torch reports EINVAL.
        if error.errno is not None and error.errno != errno.EINVAL:
            raise OSError(error.errno, os.strerror(error.errno), str(source)) from error
        raise CorruptCheckpointError(
            f"cannot import {source}: it is damaged or was not written by torch.save: {first_line(error)}"
        ) from error


def _read_safetensors(
    source: Path, names: Sequence[str] | None = None
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Return the tensors of one safetensors file, mapped and not copied, and the metadata in its header."""
    library = safetensors_for("import", source)
    regular(source)
    state = {}
    try:
        with library.safe_open(source, framework="pt") as file:
            for name in file.keys() if names is None else names:
                state[name] = file.get_tensor(name)
            metadata = file.metadata()
    except library.SafetensorError as error:
        raise CorruptCheckpointError(
            f"cannot import {source}: it is damaged or not a safetensors file: {first_line(error)}"
        ) from error
    return state, metadata


def _read_hugging_face(source: Path) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Return the tensors of a model in Hugging Face's layout, in one or several safetensors files."""
    index = source / HUGGING_FACE_INDEX
    if not index.exists():
        files = sorted(source.glob("*.safetensors"))
        if len(files) == 1:
            return _read_safetensors(files[0])
        found = f"{len(files)} safetensors files" if files else "no safetensors file"
        raise CheckpointError(
            f"cannot import the directory {source}: it has neither {MANIFEST} nor {HUGGING_FACE_INDEX}, and {found}; "
            "give one file, or a directory that has an index"
        )
    regular(index)
    if index.stat().st_size > HEADER:
        raise CheckpointError(
            f"cannot import {source}: {HUGGING_FACE_INDEX} has more than {HEADER} bytes, so it is not an index"
        )
    try:
        content = json.loads(index.read_bytes())
        shards: dict[str, list[str]] = {}
        for name, file in content["weight_map"].items():
            shards.setdefault(file, []).append(name)
        metadata = content.get("metadata")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"cannot import {source}: {HUGGING_FACE_INDEX} is not an index of Hugging Face: {first_line(error)}"
        ) from error
    read: dict[str, Any] = {}
    for file, names in shards.items():
        # The index is untrusted input: it must not lead out of the directory.
        if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):  # noqa: PTH119 - the name as text
            raise CorruptCheckpointError(
                f"cannot import {source}: {HUGGING_FACE_INDEX} names {file!r}, not a safetensors file beside it"
            )
        read.update(_read_safetensors(source / file, names)[0])
    return {name: read[name] for name in content["weight_map"]}, metadata if isinstance(metadata, dict) else None


def _refusal(error: Exception) -> str:
    """Return the line of torch's advice that names the refused class."""
    telling = (line for line in str(error).splitlines() if "GLOBAL" in line or line.startswith("Unsupported"))
    # The rest of the line explains how to allow what it names.
    return re.split(r"(?<=[^.]{3})\. |,? (?:Please )?use `torch", next(telling, first_line(error)).strip())[0]
