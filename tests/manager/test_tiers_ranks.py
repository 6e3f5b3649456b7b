"""``Manager(local, remote=...)`` over a process group: each node fetches a share, and all ranks restore the same."""

from __future__ import annotations

import errno
import shutil
import socket
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

import fastckpt
from fastckpt import distributed
from harness import groups, points
from harness.tiers import at_remote

TIMEOUT = 60.0
#: All ranks, with the long timeout.
RANKS = distributed.Ranks(timeout=TIMEOUT)


@pytest.fixture(scope="module")
def four(forge):
    """Ranks for all tests that do not end them."""
    with forge.group(4) as group:
        yield group


def state(step):
    return {"model": {f"w{index}": np.full(5000, step + index) for index in range(4)}, "step": step}


def train(root, steps, options):
    """Train on from the run's last step; return this rank's restore, its copies, and its record at the end."""
    shares = []

    def noting(copy):
        def noted(sources, target, **more):
            copied = copy(sources, target, **more)
            shares.append(more["share"])
            return copied

        return noted

    with (
        points.replaced(points.DRAIN, noting),
        fastckpt.Manager(
            root / "local",
            remote=root / "remote",
            ranks=RANKS,
            save_options={"files": fastckpt.Files(shard_size=40_000)},
            **options,
        ) as manager,
    ):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = manager.restore()
        first = found.step + 1 if found else 1
        for step in range(first, first + steps):
            manager.save(step, state(step), {"loss": float(step)})
            manager.wait()
        here = found and (found.step, found.state["step"], int(found.state["model"]["w3"].max()))
        return here, sorted(set(shares)), manager.steps(), at_remote(manager), len(told)


def test_a_run_over_ranks_has_two_tiers(four, tmp_path):
    first = four.run(train, tmp_path, 3, {"keep": 1, "remote_keep": 2})
    assert first == [(None, [(0, 1)] if rank == 0 else [], [3], [2, 3], 0) for rank in range(4)]
    assert (tmp_path / "remote" / "latest").read_text() == "step-00000003\n"
    # The nodes are replaced by new ones.
    shutil.rmtree(tmp_path / "local")
    second = four.run(train, tmp_path, 1, {"keep": 1, "remote_keep": 2})
    assert [(here, steps, there) for here, _, steps, there, _ in second] == [((3, 3, 6), [4], [3, 4])] * 4
    # One file is damaged on one tier, and another on the other.
    for place, index in (("local", 0), ("remote", 1)):
        file = sorted((tmp_path / place / "step-00000004").rglob("*.safetensors"))[index]
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.unlink()
        file.write_bytes(content)
    third = four.run(train, tmp_path, 0, {"keep": 1, "remote_keep": 2})
    assert [here for here, *_ in third] == [(4, 4, 7)] * 4
    assert [told for *_, told in third] == [1, 0, 0, 0]


def train_on_nodes(root, steps):
    socket.gethostname = lambda: f"node{dist.get_rank() // 2}"
    return train(root, steps, {})


def test_one_process_of_each_node_brings_a_share(forge, tmp_path):
    with forge.group(4) as group:
        seen = group.run(train_on_nodes, tmp_path, 2)
    shares = [[(0, 2)], [], [(1, 2)], []]
    assert [(here, steps, there) for here, _, steps, there, _ in seen] == [(None, [1, 2], [1, 2])] * 4
    assert [share for _, share, *_ in seen if share] == [share for share in shares if share]
    for step in (1, 2):
        assert fastckpt.verify(tmp_path / "remote" / f"step-{step:08d}").ok
    assert fastckpt.clean(tmp_path / "remote") == []


def hung_up(*_arguments, **_options):
    raise OSError(errno.ECONNRESET, "the store has hung up")


def fetch_on_nodes(root, broken):
    """Restore from the remote tier alone; return this process's fetched shares, their bytes, and the state."""
    socket.gethostname = lambda: f"node{dist.get_rank() // 2}"
    shares = []

    def noting(copy):
        def noted(sources, target, **more):
            if dist.get_rank() == broken:
                hung_up()
            copied = copy(sources, target, **more)
            shares.append((more["share"], copied.bytes > 0))
            return copied

        return noted

    with (
        points.replaced(points.FETCH, noting),
        points.replaced(points.PATIENCE, lambda _: 0.2),
        fastckpt.Manager(root / "local", remote=root / "remote", ranks=RANKS, read_only=False) as manager,
    ):
        found = manager.restore()
        return shares, found.step, found.path, int(found.state["model"]["w3"].max()), manager.steps()


@pytest.mark.parametrize("broken", [None, 2])
def test_one_process_of_each_node_fetches_a_share(forge, tmp_path, broken):
    files = {"files": fastckpt.Files(shard_size=40_000)}
    with fastckpt.Manager(tmp_path / "local", remote=tmp_path / "remote", save_options=files) as manager:
        manager.save(1, state(1))
    shutil.rmtree(tmp_path / "local")
    with forge.group(4) as group:
        seen = group.run(fetch_on_nodes, tmp_path, broken)
    second = [] if broken else [((1, 2), True)]
    assert [shares for shares, *_ in seen] == [[((0, 2), True)], [], second, []]
    assert [tuple(more) for _, *more in seen] == [(1, str(tmp_path / "local" / "step-00000001"), 4, [1])] * 4
    assert fastckpt.verify(tmp_path / "local" / "step-00000001").ok
    assert fastckpt.clean(tmp_path / "local") == []


def fail_to_copy(root):
    with fastckpt.Manager(root / "local", remote=root / "remote", ranks=RANKS) as manager:
        with points.replaced(points.DRAIN, lambda _: hung_up):
            manager.save(1, state(1))
            try:
                manager.wait()
            except Exception as error:  # noqa: BLE001 - its kind is what the test looks at
                told = type(error).__name__, "hung up" in str(error)
        manager.wait()
        return told, at_remote(manager)


def test_all_ranks_hear_what_keeps_a_step_from_the_remote(four, tmp_path):
    seen = four.run(fail_to_copy, tmp_path)
    assert seen[0] == (("ConnectionResetError", True), [1])
    assert seen[1:] == [(("RanksError", True), [1])] * 3


def fail_to_fetch(root):
    with points.replaced(points.FETCH, lambda _: hung_up), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fastckpt.Manager(root / "local", remote=root / "remote", ranks=RANKS).restore().step


def test_ranks_take_an_older_step_where_the_newest_cannot_be_fetched(four, tmp_path):
    with fastckpt.Manager(tmp_path / "local", remote=tmp_path / "remote") as manager:
        for step in (1, 2):
            manager.save(step, state(step))
            manager.wait()
    shutil.rmtree(Path(manager.path(2)))
    assert four.run(fail_to_fetch, tmp_path) == [1] * 4


def differ(root):
    with pytest.raises(ValueError, match="remote: rank 0 has"):
        fastckpt.Manager(root / "local", remote=root / f"remote-{dist.get_rank()}", ranks=RANKS)


def test_ranks_with_other_remotes_are_refused(four, tmp_path):
    with pytest.raises(groups.FailedError, match="remote: rank 0 has"):
        four.run(differ, tmp_path)


def go_back(root, ahead, discard):
    """Save with clocks ahead, go back on other nodes with an empty disk, and save; return a third node's restore."""
    options = {"remote": root / "remote", "ranks": RANKS}
    real = time.time_ns

    def skewed(_real):
        return lambda: real() + ahead * 10**9

    with points.replaced("time:time_ns", skewed), fastckpt.Manager(root / "one", **options) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    with fastckpt.Manager(root / "two", **options) as manager:
        manager.restore(step=1, discard_newer=discard)
        manager.save(2, state(20))
    return fastckpt.Manager(root / "three", read_only=True, **options).restore().state["step"]


@pytest.mark.parametrize("discard", [False, True])
def test_ranks_follow_the_branch_that_saved_last_whatever_their_clocks_say(four, tmp_path, discard):
    assert four.run(go_back, tmp_path, 3600, discard) == [20] * 4
