"""Sources of a copy: the files of a directory, or the objects below a URL."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from fastckpt import _crc64
from fastckpt._files import TORCH_METADATA
from fastckpt._paths import is_url
from fastckpt._portable.files import open_inside
from fastckpt._portable.limits import MANIFEST, TRAINING
from fastckpt._portable.listing import ADAPTER, is_shard
from fastckpt._portable.manifest import corrupt
from fastckpt._stores.layout import Layout
from fastckpt._stores.objects import Objects
from fastckpt._stores.reader import open_reader
from fastckpt._text import visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_DIRECT = getattr(os, "O_DIRECT", 0)
_PAGE = 4096
#: Smaller files are read through the page cache, which usually holds them.
_SMALL = 1 << 20


class Item(NamedTuple):
    """A file of a checkpoint.

    Attributes:
        name: the name of the file.
        nbytes: the length of the file.
        crc: the CRC-64/NVME of the file as 16 digits; None if unknown.
        is_shard: whether the manifest names it.
    """

    name: str
    nbytes: int
    crc: str | None
    is_shard: bool


class Opened(Protocol):
    """A file that is being read."""

    #: Device and inode of a file of this machine.
    identity: tuple[int, int] | None

    def read_into(self, start: int, memory: Bytes) -> None:
        """Fill ``memory`` with the bytes that begin at ``start``; threads may call this concurrently.

        CorruptCheckpointError if the file ends earlier.
        """

    def close(self) -> None: ...


class Source(Protocol):
    """A place where a checkpoint is, or was."""

    place: str

    def manifest(self) -> tuple[bytes, list[Item]]:
        """The manifest's bytes, and the shards that it names."""

    def beside(self, manifest: bytes, shards: Sequence[Item]) -> list[Item]:
        """The files beside the manifest and the shards that belong to the checkpoint with this manifest."""

    def path_of(self, name: str) -> str:
        """The path or the URL of a file of the checkpoint, for messages."""

    def open(self, item: Item) -> Opened:
        """Open a file, and check its length."""


def source_at(operation: str, place: str) -> Source:
    """The source at ``place``, an absolute path or a URL."""
    return _Store(operation, place) if is_url(place) else _Directory(operation, place)


def _manifest(operation: str, place: str) -> tuple[bytes, list[Item]]:
    reader = open_reader(operation, place)
    return reader.manifest(), [Item(one.file, one.nbytes, one.crc, is_shard=True) for one in reader.shards()]


def _is_beside(name: str, shards: Sequence[Item]) -> bool:
    """Whether a file belongs to a checkpoint whose manifest does not name it.

    Any other name that begins with a dot belongs to a file system, a tool, or an unfinished operation. A shard that the
    manifest does not name was left by a save into this directory (docs/format.md, 1); but beside shards of a `model`,
    an adapter belongs to another program.
    """
    if name.removeprefix(f"{TRAINING}/").startswith(".") and name != TORCH_METADATA:
        return False
    groups = [one.name for one in shards] if name.startswith(ADAPTER) else [ADAPTER]
    left = is_shard(name) and any(group.startswith(ADAPTER) for group in groups)
    return name != MANIFEST and not left and all(name != one.name for one in shards)


class _Directory:
    def __init__(self, operation: str, place: str) -> None:
        self.place = place
        self._operation = operation

    def manifest(self) -> tuple[bytes, list[Item]]:
        return _manifest(self._operation, self.place)

    def beside(self, manifest: bytes, shards: Sequence[Item]) -> list[Item]:
        del manifest
        found = []
        try:
            for name, entry in self._entries():
                if not _is_beside(name, shards):
                    continue
                if "/" in name or not entry.is_file(follow_symlinks=False):
                    what = "is not a shard" if "/" in name else "is not a regular file"
                    raise ValueError(
                        f"{self._operation}: {visible(repr(entry.path))} {what}, and is not copied: move it elsewhere "
                        "first"
                    )
                found.append(Item(name, entry.stat(follow_symlinks=False).st_size, None, is_shard=False))
        except FileNotFoundError:
            return []
        return sorted(found)

    def path_of(self, name: str) -> str:
        return str(Path(self.place, name))

    def _entries(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        with os.scandir(self.place) as entries:
            for entry in entries:
                if entry.name != TRAINING or not entry.is_dir(follow_symlinks=False):
                    yield entry.name, entry
                    continue
                with os.scandir(entry.path) as inside:
                    yield from ((f"{TRAINING}/{one.name}", one) for one in inside)

    def open(self, item: Item) -> Opened:
        return _LocalFile(self.place, item)


class _LocalFile:
    """A file that is read past the page cache if possible."""

    def __init__(self, place: str, item: Item) -> None:
        self._path = str(Path(place, item.name))
        self._direct: int | None = None
        self._seek = Lock()
        try:
            self._file = open_inside(place, item.name, _FLAGS)
        except OSError as error:
            raise self._failed(error) from error
        try:
            about = os.fstat(self._file)
            _check(self._path, about, item.nbytes)
            self.identity: tuple[int, int] | None = (about.st_dev, about.st_ino)
            if _DIRECT and item.nbytes >= _SMALL:
                self._direct = _open_direct(place, item.name, about)
        except BaseException:
            self.close()
            raise

    def read_into(self, start: int, memory: Bytes) -> None:
        """See :class:`Opened`."""
        done = 0
        while done < len(memory):
            try:
                got = self._read(start + done, memory[done:])
            except OSError as error:
                raise self._failed(error) from error
            if not got:
                raise corrupt(self._path, "it became shorter while it was read")
            done += got

    def _read(self, start: int, memory: Bytes) -> int:
        if not hasattr(os, "preadv"):  # Windows
            with self._seek:
                os.lseek(self._file, start, os.SEEK_SET)
                data = os.read(self._file, len(memory))
            memory[: len(data)] = np.frombuffer(data, np.uint8)
            return len(data)
        whole = len(memory) // _PAGE * _PAGE
        if self._direct is not None and whole and start % _PAGE == 0 and memory.ctypes.data % _PAGE == 0:
            try:
                return os.preadv(self._direct, [memory[:whole].data], start)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        got = os.preadv(self._file, [memory.data], start)
        if got >= _SMALL and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, start, got, os.POSIX_FADV_DONTNEED)
        return got

    def _failed(self, error: OSError) -> Exception:
        if isinstance(error, FileNotFoundError):
            return corrupt(self._path, "the file is missing")
        if error.errno == errno.ELOOP:
            return corrupt(self._path, "the file is a symbolic link, which is not followed")
        return type(error)(error.errno, f"cannot read `{visible(self._path)}`: {error.strerror}", self._path)

    def close(self) -> None:
        """See :class:`Opened`."""
        for file in (self._file, self._direct):
            if file is not None:
                os.close(file)


def _check(path: str, about: os.stat_result, nbytes: int) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise corrupt(path, "not a regular file")
    if about.st_size != nbytes:
        raise corrupt(path, f"it has {about.st_size} bytes, expected {nbytes}")


def _open_direct(place: str, name: str, about: os.stat_result) -> int | None:
    """The same file for direct I/O; None if direct I/O is refused."""
    try:
        file = open_inside(place, name, _FLAGS | _DIRECT)
    except OSError:
        return None
    if os.path.samestat(os.fstat(file), about):
        return file
    os.close(file)
    return None


class _Store:
    def __init__(self, operation: str, place: str) -> None:
        self.place = place
        self._operation = operation
        self._objects = Objects.at(operation, place)
        self._layout = Layout(b"", {})

    def manifest(self) -> tuple[bytes, list[Item]]:
        return _manifest(self._operation, self.place)

    def beside(self, manifest: bytes, shards: Sequence[Item]) -> list[Item]:
        self._layout = Layout(manifest, self._objects.sizes())
        return [
            Item(file, stored.nbytes, self._objects.sum_of(stored.name), is_shard=False)
            for file, stored in sorted(self._layout.files.items())
            if "/" not in file and _is_beside(file, shards)
        ]

    def path_of(self, name: str) -> str:
        return f"{self.place}/{self._layout.name_of(name)}"

    def open(self, item: Item) -> Opened:
        return _Object(self._objects, self._layout.name_of(item.name), item)


class _Object:
    identity: tuple[int, int] | None = None

    def __init__(self, objects: Objects, name: str, item: Item) -> None:
        self._objects = objects
        self._name = name
        url = f"{objects.url}/{name}"
        try:
            nbytes = objects.size(name)
        except FileNotFoundError as error:
            raise corrupt(url, "the object is missing") from error
        if nbytes != item.nbytes:
            raise corrupt(url, f"it has {nbytes} bytes, expected {item.nbytes}")

    def read_into(self, start: int, memory: Bytes) -> None:
        """See :class:`Opened`."""
        if len(memory):
            self._objects.read_into(self._name, [(start, memory.data)])

    def close(self) -> None:
        """See :class:`Opened`."""


class Summed:
    """The checksums of a file's blocks, in any order, compared when all have arrived."""

    def __init__(self, path: str, item: Item, block: int) -> None:
        self.blocks = [(start, min(block, item.nbytes - start)) for start in range(0, max(item.nbytes, 1), block)]
        self._path = path
        self._item = item
        self._sums = [0] * len(self.blocks)

    def put(self, number: int, crc: int) -> None:
        """Add the checksum of a block."""
        self._sums[number] = crc

    def found(self) -> str:
        """The checksum of the whole file, as 16 digits."""
        lengths = (nbytes for _, nbytes in self.blocks)
        return _crc64.to_hex(_crc64.joined(_crc64.of(b""), zip(self._sums, lengths, strict=True)))

    def compare(self) -> None:
        """Raise CorruptCheckpointError unless the file has its checksum."""
        found = self.found()
        if self._item.crc is not None and found != self._item.crc:
            raise corrupt(self._path, f"checksum is {found}, expected {self._item.crc}")
