"""The files of a checkpoint in an object store, for the portable reader."""

from __future__ import annotations

import errno
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fastckpt._portable.limits import MANIFEST, MAX_MANIFEST
from fastckpt._portable.manifest import corrupt
from fastckpt._text import visible
from fastckpt.exceptions import NotACheckpointError

from .layout import Layout
from .objects import PART

if TYPE_CHECKING:
    from .objects import Objects


#: How many names a message lists.
_SHOWN = 5


class StoredFiles:
    """The objects of a checkpoint; see :class:`fastckpt._portable.files.Files`."""

    #: A request waits for the network rather than for a processor.
    threads = 16
    span, gap = PART, 1 << 20
    why = "object store"
    fallback = "an object store is read over the network"
    #: A failing network is not damage.
    gone: type[OSError] = FileNotFoundError

    def __init__(self, objects: Objects) -> None:
        self.path = objects.url
        self._objects = objects
        #: The beginning of the manifest that was read first: even if it is replaced, these are the files of that save.
        self._seal: bytes | None = None
        self._layout: Layout | None = None
        self._lock = Lock()

    def path_of(self, name: str) -> str:
        """See :class:`Files`."""
        return f"{self.path}/{name if self._layout is None else self._layout.name_of(name)}"

    def check(self) -> None:
        """Nothing yet: to read the manifest shows it."""

    def manifest(self, most: int | None = None) -> bytes:
        """See :class:`Files`."""
        try:
            if most is not None:
                found = bytes(self._objects.read(MANIFEST, 0, most))
            else:
                found = self._objects.read_all(MANIFEST, MAX_MANIFEST)
        except FileNotFoundError as error:
            folders, here = self._objects.children()
            if not folders and not here:
                text = f"cannot open checkpoint `{self.path}`: nothing is there"
                raise FileNotFoundError(errno.ENOENT, text, self.path) from error
            what = f"it holds no {MANIFEST}"
            if folders:
                more = "" if len(folders) <= _SHOWN else f" and {len(folders) - _SHOWN} more"
                what += f"; below it are {', '.join(folders[:_SHOWN])}{more}: give the URL of a checkpoint"
            raise NotACheckpointError(visible(f"{self.path} is not a checkpoint of fastckpt: {what}")) from error
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise corrupt(self.path_of(MANIFEST), error.strerror) from error
            raise
        if self._seal is None:
            self._seal = found
        return found

    def open(self, name: str) -> tuple[StoredFile, int]:
        """See :class:`Files`."""
        with self._lock:
            if self._layout is None:
                # One listing instead of a request for each shard.
                self._layout = Layout(self._seal or b"", self._objects.sizes())
        found = self._layout.files.get(name)
        if found is None:
            raise corrupt(self.path_of(name), "the file is missing")
        return StoredFile(self._objects, found.name), found.nbytes

    def map(self, name: str, length: int) -> NoReturn:
        """Objects cannot be mapped."""
        del length
        raise ValueError(f"`{self.path_of(name)}` is in an object store, and cannot be mapped")


class StoredFile:
    """An object that is read; see :class:`fastckpt._portable.files.File`."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self._name = name

    def read_at(self, offset: int, to: Any) -> int:
        """See :class:`File`."""
        return Range(self._objects, self._name, offset, offset + len(to)).read_at(offset, to)

    def ahead(self, start: int, end: int) -> Range:
        """The range, read by one request when it is first looked at."""
        return Range(self._objects, self._name, start, end)

    def close(self) -> None:
        """Nothing is open."""


class Range(StoredFile):
    """A range of an object, read by one request."""

    def __init__(self, objects: Objects, name: str, start: int, end: int) -> None:
        super().__init__(objects, name)
        self._start = start
        self._end = end
        self._data: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def read_at(self, offset: int, to: Any) -> int:
        """See :class:`File`."""
        if self._data is None:
            found = self._objects.read(self._name, self._start, self._end - self._start)
            self._data = np.frombuffer(found, np.uint8) if len(found) else np.empty(0, np.uint8)
        part = self._data[offset - self._start :][: len(to)]
        # numpy lets other threads run meanwhile.
        np.copyto(np.frombuffer(to, np.uint8)[: len(part)], part)
        return len(part)
