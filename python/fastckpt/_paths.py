"""The paths that callers pass."""

from __future__ import annotations

import os
import re
from typing import TypeAlias

#: Argument types of public functions, as type checkers see them.
AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

#: A pathlib.Path folds the two slashes of a URL into one. A Windows drive has one letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def path_of(operation: str, path: AnyPath) -> str:
    """``path`` as an absolute string."""
    text = text_of(operation, path)
    refuse_url(operation, text)
    return os.path.abspath(text)  # noqa: PTH100 - resolve() would follow symbolic links


def text_of(operation: str, path: AnyPath) -> str:
    """``path`` as a string; it may be a URL."""
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
    return text


def is_url(text: str) -> bool:
    """Whether ``text`` is a URL rather than a path."""
    return _URL.match(text) is not None


def refuse_url(operation: str, path: str) -> None:
    """Refuse a URL: treated as a path, it would create a directory named after its scheme."""
    if is_url(path):
        raise ValueError(
            f"{operation}: {path!r} is a URL, but this call supports only file systems: give a path; fastckpt.copy "
            "and Manager(..., remote=) copy to a URL (if this is a relative path, give the absolute one)"
        )
