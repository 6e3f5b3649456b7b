"""Asynchronous saves: the state may change again while its snapshot is written."""

# ruff: noqa: SLF001 - a handle and the job behind it are one thing in two parts, one for each side

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import CancelledError
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt import _core
from fastckpt._api import in_flight as _flight
from fastckpt._api.options import check_bandwidth, check_engine, check_in_flight, check_nice
from fastckpt._api.outcome import logger, report_of
from fastckpt._api.progress import ticker
from fastckpt._api.reports import SaveReport
from fastckpt._api.save import NO_TENSORS, step_of
from fastckpt._paths import path_of
from fastckpt._state.flatten import Flat, flatten
from fastckpt._state.groups import split_model
from fastckpt._units import bytes_of

from . import arenas as _arenas
from . import guard as _guard
from .pending import PendingSave

if TYPE_CHECKING:
    from fastckpt._api.options import Engine
    from fastckpt._paths import AnyPath

#: References to so many tensors are dropped at a time, with a pause for whoever wants the GIL.
_DROPPED = 500


class _Job:
    """One snapshot, from tensors to a checkpoint."""

    def __init__(self, pending: PendingSave, flat: Flat, metadata: str, settings: dict[str, Any]) -> None:
        self.pending = pending
        self.keep = flat.keep
        self.movers = flat.movers
        self.rest = b"\1" * len(flat.keep)
        self.settings = settings
        self.threads = settings["threads"]
        self.progress = settings.pop("progress")
        self.inline = False
        # Taken by the thread that begins, or by the caller who gives up before that.
        self.unclaimed = [True]
        self.snapshot = _core.Snapshot(flat.tensors, flat.structure(), metadata, flat.fill if flat.movers else None)
        self.devices = {device for mover in flat.movers.values() if (device := getattr(mover, "device", None))}
        # Texts by the hundred thousand are freed here, on the caller's time: a background thread would hold the GIL.
        flat.tokens.clear()
        flat.tensors.clear()
        self.memory: _arenas.Memory | None = None
        self.waited = 0.0
        self.staging = 0.0

    def prepare(self, *, lazy: bool) -> None:
        """Get memory, and copy what must be copied at the call."""
        self.memory = _arenas.take(self.snapshot.nbytes)
        for device in self.devices:
            self.memory.pin(device)
        if not lazy:
            self.stage(self.rest, last=True)
            self.keep.clear()
            self.movers.clear()
            return
        # Only tensors have a guard that waits for them, and not those that a guarded module's forward may change.
        changing = self._changing()
        now = bytes(
            isinstance(value, np.ndarray) or (bool(changing) and _storage(value) in changing) for value in self.keep
        )
        self.stage(now, last=False)
        self.rest = bytes(not at_once for at_once in now)
        # Their memory must stay even if the tensors are given another. What has been copied is the caller's again.
        self.keep[:] = [None if at_once else value.detach() for value, at_once in zip(self.keep, now, strict=True)]

    def _changing(self) -> set[int]:
        """The storages of what forward of a guarded module may change."""
        # First: a guard that comes between waits for this save as for one that does not know of it.
        self.pending.guards = _guard.guards()
        if not self.pending.guards:
            return set()
        # As in a state, so that the parts of a sparse buffer, or of one of a registered type, are found as well.
        flat = flatten(_guard.buffers(), operation="guard", observe=True)
        return {_storage(value) for value in flat.keep if hasattr(value, "untyped_storage")} - {0}

    def stage(self, wanted: bytes, *, last: bool) -> None:
        """Copy the tensors whose byte in ``wanted`` is not 0 into the snapshot."""
        assert self.memory is not None  # noqa: S101 - prepare comes first
        began = time.perf_counter()
        self.snapshot.stage(self.memory.arena, wanted, last=last, threads=self.threads)
        self.staging += time.perf_counter() - began

    def claim(self) -> bool:
        """Whether the caller of this, the first one, is to bring the save to its end."""
        try:
            self.unclaimed.pop()
        except IndexError:
            return False
        return True

    def start(self) -> bool:
        """Start the background thread; whether there is one."""
        if _flight.is_exiting():
            return False
        try:
            # No daemon: the interpreter waits for it at its end, while everything still works.
            threading.Thread(target=self.run, name="fastckpt-save", daemon=False).start()
        except RuntimeError as error:  # the process may have no more threads, or the interpreter is ending
            logger.warning("%s: no thread for the save, so the caller does it: %s", self.pending.path, error)
            return False
        # The thread says so itself when it gets to run, but whoever saves or drains next must know now.
        self.pending.launched = True
        return True

    def run(self) -> None:
        """The life of the background thread: the rest of the copy, then the writing."""
        if not self.claim():
            return
        pending = self.pending
        # Not before: a signal handler can interrupt the start of a thread, and must not wait for what that holds up.
        pending.launched = True
        error: BaseException | None = None
        try:
            self._stop_if_cancelled()
            if not pending._staged.is_open():
                self.stage(self.rest, last=True)
                pending._open_staged()
            self.let_go()
            self._stop_if_cancelled()
            pending._report = self._write()
        except BaseException as caught:  # noqa: BLE001 - it is told to whoever asks
            error = caught
        finally:
            self.release()
        pending._land(error)

    def _stop_if_cancelled(self) -> None:
        if self.pending._cancelled:
            raise CancelledError

    def _write(self) -> SaveReport:
        pending = self.pending
        assert self.memory is not None  # noqa: S101 - prepare comes first
        with ticker("save", pending.path, shown=True) if self.progress else nullcontext() as bar:

            def tick(done: int, total: int) -> None:
                pending._tick(done)
                if bar is not None:
                    bar(done, total)

            core = self.snapshot.save(self.memory.arena, pending.path, tick=tick, **self.settings)
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
            _arenas.give(self.memory)
            self.memory = None
        self.let_go()


def _storage(tensor: Any) -> int:
    """Where the memory that a tensor is in begins; 0 where there is none."""
    address: int = tensor.untyped_storage().data_ptr()
    return address


def save_async(  # noqa: PLR0913 - one more than save has
    state: Any,
    path: AnyPath,
    *,
    lazy: bool = False,
    max_in_flight: int = 1,
    overwrite: bool = True,
    metadata: Any = None,
    shard_size: int | str = "5GB",
    model_key: str | None = "auto",
    io: Engine = "auto",
    threads: int | None = None,
    bandwidth_limit: float | str | None = None,
    nice: int | None = None,
    io_priority: str | None = None,
    progress: bool = False,
) -> PendingSave:
    """Write ``state`` to the directory ``path`` in the background; the state may change when this returns.

    The tensors are copied to host memory first, and written from there: durable and whole when ``result()`` of the
    returned handle returns. The memory is one copy of the state for each save in flight; it is kept for the next save
    (see :func:`fastckpt.release_buffers`). The process does not end before the checkpoint is durable.

    A failure is logged (``fastckpt``, ERROR; on stderr where no logging is configured) when it happens, and raised by
    ``result()``. If nobody asks, the next ``save_async`` raises it and does nothing else; call again to save. If there
    is none, it is told on stderr at the end of the process, of one that multiprocessing forked, too.

    Args:
        state: as for :func:`fastckpt.save`.
        path: as for :func:`fastckpt.save`. A save to the same path that is in flight is waited for.
        lazy: return before torch tensors are copied; everything else is copied all the same. They must not
            change until ``wait_staged()`` of the handle returns: see :func:`fastckpt.guard`. If they do, the
            checkpoint holds a mixture of old and new values, and nothing tells.
        max_in_flight: wait until fewer saves than this are in flight.
        overwrite: as for :func:`fastckpt.save`.
        metadata: as for :func:`fastckpt.save`.
        shard_size: as for :func:`fastckpt.save`.
        model_key: as for :func:`fastckpt.save`.
        io: as for :func:`fastckpt.save`.
        threads: threads that copy, then threads that write; by default as many as this process may use cores, within
            limits.
        bandwidth_limit: as for :func:`fastckpt.save`.
        nice: niceness of the writing threads, 0 to 19; None for that of the process.
        io_priority: I/O priority of the writing threads: ``idle``, or ``best-effort:0`` (first) to ``best-effort:7``;
            None for that of the process. Some I/O schedulers know no priorities.
        progress: show a progress bar. (The log has no progress lines, as other operations have.)

    Returns:
        A handle on the save.

    Raises:
        UnsupportedTypeError: the state or the metadata holds what cannot be stored.
        FileNotFoundError: the parent of ``path`` is missing.
        FileExistsError: something has the name that may not be replaced.
        Exception: an earlier asynchronous save failed, and nobody had asked; or the copy failed.
        ValueError: an argument is out of range, or ``path`` is a URL.
    """
    began = time.perf_counter()
    target = path_of("save_async", path)
    check_engine("save_async", io, threads)
    file_bytes = bytes_of("save_async: shard_size", shard_size)
    limit = check_bandwidth("save_async", bandwidth_limit)
    check_in_flight("save_async", max_in_flight)
    check_nice("save_async", nice)
    nice, io_priority = _priority(nice, io_priority)
    _core.check_target(target, bool(overwrite))
    _flight.raise_unasked("this call did nothing: call again to save")
    about = flatten(metadata, operation="save_async: metadata", refuse_tensors=NO_TENSORS)
    flat = flatten(state, operation="save_async")
    settings = {
        "model_prefix": split_model("save_async", state, flat, model_key),
        "overwrite": bool(overwrite),
        "shard_size": file_bytes,
        "io": io,
        "threads": threads,
        "bandwidth_limit": limit,
        "nice": nice,
        "io_priority": io_priority,
        "step": step_of(metadata),
        "progress": progress,
    }
    pending = PendingSave(target, began)
    job = _Job(pending, flat, about.structure(), settings)
    pending._snapshot, pending._total = job.snapshot, job.snapshot.total
    del flat, about
    _launch(job, max_in_flight, lazy=lazy)
    return pending


def _launch(job: _Job, max_in_flight: int, *, lazy: bool) -> None:
    """Prepare the snapshot and start the thread that writes it."""
    pending = job.pending
    began = time.perf_counter()
    try:
        _flight.admit(pending, max_in_flight)
        job.waited = time.perf_counter() - began
        job.prepare(lazy=lazy)
        if not lazy:
            pending._open_staged()
        pending._held += time.perf_counter() - pending._began
        if job.start():
            return
    except BaseException:
        # A signal handler may have raised it, also while the thread starts.
        if job.claim():
            job.release()
            pending._abandon()
        else:
            pending.launched = True
        raise
    job.settings.update(nice=None, io_priority=None)
    job.inline = True
    job.run()


_tried: dict[tuple[int | None, str | None], bool] = {}


def _priority(nice: int | None, io_priority: str | None) -> tuple[int | None, str | None]:
    """The priorities that the kernel grants; what it refuses is told once and left out."""
    granted: list[Any] = []
    for key in ((nice, None), (None, io_priority)):
        if key not in _tried:
            try:
                _core.try_priority(*key)
                _tried[key] = True
            except OSError as error:
                # No thread to try it in says nothing about the next time.
                if error.errno != errno.EAGAIN:
                    _tried[key] = False
                logger.warning(
                    "save_async: %s: the kernel refuses: %s", "io_priority" if key[0] is None else f"nice={nice}", error
                )
        granted.append((key[0] if key[0] is not None else key[1]) if _tried.get(key) else None)
    return granted[0], granted[1]
