"""Other formats to a checkpoint, and a checkpoint to other formats."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import fastckpt
from fastckpt._paths import refuse_url
from fastckpt._state.flatten import flatten
from fastckpt.exceptions import CheckpointError

from . import distributed, hugging_face, one_file
from .needs import MANIFEST, PICKLED, refuse_growth, torch_for, unpickling_torch_for
from .sources import read

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: The formats of an export that names of files tell.
BY_NAME = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The result of a conversion: the format, and the tensors, bytes and further files that were written."""

    format: str
    tensors: int
    bytes: int
    files: Sequence[str] = ()


def import_(source: Path, destination: Path, *, overwrite: bool, expand: bool) -> Converted:
    """Make a checkpoint of ``source``, whose format follows from its content and its name.

    Args:
        source: a file of ``torch.save``, a safetensors file, or a directory as Hugging Face or
            torch.distributed.checkpoint lays it out.
        destination: a new checkpoint.
        overwrite: whether ``destination`` may exist.
        expand: whether many times the bytes of the source may be written, where tensors are expanded or overlap.

    Raises:
        FileExistsError: ``destination`` exists, and ``overwrite`` is not set.
        FileNotFoundError: there is no ``source``.
        UnsupportedTypeError: the source holds a value that a checkpoint cannot.
        CheckpointError: the source cannot be read.
    """
    _check("import", source, destination, overwrite=overwrite)
    if (source / MANIFEST).exists():
        raise CheckpointError(
            f"cannot import {source}: it is a checkpoint already: 'fastckpt copy' copies it, 'fastckpt export' makes "
            "other formats of it"
        )
    if destination.suffix in (".safetensors", *PICKLED):
        raise CheckpointError(
            f"cannot import {source} to {destination}: the result is a checkpoint, which is a directory; give a name "
            f"without {destination.suffix}"
        )
    if sys.platform != "linux":
        raise NotImplementedError(f"cannot import {source}: fastckpt saves on Linux; import it there")
    if (source / distributed.METADATA_FILE).exists():
        unpickling_torch_for(source)
        from .distributed_plan import write  # noqa: PLC0415 - imports torch.distributed

        tensors, size = write(source, destination, overwrite=overwrite, expand=expand)
    else:
        state, metadata = read(source)
        if not expand and source.is_file():
            flat = flatten(state, operation="import")
            refuse_growth("import", source, sum(one.capacity for one in flat.tensors), source.stat().st_size)
            flat.keep.clear()
        report = fastckpt.save(state, destination, overwrite=overwrite, metadata=metadata)
        tensors, size = report.tensors, report.bytes
    return Converted(format="fastckpt", tensors=tensors, bytes=size)


def export(
    source: Path,
    destination: Path,
    format_: str | None,
    *,
    keys: Sequence[str] | None,
    overwrite: bool = False,
    expand: bool = False,
    strip_prefix: Sequence[str] = (),
    files: Sequence[Path] = (),
    shard_size: int = 0,
) -> Converted:
    """Make another format of the checkpoint ``source``.

    Args:
        source: a checkpoint.
        destination: a new file, or a new directory.
        format_: ``hf``, ``safetensors``, ``torch`` or ``dcp``; None goes by the name of ``destination``.
        keys: glob patterns over names; None takes everything, or for ``hf`` the model.
        overwrite: whether ``destination`` may exist.
        expand: whether many times the bytes of the source may be written, where tensors are expanded or tied.
        strip_prefix: for ``hf``, as ``files`` and ``shard_size``: see :func:`hugging_face.write`.
        files: further files.
        shard_size: bytes a file.

    Raises:
        FileExistsError: ``destination`` exists, and ``overwrite`` is not set.
        FileNotFoundError: there is no ``source``.
        UnsupportedTypeError: the source holds a value that the destination cannot.
        CheckpointError: the source cannot be read, or nothing says which format is wanted.
    """
    named = BY_NAME.get(destination.suffix)
    form = format_ or named
    _check("export", source, destination, overwrite=None if form == "dcp" else overwrite)
    if form is None:
        raise CheckpointError(
            f"cannot export {source} to {destination}: the name does not say which format: give --format hf, "
            f"safetensors, torch or dcp, or a name that ends in {', '.join(BY_NAME)}"
        )
    if named not in (None, form):
        raise CheckpointError(
            f"cannot export {source} to {destination}: --format is {form}, and the name is one of {named}: change one "
            "of them"
        )
    if source.resolve() in (destination.resolve(), *destination.resolve().parents):
        raise CheckpointError(
            f"cannot export {source} to {destination}: that is the checkpoint itself or inside it; choose a path "
            "outside it"
        )
    more: Sequence[str] = ()
    if form == "hf":
        tensors, size, more = hugging_face.write(
            source,
            destination,
            keys=keys,
            strip_prefix=strip_prefix,
            shard_size=shard_size,
            files=files,
            overwrite=overwrite,
        )
    elif form == "safetensors":
        tensors, size = one_file.write_safetensors(source, destination, keys, expand=expand)
    elif form == "torch":
        tensors, size = one_file.write_torch(source, destination, keys)
    else:
        torch_for("export", source)
        from .distributed_plan import export as write  # noqa: PLC0415 - imports torch.distributed

        tensors, size = write(source, destination, keys, expand=expand)
    return Converted(format=form, tensors=tensors, bytes=size, files=more)


def _check(operation: str, source: Path, destination: Path, *, overwrite: bool | None) -> None:
    """Check both paths; ``overwrite`` is None where nothing can be replaced."""
    refuse_url(operation, str(source))
    refuse_url(operation, str(destination))
    if not os.path.lexists(source):
        raise FileNotFoundError(errno.ENOENT, "there is no such file or directory", str(source))
    if os.path.lexists(destination) and not overwrite:
        more = "" if overwrite is None else ", or add --overwrite to replace it"
        raise FileExistsError(errno.EEXIST, f"it exists; choose another name{more}", str(destination))
