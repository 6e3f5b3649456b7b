"""The rounds of one operation of many ranks: a state machine without clock, I/O or threads.

Its methods are generators of requests; ``peers.py`` serves them from a store of torch's, the tests from a simulated
one.

**A turn** is one call of ``save`` or ``load`` on all ranks, numbered by each rank for itself (each call takes one,
however it ends) or named by a label that its caller gives. It has **rounds**. In a round each rank posts one message
for the rank above it, which waits for those of the ranks below it, combines them with its own, and posts the result;
rank 0, the coordinator, makes the answer.

**The verdict** of a round is stored in one key, its register. It goes from empty to ``DECIDING`` to the answer, or to a
failure, only by compare-and-set; a rank that finds a failure in it, or puts it there, has the same verdict as all
others. So a coordinator that was stopped, and wakes up after the others have failed, cannot decide; a coordinator that
stopped while it decided the last round leaves an unknown outcome, which is a verdict, too. A failure ends the turn. The
bell is a key that appears after the verdict, to wake waiting ranks; it may also appear without one.

**Out of step.** A rank that missed a call, or alone abandoned one, is in an earlier turn than the others: it brings its
call to a turn that has failed without it, or to which others have brought another call. A verdict lists the calls that
it applies to (``called.py``). A rank whose call is not among them brings it to the next turn, and so on until it meets
the others. A rank whose call is among them accepts the verdict: it may be late, and must not meet a later call of the
others. Calls that meet in one turn all fail, except those of ranks that have already abandoned the others' call: these
wait in the next turn. Thus ranks meet again. For calls other than saves, a rank accepts one old verdict of a call like
its own, because it may be late, and skips further ones. For indistinguishable saves it accepts each: it stays behind,
and its save never meets a later save of the others. Only one case goes unnoticed: the rank comes while the others
still wait in the save that it has missed. So the first save that nothing distinguishes from an earlier one warns.

**Silence**, not duration, ends a wait. A working rank sends heartbeats (it "beats"); so does a rank that waits for
those below it. A rank listens to those below until it has their messages, and to the coordinator until it has the
verdict, even while it works itself: it may be waiting for their bytes. So every rank that has not posted has a
listener. The beats of a rank that has posted are not needed: if its message was lost, it is silent. Time in which a
rank could not listen is not counted against others (``silence.py``).

**A failure** is announced to all at once in one key, ``abort``, so that working ranks can stop; then it goes up like
any message. A rank that knows of a failure waits briefly for the missing messages, to list all failures. It waits
longer only for ranks that have never sent a message: they need an answer to their hello, or they could not learn the
verdict.

**Leaving.** The reader of a message removes it. The coordinator removes a round's answer when the next round shows that
all have read it; the last rank to leave removes the keys of the last round. A rank that leaves without a verdict (its
store did not answer) reports that at its next call: until then it is silent. After a success, the rank whose process
may run the store's server waits until the others have read the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from fastckpt._ranks import tree, words
from fastckpt._ranks.called import STEP, Called
from fastckpt._ranks.member import Member, hello_of
from fastckpt._ranks.messages import Message, ahead, join, received
from fastckpt._ranks.requests import (
    Add,
    Call,
    Forget,
    Get,
    Now,
    Put,
    Remove,
    Steps,
    Swap,
    UnreachableError,
    Wait,
    value_of,
)
from fastckpt._ranks.silence import Silence
from fastckpt.exceptions import RankFailure, RanksError

#: The last round: its answer is the outcome of the operation.
LAST = "done"
#: Bytes of one value in the store. torch's TCPStore accepts 8 MiB.
VALUE = 4 << 20
#: The most seconds between two checks for silent ranks: an error comes at most two checks after the timeout.
_LOOK = 2.5
#: Seconds that a rank waits for the others once it knows that the turn has failed.
GRACE = 5.0
#: Bytes of an answer that the register itself holds.
INLINE = 16 << 10
DECIDING = b"deciding"
_BEHIND = (
    "This rank reached the save after the others had abandoned it: it was late, or it missed a save. In the second "
    "case further saves to this path fail, too, unless something distinguishes them: pass metadata={'step': step} to "
    "each save, and restart the job"
)


class StopError(RanksError):
    """Another rank has failed: the body of an operation ends here, and the verdict follows."""


@dataclass
class _Listening:
    """The wait of a rank for the messages of those below it."""

    now: float
    waiting: set[int]
    silence: Silence
    #: When this rank last listened: while it listens to one rank after another, the remaining ones seem silent.
    listened: float
    #: When the failure of the turn became known.
    failed: float | None = None
    #: Whether there is a verdict.
    decided: bool = False
    found: dict[int, Message] = field(default_factory=dict)

    def fail(self) -> None:
        self.failed = self.now if self.failed is None else self.failed


def _is_final(verdict: bytes | None) -> bool:
    """Whether the value of a register is a verdict."""
    return verdict is not None and verdict != DECIDING


class Turn:
    """One operation of one rank.

    Args:
        member: the rank.
        kind: the kind of operation, such as ``save``.
        path: the path of the operation.
        timeout: seconds of silence after which a rank is considered gone.
        label: names the turn instead of its number, for callers that cannot count: the same on all ranks, and unique.
        place: where the path leads, by :func:`fastckpt._ranks.called.location_of`.
        before: returns the turns of this rank that must end before a turn begins, in their order.

    Attributes:
        marks: values that distinguish this call from others of its kind to the same path, see :class:`Called`; set
            before the first round.
    """

    def __init__(
        self,
        member: Member,
        kind: str,
        path: str,
        timeout: float,
        label: str | None = None,
        place: list[Any] | None = None,
        before: Callable[[Turn], Iterable[Turn]] = lambda _: (),
    ) -> None:
        self.member, self.kind, self.path, self.timeout = member, kind, path, timeout
        self.marks: dict[str, str] = {}
        self._label, self._place, self._before = label, place, before
        self.name = ""
        #: Seconds until a rank checks which ranks are silent, and until it checks whether the turn has failed. Large
        #: groups check less often: one store serves them all.
        self.long_slice = min(timeout / 20, max(_LOOK, member.size / 1024))
        self.slice = min(self.long_slice, 1.0)
        #: Seconds of work until this rank checks which ranks are silent.
        self.work_slice = min(timeout / 20, max(1.0, member.size / 1024))
        self._grace = min(GRACE, timeout)
        #: The ranks that this rank listens to while it works.
        self._watched = (*((0,) if member.rank else ()), *tree.below(member.rank, member.size))
        self._begin()

    def _begin(self) -> None:
        """Start a turn: the first, or the next one if the turn belonged to another call."""
        self._number: int | None = None
        #: The number of rounds that this rank has begun.
        self.rounds = 0
        #: Whether this rank is in a round, not between two.
        self.inside = False
        #: Whether this rank has the verdict of its last round, or has left without one.
        self.over = False
        self._beaten: float | None = None
        #: Messages that arrived since the last round.
        self._silence = Silence(self.timeout)
        #: Whether a rank has failed and this was announced.
        self._aborted = False
        #: Whether this rank has reported success and does not know the outcome.
        self._unknown = False
        #: Whether the coordinator has completed the operation.
        self._committed = False
        #: Whether the others failed without this rank, which accepted the old verdict of a similar call.
        self._outrun = False
        #: Keys that this rank may have made, or may be the last to remove: beats and hello, messages, answers.
        self._small: set[str] = set()
        self._posted: list[str] = []
        self._taken: list[str] = []
        self._answers: dict[int, list[str]] = {}

    @property
    def called(self) -> Called:
        """The identity of this call."""
        return Called(self.kind, self.path, self._place, self.marks)

    @property
    def is_repeated(self) -> bool:
        """Whether nothing distinguishes this call from an earlier save of these ranks.

        A step distinguishes a call, even if the run has gone back and saves this step again.
        """
        return self._label is None and STEP not in self.marks and self.called.is_like(self.member.saved)

    # Keys.

    @property
    def number(self) -> str:
        """The name of the turn in the store: taken when it is first needed, in the order of this rank's turns."""
        if self._label is not None:
            return self._label
        if self._number is None:
            for turn in (*self._before(self), self):
                turn.take_number()
        return str(self._number)

    def take_number(self) -> None:
        """Take the next number for this turn, unless it has a number or a label."""
        # Several threads and signal handlers may run this, but cannot interrupt it between lines without a call.
        if self._number is None and self._label is None:
            self._number = self.member.turn
            self.member.turn += 1

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("fastckpt", self.member.session, self.number, *parts)))

    def _up(self, rank: int, number: int | None = None) -> str:
        return self._key(number or self.rounds, "up", rank)

    def _beat_of(self, rank: int) -> str:
        return self._key("beat", rank)

    def _register(self, number: int | None = None) -> str:
        return self._key(number or self.rounds, "verdict")

    def _bell(self, number: int | None = None) -> str:
        return self._key(number or self.rounds, "bell")

    @property
    def _abort(self) -> str:
        return self._key("abort")

    # The work of a rank between its messages.

    def alive(self) -> Steps:
        """Signal that this rank is making progress; to the store, at most forty times per ``timeout``."""
        if not self._working():
            return
        now = yield Now()
        if self._beaten is None:
            self._beaten = now  # most turns are short: they need no beats
        elif now - self._beaten >= self.long_slice / 2:
            self._beaten = now
            beat = self._beat_of(self.member.rank)
            self._small.add(beat)
            yield Add(beat, 1)
            if not self._working():  # another thread has left meanwhile
                yield Remove((beat,))

    def _working(self) -> bool:
        return not self.over and self.member.size > 1 and bool(self.member.session)

    def look(self) -> Steps:
        """Raise ``StopError`` if a rank has failed in this turn, or a rank that this one listens to is silent."""
        if not self._working():
            return
        watched = self._watched if self.rounds and not self.inside else ()
        told, *beats = yield Get((self._abort, *map(self._beat_of, watched)))
        if told is not None:
            self._aborted = True
            failure = RankFailure(*words.decode(told))
        else:
            silent = yield from self._silent_of(dict(zip(watched, beats, strict=True)))
            if silent is None:
                return
            failure = self.member.silent(silent, self.timeout)
            yield from self._tell(failure)
        raise StopError(f"{self.kind}: {self.path}: {failure}", (failure,))

    def _silent_of(self, beats: dict[int, bytes | None]) -> Steps:
        """Record beats, and return a rank that has neither beaten for ``timeout`` nor posted, or None."""
        now = yield Now()
        for rank, beat in beats.items():
            if self._silence.hear(rank, beat, now) >= self.timeout:
                if not rank or (yield from value_of(self._up(rank, self.rounds + 1))) is None:
                    return rank
                self._silence.begin((rank,), now)
        return None

    # One round.

    def round(
        self,
        name: str,
        value: Any,
        failure: RankFailure | None = None,
        combine: Callable[[list[Any]], Any] | None = None,
        decide: Callable[[Any], Any] | None = None,
        is_done: Callable[[], bool] | None = None,
    ) -> Steps:
        """Take part in the next round and return its answer.

        Args:
            name: the round, the same on all ranks; ``LAST`` is the last.
            value: the message of this rank.
            failure: the failure of this rank, or the other rank's failure because of which it stopped.
            combine: combines the values of a rank and the ranks below it, its own first; None makes a list of all.
            decide: computes the answer from the combined value, at rank 0; None takes the value itself.
            is_done: whether ``decide``, which has raised, has completed the operation nevertheless.

        Raises:
            RanksError: a rank failed or is silent.
            UnreachableError: the store does not answer.
        """
        self.name = name
        if self.member.size == 1:
            return self._alone(value, failure, combine, decide)
        left: list[Called] = []
        if not self.rounds:
            left = self.member.come(self.called)
        while True:
            own = Message(
                self.called,
                name,
                [failure] if failure else [],
                0,
                [value] if combine is None else value,
                [(self.called, left)],
            )
            verdict = yield from self._attempt(own, combine, decide, is_done)
            if self.rounds > 1 or self._label is not None or not (self._outrun or self._is_of_others(verdict)):
                break
            yield from self._pass()
        answer = yield from self._take(verdict)
        self.inside = self._unknown = False
        self._silence.clear()
        return answer

    def _attempt(
        self,
        own: Message,
        combine: Callable[[list[Any]], Any] | None,
        decide: Callable[[Any], Any] | None,
        is_done: Callable[[], bool] | None,
    ) -> Steps:
        """Take part in one round, and return the verdict."""
        self._posted.clear()
        if not self.member.session:
            yield from self._meet()
        yield from self._settle()
        self.rounds += 1
        self.inside = True
        if self.rounds == 1 and self.member.was_told(self.called):
            old = yield from value_of(self._register())
            if old is not None and old[:1] == b"!":
                self._outrun = True
                return old
        messages = yield from self._collect(own)
        if messages is None:
            return (yield from value_of(self._register()))
        joined = join(self.member, own, messages, combine)
        verdict = None
        if not self.member.rank:
            verdict = yield from self._decide(joined, decide, is_done)
        else:
            self._unknown = own.name == LAST and not joined.failures
            yield from self._post(self._up(self.member.rank), joined.encode())
        if self._taken:  # not before: others wait for what this rank posts
            yield Remove(tuple(self._taken))
            self._taken.clear()
        return verdict or (yield from self._await())

    def _alone(
        self,
        value: Any,
        failure: RankFailure | None,
        combine: Callable[[list[Any]], Any] | None,
        decide: Callable[[Any], Any] | None,
    ) -> Any:
        """Take part in a round of one rank. No other rank must learn of it: an exception propagates unchanged."""
        self.rounds += 1
        if failure:
            raise self.error([failure])
        joined = [value] if combine is None else combine([value])
        answer = joined if decide is None else decide(joined)
        self.over = self.name == LAST
        return answer

    def _meet(self) -> Steps:
        self._small |= {hello_of(self.member.rank), self.member.welcome()}
        silent = yield from self.member.meet(self.timeout, self.long_slice)
        if silent is not None:
            self.owe(f"gave up: {silent}")
            raise self.error([silent])

    # Up.

    def _collect(self, own: Message) -> Steps:
        """Return the messages of the ranks below by rank, in order, or None if there is a verdict.

        A missing message is a failure of ``own``.
        """
        member = self.member
        now = yield Now()
        state = _Listening(now, set(tree.below(member.rank, member.size)), Silence(self.timeout), now)
        state.silence.begin(state.waiting, now)
        if own.failures:
            state.fail()
            # Do not wait again for a rank that was found silent.
            state.silence.take_over(self._silence, state.waiting)
            yield from self._tell(own.failures[0])
        while state.waiting:
            keys = {rank: self._expected(rank) for rank in sorted(state.waiting)}
            hurry = state.failed is not None and state.now - state.failed <= self._grace
            pause = min(self.slice, self._grace / 10) if hurry else self.slice
            if not (yield Wait(tuple(keys.values()), pause, min(keys))):
                yield from self.alive()
            state.now = yield Now()
            came = yield from self._receive(keys, state)
            if not state.waiting or (came and state.now - state.listened < self.slice):
                continue
            yield from self._listen(state, own)
            if self._has_waited(state):
                break
        if state.decided:
            return None
        if self._aborted and not own.failures:
            # The rank that failed may report to another rank, and a missing message must not count as success.
            own.failures.append(RankFailure(*words.decode((yield from value_of(self._abort)))))
        return {rank: state.found[rank] for rank in sorted(state.found)}

    def _expected(self, rank: int) -> str:
        """Return the key that shows that a rank below has come, or has reached the round of this rank."""
        return self._up(rank) if rank in self.member.answered else hello_of(rank)

    def _receive(self, keys: dict[int, str], state: _Listening) -> Steps:
        """Receive the messages that have come, and return whether there were any."""
        member = self.member
        values = yield Get(tuple(keys.values()))
        came = {rank: data for rank, data in zip(keys, values, strict=True) if data is not None}
        hellos = {rank: data for rank, data in came.items() if keys[rank] == hello_of(rank)}
        state.silence.begin(hellos, state.now)
        for rank, data in came.items():
            if rank in hellos:
                continue
            message = received(member, rank, (yield from self._fetch(keys[rank], data, self._taken)))
            yield from self.alive()
            member.known.add(rank)
            state.waiting.discard(rank)
            state.found[rank] = message
            if message.failures:
                state.fail()
        yield from member.answer(hellos)
        return bool(came)

    def _listen(self, state: _Listening, own: Message) -> Steps:
        """Listen to the ranks below whose messages are missing; check whether the turn has failed, or has a verdict."""
        member = self.member
        state.listened = state.now
        waiting = sorted(state.waiting)
        beats = [self._beat_of(rank) for rank in waiting]
        # A rank may have restarted since it said hello.
        again = [rank for rank in waiting if rank in member.answered and rank not in member.known]
        found = yield Get((self._abort, self._register(), *beats, *map(hello_of, again)))
        state.decided = _is_final(found[1])
        if found[0] is not None:
            self._aborted = True
            state.fail()
        yield from member.answer(dict(zip(again, found[2 + len(waiting) :], strict=True)))
        for rank, beat in zip(waiting, found[2:], strict=False):
            if state.silence.hear(rank, beat, state.now) >= self.timeout:
                silent = member.silent(rank, self.timeout)
                own.failures.append(silent)
                state.waiting.discard(rank)
                state.fail()
                yield from self._tell(silent)

    def _has_waited(self, state: _Listening) -> bool:
        """Whether a rank that knows of a failure has waited long enough for the missing messages."""
        if any(rank not in self.member.answered for rank in state.waiting):
            return False
        return state.decided or (state.failed is not None and state.now - state.failed >= self._grace)

    # Down.

    def _decide(
        self, joined: Message, decide: Callable[[Any], Any] | None, is_done: Callable[[], bool] | None
    ) -> Steps:
        """Make the answer, as the coordinator, and return the verdict, which may be another's."""
        calls = ahead(joined.met)
        if joined.failures:
            return (yield from self._conclude(b"", words.failed(joined.failures, joined.more, words.NOTHING, calls)))
        yield Remove(tuple(self._answers.pop(self.rounds - 1, ())))
        yield from self.alive()
        verdict = yield Swap(self._register(), b"", DECIDING)
        if verdict != DECIDING:
            return verdict
        try:
            answer = joined.value if decide is None else (yield Call(decide, joined.value))
            data = words.encode(answer)
        except BaseException as error:
            # A signal may have come after the last step, or the last step may have failed after the commit.
            self._committed = is_done is not None and is_done()
            failure = self.member.failure(words.told(error))
            outcome = words.COMMITTED if self._committed else words.NOTHING
            verdict = yield from self._conclude(DECIDING, words.failed([failure], 0, outcome, calls))
            if isinstance(error, Exception) and self.rounds == 1 and self._is_of_others(verdict):
                return verdict
            yield from self.leave(failed=True)
            raise
        self._committed = self.name == LAST
        final = b"=" + data if len(data) < INLINE else (yield from self._cut(self._register(), data))
        return (yield from self._conclude(DECIDING, final))

    def _conclude(self, expected: bytes, verdict: bytes, number: int | None = None) -> Steps:
        """Put a verdict into a register if that is as expected, ring the bell, and return the register's verdict."""
        held = yield Swap(self._register(number), expected, verdict)
        if _is_final(held):
            yield Put({self._bell(number): b""})
        return held

    def _await(self) -> Steps:
        """Return the verdict when the coordinator has made it, or fail when the coordinator is silent."""
        silence = Silence(self.timeout)
        silence.begin((0,), (yield Now()))
        pause = self.long_slice
        if self._aborted:
            # Messages that arrived while this rank worked still count.
            silence.take_over(self._silence, (0,))
            pause = self.slice
        while True:
            yield Wait((self._bell(),), pause, 0)
            # The coordinator may have stopped between the verdict and the bell.
            verdict = yield from value_of(self._register())
            if _is_final(verdict):
                return verdict
            beats = yield from value_of(self._beat_of(0))
            if silence.hear(0, beats, (yield Now())) >= self.timeout:
                return (yield from self._give_up())

    def _give_up(self) -> Steps:
        """Make the coordinator's silence the verdict, unless there is one, and return it."""
        silent = self.member.silent(0, self.timeout)
        yield from self._tell(silent)
        verdict = yield from self._conclude(b"", self._failed(silent))
        if verdict == DECIDING:
            outcome = words.UNKNOWN if self.name == LAST else words.NOTHING
            verdict = yield from self._conclude(DECIDING, self._failed(silent, outcome))
        return verdict

    def _failed(self, failure: RankFailure, outcome: str = words.NOTHING) -> bytes:
        """Return the verdict of a rank that knows only its own call."""
        return words.failed([failure], 0, outcome, [(self.called, False)])

    def _is_of_others(self, verdict: bytes) -> bool:
        """Whether the first round has failed, and the ranks will come to this call in a later turn."""
        if verdict[:1] != b"!":
            return False
        calls = words.decode(verdict[1:])[3]
        return calls is not None and all(waits for one, waits in calls if not self.called.is_other(Called(*one)))

    def _pass(self) -> Steps:
        """Continue with the same call in the next turn."""
        yield from self._depart(failed=True)
        self._begin()

    def _take(self, verdict: bytes) -> Steps:
        """Return the answer in a verdict, or raise its failure."""
        self._answers[self.rounds] = []
        if verdict[:1] == b"!":
            yield from self.leave(failed=True)
            failures, more, outcome, _ = self._read(verdict[1:])
            raise self.error([RankFailure(*one) for one in failures], more, outcome)
        data = yield from self._fetch(self._register(), verdict, self._answers[self.rounds])
        self._answers[self.rounds].append(self._bell())
        if self.name == LAST:
            yield from self.leave()
        return self._read(data)

    def _read(self, verdict: bytes) -> Any:
        """Return the answer of a verdict; raise if it arrived altered."""
        try:
            return words.decode(verdict, "the answer of rank 0")
        except words.DamagedError as error:
            outcome = words.UNKNOWN if self.name == LAST else words.NOTHING
            raise self.error([self.member.failure(words.told(error))], outcome=outcome) from error

    # Ends.

    def _tell(self, failure: RankFailure) -> Steps:
        """Announce to working ranks that the turn has failed; the first failure counts."""
        if not self._aborted:
            self._aborted = True
            yield Swap(self._abort, b"", words.encode(list(failure)))

    def leave(self, *, failed: bool = False) -> Steps:
        """End the turn on this rank; the last rank to leave removes its remaining keys."""
        if failed:
            self.member.leave_behind(self.called)
        elif self.name == LAST:
            self.member.behind, self.member.answered_turn = [], self.number
            self.member.saved += [self.called] if self.kind == "save" and self._label is None else []
        yield from self._depart(failed=failed)

    def _depart(self, *, failed: bool) -> Steps:
        self.over = True
        member = self.member
        if member.size == 1 or not member.session:
            return
        try:
            if failed:
                yield Forget()
            if mine := [*self._small, *self._taken, *(self._posted if failed else ())]:
                yield Remove(tuple(mine))
            if (yield Add(self._key("left"), 1)) == member.size:
                rounds = (self.rounds - 1, self.rounds, self.rounds + 1)
                verdicts = [key for one in rounds if one > 0 for key in (self._register(one), self._bell(one))]
                parts = chain.from_iterable(self._answers.values())
                yield Remove((self._key("left"), self._abort, *dict.fromkeys([*verdicts, *parts])))
                if not failed and member.serves is not None and member.serves != member.rank:
                    yield Put({self._key("gone"): b""})
                return
            member.parting = self._key("left")
            if not failed and self.name == LAST and member.serves == member.rank:
                yield from self._see_off()
        except UnreachableError:
            return  # the verdict is known; remaining keys do no harm

    def _see_off(self) -> Steps:
        """Wait until the others have read the last answer, or time is up: this process may have the store."""
        gone, began = self._key("gone"), (yield Now())
        while not (yield Wait((gone,), self.slice, tree.below(0, self.member.size)[0])):
            if (yield Now()) - began >= self._grace:
                yield Forget()
                break
        yield Remove((gone,))

    def end(self, error: BaseException | None) -> Steps:
        """End the body of the operation, which may have raised; return the verdict if it is a failure."""
        if self.over:
            return None
        if error is None:
            yield from self.leave()
        elif not isinstance(error, Exception):
            yield from self.quit(error)
        else:
            failure = self.member.failure(words.told(error))
            if isinstance(error, StopError):
                (failure,) = error.failures
            try:
                yield from self.round("", None, failure)
            except RanksError as verdict:
                return verdict
        return None

    def quit(self, error: BaseException) -> Steps:
        """Leave because the user interrupted the program: no rank waits for another."""
        if self.member.size > 1:
            failure = self.member.failure(words.told(error))
            while (yield from self.abandon(failure)):
                yield from self._pass()

    def abandon(self, failure: RankFailure) -> Steps:
        """Leave without a verdict, so that the others get one at once; return whether they are in a later turn."""
        if not self.member.session:
            self.owe(failure.message)
            return False
        self.over = True
        yield from self._tell(failure)
        first = self.rounds if self.inside else self.rounds + 1
        for number in (first, first + 1):
            held = yield from self._conclude(b"", self._failed(failure), number)
            if held == DECIDING and not self.member.rank:
                # This rank decided, and its last message has not arrived.
                outcome = words.COMMITTED if self._committed else words.NOTHING
                held = yield from self._conclude(DECIDING, self._failed(failure, outcome), number)
            if held[:1] == b"!" or self.name == LAST:
                break
        if not self.rounds and self._label is None and self._is_over(held):
            return True
        yield from self.leave(failed=True)
        return False

    def _is_over(self, held: bytes) -> bool:
        """Whether the turn that this rank is about to leave has failed without it, for another call."""
        if self.kind or held[:1] != b"!":
            return self._is_of_others(held)
        # A rank that leaves for good, whatever call the others are in, also informs the ranks that are in a later call.
        calls = words.decode(held[1:])[3]
        return calls is None or all(one[0] for one, _ in calls)

    def owe(self, why: str) -> None:
        """Leave without a verdict or a message: the others learn of it at the next call of this rank."""
        if not self.over and self.member.size > 1:
            _ = self.number  # takes the number before a later turn does
            self.member.leave_behind(self.called)
            self.member.owed.append((self, self.member.failure(why)))
        self.over = True

    def _settle(self) -> Steps:
        """Report the turns that this rank left without a message."""
        while owed := self.member.owed:
            turn, failure = owed[0]
            yield from turn.abandon(failure)
            owed.pop(0)

    def error(self, failures: list[RankFailure], more: int = 0, outcome: str = words.NOTHING) -> RanksError:
        """Return the error that names the failure and its consequence for the checkpoint."""
        ending = self._ending(outcome)
        others = f"; and {more:,} more" if more else ""
        told = "; ".join(str(failure) for failure in failures) + others
        if self.is_repeated and self.rounds == 1 and self.member.was_silent(failures):
            ending = f"{ending}. {_BEHIND}"
        return RanksError(f"{self.kind}: {self.path}: {told}: {ending}", tuple(failures))

    def unreachable(self, error: UnreachableError) -> RanksError:
        """Leave because the store does not answer, and return an error about that."""
        self.owe(f"gave up: {error}")
        ending = self._ending(words.UNKNOWN if self._unknown else words.NOTHING)
        return RanksError(f"{self.kind}: {self.path}: {error}: {ending}")

    def _ending(self, outcome: str) -> str:
        agreeing = self.inside and self.name != LAST
        return words.ending(self.kind, outcome, agreeing=agreeing, here=self._committed)

    # Values of any size.

    def _post(self, key: str, data: bytes) -> Steps:
        """Put a value that may be too large for one key."""
        self._posted.append(key)
        yield Put({key: b"=" + data if len(data) < VALUE else (yield from self._cut(key, data))})

    def _cut(self, key: str, data: bytes) -> Steps:
        """Store a large value as parts beside a key, and return the value for the key."""
        starts = range(0, len(data), VALUE)
        for part, start in enumerate(starts):
            self._posted.append(f"{key}/{part}")
            yield Put({f"{key}/{part}": data[start : start + VALUE]})
        return b"#%d" % len(starts)

    def _fetch(self, key: str, held: bytes, read: list[str]) -> Steps:
        """Return the value whose key holds ``held``, and add its keys to ``read``."""
        parts = [f"{key}/{part}" for part in range(int(held[1:]))] if held[:1] == b"#" else []
        read += [key, *parts]
        pieces = [] if parts else [held[1:]]
        for part in parts:
            piece = yield from value_of(part)
            pieces.append(piece)
        return b"".join(pieces)
