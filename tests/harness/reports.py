"""The report of a load, beside its state."""

from typing import Any, NamedTuple


class Loaded(NamedTuple):
    """A state and the report of its load."""

    state: Any
    report: Any


def with_report(load, *arguments, **options):
    """What ``load`` returns, and the report that it gives."""
    reports = []
    state = load(*arguments, **options, on_report=reports.append)
    (report,) = reports
    return Loaded(state, report)
