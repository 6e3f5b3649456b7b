"""Asynchronous saves: the state may change again while its snapshot is written."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._api import in_flight
from fastckpt._api.io import deadline_of
from fastckpt._api.outcome import Attempt
from fastckpt._api.save_request import build_request
from fastckpt._api.save_settings import SaveSettings
from fastckpt._api.settings import takes
from fastckpt._api.single_process import FromSnapshot, SingleProcess
from fastckpt._api.write import Agreed, core_options
from fastckpt._paths import AnyPath, path_of
from fastckpt._tensors.ranges import range_of

from .background_save import BackgroundSave
from .pending import PendingSave  # noqa: TC001 - type hints of save_async name it

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastckpt._api.save_request import SaveRequest
    from fastckpt._api.save_settings import SaveOptions


class Job(BackgroundSave):
    """The job of one process: its snapshot holds the files, which are laid out at the call."""

    def __init__(self, request: SaveRequest) -> None:
        flat, agreed = request.flat, SingleProcess().agree(request)
        options = core_options(request, agreed)
        snapshot = _core.Snapshot(flat.tensors, agreed.structure, agreed.metadata, options, agreed.fill)
        super().__init__(request, snapshot)
        self.group = FromSnapshot(Agreed(prefix=agreed.prefix, frozen=agreed.frozen), snapshot)
        # Hundreds of thousands of strings are freed here, in the caller: a background thread would hold the GIL.
        flat.tokens.clear()
        flat.tensors.clear()


@takes(SaveSettings, like={SaveSettings: "fastckpt.save"})
def save_async(state: Any, path: AnyPath, *, metadata: Any = None, **options: Unpack[SaveOptions]) -> PendingSave:
    """Write ``state`` to the directory ``path`` in the background; the state may change when this returns.

    The tensors are first copied to host memory, then written: the checkpoint is durable and whole when ``result()`` of
    the returned handle returns. Each save in flight needs memory for one copy of the state; it is kept for the next
    save (see :func:`fastckpt.background.release_buffers`). The process does not end before the checkpoint is durable.

    A failure is logged (``fastckpt``, ERROR; on stderr where no logging is configured) when it happens, and raised by
    ``result()``. If the program never calls that, the next ``save_async`` starts its own save and then raises the
    failure, with the handle of the new save as attribute ``pending_save``. If no save follows, the failure is written
    to stderr when the process ends, even if multiprocessing forked that process.

    Args:
        state: as for :func:`fastckpt.save`.
        path: as for :func:`fastckpt.save`. The new save waits for one in flight to the same path.
        metadata: as for :func:`fastckpt.save`.
        {options}

    Casts to ``dtype`` happen in the copy; the snapshot is compared with ``base`` in the background. Unlike other
    operations, this save logs no progress lines.

    Returns:
        A handle on the save.

    Raises:
        UnsupportedTypeError: the state or the metadata holds a value that cannot be stored, or is larger than the
            format allows, or a tensor cannot be cast.
        KeyError: a pattern matches nothing.
        TypeError: a pattern is not a string, or an argument is unknown.
        FileExistsError: ``path`` exists and may not be replaced.
        DeadlineError: the storage does not answer.
        NotADirectoryError: a directory above ``path`` is a file.
        PermissionError: no directory can be made in the parent of ``path``.
        Exception: an earlier asynchronous save failed, and its result was never requested: this one has begun, and
            ``pending_save`` of the exception is its handle. Or the copy failed.
        ValueError: an argument is out of range, ``exclude`` leaves nothing, or ``path`` or ``base`` is a URL.

    Warns:
        RuntimeWarning: a value may not come back, as for :func:`fastckpt.save`.

    Example:
        >>> import fastckpt, torch
        >>> pending = fastckpt.save_async({"w": torch.ones(2)}, "step-7")
        >>> pending.result().bytes  # training goes on before it
        8
    """
    began = time.perf_counter()
    target = path_of("save_async", path)
    with range_of("fastckpt.save_async"):
        with Attempt("save", target, asynchronous=True):
            settings = SaveSettings.of("save_async", options, save_async)
            _core.check_target(target, settings.overwrite, deadline_of(settings.io, background=True))
            request = build_request("save_async", target, state, metadata, settings, began=began)
            try:
                job = Job(request)
            except BaseException:
                request.close()
                raise
        try:
            pending = job.begin()
        except BaseException as error:
            job.give_up(error)
            raise
    tell_unasked_but(pending)
    return pending


def tell_unasked_but(pending: PendingSave) -> None:
    """Raise, or warn of, an earlier failure whose result was never requested, now that ``pending`` has begun."""
    try:
        in_flight.tell_unasked(
            f"save_async raised it because its result was never requested; the save of this call, to {pending.path}, "
            "goes on: its handle is this error's pending_save",
            but=pending,
        )
    except BaseException as error:
        # An exception with slots cannot have a note; Python's own exceptions have no slots.
        with contextlib.suppress(AttributeError):
            error.pending_save = pending  # type: ignore[attr-defined]
        raise
