"""The raw device: writes and reads the same bytes with plain direct I/O.

A few threads each keep one large block in flight, in huge pages. The file is allocated beforehand, and a write ends
with ``fdatasync``. Each of these calls releases the GIL. This matches fio with io_uring and direct I/O at the same
block size and depth; a test compares the two.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from .shapes import stamp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Bytes of a block, and the number of blocks in flight.
BLOCK, IN_FLIGHT = 4 << 20, 8
#: Memory of a :class:`Device`, in bytes.
MEMORY = BLOCK * IN_FLIGHT
#: The alignment of lengths and addresses that direct I/O has required on every device so far.
_ALIGNMENT = 4096
_HUGE = 2 << 20


class Device:
    """Buffers full of random bytes, which every transfer uses."""

    def __init__(self) -> None:
        self._mapping = mmap.mmap(-1, MEMORY + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            # With small pages the device gets small requests.
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._mapping, np.uint8)
        skip = -int(whole.__array_interface__["data"][0]) % _HUGE
        memory = whole[skip : skip + MEMORY]
        memory[:] = np.random.SFC64().random_raw(MEMORY // 8).view(np.uint8)
        self._blocks = [memory[start : start + BLOCK] for start in range(0, MEMORY, BLOCK)]

    def write(self, path: Path, size: int) -> Transfer:
        """Prepare to write a new file of ``size`` bytes, rounded up to whole pages, and to make it durable."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        fd, direct = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            with contextlib.suppress(OSError):
                # Without support for preallocation, the file grows as it is written.
                os.posix_fallocate(fd, 0, size)

            def move(number: int, length: int, offset: int) -> int:
                block = self._blocks[number][:length]
                # Deduplicating storage must not have an advantage.
                stamp(block)
                return os.pwritev(fd, [block.data], offset)

            return Transfer("raw write", path, fd, size, move, direct=direct, end=lambda: os.fdatasync(fd))
        except BaseException:
            os.close(fd)
            raise

    def read(self, path: Path) -> Transfer:
        """Prepare to read a file that :meth:`write` wrote."""
        fd, direct = _open(path, os.O_RDONLY)
        size = os.fstat(fd).st_size

        def move(number: int, length: int, offset: int) -> int:
            return os.preadv(fd, [self._blocks[number][:length].data], offset)

        return Transfer("raw read", path, fd, size, move, direct=direct)


class Transfer:
    """A file that is open and ready to be written or read once."""

    def __init__(
        self,
        what: str,
        path: Path,
        fd: int,
        size: int,
        move: Callable[[int, int, int], int],
        *,
        direct: bool,
        end: Callable[[], None] | None = None,
    ) -> None:
        self._what, self._path, self._fd, self._size, self._move, self._end = what, path, fd, size, move, end
        self.direct = direct
        self._failure: BaseException | None = None
        # The threads share this iterator, which the interpreter advances in one step.
        self._offsets = iter(range(0, size, BLOCK))
        self._begin = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(number,), daemon=True)
            for number in range(max(1, min(IN_FLIGHT, -(-size // BLOCK))))
        ]
        for thread in self._threads:
            thread.start()

    def run(self, began: float) -> dict[str, Any]:
        """Move everything, once; returns the seconds since ``began`` (``time.monotonic``)."""
        try:
            self._begin.set()
            for thread in self._threads:
                thread.join()
            if self._failure is not None:
                raise self._failure
            if self._end is not None:
                self._end()
            return {"bytes": self._size, "seconds": time.monotonic() - began, "direct": self.direct}
        finally:
            os.close(self._fd)

    def _work(self, number: int) -> None:
        self._begin.wait()
        try:
            for offset in self._offsets:
                length = min(BLOCK, self._size - offset)
                moved = self._move(number, length, offset)
                if moved != length:
                    short = f"{self._what} of {self._path} at {offset} moved {moved} of {length} bytes"
                    raise OSError(errno.EIO, f"{short}: see the kernel's log")  # noqa: TRY301
                if self._failure is not None:
                    return
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            self._failure = error


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """Open for direct I/O, or for plain I/O if the file system has none; also return whether it is direct."""
    flags |= os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # The refused call may have created the file.
        return os.open(path, flags & ~os.O_EXCL, 0o600), False
