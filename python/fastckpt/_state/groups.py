"""Which tensors of a state are its model: they go to files of their own, under the names Hugging Face knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .key_paths import part_of

#: The keys under which training programs keep the model, in the order in which they are tried.
CONVENTIONS = ("model", "module", "state_dict", "model_state_dict")


def model_prefix(operation: str, state: Any, model_key: str | None) -> str:
    """What the names of the model's tensors begin with; empty where the whole state counts as the model.

    Args:
        operation: for the error: ``save``.
        state: the state.
        model_key: the outer key of the model; ``auto`` for the first of :data:`CONVENTIONS` that leads to a mapping;
            None for no model apart.

    Raises:
        ValueError: nothing under ``model_key`` is a mapping.
    """
    if model_key is None:
        return ""
    keys = CONVENTIONS if model_key == "auto" else (model_key,)
    found = (key for key in keys if isinstance(state, Mapping) and isinstance(state.get(key), Mapping))
    key = next(found, None)
    if key is not None:
        return f"{part_of(key)}."
    if model_key == "auto":
        return ""
    raise ValueError(f"{operation}: model_key={model_key!r}: the state has no mapping under that key")
