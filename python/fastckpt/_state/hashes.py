"""Dicts and sets of keys that a file chose: Python's hashes of numbers, and of values made of them, can be forged.

Python hashes nested keys in C without a depth limit: a key that is nested deep enough overflows the stack. If hashes
collide, each insertion walks over the other keys, which can take minutes for a small file. Such keys are refused, by a
count of the steps. A save refuses the same keys, because they could not be loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt import _core

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

#: Fewer keys cannot exceed the limit of 128 steps per key.
_FEW = 256
#: Places that a set tries after the place of a hash.
_NEIGHBOURS = 9

WHY = "the hashes of its keys collide, so that Python would need minutes for it: store them as a list"


def crowds(keys: Collection[Any], *, in_set: bool = False) -> bool:
    """Whether the hashes of ``keys`` collide too often for a dict, or for a set made by :func:`set_of`."""
    if len(keys) <= _FEW:
        return False
    listed = keys if isinstance(keys, list) else list(keys)
    # A set is made from a dict.
    return _core.crowded(listed, neighbours=0) or (in_set and _core.crowded(listed, neighbours=_NEIGHBOURS))


#: Levels of keys (docs/format.md, section 3.4).
DEPTH = 100
TOO_DEEP = f"a key or a member of a set is nested deeper than {DEPTH} levels: Python could not hash it"
_NESTED = (tuple, frozenset, slice)


def too_deep(keys: Iterable[Any]) -> bool:
    """Whether one of ``keys`` is nested too deep to be hashed. No method of a key runs."""
    kinds = {kind: issubclass(kind, _NESTED) for kind in set(map(type, keys))}
    if not any(kinds.values()):
        return False
    rest = [(key, 1) for key in keys if kinds[type(key)]]
    while rest:
        key, depth = rest.pop()
        if depth > DEPTH:
            return True
        rest.extend((member, depth + 1) for member in _members(key) if issubclass(type(member), _NESTED))
    return False


def _members(key: Any) -> Iterable[Any]:
    if type(key) is slice:
        return key.start, key.stop, key.step
    return tuple.__iter__(key) if issubclass(type(key), tuple) else frozenset.__iter__(key)


def set_of(keys: list[Any]) -> set[Any]:
    """A set of ``keys`` that are not crowded, made from a dict: only then are they inserted in this order."""
    return set(dict.fromkeys(keys))
