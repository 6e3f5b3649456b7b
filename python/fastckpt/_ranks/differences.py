"""The error for differences between ranks: it names the places, the ranks and both values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt._state.builders import StateBuilder
from fastckpt._state.flatten import canonical
from fastckpt._state.key_paths import show, step_of
from fastckpt._state.unflatten import unflatten
from fastckpt.exceptions import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Beyond this number, differences are counted, not listed.
_LISTED = 10
#: Longer values are cut, and longer lists of ranks.
_VALUE = 80
_RANKS = 8
_CONTAINERS = {"fset": "a frozenset", "odict": "an OrderedDict", "ddict": "a defaultdict"}


class Path:
    """A place in a structure, as a step from its parent."""

    __slots__ = ("above", "key")

    def __init__(self, above: Path | None, key: Any) -> None:
        self.above = above
        self.key = key

    def __str__(self) -> str:
        steps = []
        at: Path | None = self
        while at is not None:
            steps.append(step_of(at.key))
            at = at.above
        return show("".join(reversed(steps)))


class Differences:
    """Collects differences, and raises them together.

    Args:
        operation: the word that the message begins with.
    """

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self._noted: list[str] = []
        self._count = 0
        self._remedies: dict[str, None] = {}

    def texts(self, path: Path, sides: Sequence[tuple[Sequence[int], str]], *remedies: str) -> None:
        """Add different descriptions, each with its ranks, and a remedy; the last remedy comes last in the message."""
        self._note(path, sides)
        for remedy in remedies:
            self._remedies.pop(remedy, None)
            self._remedies[remedy] = None

    def absent(self, path: Path, ranks: Sequence[int], absent: Sequence[int], remedy: str) -> None:
        """Add a tensor that is spread over ``ranks``, of which some do not declare it."""
        present = [rank for rank in ranks if rank not in absent]
        self.texts(path, [(present, f"a DTensor over {named(ranks)}"), (absent, "no such")], remedy)

    def _note(self, path: Path, sides: Sequence[tuple[Sequence[int], str]]) -> None:
        self._count += 1
        if len(self._noted) < _LISTED:
            self._noted.append(f"{path}: " + ", ".join(f"{text} on {named(ranks)}" for ranks, text in sides))

    def raise_any(self) -> None:
        """Raise the collected differences.

        Raises:
            ValueError: there are differences.
        """
        if not self._count:
            return
        lines = list(self._noted)
        if self._count > len(lines):
            lines.append(f"and {self._count - len(lines)} more")
        raise ValueError(
            f"{self.operation}: the states of the ranks do not fit together: {'; or '.join(self._remedies)}:\n  "
            + "\n  ".join(lines)
        )


def short(token: Any) -> str:
    """The value that a token represents, if it is short."""
    if type(token) is list and len(token) == 2 and type(token[1]) is int:  # noqa: PLR2004 - a container and its size
        text = f"{_CONTAINERS.get(token[0], f'a {token[0]}')} of {token[1]}"
    else:
        try:
            text = repr(unflatten([token], StateBuilder("numpy", ())))
        except CheckpointError:  # a token that only starts a value
            text = canonical(token)
    return text if len(text) <= _VALUE else f"{text[: _VALUE // 2]}...{text[-_VALUE // 4 :]}"


def named(ranks: Sequence[int]) -> str:
    """The ranks in words, for a message."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _RANKS:
        return f"ranks {', '.join(map(str, ranks[: _RANKS // 2]))}, ..., {ranks[-1]} ({len(ranks)} of them)"
    return f"ranks {', '.join(map(str, ranks))}"
