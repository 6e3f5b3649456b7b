"""What the processes of a program decide together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from fastckpt._manager.crew import Crew
from fastckpt._manager.restore import is_damage
from fastckpt.exceptions import RankFailure, RanksError

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
        error, loaded = None, None
        try:
            loaded = load(candidate)
        except Exception as caught:  # noqa: BLE001 - raised below; the other ranks have to hear of it
            error = caught
        # A rank that is well may have heard of another's failure.
        skips = "heard" if isinstance(error, RanksError) else error is not None and is_damage(error)
        said = crew.each(None if error is None else [crew.host, f"{type(error).__name__}: {error}", skips])
        failed = {rank: one for rank, one in enumerate(said) if one is not None}
        if not failed:
            return loaded  # type: ignore[return-value]
        verdicts = {skips for _, _, skips in failed.values()}
        if candidate is candidates[-1] or not all(verdicts) or True not in verdicts:
            if error is not None:
                raise error
            failures = tuple(RankFailure(rank, host, f"failed: {why}") for rank, (host, why, _) in failed.items())
            raise RanksError(f"{operation}: {path_of(candidate)}: {'; '.join(map(str, failures))}", failures)
        if crew.leads:
            why = min(failed.items())[1][1]
            LOG.warning("fastckpt: %s cannot be loaded and is skipped: %s", path_of(candidate), why)
    raise ValueError("load: no candidates")


def on_all(operation: str, path: Any, call: Callable[[], _R], crew: Crew) -> _R:
    """What ``call`` returns, once it has on all ranks; if one fails, all of them raise."""
    return first_that_loads([path], lambda _: call(), crew, operation=operation)


def own_dtypes(states: Mapping[str, Mapping[str, Any]]) -> Callable[[Any], Any]:
    """For ``dtype`` of a load into these states: their tensors of floating-point numbers keep their dtypes."""
    named = ((f"{key}.{name}", one) for key, state in states.items() for name, one in state.items())
    dtypes = {name: one.dtype for name, one in named if getattr(one, "is_floating_point", bool)()}
    return lambda tensor: dtypes.get(tensor.name)
