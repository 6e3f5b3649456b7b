"""Readers of checkpoints, by their place."""

from __future__ import annotations

from fastckpt import _core
from fastckpt._paths import is_url


def open_reader(operation: str, place: str, *, keep: bool = False, manifest: bytes | None = None) -> _core.Reader:
    """Open the checkpoint at ``place``, a result of :func:`fastckpt._stores.urls.place_of`.

    Args:
        operation: the name of the operation, for messages.
        place: the checkpoint's directory or URL.
        keep: whether its shards stay open, as for ``_core.Reader``; objects cannot.
        manifest: the manifest of the checkpoint, if another process has read it.

    Raises:
        ImportError: ``place`` is a URL, and the package obstore is missing.
        FileNotFoundError: nothing is there.
        CorruptCheckpointError: the manifest is damaged.
    """
    files = None
    if is_url(place):
        # Import this only for a URL: the client is an optional package.
        from .files import StoredFiles  # noqa: PLC0415
        from .objects import Objects  # noqa: PLC0415

        files = StoredFiles(Objects.at(operation, place))
    return _core.Reader(place, keep=keep, manifest=manifest, files=files)
