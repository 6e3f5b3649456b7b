"""The state of one rank between its turns, and how the ranks of a group find each other in a store.

**A session** is one process group in one store. The store may be older: a restarted job finds keys of its earlier
processes. So each rank says hello with a word that no process had before, the rank above answers under that word, and
the keys of all turns contain the session, the word of rank 0. The hello of an earlier process is answered, too, but
nothing reads that answer. The hello of the new process has another word, which the rank above sees and answers.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fastckpt._ranks import tree
from fastckpt._ranks.requests import Get, Now, Put, Remove, Steps, Wait, value_of
from fastckpt._ranks.silence import Silence
from fastckpt.exceptions import RankFailure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastckpt._ranks.called import Called

#: The number of abandoned calls, and of saves, that a rank remembers.
_BEHIND, _SAVES = 8, 64
_SILENT = "has not answered"


class Owed(Protocol):
    """A turn that a rank left without a verdict."""

    def abandon(self, failure: RankFailure) -> Steps:
        """Leave without a verdict, so that the others get one at once."""


@dataclass
class Member:
    """One rank of a group.

    Args:
        rank: the index of this rank in the group.
        size: ranks in the group.
        host: the name of its host.
        word: a random word that no other rank, and no earlier process, has.
        serves: the rank whose process may run the server of the store; None if none of them does.
    """

    rank: int
    size: int
    host: str
    word: str
    serves: int | None = None
    #: The session: the word that rank 0 drew; empty until it is known.
    session: str = ""
    #: The number of the next turn.
    turn: int = 0
    #: Hosts of the ranks from which this rank has received a message.
    hosts: dict[int, str] = field(default_factory=dict)
    #: For each rank below, the last of its hellos that was answered.
    answered: dict[int, bytes] = field(default_factory=dict)
    #: The ranks below that have sent a message in this session: they need no further answer.
    known: set[int] = field(default_factory=set)
    #: Turns that this rank left without a verdict, and why.
    owed: list[tuple[Owed, RankFailure]] = field(default_factory=list)
    #: The key that exists until all have left the last turn that this rank left before others did.
    parting: str = ""
    #: The number of the last turn whose last answer this rank has.
    answered_turn: str = ""
    #: The calls that this rank has abandoned since its last success.
    behind: list[Called] = field(default_factory=list)
    #: The last saves of this rank.
    saves: deque[Called] = field(default_factory=lambda: deque(maxlen=_SAVES))
    #: The last saves of this rank that succeeded.
    saved: deque[Called] = field(default_factory=lambda: deque(maxlen=_SAVES))

    def __post_init__(self) -> None:
        self.hosts[self.rank] = self.host
        if self.rank == 0:
            self.session = self.word

    @property
    def has_met(self) -> bool:
        """Whether this rank knows the ranks above and below it, and they know it."""
        return bool(self.session) and self.known.issuperset(tree.below(self.rank, self.size))

    def come(self, called: Called) -> list[Called]:
        """Record that this rank makes a call; return the calls by which others may find that it is ahead of them.

        A save that is indistinguishable from an earlier one is never ahead: it could meet a later save of the others.
        """
        if called.kind != "save":
            return self.behind
        again = called.is_like(self.saves)
        self.saves.append(called)
        return [] if again else self.behind

    def was_told(self, called: Called) -> bool:
        """Whether the last call of this rank was like ``called`` and failed, and such calls may meet later ones."""
        return called.kind not in {"", "save"} and called.is_like(self.behind[-1:])

    def leave_behind(self, called: Called) -> None:
        """Record that a call of this rank has ended without success."""
        self.behind = [*self.behind, called][-_BEHIND:]

    def failure(self, message: str) -> RankFailure:
        """Return a failure of this rank."""
        return RankFailure(self.rank, self.host, message)

    def silent(self, rank: int, seconds: float) -> RankFailure:
        """Return the failure of a rank that does not answer."""
        below = tree.count_below(rank, self.size) if rank else 0
        through = f"; {below:,} ranks answer through it" if below else ""
        why = f"{_SILENT} for {seconds:.1f} s (Ranks(timeout=)){through}"
        return RankFailure(rank, self.hosts.get(rank, ""), why)

    def was_silent(self, failures: Iterable[RankFailure]) -> bool:
        """Whether the failures name this rank as one that did not answer."""
        return any(failure.rank == self.rank and failure.message.startswith(_SILENT) for failure in failures)

    def meet(self, timeout: float, pause: float) -> Steps:
        """Learn the session from the rank above. Return None, or the failure of the rank that does not answer."""
        welcome = self.welcome()
        now = yield Now()
        above = [tree.above(self.rank)]
        while above[-1]:
            above.append(tree.above(above[-1]))
        silence = Silence(timeout)
        silence.begin((*above, self.rank), now)
        # A rank receives no heartbeats from itself: its own silence is the time since its last answer.
        while silence.hear(self.rank, None, now) < timeout:
            # Unlike other messages, the hello is repeated: each is answered, in case an answer is lost.
            yield Put({hello_of(self.rank): json.dumps([self.word, self.host, now]).encode()})
            if (yield Wait((welcome,), pause, tree.above(self.rank))):
                break
            now = yield Now()
            for rank, hello in zip(above, (yield Get(tuple(map(hello_of, above)))), strict=True):
                silence.hear(rank, hello, now)
        else:
            # Ranks above that say hello repeatedly are waiting as well; the nearest one that does not is the cause.
            silent = (rank for rank in above if silence.of(rank) > 3 * pause)
            return self.silent(next(silent, 0), timeout)
        told = yield from value_of(welcome)
        self.session, hosts = json.loads(told)
        self.hosts.update((int(rank), host) for rank, host in hosts.items())
        yield Remove((welcome,))
        return None

    def welcome(self) -> str:
        """Return the key in which the rank above answers the hello of this rank."""
        return _welcome(self.rank, self.word)

    def answer_late(self) -> Steps:
        """Answer the ranks below that came for the first time while this rank was in no turn."""
        late = [rank for rank in tree.below(self.rank, self.size) if rank not in self.known]
        hellos = yield Get(tuple(map(hello_of, late)))
        yield from self.answer(dict(zip(late, hellos, strict=True)))

    def answer(self, hellos: dict[int, bytes | None]) -> Steps:
        """Answer the ranks below that have said hello since the last answer."""
        answers = {}
        for rank, hello in hellos.items():
            if hello and self.answered.get(rank) != hello:
                word, host, _ = json.loads(hello)
                self.answered[rank], self.hosts[rank] = hello, host
                answers[_welcome(rank, word)] = [self.session, {0: self.hosts[0], self.rank: self.host}]
        if answers:
            yield Put({key: json.dumps(answer).encode() for key, answer in answers.items()})


def hello_of(rank: int) -> str:
    """Return the key in which a rank says hello. It exists as long as the rank is in its first turn."""
    return f"fastckpt/hello/{rank}"


def _welcome(rank: int, word: str) -> str:
    return f"fastckpt/welcome/{rank}/{word}"
