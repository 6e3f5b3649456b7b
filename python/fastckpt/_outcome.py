"""What an operation did, told to the caller and to the log."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar

from ._reports import Report

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger("fastckpt")

_R = TypeVar("_R", bound=Report)
_told: set[str] = set()


def conclude(kind: type[_R], path: str, began: float, core: Mapping[str, Any], **more: Any) -> _R:
    """Make the report of an operation that began at ``began`` (``time.perf_counter``), and log it."""
    report = report_of(kind, path, began, core, **more)
    tell(report)
    return report


def report_of(kind: type[_R], path: str, began: float, core: Mapping[str, Any], **more: Any) -> _R:
    """The report of an operation.

    What the core did not see, the walk over the state, counts as planning.
    """
    seconds = time.perf_counter() - began
    phases = dict(core["phases"])
    phases["plan"] = phases.get("plan", 0.0) + max(0.0, seconds - core["seconds"])
    fields = {**core, "seconds": seconds, "phases": phases, **more}
    return kind(path=path, **fields)


def tell(report: Report) -> None:
    """Log it."""
    if report.fallback is not None and report.fallback not in _told:
        _told.add(report.fallback)
        logger.warning("%s: engine %s: %s", report.path, report.engine, report.fallback)
    logger.info("%s", report)
