"""What the processes of a program decide together."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from fastckpt._manager.crew import Crew
from fastckpt._manager.restore import Lost, attempt

from ._directory import LOG

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_T = TypeVar("_T")
_R = TypeVar("_R")

_crews: WeakKeyDictionary[Any, Crew] = WeakKeyDictionary()


def crew_of(accelerator: Any) -> Crew:
    """The processes of an ``Accelerator``; all of them ask for it together for the first time."""
    if accelerator not in _crews:
        # Working directories may differ by process.
        crew = _crews[accelerator] = Crew(None, os.sep)
        crew.begin({})  # who has not met the others would not wait for the first one's answer
    return _crews[accelerator]


def first_that_loads(
    candidates: Sequence[_T],
    load: Callable[[_T], _R],
    crew: Crew,
    path_of: Callable[[_T], str] = str,
    operation: str = "load",
) -> _R:
    """What ``load`` returns for the first candidate that is not damaged; all ranks call it together.

    It raises what ``load`` raised for the last one, or not for damage; and RanksError where that was on other ranks.
    """
    for candidate in candidates:
        found = attempt(crew, f"{operation}: {path_of(candidate)}", partial(load, candidate))
        if not isinstance(found, Lost):
            return found
        if candidate is candidates[-1] or not found.failures.skips:
            raise found.error
        if crew.leads:
            LOG.warning("fastckpt: %s cannot be loaded and is skipped: %s", path_of(candidate), found.error)
    raise ValueError(f"{operation}: no candidates")


def on_all(operation: str, path: Any, call: Callable[[], _R], crew: Crew) -> _R:
    """What ``call`` returns, once it has on all ranks; if one fails, all of them raise."""
    return first_that_loads([path], lambda _: call(), crew, operation=operation)


def own_dtypes(states: Mapping[str, Mapping[str, Any]]) -> Callable[[Any], Any]:
    """For ``dtype`` of a load into these states: their tensors of floating-point numbers keep their dtypes."""
    named = ((f"{key}.{name}", one) for key, state in states.items() for name, one in state.items())
    dtypes = {name: one.dtype for name, one in named if getattr(one, "is_floating_point", bool)()}
    return lambda tensor: dtypes.get(tensor.name)
