"""What an asynchronous save of one process does between the call and the durable checkpoint."""

# ruff: noqa: SLF001 - a handle and the job behind it are one thing in two parts, one for each side

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt import _core
from fastckpt._api import in_flight
from fastckpt._api.single_process import FromSnapshot, SingleProcess
from fastckpt._api.write import Agreed, core_options
from fastckpt._state.flatten import flatten

from . import guard as _guard
from .background_save import BackgroundSave
from .late import Late, changed, versions_of

if TYPE_CHECKING:
    from fastckpt._api.save_request import SaveRequest
    from fastckpt._tensors.movers import Range

    from .pending import PendingSave

#: After how many seconds of waiting for its base a save notices that it was cancelled.
_NOTICE = 0.05
#: How many tensors an error names.
_NAMED = 5


class Job(BackgroundSave):
    """One snapshot, from tensors to a checkpoint.

    Memory that a device still reads must neither be changed nor be given to another tensor. The program's own
    references do not see to that: they may go when the call returns. So the job holds references of its own until the
    copies have ended; versions are read from these, too. And each copy is noted with the allocator
    (``Tensor.record_stream``, in :mod:`fastckpt._tensors.device`), for a reference does not keep what
    ``untyped_storage().resize_(0)`` gives back, as FSDP does with parameters that it has gathered: the allocator then
    lends that memory to nobody before the copy has read it.
    """

    def __init__(self, pending: PendingSave, request: SaveRequest, pin: int | None, *, lazy: bool) -> None:
        super().__init__(pending, request, pin)
        flat = request.flat
        agreed = SingleProcess().agree(request)
        options = core_options(request, agreed)
        self.snapshot = _core.Snapshot(flat.tensors, agreed.structure, agreed.metadata, options, agreed.fill)
        self.agreed = Agreed(prefix=agreed.prefix, frozen=agreed.frozen)
        self.group = FromSnapshot(self.agreed, self.snapshot)
        pending._snapshot, pending._total = self.snapshot, self.snapshot.total
        self.keep = flat.keep
        self.movers = flat.movers
        #: What the core has still to copy: 1 for each tensor of the host, 0 for those of devices.
        self.rest = self._on_host(len(flat.keep))
        #: What is copied in the background: names by number. Of inference tensors torch counts no changes, and of the
        #: parts of a tensor only some.
        self.late = (
            {
                index: tensor.name
                for index, (tensor, value) in enumerate(zip(flat.tensors, flat.keep, strict=True))
                if tensor.capacity >= _guard.SMALL
                and index not in flat.inner
                and not isinstance(value, np.ndarray)
                and not value.is_inference()
            }
            if lazy
            else {}
        )
        #: Whether something is copied in the background, or by devices on their own.
        self.is_lazy = bool(self.late) or (lazy and bool(self.devices.sources.devices))
        #: Late tensors of the host, and their versions at the call.
        self.versions: list[tuple[str, Any, int]] = []
        #: Late tensors of devices that have not been asked for.
        self.unasked: list[Range] = []
        # Texts by the hundred thousand are freed here, on the caller's time: a background thread would hold the GIL.
        flat.tokens.clear()
        flat.tensors.clear()
        #: Saves that write what this one compares itself with. Earlier ones alone: two that wait for each other would
        #: wait for ever.
        self.earlier = [save for save in in_flight.to_path(request.base) if save is not pending]

    def _on_host(self, count: int) -> bytes:
        host = bytearray(b"\1" * count)
        for index in self.movers:
            host[index] = not self.devices.is_on_device(index)
        return bytes(host)

    def prepare(self) -> None:
        """Get memory, and copy what must be copied at the call."""
        memory = self.devices.take(self.snapshot.nbytes)
        self.snapshot.attach(memory.core)
        if self.is_lazy:
            # First: a guard that comes meanwhile waits for this save.
            _guard.hold_steps()
            self._exempt_guarded()
        with self.copying():
            if self.is_lazy:
                self._prepare_late()
            else:
                self._copy_all()

    def _exempt_guarded(self) -> None:
        """Copy at the call what forward of a guarded module may change."""
        guarded = _guard.guarded()
        if not guarded:
            return
        # As in a state, so that the parts of a sparse buffer, or of one of a registered type, are found as well.
        flat = flatten(guarded, operation="guard", observe=True)
        changing = {_storage(value) for value in flat.keep if hasattr(value, "untyped_storage")} - {0}
        self.late = {index: name for index, name in self.late.items() if _storage(self.keep[index]) not in changing}
        self.is_lazy = bool(self.late or self.devices.sources.devices)

    def _copy_all(self) -> None:
        """Copy everything, and wait for it."""
        ranges = self._ranges()
        self.devices.pin()
        is_pinned = self.devices.is_pinned
        if is_pinned:
            self.devices.ask(ranges)
        # While devices copy, or while the memory is being pinned for them.
        self.stage(self.rest, last=not ranges)
        if not is_pinned:
            self.devices.ask(ranges)
        self._arrive(last=bool(ranges))
        self.keep.clear()
        self.movers.clear()

    def _prepare_late(self) -> None:
        """Copy what a lazy save copies at the call, and ask for what can be asked for now."""
        keep, late, rest = self.keep, self.late, self.rest
        self.versions = versions_of({name: keep[index] for index, name in late.items() if rest[index]})
        asked = Late(versions_of({name: keep[index] for index, name in late.items() if not rest[index]}))
        self.pending._late = asked
        ranges = self._ranges()
        must_pin = self.devices.must_pin()
        # Who changes these may be no step, and nobody calls us then: so the caller's streams wait now, and those of
        # steps, which may be others, as for all copies.
        asked.copies += self.devices.ask(each for each in ranges if each[0] not in late)
        for copies in asked.copies:
            copies.hold_streams()
        # Not before: these few are copied as the device can, into memory as it is, and the call waits for no pinning.
        if must_pin:
            self.devices.pin()
        self.unasked = [each for each in ranges if each[0] in late]
        if self.unasked and self.devices.is_pinned:
            # From here on copies need no thread of the host, not even the GIL while forward holds it.
            asked.copies += self.devices.ask(self.unasked)
            self.unasked = []
        self.stage(bytes(byte and index not in late for index, byte in enumerate(rest)), last=False)
        self.rest = bytes(byte and index in late for index, byte in enumerate(rest))
        # Their memory must stay even if the tensors are given another. What has been copied is the caller's again.
        keep[:] = [keep[index].detach() for index in late]
        if not self.unasked and not any(self.rest):
            self.pending._may_step.open()

    def _ranges(self) -> list[Range]:
        """Where the tensors on devices go."""
        if not self.devices.sources.devices:
            return []
        places = self.snapshot.places()
        return [(index, 0, *places[index]) for index in self.movers if self.devices.is_on_device(index)]

    def stage(self, wanted: bytes, *, last: bool) -> None:
        """Have the core copy the tensors whose byte in ``wanted`` is not 0 into the snapshot."""
        self.snapshot.stage(wanted, last=last, options=core_options(self.request, self.agreed))

    def _arrive(self, *, last: bool) -> None:
        """Wait for devices; the ``last`` bytes of all are there then."""

        def arrived(nbytes: int) -> None:
            self.snapshot.copied(nbytes)
            if self.request.counters is not None:
                self.request.counters.staged(self.snapshot.staged)
            self._stop_if_cancelled()

        self.devices.wait(arrived)
        if last:
            self.stage(bytes(len(self.rest)), last=True)

    def finish(self) -> None:
        """Copy the rest, and wait for what writes the base."""
        self._stop_if_cancelled()
        if not self.pending._staged.is_open():
            with self.copying():
                names = self._copy_late()
            self._set_staged()
            self._refuse(names)
        self.free()
        for save in self.earlier:
            while not save.finished.wait(_NOTICE):
                self._stop_if_cancelled()

    def _copy_late(self) -> list[str]:
        """Copy what is left of a lazy save; the names of the tensors that were changed meanwhile."""
        late = self.pending._late
        assert late is not None  # noqa: S101 - where the call did not copy everything
        devices = bool(self.devices.sources.devices)
        self.stage(self.rest, last=not devices)
        if self.unasked:
            late.copies += self.devices.ask(self.unasked, self._stop_if_cancelled)
        names = changed(self.versions)
        self.versions.clear()
        self.pending._may_step.open()
        self._arrive(last=devices)
        names += late.changed()
        late.forget()
        return names

    def _refuse(self, names: list[str]) -> None:
        if not names:
            return
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise RuntimeError(
            f"save_async: {self.pending.path}: changed in place while lazy=True was copying: "
            f"{', '.join(names[:_NAMED])}{more}. Nothing was written. Call wait_staged() of the pending save before "
            "you change tensors otherwise than by an optimizer's step, or save with lazy=False"
        )

    def _stop_if_cancelled(self) -> None:
        if self.pending._cancelled:
            raise CancelledError

    def close(self) -> None:
        """Free the snapshot."""
        self.snapshot.close()


def _storage(tensor: Any) -> int:
    """Where the memory that a tensor is in begins; 0 where there is none."""
    address: int = tensor.untyped_storage().data_ptr()
    return address
