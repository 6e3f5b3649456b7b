"""Asynchronous saves: the state may change again while its snapshot is written."""

# ruff: noqa: SLF001 - a handle and the job behind it are one thing in two parts, one for each side

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastckpt import _core
from fastckpt._api import in_flight
from fastckpt._api.options import (
    DeviceEngine,
    check_bandwidth,
    check_engine,
    check_in_flight,
    check_nice,
    check_pin,
)
from fastckpt._api.outcome import Attempt, logger
from fastckpt._api.reuse import check_base, check_frozen, flags_of
from fastckpt._api.save import NO_TENSORS, step_of, warn_of_types
from fastckpt._api.tailor import Tailor
from fastckpt._files import Files, check_files
from fastckpt._paths import AnyPath, path_of
from fastckpt._state.flatten import flatten
from fastckpt._state.groups import split_model
from fastckpt._state.registry import Registry, Types
from fastckpt._tensors.ranges import range_of
from fastckpt._units import bytes_of

from .job import Job
from .pending import OnError, PendingSave, check_on_error


def save_async(  # noqa: PLR0913 - one more than save has
    state: Any,
    path: AnyPath,
    *,
    lazy: bool = False,
    pin: bool | int | str = True,
    max_in_flight: int = 1,
    on_error: OnError = "raise",
    overwrite: bool = True,
    metadata: Any = None,
    files: Files | None = None,
    base: AnyPath | None = None,
    frozen: str | Sequence[str] | None = None,
    shard_size: int | str = "5GB",
    model_key: str | None = "auto",
    exclude: str | Sequence[str] | None = None,
    dtype: Any = None,
    default: Callable[[Any], Any] | None = None,
    registry: Registry | None = None,
    io: DeviceEngine = "auto",
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
    ``result()``. If it is never asked for, the next ``save_async`` starts its own save and then raises it (see
    ``on_error``). Without a next one, it is written to stderr when the process ends, also if multiprocessing forked
    that process.

    Args:
        state: as for :func:`fastckpt.save`.
        path: as for :func:`fastckpt.save`. A save to the same path that is in flight is waited for.
        lazy: return before torch tensors of 64 KiB and more are copied; everything else is copied all the same. Every
            step of every ``torch.optim.Optimizer`` then waits until they are. What else changes them in place must
            call ``wait_staged()`` of the handle first. If it does not, the save fails, and the error names the
            tensors. But changes that torch does not count go unseen, and the checkpoint holds a mixture of old
            and new values: through ``tensor.data``, through a numpy array over the same memory, by a replayed CUDA
            graph. For buffers that forward changes see :func:`fastckpt.guard`. For tensors of a device the step does
            not wait on the host: the stream that it runs in waits for the copies, on the device.
        pin: whether the host memory is pinned for copies from devices: as fast as the link, and beside training. This
            happens in the background, in pieces, and lasts until the memory goes. Or the most bytes that may be pinned
            in this process: an int, or a string such as ``"8GB"``. What is not pinned is copied all the same, slower,
            and ``warnings`` of the report say so, but for ``False``. Without effect where no tensor is on a device.
        max_in_flight: wait until fewer saves than this are in flight.
        on_error: what becomes of a failure of this save that nobody asks for. ``raise``: the next ``save_async``
            starts its own save, and then raises it, with the handle of its own save as attribute ``pending_save``.
            ``warn``: the next one warns instead (RuntimeWarning). A function is called with the handle when the save
            fails, in the thread that writes, and the failure counts as told; if the function raises, that is
            logged, and the failure treated as with ``raise``.
        overwrite: as for :func:`fastckpt.save`.
        metadata: as for :func:`fastckpt.save`.
        files: as for :func:`fastckpt.save`. Contents are taken at the call.
        base: as for :func:`fastckpt.save`. The snapshot is compared, in the background.
        frozen: as for :func:`fastckpt.save`.
        shard_size: as for :func:`fastckpt.save`.
        model_key: as for :func:`fastckpt.save`.
        exclude: as for :func:`fastckpt.save`.
        dtype: as for :func:`fastckpt.save`. The snapshot has the new dtype.
        default: as for :func:`fastckpt.save`.
        registry: as for :func:`fastckpt.save`.
        io: as for :func:`fastckpt.save`.
        threads: threads that copy, at most one per core by default, then threads that write, by default as
            :func:`fastckpt.save` has them.
        bandwidth_limit: as for :func:`fastckpt.save`.
        nice: niceness of the writing threads, 0 to 19; None for that of the process.
        io_priority: I/O priority of the writing threads: ``idle``, or ``best-effort:0`` (first) to ``best-effort:7``;
            None for that of the process. Some I/O schedulers know no priorities.
        progress: show a progress bar. (The log has no progress lines, as other operations have.)

    Returns:
        A handle on the save.

    Raises:
        UnsupportedTypeError: the state or the metadata holds what cannot be stored, or is larger than the format
            allows, or a tensor cannot be cast.
        KeyError: a pattern matches nothing.
        TypeError: a pattern is not a string.
        FileExistsError: something has the name that may not be replaced.
        NotADirectoryError: a directory above ``path`` is a file.
        PermissionError: no directory can be made where ``path`` lies.
        Exception: an earlier asynchronous save failed, and its result was never asked for: this one has begun, and
            ``pending_save`` of the exception is its handle. Or the copy failed.
        ValueError: an argument is out of range, nothing of the state is left, or ``path`` or ``base`` is a URL.

    Warns:
        RuntimeWarning: an earlier asynchronous save with ``on_error="warn"`` failed; or a value may not come back, as
            for :func:`fastckpt.save`.
    """
    began = time.perf_counter()
    target = path_of("save_async", path)
    check_engine("save_async", io, threads, devices=True)
    file_bytes = bytes_of("save_async: shard_size", shard_size)
    limit = check_bandwidth("save_async", bandwidth_limit)
    check_in_flight("save_async", max_in_flight)
    most = check_pin("save_async", pin)
    check_nice("save_async", nice)
    check_on_error("save_async", on_error)
    nice, io_priority = _priority(nice, io_priority)
    earlier, patterns = check_base("save_async", base), check_frozen("save_async", frozen)
    with range_of("fastckpt.save_async"):
        with Attempt("save", target, asynchronous=True):
            _core.check_target(target, bool(overwrite))
            more = check_files("save_async", files)
            types = Types("save_async", registry)
            about = flatten(
                metadata, operation="save_async: metadata", refuse_tensors=NO_TENSORS, types=types, default=default
            )
            tailor = Tailor("save_async", exclude, dtype)
            flat = flatten(state, operation="save_async", types=types, default=default, excluded=tailor.excluded)
            tailor.fit(flat, types)
            warn_of_types("save_async", flat, about)
            settings = {
                "model_prefix": split_model("save_async", flat, model_key),
                "overwrite": bool(overwrite),
                "files": more,
                "base": earlier,
                "frozen": flags_of(patterns, [tensor.name for tensor in flat.tensors]),
                "shard_size": file_bytes,
                "io": io,
                "threads": threads,
                "bandwidth_limit": limit,
                "nice": nice,
                "io_priority": io_priority,
                "step": step_of(metadata),
            }
            pending = PendingSave(target, began, on_error)
            job = Job(pending, flat, about.structure(), settings, tailor, lazy=bool(lazy), pin=most, progress=progress)
            pending._snapshot, pending._total = job.snapshot, job.snapshot.total
        del flat, about
        _launch(job, max_in_flight)
    tell_unasked_but(pending)
    return pending


def tell_unasked_but(pending: PendingSave) -> None:
    """Raise, or warn of, an earlier failure that nobody asked for, now that ``pending`` has begun.

    Called by what the user calls.
    """
    try:
        in_flight.tell_unasked(
            f"save_async raised it because nobody had asked for its result; the save of this call, to {pending.path}, "
            "goes on: its handle is this error's pending_save",
            but=pending,
            stacklevel=4,
        )
    except BaseException as error:
        # An exception with slots cannot have it, nor can its note be true; there are none among Python's own.
        with contextlib.suppress(AttributeError):
            error.pending_save = pending  # type: ignore[attr-defined]
        raise


def _launch(job: Job, max_in_flight: int) -> None:
    """Prepare the snapshot and start the thread that writes it."""
    pending = job.pending
    began = time.perf_counter()
    try:
        in_flight.admit(pending, max_in_flight)
        job.waited = time.perf_counter() - began
        job.prepare()
        if not job.is_lazy:
            pending._set_staged()
        pending._called += time.perf_counter() - pending._began
        if job.start():
            return
    except BaseException as error:
        # A signal handler may have raised it, even while the thread starts.
        if job.claim.take():
            job.release(error)
            pending._abandon(error)
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
