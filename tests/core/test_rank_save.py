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
from fastckpt._portable import reader as portable
from harness.spreads import LAYOUTS, LONG, Spread, arrays, queues, receive, send

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGE, RESIDUE = 4096, 64


def congruent(array: np.ndarray) -> np.ndarray:
    """A copy at the place in a page where the data of a shard begins, in huge pages if the machine has them."""
    memory = np.empty(array.nbytes + 2 * PAGE, np.uint8)
    begin = (RESIDUE - memory.ctypes.data) % PAGE
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


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
        self.memory: list[Any] = []
        self.filled: list[int] = []
        self.broken: set[int] = set()
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
                local = congruent(array[np.ix_(*indices)] if indices else array)
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

        def fill(ranges):
            self.filled.append(rank)
            if rank in self.broken:
                raise LookupError(f"rank {rank} cannot copy")
            for index, start, address, nbytes in ranges:
                ctypes.memmove(address, memory[index].ctypes.data + start, nbytes)

        self.saves[rank] = _core.RankSave(share, rank, held, fill if self.fill else None, self.options)
        self.memory.append(memory)

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

    def written(self) -> Job:
        """Let all ranks write."""
        for rank in range(self.ranks):
            self.prepare(rank)
        for step in (self.join, self.write):
            self.each(step)
        return self

    def run(self) -> Any:
        try:
            report = self.written().commit()
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
    assert all(tensor["crc64xz"] for tensor in manifests[1]["tensors"])
    for entry in ("shards", "tensors", "structure", "block_size"):
        assert manifests[0][entry] == manifests[1][entry]
    assert not fastckpt.verify(tmp_path / "many").damage
    assert report["bytes"] == one.bytes == sum(report["bytes"] for report in job.reports)
    # What is sent is received, and all that is written was allocated once.
    assert sum(report["sent"] for report in job.reports) == sum(report["received"] for report in job.reports)
    loaded = fastckpt.load(tmp_path / "many")
    assert all(np.array_equal(loaded[name], array) for name, array in job.state.items())
    assert {path.name for path in tmp_path.iterdir()} == {"many", "one"}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", ["rows of 3", "rows and columns"])
@pytest.mark.parametrize("io", ["uring", "threads", "buffered"])
def test_every_engine_writes_them_without_a_copy_where_it_can(tmp_path, monkeypatch, io, layout):
    monkeypatch.setenv("FASTCKPT_ZERO_COPY", "1")
    job = Job(layout, tmp_path / "many", io=io)
    job.run()
    fastckpt.save(job.state, tmp_path / "one", shard_size=1_000_000)
    assert sums(tmp_path / "many") == sums(tmp_path / "one")
    probe = fastckpt.probe(tmp_path, io=io)
    if io != "buffered" and probe.files.direct_used and layout == "rows of 3":
        copied = sum(report["copied"] for report in job.reports)
        assert 0 < copied < 0.7 * sum(report["bytes"] for report in job.reports)
        assert all(report["blocks"]["zero-copy"] for report in job.reports)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", ["rows of 3", "columns of 4", "strided columns"])
def test_memory_elsewhere_is_copied_by_the_caller(tmp_path, layout):
    job = Job(layout, tmp_path / "many", fill=True)
    job.run()
    assert set(job.filled) == set(range(job.ranks))
    fastckpt.save(job.state, tmp_path / "one", shard_size=1_000_000)
    assert sums(tmp_path / "many") == sums(tmp_path / "one")


@pytest.mark.usefixtures("small_blocks")
def test_an_exception_of_the_caller_ends_the_save_and_is_raised(tmp_path):
    job = Job("columns of 4", tmp_path / "many", fill=True)
    job.broken = {1}
    for rank in range(job.ranks):
        job.prepare(rank)
    job.each(job.join)
    mail = job.saves[1].mail
    for step in (lambda: job.saves[1].write(None), lambda: mail.pack(0)):
        with ThreadPoolExecutor(1) as pool:
            # The first rank sends what it has; without it the second one would wait.
            pool.submit(job.send, 0)
            with pytest.raises((LookupError, RuntimeError), match="rank 1 cannot copy"):
                step()
            job.saves[0].mail.stop("it is over")
    assert 1 in job.filled
    with pytest.raises(RuntimeError, match="has not written"):
        job.saves[1].pieces()
    job.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_blocks")
def test_what_each_rank_has_for_itself_is_in_the_manifest(tmp_path):
    job = Job("copies of 4", tmp_path / "many", files=[("config.json", b"{}")])
    per_rank = '[["list",2],["tensor",0],7]'
    job.written().commit(per_rank=per_rank)
    job.close(committed=True)
    reader = _core.Reader(os.fspath(tmp_path / "many"))
    assert reader.per_rank() == portable.Reader(os.fspath(tmp_path / "many")).per_rank() == per_rank
    assert (tmp_path / "many" / "config.json").read_bytes() == b"{}"
    fastckpt.save({}, tmp_path / "one")
    assert _core.Reader(os.fspath(tmp_path / "one")).per_rank() is None
    assert portable.Reader(os.fspath(tmp_path / "one")).per_rank() is None


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda pieces: b"".join(pieces[1:]), "no rank has written"),
        (lambda pieces: b"".join([*pieces, pieces[0]]), "was written twice"),
        (lambda pieces: b"".join(pieces)[:-1], "cut off"),
        (lambda _: b"", "no rank has written"),
    ],
    ids=["a rank is missing", "one twice", "cut", "none"],
)
def test_nothing_is_committed_unless_all_bytes_are_written(tmp_path, change, why):
    job = Job("rows of 3", tmp_path / "many").written()
    with pytest.raises(ValueError, match=why):
        job.commit(change(job.pieces))
    job.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_blocks")
def test_checksums_are_merged_on_their_way(tmp_path):
    job = Job("rows and columns", tmp_path / "many").written()
    share, _ = job.share()
    first, second = share.merge(job.pieces[:2]), share.merge(job.pieces[2:])
    merged = share.merge([second, first])
    assert len(merged) < sum(map(len, job.pieces))
    with pytest.raises(ValueError, match="written twice"):
        share.merge([merged, job.pieces[3]])
    job.commit(merged)
    job.close(committed=True)
    assert not fastckpt.verify(tmp_path / "many").damage


def test_a_rank_that_does_not_see_the_workspace_says_so(tmp_path):
    job = Job("copies of 4", tmp_path / "here" / "many")
    job.prepare(0)
    job.prepare(1)
    name = job.saves[0].create(os.fspath(job.path))
    (tmp_path / "there").mkdir()
    with pytest.raises(FileNotFoundError, match=r"cannot join .*there") as caught:
        job.saves[1].join(os.fspath(tmp_path / "there" / "many"), name)
    assert caught.value.filename == os.fspath(tmp_path / "there" / name)
    job.close()
    assert not list((tmp_path / "here").iterdir())


def test_memory_that_does_not_fit_is_refused(tmp_path):
    job = Job("rows of 3", tmp_path / "many")
    share, spreads = job.share()
    held, memory = job.held(1, spreads)
    tensor, part, address, nbytes = held[0]
    for wrong, why in [
        ([(tensor, part, address, nbytes - 1), *held[1:]], "its memory has"),
        ([(tensor, part, 0, nbytes), *held[1:]], "needs a callback"),
        ([*held, (tensor, 1, address, nbytes)], "has no part 1"),
        (held[1:], "part 0 of tensor 0"),
    ]:
        with pytest.raises(ValueError, match=why):
            _core.RankSave(share, 1, wrong, None, job.options)
    with pytest.raises(ValueError, match="rank 3 has no part"):
        _core.RankSave(share, 3, held, None, job.options)
    assert memory


def test_a_share_that_does_not_fit_is_refused(tmp_path):
    options = _core.SaveOptions(shard_size=1_000_000)
    tensor = ("w", "U8", [10, 4], None, [0])
    nobody = _core.Spread.boxes([(0, [(0, 10), (0, 3)])])
    share = _core.Share.to_save([tensor], [nobody], 2, options)
    with pytest.raises(ValueError, match="`w`: no rank has"):
        _core.RankSave(share, 0, [], None, options)
    with pytest.raises(ValueError, match="`w`: no rank has"):
        share.figures(1, load=False)
    for make, why in [
        (lambda: _core.Spread.mesh([0, 1], [2], [("partial", 0, 0)]), "no placement `partial`"),
        (lambda: _core.Share.to_save([tensor], [_core.Spread.ranks([2])], 2, options), "no rank 2"),
        (lambda: _core.Share.to_save([tensor], [], 2, options), "`w`"),
        (lambda: _core.Share.to_save([("w", "U7", [1], None, [0])], [nobody], 2, options), "no dtype `U7`"),
    ]:
        with pytest.raises(ValueError, match=why):
            make()
    fastckpt.save({"w": np.zeros(3)}, tmp_path / "c")
    reader = _core.Reader(os.fspath(tmp_path / "c"))
    to_load = _core.Share.to_load(reader, [(0, [0])], [_core.Spread.all()], 2)
    with pytest.raises(ValueError, match="made to save"):
        _core.RankSave(to_load, 0, [], None, options)
    with pytest.raises(IndexError, match="no tensor 1"):
        _core.Share.to_load(reader, [(1, [0])], [_core.Spread.all()], 2)


@pytest.mark.usefixtures("small_blocks")
def test_figures_say_what_the_ranks_do(tmp_path):
    job = Job("columns of 4", tmp_path / "many")
    job.run()
    share, _ = job.share()
    figures = [share.figures(rank, load=False) for rank in range(4)]
    for rank, (figure, report) in enumerate(zip(figures, job.reports, strict=True)):
        assert (figure["bytes_sent"], figure["bytes_received"]) == (report["sent"], report["received"])
        assert figure["messages_sent"] == len(job.saves[rank].mail.outgoing())
        assert figure["messages_received"] == len(job.saves[rank].mail.incoming())
    files = sum(file.stat().st_size for file in (tmp_path / "many").rglob("*.safetensors"))
    assert sum(figure["bytes"] for figure in figures) == files


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("end", ["close", "stop"])
def test_a_rank_that_waits_for_others_can_be_stopped(tmp_path, end):
    job = Job("columns of 4", tmp_path / "many")
    for rank in range(4):
        job.prepare(rank)
    job.each(job.join)
    waiting = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(job.saves[2].write, lambda _done, _total: waiting.set())
        assert waiting.wait(LONG)
        if end == "close":
            job.saves[2].close()
        else:
            job.saves[2].mail.stop("rank 3 has failed")
        with pytest.raises(RuntimeError if end == "stop" else (RuntimeError, KeyboardInterrupt)) as caught:
            written.result(LONG)
    if end == "stop":
        assert str(caught.value) == "the exchange with other ranks was stopped: rank 3 has failed"
    job.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_blocks")
def test_an_exception_of_the_tick_stops_a_rank(tmp_path):
    def tick(done, total):
        assert done <= total
        raise LookupError("enough")

    job = Job("columns of 4", tmp_path / "many")
    job.prepare(0)
    job.saves[0].create(os.fspath(job.path))
    with pytest.raises(LookupError, match="enough"):
        job.saves[0].write(tick)
    job.close()
    assert not list(tmp_path.iterdir())


def test_texts_are_checked_before_anything_is_written(tmp_path):
    job = Job("copies of 4", tmp_path / "many")
    job.prepare(0)
    job.saves[0].check("[null]", "[null]", None)
    for texts, why in [
        (("1", "[]", None), "structure"),
        (("[]", "{}", None), "metadata"),
        (("[]", "[]", "7"), "per_rank"),
    ]:
        with pytest.raises(ValueError, match=why):
            job.saves[0].check(*texts)
    job.close()
