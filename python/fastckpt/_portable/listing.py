"""The checkpoints in a directory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fastckpt.exceptions import CheckpointError

from .files import failed, read_manifest
from .limits import MANIFEST
from .manifest import decode_head
from .records import ListedCheckpoint

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
    total = sum(size for name, size in sizes.items() if name == MANIFEST or _OURS(name))
    created = damage = None
    try:
        created, shards = decode_head(read_manifest(str(path)), str(path / MANIFEST))
    except (CheckpointError, OSError) as error:
        damage = str(error)
    else:
        for shard in shards:
            size = sizes.get(shard.file)
            if size != shard.nbytes:
                is_there = "cannot be found" if size is None else f"has {size} bytes, written were {shard.nbytes}"
                damage = f"shard `{shard.file}` {is_there}"
                break
    return ListedCheckpoint(path.name, str(path), created, total, aside=False, damage=damage)
