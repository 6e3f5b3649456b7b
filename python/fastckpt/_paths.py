"""The paths that callers pass."""

from __future__ import annotations

import os
import re
from typing import TypeAlias

#: What public functions take, as type checkers see it.
AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

#: A pathlib.Path has folded the two slashes of a URL into one. A drive of Windows has one letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def path_of(operation: str, path: AnyPath) -> str:
    """``path`` as an absolute string."""
    try:
        text: str | bytes = os.fspath(path)
    except TypeError:
        raise TypeError(f"{operation}: path must be a str, bytes or os.PathLike, not {type(path).__name__}") from None
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if "\0" in text:
        raise ValueError(f"{operation}: path {text!r} holds a null character")
    if not text:
        raise ValueError(f"{operation}: path is empty")
    refuse_url(operation, text)
    return os.path.abspath(text)  # noqa: PTH100 - resolve() would follow symbolic links


def refuse_url(operation: str, path: str) -> None:
    """A URL is not a path: taken for one, it would make a directory named after its scheme."""
    if _URL.match(path):
        raise ValueError(
            f"{operation}: {path!r} is a URL, and fastckpt reads and writes only file systems: give the path of a "
            "directory on one that is mounted here, and copy between it and an object store yourself (if this is a "
            "relative path, give the absolute one)"
        )
