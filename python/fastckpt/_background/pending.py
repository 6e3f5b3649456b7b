"""The handle of an asynchronous save, and the events that its job reports to it."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._api import in_flight
from fastckpt._api.ended import Ended
from fastckpt._api.event import Event
from fastckpt._api.export import badly, put, well
from fastckpt._api.io import DEFAULT_IO, IO, give_report
from fastckpt._api.outcome import logger, tell
from fastckpt._api.reports import SaveReport
from fastckpt._tensors.ranges import range_of

from .gate import Gate

if TYPE_CHECKING:
    from .late import Late


@dataclass(frozen=True, slots=True)
class SaveProgress:
    """The progress of an asynchronous save.

    Attributes:
        phase: ``staging`` (the state must not change yet), ``writing``, ``done``, ``failed`` or ``cancelled``.
        staged: bytes of tensors copied to the snapshot.
        written: bytes of files written, as of at most 0.1 s ago.
        total: bytes of all tensors.
    """

    phase: str
    staged: int
    written: int
    total: int


class PendingSave(in_flight.SaveInFlight):
    """A save that runs in the background; made by :func:`fastckpt.save_async`.

    Methods that ``concurrent.futures.Future`` has, too, behave the same. ``await pending`` also returns the report;
    cancelling the awaiting task does not cancel the save.

    Attributes:
        path: the checkpoint's directory, absolute.
    """

    def __init__(
        self, path: str, began: float, group: object | None = None, operation: Any = None, io: IO = DEFAULT_IO
    ) -> None:
        self.path = path
        self.caller = threading.get_ident()
        self.group, self.operation = group, operation
        self.started = False
        self.finished = Event()
        #: Opens when the program may change the state.
        self._staged = Gate()
        #: Opens when a step may continue, provided that its streams wait for the copies in progress on devices.
        self._may_step = Gate()
        #: The copies in progress on devices, in a lazy save.
        self._late: Late | None = None
        self.process = os.getpid()
        self._began = began
        self._io = io
        self._snapshot: _core.Snapshot | None = None
        self._total = 0
        self._written = 0
        self._cancelled = False
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[PendingSave], object]] = []
        # Seconds that the call took.
        self._called = 0.0
        # The log line and the span of the save belong to the caller's context.
        self._context = copy_context()

    def __repr__(self) -> str:
        return f"<PendingSave {self.path!r}: {self._phase()}>"

    # Queries.

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the state may change: it has been copied, or the save has ended. ``result`` raises a failure.

        Without ``IO(lazy=True)`` it returns at once. The time counts as stall.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            TimeoutError: the copy has not finished in time; it continues.
        """
        if self._staged.is_open():
            return
        self._same_process()
        with range_of("fastckpt.wait_staged"):
            staged = self._staged.wait(timeout)
        if not staged:
            raise TimeoutError(f"wait_staged: {self.path}: the state has not been copied after {timeout} s")

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is durable and return the report.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Returns:
            The report of the save.

        Raises:
            TimeoutError: it has not finished in time; it continues.
            CancelledError: it was cancelled.
            Exception: the failure, as :func:`fastckpt.save` would have raised it.
        """
        error = self.exception(timeout)
        if error is None:
            assert self._report is not None  # noqa: S101 - a save without an error has a report
            return self._report
        try:
            raise error
        finally:
            # The traceback of the error has this frame and the frames of its callers. The handle in it, which has the
            # error, would make a cycle, and all would live until Python collects cycles.
            del error, self

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended, and return why it failed, or None.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Returns:
            The error that :meth:`result` would raise, or None.

        Raises:
            TimeoutError: it has not finished in time; it continues.
            CancelledError: it was cancelled.
        """
        if not self.finished.is_set():
            self._same_process()
            if not self.finished.wait(timeout):
                raise TimeoutError(f"{self.path}: the save has not finished after {timeout} s and continues")
        if isinstance(self._error, CancelledError):
            raise CancelledError(str(self._error))
        if self._error is not None:
            in_flight.asked(self._error)
        return self._error

    def done(self) -> bool:
        """Whether the save has ended: it is durable, has failed or was cancelled."""
        return self.finished.is_set()

    def cancelled(self) -> bool:
        """Whether the save was cancelled before it was durable."""
        return isinstance(self._error, CancelledError)

    def progress(self) -> SaveProgress:
        """The progress of the save."""
        staged = 0 if self._snapshot is None else self._snapshot.staged
        return SaveProgress(self._phase(), staged, self._written, self._total)

    def cancel(self) -> bool:
        """Stop the save and wait until nothing of it is left; the old checkpoint stays.

        Returns:
            Whether the save was stopped; False if it is durable, or has failed. A second call returns the same.
        """
        if not self.finished.is_set():
            self._same_process()
            self._cancelled = True
            if self._snapshot is not None:
                self._snapshot.stop()
            self.finished.wait()
        return self.cancelled()

    def add_done_callback(self, function: Callable[[PendingSave], object]) -> None:
        """Call a function when the save ends, in the thread that writes; at once if it has ended.

        Args:
            function: called with this handle. Exceptions that it raises are logged.
        """
        self._callbacks.append(function)
        if self.finished.is_set():
            self._call_back()

    def __await__(self) -> Generator[Any, None, SaveReport]:
        import asyncio  # noqa: PLC0415 - a caller that awaits has imported it

        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def wake_loop(_: PendingSave) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(wake_loop)
        yield from future.__await__()
        return self.result()

    # Events.

    def _phase(self) -> str:
        if not self.finished.is_set():
            return "writing" if self._staged.is_open() else "staging"
        if self._error is None:
            return "done"
        return "cancelled" if self.cancelled() else "failed"

    def _same_process(self) -> None:
        if self.process != os.getpid():
            raise RuntimeError(f"the save to {self.path} belongs to the process that this one was forked from")

    def _call_back(self) -> None:
        while True:
            try:
                function = self._callbacks.pop(0)
            except IndexError:
                return
            try:
                function(self)
            except Exception:  # noqa: BLE001 - logged
                logger.exception("%s: a callback of the save raised", self.path)
            except BaseException:
                self._call_back()
                raise

    def _stall(self) -> float:
        """Seconds for which training has stopped for this save so far: the call, and waits on the host."""
        return self._called + self._may_step.seconds + self._staged.seconds

    def _hold_step(self) -> None:
        """Make a step that is about to begin in the calling thread wait.

        The host waits for copies of host tensors, and until those of device tensors have been requested; for the latter
        only the thread's streams wait, not the host.
        """
        if self._staged.is_open():
            return
        if not self._may_step.is_open():
            with range_of("fastckpt.wait_staged"):
                self._may_step.wait()
        late = self._late
        if late is not None:
            late.hold_step()

    def _set_staged(self) -> None:
        """Release all waiters."""
        self._may_step.open()
        self._staged.open()

    def _finish(self, error: BaseException | None) -> None:
        """Record the end of the save."""
        if error is not None:
            # The inner frames of the traceback would keep the state alive.
            traceback.clear_frames(error.__traceback__)
            if self._cancelled and isinstance(error, (CancelledError, KeyboardInterrupt)):
                error = CancelledError(f"the save to {self.path} was cancelled")
            else:
                in_flight.failed(in_flight.Failure(self, error))
            self._error = error
        self._late = None
        self._set_staged()
        ended = self._ended(error)
        in_flight.leave(self)
        self.finished.set()
        # Log only now: a signal handler that waits for this save may have interrupted a thread with the log's lock.
        try:
            self._context.run(self._log)
            if self._report is not None:
                self._context.run(self._give, self._report)
        finally:
            try:
                self._call_back()
            finally:
                # Export last, because it may block: before it, a manager's callback updates the latest checkpoint.
                self._context.run(put, ended)

    def _log(self) -> None:
        error = self._error
        if self._report is not None:
            tell(self._report)
        elif self.cancelled():
            logger.info("the asynchronous save to %s was cancelled", self.path)
        else:
            # Log the error as text: a handler that keeps records would keep the error, and with it its callers' frames.
            logger.error("the asynchronous save to %s failed: %s: %s", self.path, type(error).__name__, str(error))

    def _give(self, report: SaveReport) -> None:
        try:
            give_report(self._io, report)
        except Exception:  # noqa: BLE001 - the save is done, and the caller is elsewhere
            logger.exception("%s: on_report of the save raised", self.path)

    def _ended(self, error: BaseException | None) -> Ended | None:
        """Export the end of the save."""
        if error is not None:
            return badly("save", self.path, time.perf_counter() - self._began, error, asynchronous=True)
        return None if self._report is None else well(self._report)

    def _abandon(self, error: BaseException) -> None:
        """Record that the call itself failed: only threads that wait have this handle."""
        in_flight.leave(self)
        self._late = None
        self._set_staged()
        self.finished.set()
        put(self._ended(error))

    def _tick(self, done: int) -> None:
        self._written = done
        self._stop_if_cancelled()

    def _stop_if_cancelled(self) -> None:
        if self._cancelled:
            raise CancelledError
