"""While a rank works, it signals that it is alive, and checks whether the operation has failed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .exchange import Exchange
    from .peers import Operation

#: A rank that waits for the bytes of others has not failed itself, and signals that it is alive. After this many
#: timeouts without a message it becomes silent, because all ranks might be waiting for each other.
_PATIENCE = 4
#: The most bytes that a rank accepts before it writes them, under a bandwidth limit.
_HELD_BACK = 256 << 20


class Attention:
    """Signals that a rank is alive and checks the operation, whenever the waiting thread calls it.

    Args:
        operation: the operation.
        timeout: the timeout of the operation, in seconds.
        bandwidth: this rank's limit in bytes per second; None for no limit.

    Attributes:
        exchange: the exchange of messages, once it has begun.
        limit: seconds after which a single message fails, regardless of the other ranks.
    """

    def __init__(self, operation: Operation, timeout: float, bandwidth: float | None = None) -> None:
        self.operation = operation
        self.timeout = timeout
        self.bandwidth = bandwidth
        self.exchange: Exchange | None = None
        self.limit = (_PATIENCE + 1) * timeout
        self._progress = (-1, 0)
        self._moved = time.monotonic()

    def __call__(self, done: int = 0, total: int = 0) -> None:
        """Signal and check. ``done`` counts the bytes that this rank has written or read, of ``total``.

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
        elif now - self._moved < (_PATIENCE * self.timeout if waits else self._held_back(total - done)):
            self.operation.alive()
        self.operation.check()

    def _held_back(self, left: int) -> float:
        """Seconds for which the limit may permit no writes, with this many bytes left."""
        return min(left, _HELD_BACK) / self.bandwidth if self.bandwidth else 0.0

    def meanwhile(self) -> None:
        """Signal that this rank is alive while it waits for others, outside the exchange, for a limited time.

        Raises:
            RanksError: the operation has failed at another rank.
        """
        self.operation.alive()
        self.operation.check()
