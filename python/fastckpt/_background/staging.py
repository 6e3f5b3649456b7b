"""The snapshot of a state for a save in the background: which parts are copied at the call, and which later."""

# ruff: noqa: SLF001 - a handle and what stands behind it are one thing in two parts, one for each side

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt._api.io import most_pinned
from fastckpt._api.write import Agreed, core_options
from fastckpt._state.flatten import flatten
from fastckpt._tensors.ranges import range_of

from . import guard as _guard
from .devices import Devices, mask
from .late import Late, changed, versions_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastckpt import _core
    from fastckpt._api.save_request import SaveRequest
    from fastckpt._tensors.movers import Range

    from .pending import PendingSave
#: Number of references to tensors that are dropped between pauses in which other threads can take the GIL.
_DROPPED = 500
#: How many tensors an error names.
_NAMED = 5


class Staging:
    """Makes one snapshot of the tensors of a state.

    Memory that a device still reads must neither be changed nor be given to another tensor. The program's references do
    not ensure that: they may go when the call returns. So this holds references until the copies have ended, and reads
    the versions from them. Each copy is also recorded with the allocator (``Tensor.record_stream``, in
    :mod:`fastckpt._tensors.device`), because a reference does not keep memory that ``untyped_storage().resize_(0)``
    frees, as FSDP does with gathered parameters: the allocator then reuses that memory only after the copy has read it.

    Args:
        pending: the handle.
        request: the save.
        snapshot: the snapshot, which has a place for each of its tensors.

    Attributes:
        devices: the devices to copy from.
        is_lazy: whether copies continue after the call, or on devices without the host.
        seconds: for how long the state has been copied.
    """

    def __init__(self, pending: PendingSave, request: SaveRequest, snapshot: _core.Snapshot) -> None:
        assert request.sources is not None  # noqa: S101 - it has just been built
        self._pending = pending
        self._request = request
        self._snapshot = snapshot
        pending._snapshot, pending._total = snapshot, snapshot.total
        self.devices = Devices(request.sources, most_pinned(request.settings.io))
        self.seconds = 0.0
        self._keep = request.flat.keep
        #: By tensor, whether the core still has to copy it: 1 for one on the host, 0 for one on a device.
        self._rest = mask(request.sources, len(self._keep), on_device=False)
        #: Tensors that are copied in the background: names by number.
        self.late = _countable(request) if request.settings.io.lazy else {}
        self.is_lazy = bool(self.late) or (request.settings.io.lazy and bool(request.sources.devices))
        #: Late host tensors, and their versions at the call.
        self._versions: list[tuple[str, Any, int]] = []
        #: Late tensors on devices that have not been requested yet.
        self._unasked: list[Range] = []

    def begin(self) -> None:
        """Get memory, and copy the tensors that must be copied at the call."""
        self._snapshot.attach(self.devices.take(self._snapshot.nbytes).core)
        if self.is_lazy:
            # This comes first: a guard that is made meanwhile waits for this save.
            _guard.hold_steps()
            self._exempt_guarded()
        with self._timed():
            if self.is_lazy:
                self._copy_early()
            else:
                self._copy_all()
        self._request.flat.wholes.clear()
        if not self.is_lazy:
            self._set_staged()

    def finish(self) -> None:
        """Copy the rest, and release the state.

        Raises:
            CancelledError: the save was cancelled.
            RuntimeError: a tensor was changed meanwhile.
        """
        self._pending._stop_if_cancelled()
        names: list[str] = []
        if not self._pending._staged.is_open():
            with self._timed():
                names = self._copy_late()
            self._set_staged()
        self._free()
        self._refuse(names)

    def close(self) -> None:
        """Give the memory back once no copy writes to it."""
        self.devices.settle()
        self._snapshot.close()
        self.devices.give_back()
        self._free()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """A context that counts the time of copying the state."""
        began = time.perf_counter()
        try:
            with range_of("fastckpt.stage"):
                yield
        finally:
            self.seconds += time.perf_counter() - began

    def _exempt_guarded(self) -> None:
        """Make the call copy the buffers that the forward of a guarded module may change."""
        guarded = _guard.guarded()
        if not guarded:
            return
        # Flattened like a state, so that the parts of sparse buffers and of registered types are found as well.
        flat = flatten(guarded, operation="guard", observe=True)
        changing = {_storage(value) for value in flat.keep if hasattr(value, "untyped_storage")} - {0}
        self.late = {index: name for index, name in self.late.items() if _storage(self._keep[index]) not in changing}
        self.is_lazy = bool(self.late or self.devices.sources.devices)

    def _copy_all(self) -> None:
        """Copy everything, and wait for the copies."""
        ranges = self._ranges()
        self.devices.pin()
        is_pinned = self.devices.is_pinned
        if is_pinned:
            self.devices.ask(ranges)
        # The host copies while devices copy, or while memory is being pinned for them.
        self.stage(self._rest, last=not ranges)
        if not is_pinned:
            self.devices.ask(ranges)
        self._arrive(last=bool(ranges))
        self._keep.clear()
        self._request.movers.clear()

    def _copy_early(self) -> None:
        """Copy the first part of a lazy save, and request the copies that can be requested now."""
        keep, late, rest = self._keep, self.late, self._rest
        self._versions = self._count(on_device=False)
        asked = self._pending._late = Late(self._count(on_device=True))
        ranges = self._ranges()
        must_pin = self.devices.must_pin()
        # Code other than a step may change these tensors without notice. So the caller's streams wait now; the streams
        # of steps, which may be different ones, wait for all copies.
        asked.copies += self.devices.ask(each for each in ranges if each[0] not in late)
        for copies in asked.copies:
            copies.hold_streams()
        # Pin only now: the tensors above can also be copied to unpinned memory, so the call does not wait for pinning.
        if must_pin:
            self.devices.pin()
        self._unasked = [each for each in ranges if each[0] in late]
        if self._unasked and self.devices.is_pinned:
            # From here on, copies need neither a host thread nor the GIL, which a forward pass may hold.
            asked.copies += self.devices.ask(self._unasked)
            self._unasked = []
        self.stage(bytes(byte and index not in late for index, byte in enumerate(rest)), last=False)
        self._rest = bytes(byte and index in late for index, byte in enumerate(rest))
        # The memory of late tensors must stay even if they get other memory. Copied memory belongs to the caller again.
        keep[:] = [keep[index].detach() for index in late]
        if not self._unasked and not any(self._rest):
            self._pending._may_step.open()

    def _count(self, *, on_device: bool) -> list[tuple[str, Any, int]]:
        """Late tensors, and their versions. torch counts a change of a DTensor in it or in its local tensor."""
        wholes = self._request.flat.wholes
        return versions_of(
            (name, tensor)
            for index, name in self.late.items()
            if self._rest[index] != on_device
            for tensor in (self._keep[index], wholes.get(index))
            if tensor is not None
        )

    def _copy_late(self) -> list[str]:
        """Copy the rest of a lazy save; returns the names of tensors that were changed meanwhile."""
        late = self._pending._late
        assert late is not None  # noqa: S101 - the call of a lazy save has set it
        devices = bool(self.devices.sources.devices)
        self.stage(self._rest, last=not devices)
        if self._unasked:
            late.copies += self.devices.ask(self._unasked, self._pending._stop_if_cancelled)
        names = changed(self._versions)
        self._versions.clear()
        self._pending._may_step.open()
        self._arrive(last=devices)
        names += late.changed()
        late.forget()
        return names

    def _ranges(self) -> list[Range]:
        """The place in the snapshot of tensors on devices."""
        if not self.devices.sources.devices:
            return []
        places = self._snapshot.places()
        return [(index, 0, *places[index]) for index in self._request.movers if self.devices.is_on_device(index)]

    def stage(self, wanted: bytes, *, last: bool) -> None:
        """Make the core copy the tensors whose byte in ``wanted`` is not 0 into the snapshot."""
        # Copying does not depend on the layout of the files.
        options = core_options(self._request, Agreed(prefix=""))
        try:
            self._snapshot.stage(wanted, last=last, options=options)
        except KeyboardInterrupt:
            self._pending._stop_if_cancelled()
            raise

    def _arrive(self, *, last: bool) -> None:
        """Wait for the devices; after the ``last`` call all bytes have arrived."""

        def arrived(nbytes: int) -> None:
            self._snapshot.copied(nbytes)
            if self._request.counters is not None:
                self._request.counters.staged(self._snapshot.staged)
            self._pending._stop_if_cancelled()

        self.devices.wait(arrived)
        if last:
            self.stage(bytes(len(self._rest)), last=True)

    def _set_staged(self) -> None:
        """Record that everything has been copied."""
        if self._request.counters is not None:
            self._request.counters.plan()
        self._pending._set_staged()

    def _refuse(self, names: list[str]) -> None:
        if not names:
            return
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise RuntimeError(
            f"save_async: {self._pending.path}: tensors changed in place while IO(lazy=True) was copying: "
            f"{', '.join(names[:_NAMED])}{more}. Nothing was written. Call wait_staged() of the pending save before "
            "you change tensors otherwise than by an optimizer's step, or save with IO(lazy=False)"
        )

    def _free(self) -> None:
        """Drop the references to the state, little by little."""
        keep, movers = self._keep, self._request.movers
        while keep or movers:
            del keep[-_DROPPED:]
            for _ in range(min(len(movers), _DROPPED)):
                movers.popitem()
            if keep or movers:
                time.sleep(0.0005)
        self._request.close()


def _countable(request: SaveRequest) -> dict[int, str]:
    """The tensors that may be copied late: names by number.

    torch counts no changes of inference tensors, and only some of the parts of a tensor.
    """
    values = iter(request.flat.keep)
    parts = [(tensor, index in flat.inner) for flat in request.parts for index, tensor in enumerate(flat.tensors)]
    return {
        number: tensor.name
        for number, ((tensor, is_inner), value) in enumerate(zip(parts, values, strict=True))
        if tensor.capacity >= _guard.SMALL
        and not is_inner
        and not isinstance(value, np.ndarray)
        and not value.is_inference()
    }


def _storage(tensor: Any) -> int:
    """The start address of the memory that a tensor is in; 0 if there is none."""
    address: int = tensor.untyped_storage().data_ptr()
    return address
