"""Guards: what is about to change tensors waits until they have been copied."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from . import _flight
from ._pending import PendingSave

if TYPE_CHECKING:
    from types import TracebackType

    # Every type checker brings the stub; at run time nothing imports it.
    from typing_extensions import Self

_guards: WeakKeyDictionary[Any, Guard] = WeakKeyDictionary()


class Guard:
    """Hooks on one optimizer or module; made by :func:`fastckpt.guard`. As a context manager it removes itself."""

    def __init__(self, target: Any) -> None:
        # No reference to the target: its hooks refer to the guard.
        self._follows = False
        # In the order of their calls; they change in atomic steps.
        self._pending: list[PendingSave] = []
        self._handles: list[Any] = []
        if hasattr(target, "register_step_pre_hook"):
            self._handles.append(target.register_step_pre_hook(self._hook))
        elif hasattr(target, "register_forward_pre_hook"):
            # Forward changes buffers alone, such as the statistics of BatchNorm: who has none need not wait.
            for module in target.modules():
                # DistributedDataParallel itself has none, but copies those of the first rank over all below it.
                if any(True for _ in module.buffers(recurse=False)) or getattr(module, "broadcast_buffers", False):
                    # First: a hook of others, as of torch.nn.utils.spectral_norm, may change buffers itself.
                    self._handles.append(module.register_forward_pre_hook(self._hook, prepend=True))
        else:
            raise TypeError(
                f"guard: neither an optimizer nor a module: {type(target).__qualname__}; "
                "call wait_staged() of the pending save before you change tensors"
            )

    def add(self, pending: PendingSave | None) -> None:
        """Wait for ``pending``, too; None for all, now and later."""
        if pending is None:
            self._follows = True
        if pending is None or self._follows:
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
            for flight in _flight.in_flight():
                if isinstance(flight, PendingSave) and flight.holds_others():
                    flight.wait_staged()
            return
        for pending in tuple(self._pending):
            if pending.process == os.getpid():
                pending.wait_staged()
            # Only now: a wait that an exception ended must come again.
            self._forget(pending)

    def __getstate__(self) -> dict[str, Any]:
        # For a deep copy of a module with its hooks: the copy's tensors are in no save.
        return {"_follows": self._follows, "_pending": [], "_handles": []}

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
    """Let an optimizer's next step, or a module's next forward, wait until a lazy save has copied the state.

    Needed with ``save_async(..., lazy=True)``: without it tensors change under the copy, and the checkpoint holds a
    mixture that no checksum can tell. There is one guard for each target, however often this is called, so it may be
    called after every save::

        pending = fastckpt.save_async(state, path, lazy=True)
        fastckpt.guard(optimizer, pending)

    or once before training, without ``pending``: then it waits for whatever save is being copied at each step.

    Args:
        target: a ``torch.optim.Optimizer`` (its ``step`` waits), or a ``torch.nn.Module``: ``forward`` of each of its
            submodules that has buffers waits, since it may change them, as BatchNorm does, before its other hooks. What
            changes tensors otherwise (an average of weights, code that assigns to parameters, a hook before the step
            that was registered earlier) must call ``wait_staged()`` itself.
        pending: the save to wait for; None for all, now and later.

    Returns:
        The guard: ``remove()`` takes it off; it is a context manager that does.

    Raises:
        TypeError: the target is neither.
    """
    known = _guards.get(target)
    if known is None:
        known = _guards[target] = Guard(target)
    known.add(pending)
    return known
