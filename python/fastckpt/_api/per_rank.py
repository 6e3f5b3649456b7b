"""The state that each rank of a job saved for itself (docs/format.md, section 3.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt._paths import AnyPath
from fastckpt._state.builders import StateBuilder, Validator
from fastckpt._state.registry import Registry, Types, check_registry
from fastckpt._state.select import ends_of
from fastckpt._state.unflatten import parse, unflatten
from fastckpt._stores.reader import open_reader
from fastckpt._stores.urls import place_of
from fastckpt.exceptions import CorruptCheckpointError

from .destinations import Targets
from .outcome import until_settled
from .progress import ticker

if TYPE_CHECKING:
    from fastckpt import _core
    from fastckpt._state.unflatten import Token

_OPERATION = "load_per_rank"


def states_of(operation: str, reader: _core.Reader) -> list[list[Token]]:
    """The structure of each rank's own state; empty if no such states were saved.

    Raises:
        CorruptCheckpointError: the stored value is not a list of states.
    """
    text = reader.per_rank()
    if text is None:
        return []
    tokens = parse(text)
    unflatten(tokens, Validator(reader.tensors(), strangers=True), operation=operation)
    if type(tokens[0]) is not list or tokens[0][0] != "list":
        raise CorruptCheckpointError(f"{operation}: the states of ranks are not a list")
    ends = ends_of(tokens)
    states, at = [], 1
    for _ in range(tokens[0][1]):
        states.append(tokens[at : ends[at]])
        at = ends[at]
    return states


def load_state_of(
    path: AnyPath, rank: int | None, own: tuple[int, int] | None, registry: Registry | None = None
) -> Any:
    """Load the state of one rank.

    Args:
        path: the checkpoint's directory, or its URL.
        rank: the rank whose state to load; None for this rank.
        own: this rank, and the number of ranks.
        registry: the types for this call.

    Raises:
        KeyError: no rank saved a ``per_rank`` state.
        ValueError: the number of ranks has changed.
    """
    source = place_of(_OPERATION, path)
    if rank is not None and type(rank) is not int:
        raise TypeError(f"{_OPERATION}: rank must be an int or None, not {type(rank).__name__}")
    check_registry(_OPERATION, registry)
    return until_settled(lambda: _load(source, rank, own, registry))


def _load(source: str, rank: int | None, own: tuple[int, int] | None, registry: Registry | None) -> Any:
    reader = open_reader(_OPERATION, source)
    states = states_of(_OPERATION, reader)
    if not states:
        raise KeyError(f"{_OPERATION}: {source}: no rank saved a state with per_rank=")
    if rank is None and own is not None:
        rank, ranks = own
        if ranks != len(states):
            raise ValueError(
                f"{_OPERATION}: {source}: {len(states)} ranks saved states with per_rank=, and there are {ranks} now: "
                f"choose one with rank=0 to rank={len(states) - 1}"
            )
    if rank is None or not 0 <= rank < len(states):
        raise ValueError(f"{_OPERATION}: {source}: rank must be from 0 to {len(states) - 1}, not {rank}")
    return read_state(reader, source, states[rank], registry)


def read_state(reader: _core.Reader, source: str, tokens: list[Token], registry: Registry | None) -> Any:
    """Read the state of one rank, whose structure is ``tokens``."""
    stored = reader.tensors()
    types = Types(_OPERATION, registry)
    check = Validator(stored, types=types)
    unflatten(tokens, check, operation=_OPERATION)
    targets = Targets(stored, "auto")
    targets.make(check.found)
    with ticker("load", source, shown=False) as tick:
        # Each process reads a different part of the file: the page cache has nothing to share.
        reader.read(targets.requests, verify=True, io="auto", threads=None, drain=None, tick=tick)
    return unflatten(tokens, StateBuilder("auto", targets.values(), types=types), operation=_OPERATION)
