"""Hands each operation that has ended to OpenTelemetry, in programs that use it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from .ended import Ended

if TYPE_CHECKING:
    from .reports import Report

logger = logging.getLogger("fastckpt")


class _Thread(threading.local):
    """The exports pending in a thread: None while it exports nothing."""

    waiting: list[Ended] | None = None


_thread = _Thread()


def well(report: Report) -> Ended | None:
    """The record of an operation that ends now, successfully or with damage found; None without OpenTelemetry."""
    if not _wanted():
        return None
    # Only an operation that copies first has this phase.
    asynchronous = "stage" in report.phases
    return Ended(report.operation, report.path, report.seconds, time.time_ns(), asynchronous, report=report)


def badly(
    operation: str, path: str, seconds: float, error: BaseException, *, asynchronous: bool = False
) -> Ended | None:
    """The record of an operation that fails now or is cancelled; None without OpenTelemetry."""
    return Ended(operation, path, seconds, time.time_ns(), asynchronous, error=error) if _wanted() else None


def _wanted() -> bool:
    """Whether the program itself has imported OpenTelemetry: otherwise nothing is exported or imported.

    The SDK imports the parts of the API that it implements.
    """
    imported = sys.modules.get("opentelemetry.trace") or sys.modules.get("opentelemetry.metrics")
    return imported is not None and os.environ.get("FASTCKPT_OTEL") != "0"


def put(ended: Ended | None) -> None:
    """Export ``ended``, unless it is None, in this thread: its context has the parent of the spans.

    The operation does all other work before this: the program's exporters may block. A signal handler may save while an
    exporter in this thread holds locks. So the handler's operations are exported after the exporter has returned.
    """
    if ended is None:
        return
    if _thread.waiting is not None:
        _thread.waiting.append(ended)
        return
    waiting = _thread.waiting = [ended]
    try:
        while waiting:
            _export(waiting.pop(0))
    finally:
        _thread.waiting = None


def _export(ended: Ended) -> None:
    """No error here may fail the operation, which has ended."""
    try:
        from . import open_telemetry  # noqa: PLC0415 - the program has imported the package

        open_telemetry.export(ended)
    except Exception:
        global _told  # noqa: PLW0603 - once a process
        if not _told:
            _told = True
            logger.exception(
                "%s: OpenTelemetry rejected the %s; this warning is logged once", ended.path, ended.operation
            )


_told = False
