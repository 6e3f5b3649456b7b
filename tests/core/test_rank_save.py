"""The save of many ranks, in one process: threads stand for ranks, and queues for the network between them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import fastckpt
from fastckpt import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

#: Seconds after which a test that hangs fails.
LONG = 60

STRUCTURE = "[null]"


class Spread(NamedTuple):
    """How a tensor is spread: as the core takes it, and the indices of each part of a rank, along each dimension."""

    core: _core.Spread
    parts: Callable[[int, tuple[int, ...]], list[list[np.ndarray]]]


def whole(ranks: Sequence[int] | None = None) -> Spread:
    """These ranks, or all, have everything."""
    core = _core.Spread.all() if ranks is None else _core.Spread.ranks(ranks)

    def parts(rank, shape):
        return [[np.arange(size) for size in shape]] if ranks is None or rank in ranks else []

    return Spread(core, parts)


def chunk(indices: np.ndarray, count: int, index: int) -> np.ndarray:
    """What ``torch.chunk`` makes of them."""
    length = -(-len(indices) // count)
    return indices[index * length : (index + 1) * length]


def mesh(shape: Sequence[int], *placements: tuple[str, int, int]) -> Spread:
    """A mesh of all ranks."""

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
    """Explicit boxes of ranks."""

    def parts(rank, shape):
        return [[np.arange(*along) for along in bounds] for owner, bounds in given if owner == rank]

    return Spread(_core.Spread.boxes(given), parts)


def three_boxes(rows: int, columns: int, *rest: int) -> Spread:
    """The first rows belong to rank 2, and the two halves of the others to rank 0."""
    first, half, rest_of_it = min(3, rows), columns // 2, tuple((0, size) for size in rest)
    top = (2, ((0, first), (0, columns), *rest_of_it))
    return boxes(
        top,
        (0, ((first, rows), (0, half), *rest_of_it)),
        (0, ((first, rows), (half, columns), *rest_of_it)),
    )


ROWS, COLUMNS, COPY = ("shard", 0, 0), ("shard", 1, 0), ("replicate", 0, 0)

#: By name: the number of ranks, and how a tensor of a shape is spread over them.
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
    """Long runs, short runs, uneven rows, tensors smaller than a page, scalars, empty ones."""
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


class Job:
    """A job of some ranks that saves one state."""

    def __init__(self, layout: str, path: Path, *, fill: bool = False, **options: Any) -> None:
        self.ranks, self.spread = LAYOUTS[layout]
        self.path, self.fill = path, fill
        self.options = _core.SaveOptions(shard_size=1_000_000, **options)
        self.state = arrays()
        self.queues = {pair: queue.Queue() for pair in np.ndindex(self.ranks, self.ranks)}
        self.barrier = threading.Barrier(self.ranks, timeout=LONG)
        self.name = ""
        self.saves: list[_core.RankSave | None] = [None] * self.ranks
        self.reports: list[Any] = [None] * self.ranks
        self.pieces: list[bytes] = [b""] * self.ranks

    def share(self) -> tuple[_core.Share, list[Spread]]:
        tensors, spreads = [], []
        for number, (name, array) in enumerate(self.state.items()):
            shape = list(array.shape)
            logical = None
            stored, dtype = shape, {"c": "U8", "u": "U8"}.get(array.dtype.kind, f"I{8 * array.itemsize}")
            if array.dtype.kind == "c":
                stored, logical = [array.nbytes], ("numpy.<c16", shape)
            tensors.append((name, dtype, stored, logical, [number]))
            spreads.append(self.spread(array.shape))
        return _core.Share.to_save(tensors, [one.core for one in spreads], self.ranks, self.options), spreads

    def held(self, rank: int, spreads: list[Spread]) -> tuple[list[tuple[int, int, int, int]], list[np.ndarray]]:
        held, memory = [], []
        for number, (array, spread) in enumerate(zip(self.state.values(), spreads, strict=True)):
            for part, indices in enumerate(spread.parts(rank, array.shape)):
                local = np.ascontiguousarray(array[np.ix_(*indices)] if indices else array)
                memory.append(local)
                held.append((number, part, 0 if self.fill else local.ctypes.data, local.nbytes))
        return held, memory

    def send(self, rank: int) -> None:
        mail = self.saves[rank].mail
        for number, (peer, nbytes) in enumerate(mail.outgoing()):
            self.queues[rank, peer].put(ctypes.string_at(mail.pack(number), nbytes))
            mail.sent(number)

    def receive(self, rank: int) -> None:
        mail = self.saves[rank].mail
        for number, (peer, nbytes) in enumerate(mail.incoming()):
            address = mail.admit(number)
            ctypes.memmove(address, self.queues[peer, rank].get(timeout=LONG), nbytes)
            mail.arrived(number)

    def prepare(self, rank: int) -> None:
        share, spreads = self.share()
        held, memory = self.held(rank, spreads)

        def fill(index, start, address, nbytes):
            ctypes.memmove(address, memory[index].ctypes.data + start, nbytes)

        self.saves[rank] = _core.RankSave(share, rank, held, fill if self.fill else None, self.options)
        self.memory = [*getattr(self, "memory", []), memory]

    def join(self, rank: int) -> None:
        if rank == 0:
            self.name = self.saves[0].create(os.fspath(self.path))
        self.barrier.wait()
        if rank > 0:
            self.saves[rank].join(os.fspath(self.path), self.name)
        self.barrier.wait()

    def write(self, rank: int) -> None:
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(self.send, rank), pool.submit(self.receive, rank)]
            self.reports[rank] = self.saves[rank].write(None)
            for one in both:
                one.result(LONG)
        self.pieces[rank] = self.saves[rank].pieces()

    def each(self, step: Callable[[int], None]) -> None:
        """Run a step on all ranks at the same time."""
        with ThreadPoolExecutor(self.ranks) as pool:
            for one in [pool.submit(step, rank) for rank in range(self.ranks)]:
                one.result(LONG)

    def commit(self, pieces: bytes | None = None, per_rank: str | None = None) -> Any:
        pieces = b"".join(self.pieces) if pieces is None else pieces
        metadata = '[["dict",1],"step",7]'
        return self.saves[0].commit(pieces, self.structure(), metadata, per_rank, self.reports[0], None)

    def structure(self) -> str:
        tokens: list[Any] = [["dict", len(self.state)]]
        for number, name in enumerate(self.state):
            tokens += [name, ["array", number]]
        return json.dumps(tokens)

    def close(self, *, committed: bool = False) -> None:
        for save in self.saves:
            if save is not None:
                save.close(committed=committed)

    def run(self) -> Any:
        try:
            for rank in range(self.ranks):
                self.prepare(rank)
            for step in (self.join, self.write):
                self.each(step)
            report = self.commit()
        finally:
            self.close()
        return report


def sums(path: Path) -> dict[str, str]:
    """The SHA-256 of each shard and of the index."""
    files = [file for file in path.iterdir() if file.name != "fastckpt.json"]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 KiB: a state of a few MB has many."""
    monkeypatch.setenv("FASTCKPT_BLOCK_SIZE", str(1 << 16))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_files_are_those_of_one_process(tmp_path, layout):
    job = Job(layout, tmp_path / "many")
    report = job.run()
    one = fastckpt.save(job.state, tmp_path / "one", shard_size=1_000_000)
    assert len(sums(tmp_path / "one")) > 2
    assert sums(tmp_path / "many") == sums(tmp_path / "one")
    manifests = [json.loads((tmp_path / name / "fastckpt.json").read_bytes()) for name in ("many", "one")]
    for entry in ("shards", "tensors", "structure", "block_size"):
        assert manifests[0][entry] == manifests[1][entry]
    assert not fastckpt.verify(tmp_path / "many").damage
    assert report["bytes"] == one.bytes == sum(report["bytes"] for report in job.reports)
    # What is sent is received, and all that is written was allocated once.
    assert sum(report["sent"] for report in job.reports) == sum(report["received"] for report in job.reports)
    loaded = fastckpt.load(tmp_path / "many")
    assert all(np.array_equal(loaded[name], array) for name, array in job.state.items())
    assert {path.name for path in tmp_path.iterdir()} == {"many", "one"}
