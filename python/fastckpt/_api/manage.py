"""Checkpoints as directories: listed and removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastckpt import _core
from fastckpt._core import ListedCheckpoint

from . import in_flight
from .options import path_of

if TYPE_CHECKING:
    import builtins

    from .options import AnyPath

__all__ = ["ListedCheckpoint", "list", "remove"]


def remove(path: AnyPath, *, everything: bool = False) -> None:
    """Remove the checkpoint at ``path``.

    It loses its name in one step, durably, and its files after that: nobody sees half of it. A process that is killed
    meanwhile leaves files under a temporary name, which the next save into the same parent directory removes. Nobody
    who reads the checkpoint at this moment is waited for. What a killed save has left of it under a temporary name,
    for a load to put back, goes as well.

    Args:
        path: the checkpoint's directory, not a symbolic link to it. An asynchronous save to it in flight is waited for.
        everything: also remove other plain files in it, such as a ``config.json`` laid beside the shards. By default
            they make this an error, which names the first. Directories and links in it always do.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        OSError: the storage failed; or, with ``errno.ENOTEMPTY``, ``path`` is no checkpoint, or holds what stays. Then
            nothing was removed.
        ValueError: ``path`` is a URL.
    """
    target = path_of("remove", path)
    in_flight.wait_for_path(target)
    _core.remove(target, bool(everything))


def list(directory: AnyPath) -> builtins.list[ListedCheckpoint]:
    """List the checkpoints in ``directory``, sorted by name.

    A checkpoint that is being written is not listed, nor is one below a symbolic link. Of each the manifest is read,
    and the lengths of its files are looked at; ``verify`` compares contents.

    Args:
        directory: the directory that holds the checkpoints.

    Raises:
        FileNotFoundError: there is no such directory.
        OSError: it cannot be read.
        ValueError: ``directory`` is a URL.
    """
    return _core.list_checkpoints(path_of("list", directory))
