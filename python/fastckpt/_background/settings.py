"""Keyword arguments of saves in the background, in addition to those of every save."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TypedDict

from fastckpt import _core
from fastckpt._api.options import check_in_flight, check_nice, check_pin
from fastckpt._api.outcome import logger
from fastckpt._api.save_settings import SaveOptions
from fastckpt._api.settings import Settings, as_bool, option

from .pending import OnError, PendingSave, check_on_error  # noqa: F401 - OnError names a PendingSave


class BackgroundOptions(TypedDict, total=False):
    """The options of every save in the background."""

    lazy: bool
    pin: bool | int | str
    max_in_flight: int
    on_error: OnError
    nice: int | None


class SaveAsyncOptions(SaveOptions, BackgroundOptions, total=False):
    """What :func:`fastckpt.save_async` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundSettings(Settings):
    """How a state is saved in the background; checked."""

    given = BackgroundOptions

    lazy: bool = option(
        False,
        as_bool,
        "return before torch tensors of 64 KiB and more are copied; everything else is copied all the same. Every "
        "step of every ``torch.optim.Optimizer`` then waits until they are. Other code that changes them in place must "
        "call ``wait_staged()`` of the handle first. If it does not, the save fails, and the error names the tensors. "
        "But changes that torch does not count go unseen, and the checkpoint holds a mixture of old and new values: "
        "through ``tensor.data``, through a numpy array over the same memory, by a replayed CUDA graph. For buffers "
        "that forward changes see :func:`fastckpt.background.guard`. For tensors of a device the step does not wait "
        "on the host: the stream that it runs in waits for the copies, on the device.",
    )
    pin: int | None = option(
        True,
        check_pin,
        "whether the host memory is pinned for copies from devices: as fast as the link, and beside training. This "
        "happens in the background, in pieces, and lasts until the memory goes. Or the most bytes that may be pinned "
        'in this process: an int, or a string such as ``"8GB"``. What is not pinned is copied all the same, slower, '
        "and ``warnings`` of the report say so, but for ``False``. Without effect where no tensor is on a device.",
    )
    on_error: OnError = option(
        "raise",
        check_on_error,
        "how a failure is reported if the result of this save is never requested. ``raise``: the next ``save_async`` "
        "starts its own save, and then raises it, with the handle of its own save as attribute ``pending_save``. "
        "``warn``: the next one warns instead (RuntimeWarning). A function is called with the handle when the save "
        "fails, in the thread that writes, and the failure counts as told; if the function raises, that is logged, and "
        "the failure treated as with ``raise``.",
    )
    max_in_flight: int = option(
        1,
        check_in_flight,
        "wait until fewer saves than this are in flight; those of this process alone and of each process group are "
        "counted apart. Those of a group write one after the other.",
    )
    nice: int | None = option(
        None, check_nice, "niceness of the writing threads, 0 to 19; None keeps the niceness of the process."
    )


#: Whether the kernel grants a niceness.
_tried: dict[int, bool] = {}


def granted(nice: int | None) -> int | None:
    """The niceness, if the kernel grants it; a refusal is logged once, and the niceness is left out."""
    if nice is None:
        return None
    if nice not in _tried:
        try:
            _core.try_nice(nice)
            _tried[nice] = True
        except OSError as error:
            # If no thread could be started to try it in, nothing is known for the next time.
            if error.errno != errno.EAGAIN:
                _tried[nice] = False
            logger.warning("save_async: nice=%s: the kernel refuses: %s", nice, error)
    return nice if _tried.get(nice) else None
