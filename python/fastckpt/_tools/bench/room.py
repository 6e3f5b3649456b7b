"""Checks whether a benchmark fits, before anything is written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fastckpt._text import count, size
from fastckpt._tools.doctor import limits

from . import raw

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .shapes import Share

#: Bytes beside the tensors: headers and manifest on disk; interpreter, staging buffers and rings of a rank in memory.
_FILES = 4 << 20
_PROCESS = 160 << 20

_MEMORY_TYPES = ("tmpfs", "ramfs")


def check(directory: Path, shares: Sequence[Share], *, hot: bool) -> str | None:
    """Refuse shares that fit neither on the disk nor in memory.

    At any time the disk holds one copy of either the checkpoints or the plain files. In memory each rank has its state
    and, while it loads, a copy; a hot load needs the files in the page cache as well.

    Args:
        directory: the directory of the benchmark.
        shares: the shares of the ranks.
        hot: whether hot loads are wanted.

    Returns:
        Why hot loads are left out, or None.

    Raises:
        ValueError: the shares do not fit; the message names a size that would.
    """
    total, ranks = sum(share.bytes for share in shares), len(shares)
    what = f"bench {directory}: {count(ranks, 'rank')} with {size(total)} in total"
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    on_disk = total + _FILES * ranks
    # Some file systems do not report their size (ramfs, some FUSE ones).
    if status.f_blocks and on_disk > free:
        raise ValueError(f"{what} need {size(on_disk)} there, where {size(free)} are free: {_less(free, total, ranks)}")
    available = limits.memory()["available_bytes"]
    if available is None:
        return None
    around = (_PROCESS + raw.MEMORY) * ranks
    copies = 3 if _in_memory(directory) else 2
    needed = copies * total + around
    if needed > available:
        held = "the state, its loaded copy" + (" and the files, which are in memory here" if copies > 2 else "")  # noqa: PLR2004
        raise ValueError(
            f"{what} need {size(needed)} of memory ({held}), of which {size(available)} are available: "
            f"{_less((available - around) // copies, total, ranks)}"
        )
    if hot and copies == 2 and needed + total > available:  # noqa: PLR2004
        return f"state, copy and cached files would need {size(needed + total)} of {size(available)} of memory"
    return None


def _less(room: int, total: int, ranks: int) -> str:
    """Advice for ``total`` bytes that exceed ``room``."""
    share = int(room * 0.9) // ranks // 10**6
    if share < 1 or total < 1:
        return "free some, or choose another directory"
    return f"give --size {share}MB or less (for each rank), a smaller --scale, fewer --ranks, or another directory"


def _in_memory(directory: Path) -> bool:
    from fastckpt._tools.doctor import facts  # noqa: PLC0415 - only here

    return facts.file_system(directory)["type"] in _MEMORY_TYPES
