"""Common decisions of the processes of a program."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import fastckpt
from fastckpt import distributed
from fastckpt._manager.crew import Crew
from fastckpt._manager.restore import Lost, attempt

from ._directory import LOG, begin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_T = TypeVar("_T")
_R = TypeVar("_R")

_crews: WeakKeyDictionary[Any, Crew] = WeakKeyDictionary()


def crew_of(accelerator: Any) -> Crew:
    """The processes of an ``Accelerator``; all of them must make the first call together."""
    if accelerator not in _crews:
        # The root directory, because processes may have different working directories.
        crew = _crews[accelerator] = Crew(None, os.sep)
        crew.begin({})  # the processes meet: otherwise one would not wait for the coordinator's answer
    return _crews[accelerator]


def first_that_loads(
    candidates: Sequence[_T],
    load: Callable[[_T], _R],
    crew: Crew,
    path_of: Callable[[_T], str] = str,
    operation: str = "load",
) -> _R:
    """The result of ``load`` for the first candidate that is not damaged; all ranks call it together.

    It raises the error of the last candidate, or any error other than damage; RanksError if other ranks failed.
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
    """The result of ``call``, once it has returned on all ranks; if one fails, all of them raise."""
    return first_that_loads([path], lambda _: call(), crew, operation=operation)


def engine_of(accelerator: Any) -> str | None:
    """The engine of an ``Accelerator`` that spreads models in its own way, and so must save them itself; or None."""
    kind = accelerator.distributed_type.name
    engines = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron", "XLA": "XLA"}
    return "FSDP1" if kind == "FSDP" and not accelerator.is_fsdp2 else engines.get(kind)


def begin_save(owner: Any, state: Any, path: Any, then: Callable[[], None], *, own: dict[str, Any], **how: Any) -> None:
    """Begin a save of all processes in the background, with the random states and the ``own`` state of each."""
    per_rank = {"random": fastckpt.randomness(), **own}
    ranks = distributed.Ranks(on_difference="warn")  # with DDP, buffers differ, and training uses those of rank 0
    begin(owner, distributed.save_async(state, path, ranks=ranks, per_rank=per_rank, **how), then)


def own_state(path: str) -> Any:
    """Restore random states, and return the ``own`` state; None, with a warning, if the number of processes differs."""
    try:
        own = distributed.load_per_rank(path)
    except ValueError as error:
        LOG.warning("fastckpt: states of processes (random numbers, samplers, data sets) are not restored: %s", error)
        return None
    fastckpt.randomness().load_state_dict(own["random"])
    return own


def own_dtypes(states: Mapping[str, Mapping[str, Any]]) -> Callable[[Any], Any]:
    """The ``dtype=`` with which floating-point tensors of these states keep their dtypes when a load fills them."""
    named = ((f"{key}.{name}", one) for key, state in states.items() for name, one in state.items())
    dtypes = {name: one.dtype for name, one in named if getattr(one, "is_floating_point", bool)()}
    return lambda tensor: dtypes.get(tensor.name)
