"""Basic indexing of what is still on disk: which bytes to read, and what to make of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np

from .memory import Bytes

#: Rows below this are read with what lies between them: one read is cheaper than many.
_ROW = 64 << 10

Range: TypeAlias = "tuple[int, int]"
#: From the bytes read to the bytes of the part, contiguous, and its shape.
Rest: TypeAlias = Callable[[Bytes], "tuple[Bytes, tuple[int, ...]]"]


def plan(shape: Sequence[int], itemsize: int, index: Any) -> tuple[list[Range], Rest]:
    """Plan the reading of ``array[index]`` where only bytes can be had.

    Args:
        shape: the array's sizes.
        itemsize: bytes of an element.
        index: an int, a slice, an Ellipsis, or a tuple of them.

    Returns:
        The byte ranges of the array to read, and what makes the part of their bytes, joined.

    Raises:
        IndexError: the index does not fit the shape.
        TypeError: the index is not a basic one.
    """
    steps = _normal(shape, index)
    # Leading integers only move the beginning.
    skip = 0
    depth = 0
    while depth < len(steps) and isinstance(steps[depth], int):
        skip = skip * shape[depth] + steps[depth]
        depth += 1
    out_shape = tuple(len(step) for step in steps if isinstance(step, range))
    if not all(out_shape) or not prod(shape):
        return [], lambda _: (np.empty(0, np.uint8), out_shape)
    if depth == len(steps):
        return [(skip * itemsize, (skip + 1) * itemsize)], lambda memory: (memory, ())
    rows = steps[depth]
    inner = tuple(shape[depth + 1 :])
    row = prod(inner) * itemsize
    base = skip * shape[depth] * row
    low, high = min(rows[0], rows[-1]), max(rows[0], rows[-1])
    if abs(rows.step) > 1 and row >= _ROW:
        reads = [(base + at * row, base + (at + 1) * row) for at in rows]
        taken: Any = slice(None)
        height = len(rows)
    else:
        reads = [(base + low * row, base + (high + 1) * row)]
        taken = _as_slice(range(rows[0] - low, rows[-1] - low + (1 if rows.step > 0 else -1), rows.step))
        height = high + 1 - low
    after = tuple(step if isinstance(step, int) else _as_slice(step) for step in steps[depth + 1 :])

    def rest(memory: Bytes) -> tuple[Bytes, tuple[int, ...]]:
        # Opaque elements: the bytes are moved, whatever they mean.
        array = memory.view(f"V{itemsize}").reshape(height, *inner)
        part = np.ascontiguousarray(array[(taken, *after)])
        return part.reshape(-1).view(np.uint8), out_shape

    return reads, rest


def _as_slice(steps: range) -> slice:
    """The slice that takes just these."""
    stop: int | None = steps.stop
    return slice(steps.start, stop if stop is not None and stop >= 0 else None, steps.step)


def _normal(shape: Sequence[int], index: Any) -> list[Any]:
    """One int or range for each dimension."""
    given = list(index) if isinstance(index, tuple) else [index]
    dots = [position for position, item in enumerate(given) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError("slice: an index can have only one Ellipsis")
    if len(given) - len(dots) > len(shape):
        raise IndexError(f"slice: {len(given) - len(dots)} indices for a tensor of {len(shape)} dimensions")
    missing = [slice(None)] * (len(shape) - len(given) + len(dots))
    position = dots[0] if dots else len(given)
    given[position : position + len(dots)] = missing
    return [_step(dimension, size, item) for dimension, (size, item) in enumerate(zip(shape, given, strict=True))]


def _step(dimension: int, size: int, item: Any) -> int | range:
    if isinstance(item, slice):
        return range(*item.indices(size))
    if isinstance(item, (bool, np.bool_)) or item is None:
        raise TypeError(f"slice: an index is an int, a slice, an Ellipsis or a tuple of them, not {item!r}")
    try:
        at = operator.index(item)
    except TypeError:
        raise TypeError(
            f"slice: an index is an int, a slice, an Ellipsis or a tuple of them, not {type(item).__name__}"
        ) from None
    if not -size <= at < size:
        raise IndexError(f"slice: index {at} is out of range for dimension {dimension} of size {size}")
    return at % size
