"""Checkpoints in an object store: listed and removed."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from fastckpt._files import TORCH_METADATA
from fastckpt._portable.limits import MANIFEST, MAX_MANIFEST
from fastckpt._portable.listing import looked_at, strangers

from .layout import Layout, file_of, leftovers, sums_of
from .objects import Objects

if TYPE_CHECKING:
    from collections.abc import Collection

    from fastckpt._portable.records import ListedCheckpoint

#: Manifests that are read at the same time.
_AT_ONCE = 16


def list_checkpoints(url: str) -> list[ListedCheckpoint]:
    """The checkpoints directly below ``url``, by name.

    Raises:
        FileNotFoundError: nothing is below it.
    """
    objects = Objects.at("list", url)
    folders, here = objects.children()
    if not folders and not here:
        raise FileNotFoundError(errno.ENOENT, f"cannot list `{url}`: nothing is there", url)

    def look(name: str) -> ListedCheckpoint | None:
        below = objects.below(name)
        manifest, failed = b"", None
        try:
            manifest = below.read_all(MANIFEST, MAX_MANIFEST)
        except FileNotFoundError:
            return None
        except OSError as error:
            failed = error

        def read() -> bytes:
            if failed is not None:
                raise failed
            return manifest

        sizes = {file: stored.nbytes for file, stored in Layout(manifest, below.sizes()).files.items()}
        return looked_at(name, below.url, sizes, read)

    with ThreadPoolExecutor(_AT_ONCE, "fastckpt") as pool:
        return [found for found in pool.map(look, folders) if found is not None]


def remove(url: str, *, force: bool, files: Collection[str] = (), leave: bool = False) -> list[str]:
    """Remove the checkpoint at ``url``: first its manifest, which ends the checkpoint; then the rest.

    Objects of a killed removal or copy are removed as well, with or without a manifest: they are recognised by the
    checksums that fastckpt stores with them.

    Args:
        url: the checkpoint's URL.
        force: also remove other objects directly below it.
        files: names of further objects that belong to it.
        leave: let other objects stay, instead of refusing.

    Returns:
        The names of the objects that remain.

    Raises:
        FileNotFoundError: nothing is there.
        OSError: with ENOTEMPTY, it is not a checkpoint, or holds other objects; nothing was removed.
    """
    objects = Objects.at("remove", url)
    names = objects.sizes()
    if not names:
        raise FileNotFoundError(errno.ENOENT, f"cannot remove `{url}`: nothing is there", url)
    foreign = strangers({file_of(name) for name in names}, files, None)
    # The folder of a save has its own copy of torch's `.metadata`, whatever else was uploaded beside that copy.
    strange = [name for name in names if file_of(name) in foreign and not name.endswith(f"/{TORCH_METADATA}")]
    deep = [name for name in strange if "/" in file_of(name)]
    why = None
    if MANIFEST not in names and not all(
        sums_of(objects, [name for name in names if name not in strange] or names).values()
    ):
        why = f"it is not a checkpoint of fastckpt: it holds no {MANIFEST}"
    elif not leave and (deep or (strange and not force)):
        why = f"it holds `{(deep or strange)[0]}`, which is not part of the checkpoint: move that elsewhere"
        why += "" if deep else ", or give force=True"
    if why:
        raise OSError(errno.ENOTEMPTY, f"cannot remove `{url}`: {why}", url)
    objects.remove([MANIFEST])
    stay = strange if leave else []
    objects.remove([name for name in names if name != MANIFEST and name not in stay])
    return stay


def remove_leftovers(objects: Objects) -> int:
    """Remove what interrupted copies left at a URL; a checkpoint stays, and so do objects of other programs.

    Returns:
        The number of removed objects.
    """
    try:
        manifest = objects.read_all(MANIFEST, MAX_MANIFEST)
    except FileNotFoundError:
        manifest = b""
    names = leftovers(objects, objects.sizes(), manifest)
    objects.remove(names)
    return len(names)
