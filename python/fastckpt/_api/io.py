"""How a call moves bytes: ``io=``, one record of options for all reads and writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from fastckpt import _core
from fastckpt._units import bytes_of

from .options import check_bandwidth, one_of
from .settings import record_of

if TYPE_CHECKING:
    from .reports import CopyReport, Report

#: Argument types of public functions, as type checkers see them.
Engine: TypeAlias = Literal["auto", "uring", "threads", "direct", "buffered"]

_MOST_NICE = 19
_LEAST_STAGING = 4 << 20
#: Seconds that a save in the background waits by default for an answer from the storage, and the value for no limit.
_PATIENCE, _ENDLESS = 600, 10**9


@record_of("io", "fastckpt.IO")
@dataclass(frozen=True, slots=True)
class IO:
    """How a call moves bytes: the ``io=`` of all reads and writes.

    The name of an engine is short for an ``IO``: ``io="buffered"`` is ``io=IO("buffered")``. One ``IO`` serves calls of
    all kinds; each call uses the options that concern it.

    Args:
        engine: ``auto``; ``uring`` or ``threads`` (direct I/O, buffered where it is refused); ``direct`` (the same, but
            OSError where direct I/O is refused); ``buffered``. ``auto`` follows the environment variable FASTCKPT_IO if
            it is set, else takes the first of these that works; the report names the engine that ran. A load with
            ``auto`` reads cached files from the page cache. If LOCAL_WORLD_SIZE is more than 1, a load of a whole
            checkpoint reads through the page cache, so that ranks of a node that load one path read the storage once;
            on storage of several machines, a load of some whole tensors does so, too. Neither load does so if one of
            the path's last two components names the rank (``rank-3``, by RANK or LOCAL_RANK). For other paths that only
            one rank loads, give ``uring``. Engines do not change how a URL is read; ``direct`` is an OSError there.
        threads: worker threads of this process, at most 256; by default one per core of this rank, within limits: at
            most 8 with ``uring``, 12 to 24 with ``threads``, 4 to 24 with ``buffered``; one thread below 2 MiB. There
            are never more threads than blocks (of 4 MiB). With tensors on devices there are at most 32, because each
            needs pinned memory. For a URL, 16 by default, each with a request of up to 8 MiB. In a save in the
            background the threads first copy, by default at most one per core, and then write.
        staging: the most bytes of staging buffers of an operation in this process: a number, or a string such as
            ``"512MB"``. By default 96 MiB for a save, 56 MiB for a load, 256 MiB for a URL, and with ``threads`` at
            least a block per thread. Bytes in transit to or from memory in small pages occupy them, so slow storage
            reaches at most this size divided by its latency. No effect for tensors on devices.
        progress: show a progress bar of the bytes that this process moves.
        bandwidth_limit: for saves and copies: bytes per second that this process may write, so that others can use the
            same storage: a number, or a string with a unit (``"2GB"``); None for no limit.
        lazy: for saves in the background: return before torch tensors of 64 KiB and more are copied; everything else is
            copied first. Every step of every ``torch.optim.Optimizer`` then waits for these copies. Other code that
            changes them in place must call ``wait_staged()`` of the handle first. If it does not, the save fails, and
            the error names the tensors. But changes that torch does not count (through ``tensor.data``, a numpy array
            over the same memory, a replayed CUDA graph) go undetected, and the checkpoint mixes old and new values. For
            buffers that forward changes see :func:`fastckpt.background.guard`. For tensors on a device the host does
            not wait: the stream of the step waits for the copies on the device.
        pin: for saves in the background: whether to pin the host memory, so that copies from devices run at link speed
            and overlap with training. Pinning is done in the background, piece by piece, and lasts until the memory is
            freed. Or the most bytes that may be pinned in this process: an int, or a string such as ``"8GB"``. The rest
            is copied unpinned, more slowly, and unless this is ``False``, ``warnings`` of the report mention it. No
            effect if no tensor is on a device.
        max_in_flight: for saves in the background: wait until fewer saves than this are in flight; saves of one process
            and of each process group are counted separately. Saves of a group write one after another.
        deadline: for saves: seconds. If a storage call lasts longer, and no other call of the save ends meanwhile, the
            save fails with :class:`fastckpt.exceptions.DeadlineError`; docs/async.md describes its threads and memory
            afterwards. ``math.inf`` for no deadline; None is 600 for saves in the background, else infinite.
        nice: for saves in the background: niceness of the writing threads, 0 to 19; None keeps that of the process.
        mmap: for loads: map the files instead of reading them, through the page cache, whatever FASTCKPT_IO says: new
            tensors and arrays are pages of the page cache, which all processes of a node share; a page is copied when
            it is first written to, so no write reaches a file. For checkpoints in the page cache. As long as the
            tensors are in use, no program may change or truncate the files in place, and if their storage fails,
            touching a page ends the process with SIGBUS. (Saving to the same path, or removing it, is safe on a local
            file system; on NFS another host must not do so.) With ``device``, new tensors there are copied from the
            pages, and so are tensors and arrays of ``into``, but only after all pages have been checked: a damaged
            checkpoint changes nothing. Not possible with ``dtype``, with URLs, or in loads that ranks make together.
        verify: for loads: compare every byte with its checksum. With ``mmap``, compare the pages at the time of the
            call; a page that memory pressure evicts is later read again unchecked. Without ``verify`` pages are read
            when they are touched.
        on_report: called with the report of each operation that succeeded: a :class:`SaveReport`, a
            :class:`LoadReport`, or that of a copy or verification. For a save in the background, the writing thread
            calls it, and logs an error of the function.

    Raises:
        TypeError: ``on_report`` is not a function.
        ValueError: an option is out of range.

    Example:
        >>> import fastckpt, numpy
        >>> io = fastckpt.IO(threads=2, bandwidth_limit="1GB")
        >>> fastckpt.save({"w": numpy.ones(3)}, "step-7", io=io).threads
        1
        >>> fastckpt.load("step-7", io="buffered")["w"]
        array([1., 1., 1.])
    """

    engine: Engine = "auto"
    _: KW_ONLY
    threads: int | None = None
    staging: int | str | None = None
    progress: bool = False
    bandwidth_limit: float | str | None = None
    lazy: bool = False
    pin: bool | int | str = True
    max_in_flight: int = 1
    nice: int | None = None
    deadline: float | None = None
    mmap: bool = False
    verify: bool = True
    on_report: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine", _check_engine("IO", self.engine))
        for name in ("progress", "lazy", "mmap", "verify"):
            object.__setattr__(self, name, bool(getattr(self, name)))
        if self.threads is not None and not _is_whole(self.threads, 1, _core.MOST_THREADS):
            raise ValueError(f"IO: threads must be None or an int from 1 to {_core.MOST_THREADS}, not {self.threads!r}")
        if not _is_whole(self.max_in_flight, 1, None):
            raise ValueError(f"IO: max_in_flight must be an int, at least 1, not {self.max_in_flight!r}")
        if self.nice is not None and not _is_whole(self.nice, 0, _MOST_NICE):
            raise ValueError(f"IO: nice must be None or an int from 0 to {_MOST_NICE}, not {self.nice!r}")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"IO: deadline must be None or seconds, more than 0, not {self.deadline!r}")
        check_bandwidth("IO", self.bandwidth_limit)
        most_staging(self)
        most_pinned(self)
        if self.on_report is not None and not callable(self.on_report):
            raise TypeError(f"IO: on_report must be a function, not {self.on_report!r}")


def check_io(operation: str, io: Any) -> IO:
    """``io=``: a record, or the name of an engine."""
    if isinstance(io, IO):
        return io
    if not isinstance(io, str):
        raise TypeError(f"{operation}: io must be the name of an engine or a fastckpt.IO, not {io!r}")
    return IO(_check_engine(operation, io, "io"))  # type: ignore[arg-type]


def without_report(io: Any) -> Any:
    """``io=`` of a load without its ``on_report``."""
    return replace(io, on_report=None) if isinstance(io, IO) else io


def give_report(io: IO, report: Report | CopyReport) -> None:
    """Call ``on_report``."""
    if io.on_report is not None:
        io.on_report(report)


def bytes_per_second(io: IO) -> int | None:
    """``bandwidth_limit`` as a number."""
    return check_bandwidth("IO", io.bandwidth_limit)


def deadline_of(io: IO, *, background: bool) -> timedelta | None:
    """``deadline`` as a timedelta; None for no deadline."""
    seconds = io.deadline if io.deadline is not None else _PATIENCE if background else math.inf
    return timedelta(seconds=seconds) if seconds < _ENDLESS else None


def most_staging(io: IO) -> int | None:
    """The most bytes of staging buffers; None for the core's own number."""
    found = None if io.staging is None else bytes_of("IO: staging", io.staging)
    if found is not None and found < _LEAST_STAGING:
        raise ValueError(f"IO: staging must be at least 4 MiB, which is one block, not {io.staging!r}")
    return found


def most_pinned(io: IO) -> int | None:
    """The most bytes that may be pinned in this process; None for any number."""
    pin = io.pin
    if isinstance(pin, bool):
        return None if pin else 0
    if type(pin) is int and pin == 0:
        return 0
    try:
        # A number of bytes without a unit must be whole.
        return bytes_of("pin", None if isinstance(pin, float) else pin)
    except ValueError:
        raise ValueError(
            "IO: pin must be True, False, or the most bytes to pin in this process: an int, or a string such as '8GB' "
            f"or '8GiB'; not {pin!r}"
        ) from None


def refuse_mmap(operation: str, io: IO) -> None:
    """Refuse ``mmap`` in a load that ranks make together."""
    if io.mmap:
        raise ValueError(
            f"{operation}: IO(mmap=True) maps files for one process: call fastckpt.load on each rank, which share the "
            "pages of their node, or leave it out"
        )


def _check_engine(operation: str, engine: Any, argument: str = "engine") -> str:
    return one_of(argument, get_args(Engine))(operation, engine)


def _is_whole(value: Any, least: int, most: int | None) -> bool:
    return type(value) is int and least <= value and (most is None or value <= most)


#: The options of a call without ``io=``.
DEFAULT_IO = IO()
