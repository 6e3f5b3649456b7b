"""Spreads of tensors over ranks, in the core's form and as indices, and messages between ranks in one process."""

from __future__ import annotations

import ctypes
import queue
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastckpt import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Seconds after which a test that hangs fails.
LONG = 60


class Spread(NamedTuple):
    """A spread in the core's form, and as the indices of each part of a rank along each dimension."""

    core: _core.Spread
    parts: Callable[[int, tuple[int, ...]], list[list[np.ndarray]]]


def whole(ranks: Sequence[int] | None = None) -> Spread:
    """A spread in which these ranks, or all ranks, have the whole tensor."""
    core = _core.Spread.all() if ranks is None else _core.Spread.ranks(ranks)

    def parts(rank, shape):
        return [[np.arange(size) for size in shape]] if ranks is None or rank in ranks else []

    return Spread(core, parts)


def chunk(indices: np.ndarray, count: int, index: int) -> np.ndarray:
    """One chunk of the indices, as ``torch.chunk`` makes ``count`` of them."""
    length = -(-len(indices) // count)
    return indices[index * length : (index + 1) * length]


def mesh(shape: Sequence[int], *placements: tuple[str, int, int]) -> Spread:
    """The spread of a tensor over a mesh of all ranks."""

    def parts(rank, sizes):
        dims = [np.arange(size) for size in sizes]
        for (kind, dim, factor), count, at in zip(placements, shape, np.unravel_index(rank, shape), strict=True):
            if kind == "shard":
                dims[dim] = chunk(dims[dim], count, at)
            elif kind == "strided":
                chunks = [chunk(dims[dim], factor, outer) for outer in range(factor)]
                dims[dim] = np.concatenate([chunk(one, count, at) for one in chunks])
        return [dims]

    return Spread(_core.Spread.mesh(range(int(np.prod(shape))), shape, placements), parts)


def boxes(*given: tuple[int, tuple[tuple[int, int], ...]]) -> Spread:
    """A spread of explicit boxes of ranks."""

    def parts(rank, shape):
        return [[np.arange(*along) for along in bounds] for owner, bounds in given if owner == rank]

    return Spread(_core.Spread.boxes(given), parts)


def three_boxes(rows: int, columns: int, *rest: int) -> Spread:
    """A spread in which rank 2 has the first rows, and rank 0 has the other rows as two halves."""
    first, half, rest_of_it = min(3, rows), columns // 2, tuple((0, size) for size in rest)
    top = (2, ((0, first), (0, columns), *rest_of_it))
    return boxes(
        top,
        (0, ((first, rows), (0, half), *rest_of_it)),
        (0, ((first, rows), (half, columns), *rest_of_it)),
    )


ROWS, COLUMNS, COPY = ("shard", 0, 0), ("shard", 1, 0), ("replicate", 0, 0)

#: Name -> the number of ranks, and a function from a tensor's shape to its spread.
LAYOUTS: dict[str, tuple[int, Callable[[tuple[int, ...]], Spread]]] = {
    "one rank": (1, lambda _: whole()),
    "rows of 2": (2, lambda shape: mesh([2], ROWS) if shape else whole()),
    "rows of 3": (3, lambda shape: mesh([3], ROWS) if shape else whole()),
    "copies of 4": (4, lambda _: whole()),
    "copies of 2 and nothing": (3, lambda _: whole([0, 2])),
    "columns of 4": (4, lambda shape: mesh([4], COLUMNS) if len(shape) > 1 else whole()),
    "copies of rows": (4, lambda shape: mesh([2, 2], COPY, ROWS) if shape else whole()),
    "rows and columns": (4, lambda shape: mesh([2, 2], ROWS, COLUMNS) if len(shape) > 1 else whole()),
    "rows of rows": (4, lambda shape: mesh([2, 2], ("strided", 0, 2), ROWS) if shape else whole()),
    "strided columns": (4, lambda shape: mesh([2, 2], ("strided", 1, 2), COLUMNS) if len(shape) > 1 else whole()),
    "boxes": (3, lambda shape: three_boxes(*shape) if len(shape) > 1 else whole()),
}


def arrays() -> dict[str, np.ndarray]:
    """Tensors with long or short pieces or uneven rows; tensors smaller than a page, scalars, and empty tensors."""
    random = np.random.default_rng(7)

    def some(dtype, *shape):
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = random.integers(0, 256, array.nbytes, np.uint8)
        return array

    made = {
        "long": some(np.int32, 513, 1024),
        "uneven": some(np.int16, 7, 333, 11),
        "bytes": some(np.uint8, 5, 31),
        "vector": some(np.int64, 40_001),
        "empty": some(np.int32, 0, 8),
        "scalar": some(np.int16),
        "complex": np.arange(12.0).reshape(4, 3).astype(np.complex128),
    }
    return made | {f"small.{index}": some(np.int16, 3 + index, 50) for index in range(40)}


def queues(ranks: int) -> dict[tuple[int, ...], queue.Queue[bytes | None]]:
    """A stand-in for the network: a queue for each pair of ranks."""
    return {pair: queue.Queue() for pair in np.ndindex(ranks, ranks)}


def send(mail: _core.Mail, rank: int, between: dict[tuple[int, ...], queue.Queue[bytes | None]]) -> None:
    """Send the messages of a rank."""
    for number, (peer, nbytes) in enumerate(mail.outgoing()):
        between[rank, peer].put(ctypes.string_at(mail.pack(number), nbytes))
        mail.sent(number)


def receive(mail: _core.Mail, rank: int, between: dict[tuple[int, ...], queue.Queue[bytes | None]]) -> None:
    """Receive the messages of a rank until None arrives."""
    for number, (peer, nbytes) in enumerate(mail.incoming()):
        address = mail.admit(number)
        message = between[peer, rank].get(timeout=LONG)
        if message is None:
            return
        assert len(message) == nbytes
        ctypes.memmove(address, message, nbytes)
        mail.arrived(number)
