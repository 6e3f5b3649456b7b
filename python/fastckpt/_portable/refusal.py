"""Errors for calls that only the compiled core supports."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

_WHERE = (
    "build it with 'pip install --no-binary fastckpt-io fastckpt-io'"
    if sys.platform == "linux"
    else "save on Linux, and read the checkpoint here"
)


def for_linux(name: str) -> type:
    """A class in place of ``name`` of the compiled core; a call raises an error with the reason."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "this installation of fastckpt has no compiled core, which is for Linux: it reads, inspects, verifies and "
            f"converts checkpoints, and cannot save, remove, probe or measure; {_WHERE}"
        )

    return type(name, (), {"__new__": refuse, "__doc__": "Compiled core: Linux only.", "__module__": "fastckpt"})
