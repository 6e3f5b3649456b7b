"""Checks the arguments of a manager's methods."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastckpt import keep as keeping
from fastckpt import when as saving
from fastckpt._api.files import check_files
from fastckpt._api.save_settings import SaveSettings
from fastckpt._api.settings import where

from .lineage import KEY


def step_of(operation: str, step: int) -> int:
    """A checked step."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise ValueError(f"{operation}: step must be a non-negative integer, not {step!r}")
    return number


class StepState(NamedTuple):
    """A program's arguments for a save: the state of a step, the ``per_rank`` state, and the metadata."""

    step: int
    state: Any
    per_rank: Any
    metadata: dict[str, Any]


def state_of(
    step: int, state: Any, metrics: Mapping[str, Any] | None, more: Mapping[str, Any] | None, per_rank: Any
) -> StepState:
    """A state with its metadata, as ``save`` and ``steady`` accept them."""
    found = {}
    for name, value in (metrics or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):  # noqa: PERF203 - a loop of a few turns
            raise TypeError(f"save: metrics: {name!r} must be a number, not {type(value).__name__}") from None
    taken = {"step", "metrics", KEY} & set(more or {})
    if taken:
        raise ValueError(f"save: metadata: {' and '.join(sorted(taken))} are names reserved for the manager")
    return StepState(step, state, per_rank, {**(more or {}), "step": step, "metrics": found})


def keep_of(keep: Any, what: str = "keep") -> list[keeping.Policy]:
    """The policies in ``keep=``, or in another argument of that kind."""
    listed = [keep] if isinstance(keep, (int, str, keeping.Policy)) else list(keep)
    found: list[Any] = [keeping.Last(one) if isinstance(one, int) else one for one in listed]
    for one in found:
        if not isinstance(one, keeping.Policy) or isinstance(one, type):
            raise TypeError(f"Manager: {what}: {one!r} is not a policy: see fastckpt.keep")
    return found


def texts_of(policies: Sequence[keeping.Policy]) -> list[str] | None:
    """Policies as the command line writes them; None if it cannot express one of them."""
    return [str(one) for one in policies] if all(type(one).__module__ == keeping.__name__ for one in policies) else None


def when_of(when: Any, ranks: int) -> list[saving.Policy]:
    """The policies in ``save_when=``, for a job of ``ranks`` ranks."""
    if when is None:
        return []
    listed = [when] if isinstance(when, (int, str, saving.Policy)) else list(when)
    found: list[saving.Policy] = []
    for one in listed:
        policy = saving.Auto() if one == "auto" else saving.Every(steps=one) if isinstance(one, int) else one
        if not isinstance(policy, saving.Policy) or isinstance(policy, type):
            raise TypeError(f'Manager: save_when: {one!r} is not a policy: give "auto", or see fastckpt.when')
        found.append(saving.of_job(policy, ranks))
    return found


def policies_text(policies: Sequence[Any]) -> str:
    """Policies as text that ranks compare; a caller's own policy by its type, since its text may hold an address."""
    ours = {keeping.__name__, saving.__name__}
    return ", ".join(str(one) if type(one).__module__ in ours else type(one).__qualname__ for one in policies) or "none"


def save_options_of(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """``save_options=``, checked.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is unknown, or out of range.
    """
    known = {name: one for name, one in SaveSettings.options().items() if name != "overwrite"}
    given: dict[str, Any] = {"io": "auto", **(options or {})}
    for name, value in given.items():
        if name not in known:
            more = where(name, known) or f": known are {', '.join(sorted(known))}"
            raise ValueError(f"Manager: save_options= has no {name}{more}")
        if name == "files":
            # Each save reads these files again: they may not exist yet, and the caller's dict may change.
            check_files("Manager: save_options", value)
        else:
            given[name] = known[name].check("Manager: save_options", value)
    return given
