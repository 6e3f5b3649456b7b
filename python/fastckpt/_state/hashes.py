"""Dicts and sets of keys that a file chose: Python's hashes of numbers, and of what is made of them, can be forged.

Keys whose hashes lead to the same places cost each insertion a walk over the others, and a small file minutes. Such
keys are refused, by a count of the steps. A save refuses the same ones, because they could not be loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt import _core

if TYPE_CHECKING:
    from collections.abc import Collection

#: Fewer keys cannot exceed the limit of 128 steps for each.
_FEW = 256
#: Places that a set looks at behind the one that a hash leads to.
_NEIGHBOURS = 9

WHY = "the hashes of its keys collide, so that Python would need minutes for it: store them as a list"


def crowds(keys: Collection[Any], *, in_set: bool = False) -> bool:
    """Whether the hashes of ``keys`` collide too often for a dict, or for a set made by :func:`set_of`."""
    if len(keys) <= _FEW:
        return False
    listed = keys if isinstance(keys, list) else list(keys)
    # A set is made of a dict.
    return _core.crowded(listed, neighbours=0) or (in_set and _core.crowded(listed, neighbours=_NEIGHBOURS))


def set_of(keys: list[Any]) -> set[Any]:
    """A set of ``keys`` that are not crowded; of a dict, because only then are they inserted in this order."""
    return set(dict.fromkeys(keys))
