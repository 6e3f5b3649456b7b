"""Readers of checkpoints, by their place."""

from __future__ import annotations

from fastckpt import _core
from fastckpt._paths import is_url


def open_reader(operation: str, place: str, *, keep: bool = False, manifest: bytes | None = None) -> _core.Reader:
    """Open the checkpoint at ``place``, as :func:`fastckpt._stores.urls.place_of` has it.

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
    files = None
    if is_url(place):
        # For a URL alone: the client is an extra.
        from .files import StoredFiles  # noqa: PLC0415
        from .objects import Objects  # noqa: PLC0415

        files = StoredFiles(Objects.at(operation, place))
    return _core.Reader(place, keep=keep, manifest=manifest, files=files)
