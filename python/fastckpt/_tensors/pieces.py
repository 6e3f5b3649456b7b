"""Divides a range of a strided array's logical bytes into a few basic-indexing views, without other bytes."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Index = tuple["int | slice", ...]


def pieces(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Index, int]]:
    """Cut the elements ``[start, stop)``, counted in row-major order, into sub-arrays.

    Args:
        shape: sizes of the array, none of them zero.
        start: first element.
        stop: one past the last element.

    Yields:
        ``(index, count)``: an index that selects the next ``count`` elements, in order. At most two per dimension.

    Raises:
        ValueError: the array has fewer elements.
    """
    # under[d] is the product of shape[d:], and inner[d] that of shape[d + 1 :].
    under = [1, *accumulate(reversed(shape), mul)][::-1]
    inner = under[1:]
    if stop > under[0]:
        raise ValueError(f"elements {start} to {stop} of an array that has {under[0]}")
    while start < stop:
        if not shape:
            yield (), 1
            return
        # Descend as long as the range, or its incomplete beginning, is inside one index.
        prefix: list[int | slice] = []
        rest = start
        depth = 0
        while True:
            size = inner[depth]
            first, offset = divmod(rest, size)
            if offset == 0 and stop - start >= size:
                last = min(shape[depth], first + (stop - start) // size)
                yield (*prefix, slice(first, last)), (last - first) * size
                start += (last - first) * size
                break
            prefix.append(first)
            rest = offset
            depth += 1


def elements(start: int, nbytes: int, size: int) -> tuple[int, int, bool]:
    """The elements of ``size`` bytes that the bytes ``[start, start + nbytes)`` touch, and whether they are whole."""
    first, head = divmod(start, size)
    last, tail = divmod(start + nbytes, size)
    return first, last + bool(tail), not head and not tail
