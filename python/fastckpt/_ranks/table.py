"""A compact table of what a rank saves or wants, without tensor data, which ranks can compare and send.

Two parts. The main part has the names, dtypes, global shapes and values, and for each tensor the number of its spread;
it is equal on ranks that hold the same state, however it is cut. The spreads themselves are the other part, which is
small: ranks in different meshes differ only in it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastckpt._tensors.spread import Spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_COUNT = struct.Struct("<Q")


class Kind(NamedTuple):
    """Common properties of tensors: ``spread`` is the number of their spread, 0 if each rank has them whole."""

    dtype: str
    shape: tuple[int, ...]
    logical: tuple[str, tuple[int, ...]] | None
    spread: int


class Table(NamedTuple):
    """The main part.

    Attributes:
        names: the names of the tensors, by number.
        kinds: the different kinds.
        kind: for each tensor, the number of its kind.
        ties: number and name of each further place of a tensor.
        outer: kind and text of each key of the outer mapping, and whether it leads to a mapping; None without one.
        structure: the tokens of the state, JSON text.
    """

    names: list[str]
    kinds: list[Kind]
    kind: np.ndarray[Any, np.dtype[np.uint32]]
    ties: list[tuple[int, str]]
    outer: list[tuple[str, str, bool]] | None
    structure: str


def kinds_of(
    tensors: Iterable[tuple[str, Sequence[int], tuple[str, Sequence[int]] | None, int]],
) -> tuple[list[Kind], np.ndarray[Any, np.dtype[np.uint32]]]:
    """The different kinds of tensors, by dtype, shape, logical dtype and shape, and spread; and the kind of each."""
    numbers: dict[Any, int] = {}
    kind = [numbers.setdefault(each, len(numbers)) for each in tensors]
    made = [
        Kind(dtype, tuple(shape), None if logical is None else (logical[0], tuple(logical[1])), spread)
        for dtype, shape, logical, spread in numbers
    ]
    return made, np.array(kind, np.uint32)


def encode(table: Table) -> bytes:
    """A table as bytes: equal tables give equal bytes."""
    head = json.dumps([table.names, table.kinds, table.ties, table.outer], separators=(",", ":")).encode()
    return packed(
        head,
        table.kind.astype("<u4", copy=False).tobytes(),
        table.structure.encode(),
    )


def decode(data: bytes) -> Table:
    """Decode the result of :func:`encode`."""
    head, kind, structure = unpacked(data)
    names, kinds, ties, outer = json.loads(head)
    return Table(
        names,
        list(starmap(_kind, kinds)),
        np.frombuffer(kind, "<u4"),
        [(index, name) for index, name in ties],
        None if outer is None else [(tag, text, leads) for tag, text, leads in outer],
        structure.decode(),
    )


def _kind(dtype: str, shape: list[int], logical: list[Any] | None, spread: int) -> Kind:
    return Kind(dtype, tuple(shape), None if logical is None else (logical[0], tuple(logical[1])), spread)


def packed(*parts: bytes) -> bytes:
    """Several byte strings as one."""
    return b"".join(item for part in parts for item in (_COUNT.pack(len(part)), part))


def unpacked(data: bytes) -> list[bytes]:
    """The inverse of :func:`packed`."""
    out, at = [], 0
    while at < len(data):
        (length,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        out.append(data[at : at + length])
        at += length
    return out


def digest(data: bytes) -> str:
    """The digest of ``data`` for comparisons between ranks."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encode_spreads(spreads: Sequence[Spread]) -> bytes:
    """Spreads as bytes. Ranks at equal steps, as in meshes, need no extra bytes."""
    told = [
        [_steps(spread), spread.mesh, spread.placements] if spread.boxes is None else [spread.ranks, spread.boxes]
        for spread in spreads
    ]
    return json.dumps(told, separators=(",", ":")).encode()


def decode_spreads(data: bytes) -> list[Spread]:
    """Decode the result of :func:`encode_spreads`."""
    return list(starmap(_spread, json.loads(data)))


def _spread(ranks: list[Any], mesh: list[Any], placements: list[Any] | None = None) -> Spread:
    if placements is None:
        return Spread(tuple(ranks), boxes=tuple(tuple((begin, end) for begin, end in box) for box in mesh))
    return Spread(_ranks(ranks), tuple(mesh), tuple((kind, dim, factor) for kind, dim, factor in placements))


def _steps(spread: Spread) -> list[Any]:
    """The ranks of a spread: the first, and the step and the number of them in each dimension; or all of them."""
    ranks = np.array(spread.ranks)
    shape = spread.mesh or (len(ranks),)
    grid = ranks.reshape(shape)
    origin = (0,) * len(shape)
    first = int(grid[origin])
    by = [
        int(grid[tuple(int(d == e) for e in range(len(shape)))]) - first if shape[d] > 1 else 0
        for d in range(len(shape))
    ]
    made = _ranks([first, by, list(shape)])
    return [first, by, list(shape)] if made == spread.ranks else [list(spread.ranks)]


def _ranks(ranks: list[Any]) -> tuple[int, ...]:
    if len(ranks) == 1:
        return tuple(ranks[0])
    first, by, shape = ranks
    grid = np.array(first)
    for step, size in zip(by, shape, strict=True):
        grid = grid[..., None] + step * np.arange(size)
    return tuple(grid.ravel().tolist())
