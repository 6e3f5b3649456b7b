"""What one rank remembers between its turns, and how the ranks of a group find each other in a store.

**A session** is one process group in one store. The store may be older: a restarted job finds keys of its former self.
So each rank says hello with a word that no process had before, the rank above answers under that word, and the keys of
all turns carry the session that rank 0 drew. A hello that was left by a former process is answered too; nobody reads
that. When the rank itself comes, its hello has another word, which the rank above sees and answers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastckpt._ranks import tree
from fastckpt._ranks.requests import Now, Put, Remove, Steps, Wait, value_of
from fastckpt.exceptions import RankFailure

if TYPE_CHECKING:
    from fastckpt._ranks.protocol import Turn


@dataclass
class Member:
    """One rank of a group.

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
    #: The session, which is the word of rank 0; empty until it is known.
    session: str = ""
    #: The number of the next turn.
    turn: int = 0
    #: Hosts of the ranks that it has heard of.
    hosts: dict[int, str] = field(default_factory=dict)
    #: The word under which each rank below was last answered.
    answered: dict[int, str] = field(default_factory=dict)
    #: The ranks below that have sent a message in this session: they need no answer any more.
    known: set[int] = field(default_factory=set)
    #: Turns that it left without a verdict, and why.
    owed: list[tuple[Turn, RankFailure]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hosts[self.rank] = self.host
        if self.rank == 0:
            self.session = self.word

    def failure(self, message: str) -> RankFailure:
        """Return a failure of this rank."""
        return RankFailure(self.rank, self.host, message)

    def silent(self, rank: int, seconds: float) -> RankFailure:
        """Return the failure of a rank that does not answer."""
        below = tree.count_below(rank, self.size) if rank else 0
        through = f"; {below:,} ranks answer through it" if below else ""
        why = f"has not answered for {seconds:.1f} s (timeout=){through}"
        return RankFailure(rank, self.hosts.get(rank, ""), why)

    def meet(self, timeout: float, pause: float) -> Steps:
        """Learn the session from the rank above. Return None, or the failure of the rank that does not answer."""
        hello = json.dumps([self.word, self.host]).encode()
        welcome = _welcome(self.rank, self.word)
        began = yield Now()
        yield Put(hello_of(self.rank), hello)
        while not (yield Wait((welcome,), pause)):
            if (yield Now()) - began >= timeout:
                return self.silent((yield from self._missing_above()), timeout)
            # Again: it may have been lost, or removed by the rank above as that of a rank that it gave up.
            yield Put(hello_of(self.rank), hello)
        told = yield from value_of(welcome)
        self.session, hosts = json.loads(told)
        self.hosts.update((int(rank), host) for rank, host in hosts.items())
        yield Remove((welcome,))
        return None

    def _missing_above(self) -> Steps:
        """Return the nearest rank above that has not said hello: those between wait for it as well."""
        rank = tree.above(self.rank)
        while rank and (yield from value_of(hello_of(rank))) is not None:
            rank = tree.above(rank)
        return rank

    def answer(self, rank: int, hello: bytes | None) -> Steps:
        """Answer a rank below that has said hello, if it was not answered."""
        if not hello:
            return
        word, host = json.loads(hello)
        if self.answered.get(rank) == word:
            return
        self.answered[rank], self.hosts[rank] = word, host
        hosts = {0: self.hosts[0], self.rank: self.host}
        yield Put(_welcome(rank, word), json.dumps([self.session, hosts]).encode())


def hello_of(rank: int) -> str:
    """Return the key in which a rank says hello. It is there as long as the rank is in its first turn."""
    return f"fastckpt/hello/{rank}"


def _welcome(rank: int, word: str) -> str:
    return f"fastckpt/welcome/{rank}/{word}"
