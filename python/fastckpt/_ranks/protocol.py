"""The rounds of one operation of many ranks: a state machine without clock, I/O or threads.

Its methods are generators. They yield requests to a store and a clock (``Put`` to ``Now``), and are sent the answers;
``peers.py`` serves them from a store of torch's, the tests from a simulated one.

**A turn** is one call of ``save`` or ``load`` on all ranks, numbered by each rank for itself: each call takes one,
however it ends. It has **rounds**. In a round each rank posts one message for the rank above it, which waits for those
of the ranks below it, joins them with its own, and posts the result; rank 0, the coordinator, makes the answer.

**The verdict** of a round stands in one key, its register. It goes from nothing to ``DECIDING`` to the answer, or to a
failure, by compare-and-set alone; whoever finds a failure in it, or puts it there, has the same verdict as all others.
So a coordinator that was stopped, and wakes up after the others have given up, cannot decide; one that stopped while it
was deciding the last round leaves an unknown outcome, which is a verdict too. A failure ends the turn.

**Silence** is what ends a wait, not duration. A rank that works beats; so does one that waits for those below it. A
rank listens to those below until it has their messages, and to the coordinator until it has the verdict. The beats of a
rank that has posted are not needed: if its message was lost, it is silent.

**A session** is one process group in one store. The store may be older: a restarted job finds keys of its former self.
So each rank says hello with a random word, the rank above answers under that word, and all keys of a turn carry the
session that rank 0 drew. A rank answers a hello that changes again.

**Leaving.** The reader of a message removes it. The coordinator removes a round's answer when the next round shows that
all have read it; what the last round leaves, the last rank to leave removes. A rank that leaves without a verdict (its
store did not answer, the user interrupted it) says so when it next comes: until then it is silent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from fastckpt._ranks import tree, words
from fastckpt.exceptions import RankFailure, RanksError

#: The round after which nothing can fail for others: its answer is the outcome of the operation.
LAST = "done"
#: Bytes of one value in the store. torch's TCPStore takes 8 MiB.
VALUE = 4 << 20
#: Seconds that a rank waits for the others once it knows that the turn has failed.
GRACE = 5.0
#: Bytes of an answer that the register itself holds.
_INLINE = 16 << 10
_DECIDING = b"deciding"


class Put(NamedTuple):
    """Set a key to bytes."""

    key: str
    value: bytes


class Get(NamedTuple):
    """Return the values of keys, None where there is none, without waiting."""

    keys: tuple[str, ...]


class Wait(NamedTuple):
    """Wait until all keys exist, at most so many seconds; return whether they do."""

    keys: tuple[str, ...]
    seconds: float


class Add(NamedTuple):
    """Add to a counter, which begins at 0, and return what it is then."""

    key: str
    amount: int


class Swap(NamedTuple):
    """Set a key to ``value`` if it is ``expected`` (empty: not there), and return what it is then."""

    key: str
    expected: bytes
    value: bytes


class Remove(NamedTuple):
    """Remove keys, whether they exist or not."""

    keys: tuple[str, ...]


class Now(NamedTuple):
    """Return the seconds of a clock that only goes forward."""


class Call(NamedTuple):
    """Return what a function makes of a value. It may take long."""

    function: Callable[[Any], Any]
    value: Any


Request: TypeAlias = Put | Get | Wait | Add | Swap | Remove | Now | Call
#: Answers of the store are of the type that the request says.
Steps: TypeAlias = Generator[Request, Any, Any]


class UnreachableError(Exception):
    """The store does not answer. The text says which, and what may be the cause."""


class StopError(RanksError):
    """Another rank has failed: the body of an operation ends here, and the verdict follows."""


@dataclass
class Member:
    """What one rank remembers between turns.

    Args:
        rank: its index in the group.
        size: ranks in the group.
        host: the name of its host.
        word: a random word that no other rank, and no earlier process, has.
    """

    rank: int
    size: int
    host: str
    word: str
    session: str = ""
    #: The next turn.
    turn: int = 0
    #: Hosts of ranks that it has heard of.
    hosts: dict[int, str] = field(default_factory=dict)
    #: The word under which each rank below was last answered; empty once it has sent a message in this session.
    answered: dict[int, str] = field(default_factory=dict)
    #: Turns that it left without a verdict, and why.
    owed: list[tuple[Turn, RankFailure]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hosts[self.rank] = self.host
        if self.rank == 0:
            self.session = self.word

    def silent(self, rank: int, seconds: float) -> RankFailure:
        """Return the failure of a rank that does not answer."""
        below = tree.count_below(rank, self.size) if rank else 0
        through = f"; {below:,} ranks answer through it" if below else ""
        why = f"has not answered for {seconds:.1f} s (timeout=){through}"
        return RankFailure(rank, self.hosts.get(rank, ""), why)


@dataclass
class _Message:
    """What goes up: of one rank, or of a rank and all below it."""

    call: list[str]
    failures: list[RankFailure]
    #: Failures beyond those listed.
    more: int
    value: Any

    def encode(self) -> bytes:
        return words.encode([self.call, [list(one) for one in self.failures], self.more, self.value])

    @classmethod
    def decode(cls, data: bytes) -> _Message:
        call, failures, more, value = words.decode(data)
        return cls(call, [RankFailure(*one) for one in failures], more, value)


class Turn:
    """One operation of one rank.

    Args:
        member: the rank.
        kind: what it does, as ``save``.
        path: to what.
        timeout: seconds of silence after which a rank is taken to be gone.
    """

    def __init__(self, member: Member, kind: str, path: str, timeout: float) -> None:
        self.member, self.kind, self.path, self.timeout = member, kind, path, timeout
        self.number = member.turn
        member.turn += 1
        #: Rounds that it has begun.
        self.rounds = 0
        #: It has the verdict of its last round, or has left.
        self.over = False
        #: The last round was answered: what follows cannot fail for others.
        self.done = False
        self.below = tree.below(member.rank, member.size)
        #: How long one wait is before it looks around. Large groups look less often: the store serves them all.
        self.slice = min(timeout / 20, max(1.0, member.size / 1024))
        self._posted: list[str] = []
        self._heard_of: set[int] = set()
        self._beat_at: float | None = None
        self._aborted = False
        self._committed = False
        #: This rank has said that it succeeded, and has not heard of the outcome.
        self._unknown = False
        self._hellos: list[str] = []
        #: The keys of answers by round, those that may still be there.
        self._answers: dict[int, list[str]] = {}

    # Keys.

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("fastckpt", self.member.session, self.number, *parts)))

    def _up(self, rank: int) -> str:
        return self._key(self.rounds, "up", rank)

    @property
    def _register(self) -> str:
        return self._key(self.rounds, "verdict")

    @property
    def _bell(self) -> str:
        return self._key(self.rounds, "bell")

    @property
    def _abort(self) -> str:
        return self._key("abort")

    # What a rank does while it works.

    def alive(self) -> Steps:
        """Say that this rank makes progress. At most twice a slice it says so to the store."""
        if not self.member.session:
            return
        now = yield Now()
        if self.over:
            return
        if self._beat_at is None or now - self._beat_at >= self.slice / 2:
            self._beat_at = now
            self._heard_of.add(self.member.rank)
            yield from self._guard(self._beat())

    def _beat(self) -> Steps:
        yield Add(self._key("beat", self.member.rank), 1)

    def look(self) -> Steps:
        """Raise ``StopError`` if a rank has failed in this turn."""
        if not self.member.session or self.over:
            return
        told = yield from self._guard(self._get(self._abort))
        if told is not None:
            self._aborted = True
            failure = RankFailure(*json.loads(told))
            raise StopError(f"{self.kind}: {self.path}: {failure}", (failure,))

    # One round.

    def round(
        self,
        name: str,
        value: Any,
        failure: RankFailure | None = None,
        combine: Callable[[list[Any]], Any] | None = None,
        decide: Callable[[Any], Any] | None = None,
    ) -> Steps:
        """Take part in the next round and return its answer.

        Args:
            name: the round, the same on all ranks; ``LAST`` is the last.
            value: what this rank says.
            failure: that this rank has failed instead.
            combine: makes one value of those of a rank and the ranks below it, its own first; None makes a list of all.
            decide: makes the answer of the value of all ranks, at rank 0; None takes the value itself.

        Raises:
            RanksError: a rank failed or is silent.
        """
        self.name = name
        if self.member.size == 1:
            return self._alone(value, failure, combine, decide)
        return (yield from self._guard(self._round(value, failure, combine, decide)))

    def _guard(self, steps: Steps) -> Steps:
        """Run steps; what ends them but an answer or a verdict ends the turn here, and the others are owed a word."""
        try:
            return (yield from steps)
        except UnreachableError as error:
            self.owe(f"had given up: {error}")
            raise RanksError(f"{self.kind}: {self.path}: {error}: {self._ending(unknown=self._unknown)}") from error
        except BaseException as error:
            if not self.over:
                self.owe(words.failure_of(self.member, error).message)
            raise

    def _round(
        self,
        value: Any,
        failure: RankFailure | None,
        combine: Callable[[list[Any]], Any] | None,
        decide: Callable[[Any], Any] | None,
    ) -> Steps:
        member = self.member
        self._posted.clear()
        if not member.session:
            yield from self._meet()
        yield from self._settle()
        self.rounds += 1
        own = _Message([self.kind, self.path, self.name], [failure] if failure else [], 0, None)
        own.value = [value] if combine is None else value
        messages = yield from self._collect(own)
        if messages is None:
            return (yield from self._take((yield from self._get(self._register))))
        joined = self._join(own, messages, combine)
        if member.rank:
            self._unknown = self.name == LAST and not joined.failures
            yield from self._post(self._up(member.rank), joined.encode())
            verdict = yield from self._await()
        else:
            verdict = yield from self._decide(joined, decide)
        return (yield from self._take(verdict))

    def _alone(
        self,
        value: Any,
        failure: RankFailure | None,
        combine: Callable[[list[Any]], Any] | None,
        decide: Callable[[Any], Any] | None,
    ) -> Any:
        self.rounds += 1
        if failure:
            self.over = True
            raise words.error_of(self.kind, self.path, [failure], 0, self._ending(unknown=False))
        try:
            joined = [value] if combine is None else combine([value])
            answer = joined if decide is None else decide(joined)
        except BaseException:
            self.over = True
            raise
        self.done = self.over = self.name == LAST
        return answer

    # The session.

    def _hello(self, rank: int) -> str:
        return f"fastckpt/hello/{rank}"

    def _welcome(self, rank: int, word: str) -> str:
        return f"fastckpt/welcome/{rank}/{word}"

    def _meet(self) -> Steps:
        """Learn the session from the rank above."""
        member = self.member
        hello, welcome = self._hello(member.rank), self._welcome(member.rank, member.word)
        yield Put(hello, json.dumps([member.word, member.host]).encode())
        began = yield Now()
        while not (yield Wait((welcome,), self.slice)):
            now = yield Now()
            if now - began >= self.timeout:
                gone = tree.above(member.rank)
                while gone and (yield Get((self._hello(gone),)))[0] is not None:
                    gone = tree.above(gone)
                silent = member.silent(gone, self.timeout)
                self.owe(f"had given up: {silent}")
                raise words.error_of(self.kind, self.path, [silent], 0, self._ending(unknown=False))
        (told,) = yield Get((welcome,))
        member.session, hosts = json.loads(told)
        member.hosts.update((int(rank), host) for rank, host in hosts.items())
        yield Remove((welcome,))
        self._hellos.append(hello)

    def _answer_hello(self, rank: int, told: bytes | None) -> Steps:
        """Answer a rank below that has said hello, or has said it anew."""
        if told is None:
            return
        member = self.member
        word, host = json.loads(told)
        if member.answered.get(rank) in (word, ""):
            return
        member.answered[rank] = word
        member.hosts[rank] = host
        hosts = {0: member.hosts[0], member.rank: member.host}
        yield Put(self._welcome(rank, word), json.dumps([member.session, hosts]).encode())

    def _settle(self) -> Steps:
        """Tell of turns that were left without a verdict."""
        while self.member.owed:
            turn, failure = self.member.owed[0]
            yield from turn._tell(failure)  # noqa: SLF001 - a turn of the same rank
            yield from turn.leave(failed=True)
            self.member.owed.pop(0)

    # Up.

    def _collect(self, own: _Message) -> Steps:  # noqa: C901, PLR0912, PLR0915 - one loop
        """Return the messages of the ranks below by rank, in order, or None if there is a verdict.

        What is missing is a failure of ``own``.
        """
        member = self.member
        found: dict[int, _Message] = {}
        waiting = set(self.below)
        now = yield Now()
        heard = dict.fromkeys(waiting, (-1, now))
        failed_at = now if own.failures or self._aborted else None
        if own.failures and own.failures[0].rank == member.rank:
            yield from self._tell(own.failures[0])
        while waiting:
            keys = {rank: self._up(rank) if rank in member.answered else self._hello(rank) for rank in sorted(waiting)}
            pause = self.slice if failed_at is None else min(self.slice, max(0.01, failed_at + GRACE - now), GRACE / 10)
            if not (yield Wait(tuple(keys.values()), pause)):
                yield from self.alive()
            now = yield Now()
            values = yield Get(tuple(keys.values()))
            came = False
            for rank, data in zip(keys, values, strict=True):
                if rank not in member.answered:
                    yield from self._answer_hello(rank, data)
                    came |= data is not None
                    heard[rank] = (-1, now) if data is not None else heard[rank]
                elif data is not None:
                    found[rank] = _Message.decode((yield from self._fetch(keys[rank], data, remove=True)))
                    member.answered[rank] = ""
                    waiting.discard(rank)
                    came = True
                    if found[rank].failures and failed_at is None:
                        failed_at = now
            if came:
                continue
            for rank in sorted(waiting):
                if member.answered.get(rank):
                    yield from self._answer_hello(rank, (yield from self._get(self._hello(rank))))
                self._heard_of.add(rank)
                count = yield Add(self._key("beat", rank), 0)
                if count != heard[rank][0]:
                    heard[rank] = (count, now if heard[rank][0] >= 0 or count > 0 else heard[rank][1])
                elif now - heard[rank][1] >= self.timeout:
                    silent = member.silent(rank, self.timeout)
                    own.failures.append(silent)
                    waiting.discard(rank)
                    failed_at = now if failed_at is None else failed_at
                    yield from self._tell(silent)
            told, rung = yield Get((self._abort, self._bell))
            if rung is not None:
                return None  # the others gave up before this rank came
            if told is not None and failed_at is None:
                self._aborted, failed_at = True, now
            if failed_at is not None and now - failed_at >= GRACE:
                break
        if self._aborted and not own.failures:
            # The one that failed may answer to another rank, and what is missing here must not pass for success.
            (told,) = yield Get((self._abort,))
            own.failures.append(RankFailure(*json.loads(told)))
        return {rank: found[rank] for rank in sorted(found)}

    def _join(
        self, own: _Message, messages: dict[int, _Message], combine: Callable[[list[Any]], Any] | None
    ) -> _Message:
        """Make one message of a rank's own and those of the ranks below it."""
        failures, more = list(own.failures), own.more + sum(message.more for message in messages.values())
        for rank, message in messages.items():
            failures += message.failures
            if not own.failures and not message.failures and message.call != own.call:
                failures.append(self._mismatch(own.call, rank, message.call))
        if failures:
            listed = words.first_of(failures)
            return _Message(own.call, listed[: words.LISTED], more + len(listed[words.LISTED :]), None)
        values = [own.value, *(message.value for message in messages.values())]
        try:
            if combine is None:
                own.value = list(chain.from_iterable(values))
            elif messages or self.member.rank == 0:
                own.value = combine(values)
        except Exception as error:  # noqa: BLE001 - whatever it is, it fails the operation for all
            return _Message(own.call, [words.failure_of(self.member, error)], 0, None)
        return own

    def _mismatch(self, own: list[str], rank: int, other: list[str]) -> RankFailure:
        def told(call: list[str]) -> str:
            kind, path, name = call
            return f"{kind}s {path}" if own[:2] != other[:2] else f"{kind}s {path} and is at {name!r}"

        why = (
            f"{told(other)}, rank {self.member.rank} {told(own)}: all ranks must make the same calls in the same order"
        )
        return RankFailure(rank, self.member.hosts.get(rank, ""), why)

    # Down.

    def _decide(self, joined: _Message, decide: Callable[[Any], Any] | None) -> Steps:
        """Make the answer, as the coordinator, and return the verdict, which may be another's."""
        if joined.failures:
            verdict = yield Swap(self._register, b"", self._failed(joined.failures, joined.more))
            yield Put(self._bell, b"")
            return verdict
        yield Remove(tuple(self._answers.pop(self.rounds - 1, ())))
        yield from self.alive()
        verdict = yield Swap(self._register, b"", _DECIDING)
        if verdict != _DECIDING:
            return verdict
        try:
            answer = joined.value if decide is None else (yield Call(decide, joined.value))
            data = words.encode(answer)
        except BaseException as error:
            failure = words.failure_of(self.member, error)
            yield Swap(self._register, _DECIDING, self._failed([failure]))
            yield Put(self._bell, b"")
            yield from self.leave(failed=True)
            raise
        self._committed = self.name == LAST
        final = b"=" + data
        if len(final) > _INLINE:
            final = yield from self._cut(self._register, data)
        verdict = yield Swap(self._register, _DECIDING, final)
        yield Put(self._bell, b"")
        return verdict

    def _await(self) -> Steps:
        """Return the verdict when the coordinator has made it, or give up when it is silent."""
        heard, since = -1, (yield Now())
        beat = self._key("beat", 0)
        while not (yield Wait((self._bell,), self.slice)):
            self._heard_of.add(0)
            count = yield Add(beat, 0)
            now = yield Now()
            if count != heard:
                since = now if heard >= 0 or count > 0 else since
                heard = count
            elif now - since >= self.timeout:
                return (yield from self._give_up())
        return (yield from self._get(self._register))

    def _give_up(self) -> Steps:
        """Put the coordinator's silence into the register, unless a verdict is there, and return what is there."""
        silent = self.member.silent(0, self.timeout)
        yield from self._tell(silent)
        verdict = yield Swap(self._register, b"", self._failed([silent]))
        if verdict == _DECIDING:
            verdict = yield Swap(self._register, _DECIDING, self._failed([silent], unknown=self.name == LAST))
        yield Put(self._bell, b"")
        return verdict

    def _take(self, verdict: bytes) -> Steps:
        """Return the answer that a verdict is, or raise the failure."""
        self._answers[self.rounds] = [self._register, self._bell]
        if verdict[:1] == b"!":
            failures, more, unknown = json.loads(verdict[1:])
            yield from self.leave(failed=True)
            listed = [RankFailure(*one) for one in failures]
            raise words.error_of(self.kind, self.path, listed, more, self._ending(unknown=unknown))
        data = yield from self._fetch(self._register, verdict)
        if self.name == LAST:
            self.done = True
            yield from self.leave()
        return words.decode(data)

    def _failed(self, failures: list[RankFailure], more: int = 0, *, unknown: bool = False) -> bytes:
        return b"!" + json.dumps([[list(one) for one in failures], more, unknown]).encode()

    def _ending(self, *, unknown: bool) -> str:
        if self._committed:
            return "this rank committed it, but the others had given up: what is at the path is new and whole"
        if self.kind != "save":
            return "what it was to be loaded into may be filled in part"
        if unknown:
            return "the outcome is unknown: look at the path, where the old checkpoint or the new one is whole"
        return "nothing was committed, the old checkpoint stands"

    # Keys come and go.

    def _get(self, key: str) -> Steps:
        return (yield Get((key,)))[0]

    def _post(self, key: str, data: bytes) -> Steps:
        """Put a value that may be too large for one key."""
        self._posted.append(key)
        yield Put(key, b"=" + data if len(data) < VALUE else (yield from self._cut(key, data)))

    def _cut(self, key: str, data: bytes) -> Steps:
        """Put a large value as parts beside a key, and return what the key is to hold."""
        parts = -(-len(data) // VALUE)
        for part in range(parts):
            self._posted.append(f"{key}/{part}")
            yield Put(f"{key}/{part}", data[part * VALUE : (part + 1) * VALUE])
        return b"#%d" % parts

    def _fetch(self, key: str, data: bytes, *, remove: bool = False) -> Steps:
        """Return the value whose key holds ``data``."""
        parts = [f"{key}/{part}" for part in range(int(data[1:]) if data[:1] == b"#" else 0)]
        found = b""
        for part in parts:
            found += yield from self._get(part)
        if remove:
            yield Remove((key, *parts))
        else:
            self._answers[self.rounds] += parts
        return found if parts else data[1:]

    def _tell(self, failure: RankFailure) -> Steps:
        """Tell those who work that the turn has failed; the first failure stands."""
        if not self._aborted:
            self._aborted = True
            yield Swap(self._abort, b"", json.dumps(list(failure)).encode())

    def leave(self, *, failed: bool = False) -> Steps:
        """End the turn on this rank; the last rank to leave clears what is left of it."""
        self.over = True
        member = self.member
        if member.size == 1 or not member.session:
            return
        own = [*self._hellos, *(self._key("beat", rank) for rank in sorted(self._heard_of))]
        if failed:
            own += self._posted
        try:
            if own:
                yield Remove(tuple(own))
            if (yield Add(self._key("left"), 1)) == member.size:
                answers = chain.from_iterable(self._answers.values())
                yield Remove((self._key("left"), self._abort, self._register, self._bell, *answers))
        except UnreachableError:
            pass  # the verdict is known; keys that stay hurt nobody

    def owe(self, why: str) -> None:
        """Leave without a verdict: the other ranks are told when this one next comes."""
        self.over = True
        if self.member.size > 1:
            self.member.owed.append((self, RankFailure(self.member.rank, self.member.host, why)))
