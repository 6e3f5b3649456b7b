"""The request of a load, and the reads that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastckpt._state.builders import StateBuilder, Validator
from fastckpt._state.collector import paused
from fastckpt._state.registry import Registry, Types
from fastckpt._state.rename import Renaming
from fastckpt._state.select import prune
from fastckpt._state.unflatten import Token, parse, unflatten

from .destinations import Targets
from .into import Into
from .options import check_framework, check_io, check_threads, check_unknown
from .outcome import warn_of_unknown
from .placement import Stock, place
from .room import check_room
from .selection import Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fastckpt import _core
    from fastckpt._tensors.spreads import Spreads


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The arguments of a load, checked."""

    into: Any
    selection: Selection
    strict: bool
    dtype: Any
    renaming: Renaming
    framework: str
    device: Any
    types: Types
    mmap: bool
    verify: bool
    io: str
    threads: int | None
    progress: bool


def wishes_of(  # noqa: PLR0913 - all by name
    operation: str,
    *,
    into: Any = None,
    keys: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    strict: bool = True,
    dtype: Any = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    strip_prefix: str | Sequence[str] | None = None,
    framework: str = "auto",
    device: Any = None,
    registry: Registry | None = None,
    unknown: str = "error",
    mmap: bool = False,
    verify: bool = True,
    io: str = "auto",
    threads: int | None = None,
    progress: bool = False,
) -> Wishes:
    """The arguments of :func:`fastckpt.load`, checked."""
    check_io(operation, io)
    check_threads(operation, threads)
    check_framework(operation, framework)
    check_unknown(operation, unknown)
    if device is not None and framework == "numpy":
        raise ValueError(f'{operation}: framework="numpy" loads NumPy arrays, which have no device: leave out device=')
    if mmap:
        if dtype is not None:
            raise ValueError(
                f"{operation}: mmap=True maps the stored bytes unchanged and cannot be combined with dtype="
            )
        if io not in {"auto", "buffered"}:
            raise ValueError(
                f'{operation}: mmap=True reads through the page cache: io= must be "auto" or "buffered", not {io!r}'
            )
    return Wishes(
        into=into,
        selection=Selection(keys, exclude),
        strict=bool(strict),
        dtype=dtype,
        renaming=Renaming(strip_prefix, rename),
        framework=framework,
        device=device,
        types=Types(operation, registry, framework=framework, plain=unknown == "plain"),
        mmap=bool(mmap),
        verify=bool(verify),
        io=io,
        threads=threads,
        progress=progress,
    )


class Prepared:
    """A load before anything is read.

    Attributes:
        tokens: the structure of the result.
        targets: the requests of the read.
        numbers: with ``mmap``, the tensors whose bytes are wanted.
        missing: names of values that only ``into`` has, and patterns that match nothing.
        unexpected: names of tensors that only the checkpoint has.
        unwanted: the numbers of those.
    """

    def __init__(self, wishes: Wishes, tokens: list[Token], targets: Targets) -> None:
        self.wishes = wishes
        self.tokens = tokens
        self.targets = targets
        self.given: Into | None = None
        self.numbers: list[int] = []
        self.missing: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()
        self.unwanted: set[int] = set()

    def build(self) -> Any:
        """Once all has been read: the state, which is ``into`` where that was given.

        Raises:
            CheckpointError: an object in ``into`` refused its state.
        """
        if self.given is not None:
            return self.given.build(self.tokens)
        wishes = self.wishes
        return unflatten(self.tokens, StateBuilder(wishes.framework, self.targets.values(), types=wishes.types))


def prepare(
    reader: _core.Reader,
    source: str,
    wishes: Wishes,
    *,
    target: type[Targets] = Targets,
    spreads: Spreads | None = None,
    shared: bool = False,
) -> Prepared:
    """Find out what has to be read, and allocate the memory for it.

    Args:
        reader: the checkpoint.
        source: its path, for messages.
        wishes: the arguments of the load.
        target: the class that takes the requests.
        spreads: describes tensors of ``into`` that are spread over ranks.
        shared: whether other ranks load, too: then ``into`` need not have all tensors of the checkpoint.

    Raises:
        MemoryError: it would take more than this process may have.
    """
    with paused():
        stored = reader.tensors()
    every = parse(reader.structure())
    selection, strict = wishes.selection, wishes.strict
    # Types are looked up only in what was chosen: the rest may belong to another program.
    check = Validator(stored, types=wishes.types, strangers=not selection.all)
    unflatten(every, check)
    tokens, chosen = every, None
    origin: Sequence[int] = range(len(every))
    missing: tuple[str, ...] = ()
    if not selection.all:
        chosen, missing = selection.of(every, [tensor.name for tensor in stored], strict=strict)
        tokens, origin = prune(every, chosen)
        check = Validator(stored, types=wishes.types)
        unflatten(tokens, check)
    if check.unknown:
        warn_of_unknown("load", check.unknown)
    placement = None
    if wishes.device is not None or wishes.dtype is not None:
        stock = Stock(every, stored, [shard.file for shard in reader.shards()], check.found, wishes.types)
        placement = place(stock, wishes.device, wishes.dtype, wishes.framework, strict=strict)
    if wishes.renaming.changes:
        tokens = wishes.renaming.of(tokens, strict=strict)
        every = tokens if chosen is None else _with(every, origin, tokens)
    prepared = Prepared(wishes, tokens, target(stored, wishes.framework, placement))
    if wishes.mmap:
        prepared.targets.mappings = reader.map(_numbers(check.found))
    if wishes.into is not None:
        given = Into(
            reader,
            source,
            wishes.into,
            prepared.targets,
            wishes.types,
            strict=strict,
            spreads=spreads,
            shared=shared,
        )
        if wishes.device is not None and not given.has_objects:
            raise ValueError(
                "load: device= applies to new tensors only; tensors passed with into= stay on their device"
            )
        prepared.tokens = given.match(every, tokens, origin, chosen, selection, renamed=wishes.renaming.changes)
        prepared.given = given
        missing = (*missing, *given.missing)
        prepared.unexpected, prepared.unwanted = given.unexpected, given.unwanted
    else:
        prepared.targets.make(check.found)
    if wishes.mmap:
        prepared.numbers = _numbers(token for token in check.found if token[1] not in prepared.unwanted)
    prepared.missing = missing
    check_room(source, *prepared.targets.fresh)
    return prepared


def _numbers(tokens: Iterable[list[Any]]) -> list[int]:
    """The numbers of the tensors of these tokens."""
    return sorted({token[1] for token in tokens})


def _with(tokens: list[Token], positions: Sequence[int], others: list[Token]) -> list[Token]:
    """A structure with other tokens at some positions, except for the sizes of containers."""
    out = list(tokens)
    for position, token in zip(positions, others, strict=True):
        if type(token) is str:
            out[position] = token
    return out
