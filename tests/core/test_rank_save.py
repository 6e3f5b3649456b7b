"""The save of many ranks, in one process: threads stand for ranks, and queues for the network between them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import fastckpt
from fastckpt import _core
from harness.spreads import LAYOUTS, LONG, Spread, arrays, queues, receive, send

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STRUCTURE = "[null]"


class Job:
    """A job of some ranks that saves one state."""

    def __init__(self, layout: str, path: Path, *, fill: bool = False, **options: Any) -> None:
        self.ranks, self.spread = LAYOUTS[layout]
        self.path, self.fill = path, fill
        self.options = _core.SaveOptions(shard_size=1_000_000, **options)
        self.state = arrays()
        self.queues = queues(self.ranks)
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
        send(self.saves[rank].mail, rank, self.queues)

    def receive(self, rank: int) -> None:
        receive(self.saves[rank].mail, rank, self.queues)

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
