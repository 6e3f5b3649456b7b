"""Messages between ranks: bytes that one rank reads or has in memory, and another writes or wants.

The core determines the messages, and packs and unpacks them (``_core.Mail``). This module sends them: for each
direction one thread starts transfers, in order, and another waits for them, in the same order. So several messages are
in flight, and a sender that waits for memory does not delay arrived messages.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fastckpt.exceptions import CheckpointError, RankFailure, RanksError

from . import words
from .torch_distributed import AbsentError, DataGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fastckpt import _core

    from .near import Shared
    from .torch_distributed import Group, Transfer

_T = TypeVar("_T")

#: Seconds between two checks that the other ranks are alive.
_LOOK = 0.05
#: The most seconds for threads to end after their transfers were stopped. Gloo stops them at once.
_ENDING = 5.0
#: Seconds within which a rank that stops during the connection is found silent: the protocol checks every 2.5 s.
_FOUND = 4.0


class LostError(CheckpointError):
    """The exchange failed: the cause is at another rank, or in the network."""

    #: :class:`fastckpt._ranks.peers.Operation` reads this: its verdict on all ranks is more specific.
    of_others = True


def lost_by(name: str, error: LostError) -> dict[str, Any]:
    """The message that the rank ``name`` sends in the last round instead of an outcome, if its exchange failed."""
    return {"lost": f"{name}: {error}"}


def first_lost(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """The first outcome that reports a failed exchange; empty if none does."""
    return next((outcome for outcome in outcomes if "lost" in outcome), {})


def raise_lost(outcome: dict[str, Any]) -> None:
    """Raise :class:`LostError` if an outcome reports one."""
    if "lost" in outcome:
        raise LostError(outcome["lost"])


class Lane(NamedTuple):
    """One direction of an exchange.

    Attributes:
        what: the direction, for messages: ``to`` or ``from`` a rank.
        messages: the number, rank and bytes of each message, in order.
        begin: called with the number of a message; returns the address of its memory, once there is some.
        done: called with the number of a message that has been sent or has arrived.
    """

    what: str
    messages: list[tuple[int, int, int]]
    begin: Callable[[int], int]
    done: Callable[[int], None]


class Link:
    """The gloo group of a process group: made when ranks first have data to send, kept, and replaced after a failure.

    Its name is agreed on in a round of the protocol: each rank offers its group (:meth:`offer`), and the coordinator
    chooses (:meth:`agree`).

    Args:
        group: the ranks in it.
        host_of: the name of a rank's host, for errors.
    """

    def __init__(self, group: Group, host_of: Callable[[int], str]) -> None:
        self.group = group
        self.host_of = host_of
        self._name = ""
        self._data: DataGroup | None = None

    def offer(self, *, needed: bool) -> list[Any]:
        """The offer of this rank in the round: whether it needs a group, and the name of its current group."""
        return [needed, self._name]

    @staticmethod
    def combine(offers: Sequence[list[Any]]) -> list[Any]:
        """Combine offers: whether a rank needs a group, and the name of the group that all of them have."""
        names = {name for _, name in offers}
        return [any(needed for needed, _ in offers), names.pop() if len(names) == 1 else ""]

    @staticmethod
    def agree(offer: list[Any]) -> str:
        """The coordinator's answer to all offers: the name of the group to use; empty for none."""
        needed, name = offer
        return (name or secrets.token_hex(8)) if needed else ""

    def meet(self, name: str, timeout: float, attend: Callable[[], None]) -> DataGroup | None:
        """The agreed group; all ranks that create a group arrive here at about the same time.

        Raises:
            RanksError: another rank has not arrived within ``timeout`` seconds, or the operation has failed there.
        """
        if not name:
            return None
        if name != self._name or self._data is None:
            self.drop()
            try:
                self._data = attended(lambda: DataGroup(self.group, name, timeout), attend)
            except AbsentError as error:
                if not error.ranks:
                    # All have arrived. If a rank has stopped since, its silence shows which one at about this time.
                    _attend_for(_FOUND, attend)
                why = f"has not answered for {timeout:.1f} s (Ranks(timeout=))"
                failures = tuple(RankFailure(rank, self.host_of(rank), why) for rank in error.ranks)
                told = "; ".join(map(str, failures)) or str(error.__cause__)
                raise RanksError(f"the gloo group for the exchange of bytes was not made: {told}", failures) from error
            self._name = name
        return self._data

    def host_of_peer(self, rank: int) -> str:
        """Return the name of the host of a rank in the group; empty if there is no group, or no answer."""
        return "" if self._data is None else self._data.host_of(rank)

    def drop(self) -> None:
        """Forget the group, which has failed."""
        self._name = ""
        self._data = None


class Exchange:
    """The messages of one operation in flight.

    Args:
        group: the gloo group.
        mail: the messages.
        name: the name of a rank in errors, ``rank 3 on node-b``: :meth:`fastckpt._ranks.session.Session.name`.
        limit: seconds after which a transfer that does not end fails, regardless of the other ranks.
        shared: what ranks of this host read in each other's memory.

    Attributes:
        moved: the number of messages sent and received.
    """

    def __init__(
        self, group: DataGroup, mail: _core.Mail, name: Callable[..., str], limit: float, shared: Shared | None = None
    ) -> None:
        self.group = group
        self.mail = mail
        self.name = name
        self.limit = limit
        self.shared = shared
        self.moved = 0
        self._error: BaseException | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._settles = False
        sent, received = mail.travelling()
        for lane, start in (
            (Lane("to", sent, mail.pack, mail.sent), group.send),
            (Lane("from", received, mail.admit, mail.arrived), group.receive),
        ):
            if lane.messages:
                begun: SimpleQueue[Transfer | None] = SimpleQueue()
                self._run(self._begin, lane, start, begun)
                self._run(self._wait, lane, begun)

    @property
    def error(self) -> BaseException | None:
        """Why the exchange failed, or None: a :class:`LostError`, or the core's error."""
        return self._error

    @property
    def altered(self) -> CheckpointError | None:
        """The error for bytes that arrived altered, if any."""
        found = self.mail.altered()
        if found is None:
            return None
        peer, why = found
        giver, taker = self.name(peer, ask=True), self.name(self.group.rank)
        return CheckpointError(
            f"bytes from {giver} to {taker} were altered on their way: {why}: look at the network and the memory of "
            "both hosts"
        )

    @property
    def lost(self) -> LostError | None:
        """The error for memory of another rank that could not be read, if any."""
        found = self.mail.lost()
        return None if found is None else LostError(f"{self.name(found[0])}: {found[1]}")

    @property
    def waits(self) -> bool:
        """Whether this rank may be waiting for another rank to send or receive a message."""
        return self._error is None and self.busy

    @property
    def busy(self) -> bool:
        """Whether messages are still in flight."""
        return self._settles or any(thread.is_alive() for thread in self._threads)

    def join(self, attend: Callable[[], None]) -> None:
        """Wait until all messages have been sent and have arrived; ``attend`` is called meanwhile.

        Raises:
            LostError: the exchange broke off.
            Exception: the core could not pack a message.
        """
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_LOOK)
                attend()
        if self._error is not None:
            raise self._error
        # Other ranks report when they have finished reading this rank's memory.
        if self.shared is not None:
            self._settles = True
            swap = dict.fromkeys(self.shared.read, b"."), dict.fromkeys(self.shared.readers, 1)
            swapped(self.group, swap, self.limit, attend)
            self._settles = False

    def end(self, why: str, alive: Callable[[], None]) -> None:
        """Stop all transfers, here and at the other ranks; does nothing if there are none.

        Args:
            why: the reason, which becomes the core's error.
            alive: called meanwhile, so that this rank is not mistaken for the lost one.
        """
        if not self.busy:
            return
        self._ended = True
        self.mail.stop(why)
        self.group.end()
        until = time.monotonic() + _ENDING
        # On Ctrl-C, exit promptly: the store may not answer.
        hurry = not isinstance(sys.exc_info()[1], Exception | None)
        # A thread that does not end keeps the mail alive, and with it the memory that gloo may still write to.
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < until:
                thread.join(_LOOK)
                if not hurry:
                    with contextlib.suppress(RanksError):
                        alive()

    def _run(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, name="fastckpt-exchange", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _begin(
        self,
        lane: Lane,
        start: Callable[[int, int, int, object], Transfer],
        begun: SimpleQueue[Transfer | None],
    ) -> None:
        try:
            for number, peer, nbytes in lane.messages:
                try:
                    address = lane.begin(number)
                except Exception as error:  # noqa: BLE001 - raised in the joining thread
                    self._fail(error)
                    return
                try:
                    begun.put(start(peer, address, nbytes, self.mail))
                except Exception as error:  # noqa: BLE001 - raised in the joining thread
                    self._fail(self._lost(lane, peer, error))
                    return
        finally:
            begun.put(None)

    def _wait(self, lane: Lane, begun: SimpleQueue[Transfer | None]) -> None:
        for number, peer, _ in lane.messages:
            transfer = begun.get()
            if transfer is None:
                return
            try:
                transfer.wait(self.limit)
            except Exception as error:  # noqa: BLE001 - raised in the joining thread
                self._fail(self._lost(lane, peer, error))
                return
            try:
                lane.done(number)
            except Exception as error:  # noqa: BLE001 - raised in the joining thread
                self._fail(error)
                return
            with self._lock:
                self.moved += 1

    def _lost(self, lane: Lane, peer: int, error: Exception) -> Exception:
        """The error for a failure of gloo: the other side is gone."""
        if not isinstance(error, RuntimeError):
            return error
        return LostError(f"the exchange of bytes {lane.what} {self.name(peer)} broke off: {_text(error)}")

    def _fail(self, error: BaseException) -> None:
        """The first failure is reported; later ones result from ending the exchange."""
        with self._lock:
            if self._ended or self._error is not None:
                return
            self._error = error
        self.mail.stop(str(error))
        # Otherwise threads here that wait for other ranks, and theirs that wait for this one, would never end.
        self.group.end()


def _text(error: RuntimeError) -> str:
    """The message of gloo, without its source location."""
    return str(error).partition("] ")[2].partition(". This is")[0] or str(error)


def carried(work: Callable[[], _T], exchange: Exchange | None, attend: Callable[[], None]) -> _T:
    """Do the core's part of an operation, and wait for all messages; ``attend`` is called while only they are left.

    Raises:
        LostError: the exchange broke off.
        Exception: the core's error.
    """
    try:
        done = work()
        if exchange is not None:
            exchange.join(attend)
    except Exception as error:
        broken = None if exchange is None else exchange.altered or exchange.lost
        if broken is not None:
            raise broken from None
        cause = None if exchange is None else exchange.error
        # The reason for stopping the mail becomes the core's error.
        if cause is not None and cause is not error and str(cause) in str(error):
            raise cause from None
        raise
    return done


def _attend_for(seconds: float, attend: Callable[[], None]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(_LOOK)
        attend()


def attended(function: Callable[[], _T], attend: Callable[[], None]) -> _T:
    """Run in a thread a function that may wait for ranks; errors of ``attend``, called meanwhile, end the wait.

    The thread may then run until its own deadline; its result is ignored.
    """
    found: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            failed.append(error)

    thread = threading.Thread(target=run, name="fastckpt-meet", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK)
        attend()
    if failed:
        raise failed[0]
    return found[0]


def swapped(
    group: DataGroup,
    swap: tuple[Mapping[int, bytes], Mapping[int, int]],
    limit: float,
    attend: Callable[[], None],
) -> dict[int, bytes]:
    """Swap bytes with other ranks by :meth:`DataGroup.swap`, and call ``attend`` meanwhile.

    Raises:
        LostError: the exchange failed.
    """

    def run() -> dict[int, bytes]:
        try:
            return group.swap(*swap, limit)
        except RuntimeError as error:
            raise LostError(f"the exchange with ranks of this host broke off: {_text(error)}") from error

    return attended(run, attend) if any(swap) else {}


def passed_on(group: DataGroup, content: bytes | None, nbytes: int, limit: float, attend: Callable[[], None]) -> bytes:
    """Send ``content`` of rank 0 to all ranks.

    Args:
        group: the ranks.
        content: on rank 0; None on the others.
        nbytes: the length of ``content``.
        limit: seconds after which it fails.
        attend: called while this rank waits.

    Raises:
        LostError: a rank is gone.
        RanksError: the operation has failed at another rank.
        DamagedError: the received bytes differ from those of rank 0.
    """
    sent = None if content is None else words.sealed(content)
    try:
        came = attended(lambda: group.broadcast(sent, nbytes + words.SUM, limit), attend)
    except RuntimeError as error:
        raise LostError(f"the manifest was not passed on: {_text(error)}") from error
    return words.opened(came, "the manifest that rank 0 passed on")
