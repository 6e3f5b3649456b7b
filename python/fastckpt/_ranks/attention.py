"""What a rank does for the others while it works: it says that it lives, and hears whether they have given up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .exchange import Exchange
    from .peers import Operation

#: A rank that waits for bytes of others has not failed itself, and says that it lives. But not for ever: after so many
#: timeouts without a message it is silent, for all might wait for each other.
_PATIENCE = 4


class Attention:
    """Called often, from the thread that waits.

    Args:
        operation: the operation.
        timeout: its timeout, in seconds.

    Attributes:
        exchange: the messages that travel, once they do.
        limit: seconds after which a single message is given up, whatever the other ranks say.
    """

    def __init__(self, operation: Operation, timeout: float) -> None:
        self.operation = operation
        self.timeout = timeout
        self.exchange: Exchange | None = None
        self.limit = (_PATIENCE + 1) * timeout
        self._progress = (-1, 0)
        self._moved = time.monotonic()

    def __call__(self, done: int = 0) -> None:
        """``done`` counts what this rank has done.

        Raises:
            RanksError: the operation has failed at another rank.
        """
        now = time.monotonic()
        moved = 0 if self.exchange is None else self.exchange.moved
        progress = (max(done, self._progress[0]), moved)
        waits = self.exchange is not None and self.exchange.waits
        if progress != self._progress:
            self._progress, self._moved = progress, now
            self.operation.alive()
        elif waits and now - self._moved < _PATIENCE * self.timeout:
            self.operation.alive()
        self.operation.check()

    def meanwhile(self) -> None:
        """Called while this rank waits for others outside of the exchange, for a time that the wait itself limits.

        Raises:
            RanksError: the operation has failed at another rank.
        """
        self.operation.alive()
        self.operation.check()
