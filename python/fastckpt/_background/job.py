"""What an asynchronous save does between the call and the durable checkpoint."""

# ruff: noqa: SLF001 - a handle and the job behind it are one thing in two parts, one for each side

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt import _core
from fastckpt._api import host_memory, in_flight
from fastckpt._api.outcome import logger, report_of
from fastckpt._api.progress import ticker
from fastckpt._api.reports import SaveReport
from fastckpt._state.flatten import flatten
from fastckpt._tensors.ranges import range_of

from . import guard as _guard
from .claim import Claim

if TYPE_CHECKING:
    from fastckpt._state.flatten import Flat

    from .pending import PendingSave

#: How many references to tensors are dropped at a time, with a pause in which others can take the GIL.
_DROPPED = 500
#: How many tensors an error names.
_NAMED = 5


class Job:
    """One snapshot, from tensors to a checkpoint."""

    def __init__(
        self, pending: PendingSave, flat: Flat, metadata: str, settings: dict[str, Any], *, lazy: bool, progress: bool
    ) -> None:
        self.pending = pending
        self.keep = flat.keep
        self.movers = flat.movers
        self.rest = b"\1" * len(flat.keep)
        self.settings = settings
        self.options = _core.SaveOptions(**settings)
        self.progress = progress
        self.inline = False
        # Taken by the thread that begins, or by the caller who gives up before that.
        self.claim = Claim()
        fill = flat.fill if flat.movers else None
        self.snapshot = _core.Snapshot(flat.tensors, flat.structure(), metadata, self.options, fill)
        self.devices = {device for mover in flat.movers.values() if (device := getattr(mover, "device", None))}
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
        #: Of these: name, tensor, and its version at the call.
        self.versions: list[tuple[str, Any, int]] = []
        # Texts by the hundred thousand are freed here, on the caller's time: a background thread would hold the GIL.
        flat.tokens.clear()
        flat.tensors.clear()
        self.memory: host_memory.Memory | None = None
        self.waited = 0.0
        self.staging = 0.0

    def prepare(self) -> None:
        """Get memory, and copy what must be copied at the call."""
        self.memory = host_memory.take(self.snapshot.nbytes)
        self.snapshot.attach(self.memory.core)
        self.memory.pin(self.devices)
        if self.late:
            # First: a guard that comes meanwhile waits for this save.
            _guard.hold_steps()
            self._exempt_guarded()
        if not self.late:
            self.stage(self.rest, last=True)
            self.keep.clear()
            self.movers.clear()
            return
        self.versions = [(name, self.keep[index], self.keep[index]._version) for index, name in self.late.items()]
        rest = bytearray(len(self.keep))
        for index in self.late:
            rest[index] = 1
        self.stage(bytes(1 - late for late in rest), last=False)
        self.rest = bytes(rest)
        # Their memory must stay even if the tensors are given another. What has been copied is the caller's again.
        self.keep[:] = [self.keep[index].detach() for index in self.late]

    def _exempt_guarded(self) -> None:
        """Copy at the call what forward of a guarded module may change."""
        guarded = _guard.guarded()
        if not guarded:
            return
        # As in a state, so that the parts of a sparse buffer, or of one of a registered type, are found as well.
        flat = flatten(guarded, operation="guard", observe=True)
        changing = {_storage(value) for value in flat.keep if hasattr(value, "untyped_storage")} - {0}
        self.late = {index: name for index, name in self.late.items() if _storage(self.keep[index]) not in changing}

    def stage(self, wanted: bytes, *, last: bool) -> None:
        """Copy the tensors whose byte in ``wanted`` is not 0 into the snapshot."""
        began = time.perf_counter()
        with range_of("fastckpt.stage"):
            self.snapshot.stage(wanted, last=last, options=self.options)
        self.staging += time.perf_counter() - began

    def start(self) -> bool:
        """Start the background thread; whether there is one."""
        if in_flight.is_exiting():
            return False
        try:
            # No daemon: the interpreter waits for it at its end, while everything still works.
            threading.Thread(target=self.run, name="fastckpt-save", daemon=False).start()
        except RuntimeError as error:  # the process may have no more threads, or the interpreter is ending
            logger.warning("%s: no thread for the save, so the caller does it: %s", self.pending.path, error)
            return False
        # The thread says so itself when it runs, but the next save or drain must know now.
        self.pending.started = True
        return True

    def run_here(self) -> None:
        """Finish the save in the calling thread, which keeps its priority."""
        self.options = _core.SaveOptions(**self.settings | {"nice": None, "io_priority": None})
        self.inline = True
        self.run()

    def run(self) -> None:
        """The life of the background thread: the rest of the copy, then the writing."""
        if not self.claim.take():
            return
        pending = self.pending
        # Not before: a signal handler can interrupt the start of a thread, and must not wait for one it blocks.
        pending.started = True
        error: BaseException | None = None
        try:
            self._stop_if_cancelled()
            if not pending._staged.is_set():
                self.stage(self.rest, last=True)
                changed = self._changed()
                pending._set_staged()
                self._refuse(changed)
            self.let_go()
            self._stop_if_cancelled()
            pending._report = self._write()
        except BaseException as caught:  # noqa: BLE001 - `result` raises it
            error = caught
        finally:
            self.release()
        pending._finish(error)

    def _changed(self) -> list[str]:
        """The tensors that were changed in place since the call.

        A version is raised after its tensor has been written to. So a change that ended before its tensor was copied,
        or while it was, shows here, after the copy; and none that was allowed does, for who waits for the copy still
        waits. A change that is under way at this moment, and began before its tensor was copied, does not show.
        """
        names = [name for name, tensor, version in self.versions if tensor._version != version]
        self.versions.clear()
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

    def _write(self) -> SaveReport:
        pending = self.pending
        with ticker("save", pending.path, shown=True) if self.progress else nullcontext() as bar:

            def tick(done: int, total: int) -> None:
                pending._tick(done)
                if bar is not None:
                    bar(done, total)

            with range_of("fastckpt.write"):
                core = self.snapshot.save(pending.path, self.options, tick)
        pending._written = core["bytes"]
        # What the core did not see counts as planning, but for what is known.
        known = {"wait": self.waited, "stage": self.staging}
        core["phases"] = {**known, **core["phases"]}
        core["seconds"] += sum(known.values())
        return report_of(
            SaveReport,
            pending.path,
            pending._began,
            core,
            stall=time.perf_counter() - pending._began if self.inline else pending._held,
            staging=self.staging,
            staged=pending._total,
        )

    def let_go(self) -> None:
        """Drop what the state gave us, little by little."""
        self.versions.clear()
        while self.keep or self.movers:
            del self.keep[-_DROPPED:]
            for _ in range(min(len(self.movers), _DROPPED)):
                self.movers.popitem()
            if self.keep or self.movers:
                time.sleep(0.0005)

    def release(self) -> None:
        """Give the memory back."""
        self.snapshot.close()
        if self.memory is not None:
            host_memory.give(self.memory)
            self.memory = None
        self.let_go()


def _storage(tensor: Any) -> int:
    """Where the memory that a tensor is in begins; 0 where there is none."""
    address: int = tensor.untyped_storage().data_ptr()
    return address
