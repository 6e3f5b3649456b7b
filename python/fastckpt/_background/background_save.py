"""A save that its call begins, and that a thread finishes, or the call itself where there is no thread."""

# ruff: noqa: SLF001 - a handle and the job behind it are one thing in two parts, one for each side

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._api import in_flight
from fastckpt._api.outcome import logger
from fastckpt._api.progress import ticker
from fastckpt._api.write import write
from fastckpt._tensors.ranges import range_of

from .claim import Claim
from .devices import Devices

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from fastckpt._api.reports import SaveReport
    from fastckpt._api.save_request import SaveRequest
    from fastckpt._api.write import Group

    from .pending import PendingSave

#: How many references to tensors are dropped at a time, with a pause in which others can take the GIL.
_DROPPED = 500


class BackgroundSave(ABC):
    """What the saves of one process and of ranks share.

    Args:
        pending: the handle.
        request: what is saved.
        pin: the most bytes that may be pinned in this process; None for any number.

    Attributes:
        group: who saves.
        devices: what copies come from.
        claim: taken by whoever finishes the save, or gives it up before that.
        inline: whether the call finishes it.
        is_lazy: whether something is copied after the call.
    """

    group: Group[Any, Any]

    def __init__(self, pending: PendingSave, request: SaveRequest, pin: int | None) -> None:
        assert request.sources is not None  # noqa: S101 - it has just been built
        self.pending = pending
        self.request = request
        self.devices = Devices(request.sources, pin)
        self.claim = Claim()
        self.inline = False
        self.is_lazy = False
        self._waited = self._staging = 0.0

    def begin(self, max_in_flight: int = 1) -> None:
        """Wait for earlier saves, copy, and start the thread that writes.

        What it raises has been told to the other ranks.
        """
        pending, request = self.pending, self.request
        began = time.perf_counter()
        try:
            in_flight.admit(pending, max_in_flight)
            now = time.perf_counter()
            self._waited = now - began
            request.counters = _core.Operation(
                pending.path, pending._total, step=request.step, elapsed=now - pending._began
            )
            self.prepare()
            if not self.is_lazy:
                self._set_staged()
            pending._called += time.perf_counter() - pending._began
            if self.start():
                return
        except BaseException as error:
            # A signal handler may have raised it, even while the thread starts.
            if self.claim.take():
                self.release(error)
                pending._abandon(error)
                with self.turn():
                    raise
            pending.started = True
            raise
        self.run_here()

    @abstractmethod
    def prepare(self) -> None:
        """Get memory, and copy what must be copied at the call."""

    def finish(self) -> None:  # noqa: B027 - often there is none
        """Copy the rest."""

    def turn(self) -> AbstractContextManager[Any]:
        """Inside, it is the turn of this save, and other ranks hear of errors."""
        return nullcontext()

    def start(self) -> bool:
        """Start the thread; whether there is one."""
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

    def run(self) -> None:
        """The life of the thread."""
        if not self.claim.take():
            return
        pending = self.pending
        # Not before: a signal handler can interrupt the start of a thread, and must not wait for one it blocks; nor may
        # one wait for the call that it has interrupted, and that finishes the save itself.
        pending.started = not self.inline
        try:
            pending._finish(self._save())
        finally:
            # An error's traceback leads here, and the handle has the error: they would live until Python looks for
            # cycles.
            del self, pending

    def run_here(self) -> None:
        """Finish the save in the calling thread, which keeps its niceness.

        Raises:
            BaseException: what ends the program, KeyboardInterrupt and the like.
        """
        self.inline = True
        self.request.nice = None
        self.run()
        error = self.pending._error
        if error is not None and not isinstance(error, Exception):
            # Ctrl-C is the program's, not the save's alone.
            in_flight.asked(error)
            raise error

    def _save(self) -> BaseException | None:
        """Write what was copied, and let go of everything; why it failed, or None."""
        pending = self.pending
        error: BaseException | None = None
        try:
            with self.turn():
                self.finish()
                pending._report = self._write()
        except BaseException as caught:  # noqa: BLE001 - `result` raises it
            error = caught
        finally:
            self.release(error)
        # Where the checkpoint is there, so is the report, whatever the end of the turn was.
        return error if pending._report is None else None

    def _write(self) -> SaveReport:
        pending = self.pending
        with ticker("save", pending.path, shown=True) if self.request.progress else nullcontext() as bar:

            def tick(done: int, total: int) -> None:
                pending._tick(done)
                if bar is not None:
                    bar(done, total)

            tick(0, 0)
            report: SaveReport = write(self.request, self.group, tick, self._told)
        pending._written = report.bytes
        return report

    def _told(self) -> dict[str, Any]:
        """What the report has beside."""
        pending = self.pending
        return {
            "beside": {"wait": self._waited, "stage": self._staging},
            "warnings": self.devices.warnings,
            "stall": time.perf_counter() - pending._began if self.inline else pending._stall(),
            "staging": self._staging,
            "staged": pending._total,
        }

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Inside, the state is being copied."""
        began = time.perf_counter()
        try:
            with range_of("fastckpt.stage"):
                yield
        finally:
            self._staging += time.perf_counter() - began

    def _set_staged(self) -> None:
        """All has been copied."""
        if self.request.counters is not None:
            self.request.counters.plan()
        self.pending._set_staged()

    def release(self, error: BaseException | None) -> None:
        """Give the memory back, once nothing is copied to it any more; ``error`` is why the save failed, if it did."""
        counters = self.request.counters
        if counters is not None and error is not None:
            counters.fail(error.errno if isinstance(error, OSError) else None)
        self.devices.settle()
        self.close()
        self.devices.give_back()
        self.free()

    def close(self) -> None:  # noqa: B027 - as above
        """Have nothing use the memory any more."""

    def free(self) -> None:
        """Drop what the state gave us, little by little."""
        keep, movers = self.request.flat.keep, self.request.movers
        while keep or movers:
            del keep[-_DROPPED:]
            for _ in range(min(len(movers), _DROPPED)):
                movers.popitem()
            if keep or movers:
                time.sleep(0.0005)
        self.request.close()
