"""Which tensors of a state are its model: they go to files of their own, under the names Hugging Face knows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from .key_paths import prefix_of

if TYPE_CHECKING:
    from .flatten import Flat

#: The keys under which training programs keep the model, in the order in which they are tried.
CONVENTIONS = ("model", "module", "state_dict", "model_state_dict")
_LISTED = 10


def split_model(operation: str, state: Any, flat: Flat, model_key: str | None) -> str:
    """Find the model, and give its names to tensors that it shares with the rest of the state.

    Args:
        operation: for the error: ``save``.
        state: the state.
        flat: the same, flattened. The names of tied tensors may change.
        model_key: the outer key of the model; ``auto`` for the first of :data:`CONVENTIONS` that leads to a mapping
            with tensors in it; None for no model apart.

    Returns:
        What the names of the model's tensors start with; empty where the whole state counts as the model.

    Raises:
        ValueError: nothing under ``model_key`` is a mapping.
    """
    if model_key is None:
        return ""
    found = state if isinstance(state, Mapping) else {}
    if model_key == "auto":
        prefixes = (prefix_of((key,)) for key in CONVENTIONS if isinstance(found.get(key), Mapping))
        prefix = next((prefix for prefix in prefixes if _holds(flat, prefix)), "")
    elif isinstance(found.get(model_key), Mapping):
        prefix = prefix_of((model_key,))
    else:
        keys = [repr(key) for key, value in found.items() if isinstance(value, Mapping)][:_LISTED]
        # The traceback has frames that hold exports of the caller's buffers.
        flat.keep.clear()
        remedy = f"give one of {', '.join(keys)}, or None" if keys else "give None"
        raise ValueError(f"{operation}: model_key={model_key!r}: the state has no mapping under that key: {remedy}")
    if prefix:
        _rename(flat, prefix)
    return prefix


def _holds(flat: Flat, prefix: str) -> bool:
    names = chain((tensor.name for tensor in flat.tensors), (name for _, name in flat.ties))
    return any(name.startswith(prefix) for name in names)


def _rename(flat: Flat, prefix: str) -> None:
    """Store under its first name in the model what the state has in other places before."""
    outside = {index for index, _ in flat.ties if not flat.tensors[index].name.startswith(prefix)}
    if not outside:
        return
    taken = {tensor.name for tensor in flat.tensors}
    for index, name in flat.ties:
        if index in outside and name.startswith(prefix) and name not in taken:
            flat.tensors[index] = flat.tensors[index]._replace(name=name)
            taken.add(name)
            outside.discard(index)
