"""Loads that return the report together with the state."""

from typing import Any, NamedTuple

from harness.options import grouped


class Loaded(NamedTuple):
    """A loaded state and the report of the load."""

    state: Any
    report: Any


def with_report(load, *arguments, **options):
    """The result of ``load`` with these flat options, and its report."""
    reports = []
    state = load(*arguments, **grouped({**options, "on_report": reports.append}))
    (report,) = reports
    return Loaded(state, report)
