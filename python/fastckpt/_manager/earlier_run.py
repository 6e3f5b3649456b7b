"""Detects traces of an earlier run in a directory without its checkpoints, so that no run starts anew by mistake."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastckpt._foreign import of_distributed

from .directory import LATEST, MANIFEST, PIN

if TYPE_CHECKING:
    from .directory import Directory
    from .prefix import Prefix

#: Other programs may also give checkpoints names with a number.
_numbered = re.compile(r"[0-9]").search
#: The file in which the system lists what should be mounted.
_MOUNTS = Path("/etc/fstab")


class Evidence(NamedTuple):
    """A trace of an earlier run.

    Attributes:
        what: the trace in words.
        is_foreign: whether it is a trace of another program's run.
    """

    what: str
    is_foreign: bool = False


def in_directory(directory: Directory) -> Evidence | None:
    """The traces of a run in a directory without checkpoints under the names of its manager."""
    path = Path(directory.path)
    mounts = _mount_points()
    for each in (path, *path.parents):
        if each.is_symlink() and not each.exists():
            return Evidence(f"{each} is a symbolic link to {each.readlink()}, which is missing: is a disk not mounted?")
        if str(each) in mounts and not each.is_mount():
            return Evidence(f"{_MOUNTS} names {each}, where nothing is mounted")
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries)
    except FileNotFoundError:
        return None
    foreign: Evidence | None = None
    for name in names:
        if name.startswith("."):
            step = directory.names.step_of(name[1:].partition(".copy-")[0])
            foreign = foreign or (None if step is None else Evidence(f"{name} is a part of a checkpoint"))
            continue
        if _numbered(name) and (path / name / MANIFEST).exists():
            return Evidence(f"{name} is a checkpoint whose name does not fit name= of the manager")
        what = of_distributed(path / name)
        foreign = foreign or (Evidence(f"{name}: {what}", is_foreign=True) if what else None)
    return foreign or _small(names)


def in_store(prefix: Prefix) -> Evidence | None:
    """The traces of a run below a URL without checkpoints under the names of its manager."""
    names, objects = prefix.names_below()
    begun = next((name for name in names if prefix.names.step_of(name) is not None), None)
    if begun is not None:
        return Evidence(f"there are objects below {begun}/, but no manifest")
    whole = next(iter(prefix.whole(filter(_numbered, names))), None)
    if whole is not None:
        return Evidence(f"{whole} is a checkpoint whose name does not fit name= of the manager")
    return _small(objects)


def _small(names: list[str]) -> Evidence | None:
    """The files that a manager writes beside checkpoints, except its cache, which precedes the first one."""
    kept = next((name for name in names if name == LATEST or (name.endswith(PIN) and not name.startswith("."))), None)
    return Evidence(f"the file {kept} names a checkpoint that does not exist") if kept else None


def _mount_points() -> set[str]:
    try:
        lines = [line.split() for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return set()
    return {line[1].replace("\\040", " ") for line in lines if len(line) > 1 and not line[0].startswith("#")} - {"/"}
