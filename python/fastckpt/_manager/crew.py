"""Common decisions of all ranks of a job, and errors for a rank that does not continue.

The manager makes each common decision through :class:`Crew`, and uses nothing else of ranks. All ranks call its
methods in the same order. Its rounds have separate turns in the store of the process group, so they never wait for a
save or load. One process is a job of one rank.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastckpt._ranks.called import location_of
from fastckpt._ranks.calls import Call
from fastckpt._ranks.peers import LAST
from fastckpt._ranks.ranks import check_ranks
from fastckpt._ranks.session import session
from fastckpt._ranks.torch_distributed import is_initialised
from fastckpt.exceptions import RanksError

from .summons import RankLeft, Summons

if TYPE_CHECKING:
    from fastckpt._ranks.peers import Operation, Peers
    from fastckpt._ranks.session import Session

    from .summons import Called, Came

_T = TypeVar("_T")

#: The share of the time that rounds at boundaries may take.
_SHARE = 0.005
#: Seconds between two heartbeats of a rank that others wait for.
_BEAT = 1.0
#: Seconds for which a rank that cannot take part in the first save waits to tell the others.
_MEETING = 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What one rank contributes at a boundary.

    Attributes:
        step: the training step.
        signals: signals that have come and were not answered.
        left: seconds until a save for them must be done; None for no limit.
        saved: the step that needs no further save.
        due: whether a policy wants the step; only the coordinator's value counts.
        apart: the least seconds for which ranks may continue without a round; only the coordinator's value counts.
        over: whether nothing that this rank waits for is in flight.
        plan: the place in the lineage for a save of the step; only the coordinator's value counts.
        watch: called while this rank waits for the others. If it raises, the round ends; the other ranks of the round
            learn of the error, but ranks in another round do not.
    """

    step: int
    signals: tuple[int, ...]
    left: float | None
    saved: int | None
    due: Callable[[], bool]
    apart: float
    over: bool = True
    plan: Callable[[], Any] = lambda: None
    watch: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Agreed:
    """The facts on which all ranks agree at a boundary.

    The signals that have come on any rank, the least time that is left on any, and whether no rank waits for anything;
    ``saved``, ``due`` and the plan of the due step come from the coordinator.
    """

    signals: tuple[int, ...]
    left: float | None
    saved: int | None
    due: bool
    over: bool
    plan: Any


class Crew:
    """The ranks of a manager: those of a process group, or only this process.

    Args:
        given: ``ranks=`` of :class:`fastckpt.Manager`.
        directory: the run, the same on all ranks.

    Attributes:
        grouped: whether there is a process group, even of one rank.
        host: the name of this rank's host, for errors.
        rank: the index of this rank.
        size: the number of ranks.
        leads: whether this rank writes the file ``latest`` and removes checkpoints.
        share: the index of this rank among the ranks that copy (one on each host), and their number, once they have
            begun; None for others.

    Raises:
        TypeError: ``given`` is not a process group.
        ValueError: this process is not in the group.
    """

    def __init__(self, given: Any, directory: str) -> None:
        alone = isinstance(given, str) and given == "alone"
        self._given = check_ranks("Manager", None if alone else given)
        self._directory = directory
        self._session = None if alone else session("Manager", self._given.process_group)
        group = None if self._session is None else self._session.group
        self.rank, self.size, self.host = (0, 1, "") if group is None else (group.rank, group.size, group.host)
        self.grouped = group is not None and is_initialised()
        self.leads = self.rank == 0
        self.share: tuple[int, int] | None = None
        self._peers: Peers | None = None
        self._place: list[Any] | None = None
        self._summons: Summons | None = None
        if self._session is not None and self.size > 1:
            self._peers = self._session.apart()
            self._place = location_of(directory, self.host)
            # Runs when this object or the interpreter ends, and before the group itself ends.
            weakref.finalize(self, self._session.end, self._peers)
        #: The number of boundaries that all ranks pass without a round, the number passed since the last round,
        #: its time, and its duration in seconds.
        self._skip = self._passed = 0
        self._call: Called | None = None
        self._asked: float | None = None
        self._began = self._cost = 0.0

    @property
    def arguments(self) -> dict[str, Any]:
        """The key by which :mod:`fastckpt.distributed` finds these ranks.

        Raises:
            ValueError: the manager acts only for this process.
        """
        if self._session is None:
            raise ValueError(
                "save: per_rank= requires a manager of several ranks: put the value into the state instead"
            )
        return {"ranks": self._given}

    def check(self, operation: str) -> None:
        """Check that the ranks are still the same.

        Raises:
            RuntimeError: the process group was destroyed, or there is a new default group.
        """
        if self.size > 1:
            try:
                there = session(operation, self._given.process_group) is self._session
            except ValueError:
                there = False
            if not there:
                # Each rank would save by itself, all to the same path.
                raise RuntimeError(
                    f"{operation}: the process group that the manager was made for is gone: leave the manager's "
                    "`with` statement before destroy_process_group"
                )
        elif (
            self._session is not None and self._given.process_group is None and session(operation, None).group.size > 1
        ):
            raise RuntimeError(
                f"{operation}: the manager was made before the process group, and would act for this process alone: "
                'make it after init_process_group, or with ranks="alone"'
            )

    # Common decisions.

    def begin(self, arguments: Mapping[str, str]) -> None:
        """Compare the arguments of the manager on all ranks.

        Raises:
            ValueError: the arguments differ.
        """

        def combine(values: list[Any]) -> list[Any]:
            rank, known, problem, leaders = values[0]
            for other, theirs, found, below in values[1:]:
                problem = problem or found or _difference(rank, known, other, theirs)
                for host, lowest in below.items():
                    leaders[host] = min(lowest, leaders.get(host, lowest))
            return [rank, known, problem, leaders]

        def decide(value: list[Any]) -> list[int]:
            _, _, problem, leaders = value
            if problem:
                raise ValueError(f"Manager: {self._directory}: {problem}: give the same on all ranks")
            return sorted(leaders.values())

        value = [self.rank, dict(arguments), None, {self.host: self.rank}]
        leaders = self._round("Manager", value, combine, decide)
        self.share = (leaders.index(self.rank), len(leaders)) if self.rank in leaders else None

    def listen(self, came: Callable[[], Came]) -> None:
        """Let any rank call for a round from now on: this one when a signal has come. All ranks call this method.

        Args:
            came: the signals that have come to this rank.
        """
        if self._session is not None and self.size > 1:
            peers = self._session.apart()
            self._summons = Summons(peers, self._directory, self._given.timeout, self._place)
            weakref.finalize(self, _end, self._summons, self._session, peers)
            self._summons.listen(came)

    def passes(self, *, needed: bool) -> bool:
        """Whether all ranks pass this boundary without a round: the coordinator permits it, and none has called.

        Args:
            needed: whether the ranks ask each other in any case.

        Raises:
            RanksError: a rank has ended, or does not answer.
        """
        passes = not needed and self._skip > 0
        call = None if self._summons is None else self._summons.reach(passes=passes)
        # If all ranks ask each other in any case, some of them may not know of the call.
        self._call = call if passes and call is not None and call.signals else None
        if call is not None or not passes:
            return False
        self._skip -= 1
        self._passed += 1
        return True

    def take_call(self) -> Called | None:
        """The signals that all ranks know at this boundary without a round, if a rank has called for them."""
        call, self._call = self._call, None
        if call is not None:
            self._skip = self._passed = 0
        return call

    def urge(self) -> None:
        """Make all ranks ask each other soon."""
        if self._summons is not None:
            self._summons.urge()

    def decide(self, operation: str, asked: Asked) -> Agreed:
        """The facts that hold for all ranks at this boundary.

        Raises:
            RanksError: a rank does not answer, has ended, or is at another step.
        """
        if self._peers is None:
            due = bool(asked.signals) or asked.due()
            return Agreed(asked.signals, asked.left, asked.saved, due, asked.over, asked.plan() if due else None)

        def combine(values: list[Any]) -> list[Any]:
            least, most, signals, left, over = values[0]
            for low, high, others, theirs, done in values[1:]:
                least, most = min(least, low), max(most, high)
                signals = [*signals, *(number for number in others if number not in signals)]
                left = theirs if left is None else left if theirs is None else min(left, theirs)
                over = over and done
            return [least, most, signals, left, over]

        def decide(value: list[Any]) -> list[Any]:
            least, most, signals, left, over = value
            if least != most:
                raise ValueError(
                    f"{operation}: {self._directory}: ranks are at steps from {least} to {most}: give the same step on "
                    "all ranks"
                )
            due = bool(signals) or asked.due()
            plan = asked.plan() if due else None
            return [signals, left, asked.saved, due, over, plan, 0 if due else self._pace(asked.apart)]

        value = [asked.step, asked.step, list(asked.signals), asked.left, asked.over]
        marks = {"step": str(asked.step)}
        self._began = time.monotonic()
        said = self._round(operation, value, combine, decide, marks, asked.watch)
        self._cost = time.monotonic() - self._began
        signals, left, saved, due, over, plan, self._skip = said
        self._passed = 0
        return Agreed(tuple(signals), left, saved, due, over, plan)

    def first(
        self,
        operation: str,
        find: Callable[[], _T],
        help_it: Callable[[tuple[int, int]], None] | None = None,
        step: int | None = None,
    ) -> _T:
        """Return the coordinator's result of ``find`` on all ranks; the others wait for it without a limit.

        One rank of each other host may call ``help_it`` with its :attr:`share`. All ranks are at the same ``step``.

        Each kind of round has its own ``operation``, so that a rank that alone has abandoned a round never accepts the
        answer to another kind.

        Raises:
            RanksError: ``find`` failed.
        """
        if self._peers is None:
            return find()
        with self._turn(self._peers, operation) as turn:
            turn.mark({} if step is None else {"step": str(step)})
            found = None
            helps = help_it is not None and self.share is not None
            with _beating(turn, self._given.timeout) if self.leads or helps else contextlib.nullcontext():
                if self.leads:
                    found = find()
                elif help_it is not None and self.share is not None:
                    help_it(self.share)
            agreed: _T = turn.round(LAST, found, combine=lambda values: values[0])
            return agreed

    def outcome(
        self, said: Any, combine: Callable[[list[Any]], Any], decide: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """The outcome of a load on all ranks: ``decide`` computes it from what they ``said``, combined.

        Raises:
            RanksError: a rank does not answer.
        """
        return self._round("restore: outcome", said, combine, decide)

    def each(self, said: Any) -> list[Any]:
        """The contribution of each rank, by rank. Every rank gets all of them, so they must be few and short.

        Raises:
            RanksError: a rank does not answer.
        """
        return [one for _, one in sorted(self.outcome([[self.rank, said]], _joined))]

    @property
    def answered(self) -> Mapping[str, str]:
        """The number of the last round whose result this rank has.

        If a rank alone has abandoned a round, the others continue with the load that follows, and fail without it.
        This mark keeps that rank from mistaking a load of a later restore for that load.
        """
        return {} if self._peers is None else {"question": self._peers.answered}

    # Messages of a rank that does not continue with the others. The others notice a dead rank by its silence.

    def leave(self, why: str) -> None:
        """Tell the others at their next round that this rank continues or ends without them."""
        if self._peers is not None:
            with contextlib.suppress(RanksError, RankLeft), self._turn(self._peers, ""):
                raise RankLeft(why)

    def miss_save(self, path: str, why: str) -> None:
        """Tell the others, which begin a save now, that this rank takes no part in it; wait for them only briefly."""
        if self._session is None:
            return
        # Before the first save no rank knows the others: the message of a rank that leaves at once would be lost.
        known = self._session.peers.has_met
        timeout = self._given.timeout
        call = Call("save", self._session, path, timeout if known else min(_MEETING, timeout))
        # The caller decides what this rank does about its own error.
        with contextlib.suppress(Exception, RankLeft), call.operation:
            raise RankLeft(why) if known else RuntimeError(why)

    def end(self, why: str | None = None) -> None:
        """End the calls of this rank, which comes to no more boundaries; the others learn ``why`` at their next one."""
        if self._summons is not None:
            self._summons.end(why)

    # The round.

    def _round(
        self,
        operation: str,
        value: Any,
        combine: Callable[[list[Any]], Any],
        decide: Callable[[Any], Any] = lambda value: value,
        marks: Mapping[str, str] | None = None,
        watch: Callable[[], None] | None = None,
    ) -> Any:
        if self._peers is None:
            return decide(value)
        with self._turn(self._peers, operation) as turn:
            turn.mark(marks or {})
            if watch is not None:
                watch()
            return turn.round(LAST, value, combine=combine, decide=decide, watch=watch)

    def _turn(self, peers: Peers, operation: str) -> Operation:
        return peers.operation(operation, self._directory, self._given.timeout, place=self._place)

    def _pace(self, apart: float) -> int:
        """The number of boundaries in ``apart`` seconds, at the last pace; in more seconds if rounds take long."""
        now = time.monotonic()
        before, self._asked = self._asked, now
        if before is None or apart <= 0:
            return 0
        # The answer takes about as long to reach all ranks as their contributions took to arrive.
        apart = max(apart, max(self._cost, 2 * (now - self._began)) / _SHARE)
        each = max(now - before, 1e-6) / (self._passed + 1)
        return max(0, int(apart / each) - 1)


class SaveFailed(RankLeft):
    """The save that a rank waited for has failed."""


def _end(summons: Summons, group: Session, peers: Peers) -> None:
    summons.end()
    group.end(peers)


@contextlib.contextmanager
def _beating(operation: Operation, timeout: float) -> Iterator[None]:
    """A context in which a thread sends heartbeats of this rank."""
    done = threading.Event()

    def beat() -> None:
        with contextlib.suppress(RanksError):
            while not done.wait(min(_BEAT, timeout / 40)):
                operation.alive()

    thread = threading.Thread(target=beat, name="fastckpt-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _joined(values: list[Any]) -> list[Any]:
    return [one for each in values for one in each]


def _difference(rank: int, own: Mapping[str, str], other: int, theirs: Mapping[str, str]) -> str | None:
    """The first argument in which two ranks differ."""
    for name in own:
        if own[name] != theirs.get(name):
            return f"{name}: rank {rank} has {own[name]}, and rank {other} has {theirs.get(name)}"
    return None


def failed_with(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    """Whether an error is of one of these kinds, or another rank has failed with one of these."""
    names = tuple(f"failed: {kind.__name__}" for kind in kinds)
    return isinstance(error, kinds) or any(
        failure.message.startswith(names) for failure in getattr(error, "failures", ())
    )


def is_reported(error: RanksError) -> bool:
    """Whether a live rank has reported the failure, and so takes part in the next round."""
    return any(failure.message.startswith("failed: ") for failure in error.failures)
