"""Converts other formats to a checkpoint, and a checkpoint to other formats."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fastckpt
from fastckpt._paths import refuse_url
from fastckpt._state.flatten import flatten
from fastckpt._tools.places import option
from fastckpt.exceptions import CheckpointError

from . import distributed, hugging_face, one_file
from .needs import BY_NAME, FORMATS, MANIFEST, PICKLED, refuse_growth, torch_for, unpickling_torch_for
from .sources import read

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The result of a conversion: the format, and the tensors, bytes and further files that were written."""

    format: str
    tensors: int
    bytes: int
    files: Sequence[str] = ()


def import_(source: Path, destination: Path, *, overwrite: bool, expand: bool) -> Converted:
    """Convert ``source`` to a checkpoint; its content and its name determine its format.

    With ``expand``, many times the bytes of the source may be written, if tensors are expanded or overlap.
    """
    _check("import", source, destination, overwrite=overwrite)
    if (source / MANIFEST).exists():
        raise CheckpointError(f"cannot import {source}: it is a checkpoint already; 'fastckpt copy' copies it")
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
    source: Path, destination: Path, form: str | None, keys: Sequence[str] | None, given: dict[str, Any]
) -> Converted:
    """Convert the checkpoint ``source`` to another format.

    If ``form`` is None, the name of ``destination`` determines the format; ``given`` are options of some formats only.
    """
    paths = f"cannot export {source} to {destination}"
    named = BY_NAME.get(destination.suffix)
    form = form or named
    overwrite = given.get("overwrite", False)
    _check("export", source, destination, overwrite=None if form == "dcp" else overwrite)
    if form is None:
        raise CheckpointError(
            f"{paths}: the name does not say which format: give --format {', '.join(FORMATS)}, or a name that ends in "
            f"{', '.join(BY_NAME)}"
        )
    if named not in (None, form):
        raise CheckpointError(f"{paths}: --format is {form}, but the suffix means {named}: change one of them")
    for name in given:
        if name not in FORMATS[form]:
            fit = " or ".join(each for each, names in FORMATS.items() if name in names)
            raise CheckpointError(f"export: {option(name)} is for --format {fit}, not {form}")
    given.pop("overwrite", None)
    if form == "hf":
        found = hugging_face.write(source, destination, keys, overwrite=overwrite, **given)
    elif form == "dcp":
        torch_for("export", source)
        from .distributed_plan import export as write  # noqa: PLC0415 - imports torch.distributed

        found = write(source, destination, keys, **given)
    else:
        one = one_file.write_torch if form == "torch" else one_file.write_safetensors
        found = one(source, destination, keys, **given)
    tensors, size, *files = found
    return Converted(format=form, tensors=tensors, bytes=size, files=files)


def _check(operation: str, source: Path, destination: Path, *, overwrite: bool | None) -> None:
    """Check both paths; ``overwrite`` is None if nothing can be replaced."""
    refuse_url(operation, str(source))
    refuse_url(operation, str(destination))
    if not os.path.lexists(source):
        raise FileNotFoundError(errno.ENOENT, "there is no such file or directory", str(source))
    inner, outer = source.resolve(), destination.resolve()
    if inner == outer or inner in outer.parents or outer in inner.parents:
        raise CheckpointError(
            f"cannot {operation} {source} to {destination}: they are equal, or one is inside the other: use other paths"
        )
    above = next((each for each in outer.parents if (each / MANIFEST).exists()), None)
    if above is not None:
        raise CheckpointError(f"cannot {operation} to {destination}: {above} is a checkpoint: choose a path outside it")
    if os.path.lexists(destination) and not overwrite:
        more = "" if overwrite is None else ", or add --overwrite to replace it"
        raise FileExistsError(errno.EEXIST, f"it exists; choose another name{more}", str(destination))
