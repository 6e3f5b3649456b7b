"""Lazy saves of ranks: a step waits only for the copy, and any other change of a tensor fails the save on all ranks."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import fastckpt
from fastckpt import distributed
from harness import needs, parallel, points
from harness.internals import RanksJob, Staging
from harness.options import grouped

ROWS = 600


@pytest.fixture(scope="module")
def two(forge):
    with forge.group(2) as group:
        yield group


@contextlib.contextmanager
def held(where, name):
    """Make calls of ``where.name`` wait for the yielded event, or for the end of the ``with`` statement."""
    release, real = threading.Event(), getattr(where, name)

    def wait(self):
        assert release.wait(60)
        return real(self)

    setattr(where, name, wait)
    try:
        yield release
    finally:
        release.set()
        setattr(where, name, real)


def parameters():
    """A sharded and a replicated tensor, both large enough to be copied late."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    spread = parallel.distributed(torch.ones(ROWS, 400), mesh, [Shard(0)])
    made = {"spread": nn.Parameter(spread), "same": nn.Parameter(torch.ones(200, 200))}
    for parameter in made.values():
        parameter.grad = torch.ones_like(parameter)
    return made


def step_at_once(path):
    """Step right after the call, while an earlier save is being written; return the progress of both saves."""
    mine = parameters()
    optimizer = torch.optim.SGD(mine.values(), lr=1.0)
    options = {"timeout": 60, "max_in_flight": 2}
    waits, this = threading.Event(), threading.get_ident()

    def noted(wait):
        def instead(*args):
            if threading.get_ident() == this:
                waits.set()
            return wait(*args)

        return instead

    def let_copy():
        waits.wait(60)
        time.sleep(0.3)
        copy.set()

    with held(RanksJob, "_write") as write, held(Staging, "_copy_late") as copy:
        first = distributed.save_async({"n": 1}, f"{path}-first", **grouped(options))
        pending = distributed.save_async({**mine, "n": 1}, path, **grouped({**options, "lazy": True}))
        phase = pending.progress().phase
        threading.Thread(target=let_copy).start()
        with points.replaced(points.WAIT_FOR_EVENT, noted):
            optimizer.step()
        waited = copy.is_set(), first.done(), pending.progress().phase
        stepped = [bool((mine[name].detach() == 0).all()) for name in mine]
        # Ranks compare the copies, so this change after the copy is harmless.
        mine["same"].data.fill_(dist.get_rank())
        write.set()
    found = pending.result(60)
    return phase, waited, found.stall >= 0.3, stepped


def test_a_step_waits_for_the_copy_and_for_nothing_else(two, tmp_path):
    assert two.run(step_at_once, tmp_path / "c") == [("staging", (True, False, "writing"), True, [True] * 2)] * 2
    loaded = fastckpt.load(tmp_path / "c")
    assert loaded["spread"].shape == (ROWS, 400)
    assert all(bool((loaded[name] == 1).all()) for name in ("spread", "same"))


def step_after_a_failure(path):
    """Let the copy fail while an earlier save is being written; return whether a step waits for it."""
    mine = parameters()
    optimizer = torch.optim.SGD(mine.values(), lr=1.0)
    options = {"timeout": 60, "max_in_flight": 2}
    with held(RanksJob, "_write") as write, mock.patch.object(Staging, "_copy_late", side_effect=OSError(5, "no")):
        first = distributed.save_async({"n": 1}, f"{path}-first", **grouped(options))
        pending = distributed.save_async({**mine, "n": 1}, path, **grouped({**options, "lazy": True}))
        optimizer.step()
        waited = first.done()
        write.set()
        return waited, type(pending.exception(60)).__name__, first.result(60).ranks


def test_a_step_does_not_wait_for_a_save_whose_copy_has_failed(two, tmp_path):
    assert two.run(step_after_a_failure, tmp_path / "c") == [(False, "OSError", 2)] * 2


@pytest.mark.parametrize("end", ["saved", "changed", "cancelled"])
def test_a_lazy_save_keeps_nothing_alive(tmp_path, end):
    """Once the handle is gone, memory is freed without the cycle collector."""
    tensor = torch.ones(200, 200)
    gone = weakref.ref(tensor)
    gc.disable()
    try:
        with held(Staging, "_copy_late") as copy:
            pending = distributed.save_async({"w": tensor}, tmp_path / "c", io=fastckpt.IO(lazy=True))
            if end == "changed":
                tensor.zero_()
            del tensor
            if end == "cancelled":
                threading.Timer(0.1, copy.set).start()
                assert pending.cancel()
            else:
                copy.set()
                assert (pending.exception(60) is None) is (end == "saved")
        assert gone() is None
        gone = weakref.ref(pending)
        del pending
        for thread in threading.enumerate():
            if thread.name == "fastckpt-save":
                thread.join(60)
        assert gone() is None
    finally:
        gc.enable()


CHANGES = {
    "same": lambda mine: mine["same"].mul_(2),
    "spread": lambda mine: mine["spread"].mul_(2),
    "spread, through the state": lambda mine: mine["spread"].detach().zero_(),
    "spread, through the local tensor": lambda mine: mine["spread"].to_local().zero_(),
}


def change(path, what):
    """Change a tensor on rank 1 during the copy; return the error of this rank."""
    mine = parameters()
    with held(Staging, "_copy_late") as copy, torch.no_grad():
        state = {"left": torch.ones(200, 200), **mine, "n": 1}
        pending = distributed.save_async(
            state, path, io=fastckpt.IO(lazy=True), ranks=distributed.Ranks(timeout=60), exclude="left"
        )
        if dist.get_rank() == 1:
            CHANGES[what](mine)
        copy.set()
        return str(pending.exception(60))


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_that_is_no_step_fails_the_save_on_all_ranks(two, tmp_path, what):
    words = f"changed in place while IO(lazy=True) was copying: {what.partition(',')[0]}. Nothing was written."
    first, second = two.run(change, tmp_path / "c", what)
    assert second.startswith("save_async: ")
    assert words in second
    assert words in first
    assert "rank 1" in first
    assert list(tmp_path.iterdir()) == []


def cancelled(path):
    mine = parameters()
    with held(Staging, "_copy_late"):
        pending = distributed.save_async(mine, path, io=fastckpt.IO(lazy=True), ranks=distributed.Ranks(timeout=60))
        if dist.get_rank() == 0:
            # ``cancel`` would wait for the end.
            pending._cancelled = True
            pending._snapshot.stop()
    return str(pending.exception(60)) if dist.get_rank() else str(pending.cancel())


def test_to_cancel_the_copy_on_one_rank_fails_the_save_on_all(two, tmp_path):
    first, second = two.run(cancelled, tmp_path / "c")
    assert first == "True"
    assert "failed: CancelledError" in second
    assert list(tmp_path.iterdir()) == []


def train(path, reshards):
    """Save between two FSDP steps, and train on during the copy; return if weights changed, and which are wrong."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    optimizer = torch.optim.AdamW(model.parameters())
    given = torch.randn(4, 300)

    def backward():
        optimizer.zero_grad()
        model(given).square().mean().backward()

    backward()
    optimizer.step()
    with held(Staging, "_copy_late") as copy:
        # The next backward pass frees the tensors that this forward pass gathers.
        model(given)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        at_call = {name: value.full_tensor().clone() for name, value in state["model"].items()}
        pending = distributed.save_async(state, path, io=fastckpt.IO(lazy=True), ranks=distributed.Ranks(timeout=60))
        assert pending.progress().phase == "staging"
        backward()
        threading.Timer(0.1, copy.set).start()
        optimizer.step()
    pending.result(60)
    changed = any(not torch.equal(value.full_tensor(), at_call[name]) for name, value in model.state_dict().items())
    loaded = fastckpt.load(path)["model"]
    return changed, [name for name, value in at_call.items() if not torch.equal(loaded[name], value)]


@pytest.mark.parametrize("reshards", [True, False])
def test_fsdp_trains_on_beside_the_copy(two, tmp_path, reshards):
    needs.of_torch(hasattr(torch.cpu.Stream, "record_event"), "training under fully_shard on the CPU")
    assert two.run(train, tmp_path / "c", reshards) == [(True, [])] * 2


class Buffers(nn.Module):
    """A module with a large buffer that forward does not change."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10))
        self.register_buffer("mask", torch.ones(200, 200))

    def forward(self, value):
        return (value * self.weight * self.mask[0, :10]).sum()


def broadcast(path):
    """Save while DistributedDataParallel broadcasts buffers, a write that torch's version counter misses."""
    model = nn.parallel.DistributedDataParallel(Buffers())
    with held(Staging, "_copy_late") as copy:
        pending = distributed.save_async(
            model.state_dict(), path, io=fastckpt.IO(lazy=True), ranks=distributed.Ranks(timeout=60)
        )
        model(torch.ones(10)).backward()
        copy.set()
        pending.result(60)


def test_buffers_that_are_equal_may_be_broadcast_beside_the_copy(two, tmp_path):
    two.run(broadcast, tmp_path / "c")
    assert bool((fastckpt.load(tmp_path / "c")["module.mask"] == 1).all())


def change_guarded(path):
    """Change a sharded buffer of a guarded module during the copy of another tensor."""
    model, other = nn.Module(), parameters()["spread"]
    model.register_buffer("codes", parameters()["spread"].detach())
    with fastckpt.background.guard(model), held(Staging, "_copy_late") as copy:
        pending = distributed.save_async(
            {**model.state_dict(), "other": other}, path, io=fastckpt.IO(lazy=True), ranks=distributed.Ranks(timeout=60)
        )
        model.codes.mul_(2)
        copy.set()
        pending.result(60)


def test_a_spread_buffer_of_a_guarded_module_is_copied_at_the_call(two, tmp_path):
    two.run(change_guarded, tmp_path / "c")
    assert bool((fastckpt.load(tmp_path / "c")["codes"] == 1).all())


def save_steps(out):
    options = {"io": fastckpt.IO(lazy=True, nice=1, max_in_flight=2, threads=1)}
    mine = parameters()
    optimizer = torch.optim.SGD(mine.values(), lr=1.0)
    with fastckpt.Manager(out, ranks=distributed.Ranks(timeout=60), save_options=options) as manager:
        for step in range(4):
            manager.save(step, {**mine, "step": step})
            optimizer.step()
        manager.wait()


def test_a_manager_of_ranks_passes_it_all(two, tmp_path):
    two.run(save_steps, tmp_path)
    for step in range(4):
        loaded = fastckpt.load(tmp_path / f"step-{step:08}")
        assert all(bool((loaded[name] == 1 - step).all()) for name in ("spread", "same"))
