"""Ranks in one process, with a simulated store and clock: drawn delays, deaths, stops, losses and late starts.

The seed determines a simulation. The ranks run the real protocol (``fastckpt._ranks.protocol``), and around it
a script like a save: ``arrive``, ``joined``, work, and ``done``, at which the coordinator commits. Other operations
are like a manager's wait, in which the ranks ask each other until all are ready, or like
its restore: a question, a load on the ranks that have the answer, and another question.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastckpt._ranks import protocol
from fastckpt._ranks.member import Member
from fastckpt._ranks.requests import Add, Call, Forget, Get, Now, Put, Remove, Swap, UnreachableError, Wait
from fastckpt.exceptions import RanksError


class ViolationError(AssertionError):
    """The protocol broke a promise."""


class Sleep(NamedTuple):
    """A request to wait: the rank computes, or is late."""

    seconds: float


class Later(NamedTuple):
    """A request of a rank that was stopped while it ran its own code."""

    request: Any


class Effect(NamedTuple):
    """A request that reaches the store after its rank has given it up."""

    request: Any


@dataclass
class Faults:
    """The faults of a simulation, drawn once."""

    #: Rank -> the number of the request at which it dies, and whether that request still takes effect.
    deaths: dict[int, tuple[int, bool]] = field(default_factory=dict)
    #: Rank -> the number of the request at which it stops, and for how long.
    stops: dict[int, tuple[int, float]] = field(default_factory=dict)
    #: Rank -> the number of the request at which it is cut off from the store, and for how long.
    cuts: dict[int, tuple[int, float]] = field(default_factory=dict)
    #: The share of a rank's values that are lost.
    loss: float = 0.0
    #: (operation, rank) -> the step of the script at which the rank raises.
    raises: dict[tuple[int, int], int] = field(default_factory=dict)
    #: When the store stands still, and for how long.
    pause: tuple[float, float] | None = None


class BoomError(Exception):
    """An exception that a rank raises itself."""


class Interrupt(BaseException):
    """The user interrupts a rank."""


class Process:
    """One rank."""

    def __init__(self, rank, steps):
        self.rank, self.steps = rank, steps
        self.dead = self.ended = False
        self.requests = 0
        self.wakes = 0
        self.deaf_until = 0.0
        self.asleep_until = 0.0
        self.died = 0.0


class World:
    """The store, the clock and the events of the processes."""

    def __init__(self, seed: Any, *, atomic: bool = True) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.store: dict[str, bytes] = {}
        self.events: list[tuple[float, int, Process, int, Any, BaseException | None]] = []
        self.serial = 0
        self.waits: dict[str, set[Process]] = {}
        self.waiting: dict[Process, set[str]] = {}
        self.faults = Faults()
        self.timeout = 60.0
        self.atomic = atomic
        #: The longest usual delay of a reply from the store, and the longest slow one, in seconds.
        self.delay = 0.002
        self.slow = 0.0

    def start(self, rank: int, steps: Any) -> Process:
        process = Process(rank, steps)
        self.later(process, 0.0, None)
        return process

    def later(self, process: Process, seconds: float, reply: Any, error: BaseException | None = None) -> None:
        self.serial += 1
        heapq.heappush(self.events, (self.now + seconds, self.serial, process, process.wakes, reply, error))

    def latency(self) -> float:
        if self.slow and self.draw.random() < 0.02:
            return self.draw.random() * self.slow
        return self.draw.random() * self.delay

    def run(self, until: float, *, stop: bool = False) -> None:
        """Run until no events are left. An event after ``until`` is a hang or, with ``stop``, ends the run."""
        events = self.events
        while events:
            if stop and events[0][0] > until:
                self.now = until
                return
            at, _, process, wakes, reply, error = heapq.heappop(events)
            if process.dead or process.ended or wakes != process.wakes:
                continue
            if at > until:
                raise ViolationError(f"hang: rank {process.rank} still runs after {until:.0f} s")
            self.now = at
            if at < process.asleep_until:
                self.later(process, process.asleep_until - self.now, reply, error)
                continue
            process.wakes += 1
            self.forget(process)
            self.advance(process, reply, error)

    def forget(self, process: Process) -> None:
        for key in self.waiting.pop(process, ()):
            self.waits[key].discard(process)

    def advance(self, process: Process, reply: Any, error: BaseException | None) -> None:
        """Give a process its reply, and serve its next request."""
        if type(reply) is Effect:
            self.effect(reply.request)
            return
        if type(reply) is Later:
            self.serve(process, reply.request)
            return
        while True:
            try:
                request = process.steps.throw(error) if error is not None else process.steps.send(reply)
            except StopIteration:
                process.ended = True
                return
            reply = error = None
            if type(request) is Now:
                reply = self.now
            elif type(request) is Forget:
                continue
            elif type(request) is Call:
                try:
                    reply = request.function(request.value)
                except Exception as raised:  # noqa: BLE001 - as the driver does
                    error = raised
            elif process.dead:
                return
            elif process.asleep_until > self.now:
                self.later(process, 0.0, Later(request))
                return
            else:
                self.serve(process, request)
                return

    def serve(self, process: Process, request: Any) -> None:
        process.requests += 1
        faults, number = self.faults, process.requests
        effect = True
        if (death := faults.deaths.get(process.rank)) and number >= death[0]:
            process.dead, process.died = True, self.now
            if not death[1]:
                return
        if (stop := faults.stops.get(process.rank)) and number >= stop[0]:
            del faults.stops[process.rank]
            process.asleep_until = self.now + stop[1]
        if type(request) is Sleep:
            self.later(process, request.seconds, None)
            return
        if (cut := faults.cuts.get(process.rank)) and number >= cut[0]:
            del faults.cuts[process.rank]
            process.deaf_until = self.now + cut[1]
        if process.deaf_until > self.now:
            effect = self.draw.random() < 0.3
            if effect:
                self.effect(request)
            self.later(process, min(self.timeout, process.deaf_until - self.now), None, UnreachableError("the store"))
            return
        if faults.pause and faults.pause[0] <= self.now < sum(faults.pause) and type(request) is not Wait:
            self.serve_late(process, request, sum(faults.pause))
            return
        if type(request) is Wait:
            missing = {key for key in request.keys if key not in self.store}
            if not missing:
                self.later(process, self.latency(), True)
                return
            for key in missing:
                self.waits.setdefault(key, set()).add(process)
            self.waiting[process] = missing
            self.later(process, request.seconds, False)
            return
        if type(request) is Put and faults.loss and self.draw.random() < faults.loss:
            self.later(process, self.latency(), None)
            return
        self.later(process, self.latency(), self.effect(request))

    def serve_late(self, process: Process, request: Any, until: float) -> None:
        """Serve a request during a pause of the store: it may run it at ``until``, even if the rank has given up."""
        self.serial += 1
        if until - self.now <= self.timeout:
            self.later(process, until - self.now, Later(request))
            return
        if self.draw.random() < 0.7:
            helper = Process(process.rank, iter(()))
            heapq.heappush(self.events, (until, self.serial, helper, helper.wakes, Effect(request), None))
        self.later(process, self.timeout, None, UnreachableError("the store"))

    def effect(self, request: Any) -> Any:
        store = self.store
        kind = type(request)
        if kind is Get:
            return [store.get(key) for key in request.keys]
        if kind is Put:
            for key, value in request.values.items():
                self.set(key, value)
        elif kind is Add:
            count = int(store.get(request.key, b"0")) + request.amount
            self.set(request.key, b"%d" % count)
            return count
        elif kind is Swap:
            held = store.get(request.key, b"")
            if held == request.expected or not self.atomic:
                self.set(request.key, request.value)
                held = request.value
            return held
        elif kind is Remove:
            for key in request.keys:
                store.pop(key, None)
        return None

    def set(self, key: str, value: bytes) -> None:
        self.store[key] = value
        for process in self.waits.pop(key, ()):
            missing = self.waiting[process]
            missing.discard(key)
            if not missing:
                self.later(process, self.latency(), True)


def below(prefix: str, steps: Any) -> Any:
    """The same steps with a prefix for all keys, as torch's PrefixStore separates groups in one store."""
    reply = error = None
    while True:
        try:
            request = steps.send(reply) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        kind = type(request)
        if kind in {Get, Remove}:
            request = kind(tuple(prefix + key for key in request.keys))
        elif kind is Wait:
            request = request._replace(keys=tuple(prefix + key for key in request.keys))
        elif kind is Put:
            request = Put({prefix + key: value for key, value in request.values.items()})
        elif kind in {Add, Swap}:
            request = request._replace(key=prefix + request.key)
        reply = error = None
        try:
            reply = yield request
        except UnreachableError as raised:
            error = raised


@dataclass
class Result:
    """The outcome of one operation on one rank."""

    ended: float
    answer: Any = None
    error: BaseException | None = None
    verdict: BaseException | None = None


@dataclass
class Job:
    """A group that runs some operations, and checks of their outcomes."""

    world: World
    size: int
    operations: int
    #: (operation, rank) -> seconds before the rank begins, and seconds of work in the operation.
    lateness: dict[tuple[int, int], float] = field(default_factory=dict)
    work: dict[tuple[int, int], float] = field(default_factory=dict)
    #: Operation -> the time before which no rank begins it.
    begins: dict[int, float] = field(default_factory=dict)
    turn: type[protocol.Turn] = protocol.Turn
    results: dict[tuple[int, int], Result] = field(default_factory=dict)
    #: (operation, rank) -> the time from which the rank only had to wait for the others.
    ready: dict[tuple[int, int], float] = field(default_factory=dict)
    succeeded: set[tuple[int, int]] = field(default_factory=set)
    committed: list[int] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    members: dict[int, Member] = field(default_factory=dict)
    call_of: Any = None
    #: (operation, rank): operations that a rank does not reach because of an error outside them.
    missed: set[tuple[int, int]] = field(default_factory=set)
    #: How operations differ: by ``path``, by ``mark``, by ``value`` (a mark that is compared later), or not at all.
    apart: str = ""
    #: Whether ranks go on after an operation, and answer ranks that are late to the first operation.
    answers: bool = True
    #: Operations that are waits -> rank -> the seconds from the start of the wait until the rank is ready.
    waits: dict[int, dict[int, float]] = field(default_factory=dict)
    #: Whether all operations are restores, and the members of the group in which the ranks ask each other.
    restores: bool = False
    asking: dict[int, Member] = field(default_factory=dict)

    def start(self) -> None:
        word = f"{self.world.draw.getrandbits(48):x}"
        for rank in range(self.size):
            member = self.members[rank] = Member(rank, self.size, f"host-{rank // 8}", f"{word}-{rank}")
            self.asking[rank] = Member(rank, self.size, member.host, f"{word}-asking-{rank}")
            self.processes.append(self.world.start(rank, self.script(member)))

    def script(self, member: Member) -> Any:
        """Run the operations in sequence, each whatever the result of the one before, like ``peers.py``."""
        for number in range(self.operations):
            yield Sleep(max(0.0, self.begins.get(number, 0.0) - self.world.now))
            yield Sleep(self.lateness.get((number, member.rank), 0.0))
            if (number, member.rank) in self.missed:
                continue
            self.ready[number, member.rank] = self.world.now
            result = self.results[number, member.rank] = Result(float("nan"))
            if number in self.waits:
                yield from self.waiting(member, number, result)
            elif self.restores:
                yield from self.restoring(member, number, result)
            else:
                yield from self.operate(
                    self.turn_of(member, number), result, lambda turn, at=number: self.body(turn, at)
                )
            result.ended = self.world.now
            if self.answers and not member.has_met and member.session:
                self.world.start(member.rank, self.answering(member, member.turn))

    def turn_of(self, member: Member, number: int) -> protocol.Turn:
        kind, path = self.call_of(number, member.rank) if self.call_of else ("save", "/checkpoint")
        if self.apart == "path":
            path += f"-{number}"
        turn = self.turn(member, kind, path, self.world.timeout)
        if self.apart in {"mark", "value"}:
            turn.marks["step"] = str(number)
        return turn

    def operate(self, turn: protocol.Turn, result: Result, body: Any) -> Any:
        raised: BaseException | None = None
        try:
            result.answer = yield from body(turn)
        except UnreachableError as error:
            raised = turn.unreachable(error)
        except (RanksError, BoomError, Interrupt) as error:
            raised = error
        result.error = raised
        try:
            result.verdict = yield from turn.end(raised)
        except UnreachableError as error:
            result.verdict = turn.unreachable(error)

    def waiting(self, member: Member, number: int, result: Result) -> Any:
        """Ask until all are ready, like a manager's wait."""
        ready = self.world.now + self.waits[number][member.rank]
        while result.error is None and result.answer is not True:
            yield Sleep(min(max(0.0, ready - self.world.now), 1.0))
            over = self.world.now >= ready

            def ask(turn: protocol.Turn, over: bool = over) -> Any:
                return (yield from turn.round(protocol.LAST, over, None, all))

            yield from self.operate(self.turn(member, "wait", "/run", self.world.timeout), result, ask)

    def restoring(self, member: Member, number: int, result: Result) -> Any:
        """Ask for the checkpoints, load one, and ask for the result; only these questions distinguish restores."""
        asking = self.asking[member.rank]

        def ask(question: str) -> Any:
            asked = Result(float("nan"))
            turn = self.turn(asking, question, "/run", self.world.timeout)
            yield from below("asking/", self.operate(turn, asked, lambda turn: turn.round(protocol.LAST, question)))
            if asked.error is None and asked.answer != [question] * self.size:
                raise ViolationError(f"operation {number}: {question} is answered {asked.answer}")
            result.error, result.verdict = asked.error, asked.verdict

        yield from ask("restore")
        if result.error is None:
            load = self.turn_of(member, number)
            load.marks["question"] = asking.answered_turn
            yield from self.operate(load, result, lambda turn: self.body(turn, number))
        if result.error is None:
            yield from ask("restore: outcome")

    def answering(self, member: Member, turn: int) -> Any:
        """Answer ranks that are late to their first call, like ``Peers``, until the rank's next call."""
        until = self.world.now + 3 * self.world.timeout
        while member.turn == turn and not member.has_met and self.world.now < until:
            yield Sleep(0.5)
            try:
                yield from member.answer_late()
            except UnreachableError:
                return

    def body(self, turn: protocol.Turn, number: int) -> Any:
        rank = turn.member.rank
        self.raise_at(number, rank, 0)
        arrived = yield from turn.round("arrive", [rank, number], None, None, self.comparing("mark"))
        self.raise_at(number, rank, 1)
        joined = yield from turn.round("joined", [rank, number], None, None, self.comparing("value"))
        everybody = [[each, number] for each in range(self.size)]
        if sorted(arrived) != everybody or sorted(joined) != everybody:
            raise ViolationError(f"operation {number}: a mixture: {arrived} arrived, {joined} joined")
        self.raise_at(number, rank, 2)
        yield from self.working(turn, number)
        self.raise_at(number, rank, 3)
        self.succeeded.add((number, rank))
        return (yield from turn.round("done", 1, None, sum, lambda count: self.commit(number, count)))

    def comparing(self, apart: str) -> Any:
        """A function by which the coordinator compares states, and detects values of different operations."""

        def compare(said: list[Any]) -> Any:
            if self.apart == apart and len({number for _, number in said}) > 1:
                raise BoomError("the step differs between ranks")
            return said

        return compare

    def working(self, turn: protocol.Turn, number: int) -> Any:
        left = self.work.get((number, turn.member.rank), 0.0)
        while left > 0:
            yield Sleep(min(left, turn.long_slice / 2))
            self.ready[number, turn.member.rank] = self.world.now
            left -= turn.long_slice / 2
            yield from turn.alive()
            yield from turn.look()

    def raise_at(self, number: int, rank: int, step: int) -> None:
        at = self.world.faults.raises.get((number, rank))
        if at is not None and at % 10 == step:
            raise (Interrupt if at >= 10 else BoomError)(f"rank {rank} at step {step}")

    def commit(self, number: int, count: int) -> Any:
        missing = [rank for rank in range(self.size) if (number, rank) not in self.succeeded]
        if missing or count != self.size:
            raise ViolationError(
                f"operation {number}: commit although ranks {missing} have not succeeded ({count} counted)"
            )
        self.committed.append(number)
        return ["committed", number]

    # Checks of outcomes.

    def check(self) -> None:
        """Check the promises of each operation, despite all faults."""
        for process in self.processes:
            if not (process.ended or process.dead):
                raise ViolationError(f"hang: rank {process.rank} waits for an event that never comes")
        for number in range(self.operations):
            self.check_verdict(number)

    def outcomes(self, number: int) -> dict[int, Result]:
        """Return the outcomes of an operation on the living ranks."""
        alive = [process.rank for process in self.processes if not process.dead]
        return {rank: self.results[number, rank] for rank in alive if (number, rank) in self.results}

    def check_verdict(self, number: int) -> None:
        """Check that all answers are equal, and that after a commit no rank's error denies the commit."""
        if self.committed.count(number) > 1:
            raise ViolationError(f"operation {number}: committed twice")
        if number in self.waits:
            return
        results = self.outcomes(number)
        answers = [rank for rank, result in results.items() if result.error is None]
        if answers and number not in self.committed:
            raise ViolationError(f"operation {number}: ranks {answers} have an answer without a commit")
        if any(results[rank].answer != ["committed", number] for rank in answers):
            raise ViolationError(f"operation {number}: different answers")
        for rank, result in results.items():
            for error in (result.error, result.verdict):
                if isinstance(error, RanksError) and number in self.committed and "nothing was committed" in str(error):
                    raise ViolationError(f"operation {number}: an error on rank {rank} denies the commit: {error}")

    def check_success(self, number: int) -> None:
        for rank, result in self.outcomes(number).items():
            if result.error is not None:
                raise ViolationError(f"operation {number}: all live, and rank {rank} failed: {result.error}")

    def check_named(self, number: int, guilty: set[int]) -> None:
        """Check that each survivor's error names ranks that are to blame, and no others.

        In a later operation, a rank that never learnt the session knows only that the rank above it does not answer.
        """
        for rank, result in self.outcomes(number).items():
            if number and not self.members[rank].session:
                continue
            error = result.error if isinstance(result.error, RanksError) else result.verdict
            if error is None:
                continue  # the rank succeeded, or was interrupted
            named = {failure.rank for failure in getattr(error, "failures", ())}
            if not named or not named <= guilty:
                raise ViolationError(f"operation {number}: rank {rank} blames {named}, not of {guilty}: {error}")

    def check_in_time(self, number: int, slack: float) -> None:
        """Check that each survivor ends within timeout and slack of the last death or the last work of a survivor."""
        died = [process.died for process in self.processes if process.dead]
        results = self.outcomes(number)
        last = max([*died, *(self.ready[number, rank] for rank in results)])
        late = {rank: result.ended - last for rank, result in results.items()}
        worst = max(late, key=late.__getitem__)
        if late[worst] > self.world.timeout + slack:
            raise ViolationError(
                f"operation {number}: rank {worst} ends after {late[worst]:.1f} s: {results[worst].error}"
            )
