"""A rank is killed or stopped at any step of a save or load: all others get an error in time, the old checkpoint or the
new one is whole, and the next save works.

A rank strikes itself at a given call, so no race decides a trial. Trials spend most of their time waiting for a
timeout, so many run at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fastckpt
import fastckpt.distributed
from harness import groups, mounts, points, stillness, strace
from harness.draws import one_in
from harness.internals import process_group

TIMEOUT = 3.0
# Errors are promised within the timeout plus 5 seconds.
LIMIT = TIMEOUT + 5.0
SIZE = 3
AT_ONCE = 8
# Rows of the tensor that is divided by columns. The tall one has a block for each rank, so each rank reads one, and
# sends its columns to all others.
SMALL, TALL = 85, 2649 * SIZE


@dataclass(frozen=True)
class Trial:
    """A fault: the signal, the rank that gets it, and the place in its call."""

    where: str
    when: Any
    rank: int
    number: int
    store: Any
    match: Any = None
    nth: int = 1
    call: str = "save"

    @property
    def name(self) -> str:
        what = signal.Signals(self.number).name
        at = f"{self.when} {self.where}" + (f" {self.match}" if self.match else "") + f", call {self.nth}"
        return f"{what} of rank {self.rank} in {self.call} {at} (store {self.store})"


def whole(number: int, height: int = SMALL) -> dict[str, Any]:
    """State ``number`` in one process; ``height`` rows are divided by columns."""
    return {
        "model": {
            "rows": torch.arange(1023 * 33, dtype=torch.float32).reshape(1023, 33) + number,
            "columns": torch.arange(height * 198, dtype=torch.float64).reshape(height, 198) - number,
            "plain": torch.full((5000,), number),
        },
        "step": number,
    }


def which(path: Any, height: int = SMALL) -> int:
    """The number of the state at ``path``, after a check that it is exactly this state."""
    if not fastckpt.verify(path).ok:
        raise AssertionError(f"damaged: {fastckpt.verify(path)}")
    found = fastckpt.load(path)
    number = int(found["step"])
    for name, tensor in whole(number, height)["model"].items():
        if not torch.equal(found["model"][name], tensor):
            raise AssertionError(f"a mixture: the step is {number}, but {name} is of another step")
    return number


@functools.cache
def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _spread(number: int, height: int = SMALL) -> dict[str, Any]:
    """This rank's part of state ``number``: rows, columns (which all ranks send to all), and a plain tensor."""
    full = whole(number, height)
    mesh, mine, ranks = _mesh(), dist.get_rank(), dist.get_world_size()
    for name, dim in (("rows", 0), ("columns", 1)):
        tensor = full["model"][name]
        pieces = [*torch.chunk(tensor, ranks, dim=dim)]
        full["model"][name] = DTensor.from_local(
            pieces[mine].contiguous(), mesh, [Shard(dim)], shape=tensor.shape, stride=tensor.stride()
        )
    return full


def _options(timeout: float, engine: Any) -> dict[str, Any]:
    # One thread writes, because threads would only add to the cost of a trial's processes.
    return {"ranks": fastckpt.distributed.Ranks(timeout=timeout), "io": fastckpt.IO(engine, threads=1)}


def _save(
    path: str, number: int, timeout: float = TIMEOUT, background: bool = False, io: str = "auto", cma: str = "1"
) -> int:
    os.environ["FASTCKPT_CMA"] = cma
    state, options = _spread(number), _options(timeout, io)
    if background:
        return fastckpt.distributed.save_async(state, path, **options).result(120).ranks
    return fastckpt.distributed.save(state, path, **options).ranks


def _load(path: str, timeout: float = TIMEOUT) -> int:
    into = _spread(-1, TALL)
    # Direct I/O: if the page cache has the checkpoint, ranks send each other nothing.
    loaded = fastckpt.distributed.load(path, into=into, **_options(timeout, "threads"))
    wanted = _spread(loaded["step"], TALL)["model"]
    for name, tensor in loaded["model"].items():
        mine, other = (each.to_local() if isinstance(each, DTensor) else each for each in (tensor, wanted[name]))
        if not torch.equal(mine, other):
            raise AssertionError(f"{name} is not the tensor of step {loaded['step']}")
    return int(loaded["step"])


def told_in_time(
    group: groups.Group, trial: Trial, outcomes: list[groups.Outcome], still: stillness.Stillness
) -> list[str]:
    """Problems of the survivors' errors; ``still`` has the time for which the machine itself stood still."""
    if group.struck is None:
        return [f"the rank was not struck: {[(each.kind, each.raised) for each in outcomes]}"]
    problems = []
    for each in outcomes:
        if each.rank == trial.rank:
            wanted = "stopped" if trial.number == signal.SIGSTOP else "died"
            if each.kind != wanted:
                problems.append(f"the struck rank has {each.kind}: {each.raised}")
            continue
        if each.kind == "returned":
            continue
        if each.raised is None or "RanksError" not in each.raised.bases:
            problems.append(f"rank {each.rank} {each.kind}: {each.raised}")
            continue
        late = each.ended - group.struck
        if late > LIMIT + still.since(group.struck):
            problems.append(f"rank {each.rank} was told after {late:.1f} s: {each.raised.text}")
        # If the store dies with rank 0, the errors name the store.
        named = f"rank {trial.rank}" in each.raised.text
        if not named and not (trial.store == "rank0" and trial.rank == 0 and "the store" in each.raised.text):
            problems.append(f"rank {each.rank} is not told who it was: {each.raised.text}")
    return problems


class Others:
    """Two processes outside the trials' groups, which save after each trial; one trial at a time uses them."""

    def __init__(self, forge: groups.Forge) -> None:
        self._forge = forge
        self._free = threading.Lock()
        self._made = contextlib.ExitStack()
        self._group: groups.Group | None = None

    def save(self, path: Path) -> None:
        """Save state 2; a failed call ends the processes."""
        with self._free:
            if self._group is None:
                self._group = self._made.enter_context(self._forge.group(2))
            try:
                self._group.run(_save, str(path), 2, 60.0, timeout=120)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        self._group = None
        self._made.close()


def run(forge: groups.Forge, others: Others, base: Any, trial: Trial) -> list[str]:
    """Run one trial, and return its problems."""
    base.mkdir()
    path = base / "c"
    saves = trial.call != "load"
    height = SMALL if saves else TALL
    fastckpt.save(whole(0, height), path)
    strike = groups.Strike(trial.rank, trial.where, trial.number, trial.when, trial.match, trial.nth)
    with forge.group(SIZE, store=trial.store) as group, stillness.watched() as still:
        if saves:
            # Ranks that read each other's memory send no messages.
            cma = "0" if trial.where.endswith((".send", ".receive")) else "1"
            group.start(_save, str(path), 1, background=trial.call == "save_async", cma=cma, strike=strike)
        else:
            group.start(_load, str(path), strike=strike)
        outcomes = group.outcomes(LIMIT + 60)
        problems = told_in_time(group, trial, outcomes, still)
        if problems:
            return problems
        found = which(path, height)
        survivors = [each for each in outcomes if each.rank != trial.rank]
        if trial.number == signal.SIGSTOP:
            # The rank wakes up when all is over, and must not undo the outcome.
            group.resume(trial.rank)
            [woken] = group.outcomes(LIMIT + 60)
            if woken.kind not in ("raised", "returned"):
                return [f"the woken rank is {woken.kind}"]
            survivors.append(woken)
        if saves:
            told, found = found, which(path)
            if found != told and any(each.kind == "raised" and _is_final(each) for each in survivors):
                problems.append(f"the path had state {told} when the survivors raised, and has {found} now")
            for each in survivors:
                if each.kind == "returned" and found != 1:
                    problems.append(f"rank {each.rank} saved, but the old checkpoint is there")
                if each.kind == "raised" and _is_final(each) and found != 0:
                    problems.append(f"rank {each.rank} wrongly raised that nothing was committed: {each.raised}")
        if trial.number == signal.SIGSTOP and not problems:
            # The same processes continue.
            group.run(_save, str(path), 2, 60.0, timeout=120)
    if trial.number == signal.SIGKILL and not problems:
        others.save(path)
    if not problems and which(path) != 2:
        problems.append(f"the next save left {which(path)}")
    left = sorted(each.name for each in base.iterdir())
    if not problems and left != ["c"]:
        problems.append(f"left behind: {left}")
    return problems


def _is_final(outcome: groups.Outcome) -> bool:
    return outcome.raised is not None and "nothing was committed" in outcome.raised.text


def run_all(forge: groups.Forge, base: Any, trials: list[Trial]) -> None:
    """Run the trials, several at once, and fail with all problems."""

    def one(numbered: tuple[int, Trial]) -> str:
        number, trial = numbered
        try:
            problems = run(forge, others, base / str(number), trial)
        except Exception as error:  # noqa: BLE001 - reported with the others
            problems = [f"{type(error).__name__}: {error}"]
        return "".join(f"\n{trial.name}: {problem}" for problem in problems)

    with contextlib.closing(Others(forge)) as others, ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = [text for text in pool.map(one, enumerate(trials)) if text]
    assert not wrong, f"{len(wrong)} of {len(trials)} trials:" + "".join(wrong)


def in_turns(trials: list[Trial], number: signal.Signals) -> list[Trial]:
    """In the gate, each point gets one of the two signals: return the trials of this one."""
    step = one_in(2)
    return trials[(number == signal.SIGSTOP) % step :: step]


def save_points(rank: int) -> list[tuple[str, str, Any, int]]:
    """Every step of a save on a rank, as (where, when, match, nth)."""
    steps: list[tuple[str, str, Any, int]] = []
    for when in ("before", "after"):
        steps.append((f"{points.PEERS}:Peers.operation", when, None, 1))
        steps += [(f"{points.PEERS}:Operation.round", when, name, 1) for name in ("arrive", "created", "joined")]
        steps.append((points.WRITE, when, None, 1))
        # A checkpoint of this size is one block, which rank 0 writes; the others send.
        steps += [
            (f"{points.DATA_GROUP}.{method}", when, None, 1) for method in ("__init__", "send" if rank else "receive")
        ]
        steps.append((points.CONNECT, when, None, 1))
        # The swaps exchange addresses, and the message that the memory has been read.
        steps.append((f"{points.DATA_GROUP}.swap", when, None, 1 if when == "before" else 2))
        if rank == 0:
            steps += [(where, when, None, 1) for where in (points.CREATE, points.COMMIT)]
        else:
            steps += [(where, when, None, 1) for where in (points.JOIN_SAVE, points.ALLOCATE)]
    steps.append((f"{points.PEERS}:Operation.round", "before", "done", 1))
    # Requests to the store, at any step of the protocol.
    steps += [(points.SERVE, "after", None, nth) for nth in range(1, 20, one_in(6))]
    return steps


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("store", ["apart", "rank0"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_rank_that_is_struck_in_a_save(forge, tmp_path, store, number):
    trials = [
        Trial(where, when, rank, number, store, match, nth)
        # If rank 0 has the store, only the death of rank 0 differs from the other case.
        for rank in ((0,) if store == "rank0" else (0, SIZE - 1))
        for where, when, match, nth in save_points(rank)
    ]
    assert len(trials) >= 25
    run_all(forge, tmp_path, in_turns(trials, number))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_rank_that_is_struck_in_a_save_in_the_background(forge, tmp_path, number):
    trials = [
        Trial(where, "before", rank, number, "apart", match, call="save_async")
        for rank in (0, 1)
        for where, match in (
            (f"{points.PEERS}:Operation.round", "arrive"),
            (f"{points.PEERS}:Operation.round", "joined"),
            (points.WRITE, None),
            (f"{points.PEERS}:Operation.round", "done"),
        )
    ]
    run_all(forge, tmp_path, trials)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["apart", "rank0"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_rank_that_is_struck_in_a_load(forge, tmp_path, store, number):
    trials = [
        Trial(where, "before", rank, number, store, match, nth, call="load")
        for rank in ((0,) if store == "rank0" else (0, SIZE - 1))
        for where, match, nth in (
            (f"{points.PEERS}:Operation.round", "arrive", 1),
            (f"{points.PEERS}:Operation.round", "done", 1),
            (points.READ_PARTS, None, 1),
            *[(f"{points.DATA_GROUP}.{method}", None, 1) for method in ("__init__", "broadcast", "send", "receive")],
            *[(points.SERVE, None, nth) for nth in (2, 5, 9)],
        )
    ]
    run_all(forge, tmp_path, in_turns(trials, number))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_wakes_up_cannot_commit(forge, tmp_path, rank):
    """A rank is stopped for longer than the timeout within the commit, and the other rank is killed."""
    path = tmp_path / "c"
    fastckpt.save(whole(0), path)
    strike = groups.Strike(rank, f"{points.PEERS}:Operation.round", signal.SIGSTOP, match="done")
    with forge.group(2) as group:
        group.start(_save, str(path), 1, 3.0, strike=strike)
        outcomes = group.outcomes(60)
        assert [each.kind for each in outcomes] == ["stopped" if each == rank else "raised" for each in range(2)]
        assert f"rank {rank}" in outcomes[1 - rank].raised.text
        assert "nothing was committed" in outcomes[1 - rank].raised.text
        group.kill(1 - rank)
        group.resume(rank)
        [woken] = group.outcomes(60)
        assert woken.kind == "raised"
        assert "RanksError" in woken.raised.bases
    assert which(path) == 0


def _save_too_late(path: str, number: int, timeout: float) -> int:
    """Save, where rank 1 writes only after the coordinator has removed the files."""
    if dist.get_rank() != 1:
        return _save(path, number, timeout)
    real = process_group.carried

    def carried(work: Any, exchange: Any, attend: Any) -> Any:
        while any(Path(path).parent.glob(".c.tmp-*")):
            time.sleep(0.01)
        return real(work, exchange, attend)

    process_group.carried = carried
    try:
        return _save(path, number, timeout)
    finally:
        process_group.carried = real


def test_a_rank_whose_files_have_gone_is_told_why(forge, tmp_path):
    path = tmp_path / "c"
    fastckpt.save(whole(0), path)
    with forge.group(2) as group:
        strike = groups.Strike(0, points.WRITE, OSError(errno.EIO, "the disk is worn out", "disk"))
        group.start(_save_too_late, str(path), 1, 60.0, strike=strike)
        outcomes = group.outcomes(90)
    assert [each.raised.kind for each in outcomes] == ["OSError", "RanksError"]
    assert "the disk is worn out" in outcomes[1].raised.text
    assert which(path) == 0


def test_an_error_of_one_rank_reaches_all_with_its_words(forge, tmp_path):
    path = tmp_path / "c"
    fastckpt.save(whole(0), path)
    with forge.group(3) as group:
        for rank in range(3):
            strike = groups.Strike(rank, points.WRITE, OSError(errno.EIO, "the disk is worn out", "disk"))
            group.start(_save, str(path), 1, 60.0, strike=strike)
            outcomes = group.outcomes(90)
            assert [each.kind for each in outcomes] == ["raised"] * 3
            for each in outcomes:
                if each.rank == rank:
                    assert (each.raised.kind, each.raised.errno) == ("OSError", errno.EIO)
                else:
                    assert each.raised.kind == "RanksError"
                    assert [failure[0] for failure in each.raised.failures] == [rank]
                    assert f"rank {rank} on {os.uname().nodename}" in each.raised.text
                    assert "the disk is worn out" in each.raised.text
                    assert "nothing was committed" in each.raised.text
                assert each.seconds < 30, "the error came by the timeout, and not at once"
            assert which(path) == 0
        group.run(_save, str(path), 2, 60.0)
    assert which(path) == 2


@pytest.mark.parametrize("why", [KeyboardInterrupt(), OSError(errno.EIO, "the directory was not synced")], ids=repr)
def test_what_ends_the_commit_after_the_rename_is_not_told_as_nothing(forge, tmp_path, why):
    path = tmp_path / "c"
    fastckpt.save(whole(0), path)
    with forge.group(3) as group:
        strike = groups.Strike(0, points.COMMIT, why, when="after")
        group.start(_save, str(path), 1, 60.0, strike=strike)
        first, *others = group.outcomes(90)
        assert first.raised.kind == type(why).__name__
        for each in others:
            assert each.raised.kind == "RanksError"
            assert f"failed: {type(why).__name__}" in each.raised.text
            assert each.raised.text.endswith("it was committed anyway: the complete new checkpoint is at the path")
        assert which(path) == 1
        # If the commit fails before the rename, the old checkpoint stays.
        strike = groups.Strike(0, points.COMMIT, why)
        group.start(_save, str(path), 2, 60.0, strike=strike)
        for each in group.outcomes(90)[1:]:
            assert each.raised.text.endswith("nothing was committed; the old checkpoint is unchanged")
        assert which(path) == 1
        group.run(_save, str(path), 3, 60.0)
    assert which(path) == 3


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("call", "error"), [("pwrite64", "ENOSPC"), ("pwrite64", "EIO"), ("fdatasync,fsync", "EIO")])
def test_the_storage_fails_on_one_rank_only(forge, tmp_path, rank, call, error):
    path = tmp_path / "here" / "c"
    path.parent.mkdir()
    fastckpt.save(whole(0), path)
    with forge.group(3) as group:
        group.run(_save, str(path), 1, 60.0, io="threads")
        inject = strace.injection(call, f"error={error}", "1+")
        with strace.attached(group.children[rank].pid, tmp_path / "log", call, inject):
            group.start(_save, str(path), 2, 60.0, io="threads")
            groups.told_of(group.outcomes(90), rank, getattr(errno, error))
        assert which(path) == 1
        assert [each.name for each in path.parent.iterdir()] == ["c"]
        group.run(_save, str(path), 3, 60.0, io="threads")
        assert which(path) == 3


def test_a_full_disk_fails_before_a_byte_is_written(forge):
    """All files are allocated before any rank writes; the only file is the coordinator's."""
    with mounts.mount("tmpfs", size=1 << 20) as point, forge.group(3) as group:
        (point / "other").write_bytes(bytes(1_000_000))
        group.start(_save, str(point / "c"), 1, 60.0)
        groups.told_of(group.outcomes(90), 0, errno.ENOSPC)
        assert [each.name for each in point.iterdir()] == ["other"]
        (point / "other").unlink()
        group.run(_save, str(point / "c"), 2, 60.0)
        assert which(point / "c") == 2
