"""From the state of one rank to its table.

:func:`describe` is what a save calls first. What it gives goes into an :class:`.agreement.Agreement`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt._state.flatten import Flat, flatten
from fastckpt._state.registry import Types
from fastckpt._tensors.movers import Sources
from fastckpt._tensors.spreads import Spreads

from .offers import Told
from .table import Table, encode, encode_spreads, kinds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastckpt._api.tailor import Tailor
    from fastckpt._tensors.spread import Spread

NO_TENSORS = "metadata cannot hold tensors: put them into the state"
#: Types of keys that can name the model.
_KEYS: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "bool": lambda text: text == "True"}


class Local:
    """What one rank saves.

    Attributes:
        rank: this rank in the group.
        size: the number of ranks.
        flat: the state, flattened. Its ``keep`` has what addresses point into, to be cleared by who saves.
        about: the metadata, flattened; that of the coordinator is saved.
        extra: what belongs to this rank alone, flattened; None for nothing.
        sources: brings the bytes of what has no address, as it is now: by the numbers in ``flat``, and behind these by
            those in ``extra``. None once ``clear`` was called.
        spreads: the spreads of the tensors that are spread.
        table: the main part of the table.
        told: both parts of the table, as ranks tell them.
        model_key: see :func:`fastckpt.save`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        flat: Flat,
        about: Flat,
        extra: Flat | None,
        sources: Sources,
        spreads: list[Spread],
        model_key: str | None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.flat = flat
        self.about = about
        self.extra = extra
        self.sources: Sources | None = sources
        self.spreads = spreads
        self.model_key = model_key
        self.table = table_of(flat)
        self.told = Told.of(rank, encode(self.table), encode_spreads(spreads))

    def clear(self) -> None:
        """Let go of the caller's memory."""
        self.sources = None
        for flat in (self.flat, self.extra):
            if flat is not None:
                flat.keep.clear()
                flat.movers.clear()


def describe(
    state: Any,
    rank: int,
    ranks: Sequence[int],
    *,
    operation: str = "save",
    metadata: Any = None,
    per_rank: Any = None,
    model_key: str | None = "auto",
    tailor: Tailor | None = None,
    types: Types | None = None,
    default: Callable[[Any], Any] | None = None,
) -> Local:
    """Flatten the state of this rank, and describe it.

    Args:
        state: any state, with DTensors in it.
        rank: this rank in the group.
        ranks: the global ranks of the group, in its order.
        operation: the word that error messages begin with.
        metadata: see :func:`fastckpt.save`.
        per_rank: a state that belongs to this rank alone, without DTensors; None for none.
        model_key: see :func:`fastckpt.save`.
        tailor: what is left out of the state, and cast; None for nothing.
        types: the types with names that are known.
        default: see :func:`fastckpt.save`.

    Raises:
        RuntimeError: the caller's current stream of a device that takes part is being captured into a graph.
        UnsupportedTypeError: something cannot be saved; the message names its place.
    """
    about = flatten(
        metadata, operation=f"{operation}: metadata", refuse_tensors=NO_TENSORS, types=types, default=default
    )
    spreads = Spreads(ranks, rank)
    excluded = None if tailor is None else tailor.excluded
    flat = flatten(state, operation=operation, types=types, default=default, spreads=spreads, excluded=excluded)
    extra = None
    try:
        if tailor is not None:
            tailor.fit(flat, types or Types(operation), strict=len(ranks) == 1)
        if per_rank is not None:
            extra = flatten(per_rank, operation=f"{operation}: per_rank", types=types, default=default)
        movers = dict(flat.movers)
        if extra is not None:
            movers.update((len(flat.tensors) + index, mover) for index, mover in extra.movers.items())
        sources = Sources(operation, movers)
        return Local(rank, len(ranks), flat, about, extra, sources, spreads.found, model_key)
    except BaseException:
        # The traceback has this frame, and with it exports of the caller's buffers.
        flat.keep.clear()
        raise


def table_of(flat: Flat) -> Table:
    """The main part of the table of a state."""
    spread_of = flat.spreads.get
    kinds, kind = kinds_of(
        (tensor.dtype, tensor.shape, tensor.logical, spread_of(index, 0)) for index, tensor in enumerate(flat.tensors)
    )
    outer = None
    if flat.outer is not None:
        outer = [
            (type(key).__name__, str(key), leads) for key, leads in flat.outer.items() if type(key).__name__ in _KEYS
        ]
    return Table(
        [tensor.name for tensor in flat.tensors],
        kinds,
        kind,
        flat.ties,
        outer,
        flat.structure(),
    )


def outer_of(keys: list[tuple[str, str, bool]] | None) -> dict[Any, bool] | None:
    """The keys of the outer mapping, as a flattened state has them."""
    return None if keys is None else {_KEYS[kind](text): leads for kind, text, leads in keys}
