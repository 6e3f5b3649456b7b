"""Saving: a state becomes a durable checkpoint."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from fastckpt._paths import AnyPath, path_of
from fastckpt._tensors.ranges import range_of
from fastckpt._warn import warn

from . import in_flight
from .io import give_report
from .outcome import Attempt, conclude
from .progress import ticker
from .reports import SaveReport  # noqa: TC001 - the public signature names it
from .save_request import build_request
from .save_settings import SaveSettings
from .settings import takes
from .single_process import SingleProcess
from .write import write

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .save_settings import SaveOptions


@takes(SaveSettings)
def save(state: Any, path: AnyPath, *, metadata: Any = None, **options: Unpack[SaveOptions]) -> SaveReport:
    """Write ``state`` to the directory ``path``; the checkpoint is durable and complete when this returns.

    Until then ``path`` keeps its old contents. The state must not change meanwhile: the checkpoint would hold a mixture
    of old and new values.

    Args:
        state: any nesting of dicts, lists, tuples and sets with tensors, numpy arrays and Python values in it, named
            tuples, dataclasses, enums and the like; objects with a ``state_dict()`` (modules, optimizers) are stored as
            its result. Tensors come back on the CPU, contiguous; those that share memory, dtype, shape and strides are
            stored once and come back tied. Attributes that a program sets on a Parameter are not stored. docs/states.md
            has a table of all kinds of values.
        path: the checkpoint's directory, not a URL. Missing directories above it are made durably; a failed save leaves
            them. The save waits for an asynchronous save in flight to it.
        metadata: a state without tensors, which can be read separately: ``{"step": 1000}``.
        {options}

    Returns:
        The report: bytes, seconds by phase, engine.

    Raises:
        UnsupportedTypeError: the state or the metadata holds a value that cannot be stored, or is larger than the
            format allows, or a tensor cannot be cast; nothing was written.
        KeyError: a pattern of ``exclude`` or ``dtype``, or of frozen tensors, matches nothing; nothing was written.
        TypeError: a pattern is not a string, or an argument is unknown.
        FileExistsError: ``path`` exists, and it is not a checkpoint of fastckpt or ``overwrite`` is false.
        NotADirectoryError: a directory above ``path`` is a file.
        DeadlineError: the storage has not answered for as long as ``IO(deadline=...)``.
        OSError: the storage failed, with its ``errno``; the old checkpoint, if any, is untouched. (If only the final
            sync of the parent directory fails, the new checkpoint already has the name.)
        RuntimeError: the caller's current stream of a device that takes part is being captured into a graph; nothing
            was written.
        ValueError: an argument is out of range, ``path`` or ``base`` is a URL, the model key leads to no mapping,
            ``dtype`` is not a floating-point dtype, ``exclude`` leaves nothing, or a name in ``files`` is not a plain
            file name, or one of fastckpt's own.

    Warns:
        RuntimeWarning: a class of a value is not declared in this program, so that a load would refuse it, or is in
            ``__main__`` without another name; or an attribute besides the fields of a dataclass cannot be stored. Each
            warning is given once; a filter that turns warnings into errors ends the save before anything is written. Or
            an earlier asynchronous save failed, and its result was never requested: this save warns of it at its end.

    Example:
        >>> import fastckpt, torch
        >>> state = {"model": {"w": torch.ones(3)}, "step": 1000}
        >>> report = fastckpt.save(state, "runs/step-1000", metadata={"step": 1000})
        >>> report.bytes
        12
    """
    began = time.perf_counter()
    target = path_of("save", path)
    with range_of("fastckpt.save"), Attempt("save", target):
        settings = SaveSettings.of("save", options, save)
        with closing(build_request("save", target, state, metadata, settings, began=began)) as request:
            in_flight.wait_for_paths(target, request.base)
            with ticker("save", target, shown=settings.io.progress) as progress:
                report = write(request, SingleProcess(), progress)
    conclude(report)
    warn_of_failures()
    give_report(settings.io, report)
    return report


def warn_of_failures() -> None:
    """Warn of failures whose result was never requested, once a save is durable: the program may end soon."""
    for failure in in_flight.unasked():
        warn(in_flight.unasked_text(failure))
