"""Readers of checkpoints, by their place."""

from __future__ import annotations

from typing import cast

from fastckpt import _core
from fastckpt._paths import is_url


def open_reader(operation: str, place: str, *, keep: bool = False, manifest: bytes | None = None) -> _core.Reader:
    """Open the checkpoint at ``place``, as :func:`fastckpt._stores.urls.place_of` has it.

    What is in an object store is read in Python, with one interface.

    Args:
        operation: what is to be done, for messages.
        place: the checkpoint's directory or URL.
        keep: whether its shards stay open, as ``_core.Reader`` has it; objects cannot.
        manifest: its manifest, if another process has read it.

    Raises:
        ImportError: ``place`` is a URL, and the package obstore is missing.
        FileNotFoundError: there is nothing.
        CorruptCheckpointError: the manifest is damaged.
    """
    if not is_url(place):
        return _core.Reader(place, keep=keep, manifest=manifest)
    # It takes a fifth of the time of importing fastckpt, and only URLs need it.
    from fastckpt._portable import reader as portable  # noqa: PLC0415

    from .files import StoredFiles  # noqa: PLC0415
    from .objects import Objects  # noqa: PLC0415

    files = StoredFiles(Objects.at(operation, place))
    return cast("_core.Reader", portable.Reader(place, manifest=manifest, files=files))
