"""What a disk may do to a file in the course of time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def rot(path: Path, at: int) -> None:
    """Change a bit of the byte at ``at``; the file's times do not show it. Once more restores it."""
    about = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        (was,) = file.read(1)
        file.seek(at)
        file.write(bytes([was ^ 1]))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
