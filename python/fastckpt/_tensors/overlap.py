"""Tensors and arrays that share memory: their layouts, and the pairs that overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .memory import address_of, laid_out, overlap, span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_Name = TypeVar("_Name")


def layout_of(value: Any) -> tuple[str, np.ndarray[Any, Any]]:
    """The device of a tensor or array, and its addresses as an array of opaque elements, not to be read."""
    if isinstance(value, np.ndarray):
        return "cpu", laid_out(address_of(value), value.shape, value.strides, value.itemsize)
    size = value.element_size()
    strides = tuple(stride * size for stride in value.stride())
    return str(value.device), laid_out(value.data_ptr(), tuple(value.shape), strides, size)


def overlapping(targets: Iterable[tuple[str, np.ndarray[Any, Any], _Name]]) -> Iterator[tuple[_Name, _Name]]:
    """All pairs of targets that share memory: reading one of them would destroy the other.

    Args:
        targets: device, layout and name of each tensor that is not empty; a tie is one target.
    """
    spans = [(device, *span(memory), memory, name) for device, memory, name in targets]
    # Targets are visited by device and start address: ranges that reach into the next one stay open.
    active: list[tuple[str, int, int, np.ndarray[Any, Any], _Name]] = []
    for each in sorted(spans, key=lambda one: one[:2]):
        device, low, _, memory, name = each
        active = [one for one in active if one[0] == device and one[2] > low]
        for *_, theirs, other in active:
            if overlap(memory, theirs):
                yield name, other
        active.append(each)
