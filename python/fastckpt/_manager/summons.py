"""A question at a step boundary that one rank has called: all ranks ask each other there, and nowhere before.

In the good case nobody asks. A thread of each rank waits in the store until a rank calls: one to which a signal has
come, or the first one, whose policy wants a step. Then the threads tell each other how many boundaries their ranks have
reached, in a turn of their own, and the question takes place at the one behind the last of these. Since no rank has
reached that, all come to it. A rank that comes to a boundary meanwhile stays there until it knows.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from fastckpt._ranks.peers import LAST
from fastckpt._ranks.requests import UnreachableError
from fastckpt.exceptions import RanksError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastckpt._ranks.peers import Peers

#: Seconds between two looks whether this rank calls; and those that it may take to leave.
_LOOK, _LEAVING = 0.5, 5.0


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
        #: The boundaries that this rank has reached, and those ahead at which all ask.
        self._reached = 0
        self._called: set[int] = set()
        #: The ranks agree on a boundary now.
        self._open = False
        self._urges = False
        self._error: RanksError | None = None
        self._thread: threading.Thread | None = None
        self._why: str | None = None
        self._over = threading.Event()

    # In the thread that trains.

    def reach(self, *, passes: bool) -> bool:
        """Note that this rank has come to the next boundary; whether all ranks ask there because one has called.

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
            asks = here in self._called
            # It may have come to one of them for a question of another kind, before it knew.
            self._called = {behind for behind in self._called if behind > here}
            return asks

    def urge(self) -> None:
        """Have the ranks ask each other soon."""
        with self._changed:
            self._urges = self._urges or not (self._open or self._called)

    def listen(self, came: Callable[[], int]) -> None:
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

    def _run(self, came: Callable[[], int]) -> None:
        try:
            # They meet before there is a hurry.
            self._turn("listen", lambda: None)
            seen, timeout = 0, self._called_for[1]
            while not self._over.is_set():
                now = came()
                if self._urges or now != seen or self._peers.is_woken(_LOOK, timeout):
                    # What has come before they agree is told at the boundary.
                    seen = now
                    self._agree()
            self._leave()
        except RankLeft:
            pass
        except RanksError as error:
            self._tell(error)
        except UnreachableError as error:
            self._tell(RanksError(f"Manager: {self._called_for[0]}: {error}"))

    def _agree(self) -> None:
        """Agree with the other ranks on the boundary at which all ask."""

        def held() -> int:
            with self._changed:
                self._open = True
                return self._reached

        timeout = self._called_for[1]
        self._peers.wake_all(timeout)
        behind, failed = 0, None
        try:
            behind = self._turn("call", held) + 1
        except RanksError as error:
            failed = error
        self._peers.sleep(timeout)
        self._tell(failed, behind)

    def _tell(self, error: RanksError | None, behind: int = 0) -> None:
        with self._changed:
            self._open = self._urges = False
            self._error = error or self._error
            if behind >= self._reached:  # it may stay there, and has not passed it
                self._called.add(behind)
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
    return max(said) if said[0] is not None else None
