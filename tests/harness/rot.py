"""Bit rot: damage to a file by its disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def rot(path: Path, at: int) -> None:
    """Flip a bit of the byte at ``at`` and keep the file's times. A second call restores the byte."""
    about = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        (was,) = file.read(1)
        file.seek(at)
        file.write(bytes([was ^ 1]))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
