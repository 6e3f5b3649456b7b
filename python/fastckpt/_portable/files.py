"""The files of a checkpoint: opened without following links, and never anything but regular files."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import Any

from .limits import MANIFEST, MAX_MANIFEST
from .manifest import corrupt

_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def failed(operation: str, path: str, error: OSError) -> OSError:
    """``error`` with the operation and the path in its text; OSError chooses the class by the number."""
    return OSError(error.errno, f"cannot {operation} `{path}`: {error.strerror}", path)


def open_regular(path: str) -> tuple[io.FileIO, int]:
    """Open a file of a checkpoint for reading; its length, too.

    Raises:
        CorruptCheckpointError: it is missing, a symbolic link, or not a regular file.
        OSError: it cannot be opened.
    """
    try:
        # A pipe would be waited for, and Windows has no flag against links.
        _check_kind(path, os.lstat(path))
        file = io.FileIO(os.open(path, _FLAGS))
    except FileNotFoundError as error:
        raise corrupt(path, "the file is missing") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise corrupt(path, "the file is a symbolic link, which is not followed") from error
        raise failed("open", path, error) from error
    try:
        about = os.fstat(file.fileno())
        _check_kind(path, about)
    except BaseException:
        file.close()
        raise
    return file, about.st_size


def _check_kind(path: str, about: os.stat_result) -> None:
    if stat.S_ISLNK(about.st_mode):
        raise corrupt(path, "the file is a symbolic link, which is not followed")
    if not stat.S_ISREG(about.st_mode):
        raise corrupt(path, "not a regular file")


def read_at(file: io.FileIO, offset: int, to: Any) -> int:
    """Fill ``to``, an array of bytes, from ``offset`` on; how many there were."""
    file.seek(offset)
    view = memoryview(to)
    done = 0
    while done < len(view):
        got = file.readinto(view[done:])
        if not got:
            break
        done += got
    return done


def read_manifest(directory: str, most: int | None = None) -> bytes:
    """The bytes of the manifest in ``directory``, or the first ``most`` of them."""
    path = str(Path(directory, MANIFEST))
    file, size = open_regular(path)
    with io.BufferedReader(file) as whole:
        if size > MAX_MANIFEST:
            raise corrupt(path, f"{size} bytes are more than the {MAX_MANIFEST} allowed")
        size = size if most is None else min(size, most)
        try:
            content = whole.read(size)
        except OSError as error:
            raise failed("read", path, error) from error
    if len(content) < size:
        raise corrupt(path, "it became shorter while it was read")
    return content
