"""The last save of a program, while training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class LastSave:
    """A save in the background, and what follows once it is durable."""

    def __init__(self) -> None:
        self._save: tuple[Any, Callable[[], None]] | None = None

    def begin(self, pending: Any, then: Callable[[], None]) -> None:
        """It has begun, after the one before had ended."""
        self._save = pending, then

    def finish(self) -> None:
        """Wait until it is durable, and do what follows; raises what it raises."""
        save, self._save = self._save, None
        if save is not None:
            pending, then = save
            pending.result()
            then()
