"""The checkpoints in a directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from fastckpt._files import BESIDE_SHARDS, TORCH_METADATA
from fastckpt._foreign import writer_of
from fastckpt.exceptions import CheckpointError

from .files import failed, read_manifest
from .limits import MANIFEST, TRAINING
from .manifest import decode_head
from .records import ListedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

#: Temporary names that saves and removals give to directories (docs/format.md, 6.1).
_TEMPORARY = re.compile(r"\..+\.(?:(?:tmp|del)-.+-[0-9a-fA-F]{8}|old-.+-[0-9a-fA-F]{10})").fullmatch
#: The name of the model's shards if the model is an adapter, without the number of a shard.
ADAPTER = "adapter_model"
_SHARD = re.compile(rf"(?:model|{ADAPTER}|{TRAINING}/{TRAINING})(?:-\d{{5,}}-of-\d{{5,}})?\.safetensors").fullmatch
#: Hugging Face's index of the model's shards.
INDEX = "model.safetensors.index.json"


def list_checkpoints(directory: str) -> list[ListedCheckpoint]:
    """The checkpoints in ``directory``, by name."""
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise failed("list", directory, error) from error
    found = (_look(Path(directory, name)) for name in names if not _TEMPORARY(name))
    return [listed for listed in found if listed is not None]


def _look(path: Path) -> ListedCheckpoint | None:
    """The listing of ``path``, if it is a checkpoint."""
    try:
        sizes = _sizes(path)
    except OSError:
        return None
    if MANIFEST not in sizes:
        return None
    return looked_at(path.name, str(path), sizes, lambda: read_manifest(str(path)))


def _sizes(path: Path) -> dict[str, int]:
    """The files in the directory of a checkpoint, by their relative names, with their sizes in bytes."""
    sizes = {}
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False) or entry.name == MANIFEST:
                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
            elif entry.name == TRAINING and entry.is_dir(follow_symlinks=False):
                sizes.update((f"{TRAINING}/{name}", nbytes) for name, nbytes in _sizes(Path(entry.path)).items())
    return sizes


def is_shard(name: str) -> bool:
    """Whether a file in a checkpoint has a name that a save gives to shards."""
    return _SHARD(name) is not None


def is_ours(name: str) -> bool:
    """Whether a file in a checkpoint has a name that fastckpt's own files have."""
    return name in BESIDE_SHARDS or is_shard(name)


def strangers(names: Collection[str], files: Collection[str], shards: Collection[str] | None) -> list[str]:
    """The names in a checkpoint's directory that do not belong to the checkpoint.

    Args:
        names: all relative names.
        files: the names of files that ``files=`` added.
        shards: the shards in the manifest; None if it cannot be read, so that names decide.
    """
    own = {*BESIDE_SHARDS, *shards} if shards is not None else {name for name in names if is_ours(name)}
    found = {name for name in names if name not in own and name not in files}
    torchs = writer_of(TORCH_METADATA)
    # In a directory that torch's own writer has written, the file that lists its files is torch's, not fastckpt's.
    if TORCH_METADATA in names and any(writer_of(name) == torchs for name in found):
        found.add(TORCH_METADATA)
    return sorted(found)


def looked_at(name: str, path: str, sizes: dict[str, int], read: Callable[[], bytes]) -> ListedCheckpoint:
    """The listing of a checkpoint by its manifest, from ``read``, and the sizes of all files in bytes."""
    total = sum(size for file, size in sizes.items() if is_ours(file))
    created = damage = None
    try:
        created, shards = decode_head(read(), f"{path}/{MANIFEST}")
    except (CheckpointError, OSError) as error:
        damage = str(error)
    else:
        for shard in shards:
            size = sizes.get(shard.file)
            if size != shard.nbytes:
                is_there = "cannot be found" if size is None else f"has {size} bytes, expected {shard.nbytes}"
                damage = f"shard `{shard.file}` {is_there}"
                break
    return ListedCheckpoint(name, path, created, total, aside=False, damage=damage)
