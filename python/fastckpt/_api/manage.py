"""Checkpoints as directories: listed and removed, with the leftovers of killed saves."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import re
from collections.abc import Collection
from typing import cast

from fastckpt import _core
from fastckpt._core import Leftover, ListedCheckpoint
from fastckpt._paths import AnyPath, is_url, path_of
from fastckpt._stores.urls import place_of
from fastckpt._text import natural
from fastckpt.exceptions import CorruptCheckpointError

from . import in_flight
from .checkpoint import Checkpoint

__all__ = ["Leftover", "ListedCheckpoint", "leftovers", "list", "remove", "remove_leftover"]


#: Names of files that a file system keeps because a process has them open, and of leftovers of a killed save.
_REMNANT = re.compile(r"\.nfs0.*|\.fuse_hidden.*|\.fastckpt-carried").fullmatch


def remove(path: AnyPath, *, everything: bool = False, files: Collection[str] = ()) -> None:
    """Remove the checkpoint at ``path``.

    It loses its name in one durable step, and its files after that: half of it is never visible. If the process is
    killed in between, files stay under a temporary name, which the next save into the same parent directory removes.
    Readers of the checkpoint are not waited for. An old copy of it that a killed save left under a temporary name, and
    that a load would restore, is removed as well. At a URL the manifest is removed first, and the checkpoint with it; a
    second call removes what a killed one has left.

    Args:
        path: the checkpoint's directory, not a symbolic link to it, or its URL in an object store (docs/stores.md). An
            asynchronous save to it in flight is waited for.
        everything: also remove other plain files in it, such as a ``config.json`` beside the shards. By default, they
            raise an error that names the first one. Directories and links in it always do.
        files: names of further files that belong to it, those that ``files=`` of its save has put there.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        OSError: the storage failed. With ``errno.ENOTEMPTY``: ``path`` is not a checkpoint, or it holds files that must
            stay, and nothing was removed.
        ImportError: ``path`` is a URL, and the package obstore cannot be imported.
        ValueError: ``path`` is a URL of an unknown store.
    """
    target = place_of("remove", path)
    if is_url(target):
        from fastckpt._stores import checkpoints  # noqa: PLC0415 - for a URL alone

        checkpoints.remove(target, everything=bool(everything), files=files)
        return
    in_flight.wait_for_paths(target)
    if files and not everything and (found := strange_in(target, files)):
        why = f"remove: it holds `{found[0]}`, which is not part of it: move that elsewhere"
        raise OSError(errno.ENOTEMPTY, why, target)
    _core.remove(target, [*files], bool(everything))


def strange_in(path: str, files: Collection[str]) -> builtins.list[str]:
    """The files of others in the checkpoint at a path, by relative names.

    Args:
        path: its directory.
        files: the names of the files given with ``files=``.

    Raises:
        NotACheckpointError: it is none.
        OSError: it cannot be read.
    """
    from fastckpt._portable.limits import TRAINING  # noqa: PLC0415 - what reads without the core is seldom needed
    from fastckpt._portable.listing import strangers  # noqa: PLC0415 - likewise

    shards: Collection[str] | None = None
    # In a damaged checkpoint, the names decide which files are its own.
    with contextlib.suppress(CorruptCheckpointError), Checkpoint(path) as checkpoint:
        shards = checkpoint.shards
    names: builtins.list[str] = []
    # Files given with ``files=`` are plain files.
    odd: set[str] = set()
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name == TRAINING and entry.is_dir(follow_symlinks=False):
                names += [f"{TRAINING}/{name}" for name in os.listdir(entry.path) if not _REMNANT(name)]  # noqa: PTH208 - names
            elif not _REMNANT(entry.name):
                names.append(entry.name)
                if not entry.is_file(follow_symlinks=False):
                    odd.add(entry.name)
    return strangers(names, {*files} - odd, shards)


def list(directory: AnyPath) -> builtins.list[ListedCheckpoint]:
    """List the checkpoints in ``directory``, sorted by name, ``step-900`` before ``step-1000``.

    A checkpoint that is being written is not listed, nor is one below a symbolic link. The manifest of each is read,
    and the lengths of its files are compared; ``verify`` compares contents.

    Args:
        directory: the directory that holds the checkpoints, or a URL in an object store, below which they are.

    Raises:
        FileNotFoundError: there is no such directory.
        ImportError: ``directory`` is a URL, and the package obstore cannot be imported.
        OSError: it cannot be read.
        ValueError: ``directory`` is a URL of an unknown store.
    """
    place = place_of("list", directory)
    if is_url(place):
        from fastckpt._stores import checkpoints  # noqa: PLC0415 - for a URL alone

        found = cast("builtins.list[ListedCheckpoint]", checkpoints.list_checkpoints(place))
    else:
        found = _core.list_checkpoints(place)
    return sorted(found, key=lambda one: natural(one.name))


def leftovers(directory: AnyPath) -> builtins.list[Leftover]:
    """List leftovers of killed saves and removals in ``directory``, which have temporary names, sorted by name.

    Files of a running save are listed as well, with the state ``alive``.

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
