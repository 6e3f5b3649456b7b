"""A question at a step boundary that one rank has called: all ranks ask each other there, and nowhere before.

In the good case nobody asks. A thread of each rank waits in the store until a rank calls: one to which a signal has
come, or the first one, whose policy wants a step. Then the threads tell each other how many boundaries their ranks have
reached, in a turn of their own, and the question takes place at the one behind the last of these. Since no rank has
reached that, all come to it. A rank that comes to a boundary meanwhile stays there until it knows. In the same turn
they tell each other the signals that have come: where there are some, nobody asks at the boundary either.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._ranks.peers import LAST
from fastckpt._ranks.requests import UnreachableError
from fastckpt.exceptions import RanksError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastckpt._ranks.peers import Peers

#: Seconds between two looks whether this rank calls; and those that it may take to leave.
_LOOK, _LEAVING = 0.5, 5.0


class Came(NamedTuple):
    """What has come to one rank, or to all.

    Attributes:
        all: how many signals have come so far.
        signals: those that were not answered.
        left: seconds until a save for them must be done; None for as long as it takes.
    """

    all: int
    signals: tuple[int, ...]
    left: float | None


class Called(NamedTuple):
    """A call at the boundary for which it is: the signals that have come, and how many seconds are left for a save."""

    signals: tuple[int, ...]
    until: float | None

    @property
    def left(self) -> float | None:
        """Seconds until a save for the signals must be done; None for as long as it takes."""
        return None if self.until is None else self.until - time.monotonic()


class RankLeft(BaseException):
    """A rank leaves the others alone. No ``Exception``: it does so without waiting for an answer."""


class Summons:
    """The calls of the ranks of a manager.

    Args:
        peers: the ranks, with turns that wait for no other.
        directory: the run, the same on all ranks.
        timeout: seconds of silence after which a rank is taken to be gone.
        place: where the directory is.
    """

    def __init__(self, peers: Peers, directory: str, timeout: float, place: list[Any] | None) -> None:
        self._peers, self._called_for = peers, (directory, timeout, place)
        self._changed = threading.Condition()
        #: The boundaries that this rank has reached, and those ahead for which a rank has called.
        self._reached = 0
        self._called: dict[int, Called] = {}
        #: The call for the last of these that this rank has reached: its signals may not have been answered yet.
        self._last: Called | None = None
        #: The ranks agree on a boundary now.
        self._open = False
        self._urges = False
        self._error: RanksError | None = None
        self._thread: threading.Thread | None = None
        self._why: str | None = None
        self._over = threading.Event()

    # In the thread that trains.

    def reach(self, *, passes: bool) -> Called | None:
        """Note that this rank has come to the next boundary; the call for it, if one has called.

        Args:
            passes: whether this rank would pass it; if not, it need not wait until it knows.

        Raises:
            RanksError: a call has failed, because a rank has ended or does not answer.
        """
        with self._changed:
            self._reached += 1
            here = self._reached
            while passes and self._open and here not in self._called and self._error is None:
                self._changed.wait()
            error, self._error = self._error, None
            if error is not None:
                raise error
            call = self._last = self._called.get(here)
            # It may have come to one of them for a question of another kind, before it knew.
            self._called = {behind: each for behind, each in self._called.items() if behind > here}
            return call

    def urge(self) -> None:
        """Have the ranks ask each other soon."""
        with self._changed:
            self._urges = self._urges or not (self._open or self._called)

    def listen(self, came: Callable[[], Came]) -> None:
        """Answer calls from now on, and call when the number of signals that ``came`` to this rank rises."""
        self._thread = threading.Thread(target=self._run, args=(came,), name="fastckpt-summons", daemon=True)
        self._thread.start()

    def end(self, why: str | None = None) -> None:
        """Answer no more calls; the others hear ``why`` at their next boundary."""
        if self._thread is not None:
            self._why = why
            self._over.set()
            self._thread.join(_LEAVING)

    # In the thread that waits for calls.

    def _run(self, came: Callable[[], Came]) -> None:
        try:
            # They meet before there is a hurry.
            self._turn("listen", lambda: None)
            seen, timeout = 0, self._called_for[1]
            while not self._over.is_set():
                calls = self._urges or came().all != seen
                if calls or self._peers.is_woken(_LOOK, timeout):
                    seen = self._agree(came, woken=not calls)
            self._leave()
        except RankLeft:
            pass
        except RanksError as error:
            self._tell(error)
        except UnreachableError as error:
            self._tell(RanksError(f"Manager: {self._called_for[0]}: {error}"))

    def _agree(self, came: Callable[[], Came], *, woken: bool) -> int:
        """Agree with the other ranks on the boundary at which all ask. Return how many signals were told."""
        now = came()

        def held() -> list[Any]:
            with self._changed:
                self._open = True
                # All know those of earlier calls, and answer each once.
                known = {number for call in (self._last, *self._called.values()) if call for number in call.signals}
                return [self._reached, [number for number in now.signals if number not in known], now.left]

        timeout = self._called_for[1]
        self._peers.wake_all(timeout, woken=woken)
        behind, call, failed = 0, None, None
        try:
            reached, signals, left = self._turn("call", held)
            behind, call = reached + 1, Called(tuple(signals), None if left is None else time.monotonic() + left)
        except RanksError as error:
            failed = error
        self._tell(failed, behind, call)
        self._peers.sleep(timeout)
        return now.all

    def _tell(self, error: RanksError | None, behind: int = 0, call: Called | None = None) -> None:
        with self._changed:
            self._open = self._urges = False
            self._error = error or self._error
            if call is not None and behind >= self._reached:  # it may stay there, and has not passed it
                # A rank may be at that boundary, and know no later call for it.
                self._called.setdefault(behind, call)
            self._changed.notify_all()

    def _turn(self, kind: str, said: Callable[[], Any]) -> Any:
        directory, timeout, place = self._called_for
        with self._peers.operation(kind, directory, timeout, place=place) as turn:
            return turn.round(LAST, said(), combine=_most, watch=self._watch)

    def _watch(self) -> None:
        if self._over.is_set():
            raise RankLeft(self._why or "its manager has ended")

    def _leave(self) -> None:
        """Tell the others why this rank has left, where that concerns them, and end the wait in the store."""
        with contextlib.suppress(RanksError, UnreachableError):
            if self._why is not None:
                self._peers.wake_all(_LEAVING)
                with contextlib.suppress(RankLeft):
                    self._turn("", self._watch)
            self._peers.sleep(_LEAVING)


def _most(said: list[Any]) -> Any:
    """The last boundary that a rank has reached, the signals of all, and the least time that is left on any."""
    if said[0] is None:
        return None
    left = [each for _, _, each in said if each is not None]
    signals = dict.fromkeys(number for _, numbers, _ in said for number in numbers)
    return [max(reached for reached, _, _ in said), list(signals), min(left, default=None)]
