"""Makes the table of a rank from its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .table import Table, kinds_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastckpt._state.flat import Flat

#: Types of keys that can name the model.
_KEYS: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "bool": lambda text: text == "True"}


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
    """The keys of the outer mapping of a flattened state."""
    return None if keys is None else {_KEYS[kind](text): leads for kind, text, leads in keys}
