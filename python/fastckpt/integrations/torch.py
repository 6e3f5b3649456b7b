"""``torch.save`` and ``torch.load`` of a path write and read files that are whole, durable and verified.

    fastckpt.integrations.torch.install()

The files are torch's own (docs/files.md).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID251 - the framework of this door

import fastckpt
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed
from fastckpt._paths import is_url

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["install"]

_installed = Installed()


def install(*, io: Any = "auto", verify: bool = True) -> Installation:
    """Make ``torch.save`` and ``torch.load`` of a path use :func:`fastckpt.open_write` and ``open_read``.

    A saved file is in torch's format, and appears at its path whole and durable, or not at all. Threads write it past
    the page cache. torch's CRC-32, which is slow and which ``torch.load`` never checks, is left out; fastckpt stores
    its checksum with the file, and ``torch.load`` checks it. torch itself writes to file objects, pipes and devices, to
    files that have several names, another owner or an ACL, and where no file can be made; and torch itself reads files
    without this checksum.

    Args:
        io: how bytes are written: a :class:`fastckpt.IO`, or the name of an engine.
        verify: whether ``torch.load`` first reads and verifies all bytes, even with ``mmap=True``.

    Returns:
        A context manager that ends the installation, as ``uninstall`` does. Otherwise it lasts as long as the process.

    Raises:
        TypeError: ``io`` has another type.
        ValueError: ``io`` names an unknown engine.

    Example:
        >>> import fastckpt, torch
        >>> with fastckpt.integrations.torch.install():
        ...     torch.save({"step": 7}, "state.pt")
        ...     torch.load("state.pt")
        {'step': 7}
    """
    ours = [(owner, one.__name__[1:], one) for owner in (torch.serialization, torch) for one in (_save, _load)]
    return _installed.begin({"io": check_io("install", io), "verify": bool(verify)}, ours)


def _may_replace(f: Any) -> bool:
    """Whether a call names a file that a new one may replace, or a place where a new file may be made.

    torch writes into an existing file. If that file has more names or another owner, a new one would not be equivalent.
    """
    if not isinstance(f, (str, os.PathLike)) or is_url(os.fspath(f)):
        return False
    path = os.path.realpath(f)
    if not os.access(Path(path).parent, os.R_OK | os.W_OK | os.X_OK):  # or the directory is missing
        return False
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        return True
    own = about.st_nlink == 1 and about.st_uid == os.geteuid() and not os.path.ismount(path)
    return stat.S_ISREG(about.st_mode) and own and os.access(path, os.W_OK) and not _has_acl(path)


def _has_acl(path: str) -> bool:
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except OSError:  # the file system has no ACLs
        return False


def _save(options: dict[str, Any], theirs: Callable[..., Any], obj: Any, f: Any, *args: Any, **more: Any) -> None:
    skips = getattr(getattr(torch.serialization, "_serialization_tls", None), "skip_data", False)  # torch then seeks
    if skips or not _may_replace(f):
        theirs(obj, f, *args, **more)
        return
    with fastckpt.open_write(f, io=options["io"]) as file, unsummed:
        theirs(obj, file, *args, **more)


def _load(options: dict[str, Any], theirs: Callable[..., Any], f: Any, *args: Any, **more: Any) -> Any:
    if options["verify"] and isinstance(f, (str, os.PathLike)) and os.path.isfile(f):  # noqa: PTH113 - torch says what is wrong
        fastckpt.open_read(f).close()
    return theirs(f, *args, **more)


class _Unsummed:
    """A context in which torch computes no CRC-32. All threads share torch's switch for it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._before = True

    def forget(self) -> None:
        """Restore torch's switch, and forget all threads in the context."""
        if self._inside:
            torch.serialization.set_crc32_options(self._before)
        self._lock, self._inside = Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.serialization.get_crc32_options()
                torch.serialization.set_crc32_options(False)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.serialization.set_crc32_options(self._before)


unsummed = _Unsummed()
# A forked child has none of the threads that were in the context.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=unsummed.forget)
