"""Makes code that changes tensors wait until these are copied, or copies them first."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from fastckpt._api import in_flight

from .pending import PendingSave

#: Tensors of fewer bytes are copied at the call, even with ``lazy=True``.
SMALL = 64 << 10

_guards: WeakKeyDictionary[Any, Guard] = WeakKeyDictionary()
#: Removes the hook of all optimizers; None if there is no hook.
_unhook: Callable[[], None] | None = None


def hold_steps() -> None:
    """From the first call on, every step of every optimizer waits for the copies of lazy saves.

    The hook stays: Dynamo recompiles steps when it is added or removed. The hook takes about a microsecond in a step
    with nothing to wait for. It makes all optimizers wait: the step of one whose parameters are not saved may be the
    last before a saved value changes, such as an average of weights.
    """
    global _unhook  # noqa: PLW0603 - one hook for a process
    if _unhook is None:
        from fastckpt._tensors import torch as _torch  # noqa: PLC0415 - only tensors of torch's are copied late

        _unhook = _torch.before_steps(before_step)


def unhook() -> None:
    """Remove the hook, until the next lazy save."""
    global _unhook  # noqa: PLW0603
    if _unhook is not None:
        _unhook()
        _unhook = None


def before_step() -> None:
    """Let a step continue when it can harm no lazy save in flight."""
    for save in _lazy():
        save._hold_step()  # noqa: SLF001 - guards and handles are one thing in two parts


def wait_for_copies() -> None:
    """Wait until all lazy saves in flight have copied their tensors."""
    for save in _lazy():
        save.wait_staged()


def _lazy() -> list[PendingSave]:
    """The saves in flight for which this thread may wait."""
    return [
        save
        for save in in_flight.saves()
        if isinstance(save, PendingSave) and save.process == os.getpid() and in_flight.can_wait_for(save)
    ]


class Guard:
    """Copies the buffers of a module at each call of ``save_async``; made by :func:`fastckpt.background.guard`.

    As a context manager it removes itself at the end.
    """

    def remove(self) -> None:
        """Remove the guard: from the next save on, the module is treated like any other."""
        for module, guard in tuple(_guards.items()):
            if guard is self:
                del _guards[module]

    def __enter__(self) -> Guard:  # noqa: PYI034 - Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def guard(module: Any) -> Guard:
    """Make ``save_async`` with ``IO(lazy=True)`` copy the buffers of ``module`` before it returns.

    A guard is for modules whose forward changes large buffers: a queue of keys, a codebook, a memory bank. Nothing else
    needs a guard: every optimizer step waits for the copy, and tensors under 64 KiB (BatchNorm's statistics) are copied
    at the call. Code that changes larger tensors in other ways must first call ``wait_staged()`` of the save.

    A guard is not a hook, which code compiled earlier by ``torch.compile`` would not call. It lasts until the module is
    gone or the guard is removed. This call waits for saves whose copy is still running.

    Args:
        module: a ``torch.nn.Module``.

    Returns:
        The guard of the module: ``remove()`` removes it; as a context manager it removes itself.

    Raises:
        TypeError: ``module`` is not a module.

    Example:
        >>> import fastckpt, torch
        >>> module = torch.nn.Module()
        >>> module.register_buffer("queue", torch.zeros(1 << 20))
        >>> with fastckpt.background.guard(module):
        ...     pending = fastckpt.save_async(module, "step-7", io=fastckpt.IO(lazy=True))
        ...     _ = module.queue.fill_(1.0)
        >>> pending.result().bytes
        4194304
    """
    if not callable(getattr(module, "buffers", None)) or not callable(getattr(module, "register_buffer", None)):
        kind = type(module).__qualname__
        raise TypeError(
            f"guard: {kind} is an optimizer, or wraps one, and needs no guard: its step waits for the copy by itself"
            if callable(getattr(module, "step", None))
            else f"guard: {kind} is not a module; call wait_staged() of the pending save before you change tensors"
        )
    known = _guards.get(module)
    if known is None:
        known = _guards[module] = Guard()
        # A save that began earlier still has to copy the buffers; later saves see the guard.
        wait_for_copies()
    return known


def guarded() -> list[Any]:
    """The current buffers of all guarded modules."""
    # Only this rank's part of a DTensor is copied.
    return [getattr(buffer, "_local_tensor", buffer) for module in tuple(_guards) for buffer in module.buffers()]
