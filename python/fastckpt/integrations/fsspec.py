"""Files of fsspec that are whole and durable, and are verified when they are read.

fsspec.open("fastckpt:///shared/runs/state.pt", "wb")  # docs/files.md
"""

from __future__ import annotations

import io as _io
import shutil
import sys
from typing import Any

from fsspec.implementations.local import LocalFileSystem

import fastckpt
from fastckpt._api.io import check_io
from fastckpt._durable import rename

__all__ = ["FileSystem"]


class _Files(LocalFileSystem):  # type: ignore[misc]
    def __init__(self, *, io: Any = "auto", verify: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self._io, self._verify = check_io("FileSystem", io), bool(verify)

    def _open(self, path: str, mode: str = "rb", *_: Any, autocommit: bool = True, **options: Any) -> Any:
        if mode == "rb":
            return fastckpt.open_read(path, verify=options.get("verify", self._verify))
        if mode != "wb":
            raise ValueError(f"open: {path}: mode {mode!r} changes a file in place: write all of it, with mode 'wb'")
        return _File(fastckpt.open_write(path, io=self._io), commits=autocommit)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        return super().cat_file(path, start, end, **{"verify": self._verify and not start and end is None, **options})

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        if not self.isfile(path1):
            super().cp_file(path1, path2, **options)
            return
        with self.open(path1, "rb") as source, self.open(path2, "wb") as target:
            shutil.copyfileobj(source, target, 16 << 20)

    def mv(self, path1: str, path2: str, *_: Any, **__: Any) -> None:
        rename(self._strip_protocol(path1), self._strip_protocol(path2))


class FileSystem(_Files):
    """The local files, written by :func:`fastckpt.open_write` and read by :func:`fastckpt.open_read`.

    fsspec also closes a file after an error. So a file does not get its path if an exception arose after it was opened
    and is being handled when it is closed. A file of a transaction gets its path when the transaction is complete.

    Args:
        io: how bytes are written: a :class:`fastckpt.IO`, or the name of an engine.
        verify: whether a whole file is verified when it is opened. ``cat_file`` of a range verifies nothing.
        options: arguments of ``LocalFileSystem``.

    Raises:
        TypeError: ``io`` has another type.
        ValueError: ``io`` names an unknown engine.

    Example:
        >>> from fastckpt.integrations.fsspec import FileSystem
        >>> files = FileSystem(io="buffered")
        >>> files.pipe("notes.bin", b"whole or not at all")
        >>> files.cat("notes.bin")
        b'whole or not at all'
    """

    protocol = "fastckpt"


class _File(_io.BufferedIOBase):
    """Commits or discards the file that it wraps when it is closed."""

    def __init__(self, file: Any, *, commits: bool) -> None:
        self._commits, self._handled = commits, sys.exc_info()[1]
        self.commit, self.discard = file.close, file.discard
        self.write, self.tell = file.write, file.tell  # type: ignore[method-assign]

    def __del__(self) -> None:
        """Do nothing: a file that was not closed is not whole."""

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            super().close()
            if sys.exc_info()[1] not in (None, self._handled):
                self.discard()
            elif self._commits:
                self.commit()
