"""Reports the outcome of an operation to the caller and to the log."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, TypeVar

from fastckpt import _core
from fastckpt._warn import warn
from fastckpt.exceptions import ReplacedCheckpointError

from .export import badly, put, well
from .reports import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

logger = logging.getLogger("fastckpt")

_R = TypeVar("_R", bound=Report)
_T = TypeVar("_T")
# Seconds for which a load retries a checkpoint that keeps being replaced.
_REPLACED_WAIT = 30.0
_told: set[str] = set()


def until_settled(read: Callable[[], _T]) -> _T:
    """The result of ``read``, which restarts if a save has replaced the checkpoint."""
    give_up = time.monotonic() + _REPLACED_WAIT
    while True:
        try:
            return read()
        except ReplacedCheckpointError:  # noqa: PERF203 - the loop has few turns
            if time.monotonic() > give_up:
                raise


def warn_of_unknown(operation: str, names: Iterable[str]) -> None:
    """Warn of unknown types, whose values are returned in their stored form."""
    listed = list(names)
    shown = ", ".join(name[:_SHOWN] for name in listed[:_LISTED])
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    warn(
        f"fastckpt: {operation}: values of types that this program does not know are returned in their stored form: "
        f"{shown}{more}; to restore the types, declare them with fastckpt.register_type"
    )


#: The most types in a warning, and the most characters of each name.
_LISTED, _SHOWN = 20, 200


def conclude(report: _R) -> _R:
    """Log and export the report of an operation that has ended; returns it."""
    ended = well(report)
    tell(report)
    put(ended)
    return report


def tell(report: Report) -> None:
    """Log the report."""
    if report.fallback is not None and report.fallback not in _told:
        _told.add(report.fallback)
        logger.warning("%s: engine %s: %s", report.path, report.engine, report.fallback)
    for warning in report.warnings:
        logger.warning("%s: %s", report.path, warning)
    unseen = _core.counters_refused()
    if unseen is not None and unseen not in _told:
        _told.add(unseen)
        logger.warning("fastckpt-top does not see this process: %s; name a tmpfs in FASTCKPT_TOP_DIR", unseen)
    logger.info("%s", report)


class Attempt:
    """A context for an operation: if it ends with an error, the error is exported.

    Args:
        operation: ``save``, ``load`` or ``verify``.
        path: the checkpoint's directory, absolute.
        asynchronous: whether this call begins a save in the background.
    """

    __slots__ = ("_asynchronous", "_began", "_operation", "_path")

    def __init__(self, operation: str, path: str, *, asynchronous: bool = False) -> None:
        self._operation = operation
        self._path = path
        self._asynchronous = asynchronous
        self._began = time.perf_counter()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            seconds = time.perf_counter() - self._began
            put(badly(self._operation, self._path, seconds, error, asynchronous=self._asynchronous))
