"""Checks a file of ``torch.save`` before it is read, in a separate process, because it may need unbounded memory.

Nothing in a pickle is executed, but a few bytes can name a list many times over, request gigabytes, or make colliding
keys. So a child first reads the file and converts it to tokens, with limits of memory and time that depend on the
file's size.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: The limit of memory for the objects, in bytes: a fixed part, and a part for each byte of the file.
_MEMORY, _MEMORY_OF_BYTE = 512 << 20, 16
#: The limit of processor time: fixed seconds, and the bytes of the file that add one second each.
_SECONDS, _BYTES_OF_SECOND = 20, 1 << 20

#: The child's program. It must find exactly the modules that this process finds, and none in its working directory.
_PROGRAM = """
import sys
sys.path[:] = sys.argv[3:]
from fastckpt._tools.convert.pickled import look
look(sys.argv[1], int(sys.argv[2]))
"""


class RefusedError(Exception):
    """The child's error. ``kind`` is the name of its exception's type, or None if it exceeded its limits."""

    def __init__(self, kind: str | None, reason: str, errno: int | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.errno = errno


def check(source: Path) -> None:
    """Read ``source`` in a child.

    Raises:
        RefusedError: the source cannot be read, or not within the limits.
    """
    with _answer() as answer:
        command = [sys.executable, "-c", _PROGRAM, os.fspath(source.absolute()), str(answer.fileno()), *sys.path]
        done = subprocess.run(  # noqa: S603 - our own
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[answer.fileno()],
            check=False,
        )
        # The child has moved the shared file position.
        answer.seek(0)
        text = answer.read()
    if done.returncode == 0 and not text:
        raise RefusedError(None, "the first process to read it ended without an answer")
    found = json.loads(text) if text else {}
    kind = found.get("kind")
    if done.returncode > 0:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        kind = last.partition(":")[0]
        found = {"kind": kind, "reason": last}
    if done.returncode < 0 or kind == "MemoryError":
        size = source.stat().st_size
        raise RefusedError(None, f"reading it takes more memory or time than a file of {size} bytes may")
    if found:
        raise RefusedError(**found)


def _answer() -> BinaryIO:
    """The file for the child's answer: not its standard output, because code that starts with Python may print.

    A file in memory and not a pipe, because an answer may be longer than a pipe holds. Its descriptor is none of the
    standard three, which the child replaces.
    """
    import fcntl  # noqa: PLC0415 - Linux alone comes here

    low = os.memfd_create("fastckpt-answer")
    try:
        return os.fdopen(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3), "w+b")
    finally:
        os.close(low)


def look(path: str, answer: int) -> None:
    """Read the file in the child, and write the exception or an empty object to ``answer`` as JSON."""
    from fastckpt._state.flatten import flatten  # noqa: PLC0415
    from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - before the limits, which are for the file alone
    from fastckpt.exceptions import CheckpointError  # noqa: PLC0415

    module: Any = _torch
    found: dict[str, Any] = {}
    try:
        if os.path.isdir(path):  # noqa: PTH112
            _look_at_directory(path)
        else:
            _limit(os.stat(path).st_size)  # noqa: PTH116 - no pathlib needed
            flatten(load(module.torch, path), operation="import")
    except CheckpointError:
        pass  # the save raises a better error
    except Exception as error:  # noqa: BLE001 - noise makes the unpickler raise whatever its own code meets
        kind = "UnpicklingError" if isinstance(error, pickle.UnpicklingError) else type(error).__name__
        errno = error.errno if isinstance(error, OSError) else None
        found = {"kind": kind, "reason": str(error), "errno": errno}
    with open(answer, "w", encoding="ascii") as file:
        json.dump(found, file)
    os._exit(0)  # its objects need not be freed one by one


def _look_at_directory(path: str) -> None:
    """Read the table of a directory of torch.distributed.checkpoint, and its values."""
    from pathlib import Path  # noqa: PLC0415

    from fastckpt._state.flatten import flatten  # noqa: PLC0415

    from .distributed import METADATA_FILE, Directory  # noqa: PLC0415

    source = Path(path)
    _limit((source / METADATA_FILE).stat().st_size)
    directory = Directory(source)
    _limit(*directory.nbytes())
    for key, item in directory.items.items():
        if item.sizes is None:
            flatten(directory.read(key), operation="import")


def load(torch: Any, path: str | os.PathLike[str]) -> Any:
    """The content of a file of ``torch.save``, if it consists of tensors and plain containers only."""
    import zipfile  # noqa: PLC0415

    # Only zip archives can be mapped, and files from before torch 1.6 are not zip archives.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


@contextlib.contextmanager
def bounded(size: int, mapped: int = 0) -> Iterator[None]:
    """A context with the child's memory limit for this process: the file may have changed meanwhile."""
    import resource  # noqa: PLC0415 - Linux alone comes here

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data(size, mapped)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data(size: int, mapped: int = 0) -> int:
    """The most bytes of memory for this process while it reads a file of that size."""
    import resource  # noqa: PLC0415 - Linux alone comes here

    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - no pathlib needed
        data = int(file.read().split()[5]) * resource.getpagesize()
    return data + _MEMORY + _MEMORY_OF_BYTE * size + mapped


def _limit(size: int, mapped: int = 0) -> None:
    import resource  # noqa: PLC0415 - Linux alone comes here

    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime + _SECONDS + size / _BYTES_OF_SECOND

    def lower(what: int, value: int) -> None:
        hard = resource.getrlimit(what)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (limit, hard))

    lower(resource.RLIMIT_CPU, int(seconds) + 1)
    lower(resource.RLIMIT_DATA, _data(size, mapped))
    # A child that its limits kill writes no core dump.
    lower(resource.RLIMIT_CORE, 0)
