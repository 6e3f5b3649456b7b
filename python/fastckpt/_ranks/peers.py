"""The ranks of one process group, and what they do together."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from fastckpt._ranks import words
from fastckpt._ranks.protocol import LAST, Member, Steps, StopError, Turn
from fastckpt._ranks.store import Transport
from fastckpt.exceptions import RanksError

__all__ = ["LAST", "Operation", "Peers"]


class Peers:
    """The ranks of one process group. It is kept as long as the group: its counters move with those of the others.

    Args:
        rank: the index of this process in the group.
        size: processes in the group.
        store: the ``torch.distributed.Store`` of the group; a group of one needs none.
        host: the name of this host, for errors.
    """

    def __init__(self, rank: int, size: int, store: Any, host: str) -> None:
        self.rank, self.size, self.host = rank, size, host
        self._member = Member(rank, size, host, secrets.token_hex(8))
        self._transport = Transport(store) if size > 1 else None
        self._turns = threading.Condition()
        self._ended: set[int] = set()
        self._next = 0

    @property
    def session(self) -> str:
        """A word that all ranks of this group have, and no other group in this store; known after the first round."""
        return self._member.session

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host; empty where this rank has not heard of it."""
        return self._member.hosts.get(rank, "")

    def operation(self, kind: str, path: str, timeout: float) -> Operation:
        """Take the next turn: an operation that all ranks begin in the same order.

        It must be entered, also where it can only fail: the other ranks wait for this one. Entering waits until the
        turns before it have ended on this rank.

        Args:
            kind: ``save`` or ``load``.
            path: to what, the same on all ranks.
            timeout: seconds of silence after which a rank is taken to be gone.
        """
        with self._turns:
            return Operation(self, Turn(self._member, kind, path, timeout))

    def close(self) -> None:
        """End the threads of the store."""
        if self._transport is not None:
            self._transport.close()

    def _run(self, steps: Steps, timeout: float) -> Any:
        """Serve the requests of a generator, and return what it returns."""
        reply: Any = None
        error: BaseException | None = None
        while True:
            try:
                request = steps.send(reply) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            reply = error = None
            if self._transport is None:
                raise AssertionError(f"a group of one asks for {request}")
            self._transport.limit = timeout
            try:
                reply = self._transport.serve(request)
            except BaseException as raised:  # noqa: BLE001 - the generator decides
                error = raised

    def _enter(self, number: int) -> None:
        with self._turns:
            self._turns.wait_for(lambda: self._next >= number)

    def _leave(self, number: int) -> None:
        with self._turns:
            self._ended.add(number)
            while self._next in self._ended:
                self._ended.remove(self._next)
                self._next += 1
            self._turns.notify_all()


class Operation:
    """One operation of all ranks, as a context manager around what this rank does.

    An exception in the body goes to all ranks with the next round, then it is raised; the others get a ``RanksError``.
    The round ``done`` is the last: a body that has had its answer cannot fail for others.
    """

    def __init__(self, peers: Peers, turn: Turn) -> None:
        self._peers, self._turn = peers, turn
        self._looked = float("-inf")

    def __enter__(self) -> Operation:  # noqa: PYI034 - Self is not in Python 3.10
        self._peers._enter(self._turn.number)  # noqa: SLF001 - they are one
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end(error)
        finally:
            self._peers._leave(self._turn.number)  # noqa: SLF001 - they are one

    def round(
        self,
        name: str,
        value: Any,
        *,
        combine: Callable[[list[Any]], Any] | None = None,
        decide: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Take part in the next round, and return its answer, the same on all ranks.

        Args:
            name: the round, the same on all ranks; ``done`` is the last.
            value: what this rank says: None, numbers, text, bytes, lists and dicts of them.
            combine: makes one value of several, those of ranks or of what it has made; they come in the order
                of ranks as far as a tree has one, this rank's first. Without it, the answer is made of the list of all.
            decide: makes the answer of the value of all ranks, on rank 0 alone; its exception fails the operation for
                all. It calls ``alive`` where it takes long. Without it, the answer is the value.

        Raises:
            RanksError: a rank has failed or does not answer, or the store does not.
        """
        return self._run(self._turn.round(name, value, None, combine, decide))

    def alive(self) -> None:
        """Say that this rank makes progress. Cheap: most calls do nothing."""
        if self._peers.size > 1 and not self._turn.over:
            self._run(self._turn.alive())

    def check(self) -> None:
        """Raise if another rank has failed, so that a long body ends early. Cheap: at most one look a second.

        Raises:
            RanksError: a rank has failed or does not answer, or the store does not.
        """
        if self._peers.size == 1 or self._turn.over:
            return
        now = time.monotonic()
        if now - self._looked >= min(1.0, self._turn.slice):
            self._looked = now
            self._run(self._turn.look())

    def _run(self, steps: Steps) -> Any:
        return self._peers._run(steps, self._turn.timeout)  # noqa: SLF001 - they are one

    def _end(self, error: BaseException | None) -> None:
        turn = self._turn
        if turn.over:
            return
        if error is None:
            self._run(turn.leave())
            return
        stopped = isinstance(error, StopError)
        failure = error.failures[0] if isinstance(error, StopError) else words.failure_of(turn.member, error)
        try:
            self._run(turn.round("", None, failure))
        except RanksError as verdict:
            if stopped:
                raise verdict from None
            if sys.version_info >= (3, 11):
                error.add_note(str(verdict))
