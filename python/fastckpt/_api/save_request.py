"""One save: what it writes and how, from the call to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastckpt._state.flat import Flat
from fastckpt._state.flatten import flatten
from fastckpt._state.registry import Types
from fastckpt._tensors.movers import Sources
from fastckpt._warn import warn

from .reuse import flags_of
from .tailor import Tailor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastckpt import _core
    from fastckpt._tensors.memory import Mover
    from fastckpt._tensors.spread import Spread
    from fastckpt._tensors.spreads import Spreads

    from .save_settings import SaveSettings, WriteSettings


@dataclass(slots=True, kw_only=True)
class SaveRequest:
    """The state of one save, which changes during it. :meth:`close` it at the end.

    Attributes:
        operation: the word that error messages begin with.
        path: the checkpoint's directory, absolute.
        began: when the program called (``time.perf_counter``).
        settings: how it is saved.
        step: the training step, for the live counters.
        metadata: the metadata, flattened.
        flat: the state, flattened. Its ``keep`` holds the owners of addresses, then those of ``per_rank``.
        per_rank: this rank's ``per_rank`` state, flattened; None without one.
        spreads: the spreads of tensors that are spread over ranks.
        movers: the movers of tensors without an address, by number: the numbers of ``flat`` come first, then those of
            ``per_rank``.
        boxes: for each tensor that this rank holds in boxes, by its number in ``flat``: the address, the bytes and the
            number in ``movers`` of each part, in order.
        sources: copies the current values of the tensors of ``movers``; None once they are no longer needed.
        tailor: applies ``exclude=`` and ``dtype=``.
        base: the absolute path of the earlier checkpoint whose files are linked.
        nice: the niceness of the threads that write; None keeps the niceness of the process.
        snapshot: the copy of the state, in a save in the background.
        counters: the live counters of a save in the background, from the moment at which the copy begins.
    """

    operation: str
    path: str
    began: float
    settings: WriteSettings
    step: int | None
    metadata: Flat
    flat: Flat = field(default_factory=Flat)
    per_rank: Flat | None = None
    spreads: list[Spread] = field(default_factory=list)
    movers: dict[int, Mover] = field(default_factory=dict)
    boxes: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    sources: Sources | None = None
    tailor: Tailor | None = None
    base: str | None = None
    nice: int | None = None
    snapshot: _core.Snapshot | None = None
    counters: _core.Operation | None = None

    @classmethod
    def of(
        cls,
        operation: str,
        path: str,
        metadata: Any,
        settings: WriteSettings,
        types: Types,
        *,
        began: float,
    ) -> SaveRequest:
        """A save without its state, which is added later.

        Raises:
            UnsupportedTypeError: the metadata holds a value that cannot be saved, or a tensor; the message names its
                place.
        """
        about = flatten(
            metadata,
            operation=f"{operation}: metadata",
            refuse_tensors="metadata cannot hold tensors: put them into the state",
            types=types,
        )
        step = metadata.get("step") if isinstance(metadata, dict) else None
        step = step if type(step) is int and 0 <= step < 2**63 else None
        return cls(operation=operation, path=path, began=began, settings=settings, step=step, metadata=about)

    @property
    def parts(self) -> list[Flat]:
        """The flattened parts of the state: the common one, and that of this rank."""
        return [self.flat] if self.per_rank is None else [self.flat, self.per_rank]

    def flags(self, names: Iterable[str]) -> list[bool]:
        """For each name of a tensor, whether it will not change; empty if that is unknown.

        Raises:
            KeyError: a pattern matches none of them.
        """
        return flags_of(self.operation, self.settings.files.frozen, [*names])

    def owners(self) -> object:
        """Return the owners of the memory that the core reads, perhaps even after a deadline has ended the save."""
        if self.snapshot is not None or self.settings.io.deadline is None:
            return self.snapshot
        return tuple(one for flat in self.parts for one in flat.keep)

    def close(self) -> None:
        """Release the caller's memory: frames in the traceback of an error refer to this object."""
        self.sources = None
        self.movers.clear()
        for flat in self.parts:
            for kept in (flat.keep, flat.movers, flat.wholes):
                kept.clear()


def build_request(
    operation: str,
    path: str,
    state: Any,
    metadata: Any,
    settings: SaveSettings,
    *,
    began: float,
    per_rank: Any = None,
    spreads: Spreads | None = None,
) -> SaveRequest:
    """Flatten the state, leave out and cast values, and warn of types. Call it from the public function.

    Args:
        operation: the word that error messages begin with.
        path: the checkpoint's directory, absolute.
        state: see :func:`fastckpt.save`.
        metadata: see :func:`fastckpt.save`.
        settings: how it is saved.
        began: when the program called (``time.perf_counter``).
        per_rank: a separate state of this rank, without DTensors; None for none.
        spreads: describes tensors that are spread over ranks; without it they are refused.

    Raises:
        KeyError: a pattern matches nothing, and this process saves alone.
        RuntimeError: the caller's current stream of a device that takes part is being captured into a graph.
        TypeError, ValueError: ``dtype`` is not a dtype, or nothing is left to save.
        UnsupportedTypeError: something cannot be saved; the message names its place.
    """
    types = Types(operation, settings.registry)
    request = SaveRequest.of(operation, path, metadata, settings.for_writing(), types, began=began)
    request.base = settings.base
    tailor = request.tailor = Tailor(operation, settings.exclude, settings.dtype)
    flat = request.flat = flatten(state, operation=operation, types=types, spreads=spreads, excluded=tailor.excluded)
    try:
        request.spreads = [] if spreads is None else spreads.found
        tailor.fit(flat, types, strict=spreads is None or len(spreads.ranks) == 1)
        request.movers = flat.movers  # replaced by `fit` if tensors were left out
        if per_rank is not None:
            own = request.per_rank = flatten(per_rank, operation=f"{operation}: per_rank", types=types)
            behind = len(flat.tensors)
            request.movers.update((behind + index, mover) for index, mover in own.movers.items())
            flat.keep += own.keep
            own.movers, own.keep = {}, []
        request.sources = Sources(operation, request.movers)
        warn_of_types(operation, flat, request.metadata, *request.parts[1:])
    except BaseException:
        request.close()
        raise
    return request


#: The remarks about types that have been issued.
_said: set[str] = set()


def warn_of_types(operation: str, *flats: Flat) -> None:
    """Warn once of each type that may not come back."""
    for remark in (remark for flat in flats for _, remark in flat.remarks):
        if remark not in _said:
            _said.add(remark)
            warn(f"fastckpt: {operation}: {remark}")
