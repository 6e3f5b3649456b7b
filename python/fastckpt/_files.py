"""Further files that a save adds beside the shards: their names and contents."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any, TypeAlias

#: Argument types of public functions, as type checkers see them.
Contents: TypeAlias = Mapping[str, str | bytes | os.PathLike[str]]

#: Python itself closes descriptors in children; Windows has no pipes in directories, but may translate line ends.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
#: The most bytes of a file's name in common file systems.
_LONGEST_NAME = 255
#: The file that torch.distributed.checkpoint and tools around it look for: ``fastckpt.dcp`` writes one beside the
#: manifest for them, and fastckpt does not read it.
TORCH_METADATA = ".metadata"
#: The files that fastckpt writes beside the shards.
BESIDE_SHARDS = frozenset({"fastckpt.json", "model.safetensors.index.json", TORCH_METADATA})


def check_names(operation: str, files: Any) -> None:
    """Check the names and the kinds of contents; nothing is read."""
    if not isinstance(files, Mapping):
        raise TypeError(
            f"{operation}: files beside the shards must be a dict of names and contents, not {type(files).__name__}"
        )
    for name, content in files.items():
        _check_name(operation, name)
        if not isinstance(content, (str, bytes, bytearray, memoryview, os.PathLike)):
            raise TypeError(
                f"{operation}: files: the content of {name!r} must be a str (its text), bytes, or an os.PathLike (a "
                f"file to copy), not {type(content).__name__}"
            )


def contents_of(operation: str, files: Contents | None) -> list[tuple[str, bytes]]:
    """The name and the content of each file; the names have been checked."""
    return [(name, _content(operation, name, content)) for name, content in (files or {}).items()]


def _check_name(operation: str, name: Any) -> None:
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
    if name in BESIDE_SHARDS or name == "training" or name.endswith(".safetensors"):
        raise ValueError(f"{operation}: files: {name!r} is a name that fastckpt's own files have: choose another")


def _content(operation: str, name: str, content: str | bytes | os.PathLike[str]) -> bytes:
    if isinstance(content, str):
        try:
            return content.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{operation}: files: the text of {name!r} cannot be encoded as UTF-8: {error}") from None
    if isinstance(content, (bytes, bytearray, memoryview)):
        return bytes(content)
    try:
        # Opening a pipe would block, and a device may be endless.
        descriptor = os.open(content, _FLAGS)
    except OSError as error:
        what = f"{operation}: files: cannot open the file to copy as {name!r}: {error.strerror}"
        raise OSError(error.errno, what, os.fspath(content)) from error
    except ValueError as error:
        raise ValueError(f"{operation}: files: the path of {name!r}, {os.fspath(content)!r}: {error}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{operation}: files: {os.fspath(content)!r}, for {name!r}, is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)
