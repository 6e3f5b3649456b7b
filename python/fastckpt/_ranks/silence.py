"""How long other ranks have been silent, from the point of view of one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: A rank must have been silent for a whole timeout in at least this many checks. One long gap between two checks means
#: that this rank, the store or the machine was suspended, and then the others may have been, too.
_LOOKS = 4


class _Heard(NamedTuple):
    #: The state at the last check: the count of its beats, or its hello.
    sign: bytes | None
    #: The counted seconds of silence before that check.
    silent: float
    #: The time of that check.
    looked: float


class Silence:
    """The silence of some ranks; a sign that differs from the previous one ends it.

    Args:
        timeout: seconds of silence after which a rank is considered gone.
    """

    def __init__(self, timeout: float) -> None:
        self._most = timeout / _LOOKS
        self._ranks: dict[int, _Heard] = {}

    def begin(self, ranks: Iterable[int], now: float) -> None:
        """Listen to ranks from now on; they have given no sign."""
        self._ranks.update((rank, _Heard(None, 0.0, now)) for rank in ranks)

    def hear(self, rank: int, sign: bytes | None, now: float) -> float:
        """Record the current state of a rank, and return its seconds of silence. The first call returns 0."""
        last = self._ranks.get(rank, _Heard(sign, 0.0, now))
        silent = last.silent + min(now - last.looked, self._most) if sign == last.sign else 0.0
        self._ranks[rank] = _Heard(sign, silent, now)
        return silent

    def of(self, rank: int) -> float:
        """Return the seconds of silence of a rank at the last check."""
        return self._ranks[rank].silent

    def take_over(self, other: Silence, ranks: Iterable[int]) -> None:
        """Continue from the state of another object, with the ranks that it has listened to."""
        self._ranks.update((rank, other._ranks[rank]) for rank in ranks if rank in other._ranks)

    def clear(self) -> None:
        """Forget all ranks."""
        self._ranks.clear()
