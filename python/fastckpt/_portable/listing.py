"""The checkpoints in a directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from fastckpt._files import TORCH_METADATA
from fastckpt.exceptions import CheckpointError

from .files import failed, read_manifest
from .limits import MANIFEST
from .manifest import decode_head
from .records import ListedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable

#: What saves and removals give to directories while they work (docs/format.md, 6.1).
_TEMPORARY = re.compile(r"\..+\.(?:(?:tmp|del)-.+-[0-9a-fA-F]{8}|old-.+-[0-9a-fA-F]{10})").fullmatch
_OURS = re.compile(r"(?:model|training)(?:-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json").fullmatch


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
    """What lies at ``path``, if it is a checkpoint."""
    try:
        sizes = {
            entry.name: entry.stat(follow_symlinks=False).st_size
            for entry in os.scandir(path)
            if entry.is_file(follow_symlinks=False) or entry.name == MANIFEST
        }
    except OSError:
        return None
    if MANIFEST not in sizes:
        return None
    return looked_at(path.name, str(path), sizes, lambda: read_manifest(str(path)))


def is_ours(name: str) -> bool:
    """Whether a file in a checkpoint has a name that fastckpt's own files have."""
    return name in (MANIFEST, TORCH_METADATA) or _OURS(name) is not None


def looked_at(name: str, path: str, sizes: dict[str, int], read: Callable[[], bytes]) -> ListedCheckpoint:
    """What a manifest, given by ``read``, and the sizes of all files in bytes say about a checkpoint."""
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
                is_there = "cannot be found" if size is None else f"has {size} bytes, written were {shard.nbytes}"
                damage = f"shard `{shard.file}` {is_there}"
                break
    return ListedCheckpoint(name, path, created, total, aside=False, damage=damage)
