"""Two hosts as network namespaces, with one shared file system or two separate ones."""

from __future__ import annotations

import functools
import hashlib
import signal
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fastckpt
import fastckpt.distributed
from fastckpt.distributed import Ranks
from harness import groups, hosts, points

RANKS = 4


def _where(path):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return socket.gethostname(), sorted(each.name for each in Path(path).iterdir()), float(total)


def whole(number):
    columns = torch.arange(1023 * 130, dtype=torch.float32).reshape(1023, 130) + number
    return {"model": {"rows": columns * 2, "columns": columns}, "step": number}


@functools.cache
def _mesh():
    return init_device_mesh("cpu", (RANKS,))


def _spread(number):
    state = whole(number)
    for name, dim in (("rows", 0), ("columns", 1)):
        tensor = state["model"][name]
        local = torch.chunk(tensor, RANKS, dim=dim)[dist.get_rank()].contiguous()
        state["model"][name] = DTensor.from_local(
            local, _mesh(), [Shard(dim)], shape=tensor.shape, stride=tensor.stride()
        )
    return state


def _save(path, number, timeout=30.0):
    report = fastckpt.distributed.save(_spread(number), path, ranks=Ranks(timeout=timeout), io=fastckpt.IO(threads=1))
    return report.bytes_sent


def _save_counting(path, number):
    """Save, and return how often this rank began to write."""
    written = []

    def counting(write):
        return lambda *arguments: (written.append(1), write(*arguments))[1]

    try:
        with points.replaced(points.WRITE, counting):
            fastckpt.distributed.save(_spread(number), path, ranks=Ranks(timeout=30), io=fastckpt.IO(threads=1))
    except Exception as error:  # noqa: BLE001 - the test judges it
        return type(error).__name__, str(error), len(written)
    return "", "", len(written)


def _load(path):
    into = _spread(-1)
    loaded = fastckpt.distributed.load(path, into=into, ranks=Ranks(timeout=30), io=fastckpt.IO(threads=1))
    wanted = _spread(loaded["step"])
    return all(
        torch.equal(tensor.to_local(), wanted["model"][name].to_local()) for name, tensor in loaded["model"].items()
    )


def digests(path):
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in Path(path).rglob("*.safetensors")}


@pytest.fixture
def shared(tmp_path):
    place = tmp_path / "shared"
    place.mkdir()
    return place


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    """A directory of the first host; at its path, the second host has its own empty directory."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def two(hidden):
    with hosts.two(hidden=hidden) as made:
        yield made


@pytest.mark.root
@pytest.mark.slow
def test_two_hosts_write_what_one_process_writes(two, shared, tmp_path):
    fastckpt.save(whole(1), tmp_path / "one")
    with two.group(RANKS) as group:
        names = [name for name, *_ in group.run(_where, str(shared))]
        assert names == ["node-a", "node-a", "node-b", "node-b"]
        sent = group.run(_save, str(shared / "c"), 1)
        # Columns are exchanged, so the hosts sent each other bytes; the small file is one block, which rank 0 writes.
        assert all(sent[1:])
        assert digests(shared / "c") == digests(tmp_path / "one")
        assert group.run(_load, str(shared / "c")) == [True] * RANKS


@pytest.mark.root
@pytest.mark.slow
def test_a_rank_that_dies_is_named_with_its_host(two, shared):
    path = str(shared / "c")
    fastckpt.save(whole(0), path)
    with two.group(RANKS) as group:
        strike = groups.Strike(3, points.WRITE, signal.SIGKILL)
        group.start(_save, path, 1, 3.0, strike=strike)
        outcomes = group.outcomes(30)
        assert [each.kind for each in outcomes] == ["raised", "raised", "raised", "died"]
        for each in outcomes[:3]:
            assert "rank 3 on node-b" in each.raised.text
            assert each.ended - group.struck < 3 + 5
    assert fastckpt.verify(path).ok
    assert fastckpt.load(path)["step"] == 0


@pytest.mark.root
@pytest.mark.slow
def test_a_path_that_is_not_shared_is_told_before_a_byte_is_written(two, hidden):
    path = str(hidden / "c")
    fastckpt.save(whole(0), path)
    before = digests(path)
    with two.group(RANKS) as group:
        assert [names for _, names, _ in group.run(_where, str(hidden))] == [["c"], ["c"], [], []]
        for kind, text, written in group.run(_save_counting, path, 1):
            assert kind
            assert path in text
            assert "shared" in text
            assert "node-b" in text
            assert written == 0
        # Nothing is left on either host, and the old checkpoint is unchanged.
        assert [names for _, names, _ in group.run(_where, str(hidden))] == [["c"], ["c"], [], []]
        assert digests(path) == before
        # A load fails, too.
        group.start(_load, path)
        outcomes = group.outcomes(30)
        assert [each.kind for each in outcomes] == ["raised"] * RANKS
        assert all("node-b" in each.raised.text for each in outcomes[:2])
