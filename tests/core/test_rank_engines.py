"""Saves and loads of many ranks in one process: ranks are threads, and queues are the network between them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import fastckpt
from fastckpt import CorruptCheckpointError, _core
from fastckpt._portable import reader as portable
from fastckpt.exceptions import ReplacedCheckpointError
from harness.spreads import LAYOUTS, LONG, ROWS, Spread, arrays, mesh, queues, receive, send, whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGE, RESIDUE = 4096, 64


def congruent(array: np.ndarray) -> np.ndarray:
    """A copy of the array that is congruent with the data of a shard, in huge pages if the machine has them."""
    memory = np.empty(array.nbytes + 2 * PAGE, np.uint8)
    begin = (RESIDUE - memory.ctypes.data) % PAGE
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class SaveJob:
    """A job whose ranks save one state."""

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
            self.saves[rank].allocate(None)
        self.barrier.wait()

    def write(self, rank: int) -> None:
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(self.send, rank), pool.submit(self.receive, rank)]
            self.reports[rank] = self.saves[rank].write(None)
            for one in both:
                one.result(LONG)
        self.pieces[rank] = self.saves[rank].pieces()

    def each(self, step: Callable[[int], None]) -> None:
        """Run a step on all ranks concurrently."""
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

    def written(self) -> SaveJob:
        """Make all ranks write."""
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
    """Set blocks of 64 KiB, so that a state of a few MB has many blocks."""
    monkeypatch.setenv("FASTCKPT_BLOCK_SIZE", str(1 << 16))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_files_are_those_of_one_process(tmp_path, layout):
    job = SaveJob(layout, tmp_path / "many")
    report = job.run()
    one = fastckpt.save(job.state, tmp_path / "one", files=fastckpt.Files(shard_size=1_000_000))
    assert len(sums(tmp_path / "one")) > 2
    assert sums(tmp_path / "many") == sums(tmp_path / "one")
    manifests = [json.loads((tmp_path / name / "fastckpt.json").read_bytes()) for name in ("many", "one")]
    assert all(tensor["crc64xz"] for tensor in manifests[1]["tensors"])
    for entry in ("shards", "tensors", "structure", "block_size"):
        assert manifests[0][entry] == manifests[1][entry]
    assert not fastckpt.verify(tmp_path / "many").damage
    assert report["bytes"] == one.bytes == sum(report["bytes"] for report in job.reports)
    # Ranks receive all bytes that are sent, and write all bytes that are allocated.
    assert sum(report["sent"] for report in job.reports) == sum(report["received"] for report in job.reports)
    loaded = fastckpt.load(tmp_path / "many")
    assert all(np.array_equal(loaded[name], array) for name, array in job.state.items())
    assert {path.name for path in tmp_path.iterdir()} == {"many", "one"}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", ["rows of 3", "rows and columns"])
@pytest.mark.parametrize("io", ["uring", "threads", "buffered"])
def test_every_engine_writes_them_without_a_copy_where_it_can(tmp_path, monkeypatch, io, layout):
    monkeypatch.setenv("FASTCKPT_ZERO_COPY", "1")
    job = SaveJob(layout, tmp_path / "many", io=io)
    job.run()
    fastckpt.save(job.state, tmp_path / "one", files=fastckpt.Files(shard_size=1_000_000))
    assert sums(tmp_path / "many") == sums(tmp_path / "one")
    probe = fastckpt.tools.probe(tmp_path, io=io)
    if io != "buffered" and probe.files.direct_used and layout == "rows of 3":
        copied = sum(report["copied"] for report in job.reports)
        assert 0 < copied < 0.7 * sum(report["bytes"] for report in job.reports)
        assert all(report["blocks"]["zero-copy"] for report in job.reports)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("layout", ["rows of 3", "columns of 4", "strided columns"])
def test_memory_elsewhere_is_copied_by_the_caller(tmp_path, layout):
    job = SaveJob(layout, tmp_path / "many", fill=True)
    job.run()
    assert set(job.filled) == set(range(job.ranks))
    fastckpt.save(job.state, tmp_path / "one", files=fastckpt.Files(shard_size=1_000_000))
    assert sums(tmp_path / "many") == sums(tmp_path / "one")


@pytest.mark.usefixtures("small_blocks")
def test_an_exception_of_the_caller_ends_the_save_and_is_raised(tmp_path):
    job = SaveJob("columns of 4", tmp_path / "many", fill=True)
    job.broken = {1}
    for rank in range(job.ranks):
        job.prepare(rank)
    job.each(job.join)
    mail = job.saves[1].mail
    for step in (lambda: job.saves[1].write(None), lambda: mail.pack(0)):
        with ThreadPoolExecutor(1) as pool:
            # Rank 0 sends its bytes, without which rank 1 would wait.
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
    job = SaveJob("copies of 4", tmp_path / "many", files=[("config.json", b"{}")])
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
    job = SaveJob("rows of 3", tmp_path / "many").written()
    with pytest.raises(ValueError, match=why):
        job.commit(change(job.pieces))
    job.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_blocks")
def test_checksums_are_merged_on_their_way(tmp_path):
    job = SaveJob("rows and columns", tmp_path / "many").written()
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
    job = SaveJob("copies of 4", tmp_path / "here" / "many")
    job.prepare(0)
    job.prepare(1)
    name = job.saves[0].create(os.fspath(job.path))
    (tmp_path / "there").mkdir()
    with pytest.raises(FileNotFoundError, match=r"cannot join .*there") as caught:
        job.saves[1].join(os.fspath(tmp_path / "there" / "many"), name)
    assert caught.value.filename == os.fspath(tmp_path / "there" / name)
    job.close()
    assert not list((tmp_path / "here").iterdir())


def test_memory_that_does_not_fit_a_save_is_refused(tmp_path):
    job = SaveJob("rows of 3", tmp_path / "many")
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
    job = SaveJob("columns of 4", tmp_path / "many")
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
    job = SaveJob("columns of 4", tmp_path / "many")
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

    job = SaveJob("columns of 4", tmp_path / "many")
    job.each(job.prepare)
    job.each(job.join)
    with pytest.raises(LookupError, match="enough"):
        job.saves[0].write(tick)
    job.close()
    assert not list(tmp_path.iterdir())


def test_texts_are_checked_before_anything_is_written(tmp_path):
    job = SaveJob("copies of 4", tmp_path / "many")
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


# --- loads ------------------------------------------------------------------------------------------------------------


BLOCK = 1 << 16


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint in blocks of 64 KiB, of which a state of a few MB has many, and its arrays."""
    path, state = tmp_path_factory.mktemp("ranks") / "c", arrays()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCKPT_BLOCK_SIZE", str(BLOCK))
        fastckpt.save(state, path, files=fastckpt.Files(shard_size=1_000_000))
    return path, state


class LoadJob:
    """A job whose ranks load a checkpoint.

    Args:
        path: the checkpoint.
        state: its arrays.
        layout: the number of ranks, and the spread of a tensor of a shape over them.
        memory: a function of a shape and dtype that makes the memory of a part.
        drain: whether a callback gets the parts.
    """

    def __init__(
        self,
        path: Path,
        state: dict[str, np.ndarray],
        layout: tuple[int, Callable[[tuple[int, ...]], Spread]],
        *,
        memory: Callable[[list[int], np.dtype], np.ndarray] = np.zeros,
        drain: bool = False,
        names: Iterable[str] | None = None,
        verify: bool = True,
        io: str = "auto",
        apart: bool = False,
    ) -> None:
        self.ranks, spread = layout
        self.between = queues(self.ranks)
        self.reader = _core.Reader(os.fspath(path))
        self.stored = {tensor.name: number for number, tensor in enumerate(self.reader.tensors())}
        wanted = list(state if names is None else names)
        spreads = [spread(state[name].shape) for name in wanted]
        numbers = [(self.stored[name], [at]) for at, name in enumerate(wanted)]
        self.share = _core.Share.to_load(self.reader, numbers, [one.core for one in spreads], self.ranks, apart=apart)
        #: By rank: the expected part of each tensor, and its memory.
        self.parts: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self.loads: list[_core.RankLoad] = []
        for rank in range(self.ranks):
            parts, requests = [], []
            for name, one in zip(wanted, spreads, strict=True):
                for part, indices in enumerate(one.parts(rank, state[name].shape)):
                    expected = state[name][np.ix_(*indices)] if indices else state[name]
                    local = memory(list(expected.shape), expected.dtype)
                    parts.append((expected, local))
                    strides = None if local.flags.c_contiguous else local.strides
                    low = local.ctypes.data + sum(
                        min(0, (size - 1) * step) for size, step in zip(local.shape, local.strides, strict=True)
                    )
                    reach = 1 + sum(
                        (size - 1) * abs(step) for size, step in zip(local.shape, local.strides, strict=True)
                    )
                    capacity = local.nbytes if strides is None else reach - 1 + local.itemsize
                    address = 0 if drain else low
                    requests.append((self.stored[name], part, address, capacity, None if drain else strides))

            def take(ranges, parts=parts):
                for index, start, address, nbytes in ranges:
                    _, local = parts[index]
                    assert start + nbytes <= local.nbytes
                    view = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * nbytes).from_address(address))
                    local.reshape(-1).view(np.uint8)[start : start + nbytes] = view

            load = _core.RankLoad(
                self.share, rank, self.reader, requests, take if drain else None, verify=verify, io=io, threads=2
            )
            self.parts.append(parts)
            self.loads.append(load)

    def run(self, tick: Callable[[int, int], None] | None = None) -> list[Any]:
        """Load on all ranks; return each rank's report or error."""
        outcomes: list[Any] = [None] * self.ranks
        lock = threading.Lock()

        def ended(error: BaseException) -> None:
            # As in the protocol, the failure of one rank ends the exchange on all ranks.
            with lock:
                for load in self.loads:
                    load.mail.stop(f"another rank failed: {error}")
                for between in self.between.values():
                    between.put(None)

        def one(rank: int) -> None:
            load = self.loads[rank]
            with ThreadPoolExecutor(2) as pool:
                moving = [pool.submit(move, load.mail, rank, self.between) for move in (send, receive)]
                try:
                    outcomes[rank] = load.read(tick)
                except BaseException as error:  # noqa: BLE001 - looked at by the test
                    outcomes[rank] = error
                    ended(error)
                for thread in moving:
                    error = thread.exception(LONG)
                    if error is not None and not isinstance(outcomes[rank], BaseException):
                        outcomes[rank] = error

        with ThreadPoolExecutor(self.ranks) as pool:
            for rank in [pool.submit(one, rank) for rank in range(self.ranks)]:
                rank.result(2 * LONG)
        for load in self.loads:
            load.close()
        return outcomes

    def check(self) -> None:
        """Check that all parts equal the saved ones."""
        for rank, parts in enumerate(self.parts):
            for number, (expected, local) in enumerate(parts):
                assert np.array_equal(expected, local), (rank, number)
                assert (expected.dtype, expected.shape) == (local.dtype, local.shape)
                assert expected.tobytes() == local.tobytes()


def transposed(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Memory in which the first dimension changes fastest, with gaps, and the last dimension runs backwards."""
    if not shape:
        return np.zeros(shape, dtype)
    sizes = [2 * size for size in reversed(shape)]
    memory = np.zeros(sizes, dtype)[tuple(slice(0, size, 2) for size in sizes)].transpose()
    return memory[..., ::-1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["contiguous", "strided", "callback", "unverified"])
def test_every_rank_gets_its_parts_and_each_byte_is_read_once(saved, layout, kind):
    path, state = saved
    memory = transposed if kind == "strided" else np.zeros
    job = LoadJob(path, state, LAYOUTS[layout], memory=memory, drain=kind == "callback", verify=kind != "unverified")
    reports = job.run()
    assert not [report for report in reports if isinstance(report, BaseException)]
    job.check()
    wanted = sum(expected.nbytes for parts in job.parts for expected, _ in parts)
    total = sum(array.nbytes for array in state.values())
    assert sum(report["bytes"] for report in reports) == wanted
    assert sum(report["storage"] for report in reports) <= 1.05 * total
    assert sum(report["sent"] for report in reports) == sum(report["peers"] for report in reports)
    for report, parts in zip(reports, job.parts, strict=True):
        assert report["bytes"] == sum(expected.nbytes for expected, _ in parts)
        assert report["tensors"] <= len(state)
    if kind != "unverified":
        # Ranks read each requested byte once, and no other bytes.
        assert sum(report["storage"] for report in reports) == total


def test_it_finds_the_damage_that_another_rank_wants(tmp_path, saved):
    """Two ranks each need half of a block: the rank that reads it raises, and all others stop."""
    path = tmp_path / "c"
    shutil.copytree(saved[0], path)
    name, array = "long", saved[1]["long"]
    reader = _core.Reader(os.fspath(path))
    numbers = {tensor.name: number for number, tensor in enumerate(reader.tensors())}
    stored = reader.tensors()[numbers[name]]
    file = path / reader.shards()[stored.shard].file
    sound = file.read_bytes()
    split = 257 * array[0].nbytes  # the end of rank 0's rows
    readers = set()
    for at in (split - 1, split):
        content = bytearray(sound)
        content[stored.offset + at] ^= 1
        file.write_bytes(content)
        job = LoadJob(path, saved[1], (2, lambda _: mesh([2], ROWS)), names=[name])
        outcomes = job.run()
        failed = [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, CorruptCheckpointError)]
        assert len(failed) == 1
        readers.add(failed[0])
        assert f"tensor `{name}`" in str(outcomes[failed[0]])
        other = outcomes[1 - failed[0]]
        assert isinstance(other, dict) or "another rank failed: corrupt" in str(other)
    # Both bytes are in one block, which one rank reads.
    assert (stored.offset + split - 1) // BLOCK == (stored.offset + split) // BLOCK
    assert len(readers) == 1
    # Without verification, a load does not detect the damage.
    job = LoadJob(path, saved[1], (2, lambda _: mesh([2], ROWS)), names=[name], verify=False)
    assert all(isinstance(outcome, dict) for outcome in job.run())


def test_one_rank_alone_does_what_a_plain_read_does(saved):
    path, state = saved
    plain, memory = [], [np.zeros(array.shape, array.dtype) for array in state.values()]
    for number, array in enumerate(memory):
        plain.append(_core.ReadRequest(number, array.ctypes.data, array.nbytes))
    reader = _core.Reader(os.fspath(path))
    expected = reader.read(plain, verify=True, io="buffered", threads=2, drain=None, tick=None)
    job = LoadJob(path, state, (1, lambda _: whole()), io="buffered")
    assert job.loads[0].mail.outgoing() == job.loads[0].mail.incoming() == []
    (report,) = job.run()
    job.check()
    assert report["storage"] == report["bytes"]
    assert report["peers"] == report["sent"] == 0
    for same_for_both in ("bytes", "blocks", "paths", "shards", "engine", "copied"):
        assert report[same_for_both] == expected[same_for_both], same_for_both
    assert list(report["phases"]) == list(expected["phases"])


def test_an_interrupt_ends_a_read_that_waits_for_others(saved):
    """Rank 1 waits, because no rank sends anything."""
    path, state = saved
    job = LoadJob(path, state, LAYOUTS["columns of 4"])
    seen = []

    def tick(done, total):
        seen.append((done, total))
        raise KeyboardInterrupt("enough")

    with pytest.raises(KeyboardInterrupt, match="enough"):
        job.loads[1].read(tick)
    with pytest.raises(RuntimeError, match="exchange with other ranks was stopped"):
        job.loads[1].mail.admit(0)
    assert all(0 <= done <= total for done, total in seen)
    with pytest.raises(RuntimeError, match="run before"):
        job.loads[1].read(None)


def test_an_error_of_a_callback_ends_the_read(saved):
    path, state = saved
    job = LoadJob(path, state, LAYOUTS["columns of 4"], drain=True)

    def fail(*_):
        raise ZeroDivisionError("in a callback")

    requests = [(job.stored[name], 0, 0, part[0].nbytes, None) for name, part in zip(state, job.parts[2], strict=True)]
    job.loads[2] = _core.RankLoad(job.share, 2, job.reader, requests, fail, verify=True, io="auto", threads=None)
    outcomes = job.run()
    assert isinstance(outcomes[2], ZeroDivisionError)


def test_a_closed_load_reads_nothing(saved):
    job = LoadJob(*saved, LAYOUTS["rows of 2"])
    for load in job.loads:
        load.close()
        load.close()
        with pytest.raises(RuntimeError, match="closed"):
            load.read(None)
        with pytest.raises(RuntimeError, match="closed"):
            load.mail.pack(0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda requests: requests[:-1], "has no memory"),
        (lambda requests: [*requests, requests[0]], "is requested twice"),
        (lambda requests: [(*requests[0][:3], requests[0][3] - 1, None), *requests[1:]], "its memory has"),
        (lambda requests: [(*requests[0][:4], [0, 4]), *requests[1:]], "overlap or interleave"),
        (lambda requests: [(*requests[0][:4], [4]), *requests[1:]], "it has 1 dimensions, but the tensor has 2"),
        (lambda requests: [(*requests[0][:2], 0, *requests[0][3:]), *requests[1:]], "needs a callback"),
        (lambda requests: [(requests[0][0], 1, *requests[0][2:]), *requests[1:]], "has no part 1"),
    ],
    ids=["missing", "twice", "too small", "overlapping", "dimensions", "no callback", "no such part"],
)
def test_memory_that_does_not_fit_a_load_is_refused(saved, change, error):
    path, state = saved
    names = ["long", "vector"]
    reader = _core.Reader(os.fspath(path))
    numbers = {tensor.name: number for number, tensor in enumerate(reader.tensors())}
    share = _core.Share.to_load(reader, [(numbers[name], [0]) for name in names], [_core.Spread.all()], 2)
    memory = [np.zeros_like(state[name]) for name in names]
    requests = [
        (numbers[name], 0, array.ctypes.data, array.nbytes, None) for name, array in zip(names, memory, strict=True)
    ]
    _core.RankLoad(share, 1, reader, requests, None, verify=True, io="auto", threads=None).close()
    with pytest.raises(ValueError, match=error):
        _core.RankLoad(share, 1, reader, change(requests), None, verify=True, io="auto", threads=None)


def test_a_manifest_is_read_by_one_and_known_to_others(saved, tmp_path):
    path = tmp_path / "c"
    shutil.copytree(saved[0], path)
    manifest = _core.Reader(os.fspath(path)).manifest()
    assert manifest == (path / "fastckpt.json").read_bytes()
    for kind in (_core.Reader, portable.Reader):
        reader = kind(os.fspath(path), manifest=manifest)
        assert len(reader.tensors()) == len(saved[1])
        assert reader.manifest() == manifest
        # Readers check only the beginning again, which has the checksum of the rest.
        (path / "fastckpt.json").write_bytes(manifest[:64])
        assert kind(os.fspath(path), manifest=manifest).info() == reader.info()
        (path / "fastckpt.json").write_bytes(manifest)
        with pytest.raises(CorruptCheckpointError):
            kind(os.fspath(path), manifest=manifest[:-1])
        with pytest.raises(FileNotFoundError):
            kind(os.fspath(tmp_path / "d"), manifest=manifest)
    fastckpt.save({"other": np.zeros(1)}, path)
    for kind in (_core.Reader, portable.Reader):
        with pytest.raises(ReplacedCheckpointError):
            kind(os.fspath(path), manifest=manifest)


def test_a_reader_whose_checkpoint_was_replaced_has_no_manifest_to_give(tmp_path):
    for kind in (_core.Reader, portable.Reader):
        fastckpt.save({"w": np.zeros(1)}, tmp_path / "c")
        reader = kind(os.fspath(tmp_path / "c"))
        fastckpt.save({"other": np.zeros(1)}, tmp_path / "c")
        with pytest.raises(ReplacedCheckpointError):
            reader.manifest()


@pytest.mark.parametrize("seed", range(12))
def test_drawn_spreads(saved, seed):
    """Tensors have different spreads, some are divided along two dimensions, and no rank requests some of them."""
    path, state = saved
    dice = random.Random(seed)
    ranks = dice.choice([2, 3, 4])
    meshes = {2: [[2]], 3: [[3]], 4: [[4], [2, 2], [4, 1]]}[ranks]

    def draw(shape):
        kinds = ["replicate", "replicate", *(["shard", "strided"] if shape else [])]
        sizes = dice.choice(meshes)
        placements = [
            (dice.choice(kinds), dice.randrange(len(shape)) if shape else 0, dice.choice([1, 2, 3])) for _ in sizes
        ]
        return dice.choice([mesh(sizes, *placements), mesh(sizes, *placements), whole(), whole([ranks - 1])])

    names = dice.sample(list(state), len(state) * 2 // 3)
    kind = dice.choice([{}, {"memory": transposed}, {"drain": True}])
    job = LoadJob(path, state, (ranks, draw), names=names, **kind)
    reports = job.run()
    assert not [report for report in reports if isinstance(report, BaseException)]
    job.check()
    total = sum(state[name].nbytes for name in names)
    assert sum(report["storage"] for report in reports) <= total
    assert sum(report["bytes"] for report in reports) == sum(
        expected.nbytes for parts in job.parts for expected, _ in parts
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Tensors of several blocks of 4 MiB, which ranks divide elsewhere, and some small tensors."""
    path, random_bytes = tmp_path_factory.mktemp("apart") / "c", np.random.default_rng(0)
    shapes = {"a": (3001, 1000), "b": (1500, 1003), "c": (7, 11), "d": (2, 100_000)}
    state = {name: random_bytes.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    fastckpt.save(state, path, files=fastckpt.Files(shard_size=15_000_000))
    return path, state


BY_ROWS = [(ranks, lambda _, ranks=ranks: mesh([ranks], ("shard", 0, 0))) for ranks in (2, 3, 4)]


@pytest.mark.parametrize("layout", BY_ROWS, ids=["2", "3", "4"])
def test_ranks_that_share_blocks_read_their_parts_and_send_checksums(large, layout):
    path, state = large
    job = LoadJob(path, state, layout, apart=True)
    outcomes = job.run()
    job.check()
    total = sum(array.nbytes for array in state.values())
    assert sum(outcome["storage"] for outcome in outcomes) == total
    # Ranks still exchange short pieces, which are the rows of the small tensors.
    assert sum(outcome["peers"] for outcome in outcomes) <= state["c"].nbytes + state["d"].nbytes
    whole = LoadJob(path, state, layout)
    assert sum(outcome["peers"] for outcome in whole.run()) > 2_000_000
    pieces = [outcome["pieces"] for outcome in outcomes]
    assert all(pieces)
    job.share.compare(job.reader, job.share.merge(pieces))
    with pytest.raises(ValueError, match="read in part"):
        job.share.compare(job.reader, job.share.merge(pieces[1:]))


#: Shapes without bytes, and shapes of few rows, of which a rank may have all, some or none.
EMPTY = [(0,), (0, 4), (4, 0), (0, 0), (2, 0, 3), (0, 1 << 20)]


UNEVEN = [(1, 7), (2, 5), (3, 1), (4, 3), (5, 2), (7, 1), (1, 300_001)]


#: Shapes of tensors whose blocks ranks share.
SHARED = [(3, 200_003), (5, 90_001), (8, 100_003), (235_611, 2)]


@pytest.mark.parametrize("seed", range(12))
def test_drawn_empty_and_uneven_tensors(tmp_path, seed):
    """Tensors load rightly with fewer rows than ranks, as many, or more, even at the offset of empty tensors."""
    dice = random.Random(seed)
    drawn = dice.sample(EMPTY, dice.randint(1, len(EMPTY))) + dice.sample(UNEVEN, dice.randint(1, len(UNEVEN)))
    drawn.append(dice.choice(SHARED))
    dice.shuffle(drawn)
    state = {f"{dice.choice('amz')}{at}": numbered(shape, at) for at, shape in enumerate(drawn)}
    fastckpt.save(state, tmp_path / "c", files=fastckpt.Files(shard_size=dice.choice([1, 300_000, 5_000_000])))
    for ranks in (2, 3, 5, 8):

        def draw(shape, ranks=ranks):
            rows, columns = mesh([ranks], ("shard", 0, 0)), mesh([ranks], ("shard", 1, 0))
            return dice.choice([rows, rows, columns, whole()] if len(shape) > 1 else [rows, rows, whole()])

        job = LoadJob(tmp_path / "c", state, (ranks, draw), apart=True, drain=dice.choice([False, True]))
        outcomes = job.run()
        assert not [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        job.check()
        job.share.compare(job.reader, job.share.merge([outcome["pieces"] for outcome in outcomes]))


def numbered(shape, number):
    """An array of int16 that differs for each number."""
    return (np.arange(np.prod(shape)) * 7 + number).astype(np.int16).reshape(shape)


def test_damage_in_a_block_that_ranks_share_is_found_when_they_compare(large, tmp_path):
    path, state = large
    copy = tmp_path / "c"
    shutil.copytree(path, copy)
    tensor = next(one for one in _core.Reader(os.fspath(path)).tensors() if one.name == "a")
    cut = tensor.offset + 1501 * 4000
    for at in (cut - 5, cut + 5):
        file = copy / _core.Reader(os.fspath(path)).shards()[tensor.shard].file
        content = bytearray((path / file.name).read_bytes())
        content[at] ^= 1
        file.write_bytes(content)
        job = LoadJob(copy, state, BY_ROWS[0], apart=True)
        pieces = job.share.merge([outcome["pieces"] for outcome in job.run()])
        with pytest.raises(CorruptCheckpointError, match=r"tensor `a`.*checksum is"):
            job.share.compare(job.reader, pieces)


def test_what_is_not_verified_has_no_checksums(large):
    path, state = large
    job = LoadJob(path, state, BY_ROWS[0], apart=True, verify=False)
    assert [outcome["pieces"] for outcome in job.run()] == [b"", b""]
    job.check()
