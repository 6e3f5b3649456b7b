"""An ended operation, for export."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .reports import Report


class Ended(NamedTuple):
    """An operation that has ended, well or not.

    Attributes:
        operation: ``save``, ``load`` or ``verify``.
        path: the checkpoint's directory, absolute.
        seconds: wall-clock seconds that it took.
        at: when it ended, in nanoseconds since 1970.
        asynchronous: whether it is a save in the background.
        report: the report of the operation; None if it failed.
        error: why it failed, or None.
    """

    operation: str
    path: str
    seconds: float
    at: int
    asynchronous: bool
    report: Report | None = None
    error: BaseException | None = None
