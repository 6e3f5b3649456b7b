"""Host memory for snapshots, kept from save to save: fresh memory is slower than a disk."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._tensors import device as _device

if TYPE_CHECKING:
    from collections.abc import Callable

#: Free memory. It changes in atomic steps only, so that signal handlers may save, too.
_free: list[Memory] = []
_generation = 0


class Memory:
    """The memory of one snapshot; pinned for a device once a snapshot of that device is to go there."""

    __slots__ = ("core", "generation", "nbytes", "unpin")

    def __init__(self, nbytes: int) -> None:
        self.core = _core.Memory(nbytes)
        self.nbytes = self.core.nbytes
        self.generation = _generation
        self.unpin: Callable[[], None] | None = None

    def pin(self, device: Any) -> None:
        """Make copies from ``device`` fast, where that can be done."""
        if self.unpin is None:
            from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - a device is torch's

            self.unpin = _torch.pin(device, self.core.address, self.nbytes)

    def close(self) -> None:
        """Unmap it."""
        if self.unpin is not None:
            self.unpin()
            self.unpin = None
        self.core.close()


def take(nbytes: int) -> Memory:
    """Memory for ``nbytes``, with what a former snapshot left in it; the smallest that is free, or new."""
    while True:
        fitting = [memory for memory in _free if memory.nbytes >= nbytes]
        chosen = min(fitting or _free, key=lambda memory: memory.nbytes, default=None)
        if chosen is None:
            return Memory(nbytes)
        try:
            _free.remove(chosen)
        except ValueError:  # another thread was faster
            continue
        if fitting:
            return chosen
        # Too small: it goes before its successor comes.
        chosen.close()


def give(memory: Memory) -> None:
    """Take back memory that is no longer in use."""
    if memory.generation == _generation:
        _free.append(memory)
    else:
        memory.close()


def release_buffers() -> None:
    """Free the host memory that asynchronous saves keep for the next one.

    That is one copy of the largest state saved so far for each save that was in flight at a time, and the small pinned
    buffers for copies from and to devices. The memory of a save in flight is freed when the save is
    done. The next save maps new memory, which makes its stall longer.
    """
    global _generation  # noqa: PLW0603 - counted here alone
    _generation += 1
    for memory in tuple(_free):
        with contextlib.suppress(ValueError):  # another thread has taken it
            _free.remove(memory)
            memory.close()
    _device.release()


def _forget() -> None:
    # A forked child has none of the memory; closing it there does nothing.
    _free.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget)
