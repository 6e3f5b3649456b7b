"""Builds the report of an operation from the core's report and from the steps around it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from .reports import Report

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_R = TypeVar("_R", bound=Report)

#: The order of the phases. Agreement counts as planning, and a save's wait for its slowest rank as commit.
_PHASES = ("wait", "stage", "plan", "compare", "read", "exchange", "write", "fsync", "commit")


def build_report(
    kind: type[_R],
    path: str,
    began: float,
    core: Mapping[str, Any],
    *,
    beside: Mapping[str, float] | None = None,
    **more: Any,
) -> _R:
    """The report of an operation that ends at this call.

    Args:
        kind: the class of the report.
        path: the checkpoint's directory, absolute.
        began: when the program called the operation (``time.perf_counter``).
        core: the core's report.
        beside: seconds of steps outside the core, by phase. All other time outside the core counts as planning.
        more: further fields of the report.
    """
    beside = beside or {}
    seconds = time.perf_counter() - began
    phases = {**core["phases"], **beside}
    phases["plan"] = phases.get("plan", 0.0) + max(0.0, seconds - core["seconds"] - sum(beside.values()))
    ordered = {name: phases.pop(name) for name in _PHASES if name in phases} | phases
    return kind(path=path, **{**core, "seconds": seconds, "phases": ordered, **more})


def with_warnings(core: Mapping[str, Any], *texts: Iterable[str]) -> dict[str, Any]:
    """A copy of the core's report with further warnings added."""
    return {**core, "warnings": (*core.get("warnings", ()), *(text for several in texts for text in several))}
