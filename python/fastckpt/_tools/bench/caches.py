"""The page cache: dropped before a cold load, filled before a hot one, and measured in both cases."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

_DROP = Path("/proc/sys/vm/drop_caches")
_READ = 8 << 20


def drop() -> bool:
    """Drop the whole machine's caches, which requires root; returns whether that was possible. Dirty pages stay."""
    try:
        _DROP.write_text("3", encoding="ascii")
    except OSError:
        return False
    return True


def forget(directory: Path) -> None:
    """Drop the files in a directory from the cache, as far as the kernel does; needs no root."""
    for file in _files(directory):
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm(directory: Path) -> None:
    """Read every file in a directory through the cache."""
    buffer = bytearray(_READ)
    for file in _files(directory):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def resident(directory: Path) -> float | None:
    """The share of the files in a directory that is in the page cache; None if mincore(2) fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    present = pages = 0
    for file in _files(directory):
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if not size:
                continue
            mapping = mmap.mmap(opened.fileno(), size, prot=mmap.PROT_READ)
        held = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        memory = np.frombuffer(mapping, np.uint8)
        failed = libc.mincore(
            ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(held.ctypes.data)
        )
        del memory
        mapping.close()
        if failed:
            return None
        present += int(np.count_nonzero(held & 1))
        pages += len(held)
    return present / pages if pages else None


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
