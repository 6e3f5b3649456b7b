"""Asynchronous saves: the state may change again while its snapshot is written."""

# ruff: noqa: SLF001 - a handle and the job behind it are one thing in two parts, one for each side

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._api import in_flight
from fastckpt._api.options import check_bandwidth, check_engine, check_in_flight, check_nice
from fastckpt._api.outcome import logger
from fastckpt._api.save import NO_TENSORS, step_of
from fastckpt._files import check_files
from fastckpt._paths import path_of
from fastckpt._state.flatten import flatten
from fastckpt._state.groups import split_model
from fastckpt._units import bytes_of

from .job import Job
from .pending import PendingSave

if TYPE_CHECKING:
    from fastckpt._api.options import Engine
    from fastckpt._files import Files
    from fastckpt._paths import AnyPath


def save_async(  # noqa: PLR0913 - one more than save has
    state: Any,
    path: AnyPath,
    *,
    lazy: bool = False,
    max_in_flight: int = 1,
    overwrite: bool = True,
    metadata: Any = None,
    files: Files | None = None,
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
    ``result()``. If it is never asked for, the next ``save_async`` raises it and does nothing else; call again to save.
    Without a next one, it is written to stderr when the process ends, also if multiprocessing forked that process.

    Args:
        state: as for :func:`fastckpt.save`.
        path: as for :func:`fastckpt.save`. A save to the same path that is in flight is waited for.
        lazy: return before torch tensors are copied; everything else is copied all the same. They must not
            change until ``wait_staged()`` of the handle returns: see :func:`fastckpt.guard`. If they do, the
            checkpoint holds a mixture of old and new values, and nothing detects that.
        max_in_flight: wait until fewer saves than this are in flight.
        overwrite: as for :func:`fastckpt.save`.
        metadata: as for :func:`fastckpt.save`.
        files: as for :func:`fastckpt.save`. Contents are taken at the call.
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
        FileExistsError: something has the name that may not be replaced.
        NotADirectoryError: a directory above ``path`` is a file.
        PermissionError: no directory can be made where ``path`` lies.
        Exception: an earlier asynchronous save failed, and its result was never asked for; or the copy failed.
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
    in_flight.raise_unasked("this call did nothing: call again to save")
    more = check_files("save_async", files)
    about = flatten(metadata, operation="save_async: metadata", refuse_tensors=NO_TENSORS)
    flat = flatten(state, operation="save_async")
    settings = {
        "model_prefix": split_model("save_async", state, flat, model_key),
        "overwrite": bool(overwrite),
        "files": more,
        "shard_size": file_bytes,
        "io": io,
        "threads": threads,
        "bandwidth_limit": limit,
        "nice": nice,
        "io_priority": io_priority,
        "step": step_of(metadata),
    }
    pending = PendingSave(target, began)
    job = Job(pending, flat, about.structure(), settings, progress=progress)
    pending._snapshot, pending._total = job.snapshot, job.snapshot.total
    del flat, about
    _launch(job, max_in_flight, lazy=lazy)
    return pending


def _launch(job: Job, max_in_flight: int, *, lazy: bool) -> None:
    """Prepare the snapshot and start the thread that writes it."""
    pending = job.pending
    began = time.perf_counter()
    try:
        in_flight.admit(pending, max_in_flight)
        job.waited = time.perf_counter() - began
        job.prepare(lazy=lazy)
        if not lazy:
            pending._set_staged()
        pending._held += time.perf_counter() - pending._began
        if job.start():
            return
    except BaseException:
        # A signal handler may have raised it, even while the thread starts.
        if job.claim():
            job.release()
            pending._abandon()
        else:
            pending.started = True
        raise
    job.run_here()


_tried: dict[tuple[int | None, str | None], bool] = {}


def _priority(nice: int | None, io_priority: str | None) -> tuple[int | None, str | None]:
    """The priorities that the kernel grants; what it refuses is logged once and left out."""
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
