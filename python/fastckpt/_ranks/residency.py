"""Whether a checkpoint is in the page cache of this host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastckpt import _core

#: The number of places of a checkpoint to examine, and how many of them may be missing.
_PLACES, _MISSING = 64, 3
_NOWAIT = getattr(os, "RWF_NOWAIT", None)


def is_resident(path: str, reader: _core.Reader) -> bool:
    """Whether the files are in the page cache, judged by samples; False if the system does not report it."""
    shards = reader.shards()
    total = sum(shard.nbytes for shard in shards)
    if _NOWAIT is None or not total:
        return False
    step = max(total // _PLACES, 1)
    missing = 0
    for shard in shards:
        try:
            file = os.open(Path(path) / shard.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            for offset in range(min(step // 2, shard.nbytes - 1), shard.nbytes, step):
                try:
                    # This does not wait for a missing page.
                    os.preadv(file, [bytearray(1)], offset, _NOWAIT)
                except BlockingIOError:
                    missing += 1
                except OSError:
                    return False
                if missing > _MISSING:
                    return False
        finally:
            os.close(file)
    return True
