"""Readers of checkpoints, by their place."""

from __future__ import annotations

from typing import cast

from fastckpt import _core
from fastckpt._paths import is_url
from fastckpt._portable import reader as _portable

from .files import StoredFiles
from .objects import Objects


def open_reader(operation: str, place: str, *, keep: bool = False) -> _core.Reader:
    """Open the checkpoint at ``place``, as :func:`fastckpt._stores.urls.place_of` has it.

    What is in an object store is read in Python, with one interface.

    Args:
        operation: what is to be done, for messages.
        place: where.
        keep: whether its shards stay open, as ``_core.Reader`` has it; objects cannot.

    Raises:
        ImportError: ``place`` is a URL, and the package obstore is missing.
        FileNotFoundError: there is nothing.
        CorruptCheckpointError: the manifest is damaged.
    """
    if not is_url(place):
        return _core.Reader(place, keep=keep)
    files = StoredFiles(Objects.at(operation, place))
    return cast("_core.Reader", _portable.Reader(place, files=files))
