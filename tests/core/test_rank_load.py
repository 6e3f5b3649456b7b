"""The load of many ranks, in one process: threads stand for ranks, and queues for the network between them."""

from __future__ import annotations

import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import fastckpt
from fastckpt import CorruptCheckpointError, ReplacedCheckpointError, _core
from fastckpt._portable import reader as portable
from harness.same import same
from harness.spreads import LAYOUTS, LONG, ROWS, Spread, arrays, mesh, queues, receive, send, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

BLOCK = 1 << 16


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint in blocks of 64 KiB, so that a state of a few MB has many, and its arrays."""
    path, state = tmp_path_factory.mktemp("ranks") / "c", arrays()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCKPT_BLOCK_SIZE", str(BLOCK))
        fastckpt.save(state, path, shard_size=1_000_000)
    return path, state


class Job:
    """A job of some ranks that loads a checkpoint.

    Args:
        path: the checkpoint.
        state: its arrays.
        layout: the number of ranks, and how a tensor of a shape is spread over them.
        memory: makes the memory of a part of a shape and dtype.
        drain: whether parts go through a callback.
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
        #: By rank: what it is to have of each tensor, and its memory for it.
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
        """The report of each rank, or its error."""
        outcomes: list[Any] = [None] * self.ranks
        lock = threading.Lock()

        def ended(error: BaseException) -> None:
            # As the protocol does it: the failure of one rank ends the exchange of all.
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
        """All parts are what was saved."""
        for rank, parts in enumerate(self.parts):
            for number, (expected, local) in enumerate(parts):
                assert np.array_equal(expected, local), (rank, number)
                assert same(np.ascontiguousarray(expected), np.ascontiguousarray(local))


def transposed(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Memory in which the first dimension changes fastest, with gaps, and the last one goes backwards."""
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
    job = Job(path, state, LAYOUTS[layout], memory=memory, drain=kind == "callback", verify=kind != "unverified")
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
        # What nobody wants is not read, and what somebody wants is read once.
        assert sum(report["storage"] for report in reports) == total


def test_it_finds_the_damage_that_another_rank_wants(tmp_path, saved):
    """In a block half of which one rank wants, and half another: the one that reads it raises, all others stop."""
    path = tmp_path / "c"
    shutil.copytree(saved[0], path)
    name, array = "long", saved[1]["long"]
    reader = _core.Reader(os.fspath(path))
    numbers = {tensor.name: number for number, tensor in enumerate(reader.tensors())}
    stored = reader.tensors()[numbers[name]]
    file = path / reader.shards()[stored.shard].file
    sound = file.read_bytes()
    split = 257 * array[0].nbytes  # where the rows of rank 0 end
    readers = set()
    for at in (split - 1, split):
        content = bytearray(sound)
        content[stored.offset + at] ^= 1
        file.write_bytes(content)
        job = Job(path, saved[1], (2, lambda _: mesh([2], ROWS)), names=[name])
        outcomes = job.run()
        failed = [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, CorruptCheckpointError)]
        assert len(failed) == 1
        readers.add(failed[0])
        assert f"tensor `{name}`" in str(outcomes[failed[0]])
        other = outcomes[1 - failed[0]]
        assert isinstance(other, dict) or "another rank failed: corrupt" in str(other)
    # It is one block, which one rank reads.
    assert (stored.offset + split - 1) // BLOCK == (stored.offset + split) // BLOCK
    assert len(readers) == 1
    # Without verification nobody notices.
    job = Job(path, saved[1], (2, lambda _: mesh([2], ROWS)), names=[name], verify=False)
    assert all(isinstance(outcome, dict) for outcome in job.run())


def test_one_rank_alone_does_what_a_plain_read_does(saved):
    path, state = saved
    plain, memory = [], [np.zeros(array.shape, array.dtype) for array in state.values()]
    for number, array in enumerate(memory):
        plain.append(_core.ReadRequest(number, array.ctypes.data, array.nbytes))
    reader = _core.Reader(os.fspath(path))
    expected = reader.read(plain, verify=True, io="buffered", threads=2, drain=None, tick=None)
    job = Job(path, state, (1, lambda _: whole()), io="buffered")
    assert job.loads[0].mail.outgoing() == job.loads[0].mail.incoming() == []
    (report,) = job.run()
    job.check()
    assert report["storage"] == report["bytes"]
    assert report["peers"] == report["sent"] == 0
    for same_for_both in ("bytes", "blocks", "paths", "shards", "engine", "copied"):
        assert report[same_for_both] == expected[same_for_both], same_for_both
    assert list(report["phases"]) == list(expected["phases"])


def test_an_interrupt_ends_a_read_that_waits_for_others(saved):
    """Nobody sends anything."""
    path, state = saved
    job = Job(path, state, LAYOUTS["columns of 4"])
    seen = []

    def tick(done, total):
        seen.append((done, total))
        raise KeyboardInterrupt("enough")

    with pytest.raises(KeyboardInterrupt, match="enough"):
        job.loads[1].read(tick)
    with pytest.raises(RuntimeError, match="exchange with other ranks was stopped"):
        job.loads[1].mail.admit(0)
    assert all(0 <= done <= total for done, total in seen)
    with pytest.raises(RuntimeError, match="read before"):
        job.loads[1].read(None)


def test_an_error_of_a_callback_ends_the_read(saved):
    path, state = saved
    job = Job(path, state, LAYOUTS["columns of 4"], drain=True)

    def fail(*_):
        raise ZeroDivisionError("in a callback")

    requests = [(job.stored[name], 0, 0, part[0].nbytes, None) for name, part in zip(state, job.parts[2], strict=True)]
    job.loads[2] = _core.RankLoad(job.share, 2, job.reader, requests, fail, verify=True, io="auto", threads=None)
    outcomes = job.run()
    assert isinstance(outcomes[2], ZeroDivisionError)


def test_a_closed_load_reads_nothing(saved):
    job = Job(*saved, LAYOUTS["rows of 2"])
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
def test_memory_that_does_not_fit_is_refused(saved, change, error):
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
        # Only its beginning is read again, which has the checksum of the rest.
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
    """Each tensor is spread in another way, some in two ways at once, and some are wanted by nobody."""
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
    job = Job(path, state, (ranks, draw), names=names, **kind)
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
    """Tensors of several blocks of 4 MiB, which ranks cut elsewhere, and some small ones."""
    path, random_bytes = tmp_path_factory.mktemp("apart") / "c", np.random.default_rng(0)
    shapes = {"a": (3001, 1000), "b": (1500, 1003), "c": (7, 11), "d": (2, 100_000)}
    state = {name: random_bytes.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    fastckpt.save(state, path, shard_size=15_000_000)
    return path, state


BY_ROWS = [(ranks, lambda _, ranks=ranks: mesh([ranks], ("shard", 0, 0))) for ranks in (2, 3, 4)]


@pytest.mark.parametrize("layout", BY_ROWS, ids=["2", "3", "4"])
def test_ranks_that_share_blocks_read_their_parts_and_send_checksums(large, layout):
    path, state = large
    job = Job(path, state, layout, apart=True)
    outcomes = job.run()
    job.check()
    total = sum(array.nbytes for array in state.values())
    assert sum(outcome["storage"] for outcome in outcomes) == total
    # What is short still travels: the rows of the small tensors.
    assert sum(outcome["peers"] for outcome in outcomes) <= state["c"].nbytes + state["d"].nbytes
    whole = Job(path, state, layout)
    assert sum(outcome["peers"] for outcome in whole.run()) > 2_000_000
    pieces = [outcome["pieces"] for outcome in outcomes]
    assert all(pieces)
    job.share.compare(job.reader, job.share.merge(pieces))
    with pytest.raises(ValueError, match="read in part"):
        job.share.compare(job.reader, job.share.merge(pieces[1:]))


#: Shapes without bytes, and of few rows: ranks have some of them whole, in part or not at all.
EMPTY = [(0,), (0, 4), (4, 0), (0, 0), (2, 0, 3), (0, 1 << 20)]
UNEVEN = [(1, 7), (2, 5), (3, 1), (4, 3), (5, 2), (7, 1), (1, 300_001)]
#: Ranks share blocks of these.
SHARED = [(3, 200_003), (5, 90_001), (8, 100_003), (235_611, 2)]


@pytest.mark.parametrize("seed", range(12))
def test_drawn_empty_and_uneven_tensors(tmp_path, seed):
    """Of as many ranks as a tensor has rows, and of fewer and more; what begins where an empty tensor lies is found."""
    dice = random.Random(seed)
    drawn = dice.sample(EMPTY, dice.randint(1, len(EMPTY))) + dice.sample(UNEVEN, dice.randint(1, len(UNEVEN)))
    drawn.append(dice.choice(SHARED))
    dice.shuffle(drawn)
    state = {f"{dice.choice('amz')}{at}": numbered(shape, at) for at, shape in enumerate(drawn)}
    fastckpt.save(state, tmp_path / "c", shard_size=dice.choice([1, 300_000, 5_000_000]))
    for ranks in (2, 3, 5, 8):

        def draw(shape, ranks=ranks):
            rows, columns = mesh([ranks], ("shard", 0, 0)), mesh([ranks], ("shard", 1, 0))
            return dice.choice([rows, rows, columns, whole()] if len(shape) > 1 else [rows, rows, whole()])

        job = Job(tmp_path / "c", state, (ranks, draw), apart=True, drain=dice.choice([False, True]))
        outcomes = job.run()
        assert not [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        job.check()
        job.share.compare(job.reader, job.share.merge([outcome["pieces"] for outcome in outcomes]))


def numbered(shape, number):
    """An array of int16 that no other number has."""
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
        job = Job(copy, state, BY_ROWS[0], apart=True)
        pieces = job.share.merge([outcome["pieces"] for outcome in job.run()])
        with pytest.raises(CorruptCheckpointError, match=r"tensor `a`.*checksum is"):
            job.share.compare(job.reader, pieces)


def test_what_is_not_verified_has_no_checksums(large):
    path, state = large
    job = Job(path, state, BY_ROWS[0], apart=True, verify=False)
    assert [outcome["pieces"] for outcome in job.run()] == [b"", b""]
    job.check()
