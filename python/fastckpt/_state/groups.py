"""Selects the tensors of the model, which get separate files with Hugging Face's names."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from .key_paths import prefix_of

if TYPE_CHECKING:
    from .flat import Flat

#: The keys under which training programs keep the model, in the order in which they are tried.
CONVENTIONS = ("model", "module", "state_dict", "model_state_dict")
_LISTED = 10
#: Types of keys that can name the model.
_KEYS = (str, int, float)


def split_model(operation: str, flat: Flat, model_key: str | None) -> str:
    """Find the model, and give its names to tensors that it shares with the rest of the state.

    Args:
        operation: the word that error messages begin with: ``save``.
        flat: the state, flattened. The names of tied tensors may change.
        model_key: the outer key of the model; ``auto`` for the first of :data:`CONVENTIONS` that leads to a mapping
            with tensors in it (or to an object stored as one: a module), unless another outer key gives names with its
            prefix; None if no part is the model.

    Returns:
        The prefix of the names of the model's tensors; empty if the whole state counts as the model.

    Raises:
        ValueError: ``model_key`` leads to no mapping, or another outer key gives names with its prefix.
    """
    if model_key is None:
        return ""
    outer = flat.outer or {}
    if model_key == "auto":
        keys = (key for key in CONVENTIONS if outer.get(key) and _holds(flat, _prefix(key)))
        key = next(keys, None)
        if key is None or _clashing(outer, key) is not None:
            return ""
    else:
        # Names are made from the key in the state, which may only equal the given one, like True and 1.
        key = dict(zip(outer, outer, strict=True)).get(model_key) if isinstance(model_key, _KEYS) else None
        reason = _refusal(outer, key)
        if reason is not None:
            raise ValueError(f"{operation}: model_key={model_key!r}: {reason}")
    prefix = _prefix(key)
    _rename(flat, prefix)
    return prefix


def _prefix(key: Any) -> str:
    return prefix_of((key,))


def _refusal(outer: dict[Any, bool], key: Any) -> str | None:
    """Why ``key`` does not name the model, or None."""
    if key is None or not outer[key]:
        keys = [repr(key) for key, is_mapping in outer.items() if is_mapping][:_LISTED]
        remedy = f"give one of {', '.join(keys)}, or None" if keys else "give None"
        return f"the state has no mapping under that key: {remedy}"
    other = _clashing(outer, key)
    if other is None:
        return None
    return f"tensors under the key {other!r} can have the same names as the model's: rename that key, or give None"


def _clashing(outer: dict[Any, bool], key: Any) -> Any:
    """Another outer key below which names can start with the prefix of ``key``, or None."""
    prefix = _prefix(key)
    for other in outer:
        if other is not key and other != key and isinstance(other, _KEYS):
            theirs = _prefix(other)
            if theirs.startswith(prefix) or prefix.startswith(theirs):
                return other
    return None


def _holds(flat: Flat, prefix: str) -> bool:
    names = chain((tensor.name for tensor in flat.tensors), (name for _, name in flat.ties))
    return any(name.startswith(prefix) for name in names)


def _rename(flat: Flat, prefix: str) -> None:
    """Store a tied tensor under its first name in the model, even if the state has it elsewhere first."""
    outside = {index for index, _ in flat.ties if not flat.tensors[index].name.startswith(prefix)}
    if not outside:
        return
    taken = {tensor.name for tensor in flat.tensors}
    for index, name in flat.ties:
        if index in outside and name.startswith(prefix) and name not in taken:
            flat.tensors[index] = flat.tensors[index]._replace(name=name)
            taken.add(name)
            outside.discard(index)
