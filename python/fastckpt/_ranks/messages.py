"""Messages that ranks send up the tree."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._ranks import words
from fastckpt._ranks.called import Called
from fastckpt.exceptions import RankFailure

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastckpt._ranks.member import Member

#: The version that ranks compare. With different plans, they would take bytes of one tensor for another's.
VERSION = f"{_core.__version__} (plan {_core.PLAN})"


#: The most calls that are distinguished among ranks out of step.
_MET = 8


@dataclass
class Message:
    """The message of one rank in a round, for itself or also for all ranks below it."""

    called: Called
    #: The round.
    name: str
    failures: list[RankFailure]
    #: The number of failures beyond those listed.
    more: int
    #: The combined value; nothing if there are failures.
    value: Any
    #: The calls of these ranks, each with the calls that its ranks have abandoned; None if too many.
    met: list[tuple[Called, list[Called]]] | None

    def encode(self) -> bytes:
        """Return the message as bytes."""
        own = [self.called, self.name, [list(one) for one in self.failures], self.more, self.value, self.met]
        return words.encode([VERSION, own])


def received(member: Member, rank: int, data: bytes) -> Message:
    """Return the message of a rank below, or a failure if it is damaged or of another version."""
    nowhere = Called("", "", None, {})
    try:
        version, said = words.decode(data, f"the message of rank {rank} on {member.hosts.get(rank, 'an unknown host')}")
    except words.DamagedError as error:
        return Message(nowhere, "", [member.failure(words.told(error))], 0, None, [])
    if version != VERSION:
        why = f"runs fastckpt {version}, but rank {member.rank} runs {VERSION}: all ranks must run the same version"
        return Message(nowhere, "", [RankFailure(rank, member.hosts.get(rank, ""), why)], 0, None, [])
    called, name, failures, more, value, met = said
    calls = None if met is None else [(Called(*one), [Called(*each) for each in left]) for one, left in met]
    return Message(Called(*called), name, [RankFailure(*one) for one in failures], more, value, calls)


def join(
    member: Member, own: Message, below: dict[int, Message], combine: Callable[[list[Any]], Any] | None
) -> Message:
    """Combine a rank's own message and those of the ranks below it."""
    failures, more = list(own.failures), own.more + sum(message.more for message in below.values())
    for rank, message in below.items():
        failures += message.failures
        if not own.failures and not message.failures and not _agree(own, message):
            failures.append(RankFailure(rank, member.hosts.get(rank, ""), _mismatch(member.rank, own, message)))
    met = _met([own, *below.values()])
    if failures:
        each = words.one_a_rank(failures)
        return Message(own.called, own.name, each[: words.LISTED], more + len(each[words.LISTED :]), None, met)
    values = [own.value, *(message.value for message in below.values())]
    try:
        if combine is None:
            value = list(chain.from_iterable(values))
        else:
            value = combine(values) if below or member.rank == 0 else own.value
        return Message(own.called, own.name, [], 0, value, met)
    except Exception as error:  # noqa: BLE001 - any error fails the operation for all
        return Message(own.called, own.name, [member.failure(words.told(error))], 0, None, met)


def ahead(met: list[tuple[Called, list[Called]]] | None) -> list[tuple[Called, bool]] | None:
    """Decide which of the calls of ranks that are out of step wait for the others.

    A call waits if its ranks have left behind a call that another rank is at. If this is mutual, the first call waits.
    """
    if met is None:
        return None

    def left(at: int, other: int) -> bool:
        return any(not met[other][0].is_other(each) for each in met[at][1])

    count = range(len(met))
    return [
        (called, any(left(at, other) and not (other < at and left(other, at)) for other in count if other != at))
        for at, (called, _) in enumerate(met)
    ]


def _met(messages: list[Message]) -> list[tuple[Called, list[Called]]] | None:
    """The calls of several messages, one of each kind."""
    met: list[tuple[Called, list[Called]]] = []
    for message in messages:
        if message.met is None:
            return None
        for called, left in message.met:
            known = next((each for one, each in met if not called.is_other(one)), None)
            if known is None:
                met.append((called, list(left)))
            else:
                known += [each for each in left if all(each.is_other(one) for one in known)]
    return met if len(met) <= _MET else None


def _agree(own: Message, other: Message) -> bool:
    """Whether two ranks are in one round of one call, by their names, and neither has abandoned the other's call.

    Different values can be a mistake in one call, which the comparison reports best. Ranks that are out of step must
    learn of it in the first round, after which they continue separately.
    """
    if own.name != other.name or own.called.kind != other.called.kind or not own.called.leads_to(other.called):
        return False
    return not any(waits for _, waits in ahead(_met([own, other])) or ())


def _mismatch(rank: int, own: Message, other: Message) -> str:
    apart = own.called.kind != other.called.kind or not own.called.leads_to(other.called)
    theirs = other.called.marks
    mark = next((name for name, value in own.called.marks.items() if theirs.get(name, value) != value), None)

    def told(message: Message) -> str:
        kind, path = message.called.kind, message.called.path
        does = f"{kind}s {path}" if kind in {"save", "load"} else f"calls {kind} for {path}"
        if apart:
            return does
        if mark is None or own.name != other.name:
            return f"{does} and is at {message.name!r}"
        return f"{does} with {mark.partition('.')[2] or mark}: {message.called.marks[mark]}"

    return f"{told(other)}, rank {rank} {told(own)}: all ranks must make the same calls in the same order"
