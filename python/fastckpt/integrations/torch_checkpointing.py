"""torch_checkpointing's files are written whole and durable, and are verified when they are read.

CheckpointManager.Config(storage_config=fastckpt.integrations.torch_checkpointing.StorageConfig())
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_checkpointing.storage import base_storage, filesystem

import fastckpt
from fastckpt._api.io import check_io
from fastckpt._durable import rename, sync
from fastckpt._paths import refuse_url

from .torch import unsummed

__all__ = ["StorageConfig"]


@dataclass
class StorageConfig(base_storage.StorageConfig):  # type: ignore[misc]
    """Configures local storage: files by :func:`fastckpt.open_write`, and durable directories and renames.

    Args:
        io: how bytes move: a :class:`fastckpt.IO`, or the name of an engine. Unless it has ``verify=False``, a file is
            read in full and compared with its checksum each time that it is opened. A ``bandwidth_limit`` applies to
            each file, and torch_checkpointing writes several at a time.

    Raises:
        TypeError: ``io`` has another type.
        ValueError: ``io`` names an unknown engine.

    Example:
        >>> from fastckpt.integrations.torch_checkpointing import StorageConfig
        >>> config = StorageConfig(io="buffered")  # CheckpointManager.Config(storage_config=config)
    """

    io: Any = "auto"

    def __post_init__(self) -> None:
        self.io = check_io("StorageConfig", self.io)

    def create_storage(self) -> Any:
        """Make the storage; torch_checkpointing also calls this in the process that writes in the background."""
        return _Storage(self)


class _Storage(filesystem.LocalFileSystemStorage):  # type: ignore[misc]
    #: Many threads verify a file when it is opened; after that, reading is a copy from the page cache.
    mmap_fill_workers = 1

    def __init__(self, config: StorageConfig) -> None:
        super().__init__(filesystem.LocalFileSystemStorageConfig())
        self._io = config.io

    def stream_read(self, path: Path, read_args: Any = None) -> Any:  # noqa: ARG002 - their interface
        return fastckpt.open_read(path, verify=self._io.verify)

    def stream_write(self, path: Path) -> Any:
        return fastckpt.open_write(path, io=self._io)

    @contextmanager
    def get_write_stream(self, path: Path, data: object) -> Iterator[Any]:  # noqa: ARG002
        with self.stream_write(path) as file, unsummed:
            yield file

    def write(self, path: Path, data: Any) -> None:
        with self.stream_write(path) as file:
            file.write(data)

    def mkdir(self, path: Path, recursive: bool = True) -> None:  # noqa: FBT001, FBT002 - their interface
        refuse_url("mkdir", os.fspath(path))
        missing = [one for one in (Path(path), *Path(path).parents) if not one.exists()]
        super().mkdir(path, recursive)
        for one in missing:
            sync(one.parent)

    def rename(self, src_path: Path, dst_path: Path, *_: Any, **__: Any) -> None:
        try:
            rename(src_path, dst_path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
                raise
            what = f"rename {src_path}: a file can replace only a file, and a directory only an empty directory"
            raise FileExistsError(errno.EEXIST, what, str(dst_path)) from error
