"""Probing: finds the engine and the features that a save would use in a directory."""

from __future__ import annotations

from fastckpt import _core
from fastckpt._paths import AnyPath, path_of

from .io import IO, Engine, check_io


def probe(path: AnyPath = ".", *, io: Engine | IO = "auto") -> _core.Probe:
    """Try the steps of a save in a directory: the engine, direct I/O, the renames of a commit.

    This takes less than 0.1 s and leaves nothing behind. :func:`fastckpt.tools.doctor` explains the results.

    Args:
        path: the directory for checkpoints.
        io: as for :func:`fastckpt.save`.

    Returns:
        The results. A directory that cannot be used is a result, not an error.

    Raises:
        ValueError: ``io`` or ``FASTCKPT_IO`` is not an engine, or ``path`` is a URL.

    Example:
        >>> import fastckpt
        >>> fastckpt.tools.probe(".", io="buffered").engine
        'buffered'
    """
    return _core.probe(path_of("probe", path), io=check_io("probe", io).engine)
