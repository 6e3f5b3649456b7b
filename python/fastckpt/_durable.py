"""Makes writes of Python durable: one file, or the names in one directory."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path


def sync(path: str | os.PathLike[str]) -> None:
    """Fsync a file or a directory.

    Windows cannot open directories, but journals their changes. Some file systems refuse to sync directories, but write
    names through.

    Raises:
        OSError: it cannot be opened, or the storage failed.
    """
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file or a directory, durably; a file, or a directory that is empty, is replaced.

    Raises:
        OSError: the target cannot be replaced, or the storage failed.
    """
    os.replace(source, target)  # noqa: PTH105
    for parent in {Path(target).parent, Path(source).parent}:
        sync(parent)
