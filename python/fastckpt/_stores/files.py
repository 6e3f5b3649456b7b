"""The files of a checkpoint in an object store, for the core and for the portable reader."""

from __future__ import annotations

import errno
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fastckpt._portable.limits import MANIFEST, MAX_MANIFEST
from fastckpt._portable.manifest import corrupt
from fastckpt._tensors.memory import address_of
from fastckpt._text import visible
from fastckpt.exceptions import NotACheckpointError

from .layout import Layout

if TYPE_CHECKING:
    from .objects import Objects


#: The most names in a message.
_SHOWN = 5


class StoredFiles:
    """The objects of a checkpoint; see ``_core.Store`` and :class:`fastckpt._portable.files.Files`."""

    #: A request waits for the network, not for a processor.
    threads = 16
    straight = 1 << 20
    why = "object store"
    fallback = "an object store is read over the network"
    #: A failing network is not damage.
    gone: type[OSError] = FileNotFoundError

    def __init__(self, objects: Objects) -> None:
        self.path = objects.url
        self._objects = objects
        #: The beginning of the first manifest that was read: even if it is replaced, these are the files of that save.
        self._seal: bytes | None = None
        self._layout: Layout | None = None
        self._lock = Lock()

    def path_of(self, name: str) -> str:
        """See :class:`Files`."""
        return f"{self.path}/{name if self._layout is None else self._layout.name_of(name)}"

    def check(self) -> None:
        """Do nothing: reading the manifest checks it."""

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

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it is missing."""
        found = self._listed().files.get(name)
        return None if found is None else found.nbytes

    def read(self, name: str, start: int, nbytes: int) -> tuple[int, int, Any]:
        """``nbytes`` of a file, beginning at ``start``, by one request; fewer if the file ends earlier.

        Returns:
            Their address, their number, and the object that keeps them alive.
        """
        data = self.array(name, start, nbytes)
        return address_of(data), len(data), data

    def array(self, name: str, start: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Read as :meth:`read` does, into a read-only array."""
        found = self._objects.read(self._listed().name_of(name), start, nbytes)
        return np.frombuffer(found, np.uint8) if len(found) else np.empty(0, np.uint8)

    def open(self, name: str) -> tuple[StoredFile, int]:
        """See :class:`Files`."""
        size = self.size(name)
        if size is None:
            raise corrupt(self.path_of(name), "the file is missing")
        return StoredFile(self, name), size

    def map(self, name: str, length: int) -> NoReturn:
        """Objects cannot be mapped."""
        del length
        raise ValueError(f"`{self.path_of(name)}` is in an object store, and cannot be mapped")

    def _listed(self) -> Layout:
        """The layout, from one listing instead of a request for each shard."""
        with self._lock:
            if self._layout is None:
                self._layout = Layout(self._seal or b"", self._objects.sizes())
            return self._layout


class StoredFile:
    """An object that the portable reader reads; see :class:`fastckpt._portable.files.File`."""

    def __init__(self, files: StoredFiles, name: str) -> None:
        self._files = files
        self._name = name

    def read_at(self, offset: int, to: Any) -> int:
        """See :class:`File`."""
        data = self._files.array(self._name, offset, len(to))
        # numpy releases the GIL.
        np.copyto(np.frombuffer(to, np.uint8)[: len(data)], data)
        return len(data)

    def close(self) -> None:
        """Do nothing: nothing is open."""
