"""The checkpoints of a framework in a directory: the last save, the one to resume from, and the ones to remove."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import fastckpt
from fastckpt._foreign import writer_of
from fastckpt._portable.limits import MANIFEST
from fastckpt.exceptions import CheckpointError, CorruptCheckpointError, NotACheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

LOG = logging.getLogger("fastckpt")
#: The key in the metadata for the digests of the files beside the weights.
_DIGESTS = "digests"
#: Saves in the background, by their owner; and the work that follows once they are durable.
_saves: WeakKeyDictionary[Any, tuple[Any, Callable[[], None]]] = WeakKeyDictionary()


def begin(owner: Any, pending: Any, then: Callable[[], None]) -> None:
    """Record that the next save of ``owner`` has begun; :func:`finish` calls ``then`` once it is durable."""
    _saves[owner] = pending, then


def finish(owner: Any) -> None:
    """Wait until the last save of ``owner`` is durable, and do the work that follows; raises its errors."""
    if owner in _saves:
        pending, then = _saves.pop(owner)
        pending.result()
        then()


def is_ours(path: Any) -> bool:
    """Whether this is the path of a checkpoint that fastckpt wrote."""
    return isinstance(path, (str, os.PathLike)) and Path(path, MANIFEST).is_file()


def digests(files: Mapping[str, str]) -> dict[str, Any]:
    """Metadata by which :func:`is_sound` checks these files, which the checksums of a checkpoint do not cover."""
    return {_DIGESTS: {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}}


def is_sound(path: str) -> bool:
    """Whether a checkpoint of fastckpt is undamaged, including the files beside the weights that have digests."""
    try:
        with fastckpt.open(path) as checkpoint:
            known = (checkpoint.metadata or {}).get(_DIGESTS, {})
        found = {name: hashlib.sha256(Path(path, name).read_bytes()).hexdigest() for name in known}
        return found == known and fastckpt.verify(path).ok
    except (CorruptCheckpointError, NotACheckpointError, OSError):
        return False


def clear(path: str) -> None:
    """Move an incomplete checkpoint aside, which a save would refuse to replace, and :func:`sweep`."""
    entries = list(Path(path).iterdir()) if Path(path).is_dir() else []
    if any(one.is_dir() or one.name == MANIFEST or writer_of(one.name) for one in entries):
        try:
            fastckpt.open(path).close()
        except (CorruptCheckpointError, NotACheckpointError, FileNotFoundError):
            move_aside(path)
    sweep(str(Path(path).parent))


def newest_first(directory: Any, prefix: str, file: str) -> list[str]:
    """The directories whose names are ``prefix`` and a number, and that have this file; by falling number."""
    found = {one.parent for one in Path(directory).glob(f"{prefix}*/{file}")}
    steps = {int(step): str(one) for one in found if (step := one.name.removeprefix(prefix)).isdecimal()}
    return [steps[step] for step in sorted(steps, reverse=True)]


def newest_that_verifies(paths: Iterable[str]) -> str | None:
    """The first of these checkpoints that is not damaged; only files of fastckpt are checked."""
    for path in paths:
        if not is_ours(path) or is_sound(path):
            return path
        LOG.warning("fastckpt: %s is damaged, and the one before it is used: run fastckpt verify for details", path)
    return None


def keep(limit: int | None, protected: set[str | None], paths: Sequence[str]) -> None:
    """Remove the oldest of these ``paths``, given oldest first, until ``limit`` are left, but no protected one."""
    others = [path for path in paths if path not in protected]
    beyond = 0 if limit is None or limit <= 0 else max(0, len({*paths}) - limit)
    for path in others[:beyond]:
        remove(path)


def remove(path: str) -> None:
    """Remove a directory of any program with all its contents; what cannot be removed stays.

    The directory loses its name first, so that a kill leaves nothing that looks like a newer checkpoint.
    """
    try:
        fastckpt.remove(path, force=True)
    except (CheckpointError, OSError):
        move_aside(path)
        sweep(str(Path(path).parent))


def move_aside(path: str) -> None:
    """Give ``path`` a hidden name, under which :func:`sweep` removes it. If it cannot be renamed, it stays."""
    with suppress(OSError):
        Path(path).rename(Path(path).with_name(f".{Path(path).name}.aside-{os.getpid()}"))


def sweep(directory: str) -> None:
    """Remove directories that were moved aside, even by a process that was killed."""
    for path in Path(directory).glob(".*.aside-*"):
        shutil.rmtree(path, ignore_errors=True)
