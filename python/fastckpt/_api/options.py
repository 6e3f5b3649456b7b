"""What callers pass: checked before anything happens."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from fastckpt._units import bytes_of

#: What public functions take, as type checkers see it.
Files: TypeAlias = "Mapping[str, str | bytes | os.PathLike[str]]"
Engine: TypeAlias = Literal["auto", "uring", "threads", "direct", "buffered"]
Framework: TypeAlias = Literal["auto", "torch", "numpy"]
Unknown: TypeAlias = Literal["error", "plain"]

_ENGINES = get_args(Engine)
_FRAMEWORKS = get_args(Framework)
_UNKNOWN = get_args(Unknown)
_MOST_THREADS = 1024
_MOST_NICE = 19
#: Bytes that a file's name may have, by the usual file systems.
_LONGEST_NAME = 255
#: What fastckpt writes itself, or what readers of the directory would take for it.
_OURS = {"fastckpt.json", "model.safetensors.index.json"}


def check_engine(operation: str, io: Any, threads: Any) -> None:
    """``io=`` and ``threads=``."""
    if io not in _ENGINES:
        raise ValueError(f"{operation}: io must be one of {', '.join(_ENGINES)}, not {io!r}")
    if threads is not None and (type(threads) is not int or not 1 <= threads <= _MOST_THREADS):
        raise ValueError(f"{operation}: threads must be None or an int from 1 to {_MOST_THREADS}, not {threads!r}")


def check_unknown(operation: str, unknown: Any) -> None:
    """``unknown=``."""
    if unknown not in _UNKNOWN:
        raise ValueError(f"{operation}: unknown must be one of {', '.join(_UNKNOWN)}, not {unknown!r}")


def check_framework(operation: str, framework: Any) -> None:
    """``framework=``."""
    if framework not in _FRAMEWORKS:
        raise ValueError(f"{operation}: framework must be one of {', '.join(_FRAMEWORKS)}, not {framework!r}")


def check_in_flight(operation: str, most: Any) -> None:
    """``max_in_flight=``."""
    if type(most) is not int or most < 1:
        raise ValueError(f"{operation}: max_in_flight must be an int, at least 1, not {most!r}")


def check_nice(operation: str, nice: Any) -> None:
    """``nice=``."""
    if nice is not None and (type(nice) is not int or not 0 <= nice <= _MOST_NICE):
        raise ValueError(f"{operation}: nice must be None or an int from 0 to {_MOST_NICE}, not {nice!r}")


def check_bandwidth(operation: str, limit: Any) -> int | None:
    """``bandwidth_limit=``, in bytes per second."""
    if limit is None:
        return None
    return bytes_of(f"{operation}: bandwidth_limit", limit.removesuffix("/s") if isinstance(limit, str) else limit)


def check_files(operation: str, files: Any) -> list[tuple[str, bytes]]:
    """``files=``: the name and the content of each."""
    if files is None:
        return []
    if not isinstance(files, Mapping):
        raise TypeError(f"{operation}: files must be a dict of names and contents, not {type(files).__name__}")
    return [(_check_name(operation, name), _content(operation, name, content)) for name, content in files.items()]


def _check_name(operation: str, name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{operation}: files: a name must be a str, not {name!r}")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{operation}: files: {name!r} cannot be encoded as UTF-8") from None
    if not 0 < length <= _LONGEST_NAME or "/" in name or "\0" in name or name.startswith("."):
        raise ValueError(
            f"{operation}: files: {name!r} is not a plain file name: give 1 to {_LONGEST_NAME} bytes without a "
            "separator, and no dot at the start"
        )
    if name in _OURS or name.endswith(".safetensors"):
        raise ValueError(f"{operation}: files: {name!r} is a name that fastckpt's own files have: choose another")
    return name


def _content(operation: str, name: str, content: Any) -> bytes:
    if isinstance(content, str):
        try:
            return content.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{operation}: files: the text of {name!r} cannot be encoded as UTF-8: {error}") from None
    if isinstance(content, (bytes, bytearray, memoryview)):
        return bytes(content)
    if not isinstance(content, os.PathLike):
        raise TypeError(
            f"{operation}: files: the content of {name!r} must be a str (its text), bytes, or an os.PathLike (a file "
            f"to copy), not {type(content).__name__}"
        )
    # A pipe would be waited for, and a device may have no end.
    descriptor = os.open(content, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{operation}: files: {os.fspath(content)!r}, for {name!r}, is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)
