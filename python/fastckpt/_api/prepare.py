"""The request of a load, and the reads that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt._state.builders import StateBuilder, Validator
from fastckpt._state.collector import paused
from fastckpt._state.select import prune
from fastckpt._state.unflatten import Token, parse, unflatten

from .destinations import Targets
from .into import Into
from .outcome import warn_of_unknown
from .placement import Stock, place
from .room import check_room

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fastckpt import _core
    from fastckpt._state.registry import Types
    from fastckpt._tensors.spreads import Spreads

    from .load_settings import LoadSettings


class Prepared:
    """A load before anything is read.

    Attributes:
        settings: the options of the load.
        tokens: the structure of the result.
        targets: the requests of the read.
        numbers: with ``mmap``, the numbers of the tensors whose bytes are wanted.
        missing: names of values that only ``into`` has, and patterns that match nothing.
        unexpected: names of tensors that only the checkpoint has.
        unwanted: the numbers of the ``unexpected`` tensors.
    """

    def __init__(self, settings: LoadSettings, types: Types, tokens: list[Token], targets: Targets) -> None:
        self.settings = settings
        self._types = types
        self.tokens = tokens
        self.targets = targets
        self.given: Into | None = None
        self.numbers: list[int] = []
        self.missing: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()
        self.unwanted: set[int] = set()

    def build(self) -> Any:
        """Return the state after everything has been read; it is ``into``, if that was passed.

        Raises:
            CheckpointError: an object in ``into`` refused its state.
        """
        if self.given is not None:
            return self.given.build(self.tokens)
        return unflatten(self.tokens, StateBuilder(self.settings.framework, self.targets.values(), types=self._types))


def prepare(
    reader: _core.Reader,
    source: str,
    settings: LoadSettings,
    into: Any,
    *,
    target: type[Targets] = Targets,
    spreads: Spreads | None = None,
    shared: bool = False,
) -> Prepared:
    """Determine what must be read, and allocate the memory for it.

    Args:
        reader: the checkpoint.
        source: the path of the checkpoint, for messages.
        settings: the options of the load.
        into: the state to fill; None for a new one.
        target: the class that collects the requests.
        spreads: describes tensors of ``into`` that are spread over ranks.
        shared: whether other ranks load, too. If so, ``into`` need not have all tensors of the checkpoint.

    Raises:
        MemoryError: the load needs more memory than this process may use.
    """
    with paused():
        stored = reader.tensors()
    every = parse(reader.structure())
    selection, renaming, types, strict = settings.selection(), settings.renaming(), settings.types(), settings.strict
    # Types are looked up only in the chosen part: the rest may belong to another program.
    check = Validator(stored, types=types, strangers=not selection.all)
    unflatten(every, check)
    tokens, chosen = every, None
    origin: Sequence[int] = range(len(every))
    missing: tuple[str, ...] = ()
    if not selection.all:
        chosen, missing = selection.of(every, [tensor.name for tensor in stored], strict=strict)
        tokens, origin = prune(every, chosen)
        check = Validator(stored, types=types)
        unflatten(tokens, check)
    if check.unknown:
        warn_of_unknown("load", check.unknown)
    placement = None
    if settings.device is not None or settings.dtype is not None:
        stock = Stock(every, stored, [shard.file for shard in reader.shards()], check.found, types)
        placement = place(stock, settings.device, settings.dtype, settings.framework, strict=strict)
    if renaming.changes:
        tokens = renaming.of(tokens, strict=strict)
        every = tokens if chosen is None else _with(every, origin, tokens)
    prepared = Prepared(settings, types, tokens, target(stored, settings.framework, placement))
    if settings.io.mmap:
        prepared.targets.mappings = reader.map(_numbers(check.found))
    if into is not None:
        given = Into(
            reader,
            source,
            into,
            prepared.targets,
            types,
            strict=strict,
            spreads=spreads,
            shared=shared,
        )
        if settings.device is not None and not given.has_objects:
            raise ValueError(
                "load: device= applies to new tensors only; tensors passed with into= stay on their device"
            )
        prepared.tokens = given.match(every, tokens, origin, chosen, selection, renamed=renaming.changes)
        prepared.given = given
        missing = (*missing, *given.missing)
        prepared.unexpected, prepared.unwanted = given.unexpected, given.unwanted
    else:
        prepared.targets.make(check.found)
    if settings.io.mmap:
        prepared.numbers = _numbers(token for token in check.found if token[1] not in prepared.unwanted)
    prepared.missing = missing
    check_room(source, *prepared.targets.fresh)
    return prepared


def _numbers(tokens: Iterable[list[Any]]) -> list[int]:
    """The numbers of the tensors of these tokens."""
    return sorted({token[1] for token in tokens})


def _with(tokens: list[Token], positions: Sequence[int], others: list[Token]) -> list[Token]:
    """A structure with some tokens replaced, except for the sizes of containers."""
    out = list(tokens)
    for position, token in zip(positions, others, strict=True):
        if type(token) is str:
            out[position] = token
    return out
