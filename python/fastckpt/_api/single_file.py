"""Files in any format, such as torch's own: written whole and durably, read with a check."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from threading import Event, RLock
from types import TracebackType
from typing import Any

import numpy as np

from fastckpt import _core, _crc64
from fastckpt._copy.moves import memory_of
from fastckpt._copy.pace import BLOCK, THREADS, Pace
from fastckpt._copy.sources import Item, Summed
from fastckpt._paths import AnyPath, refuse_url, text_of
from fastckpt.exceptions import CorruptCheckpointError

from .io import IO, Engine, bytes_per_second, check_io

#: The extended attribute in which the core stores the checksum of a file, with its length and modification time.
_CHECKSUM = "user.fastckpt.crc64nvme"
#: Errors of files and file systems without the attribute.
_WITHOUT = (errno.ENODATA, errno.ENOTSUP, errno.ENOSYS)
#: Seconds between two checks for a failure.
_LOOK = 0.1
#: Threads that write: as many as in a save with blocking calls.
_THREADS = 12
#: Bytes to allocate ahead: so few that the blocks in flight keep the device busy during the allocation.
_AHEAD = 64 << 20


def open_write(path: AnyPath, *, io: Engine | IO = "auto") -> WritableFile:
    """Open a file for writing that appears at its path whole and durable, or not at all.

    It accepts bytes in any format, from the beginning to the end. Anything that writes to a file object, such as
    ``torch.save``, can write to it. Threads write large blocks past the page cache. When the file is closed, it is made
    durable and replaces what is at ``path`` in one step. If the ``with`` statement fails, or the process is killed,
    ``path`` stays as it was. The checksum of the file is stored in an extended attribute, if the file system supports
    those: see :func:`fastckpt.open_read`.

    Args:
        path: the path of the file. Directories above it are made. A symbolic link is followed. The new file has the
            mode of the file that it replaces.
        io: how bytes are written: an engine, or an :class:`IO` with ``threads``, by default 12 (fewer with a limit),
            and ``bandwidth_limit``. ``uring`` acts like ``threads`` here.

    Returns:
        The file: a context manager with ``write``, ``writelines``, ``tell``, ``close`` and ``discard``. It cannot
        seek, and has no ``fileno``.

    Raises:
        FileExistsError: ``path`` is a directory or another file that is not regular.
        PermissionError: the file at ``path`` is write-protected.
        NotImplementedError: this installation has no compiled core.
        OSError: the storage failed; ``direct`` was requested, and direct I/O is refused.
        ValueError: ``path`` is a URL, or an argument is out of range.

    Example:
        >>> import fastckpt
        >>> with fastckpt.open_write("notes.bin") as file:
        ...     _ = file.write(b"whole or not at all")
        >>> with fastckpt.open_read("notes.bin") as file:
        ...     file.read(5)
        b'whole'
    """
    how = check_io("open_write", io)
    if how.engine == "auto" and (engine := os.environ.get("FASTCKPT_IO")):
        how = replace(how, engine=check_io("environment variable FASTCKPT_IO", engine).engine)
    return WritableFile(os.path.realpath(_local("open_write", path)), how)


def open_read(path: AnyPath, *, verify: bool = True) -> io.BufferedReader:
    """Open a file for reading after its bytes have been compared with the checksum of :func:`fastckpt.open_write`.

    The comparison brings the bytes into the page cache, as far as memory permits. A file without a checksum is opened
    unchecked: a file of another program, a file that was changed later, and a copy without extended attributes (``cp``
    without ``-a``, object stores).

    Args:
        path: the path of the file.
        verify: whether to compare; False gives ``open(path, "rb")``.

    Returns:
        The file, as Python's own :func:`open` returns it.

    Raises:
        CorruptCheckpointError: the bytes are not those that were written.
        OSError: there is no such file, or the storage failed.
        ValueError: ``path`` is a URL.

    Example:
        >>> import fastckpt
        >>> with fastckpt.open_write("notes.bin") as file:
        ...     _ = file.write(b"bytes")
        >>> with fastckpt.open_read("notes.bin") as file:
        ...     file.read()
        b'bytes'
    """
    name = _local("open_read", path)
    file = builtins.open(name, "rb")  # noqa: SIM115, PTH123 - it is returned
    try:
        if verify:
            _compare(file.fileno(), name)
    except BaseException:
        file.close()
        raise
    return file


def _local(operation: str, path: AnyPath) -> str:
    """A path as the system resolves it: ``..`` after a symbolic link is the parent of the link's target."""
    text = text_of(operation, path)
    refuse_url(operation, text)
    return text


class WritableFile(io.BufferedIOBase):
    """The file that :func:`fastckpt.open_write` returns. Several threads may write to it; their writes do not overlap.

    Attributes:
        name: the path of the file.
        mode: ``wb``.
    """

    mode = "wb"

    def __init__(self, path: str, how: IO) -> None:
        self.name = path
        self._process = os.getpid()
        self._file = _core.SingleFile(path, how.engine != "buffered")
        self._strict = how.engine == "direct"
        self._pace = Pace(bytes_per_second(how), None, None)
        self._block = self._pace.block
        limited = how.bandwidth_limit is not None
        threads = how.threads or (self._pace.threads if limited else _THREADS)
        self._pool = ThreadPoolExecutor(threads, "fastckpt")
        # Each item is memory for one block, None until needed. There are two more than threads: one is being filled.
        self._memories: SimpleQueue[Any] = SimpleQueue()
        for _ in range(threads + 2):
            self._memories.put(None)
        self._lock = RLock()
        self._writing = False
        self._at = 0
        self._allocated = 0
        # The memory of the block that `_at` is in; and the checksum and length of each written block by its start.
        self._memory: Any = None
        self._sums: dict[int, tuple[int, int]] = {}
        self._error: BaseException | None = None
        try:
            self._check_direct()
        except OSError:
            self.discard()
            raise

    def writable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._at

    def flush(self) -> None:
        """Do nothing: bytes are durable when the file is closed."""

    def write(self, data: Any, /) -> int:
        """Write all bytes of ``data``, which may change once this returns.

        Args:
            data: a bytes-like object.

        Returns: The number of bytes.

        Raises:
            OSError: the storage failed, at this write or at an earlier one.
            RuntimeError: a signal handler interrupted a write to the file and writes to it.
            TypeError: ``data`` is not a bytes-like object.
            ValueError: the file is closed, or belongs to the process that this one was forked from.
        """
        view = memoryview(data)
        source = np.frombuffer(view if view.c_contiguous else view.tobytes(), np.uint8) if view.nbytes else _NOTHING
        with self._alone():
            if self._error is not None:
                raise self._error
            try:
                self._writing = True
                self._append(source)
            except BaseException as error:
                # The file does not hold all bytes that the caller has passed.
                self._error = self._error or error
                raise
            finally:
                self._writing = False
        return len(source)

    def close(self) -> None:
        """Make the file durable, and give it its path. A second call does nothing.

        Raises:
            OSError: the storage failed; ``path`` is as it was, or has the new file, which may not be durable.
            RuntimeError: a signal handler interrupted a write to the file and closes it.
            ValueError: the file belongs to the process that this one was forked from.
        """
        if self.closed:
            return
        with self._alone():
            self._writing = True  # from here on, no write is accepted
            try:
                inside = self._at % self._block
                if inside and self._error is None:
                    self._begin(_Block(self._memory, self._at - inside, inside))
                self._pool.shutdown()
                if self._error is not None:
                    raise self._error  # noqa: TRY301 - this error must discard the file, too
                self._check_direct()
                sums = [self._sums[start] for start in sorted(self._sums)]
                self._file.publish(self._at, _crc64.joined(_crc64.of(b""), sums))
            except BaseException:
                self.discard()
                raise
            super().close()

    def discard(self) -> None:
        """Close the file without giving it its path: the old file stays. Does nothing if it is closed."""
        if self.closed:
            return
        super().close()
        if os.getpid() != self._process:
            return
        self._error = self._error or ValueError(f"open_write: {self.name} was discarded")
        self._pace.halt()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(ValueError):  # the file was already taken to be published
            self._file.discard()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if not hasattr(self, "_error") or self.closed:
            return
        if os.getpid() == self._process:
            warnings.warn(
                f"open_write: {self.name} was not closed, so nothing was written there: use it in a with statement",
                RuntimeWarning,
                stacklevel=2,
            )
        self.discard()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A context in which no other thread writes to the file or closes it."""
        if os.getpid() != self._process:  # before the lock, which another thread may have held at the fork
            raise ValueError(f"open_write: {self.name} belongs to the process that this one was forked from")
        with self._lock:
            if self.closed:
                raise ValueError(f"open_write: {self.name} is closed")
            if self._writing:
                raise RuntimeError(f"open_write: {self.name}: a signal handler has interrupted a write to it")
            yield

    def _check_direct(self) -> None:
        if self._strict and not self._file.is_direct():
            raise OSError(errno.EINVAL, "open_write: direct I/O is refused here: use io='auto'", self.name)

    def _append(self, source: Any) -> None:
        begin = 0
        while begin < len(source):
            inside = self._at % self._block
            if not inside and len(source) - begin >= self._block:
                begin += self._write_blocks(source[begin:])
                continue
            if not inside:
                self._memory = self._take()
            part = source[begin : begin + self._block - inside]
            np.copyto(self._memory[inside : inside + len(part)], part)
            begin += len(part)
            self._at += len(part)
            if not self._at % self._block:
                memory, self._memory = self._memory, None
                self._begin(_Block(memory, self._at - self._block, self._block))

    def _take(self) -> Any:
        """Memory for a block, once a thread is done with it."""
        memory = self._memories.get()
        if memory is None:
            memory = memory_of(self._block)
        if self._error is not None:
            self._memories.put(memory)
            raise self._error
        return memory

    def _write_blocks(self, source: Any) -> int:
        """Write the whole blocks at the beginning of ``source``; the threads copy them. Returns their length."""
        blocks: list[_Block] = []
        try:
            for begin in range(0, len(source) - self._block + 1, self._block):
                block = _Block(self._take(), self._at, self._block, source[begin : begin + self._block])
                blocks.append(block)
                self._at += self._block
                self._begin(block)
            for block in blocks:
                while not block.copied.wait(_LOOK):
                    if self._error is not None:
                        raise self._error
        finally:
            # The caller may reuse the memory: even after an error, no thread may copy from it.
            interrupts = [interrupt for block in blocks if (interrupt := block.give_back()) is not None]
        if interrupts:
            raise interrupts[0]
        return len(blocks) * self._block

    def _begin(self, block: _Block) -> None:
        """Make a thread write a block."""
        if block.start + block.nbytes > self._allocated:
            self._allocate(block.start + block.nbytes)
        try:
            self._pool.submit(self._move, block)
        except RuntimeError:  # no thread can be started: the interpreter is ending
            self._move(block)

    def _move(self, block: _Block) -> None:
        """Copy the bytes of a block to its memory, unless they are there, and write it; later calls do nothing."""
        memory = block.claim()
        if memory is None:
            return
        try:
            block.copy(memory)
            if self._error is None:
                self._pace.wait(block.nbytes)
                sum_ = self._file.write(block.start, memory.ctypes.data, block.nbytes)
                self._sums[block.start] = (sum_, block.nbytes)
        except BaseException as error:  # noqa: BLE001 - the next call raises it
            self._error = self._error or error
        finally:
            self._memories.put(memory)

    def _allocate(self, end: int) -> None:
        # Nothing follows the last block of a file.
        ahead = _AHEAD if end % self._block == 0 else 0
        try:
            self._file.reserve(self._allocated, end + ahead)
            self._allocated = end + ahead
        except OSError:
            # There may be room for the written bytes, but not for bytes ahead.
            self._allocated = sys.maxsize


class _Block:
    """A block in flight, with its own memory, and perhaps the caller's memory from which it is copied.

    Attributes:
        start: the place of the block in the file.
        nbytes: the length of the block.
        copied: set when the caller's memory is no longer needed.
    """

    def __init__(self, memory: Any, start: int, nbytes: int, source: Any = None) -> None:
        self.start = start
        self.nbytes = nbytes
        self.copied = Event()
        # Taking the memory claims the block.
        self._memory = [memory]
        self._source = [] if source is None else [source]

    def claim(self) -> Any:
        """The memory of the block for the first caller; None for all others."""
        try:
            return self._memory.pop()
        except IndexError:
            return None

    def copy(self, memory: Any) -> None:
        """Copy from the caller's memory."""
        try:
            if self._source:
                np.copyto(memory, self._source[0])
        finally:
            self._source.clear()
            self.copied.set()

    def give_back(self) -> BaseException | None:
        """Wait until no thread reads the caller's memory, and none will; returns an exception that came meanwhile."""
        if self.claim() is not None:
            self._source.clear()
            return None
        interrupt: BaseException | None = None
        while not self.copied.is_set():
            try:
                self.copied.wait()
            except BaseException as error:  # noqa: BLE001, PERF203 - it is raised below
                interrupt = error
        return interrupt


_NOTHING = np.empty(0, np.uint8)


def _compare(file: int, path: str) -> None:
    """Raise CorruptCheckpointError if the bytes of the file do not match its stored checksum."""
    about = os.fstat(file)
    kept = _kept(file, about)
    if kept is None:
        return

    summed = Summed(path, Item(path, about.st_size, kept, is_shard=False), BLOCK)

    def sum_of(number: int) -> None:
        start, nbytes = summed.blocks[number]
        memory = memories.get()
        try:
            done, got = 0, 1
            while got and done < nbytes:
                got = os.preadv(file, [memory[done:nbytes]], start + done)
                done += got
            summed.put(number, _crc64.of(memory[:done]))
        finally:
            memories.put(memory)

    memories: SimpleQueue[Any] = SimpleQueue()
    for _ in range(THREADS):
        memories.put(memory_of(BLOCK))
    numbers = range(len(summed.blocks))
    with ThreadPoolExecutor(THREADS, "fastckpt") as pool:
        try:
            deque(pool.map(sum_of, numbers), 0)
        except RuntimeError:  # no thread can be started: the interpreter is ending
            deque(map(sum_of, numbers), 0)
    found = summed.found()
    if found != kept and _kept(file, os.fstat(file)) == kept:  # no process wrote to it meanwhile
        raise CorruptCheckpointError(
            f"open_read: {path} is damaged: the checksum of its bytes is {found}, and was {kept} when it was "
            "written; use another copy, or verify=False to read it as it is"
        )


def _kept(file: int, about: os.stat_result) -> str | None:
    """The checksum that is stored with a file, if it has not been written to since."""
    if not hasattr(os, "getxattr"):  # not Linux
        return None
    try:
        words = os.getxattr(file, _CHECKSUM).decode("ascii", "replace").split()
    except OSError as error:
        if error.errno in _WITHOUT:
            return None
        raise
    seconds, nanoseconds = divmod(about.st_mtime_ns, 10**9)
    is_sound = len(words) == 3 and words[1:] == [str(about.st_size), f"{seconds}.{nanoseconds:09}"]  # noqa: PLR2004
    return words[0] if is_sound else None
