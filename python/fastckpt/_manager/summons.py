"""A round at a step boundary that one rank called for: all ranks ask each other there, and not before.

Normally no rank asks. A thread of each rank waits in the store until a rank calls: a rank that got a signal, or the
coordinator, whose policy wants a step. Then the threads exchange how many boundaries their ranks have reached, in a
separate turn, and the ranks ask each other at the boundary after the last of these. No rank has reached that boundary,
so all come to it. A rank that comes to a boundary meanwhile waits there for the result. In the same turn they exchange
the signals that have come: if there are any, the ranks need not ask at the boundary either.
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

#: Seconds between two checks of whether this rank must call; and the most seconds for leaving the others.
_LOOK, _LEAVING = 0.5, 5.0


class Came(NamedTuple):
    """The signals of one rank, or of all.

    Attributes:
        all: the number of signals so far.
        signals: the signals that were not answered.
        left: seconds until a save for them must be done; None for no limit.
    """

    all: int
    signals: tuple[int, ...]
    left: float | None


class Called(NamedTuple):
    """A call for a boundary: the signals that have come, and the time by which a save for them must be done."""

    signals: tuple[int, ...]
    until: float | None

    @property
    def left(self) -> float | None:
        """Seconds until a save for the signals must be done; None for no limit."""
        return None if self.until is None else self.until - time.monotonic()


class RankLeft(BaseException):
    """A rank leaves the others. It is not an ``Exception``, because the rank leaves without waiting for an answer."""


class Summons:
    """The calls of the ranks of a manager.

    Args:
        peers: the ranks, with turns that wait for no other operation.
        directory: the run, the same on all ranks.
        timeout: seconds of silence after which a rank is considered gone.
        place: where the directory is.
    """

    def __init__(self, peers: Peers, directory: str, timeout: float, place: list[Any] | None) -> None:
        self._peers, self._called_for = peers, (directory, timeout, place)
        self._changed = threading.Condition()
        #: The boundaries that this rank has reached, and later ones for which a rank has called.
        self._reached = 0
        self._called: dict[int, Called] = {}
        #: The call for the boundary that this rank reached last, if any: its signals may be unanswered.
        self._last: Called | None = None
        #: Whether the ranks are agreeing on a boundary now.
        self._open = False
        self._urges = False
        self._error: RanksError | None = None
        self._thread: threading.Thread | None = None
        self._why: str | None = None
        self._over = threading.Event()

    # In the training thread.

    def reach(self, *, passes: bool) -> Called | None:
        """Record that this rank has come to the next boundary; returns the call for it, if any.

        Args:
            passes: whether this rank would pass it; if not, it does not wait until the ranks agree.

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
            # Earlier calls are over: where the ranks asked each other in any case, this rank did not wait for the call.
            self._called = {behind: each for behind, each in self._called.items() if behind > here}
            return call

    def urge(self) -> None:
        """Make the ranks ask each other soon."""
        with self._changed:
            self._urges = self._urges or not (self._open or self._called)

    def listen(self, came: Callable[[], Came]) -> None:
        """Answer calls from now on, and call when the number of signals that ``came`` to this rank rises."""
        self._thread = threading.Thread(target=self._run, args=(came,), name="fastckpt-summons", daemon=True)
        self._thread.start()

    def end(self, why: str | None = None) -> None:
        """Answer no more calls; the others learn ``why`` at their next boundary."""
        if self._thread is not None:
            self._why = why
            self._over.set()
            self._thread.join(_LEAVING)

    # In the thread that waits for calls.

    def _run(self, came: Callable[[], Came]) -> None:
        try:
            # The ranks meet here, early, and not when time is short.
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
        """Agree with the other ranks on the boundary at which all ask. Returns the number of signals exchanged."""
        now = came()

        def held() -> list[Any]:
            with self._changed:
                self._open = True
                # All ranks know the signals of earlier calls, and answer each once.
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
            if call is not None and behind >= self._reached:  # this rank may be at that boundary, but has not passed it
                # A rank may be at that boundary and not know a later call for it.
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
        """Tell the others why this rank has left, if that concerns them, and end the wait in the store."""
        with contextlib.suppress(RanksError, UnreachableError):
            if self._why is not None:
                self._peers.wake_all(_LEAVING)
                with contextlib.suppress(RankLeft):
                    self._turn("", self._watch)
            self._peers.sleep(_LEAVING)


def _most(said: list[Any]) -> Any:
    """The last boundary that any rank has reached, the signals of all, and the least time left on any."""
    if said[0] is None:
        return None
    left = [each for _, _, each in said if each is not None]
    signals = dict.fromkeys(number for _, numbers, _ in said for number in numbers)
    return [max(reached for reached, _, _ in said), list(signals), min(left, default=None)]
