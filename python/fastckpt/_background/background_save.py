"""A save that a call begins and a thread finishes, or the call itself if no thread can start."""

# ruff: noqa: SLF001 - a handle and the job behind it are one thing in two parts, one for each side

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._api import in_flight
from fastckpt._api.outcome import logger
from fastckpt._api.progress import ticker
from fastckpt._api.write import write

from .claim import Claim
from .nice import granted
from .pending import PendingSave
from .staging import Staging

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fastckpt._api.reports import SaveReport
    from fastckpt._api.save_request import SaveRequest
    from fastckpt._api.write import Group

#: Seconds after which a save that waits for its base notices that it was cancelled.
_NOTICE = 0.05


class BackgroundSave:
    """The common part of saves of one process and of ranks, which differ in the snapshot and its writer.

    Args:
        request: the save.
        snapshot: the destination of the copy.
        ranks: the ranks that save together; None for one process.
        operation: the turn of the ranks; None for one process.

    Attributes:
        pending: the handle.
        group: the processes that save.
        snapshot: the snapshot that was passed.
        staging: makes the copy.
        claim: taken by the thread or the call that finishes or abandons the save.
        inline: whether the call finishes it.
    """

    group: Group[Any]

    def __init__(
        self,
        request: SaveRequest,
        snapshot: _core.Snapshot,
        ranks: object | None = None,
        operation: Any = None,
    ) -> None:
        pending = self.pending = PendingSave(request.path, request.began, ranks, operation, request.settings.io)
        self.request = request
        self.snapshot = request.snapshot = snapshot
        self.staging = Staging(pending, request, snapshot)
        request.nice = granted(request.settings.io.nice)
        self._most = request.settings.io.max_in_flight
        self.claim = Claim()
        self.inline = False
        self._waited = 0.0
        #: Only the earlier saves that are writing the base: two saves that wait for each other would deadlock.
        self._earlier = in_flight.to_path(request.base, pending)

    def begin(self) -> PendingSave:
        """Wait for earlier saves, copy, and start the thread that writes; returns the handle.

        If this raises, the caller calls :meth:`give_up`; a signal handler may raise even while the thread starts.
        """
        pending, request = self.pending, self.request
        began = time.perf_counter()
        in_flight.admit(pending, self._most)
        now = time.perf_counter()
        self._waited = now - began
        request.counters = _core.Operation(
            pending.path, pending._total, step=request.step, elapsed=now - pending._began
        )
        self.staging.begin()
        pending._called += time.perf_counter() - pending._began
        if not self.start():
            self.run_here()
        return pending

    def give_up(self, error: BaseException) -> bool:
        """End the save because the call has failed, unless a thread has taken it over; returns whether it has ended."""
        if not self.claim.take():
            self.pending.started = True
            return False
        self.release(error)
        self.pending._abandon(error)
        return True

    def turn(self) -> AbstractContextManager[Any]:
        """A context in the turn of this save, which reports errors to the other ranks."""
        return nullcontext()

    def alive(self) -> None:
        """Report that the save is alive while it waits."""

    def start(self) -> bool:
        """Start the thread; returns whether it was started."""
        if in_flight.is_exiting():
            return False
        try:
            # The thread is not a daemon: the interpreter waits for it at exit, while everything still works.
            threading.Thread(target=self.run, name="fastckpt-save", daemon=False).start()
        except RuntimeError as error:  # no further thread is allowed, or the interpreter is ending
            logger.warning("%s: no thread for the save, so the caller finishes it: %s", self.pending.path, error)
            return False
        # The thread sets this itself when it runs, but the next save or drain needs it now.
        self.pending.started = True
        return True

    def run(self) -> None:
        """The body of the thread."""
        if not self.claim.take():
            return
        pending = self.pending
        # This is not set earlier: a signal handler can interrupt the start of a thread, and must not wait for a thread
        # that it blocks; nor may it wait for the interrupted call if that finishes the save itself.
        pending.started = not self.inline
        try:
            pending._finish(self._save())
        finally:
            # The traceback of the error refers to this frame, and the handle to the error: a cycle until Python
            # collects it.
            del self, pending

    def run_here(self) -> None:
        """Finish the save in the calling thread, which keeps its niceness.

        Raises:
            BaseException: an exception that ends the program, such as KeyboardInterrupt.
        """
        self.inline = True
        self.request.nice = None
        self.run()
        error = self.pending._error
        if error is not None and not isinstance(error, Exception):
            # Ctrl-C concerns the program, not only the save.
            in_flight.asked(error)
            raise error

    def _save(self) -> BaseException | None:
        """Write the snapshot, and release all references; returns the error, or None."""
        pending = self.pending
        error: BaseException | None = None
        try:
            try:
                self.staging.finish()
            except BaseException:
                # A step may continue before the save's turn comes, because the turn waits for earlier saves.
                self.staging.close()
                pending._set_staged()
                with self.turn():
                    raise
            with self.turn():
                self._wait_for_base()
                pending._report = self._write()
        except BaseException as caught:  # noqa: BLE001 - `result` raises it
            error = caught
        finally:
            self.release(error)
        # A checkpoint that exists has a report, however the turn ended.
        return error if pending._report is None else None

    def _wait_for_base(self) -> None:
        for save in self._earlier:
            while not save.finished.wait(_NOTICE):
                self.pending._stop_if_cancelled()
                self.alive()

    def _write(self) -> SaveReport:
        pending = self.pending
        with ticker("save", pending.path, shown=True) if self.request.settings.io.progress else nullcontext() as bar:

            def tick(done: int, total: int) -> None:
                pending._tick(done)
                if bar is not None:
                    bar(done, total)

            tick(0, 0)
            report: SaveReport = write(self.request, self.group, tick, self._told)
        pending._written = report.bytes
        return report

    def _told(self) -> dict[str, Any]:
        """Further fields of the report."""
        pending = self.pending
        return {
            "beside": {"wait": self._waited, "stage": self.staging.seconds},
            "warnings": self.staging.devices.warnings,
            "stall": time.perf_counter() - pending._began if self.inline else pending._stall(),
            "staging": self.staging.seconds,
            "staged": pending._total,
        }

    def release(self, error: BaseException | None) -> None:
        """Release everything; ``error`` is the reason if the save failed."""
        counters = self.request.counters
        if counters is not None and error is not None:
            counters.fail(error.errno if isinstance(error, OSError) else None)
        if self.snapshot.is_left:
            # The memory of the snapshot is given back when nothing refers to the snapshot.
            self.pending._snapshot = None
        self.staging.close()
