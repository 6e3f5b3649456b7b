"""Checkpoints as directories: listed, removed, and what killed saves left of them."""

from __future__ import annotations

import builtins
from typing import cast

from fastckpt import _core
from fastckpt._core import Leftover, ListedCheckpoint
from fastckpt._paths import AnyPath, is_url, path_of
from fastckpt._stores import checkpoints
from fastckpt._stores.urls import place_of

from . import in_flight

__all__ = ["Leftover", "ListedCheckpoint", "leftovers", "list", "remove", "remove_leftover"]


def remove(path: AnyPath, *, everything: bool = False) -> None:
    """Remove the checkpoint at ``path``.

    It loses its name in one durable step, and its files after that: half of it is never visible. If the process is
    killed in between, files stay under a temporary name, which the next save into the same parent directory removes.
    Readers of the checkpoint are not waited for. A copy of it that a killed save left under a temporary name, for a
    load to put back, is removed as well. Of a URL the manifest goes first, and the checkpoint with it; what a killed
    removal leaves of it, another one removes.

    Args:
        path: the checkpoint's directory, not a symbolic link to it, or its URL in an object store (docs/stores.md). An
            asynchronous save to it in flight is waited for.
        everything: also remove other plain files in it, such as a ``config.json`` laid beside the shards. By default
            they make this an error, which names the first. Directories and links in it always do.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        OSError: the storage failed. With ``errno.ENOTEMPTY``: ``path`` is not a checkpoint, or it holds files that must
            stay, and nothing was removed.
        ImportError: ``path`` is a URL, and the package obstore cannot be imported.
        ValueError: ``path`` is a URL of no known store.
    """
    target = place_of("remove", path)
    if is_url(target):
        checkpoints.remove(target, everything=bool(everything))
        return
    in_flight.wait_for_path(target)
    _core.remove(target, bool(everything))


def list(directory: AnyPath) -> builtins.list[ListedCheckpoint]:
    """List the checkpoints in ``directory``, sorted by name.

    A checkpoint that is being written is not listed, nor is one below a symbolic link. Of each the manifest is read,
    and the lengths of its files are looked at; ``verify`` compares contents.

    Args:
        directory: the directory that holds the checkpoints, or a URL in an object store, below which they are.

    Raises:
        FileNotFoundError: there is no such directory.
        ImportError: ``directory`` is a URL, and the package obstore cannot be imported.
        OSError: it cannot be read.
        ValueError: ``directory`` is a URL of no known store.
    """
    place = place_of("list", directory)
    if is_url(place):
        return cast("builtins.list[ListedCheckpoint]", checkpoints.list_checkpoints(place))
    return _core.list_checkpoints(place)


def leftovers(directory: AnyPath) -> builtins.list[Leftover]:
    """List what killed saves and removals left in ``directory`` under temporary names, sorted by name.

    What a running save writes is listed as well, with the state ``alive``.

    Args:
        directory: the directory that holds the checkpoints.

    Raises:
        FileNotFoundError: there is no such directory.
        OSError: it cannot be read.
        ValueError: ``directory`` is a URL.
    """
    return sorted(_core.leftovers(path_of("leftovers", directory)), key=lambda one: one.name)


def remove_leftover(directory: AnyPath, name: str, *, force: bool = False) -> bool:
    """Remove one of the :func:`leftovers` if its state is ``dead``.

    Args:
        directory: the directory that holds the checkpoints.
        name: the leftover's name.
        force: also remove it if its state is ``unknown`` or ``kept``. One that is ``alive`` is never removed.

    Returns:
        Whether it was removed.

    Raises:
        OSError: the storage failed.
        ValueError: ``directory`` is a URL.
    """
    return _core.remove_leftover(path_of("remove_leftover", directory), name, force)
