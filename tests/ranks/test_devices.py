"""Saves and loads of several ranks whose tensors are on a device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fastckpt
from fastckpt import distributed
from fastckpt.dcp import Reader, Writer
from harness import needs, standin
from harness.reports import with_report

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning")

ROWS, SMALL = 3001, 200


@pytest.fixture(autouse=True)
def device():
    if not standin.AVAILABLE:
        needs.missing("needs torch 2.10 (a device that is set up from Python)")


def values():
    torch.manual_seed(5)
    return {
        # Rank 1 has no part of this tensor.
        "one": torch.randn(1, 5),
        "rows": torch.randn(ROWS, 500),
        "columns": torch.randn(40, ROWS),
        "same": torch.randn(300_000),
        **{f"small{number}": torch.randn(number + 1) for number in range(SMALL)},
    }


def state(spread, *, empty):
    """The state on this rank's device, with some tensors spread over all ranks."""
    made = {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, whole in values().items():
        dim = {"one": 0, "rows": 0, "columns": 1}.get(name)
        if empty:
            whole = torch.zeros_like(whole)  # noqa: PLW2901
        if dim is None or not spread:
            made[name] = whole.to(standin.NAME)
            continue
        made[name] = distribute_tensor(whole, mesh, [Shard(dim)])
        local = made[name]._local_tensor
        # A rank's columns are not contiguous in its memory.
        made[name]._local_tensor = local.to(standin.NAME) if dim == 0 else local.t().contiguous().to(standin.NAME).t()
    return made


def whole(value):
    if not isinstance(value, DTensor):
        return standin.on_host(value).clone()
    value._local_tensor = standin.on_host(value._local_tensor).clone()
    return value.full_tensor()


def differences(found):
    return [name for name, value in values().items() if not torch.equal(whole(found[name]), value)]


def save_and_load(path, spread, io):
    """Save and load; return the differences, the bytes from other ranks, and the number of requests to the device."""
    saved = distributed.save(state(spread, empty=False), path, per_rank={"own": state(False, empty=False)["same"]})
    into = state(spread, empty=True)
    for value in into.values():
        getattr(value, "_local_tensor", value).fill_(3)
    loaded = with_report(distributed.load, path, into=into, io=io)
    own = distributed.load_per_rank(path)["own"]
    return differences(into), loaded.report.bytes_peers, torch.equal(own, values()["same"]), saved.warnings


@pytest.mark.parametrize("io", ["buffered", "threads"])
@pytest.mark.parametrize("spread", [True, False])
def test_ranks_save_and_load(forge, tmp_path, spread, io):
    with forge.group(2) as group:
        done = group.run(save_and_load, tmp_path / "c", spread, io)
    assert [different for different, *_ in done] == [[], []]
    assert [(same, warnings) for _, _, same, warnings in done] == [(True, ())] * 2
    # With direct I/O, one rank reads and sends to the other rank.
    assert any(peers for _, peers, *_ in done) is (io == "threads")
    loaded = fastckpt.load(tmp_path / "c")
    assert all(torch.equal(loaded[name], value) for name, value in values().items())


def step_at_once(path):
    """Change tensors after a step on the device, while their copies have not begun: streams keep the order."""
    given = state(True, empty=False)
    del given["columns"]  # the stand-in makes this tensor contiguous on the host
    distributed.save_async(given, path).result(60)  # from now on the memory is pinned
    parameter = torch.nn.Parameter(torch.ones(3).to(standin.NAME))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0, foreach=False)
    with standin.faults.held() as go:
        pending = distributed.save_async(given, path, io=fastckpt.IO(lazy=True), ranks=distributed.Ranks(timeout=60))
        optimizer.step()
        for value in given.values():
            getattr(value, "_local_tensor", value).fill_(3)
        staged = pending.progress().staged
        go()
    pending.result(60)
    return staged, bool((whole(given["same"]) == 3).all())


def test_the_stream_of_a_step_waits_for_a_lazy_save(forge, tmp_path):
    with forge.group(2) as group:
        assert group.run(step_at_once, tmp_path / "c") == [(0, True)] * 2
    loaded = fastckpt.load(tmp_path / "c")
    assert all(torch.equal(value, values()[name]) for name, value in loaded.items())


def dcp_both(path, io):
    dcp_save(state(True, empty=False), storage_writer=Writer(path, ranks=distributed.Ranks(timeout=60)))
    into = state(True, empty=True)
    dcp_load(into, storage_reader=Reader(path, ranks=distributed.Ranks(timeout=60), io=io))
    return differences(into)


@pytest.mark.parametrize("io", ["buffered", "threads"])
def test_dcp(forge, tmp_path, io):
    with forge.group(2) as group:
        assert group.run(dcp_both, tmp_path / "c", io) == [[], []]
    assert fastckpt.verify(tmp_path / "c").ok


def in_a_capture(path):
    """A rank whose stream is captured raises before anything is written."""
    made = state(True, empty=False)
    try:
        if dist.get_rank() == 1:
            with standin.capturing():
                distributed.save(made, path)
        else:
            distributed.save(made, path, ranks=distributed.Ranks(timeout=60))
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error)
    return None


def test_a_captured_stream_fails_the_save_of_all(forge, tmp_path):
    with forge.group(2) as group:
        first, second = group.run(in_a_capture, tmp_path / "c")
    assert second[0] == "RuntimeError"
    assert "captured into a graph" in second[1]
    assert first[0] == "RanksError"
    assert "captured into a graph" in first[1]
    assert not list(tmp_path.iterdir())
