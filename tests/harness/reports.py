"""The report of a load, beside its state."""

from typing import Any, NamedTuple

from harness.options import grouped


class Loaded(NamedTuple):
    """A state and the report of its load."""

    state: Any
    report: Any


def with_report(load, *arguments, **options):
    """The result of ``load`` with these flat options, and its report."""
    reports = []
    state = load(*arguments, **grouped({**options, "on_report": reports.append}))
    (report,) = reports
    return Loaded(state, report)
