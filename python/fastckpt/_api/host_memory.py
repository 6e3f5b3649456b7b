"""Host memory that is kept from operation to operation: for snapshots, and for staging between files and devices.

Fresh memory is slower than a disk, and pinning it is slower still.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._tensors import device as _device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fastckpt._tensors.pinned import Registration

#: The most and the fewest bytes of staging memory of an operation.
STAGING, LEAST_STAGING = 256 << 20, 32 << 20
#: Bytes of staging memory to pin at a time: the first copy waits for the first piece.
_STAGING_PIECE = 32 << 20

#: Free memory. The lists change in atomic steps only, so that signal handlers may save, too.
_free: list[Memory] = []
_free_staging: list[Memory] = []
_generation = 0


class Memory:
    """The memory of one snapshot, or the staging memory of one operation.

    Attributes:
        core: the core's object for this memory.
        nbytes: the size of the memory.
        generation: how often the caller had asked to free memory before this memory was made.
        registration: the registration of its pinned part; None before :meth:`pin`, and for devices that do not pin.
    """

    __slots__ = ("_home", "_limit", "core", "generation", "nbytes", "registration")

    def __init__(self, nbytes: int, home: list[Memory]) -> None:
        self.core = _core.Memory(nbytes)
        self.nbytes = self.core.nbytes
        self.generation = _generation
        self.registration: Registration | None = None
        self._limit: int | None = None
        self._home = home

    def pin(self, devices: Iterable[Any], limit: int | None = None, piece: int | None = None) -> None:
        """Pin the memory in the background, for copies from and to devices; copies wait for the parts that they need.

        Memory that an earlier operation pinned stays pinned. No copy may be in progress.

        Args:
            devices: ``torch.device`` objects.
            limit: the most bytes that this process pins in total; None for no limit, 0 to pin nothing.
            piece: bytes to pin at a time; None for the usual.
        """
        devices = tuple(devices)
        if not devices or not self.must_pin(limit):
            return
        from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - a device is torch's

        self._limit = limit
        self.registration = _torch.pin(devices, self.core.address, self.nbytes, limit, piece)
        if self.registration is not None:
            # A signal handler may end the operation and drop this memory: it must stay while it is registered.
            self.registration.owner = self.core

    def must_pin(self, limit: int | None) -> bool:
        """Whether :meth:`pin` with this limit has yet to begin. Memory pinned with another limit is unpinned here."""
        if limit != self._limit:
            self._unpin()
        return self.registration is None

    def is_pinned(self) -> bool:
        """Whether no host thread is needed for a copy after :meth:`pin`: all is pinned, or the devices do not pin."""
        registration = self.registration
        return registration is None or registration.pinned == registration.nbytes

    @property
    def problem(self) -> str | None:
        """Why some of the memory could not be pinned, for the warnings of a report; None if all could."""
        return None if self.registration is None else self.registration.problem

    def _unpin(self) -> None:
        if self.registration is not None:
            self.registration.close()
            self.registration = None

    def close(self) -> None:
        """Unmap the memory."""
        self._unpin()
        self.core.close()

    def give(self) -> None:
        """Keep the memory for the next operation, or unmap it if the caller has asked to free memory meanwhile.

        This waits for pinning in progress: an operation that has ended makes no further CUDA calls, and the program may
        capture a graph.
        """
        try:
            if self.registration is not None and self.generation == _generation:
                self.registration.wait()
        finally:
            # An abandoned save may still use it; it is unmapped when that save ends.
            if self.generation == _generation and not self.core.is_in_use:
                self._home.append(self)
            else:
                self.close()


def take(nbytes: int) -> Memory:
    """Memory for a snapshot of ``nbytes``, with the contents of an earlier snapshot."""
    return _take(nbytes, _free)


def _take(nbytes: int, free: list[Memory]) -> Memory:
    """The smallest free memory that is large enough, or new memory."""
    while True:
        fitting = [memory for memory in free if memory.nbytes >= nbytes]
        chosen = min(fitting or free, key=lambda memory: memory.nbytes, default=None)
        if chosen is None:
            return Memory(nbytes, free)
        try:
            free.remove(chosen)
        except ValueError:  # another thread was faster
            continue
        if fitting:
            return chosen
        # The chosen memory is too small: free it before larger memory is allocated.
        chosen.close()


@contextlib.contextmanager
def staging(devices: Iterable[Any], nbytes: int) -> Iterator[Memory | None]:
    """A context with staging memory for an operation between files and devices; the core must not use it afterwards.

    Args:
        devices: the ``torch.device`` objects that it copies from or to.
        nbytes: bytes that it moves in all.

    Yields:
        The memory, which is being pinned (pass ``.core`` to the core); None without devices or bytes.
    """
    devices = tuple(devices)
    if not devices or not nbytes:
        yield None
        return
    memory = _take(min(STAGING, max(LEAST_STAGING, nbytes)), _free_staging)
    try:
        memory.pin(devices, piece=_STAGING_PIECE)
        yield memory
    finally:
        memory.give()


def release_buffers() -> None:
    """Free the host memory that is kept for the next operation.

    Asynchronous saves keep one copy of the largest state saved so far per save in flight at the same time. Concurrent
    operations that copy from or to devices keep up to 256 MiB each. The memory of a running operation is freed when it
    ends. The next operation maps new memory, and pins it for devices: it is slower, and an asynchronous save stalls
    training for longer.

    Example:
        >>> import fastckpt
        >>> fastckpt.background.release_buffers()
    """
    global _generation  # noqa: PLW0603 - counted here alone
    _generation += 1
    for free in (_free, _free_staging):
        for memory in tuple(free):
            with contextlib.suppress(ValueError):  # another thread has taken it
                free.remove(memory)
                memory.close()
    _device.release()


def _forget() -> None:
    # A forked child has none of the memory; closing it there does nothing.
    _free.clear()
    _free_staging.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget)
