"""Probing: finds the engine and the features that a save would use in a directory."""

from __future__ import annotations

from fastckpt import _core
from fastckpt._paths import AnyPath, path_of

from .io import IO, Engine, check_io


def probe(path: AnyPath = ".", *, io: Engine | IO = "auto") -> _core.Probe:
    """Try in a directory the steps of a save: the engine, direct I/O, the renames of a commit.

    Takes less than a tenth of a second. It leaves nothing behind. :func:`fastckpt.tools.doctor` explains the answers.

    Args:
        path: the directory for checkpoints.
        io: as for :func:`fastckpt.save`.

    Returns:
        The answers. A directory that cannot be used is an answer, not an error.

    Raises:
        ValueError: ``io`` or ``FASTCKPT_IO`` is not an engine, or ``path`` is a URL.

    Example:
        >>> import fastckpt
        >>> fastckpt.tools.probe(".", io="buffered").engine
        'buffered'
    """
    return _core.probe(path_of("probe", path), io=check_io("probe", io).engine)
