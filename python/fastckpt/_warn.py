"""Warnings that point at the program's line, however deep in the library they arise."""

from __future__ import annotations

import sys
import warnings

#: Modules that do not belong to the program. ``torch.distributed.checkpoint`` calls fastckpt's reader and writer.
_LIBRARIES = frozenset({"fastckpt", "torch"})


def warn(text: str) -> None:
    """Warn (RuntimeWarning) about the call of the innermost caller outside the libraries."""
    frame = sys._getframe(1)  # noqa: SLF001 - `warnings` itself uses it
    level = 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
        level += 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)
