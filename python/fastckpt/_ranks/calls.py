"""One call of all ranks, which gets a turn even if its arguments are bad, so that ranks stay in step."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fastckpt._paths import AnyPath, path_of
from fastckpt._stores.urls import place_of

from .called import location_of, marks_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .session import Session

_MARKS: ContextVar[Mapping[str, str]] = ContextVar("fastckpt_marks")


@contextlib.contextmanager
def marked(marks: Mapping[str, str]) -> Iterator[None]:
    """A context that marks its calls by values, equal on all ranks, that tell calls to the same path apart."""
    before = _MARKS.set(marks)
    try:
        yield
    finally:
        _MARKS.reset(before)


class Call:
    """One call of this rank.

    Args:
        kind: ``save`` or ``load``.
        session: the process group.
        path: as the caller gave it.
        timeout: seconds for which a rank may make no progress.

    Attributes:
        operation: the common operation of the ranks. It takes its turn when it is entered, or before.
        path: the checkpoint's directory, absolute; for a load, it may be a URL in an object store.
        timeout: the timeout, as passed.
    """

    def __init__(self, kind: str, session: Session, path: AnyPath, timeout: float) -> None:
        self.kind = kind
        self.session = session
        self._problem: Exception | None = None
        self.path, self.timeout = repr(path), timeout
        try:
            self.path = (place_of if kind == "load" else path_of)(kind, path)
        except Exception as error:  # noqa: BLE001 - `check` raises it in the operation, whatever it is
            self._problem = error
        place = location_of(self.path, session.group.host) if session.group.size > 1 else None
        self.operation = session.peers.operation(kind, self.path, self.timeout, place=place)
        self.operation.mark(_MARKS.get({}))

    def mark(self, step: int | None, state: Any) -> None:
        """Mark this call by values, equal on all ranks, that tell calls to the same path apart; ``state`` may be None.

        Call it before the first round.
        """
        self.operation.mark(marks_of({"step": step}, state))

    def check(self) -> None:
        """Raise an error of the path inside the operation, so that other ranks learn of it."""
        if self._problem is not None:
            raise self._problem
