"""What goes up the tree."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from fastckpt._ranks import words
from fastckpt.exceptions import RankFailure

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastckpt._ranks.member import Member


@dataclass
class Message:
    """What one rank says in a round, for itself or for all ranks below it too."""

    #: What it does: the operation, the path, the round.
    call: list[str]
    failures: list[RankFailure]
    #: How many failures there are beyond those listed.
    more: int
    #: Nothing, where there are failures.
    value: Any

    def encode(self) -> bytes:
        """Return it as bytes."""
        return words.encode([self.call, [list(one) for one in self.failures], self.more, self.value])

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """Return what ``encode`` was called on."""
        call, failures, more, value = words.decode(data)
        return cls(call, [RankFailure(*one) for one in failures], more, value)


def join(
    member: Member, own: Message, below: dict[int, Message], combine: Callable[[list[Any]], Any] | None
) -> Message:
    """Make one message of a rank's own and those of the ranks below it."""
    failures, more = list(own.failures), own.more + sum(message.more for message in below.values())
    for rank, message in below.items():
        failures += message.failures
        if not own.failures and not message.failures and message.call != own.call:
            why = _mismatch(member.rank, own.call, message.call)
            failures.append(RankFailure(rank, member.hosts.get(rank, ""), why))
    if failures:
        each = words.one_a_rank(failures)
        return Message(own.call, each[: words.LISTED], more + len(each[words.LISTED :]), None)
    values = [own.value, *(message.value for message in below.values())]
    try:
        if combine is None:
            value = list(chain.from_iterable(values))
        else:
            value = combine(values) if below or member.rank == 0 else own.value
        return Message(own.call, [], 0, value)
    except Exception as error:  # noqa: BLE001 - whatever it is, it fails the operation for all
        return Message(own.call, [member.failure(words.told(error))], 0, None)


def _mismatch(rank: int, own: list[str], other: list[str]) -> str:
    def told(call: list[str]) -> str:
        kind, path, name = call
        does = f"{kind}s" if kind in {"save", "load"} else f"calls {kind} for"
        return f"{does} {path}" if own[:2] != other[:2] else f"{does} {path} and is at {name!r}"

    return f"{told(other)}, rank {rank} {told(own)}: all ranks must make the same calls in the same order"
