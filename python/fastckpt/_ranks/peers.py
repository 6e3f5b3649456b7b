"""The ranks of one process group, and their common operations."""

# ruff: noqa: SLF001 - a group and its operations are one

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from fastckpt import _core
from fastckpt._api.event import Event
from fastckpt._ranks import tree
from fastckpt._ranks.member import Member
from fastckpt._ranks.protocol import LAST, StopError, Turn
from fastckpt._ranks.requests import Forget, Put, Remove, Request, Steps, UnreachableError, Wait, value_of
from fastckpt._ranks.store import Transport
from fastckpt.exceptions import RanksError

#: The most seconds for the store after the user has interrupted the program.
_HURRY = 5.0
#: Seconds between two checks for ranks that are late for their first call.
_LATE = 0.5
#: Seconds for which rank 0 waits at its end for other ranks, and between two checks whether they have left.
_PARTING, _LOOK = 2.0, 0.01
#: Seconds between two calls of a ``watch``, at most.
_WATCH = 0.25

__all__ = ["LAST", "Operation", "Peers"]


class Peers:
    """The ranks of one process group. It lives as long as the group: its counters advance with those of the others.

    Args:
        rank: the index of this process in the group.
        size: processes in the group.
        store: the ``torch.distributed.Store`` of the group; a group of one needs none.
        host: the name of this host, for errors.
        serves: the rank whose process may run the server of the store; None if none of them does.
        shown: whether the monitor shows the group, and the rank that this one waits for.
    """

    def __init__(
        self, rank: int, size: int, store: Any, host: str, *, serves: int | None = None, shown: bool = True
    ) -> None:
        self.rank, self.size, self.host = rank, size, host
        self._process = os.getpid()
        self._member = Member(rank, size, host, secrets.token_hex(8), serves)
        self._transport = Transport(store) if size > 1 else None
        #: The operations that have taken a turn and have not ended: the first has its turn now. The list changes in
        #: atomic steps, without a lock: a signal handler may wait for threads that would need the lock to leave.
        self._queue: list[Operation] = []
        #: Ends the thread that answers late ranks.
        self._busy: threading.Event | None = None
        #: Whether the monitor shows the group; None if it need not.
        self._shown: bool | None = False if shown else None

    @property
    def session(self) -> str:
        """A word that distinguishes this group from all others in the store; known after the first round."""
        return self._member.session

    @property
    def has_met(self) -> bool:
        """Whether the other ranks learn that this rank has left, if it leaves an operation without waiting for them."""
        return self._member.has_met

    @property
    def answered(self) -> str:
        """The number of the last operation that this rank knows to have succeeded on all ranks."""
        return self._member.answered_turn

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host; empty if this rank does not know it."""
        return self._member.hosts.get(rank, "")

    def operation(
        self, kind: str, path: str, timeout: float, label: str | None = None, place: list[Any] | None = None
    ) -> Operation:
        """Return an operation that all ranks begin in the same order.

        The operation takes its turn when it is entered, or earlier by ``take``. Then it must be entered, even if it can
        only fail: the other ranks wait for this one. Entering waits until the turns before it have ended on this rank.

        Args:
            kind: ``save`` or ``load``.
            path: the path of the operation, the same on all ranks.
            timeout: seconds of silence after which a rank is taken to be gone.
            label: the name of this operation, if ranks cannot count: it must be unique.
            place: where the path leads, if its directory may have another name on other ranks.
        """
        return Operation(self, kind, path, timeout, label, place)

    # One thread of each rank may wait until a rank wakes all of them for the next operation.

    def is_woken(self, seconds: float, limit: float) -> bool:
        """Whether a rank calls ``wake_all`` within this many seconds. The wait sends no requests to a server.

        ``limit``, here and below, is the most seconds for which to wait for the store.

        Raises:
            UnreachableError: the store does not answer.
        """
        key = self._waking(self.rank)
        if self._transport is None or self._transport.blocks:
            return bool(self._run(_served(Wait((key,), seconds, self.rank)), limit))
        time.sleep(seconds)
        return self._run(value_of(key), limit) is not None

    def wake_all(self, limit: float, *, woken: bool = False) -> None:
        """Wake the waiting thread of each rank, which wakes those below it before the operation; rank 0 is woken first.

        A rank that was ``woken`` wakes only those below it.

        Raises:
            UnreachableError: the store does not answer.
        """
        if ranks := (*(() if woken else (0,)), *tree.below(self.rank, self.size)):
            self._run(_served(Put({self._waking(rank): b"" for rank in ranks})), limit)

    def sleep(self, limit: float) -> None:
        """End a wait of ``is_woken``, and remove the key of the last operation's wake-up, which no rank sets again.

        Raises:
            UnreachableError: the store does not answer.
        """
        self._run(_served(Forget()), limit)
        self._run(_served(Remove((self._waking(self.rank, -1),))), limit)

    def _waking(self, rank: int, behind: int = 0) -> str:
        # The key has the number of the turn: another rank may wake this one for the next turn before this one sleeps.
        return f"fastckpt/{self.session}/wake/{self._member.turn + behind}/{rank}"

    def close(self) -> None:
        """End the threads of the store.

        The store may end with the process of rank 0, which first lets the others read the last verdict.
        """
        if self._transport is None or self._process != os.getpid():
            return
        self._end_answers()
        if self._member.parting and self.rank == 0:
            until = time.monotonic() + _PARTING
            with contextlib.suppress(UnreachableError):
                while self._run(value_of(self._member.parting), _PARTING) is not None and time.monotonic() < until:
                    time.sleep(_LOOK)
        self._transport.close()

    def _run(self, steps: Steps, timeout: float, watch: Callable[[], None] | None = None) -> Any:
        """Serve the requests of a generator, and return its result."""
        reply: Any = None
        error: BaseException | None = None
        whom: int | None = None
        try:
            while True:
                try:
                    request = steps.send(reply) if error is None else steps.throw(error)
                except StopIteration as end:
                    return end.value
                reply = error = None
                if self._transport is None:
                    raise AssertionError(f"a group of one rank has no transport for {request}")
                if isinstance(request, Wait) and self._shown is not None:
                    whom = self._show(request.whom)
                try:
                    if isinstance(request, Wait) and watch is not None:
                        reply = self._wait(self._transport, request, timeout, watch)
                    else:
                        reply = self._transport.serve(request, timeout)
                except BaseException as raised:  # noqa: BLE001 - the generator decides
                    error = raised
        finally:
            if whom is not None:
                _core.wait_for(None)

    @staticmethod
    def _wait(transport: Transport, request: Wait, timeout: float, watch: Callable[[], None]) -> bool:
        """Serve a wait, and call ``watch`` meanwhile; its errors end the wait."""
        until = time.monotonic() + request.seconds
        while True:
            watch()
            left = until - time.monotonic()
            there: bool = transport.serve(request._replace(seconds=min(left, _WATCH)), timeout)
            if there or left <= _WATCH:
                return there

    def _show(self, whom: int) -> int:
        """Show the group in the monitor, once it has a name, and the rank that this rank waits for."""
        if self.session and not self._shown:
            self._shown = True
            number = int.from_bytes(hashlib.blake2b(self.session.encode(), digest_size=8).digest(), "little")
            _core.set_group(max(number, 1), self.rank, self.size)
        _core.wait_for(whom)
        return whom

    def _answer_late(self) -> None:
        """Answer ranks that arrive at their first call while this rank is in no call: they have missed a verdict."""
        member = self._member
        if self._transport is None or self.session == "" or member.has_met or self._process != os.getpid():
            return
        busy = self._busy = threading.Event()

        def answer() -> None:
            with contextlib.suppress(UnreachableError):
                while not (busy.wait(_LATE) or busy is not self._busy or member.has_met or self._is_busy()):
                    self._run(member.answer_late(), _HURRY)

        threading.Thread(target=answer, name="fastckpt-answer", daemon=True).start()

    def _end_answers(self) -> None:
        if self._busy is not None:
            self._busy.set()
            self._busy = None

    def _is_busy(self) -> bool:
        """Whether a thread is in a turn, or waiting for its turn."""
        return any(one._thread is not None for one in tuple(self._queue))

    def _before(self, turn: Turn) -> tuple[Operation, ...]:
        """The operations that must end before this turn begins."""
        queue = tuple(self._queue)
        turns = [one._turn for one in queue]
        return queue[: turns.index(turn)] if turn in turns else ()

    def _turns_before(self, turn: Turn) -> list[Turn]:
        return [one._turn for one in self._before(turn)]


def _served(request: Request) -> Steps:
    return (yield request)


class Operation:
    """One operation of all ranks, as a context manager around this rank's part.

    An exception in the body is sent to all ranks with the next round, then raised; the others get a ``RanksError``. The
    round ``done`` is the last: after its answer, an error in the body does not fail the others.
    """

    def __init__(
        self, peers: Peers, kind: str, path: str, timeout: float, label: str | None, place: list[Any] | None
    ) -> None:
        self._peers = peers
        self._turn = Turn(peers._member, kind, path, timeout, label, place, peers._turns_before)
        #: The thread whose call has taken the turn and has not returned, and the thread that has entered.
        self._caller: int | None = None
        self._thread: int | None = None
        self._ended = Event()
        self._looked = float("-inf")

    def take(self) -> None:
        """Take the next turn of this rank; a second call does nothing."""
        if self not in self._peers._queue:
            self._caller = threading.get_ident()
            self._peers._queue.append(self)

    def hand_over(self) -> None:
        """Record that the call that took the turn returns; from now on its thread may wait for the turn's end."""
        self._caller = None

    def waits_for_caller(self) -> bool:
        """Whether this operation waits for the calling thread, which is in an earlier turn or begins one."""
        thread = threading.get_ident()
        return any((one._thread or one._caller) == thread for one in self._peers._before(self._turn))

    def __enter__(self) -> Operation:  # noqa: PYI034 - Self is not in Python 3.10
        try:
            self._enter()
            return self  # noqa: TRY300 - an interrupt here must be caught, too
        except BaseException as error:
            # An earlier turn may take long, but callers that wait for this turn must not: this turn ends now.
            try:
                self.take()
                with contextlib.suppress(RanksError):
                    self._run(self._turn.quit(error), _HURRY)
            finally:
                self._leave()
            raise

    def _enter(self) -> None:
        self.take()
        self._peers._end_answers()
        if self.waits_for_caller():
            raise RuntimeError(
                "this thread is in a save or load of the same process group, which must end first (in a signal "
                "handler, set a flag or call save_async instead)"
            )
        self._thread = threading.get_ident()
        for one in self._peers._before(self._turn):
            one._ended.wait()

    def _leave(self) -> None:
        # Each call takes a number, however it ends.
        _ = self._turn.number
        with contextlib.suppress(ValueError):  # interrupts may have come before it had a turn
            self._peers._queue.remove(self)
        self._ended.set()
        if not self._peers._is_busy():
            self._peers._answer_late()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end(error)
        except BaseException as interrupted:
            if not isinstance(interrupted, Exception):
                # The interrupt came while this rank waited for the others, which must not wait for this rank.
                self._end(interrupted)
            raise
        finally:
            self._leave()

    def round(
        self,
        name: str,
        value: Any,
        *,
        combine: Callable[[list[Any]], Any] | None = None,
        decide: Callable[[Any], Any] | None = None,
        is_done: Callable[[], bool] | None = None,
        watch: Callable[[], None] | None = None,
    ) -> Any:
        """Take part in the next round, and return its answer, the same on all ranks.

        Args:
            name: the round, the same on all ranks; ``done`` is the last.
            value: the message of this rank: None, numbers, text, bytes, lists and dicts of them.
            combine: combines several values, each of a rank or combined before, in the order of the tree, this rank's
                first. Without it, the answer is computed from the list of all.
            decide: makes the answer from the value of all ranks, only on rank 0; its exception fails the operation for
                all. It calls ``alive`` if it takes long. Without it, the answer is the value.
            is_done: whether ``decide``, which has raised, has committed nevertheless; then the others learn that.
            watch: called while this rank waits for others; its errors end the round here.

        Raises:
            RanksError: a rank has failed or does not answer, or the store does not.
        """
        return self._run(self._turn.round(name, value, None, combine, decide, is_done), watch=watch)

    def mark(self, marks: Mapping[str, str]) -> None:
        """Mark this call, before the first round, by values that are equal on all ranks that have them."""
        self._turn.marks.update(marks)

    @property
    def is_repeated(self) -> bool:
        """See :attr:`.protocol.Turn.is_repeated`."""
        return self._turn.is_repeated

    def alive(self) -> None:
        """Signal that this rank is making progress. Most calls do nothing, so they are cheap."""
        if self._peers.size > 1 and not self._turn.over:
            self._run(self._turn.alive())

    def check(self) -> None:
        """Raise if another rank has failed or is silent, so that a long body ends. Calls are cheap: most do nothing.

        Raises:
            RanksError: a rank has failed or does not answer, or the store does not.
        """
        if self._peers.size == 1 or self._turn.over:
            return
        now = time.monotonic()
        if now - self._looked >= self._turn.work_slice:
            self._looked = now
            self._run(self._turn.look())

    def _run(self, steps: Steps, limit: float = math.inf, watch: Callable[[], None] | None = None) -> Any:
        try:
            return self._peers._run(steps, min(limit, self._turn.timeout), watch)
        except UnreachableError as error:
            raise self._turn.unreachable(error) from error

    def _end(self, error: BaseException | None) -> None:
        interrupted = error is not None and not isinstance(error, Exception)
        try:
            verdict = self._run(self._turn.end(error), _HURRY if interrupted else math.inf)
        except RanksError as unreachable:
            if interrupted:
                return
            verdict = unreachable
        if verdict is None:
            return
        if isinstance(error, StopError):
            raise verdict from None
        if getattr(error, "of_others", False):
            # This rank has not failed; it has seen the failure of another rank, which the verdict names.
            raise verdict from error
        if error is not None and self._peers.size > 1 and sys.version_info >= (3, 11):
            error.add_note(str(verdict))
