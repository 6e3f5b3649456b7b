"""Where the objects of a checkpoint are below its URL (docs/stores.md).

The manifest is directly below the URL. The other files are in a folder named after the manifest's checksum, which no
other save has. So a save that replaces another one touches none of its objects, and only the manifest decides which of
the two exists. Files that another tool uploaded directly below the URL, as in a directory, are read as well.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from fastckpt._portable.limits import MANIFEST
from fastckpt._portable.manifest import own_checksum

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .objects import Objects

# A folder with a manifest is not the folder of a save, but a checkpoint.
_in_folder = re.compile(rf"[0-9a-f]{{16}}/(?!{re.escape(MANIFEST)}$)(.+)", re.DOTALL).fullmatch
#: The number of concurrent requests that look up objects.
_LOOKS = 32


class Stored(NamedTuple):
    """An object that holds a file of a checkpoint: its name, and its size in bytes."""

    name: str
    nbytes: int


def folder_of(manifest: bytes) -> str:
    """The folder of a save, from the beginning of its manifest; empty if the manifest is damaged."""
    return own_checksum(manifest) or ""


def file_of(name: str) -> str:
    """The file of an object of this name in its checkpoint."""
    found = _in_folder(name)
    return found[1] if found else name


class Layout:
    """The files of one checkpoint, by their names.

    Args:
        manifest: the manifest of the checkpoint, or its beginning.
        sizes: all objects below the URL, with their sizes in bytes.
    """

    def __init__(self, manifest: bytes, sizes: Mapping[str, int]) -> None:
        folder = folder_of(manifest)
        self.files: dict[str, Stored] = {}
        self._prefix = ""
        for name, nbytes in sizes.items():
            if folder and name.startswith(f"{folder}/"):
                self._prefix = f"{folder}/"
                self.files[file_of(name)] = Stored(name, nbytes)
            elif file_of(name) == name:
                self.files.setdefault(name, Stored(name, nbytes))

    def name_of(self, file: str) -> str:
        """The object that holds, or would hold, a file."""
        found = self.files.get(file)
        if found is not None:
            return found.name
        return file if file == MANIFEST else self._prefix + file


def sums_of(objects: Objects, names: Iterable[str]) -> dict[str, str | None]:
    """The checksum that fastckpt stored with each of these objects; None if there is none, or the object is gone."""

    def look(name: str) -> str | None:
        try:
            return objects.sum_of(name)
        except FileNotFoundError:
            return None

    names = list(names)
    with ThreadPoolExecutor(_LOOKS, "fastckpt") as pool:
        return dict(zip(names, pool.map(look, names), strict=True))


def leftovers(objects: Objects, names: Iterable[str], manifest: bytes) -> list[str]:
    """The objects that fastckpt uploaded for saves other than the one with this manifest.

    An earlier save or an interrupted copy left them. Objects of other programs have no checksum stored with them.

    Args:
        objects: the objects below the URL of the checkpoint.
        names: the objects of the checkpoint.
        manifest: the manifest of the save that stays; empty if none does.
    """
    folder = folder_of(manifest)
    others = [name for name in names if (_in_folder(name) and name[:16] != folder) or not manifest]
    return [name for name, noted in sums_of(objects, others).items() if noted is not None]
