"""What callers pass: checked before anything happens."""

from __future__ import annotations

import os
import re
from typing import Any, Literal, TypeAlias, get_args

#: What public functions take, as type checkers see it.
AnyPath: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"
Engine: TypeAlias = Literal["auto", "uring", "threads", "direct", "buffered"]
Framework: TypeAlias = Literal["auto", "torch", "numpy"]

_ENGINES = get_args(Engine)
_FRAMEWORKS = get_args(Framework)
#: A pathlib.Path has folded the two slashes of a URL into one. A drive of Windows has one letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_MOST_THREADS = 1024
_MOST_NICE = 19


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
    """A URL is not a path: taken for one it would be a directory named after its scheme, where nobody looks for it."""
    if _URL.match(path):
        raise ValueError(
            f"{operation}: {path!r} is a URL, and fastckpt reads and writes file systems alone: give the path of a "
            "directory on one that is mounted here, and copy between it and an object store yourself (a relative path "
            "that really begins so is to be given as an absolute one)"
        )


def check_engine(operation: str, io: Any, threads: Any) -> None:
    """``io=`` and ``threads=``."""
    if io not in _ENGINES:
        raise ValueError(f"{operation}: io must be one of {', '.join(_ENGINES)}, not {io!r}")
    if threads is not None and (type(threads) is not int or not 1 <= threads <= _MOST_THREADS):
        raise ValueError(f"{operation}: threads must be None or an int from 1 to {_MOST_THREADS}, not {threads!r}")


def check_framework(operation: str, framework: Any) -> None:
    """``framework=``."""
    if framework not in _FRAMEWORKS:
        raise ValueError(f"{operation}: framework must be one of {', '.join(_FRAMEWORKS)}, not {framework!r}")


def check_shard_size(operation: str, shard_size: Any) -> None:
    """``shard_size=``."""
    if type(shard_size) is not int or not 1 <= shard_size < 2**63:
        raise ValueError(f"{operation}: shard_size must be an int of bytes, from 1 to 2**63 - 1, not {shard_size!r}")


def check_in_flight(operation: str, most: Any) -> None:
    """``max_in_flight=``."""
    if type(most) is not int or most < 1:
        raise ValueError(f"{operation}: max_in_flight must be an int, at least 1, not {most!r}")


def check_nice(operation: str, nice: Any) -> None:
    """``nice=``."""
    if nice is not None and (type(nice) is not int or not 0 <= nice <= _MOST_NICE):
        raise ValueError(f"{operation}: nice must be None or an int from 0 to {_MOST_NICE}, not {nice!r}")


def check_bandwidth(operation: str, limit: Any) -> None:
    """``bandwidth_limit=``."""
    if limit is not None and not (type(limit) in (int, float) and 1 <= limit < 2**63):
        raise ValueError(f"{operation}: bandwidth_limit must be None or bytes a second, at least 1, not {limit!r}")
