"""Checkpoints as directories: listed and removed, with the leftovers of killed saves."""

from __future__ import annotations

import builtins
import contextlib
import errno
import math
import os
import re
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import cast

from fastckpt import _core
from fastckpt._core import ListedCheckpoint
from fastckpt._paths import AnyPath, is_url, path_of
from fastckpt._stores.urls import place_of
from fastckpt._text import natural
from fastckpt._units import LEAST_AGE, seconds
from fastckpt.exceptions import CorruptCheckpointError

from . import in_flight
from .checkpoint import Checkpoint

__all__ = ["Leftover", "ListedCheckpoint", "clean", "leftovers", "list", "remove", "remove_leftover"]


#: Names of files that a file system keeps for a process that has them open, and of leftovers of a killed save.
_REMNANT = re.compile(r"\.nfs0.*|\.fuse_hidden.*|\.fastckpt-carried").fullmatch


def remove(path: AnyPath, *, force: bool = False, files: Collection[str] = ()) -> None:
    """Remove the checkpoint at ``path``.

    The checkpoint loses its name in one durable step, and then its files: half of it is never visible. If the process
    is killed in between, files stay under a temporary name; the next save into the same parent directory removes them.
    The call does not wait for readers. An old copy of the checkpoint that a killed save left under a temporary name,
    and that a load would restore, is removed as well. At a URL the manifest is removed first, which ends the
    checkpoint; a second call removes what a killed call left.

    Args:
        path: the checkpoint's directory, not a symbolic link to it, or its URL in an object store (docs/stores.md).
            The removal waits for an asynchronous save in flight to it.
        force: also remove other plain files in it, such as a ``config.json`` beside the shards. By default, they are an
            error that names the first of them. Directories and links in it are always an error.
        files: names of further files of the checkpoint, which its save added with ``files=``.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        OSError: the storage failed. With ``errno.ENOTEMPTY``: ``path`` is not a checkpoint, or it holds other files;
            nothing was removed.
        ImportError: ``path`` is a URL, and the package obstore cannot be imported.
        ValueError: ``path`` is a URL of an unknown store.

    Example:
        >>> import fastckpt
        >>> _ = fastckpt.save({"step": 7}, "runs/step-7")
        >>> fastckpt.remove("runs/step-7")
        >>> fastckpt.list("runs")
        []
    """
    target = place_of("remove", path)
    if is_url(target):
        from fastckpt._stores import checkpoints  # noqa: PLC0415 - for a URL alone

        checkpoints.remove(target, force=bool(force), files=files)
        return
    in_flight.wait_for_paths(target)
    if files and not force and (found := strange_in(target, files)):
        why = f"remove: it holds `{found[0]}`, which is not part of the checkpoint: move that elsewhere"
        raise OSError(errno.ENOTEMPTY, why, target)
    _core.remove(target, [*files], bool(force))


def strange_in(path: str, files: Collection[str]) -> builtins.list[str]:
    """The files in the checkpoint at a path that are not part of it, by relative names.

    Args:
        path: the directory of the checkpoint.
        files: the names of the files given with ``files=``.

    Raises:
        NotACheckpointError: the path holds no checkpoint.
        OSError: the directory cannot be read.
    """
    from fastckpt._portable.limits import TRAINING  # noqa: PLC0415 - the portable reader is seldom needed
    from fastckpt._portable.listing import strangers  # noqa: PLC0415 - it is seldom needed

    shards: Collection[str] | None = None
    # In a damaged checkpoint, the names decide which files are part of it.
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
    """List the checkpoints in ``directory``, by their steps if their names differ in one number only.

    Otherwise they are sorted by the time at which their saves began; a damaged checkpoint whose time is unknown comes
    first.

    A checkpoint that is being written is not listed, nor is one below a symbolic link. The call reads each manifest and
    compares the lengths of the files; ``verify`` compares contents.

    Args:
        directory: the directory that holds the checkpoints, or a URL in an object store, below which they are.

    Returns:
        For each: name, path, when its save began (seconds since 1970; None if unknown), bytes of its files, whether it
        is an old checkpoint that a killed save moved aside, and its damage in words, or None.

    Raises:
        FileNotFoundError: there is no such directory.
        ImportError: ``directory`` is a URL, and the package obstore cannot be imported.
        OSError: the directory cannot be read.
        ValueError: ``directory`` is a URL of an unknown store.

    Example:
        >>> import fastckpt
        >>> for step in (1000, 2000):
        ...     _ = fastckpt.save({"step": step}, f"runs/step-{step}")
        >>> [one.name for one in fastckpt.list("runs")]
        ['step-1000', 'step-2000']
    """
    place = place_of("list", directory)
    if is_url(place):
        from fastckpt._stores import checkpoints  # noqa: PLC0415 - for a URL alone

        found = cast("builtins.list[ListedCheckpoint]", checkpoints.list_checkpoints(place))
    else:
        found = _core.list_checkpoints(place)
    forms = {re.sub("[0-9]+", "0", one.name) for one in found}
    numbers = {tuple(re.findall("[0-9]+", one.name)) for one in found}
    if len(forms) == 1 and sum(len({*column}) > 1 for column in zip(*numbers, strict=True)) <= 1:
        return sorted(found, key=lambda one: natural(one.name))
    return sorted(found, key=lambda one: (one.created or 0.0, natural(one.name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A directory that a killed save, removal or copy left among checkpoints, under a temporary name.

    Attributes:
        name: the name of the directory.
        checkpoint: the name of the checkpoint that it belongs to.
        host: the machine it was made on; empty for an unfinished copy.
        state: ``alive`` (its writer is running), ``dead`` (no longer needed: the next save there removes it),
            ``unknown`` (its writer may be running, perhaps on another machine), ``kept`` (an old checkpoint that a save
            was about to replace, or the save itself) or ``foreign`` (no checkpoint; a killed save had moved it aside).
        bytes: bytes of its files.
        changed: seconds since 1970 when something was last made, removed or renamed in it, or written to a file of it.
        due: whether this call of :func:`fastckpt.clean` removes it, unless ``dry_run``.
        removed: whether it was removed.
        error: why it could not be removed, or None.
    """

    name: str
    checkpoint: str
    host: str
    state: str
    bytes: int
    changed: int
    due: bool = False
    removed: bool = False
    error: OSError | None = None


def clean(
    directory: AnyPath, *, older_than: float | str | None = None, dry_run: bool = True
) -> builtins.list[Leftover]:
    """Remove the leftovers of killed saves, removals and copies in ``directory``; by default, only list them.

    It removes ``dead`` leftovers, and with ``older_than`` also old ``unknown`` or ``kept`` ones. It never removes the
    files of a running save, nor ``foreign`` leftovers.

    Args:
        directory: the directory that holds the checkpoints.
        older_than: also remove leftovers whose writer may still run, and old checkpoints that are kept, if nothing in
            them has changed for that time: seconds, or a string with a unit (``"2h"``); 0 for any age. Pass more than
            the longest pause of a save.
        dry_run: change nothing.

    Returns:
        All leftovers by name: which are due for removal, and which were removed. A storage error is in ``error`` of its
        leftover.

    Raises:
        FileNotFoundError: there is no such directory.
        OSError: the directory cannot be read.
        ValueError: ``directory`` is a URL, or ``older_than`` is not a duration.

    Example:
        >>> import fastckpt
        >>> fastckpt.clean(".", older_than="2h", dry_run=False)
        []
    """
    place = path_of("clean", directory)
    age = math.inf if older_than is None else 0.0
    if older_than not in {None, 0, "0"}:
        age = seconds("clean: older_than", older_than, LEAST_AGE)
    found = []
    for one in leftovers(place):
        old = time.time() - one.changed >= age
        due = one.state == "dead" or (old and one.state in {"unknown", "kept"})
        removed, error = False, None
        if due and not dry_run:
            try:
                removed = remove_leftover(place, one.name, force=old)
            except OSError as failed:
                error = failed
        found.append(replace(one, due=due, removed=removed, error=error))
    return found


def leftovers(directory: str) -> builtins.list[Leftover]:
    """The leftovers in a directory, by name."""
    names = ("name", "checkpoint", "host", "state", "bytes", "changed")
    found = [Leftover(**{name: getattr(one, name) for name in names}) for one in _core.leftovers(directory)]
    return sorted(found, key=lambda one: one.name)


def remove_leftover(directory: str, name: str, *, force: bool = False) -> bool:
    """Remove one of the :func:`leftovers` if its state is ``dead``, or with ``force`` ``unknown`` or ``kept``.

    Returns:
        Whether it was removed.
    """
    return _core.remove_leftover(directory, name, force)
