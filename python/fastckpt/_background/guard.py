"""Guards: what is about to change tensors waits until they have been copied, or they are copied before it can."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fastckpt._api import in_flight

from .pending import PendingSave

if TYPE_CHECKING:
    from types import TracebackType

    # Every type checker brings the stub; at run time nothing imports it.
    from typing_extensions import Self

_guards: WeakKeyDictionary[Any, Guard] = WeakKeyDictionary()

#: An optimizer lies at most so deep in its wrappers.
_WRAPPERS = 8


class Guard:
    """Keeps tensors of one optimizer or module as they were; made by :func:`fastckpt.guard`.

    An optimizer's step waits in a hook. A module's buffers are copied when the save is called: nothing could wait for
    them, for code that ``torch.compile`` has made of a module does not look for hooks that come later.

    As a context manager it removes itself.
    """

    def __init__(self, optimizer: Any, *, buffers: bool) -> None:
        # No reference to the target: its hooks refer to the guard.
        self._follows = False
        self._buffers = buffers
        # In the order of their calls; they change in atomic steps.
        self._pending: list[PendingSave] = []
        self._handles: list[Any] = []
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(self._hook))

    def add(self, pending: PendingSave | None) -> None:
        """Wait for ``pending``, too; None for all, now and later."""
        if self._buffers:
            for save in in_flight.saves() if pending is None else (pending,):
                # A save that began before this guard: its copy of the buffers is not made yet.
                if isinstance(save, PendingSave) and self not in save.guards and _is_ours(save):
                    save.wait_staged()
        if pending is None:
            self._follows = True
        if pending is None or self._follows or not self._handles:
            return
        for other in tuple(self._pending):
            if other.progress().phase != "staging":  # a target that is never used must not collect them
                self._forget(other)
        self._pending.append(pending)

    def _forget(self, pending: PendingSave) -> None:
        with contextlib.suppress(ValueError):  # another thread has done it
            self._pending.remove(pending)

    def _hook(self, *_: Any) -> None:
        if self._follows:
            for save in in_flight.saves():
                if isinstance(save, PendingSave) and save.holds_others():
                    save.wait_staged()
            return
        for pending in tuple(self._pending):
            if pending.process == os.getpid():
                pending.wait_staged()
            # Only now: a wait that an exception ended must come again.
            self._forget(pending)

    def __getstate__(self) -> dict[str, Any]:
        # For a deep copy of an optimizer with its hooks: the copy's tensors are in no save.
        return {"_follows": self._follows, "_buffers": False, "_pending": [], "_handles": []}

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for target, guard in tuple(_guards.items()):
            if guard is self:
                del _guards[target]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def guard(target: Any, pending: PendingSave | None = None) -> Guard:
    """Keep an optimizer's step and a module's forward from changing a state that a lazy save has yet to copy.

    Needed with ``save_async(..., lazy=True)``: without it tensors change under the copy, and the checkpoint holds a
    mixture that no checksum detects. There is one guard for each target, however often this is called, so it may be
    called after every save::

        pending = fastckpt.save_async(state, path, lazy=True)
        fastckpt.guard(optimizer, pending)

    or once before training, without ``pending``: then it holds for whatever save is being copied.

    Args:
        target: a ``torch.optim.Optimizer``: its ``step`` waits for the copy; or what wraps one as its ``optimizer``, as
            accelerate does. Or a ``torch.nn.Module``: ``save_async`` copies its buffers before it returns, since
            forward may change them, as BatchNorm's does, compiled or not. Or both in one, such as DeepSpeed's engine.
            What changes tensors otherwise (an average of weights, code that assigns to parameters, a hook before the
            step that was registered earlier) must call ``wait_staged()`` itself.
        pending: the save to wait for; None for all, now and later. A module's guard always holds for all later
            saves; this call waits for a save that began before it.

    Returns:
        The guard: ``remove()`` takes it off; it is a context manager that does.

    Raises:
        TypeError: the target is neither.

    Warns:
        RuntimeWarning: the target is a module without buffers: forward changes nothing, and only the optimizer needs a
            guard.
    """
    optimizer = _optimizer_of(target)
    is_module = callable(getattr(target, "buffers", None)) and callable(getattr(target, "register_buffer", None))
    if optimizer is None and not is_module:
        raise TypeError(
            f"guard: neither an optimizer with step hooks nor a module: {type(target).__qualname__}; "
            "call wait_staged() of the pending save before you change tensors"
        )
    # A wrapper and what it wraps have one guard.
    key = target if is_module else optimizer
    known = _guards.get(key)
    if known is None:
        known = _guards[key] = Guard(optimizer, buffers=is_module)
        if optimizer is None and not any(True for _ in target.buffers()):
            warnings.warn(
                f"fastckpt.guard: this {type(target).__qualname__} has no buffers, so its forward changes nothing that "
                "is saved, and this guard holds nothing back: guard the optimizer",
                RuntimeWarning,
                stacklevel=2,
            )
    known.add(pending)
    return known


def _optimizer_of(target: Any) -> Any:
    """The optimizer that ``target`` is or wraps, or None. A wrapper may inherit the methods without what they need."""
    for _ in range(_WRAPPERS):
        if callable(getattr(target, "register_step_pre_hook", None)) and hasattr(target, "_optimizer_step_pre_hooks"):
            return target
        target = getattr(target, "optimizer", None)
    return None


def _is_ours(pending: PendingSave) -> bool:
    """Whether ``pending`` can be waited for, here."""
    return pending.process == os.getpid() and pending.holds_others()


def guards() -> frozenset[Guard]:
    """The guards of modules: each save that begins now copies :func:`buffers`."""
    return frozenset(guard for guard in tuple(_guards.values()) if guard._buffers)  # noqa: SLF001


def buffers() -> list[Any]:
    """The buffers of all guarded modules, as they are at the moment."""
    return [
        buffer
        for target, guard in tuple(_guards.items())
        if guard._buffers  # noqa: SLF001
        for buffer in target.buffers()
    ]
