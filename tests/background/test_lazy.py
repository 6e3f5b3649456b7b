"""Lazy saves: small tensors are copied at the call, steps wait for the rest, and other changes are detected."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

import fastckpt
from harness import limits, points, zygote
from harness.internals import Job
from harness.same import same

pytestmark = pytest.mark.usefixtures("alone")
#: Float32 elements of a tensor that is just large enough to be copied late.
SMALL = limits.of("copied at the call of a lazy save")
LARGE = SMALL // 4


def clone(state):
    return {key: clone(value) if isinstance(value, dict) else value.clone() for key, value in state.items()}


def one_parameter(**options):
    parameter = torch.nn.Parameter(torch.ones(LARGE))
    parameter.grad = torch.ones(LARGE)
    return parameter, torch.optim.SGD([parameter], lr=1.0, **options)


# Copies at the call.


def test_small_tensors_are_copied_at_the_call(tmp_path, held_background):
    release, begun = held_background
    state = {
        "small": torch.ones(LARGE - 1),
        "strided": torch.ones(LARGE - 1, 2)[:, 0],
        "large": torch.ones(LARGE),
        "scalar": torch.tensor(1.0),
        "flags": torch.ones(SMALL, dtype=torch.bool),
        "sparse": torch.eye(3).to_sparse(),
    }
    pending = fastckpt.save_async(state, tmp_path / "c", io=fastckpt.IO(lazy=True))
    assert begun.wait(60)
    assert pending.progress().phase == "staging"
    assert pending.progress().total - pending.progress().staged == 2 * SMALL
    for name in ("small", "strided", "scalar"):
        state[name].zero_()
    state["sparse"]._values().zero_()
    release.set()
    pending.result(60)
    loaded = fastckpt.load(tmp_path / "c")
    assert all((loaded[name] == 1).all() for name in ("small", "strided", "large", "scalar", "flags"))
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))


def test_a_state_of_small_tensors_is_whole_when_the_call_returns(tmp_path, held_background):
    pending = fastckpt.save_async({"w": torch.ones(3), "n": 1}, tmp_path / "c", io=fastckpt.IO(lazy=True))
    assert pending.progress().phase != "staging"
    pending.wait_staged(0)
    pending.result(60)
    assert not _global_optimizer_pre_hooks


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiled", [True, False])
@torch.no_grad()
def test_forward_changes_no_statistics_under_a_copy(tmp_path, held_background, compiled, backend):
    release, begun = held_background
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(4, LARGE), torch.nn.BatchNorm1d(LARGE - 1), torch.nn.Linear(3, 3))
    model[0] = torch.nn.Linear(4, LARGE - 1)
    forward = torch.compile(model[:2], backend=backend) if compiled else model[:2]
    forward(torch.randn(5, 4))
    for _ in range(2):
        release.clear()
        begun.clear()
        before = clone(model.state_dict())
        pending = fastckpt.save_async(model.state_dict(), tmp_path / "c", io=fastckpt.IO(lazy=True))
        assert begun.wait(60)
        forward(torch.randn(5, 4))
        changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
        assert changed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        release.set()
        pending.result(60)
        assert same(dict(fastckpt.load(tmp_path / "c")), before)


def composed():
    """Return tensors whose changes torch does not count, or not completely, and a change of each."""
    from torch.testing._internal.two_tensor import TwoTensor

    with torch.inference_mode():
        inference = torch.ones(LARGE)
    wrapper = TwoTensor(torch.ones(LARGE), torch.ones(LARGE))
    quantised = torch.quantize_per_tensor(torch.ones(4 * LARGE), 0.1, 0, torch.qint8)
    jagged = torch.nested.nested_tensor([torch.ones(300, 200), torch.ones(400, 200)], layout=torch.jagged)
    return {
        "inference": (inference, torch.inference_mode()(inference.zero_)),
        "wrapper": (wrapper, lambda: wrapper.mul_(0)),
        "wrapper and its part": ([wrapper.a, wrapper], lambda: wrapper.mul_(0)),
        "quantised": (quantised, lambda: quantised.copy_(torch.zeros(4 * LARGE))),
        "jagged": (jagged, lambda: jagged.values().zero_()),
    }


def parts_of(value):
    if isinstance(value, list):
        return [part for item in value for part in parts_of(item)]
    if value.is_quantized:
        return [value.dequantize()]
    if value.is_nested:
        return [value._values]
    return [value.a, value.b] if hasattr(value, "__tensor_flatten__") else [value]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["inference", "wrapper", "wrapper and its part", "quantised", "jagged"])
def test_what_torch_does_not_count_is_copied_at_the_call(tmp_path, held_background, name):
    value, change = composed()[name]
    release, begun = held_background
    registry = fastckpt.Registry()
    if name.startswith("wrapper"):
        registry = fastckpt.Registry(type(value[1] if isinstance(value, list) else value))
    pending = fastckpt.save_async(
        {"v": value, "large": torch.ones(LARGE)}, tmp_path / "c", io=fastckpt.IO(lazy=True), registry=registry
    )
    assert begun.wait(60)
    change()
    assert not any(part.any() for part in parts_of(value))
    release.set()
    pending.result(60)
    loaded = fastckpt.load(tmp_path / "c", registry=registry)["v"]
    assert all((part - 1).abs().max() < 0.1 for part in parts_of(loaded))


# Waits of steps.


def test_a_step_waits_for_the_copy_and_not_for_the_writing(tmp_path, held_background, when_waited_for, monkeypatch):
    copy, _ = held_background
    begun, write = threading.Event(), threading.Event()
    real = Job._write

    def held(job):
        begun.set()
        assert write.wait(60)
        return real(job)

    monkeypatch.setattr(Job, "_write", held)
    parameter, optimizer = one_parameter()
    began = time.perf_counter()
    pending = fastckpt.save_async({"w": parameter}, tmp_path / "c", io=fastckpt.IO(lazy=True))
    called = time.perf_counter() - began
    assert pending.progress().phase == "staging"
    began = time.perf_counter()
    with pytest.raises(TimeoutError):
        pending.wait_staged(0.01)
    called += time.perf_counter() - began
    when_waited_for(lambda: threading.Timer(0.3, copy.set).start())
    began = time.perf_counter()
    optimizer.step()
    waited = time.perf_counter() - began
    assert waited >= 0.3
    assert begun.wait(60)
    assert pending.progress().phase == "writing"
    write.set()
    report = pending.result(60)
    # The stall consists of the call, the wait before the step, and the wait in the step.
    assert 0.3 <= report.stall <= called + waited
    assert report.stall < report.seconds
    assert (fastckpt.load(tmp_path / "c")["w"] == 1).all()


def test_a_step_waits_for_every_save(tmp_path, held_background):
    release, _ = held_background
    parameter, optimizer = one_parameter()
    saves = [
        fastckpt.save_async({"w": parameter}, tmp_path / str(number), io=fastckpt.IO(lazy=True, max_in_flight=3))
        for number in range(3)
    ]
    timer = threading.Timer(0.05, release.set)
    timer.start()
    optimizer.step()
    assert all(save._may_step.is_open() for save in saves)
    for save in saves:
        save.result(60)
        assert (fastckpt.load(save.path)["w"] == 1).all()


def test_a_save_that_fails_or_is_cancelled_lets_the_optimizer_go_on(tmp_path):
    parameter, optimizer = one_parameter()

    def broken(*_):
        time.sleep(0.05)
        raise RuntimeError("cannot copy")

    with points.replaced(points.COPY_OUT, lambda _: broken):
        failing = fastckpt.save_async({"w": torch.ones(LARGE, 2)[:, 0]}, tmp_path / "c", io=fastckpt.IO(lazy=True))
        optimizer.step()
        assert isinstance(failing.exception(), RuntimeError)
    pending = fastckpt.save_async({"w": parameter}, tmp_path / "c", io=fastckpt.IO(lazy=True, bandwidth_limit="20B"))
    assert pending.cancel()
    optimizer.step()
    assert list(tmp_path.iterdir()) == []


def test_a_wait_that_was_interrupted_comes_again(tmp_path, held_background, when_waited_for, monkeypatch):
    parameter, optimizer = one_parameter()
    pending = fastckpt.save_async({"w": parameter}, tmp_path / "c", io=fastckpt.IO(lazy=True))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(pending._may_step), "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    when_waited_for(held_background[0].set)
    optimizer.step()
    pending.result(60)
    assert (fastckpt.load(tmp_path / "c")["w"] == 1).all()


def test_there_is_one_hook_which_keeps_nothing_alive_and_can_be_removed(tmp_path, unhook):
    assert not _global_optimizer_pre_hooks
    parameter, optimizer = one_parameter()
    fastckpt.save_async({"w": parameter}, tmp_path / "c").result(60)
    assert not _global_optimizer_pre_hooks, "only lazy saves need it"
    for _ in range(3):
        fastckpt.save_async({"w": parameter}, tmp_path / "c", io=fastckpt.IO(lazy=True)).result(60)
        optimizer.step()
    assert len(_global_optimizer_pre_hooks) == 1
    gone = [weakref.ref(each) for each in (parameter, optimizer)]
    del parameter, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    unhook()
    unhook()
    assert not _global_optimizer_pre_hooks


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_hook_stays_out_of_compiled_code(tmp_path, when):
    """Dynamo must not trace the hook, with guards on values that other threads change, nor recompile at each save."""
    torch._dynamo.reset()
    parameter, optimizer = one_parameter()

    def save():
        return fastckpt.save_async({"w": parameter}, tmp_path / "c", io=fastckpt.IO(lazy=True))

    if when == "before":
        save().result(60)

    @torch.compile(backend="eager")
    def step():
        optimizer.step()

    step()
    save().result(60)
    step()
    step()
    compiled = Counter(torch._dynamo.utils.counters["frames"])
    for _ in range(10):
        pending = save()
        step()
        pending.result(60)
        step()
    assert torch._dynamo.utils.counters["frames"] == compiled


def test_a_forked_child_steps_without_waiting(tmp_path):
    code = """
import os, sys, threading, torch, fastckpt
from harness.internals import Staging
torch.set_num_threads(1)  # a forked child has none of torch's others, and would wait for them
parameter = torch.nn.Parameter(torch.zeros(1 << 20))
parameter.grad = torch.ones(1 << 20)
optimizer = torch.optim.SGD([parameter], lr=0.1)
gate, copy_late = threading.Event(), Staging._copy_late
def held(staging):
    assert gate.wait(200)
    return copy_late(staging)
Staging._copy_late = held
pending = fastckpt.save_async({"m": parameter}, sys.argv[1], io=fastckpt.IO(lazy=True))
if not os.fork():
    optimizer.step()
    os._exit(int(parameter[0] == 0))
assert os.wait()[1] == 0
assert pending.progress().phase == "staging"
gate.set()
optimizer.step()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], check=True, timeout=240, env=zygote.environment())
    assert fastckpt.verify(tmp_path / "c").ok


# Other changes.


def detected(tmp_path, held_background, state, change):
    """Return the error, as text, of a save during whose copy ``change()`` was called; None without an error."""
    release, begun = held_background
    release.clear()
    begun.clear()
    pending = fastckpt.save_async(state, tmp_path / "c", io=fastckpt.IO(lazy=True, threads=1))
    assert begun.wait(60)
    change()
    release.set()
    error = pending.exception(60)
    return None if error is None else str(error)


@torch.no_grad()
def test_a_change_in_place_fails_the_save_and_is_named(tmp_path, held_background):
    w = torch.ones(LARGE, 2)
    module = torch.nn.Linear(LARGE, 2)
    other = {name: value + 1 for name, value in module.state_dict().items()}
    changes = {
        "w": [
            lambda: w.add_(1),
            w[3:5].zero_,
            lambda: w.view(-1).lerp_(w.view(-1) + 1, 0.5),
            lambda: w.detach().mul_(2),
            lambda: torch._foreach_mul_([w], 2.0),
            lambda: w.copy_(torch.zeros_like(w)),
        ],
        "m.weight": [
            lambda: torch.nn.init.ones_(module.weight),
            lambda: module.load_state_dict(other),
            lambda: module.weight.sub_(module.weight, alpha=0.1),
        ],
    }
    state = {"w": w, "m": module.state_dict(), "still": torch.zeros(LARGE)}
    for name, each in changes.items():
        for change in each:
            text = detected(tmp_path, held_background, state, change)
            assert text is not None
            assert f"changed in place while IO(lazy=True) was copying: {name}. Nothing was written." in text
            assert "wait_staged()" in text
            assert str(tmp_path / "c") in text
            assert not (tmp_path / "c").exists()
    many = {f"t{number}": torch.zeros(LARGE) for number in range(7)}
    text = detected(tmp_path, held_background, many, lambda: torch._foreach_add_([*many.values()], 1))
    assert "copying: t0, t1, t2, t3, t4 and 2 more." in text


def test_what_is_no_change_of_what_is_copied_is_none(tmp_path, held_background):
    parameter, optimizer = one_parameter()
    module = torch.nn.Linear(LARGE, 2)
    other = {name: value + 1 for name, value in module.state_dict().items()}
    state = {"w": parameter, "m": module.state_dict()}

    def change():
        parameter.data = torch.zeros(LARGE)
        module.load_state_dict(other, assign=True)
        optimizer.zero_grad()
        parameter.requires_grad_(False)

    before = {"w": parameter.detach().clone(), "m": clone(module.state_dict())}
    assert detected(tmp_path, held_background, state, change) is None
    loaded = fastckpt.load(tmp_path / "c")
    assert (loaded["w"] == before["w"]).all()
    assert (loaded["m"]["weight"] == before["m"]["weight"]).all()


def test_who_waits_may_change_anything(tmp_path):
    w = torch.zeros(1 << 20)
    for turn in range(20):
        pending = fastckpt.save_async({"w": w}, tmp_path / "c", io=fastckpt.IO(lazy=True))
        pending.wait_staged()
        w += 1
        pending.result(60)
        assert (fastckpt.load(tmp_path / "c")["w"] == turn).all()


def test_a_write_through_data_goes_unseen(tmp_path, held_background):
    """This is not a promise: the documentation warns of such writes."""
    w = torch.ones(LARGE)
    assert detected(tmp_path, held_background, {"w": w}, w.data.zero_) is None
    assert (fastckpt.load(tmp_path / "c")["w"] == 0).all()


def test_a_tensor_that_gets_other_memory_is_saved_as_it_was(tmp_path, held_background):
    """``p.data = other`` frees memory that a lazy copy has not read yet."""
    release, begun = held_background
    parameters = [torch.nn.Parameter(torch.full((1 << 18,), float(index))) for index in range(16)]
    for _ in range(5):
        release.clear()
        begun.clear()
        pending = fastckpt.save_async({"p": parameters}, tmp_path / "c", io=fastckpt.IO(lazy=True, threads=1))
        assert begun.wait(60)
        for index, parameter in enumerate(parameters):
            parameter.data = torch.full((1 << 18,), -1.0)
            assert parameter[0] == -1, index
        assert pending.progress().staged == 0
        release.set()
        pending.result(60)
        loaded = fastckpt.load(tmp_path / "c")["p"]
        assert all((found == index).all() for index, found in enumerate(loaded))
        for index, parameter in enumerate(parameters):
            parameter.data = torch.full((1 << 18,), float(index))


def test_threads_that_step_and_save_at_random_agree(tmp_path):
    """No gates: a fused optimizer steps in one thread, and another thread saves, under the lock of the program."""
    parameter, optimizer = one_parameter(fused=True)
    parameter.data = torch.zeros(1 << 20)
    parameter.grad = -torch.ones(1 << 20)
    lock, rng, end = threading.Lock(), random.Random(0), threading.Event()

    def train():
        while not end.is_set():
            with lock:
                optimizer.step()

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(20):
            with lock:
                value = parameter[0].item()
                pending = fastckpt.save_async(
                    {"w": parameter}, tmp_path / "c", io=fastckpt.IO(lazy=True, threads=rng.choice([1, 2]))
                )
            pending.result(60)
            assert (fastckpt.load(tmp_path / "c")["w"] == value).all()
    finally:
        end.set()
        trainer.join(60)
