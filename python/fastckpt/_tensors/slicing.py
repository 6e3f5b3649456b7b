"""Basic indexing of tensors that are still on disk: the box that an index selects, and its layout in memory."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

#: For each dimension the first index, one past the last, and the step, which is positive.
Box: TypeAlias = "list[tuple[int, int, int]]"


class Part(NamedTuple):
    """The part of an array that an index selects.

    Attributes:
        box: its box in the array.
        strides: for each of the array's dimensions, the distance in bytes between neighbours in the part.
        shape: the part's sizes.
    """

    box: Box
    strides: list[int]
    shape: tuple[int, ...]


def part(shape: Sequence[int], itemsize: int, index: Any) -> Part:
    """Find the part that ``array[index]`` selects.

    Args:
        shape: the array's sizes.
        itemsize: bytes of an element.
        index: an int, a slice, an Ellipsis, or a tuple of them.

    Returns:
        The part, contiguous. A slice that goes backwards is a box read forwards into memory with negative strides.

    Raises:
        IndexError: the index does not fit the shape.
        TypeError: the index is not a basic one.
    """
    steps = _normal(shape, index)
    box: Box = []
    strides: list[int] = []
    stride = itemsize
    for step in reversed(steps):
        taken = range(step, step + 1) if isinstance(step, int) else step
        forwards = taken if taken.step > 0 else taken[::-1]
        # The step of a single index has no meaning, and may exceed the core's integers.
        every = forwards.step if len(forwards) > 1 else 1
        box.append((forwards.start, forwards[-1] + 1, every) if forwards else (0, 0, 1))
        strides.append(stride if taken.step > 0 else -stride)
        stride *= len(taken)
    sizes = tuple(len(step) for step in steps if isinstance(step, range))
    return Part(box[::-1], strides[::-1], sizes)


def _normal(shape: Sequence[int], index: Any) -> list[Any]:
    """One int or range for each dimension."""
    given = list(index) if isinstance(index, tuple) else [index]
    dots = [position for position, item in enumerate(given) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can have only one Ellipsis")
    if len(given) - len(dots) > len(shape):
        raise IndexError(f"{len(given) - len(dots)} indices for a tensor of {len(shape)} dimensions")
    missing = [slice(None)] * (len(shape) - len(given) + len(dots))
    position = dots[0] if dots else len(given)
    given[position : position + len(dots)] = missing
    return [_step(dimension, size, item) for dimension, (size, item) in enumerate(zip(shape, given, strict=True))]


def _step(dimension: int, size: int, item: Any) -> int | range:
    if isinstance(item, slice):
        return range(*item.indices(size))
    if isinstance(item, (bool, np.bool_)) or item is None:
        raise TypeError(f"an index must be an int, a slice, an Ellipsis or a tuple of them, not {item!r}")
    try:
        at = operator.index(item)
    except TypeError:
        raise TypeError(
            f"an index must be an int, a slice, an Ellipsis or a tuple of them, not {type(item).__name__}"
        ) from None
    if not -size <= at < size:
        raise IndexError(f"index {at} is out of range for dimension {dimension} of size {size}")
    return at % size
