"""The files of a checkpoint: opened without following links, and never anything but regular files."""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fastckpt._foreign import not_a_checkpoint

from .limits import MANIFEST, MAX_MANIFEST
from .manifest import corrupt

_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def failed(operation: str, path: str, error: OSError) -> OSError:
    """``error`` with the operation and the path in its text; OSError chooses the class by the number."""
    return OSError(error.errno, f"cannot {operation} `{path}`: {error.strerror}", path)


def open_regular(directory: str, name: str) -> tuple[io.FileIO, int]:
    """Open a file of a checkpoint for reading; return the file and its length.

    Args:
        directory: the checkpoint.
        name: the file's name, or the name of a directory, a slash, and the file's name in it.

    Raises:
        CorruptCheckpointError: the file is missing, a symbolic link or reached through one, or not a regular file.
        OSError: it cannot be opened.
    """
    path = str(Path(directory, name))
    try:
        # Opening a pipe would block, and Windows has no flag against links.
        _check_kind(path, os.lstat(path))
        file = io.FileIO(open_inside(directory, name, _FLAGS))
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


def open_inside(directory: str, name: str, flags: int) -> int:
    """Open a file named as for :func:`open_regular`, of any kind; returns a descriptor.

    Raises:
        OSError: with ELOOP, a directory on the way is a symbolic link.
    """
    folder = os.path.dirname(name)  # noqa: PTH120 - the name as it is
    if not folder:
        return os.open(os.path.join(directory, name), flags)  # noqa: PTH118
    way = os.path.join(directory, folder)  # noqa: PTH118
    if stat.S_ISLNK(os.lstat(way).st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), way)
    if not hasattr(os, "O_NOFOLLOW"):  # Windows
        return os.open(os.path.join(directory, name), flags)  # noqa: PTH118
    inside = os.open(way, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        return os.open(os.path.basename(name), flags, dir_fd=inside)  # noqa: PTH119
    finally:
        os.close(inside)


def _check_kind(path: str, about: os.stat_result) -> None:
    if stat.S_ISLNK(about.st_mode):
        raise corrupt(path, "the file is a symbolic link, which is not followed")
    if not stat.S_ISREG(about.st_mode):
        raise corrupt(path, "not a regular file")


class File(Protocol):
    """An open file of a checkpoint."""

    def read_at(self, offset: int, to: Any) -> int:
        """Fill ``to``, an array of bytes, with the file's bytes at ``offset``; returns the number of bytes read.

        Raises:
            OSError: the file cannot be read; the message names it.
        """

    def close(self) -> None:
        """Close the file."""


class Files(Protocol):
    """The files of one checkpoint, in a directory or a store.

    Attributes:
        path: where they are, for messages.
        threads: the default number of reading threads.
        straight: a piece of this many bytes or more is read directly to its place; smaller pieces are read together,
            and copied.
        why: why all reads are buffered.
        fallback: the reason if an engine other than ``buffered`` is requested.
        gone: the class of errors that concern a file itself, not the access to it.
    """

    path: str
    threads: int
    straight: int
    why: str
    fallback: str
    gone: type[OSError]

    def path_of(self, name: str) -> str:
        """The path of a file, for messages."""

    def check(self) -> None:
        """Raise the error for a place without a checkpoint."""

    def manifest(self, most: int | None = None) -> bytes:
        """The bytes of the manifest, or the first ``most`` of them."""

    def open(self, name: str) -> tuple[File, int]:
        """Open a file; return the file and its length.

        Raises:
            CorruptCheckpointError: it is missing, or not a regular file.
            OSError: it cannot be opened.
        """

    def map(self, name: str, length: int) -> np.ndarray[Any, Any]:
        """The first ``length`` bytes of a file, as private memory."""


class LocalFile:
    """A file that is read through the page cache."""

    def __init__(self, path: str, file: io.FileIO) -> None:
        self._path = path
        self.file = file

    def read_at(self, offset: int, to: Any) -> int:
        """See :class:`File`."""
        view = memoryview(to)
        done = 0
        try:
            self.file.seek(offset)
            while done < len(view):
                got = self.file.readinto(view[done:])
                if not got:
                    break
                done += got
        except OSError as error:
            raise failed("read", self._path, error) from error
        return done

    def close(self) -> None:
        """See :class:`File`."""
        self.file.close()


class Directory:
    """The files of a checkpoint in a directory; see :class:`Files`."""

    threads, straight = min(4, os.cpu_count() or 1), 64 << 10
    why = "no compiled core"
    fallback = "without the compiled core all goes through the page cache"
    gone = OSError

    def __init__(self, path: str) -> None:
        self.path = path

    def path_of(self, name: str) -> str:
        """See :class:`Files`."""
        return str(Path(self.path, name))

    def check(self) -> None:
        """See :class:`Files`."""
        try:
            with os.scandir(self.path) as entries:
                is_ours = any(entry.name == MANIFEST for entry in entries)
        except OSError as error:
            # The path may lead through a file, and then nothing is there.
            if isinstance(error, NotADirectoryError) and Path(self.path).exists():
                raise not_a_checkpoint(self.path) from error
            raise failed("open checkpoint", self.path, error) from error
        if not is_ours:
            raise not_a_checkpoint(self.path)

    def manifest(self, most: int | None = None) -> bytes:
        """See :class:`Files`."""
        return read_manifest(self.path, most)

    def open(self, name: str) -> tuple[File, int]:
        """See :class:`Files`."""
        file, size = open_regular(self.path, name)
        return LocalFile(self.path_of(name), file), size

    def map(self, name: str, length: int) -> np.ndarray[Any, Any]:
        """See :class:`Files`."""
        with open_regular(self.path, name)[0] as file:
            return np.frombuffer(mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY), np.uint8)


def read_manifest(directory: str, most: int | None = None) -> bytes:
    """The bytes of the manifest in ``directory``, or the first ``most`` of them."""
    path = str(Path(directory, MANIFEST))
    file, size = open_regular(directory, MANIFEST)
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
