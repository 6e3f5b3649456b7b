"""What all ranks of a job must decide alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class Alone:
    """One process agrees with itself.

    The manager takes each decision that ranks must share through this object, and nothing else of it knows about ranks:
    a process group needs an object with the same attributes and methods, whose methods every rank calls.

    Attributes:
        size: the number of ranks.
        leads: whether this rank writes the file ``latest`` and removes what is not kept.
    """

    size = 1
    leads = True

    def any(self, flag: bool) -> bool:  # noqa: FBT001 - a flag is all it takes
        """Whether one of the ranks says so: a signal has come, a policy is due."""
        return flag

    def first(self, find: Callable[[], _T]) -> _T:
        """What the first rank finds: which checkpoints there are."""
        return find()
