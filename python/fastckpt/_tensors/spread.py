"""Spreads: which ranks hold which parts of a tensor, without torch."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: ``("replicate", 0, 0)``, ``("shard", dimension, 0)`` or ``("strided", dimension, factor)``.
Placement: TypeAlias = "tuple[str, int, int]"
#: Ranges of one dimension, in the order of local memory.
Ranges: TypeAlias = "list[tuple[int, int]]"
#: For each dimension the first index, and one past the last.
Box: TypeAlias = "tuple[tuple[int, int], ...]"

REPLICATE: Placement = ("replicate", 0, 0)


class Spread(NamedTuple):
    """The ranks of a group that hold a tensor.

    Attributes:
        ranks: ascending if each has the tensor whole; in row-major order over a mesh; or the rank of each box.
        mesh: the size of each dimension of the mesh; empty if each of ``ranks`` has the tensor whole.
        placements: one for each dimension of the mesh.
        boxes: the explicit boxes of ranks, if any. The boxes of one rank are adjacent in its memory, which is
            contiguous if there are several. A spread that one rank makes has only the boxes of that rank.
    """

    ranks: tuple[int, ...]
    mesh: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()
    boxes: tuple[Box, ...] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether each of its ranks has the tensor whole."""
        return not self.mesh and self.boxes is None


def simplest(ranks: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement]) -> Spread:
    """The spread of a mesh, without its dimensions of size 1, so that equivalent spreads become equal."""
    kept = [(size, placement) for size, placement in zip(mesh, placements, strict=True) if size > 1]
    if all(placement == REPLICATE for _, placement in kept):
        return Spread(tuple(sorted(ranks)))
    return Spread(tuple(ranks), tuple(size for size, _ in kept), tuple(placement for _, placement in kept))


def orders_of(mesh: Sequence[int], placements: Sequence[Placement]) -> dict[int, list[int]]:
    """For each dimension of a tensor that is cut, the dimensions of the mesh in the order in which they cut it.

    A placement is strided if its dimension of the mesh cuts a tensor after later dimensions have cut it, into as many
    chunks as these have ranks. A dimension of a tensor whose strided placements have no such order is left out.
    """
    orders: dict[int, list[int]] = {}
    strange = set()
    for axis in reversed(range(len(placements))):
        kind, dim, factor = placements[axis]
        if kind == "replicate":
            continue
        order, at, chunks = orders.setdefault(dim, []), 0, 1
        while chunks != max(factor, 1) and at < len(order):
            chunks *= mesh[order[at]]
            at += 1
        if chunks != max(factor, 1):
            strange.add(dim)
        order.insert(at, axis)
    return {dim: order for dim, order in orders.items() if dim not in strange}


def in_order(
    ranks: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement], orders: Mapping[int, Sequence[int]]
) -> Spread:
    """The spread of a mesh whose dimensions cut each dimension of a tensor in the order that ``orders`` has for it.

    Dimensions of the mesh are reordered, so that each cuts the result of the previous ones.
    """
    axes = list(range(len(mesh)))
    placed = list(placements)
    for dim, order in orders.items():
        for place, axis in zip(sorted(order), order, strict=True):
            axes[place] = axis
            placed[place] = ("shard", dim, 0)
    if axes != sorted(axes):
        strides = [math.prod(mesh[axis + 1 :]) for axis in range(len(mesh))]
        steps = [range(0, mesh[axis] * strides[axis], strides[axis]) for axis in axes]
        ranks = [ranks[sum(at)] for at in itertools.product(*steps)]
    return simplest(ranks, [mesh[axis] for axis in axes], placed)


def _chunk(length: int, chunks: int, index: int) -> tuple[int, int]:
    """The range of chunk ``index`` of ``chunks``, as ``torch.chunk`` cuts."""
    size = -(-length // chunks)
    return min(index * size, length), min((index + 1) * size, length)


def _part(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The elements ``[start, stop)`` of a sequence of ranges."""
    out: Ranges = []
    for first, last in ranges:
        length = last - first
        low, high = max(start, 0), min(stop, length)
        if low < high:
            if out and out[-1][1] == first + low:
                out[-1] = (out[-1][0], first + high)
            else:
                out.append((first + low, first + high))
        start, stop = start - length, stop - length
    return out


def _applied(ranges: Ranges, placement: Placement, size: int, index: int) -> Ranges:
    kind, _, factor = placement
    length = sum(stop - start for start, stop in ranges)
    if kind == "shard":
        return _part(ranges, *_chunk(length, size, index))
    out: Ranges = []
    for split in range(factor):
        first, last = _chunk(length, factor, split)
        start, stop = _chunk(last - first, size, index)
        out += _part(ranges, first + start, first + stop)
    return out


def part_of(shape: Sequence[int], spread: Spread, rank: int) -> list[Ranges] | None:
    """The ranges of ``rank`` in each dimension of a tensor of ``shape``; None if it has no part."""
    if rank not in spread.ranks:
        return None
    ranges: list[Ranges] = [[(0, size)] for size in shape]
    at = spread.ranks.index(rank)
    for number, (size, placement) in enumerate(zip(spread.mesh, spread.placements, strict=True)):
        if placement != REPLICATE:
            index = at // math.prod(spread.mesh[number + 1 :]) % size
            ranges[placement[1]] = _applied(ranges[placement[1]], placement, size, index)
    return ranges


def pieces_of(spread: Spread | None, nbytes: int) -> list[tuple[int, int]]:
    """The ranges of a rank's memory of ``nbytes`` bytes that hold its parts, given the spread that it made."""
    if spread is None or spread.boxes is None or len(spread.boxes) == 1:
        return [(0, nbytes)]
    sizes = [math.prod(end - begin for begin, end in box) for box in spread.boxes]
    ends = [nbytes * end // sum(sizes) for end in itertools.accumulate(sizes)]
    return list(zip([0, *ends], ends, strict=False))


def local_shape(shape: Sequence[int], spread: Spread, rank: int) -> tuple[int, ...] | None:
    """The shape of the part of ``rank``, or None."""
    part = part_of(shape, spread, rank)
    return None if part is None else tuple(sum(stop - start for start, stop in ranges) for ranges in part)
