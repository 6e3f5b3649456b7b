"""Other formats to a checkpoint, and a checkpoint to other formats."""

from __future__ import annotations

import errno
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fastckpt
from fastckpt._paths import refuse_url
from fastckpt._state.flatten import flatten
from fastckpt.exceptions import CheckpointError

from . import distributed, hugging_face, one_file
from .needs import MANIFEST, PICKLED, refuse_growth, unpickling_torch_for
from .sources import read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The result of a conversion: tensors and bytes written, and seconds for all of it."""

    source: str
    destination: str
    tensors: int
    bytes: int
    seconds: float
    files: Sequence[str] = ()


def convert(
    source: Path,
    destination: Path,
    *,
    keys: Sequence[str] | None,
    overwrite: bool,
    expand: bool = False,
    to_hugging_face: Mapping[str, Any] | None = None,
) -> Converted:
    """Convert ``source`` to ``destination``; the kind of each follows from its content and its name.

    Args:
        source: a checkpoint, a file of ``torch.save``, a safetensors file, or a directory as Hugging Face or
            torch.distributed.checkpoint lays it out.
        destination: a new checkpoint; where the source is a checkpoint, a ``.safetensors`` file.
        keys: glob patterns over tensor names; only for a checkpoint as the source, None takes everything.
        overwrite: whether ``destination`` may exist.
        expand: whether many times the bytes of the source may be written, where tensors are expanded, tied or overlap.
        to_hugging_face: with these options of :func:`hugging_face.write`, a checkpoint becomes a directory of Hugging
            Face's.

    Raises:
        FileExistsError: ``destination`` exists, and ``overwrite`` is not set.
        FileNotFoundError: there is no ``source``.
        UnsupportedTypeError: the source holds a value that the destination cannot.
        CheckpointError: the source cannot be read, or the two do not go together.
    """
    begin = time.perf_counter()
    refuse_url("convert", str(source))
    refuse_url("convert", str(destination))
    if not os.path.lexists(source):
        raise FileNotFoundError(errno.ENOENT, "there is no such file or directory", str(source))
    if os.path.lexists(destination) and not overwrite:
        raise FileExistsError(
            errno.EEXIST, "it exists; choose another name, or add --overwrite to replace it", str(destination)
        )
    checkpoint = (source / MANIFEST).exists()
    if checkpoint and source.resolve() in (destination.resolve(), *destination.resolve().parents):
        raise CheckpointError(
            f"cannot convert {source} to {destination}: that is the checkpoint itself or inside it; choose a path "
            "outside it"
        )
    files: Sequence[str] = ()
    if to_hugging_face is not None:
        tensors, size, files = hugging_face.write(
            source, destination, keys=keys, overwrite=overwrite, **to_hugging_face
        )
    elif checkpoint:
        if destination.suffix != ".safetensors":
            raise CheckpointError(
                f"cannot convert the checkpoint {source} to {destination}: a checkpoint is converted to one "
                "safetensors file; give a name that ends in .safetensors"
            )
        tensors, size = one_file.write(source, destination, keys, expand=expand)
    elif (source / distributed.METADATA_FILE).exists():
        _refuse(source, destination, keys)
        unpickling_torch_for(source)
        from .distributed_plan import write  # noqa: PLC0415 - imports torch.distributed

        tensors, size = write(source, destination, overwrite=overwrite, expand=expand)
    else:
        _refuse(source, destination, keys)
        state, metadata = read(source)
        if not expand and source.is_file():
            flat = flatten(state, operation="convert")
            refuse_growth(source, sum(one.capacity for one in flat.tensors), source.stat().st_size)
            flat.keep.clear()
        report = fastckpt.save(state, destination, overwrite=overwrite, metadata=metadata)
        tensors, size = report.tensors, report.bytes
    return Converted(
        source=str(source),
        destination=str(destination),
        tensors=tensors,
        bytes=size,
        seconds=time.perf_counter() - begin,
        files=files,
    )


def _refuse(source: Path, destination: Path, keys: Sequence[str] | None) -> None:
    """Refuse impossible conversions to a checkpoint."""
    if keys is not None:
        raise CheckpointError(f"cannot choose tensors of {source}: only a checkpoint is converted in part")
    if destination.suffix in (".safetensors", *PICKLED):
        raise CheckpointError(
            f"cannot convert {source} to {destination}: the result is a checkpoint, which is a "
            f"directory; give a name without {destination.suffix}"
        )
    if sys.platform != "linux":
        raise NotImplementedError(f"cannot convert {source} to a checkpoint: fastckpt saves on Linux; convert it there")
