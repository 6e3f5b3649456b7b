"""Lazy saves: the copy runs beside forward and backward, and a guard holds back what would change it."""

from __future__ import annotations

import copy
import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

import fastckpt
from fastckpt import PendingSave
from fastckpt._background import job as _job
from harness.same import same

TURNS = 3000


@pytest.fixture(autouse=True)
def _clean():
    yield
    fastckpt.drain(60)
    fastckpt.release_buffers()


@pytest.fixture
def slow_copy(monkeypatch):
    """The copy of strided tensors dawdles at random between pieces, and so does whatever it competes with."""
    from fastckpt._tensors import memory as _memory

    rng = random.Random(0)
    real = _memory.copy_out
    stats = {"pieces": 0}

    def copy_out(*arguments):
        dawdle = rng.random()
        if dawdle < 0.3:
            time.sleep(dawdle * 0.002)
        stats["pieces"] += 1
        return real(*arguments)

    monkeypatch.setattr(_memory, "copy_out", copy_out)
    return stats


def clone(state):
    return {key: clone(value) if isinstance(value, dict) else value.clone() for key, value in state.items()}


def make(width=6):
    """A model whose every tensor is strided, so that the (instrumented) Python road copies each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))
    for module in model:
        for name, parameter in list(module.named_parameters(recurse=False)):
            strided = torch.randn(*parameter.shape, 2)[..., 0]
            assert not strided.is_contiguous() or strided.numel() < 2
            setattr(module, name, torch.nn.Parameter(strided))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.dim():
                setattr(module, name, torch.ones(*buffer.shape, 2)[..., 0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer


def step(model, optimizer, rng):
    if rng.random() < 0.3:
        time.sleep(rng.random() * 0.001)
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().sum().clamp(max=10).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if rng.random() < 0.3:
        time.sleep(rng.random() * 0.001)
    optimizer.step()


def train(tmp_path, turns, *, guarded, seed=0, release=None):
    """Save lazily, train on, and compare what was saved with a copy taken at the call; the number that differ.

    ``release`` is the event that a copy waits for: it is set when the steps are made.
    """
    rng = random.Random(seed)
    model, optimizer = make()
    step(model, optimizer, rng)
    if guarded == "once":
        fastckpt.guard(optimizer)
        fastckpt.guard(model)
    wrong = 0
    for _ in range(turns):
        state = {
            "model": model.state_dict(),
            "momentum": {str(index): entry["momentum_buffer"] for index, entry in enumerate(optimizer.state.values())},
        }
        expected = clone(state)
        if release is not None:
            release.clear()
        pending = fastckpt.save_async(state, tmp_path / "c", lazy=True, io="threads", threads=rng.choice([1, 2]))
        if guarded == "each":
            fastckpt.guard(optimizer, pending)
            fastckpt.guard(model, pending)
        for _ in range(rng.choice([1, 1, 2])):
            step(model, optimizer, rng)
        if release is not None:
            release.set()
        pending.result(60)
        found = fastckpt.load(tmp_path / "c", verify=False)
        wrong += not all(
            torch.equal(found[part][name], expected[part][name]) for part in expected for name in expected[part]
        )
    return wrong, model, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("guarded", ["each", "once"])
def test_what_is_saved_is_what_was_there_at_the_call(tmp_path, slow_copy, guarded):
    """Thousands of interleavings of a slow copy with a loop that changes every tensor in place."""
    wrong, _, optimizer = train(tmp_path, TURNS // 2, guarded=guarded)
    assert wrong == 0
    assert slow_copy["pieces"] > TURNS
    # One hook, however many saves.
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_without_the_guard_values_differ(tmp_path, held_copy):
    """Not a promise, but what the documentation warns of: so that nobody takes the guard for decoration."""
    wrong, *_ = train(tmp_path, 20, guarded="no", release=held_copy)
    assert wrong == 20


def test_a_guard_waits_for_the_copy_and_not_for_the_writing(tmp_path, held_copy, when_waited_for, monkeypatch):
    write = threading.Event()
    real = _job.Job._write

    def held(job):
        assert write.wait(60)
        return real(job)

    monkeypatch.setattr(_job.Job, "_write", held)
    model, optimizer = make()
    step(model, optimizer, random.Random(0))
    began = time.perf_counter()
    pending = fastckpt.save_async(
        {"m": model.state_dict(), "more": torch.zeros(1 << 18)}, tmp_path / "c", lazy=True, bandwidth_limit=2e6
    )
    called = time.perf_counter() - began
    fastckpt.guard(optimizer, pending)
    optimizer.zero_grad()
    model(torch.randn(4, 6)).sum().backward()  # nothing holds it, for the guard is the optimizer's alone
    assert pending.progress().phase == "staging"
    began = time.perf_counter()
    with pytest.raises(TimeoutError):
        pending.wait_staged(0.01)
    called += time.perf_counter() - began
    when_waited_for(lambda: threading.Timer(0.3, held_copy.set).start())
    began = time.perf_counter()
    optimizer.step()
    waited = time.perf_counter() - began
    assert waited >= 0.3
    assert pending.progress().phase == "writing"
    write.set()
    report = pending.result(60)
    # The wait in step counts, the one before, and the call; nothing else.
    assert 0.3 <= report.stall <= called + waited
    assert report.stall < report.seconds


def test_a_save_that_fails_or_is_cancelled_lets_the_optimizer_go_on(tmp_path, monkeypatch):
    model, optimizer = make()
    fastckpt.guard(optimizer)

    def broken(*_):
        time.sleep(0.05)
        raise RuntimeError("cannot copy")

    monkeypatch.setattr("fastckpt._tensors.memory.copy_out", broken)
    failing = fastckpt.save_async(model.state_dict(), tmp_path / "c", lazy=True)
    step(model, optimizer, random.Random(0))
    assert isinstance(failing.exception(), RuntimeError)
    monkeypatch.undo()
    pending = fastckpt.save_async(model.state_dict(), tmp_path / "c", lazy=True, bandwidth_limit=20)
    assert pending.cancel()
    step(model, optimizer, random.Random(0))
    assert list(tmp_path.iterdir()) == []


def test_a_thousand_guards_leave_one_hook_and_keep_nothing_alive(tmp_path):
    model, optimizer = make()
    for _ in range(1000):
        guard = fastckpt.guard(optimizer)
        assert fastckpt.guard(model) is not guard
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert fastckpt.guard(optimizer) is guard
    guard.remove()
    guard.remove()
    assert len(optimizer._optimizer_step_pre_hooks) == 0
    with fastckpt.guard(optimizer) as other:
        assert other is not guard
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert len(optimizer._optimizer_step_pre_hooks) == 0
    fastckpt.guard(optimizer)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_module_without_buffers_needs_no_guard():
    with pytest.warns(RuntimeWarning, match=r"this Linear has no buffers.*guard the optimizer") as told:
        fastckpt.guard(torch.nn.Linear(3, 3))
    assert told[0].filename == __file__
    fastckpt.guard(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))


@pytest.mark.parametrize(
    "wrong", [None, 5, {}, [], "model", torch.zeros(3), object()], ids=lambda wrong: type(wrong).__name__
)
def test_what_cannot_be_guarded_is_told(wrong):
    with pytest.raises(TypeError, match=rf"guard: neither .*: {type(wrong).__qualname__}; call wait_staged\(\)"):
        fastckpt.guard(wrong)


def test_a_tensor_that_gets_other_memory_is_saved_as_it_was(tmp_path, held_copy):
    """``p.data = other`` frees what a lazy copy still has to read."""
    parameters = [torch.nn.Parameter(torch.full((1 << 18,), float(index))) for index in range(16)]
    # Of whole pages, and so the first of its file.
    blocker = torch.zeros(1024, 2)[:, 0]
    for _ in range(5):
        # The one thread copies it first, and so all others when the event is set.
        held_copy.clear()
        pending = fastckpt.save_async({"b": blocker, "p": parameters}, tmp_path / "c", lazy=True, threads=1)
        for index, parameter in enumerate(parameters):
            parameter.data = torch.full((1 << 18,), -1.0)
            assert parameter[0] == -1, index
        assert pending.progress().staged == 0
        held_copy.set()
        pending.result(60)
        loaded = fastckpt.load(tmp_path / "c")["p"]
        assert all((found == index).all() for index, found in enumerate(loaded))
        for index, parameter in enumerate(parameters):
            parameter.data = torch.full((1 << 18,), float(index))


def test_a_forked_child_steps_without_waiting(tmp_path):
    code = """
import os, sys, threading, torch, fastckpt
from fastckpt._background import job as _job
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gate, stage = threading.Event(), _job.Job.stage
def held(job, wanted, *, last):
    assert not last or gate.wait(60)
    stage(job, wanted, last=last)
_job.Job.stage = held
pending = fastckpt.save_async({"m": torch.zeros(1 << 20), **model.state_dict()}, sys.argv[1], lazy=True)
fastckpt.guard(optimizer, pending)
if not os.fork():
    optimizer.step()
    os._exit(0)
assert os.wait()[1] == 0
assert pending.progress().phase == "staging"
gate.set()
optimizer.step()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], check=True, timeout=60, env={**os.environ})
    assert fastckpt.verify(tmp_path / "c").ok


@pytest.fixture
def held_copy(monkeypatch):
    """The copy of strided tensors begins when the event is set."""
    from fastckpt._tensors import memory as _memory

    release = threading.Event()
    real = _memory.copy_out

    def held(*arguments):
        assert release.wait(60)
        return real(*arguments)

    monkeypatch.setattr(_memory, "copy_out", held)
    yield release
    release.set()


@pytest.fixture
def when_waited_for(monkeypatch):
    """``when_waited_for(function)`` calls it once, when somebody next waits for a copy that is not done."""
    functions = []
    real = PendingSave.wait_staged

    def wait_staged(pending, timeout=None):
        if functions and not pending._staged.is_set():
            functions.pop()()
        real(pending, timeout)

    monkeypatch.setattr(PendingSave, "wait_staged", wait_staged)
    yield functions.append
    assert functions == [], "nobody waited"


def one_parameter():
    parameter = torch.nn.Parameter(torch.ones(300, 2)[:, 0])
    parameter.grad = torch.ones(300)
    return parameter, torch.optim.SGD([parameter], lr=1.0)


def test_a_guard_waits_for_each_save_it_was_given(tmp_path, held_copy, when_waited_for):
    parameter, optimizer = one_parameter()
    first = fastckpt.save_async({"w": parameter}, tmp_path / "1", lazy=True)
    fastckpt.guard(optimizer, first)
    second = fastckpt.save_async({"w": torch.zeros(3)}, tmp_path / "2", lazy=True, max_in_flight=2)
    fastckpt.guard(optimizer, second)
    second.result(60)
    when_waited_for(held_copy.set)
    optimizer.step()
    first.result(60)
    assert (fastckpt.load(tmp_path / "1")["w"] == 1).all()
    assert (parameter == 0).all()


def test_a_wait_that_was_interrupted_comes_again(tmp_path, held_copy, when_waited_for, monkeypatch):
    parameter, optimizer = one_parameter()
    pending = fastckpt.save_async({"w": parameter}, tmp_path / "c", lazy=True)
    fastckpt.guard(optimizer, pending)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(pending), "wait_staged", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    when_waited_for(held_copy.set)
    optimizer.step()
    pending.result(60)
    assert (fastckpt.load(tmp_path / "c")["w"] == 1).all()


def test_a_guard_that_is_never_asked_keeps_few_saves(tmp_path):
    _, optimizer = one_parameter()
    for follows in (False, True):
        if follows:
            fastckpt.guard(optimizer)
        for _ in range(5):
            pending = fastckpt.save_async({"w": torch.zeros(3)}, tmp_path / "c", lazy=True)
            fastckpt.guard(optimizer, pending)
            pending.result(60)
        assert len(fastckpt.guard(optimizer)._pending) <= 1


@pytest.fixture
def held_background(monkeypatch):
    """What a lazy save copies after its call is copied when the event is set; with it, that it has begun."""
    release, begun = threading.Event(), threading.Event()
    real = _job.Job.stage

    def stage(job, wanted, *, last):
        if last:
            begun.set()
            assert release.wait(60)
        real(job, wanted, last=last)

    monkeypatch.setattr(_job.Job, "stage", stage)
    yield release, begun
    release.set()


def norm():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))


def compiled_from_outside(model, backend):
    return torch.compile(model, backend=backend)


def compiled_in_place(model, backend):
    model.compile(backend=backend)
    return model


def compiled_in_part(model, backend):
    model[1] = torch.compile(model[1], backend=backend)
    return model


def compiled_step(model, backend):
    return torch.compile(lambda data: model(data) + 1, backend=backend, fullgraph=True)


def not_compiled(model, backend):
    return model


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "how", [compiled_from_outside, compiled_in_place, compiled_in_part, compiled_step, not_compiled]
)
@torch.no_grad()
def test_forward_changes_no_buffer_under_a_copy_compiled_or_not(tmp_path, held_background, how, when, backend):
    """Code that was compiled before the guard looks for no hooks of later."""
    release, begun = held_background
    torch._dynamo.reset()
    model = norm()
    if when == "before":
        fastckpt.guard(model)
    forward = how(model, backend)
    forward(torch.randn(5, 4))
    if when == "after":
        fastckpt.guard(model)
    for turn in range(2):
        release.clear()
        before = clone(model.state_dict())
        pending = fastckpt.save_async(model.state_dict(), tmp_path / "c", lazy=True)
        assert begun.wait(60)
        forward(torch.randn(5, 4))
        # It went on beside the copy, and the optimizer alone has to wait.
        assert pending.progress().phase == "staging"
        after = clone(model.state_dict())
        release.set()
        pending.result(60)
        loaded = fastckpt.load(tmp_path / "c")
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert {name.rpartition(".")[2] for name in changed} == {"running_mean", "running_var", "num_batches_tracked"}
        assert all(torch.equal(loaded[name], before[name]) for name in before), turn


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace:UserWarning")
def test_a_compiled_step_waits(tmp_path, held_background, when_waited_for, when, backend):
    release, begun = held_background
    torch._dynamo.reset()
    parameter, optimizer = one_parameter()
    if when == "before":
        fastckpt.guard(optimizer)
    step = torch.compile(optimizer.step, backend=backend)
    step()
    fastckpt.guard(optimizer)
    for _ in range(2):
        release.clear()
        begun.clear()
        before = parameter.detach().clone()
        pending = fastckpt.save_async({"w": parameter}, tmp_path / "c", lazy=True)
        assert begun.wait(60)
        when_waited_for(release.set)
        step()
        pending.result(60)
        assert torch.equal(fastckpt.load(tmp_path / "c")["w"], before)
        assert not torch.equal(parameter, before)


class Accelerated(torch.optim.Optimizer):
    """As accelerate's: a subclass for the sake of isinstance alone, which inherits methods without their fields."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)


class Scaled:
    """As DeepSpeed's: a wrapper that is no optimizer of torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)


class Engine(torch.nn.Module):
    """As DeepSpeed's: a module that steps, too."""

    def __init__(self, module, optimizer):
        super().__init__()
        self.module = module
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


@pytest.mark.parametrize(
    "wrap",
    [
        Accelerated,
        Scaled,
        lambda optimizer: Accelerated(Scaled(optimizer)),
        lambda optimizer: Engine(torch.nn.Linear(3, 3), Scaled(Accelerated(optimizer))),
    ],
    ids=["accelerate", "scaled", "nested", "engine"],
)
@pytest.mark.parametrize("once", [True, False])
def test_a_wrapped_optimizer_waits(tmp_path, held_background, when_waited_for, wrap, once):
    release, begun = held_background
    parameter, optimizer = one_parameter()
    wrapped = wrap(optimizer)
    if once:
        guard = fastckpt.guard(wrapped)
    pending = fastckpt.save_async({"w": parameter}, tmp_path / "c", lazy=True)
    assert begun.wait(60)
    at_once = not once and isinstance(wrapped, Engine)  # it waits for the engine's buffers
    if at_once:
        when_waited_for(release.set)
    if not once:
        guard = fastckpt.guard(wrapped, pending)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    if not isinstance(wrapped, Engine):
        assert fastckpt.guard(optimizer) is guard
    if not at_once:
        when_waited_for(release.set)
    wrapped.step()
    pending.result(60)
    assert (fastckpt.load(tmp_path / "c")["w"] == 1).all()
    assert (parameter == 0).all()
    guard.remove()
    assert not optimizer._optimizer_step_pre_hooks


def test_a_wrapper_of_nothing_is_told():
    wrapper = Scaled(None)
    wrapper.optimizer = wrapper
    for wrong in (Scaled(None), Accelerated(None), wrapper):
        with pytest.raises(TypeError, match="guard: neither"):
            fastckpt.guard(wrong)


@pytest.mark.parametrize("given", [True, False])
def test_a_guard_that_comes_after_the_save_waits_for_the_buffers_at_once(
    tmp_path, held_background, when_waited_for, given
):
    release, begun = held_background
    model = norm()
    before = clone(model.state_dict())
    pending = fastckpt.save_async(model.state_dict(), tmp_path / "c", lazy=True)
    assert begun.wait(60)
    when_waited_for(release.set)
    fastckpt.guard(model, pending if given else None)
    assert pending.progress().phase != "staging"
    model(torch.randn(5, 4))
    pending.result(60)
    loaded = fastckpt.load(tmp_path / "c")
    assert all(torch.equal(loaded[name], before[name]) for name in before)
    # The next one knows the guard, and need not be waited for.
    release.clear()
    begun.clear()
    pending = fastckpt.save_async(model.state_dict(), tmp_path / "c", lazy=True)
    assert begun.wait(60)
    fastckpt.guard(model, pending)
    fastckpt.guard(model)
    assert pending.progress().phase == "staging"
    release.set()
    pending.result(60)


def test_a_guard_that_was_removed_copies_nothing_at_the_call(tmp_path, held_background):
    release, _ = held_background
    model = norm()
    with fastckpt.guard(model) as guard:
        pass
    release.set()
    pending = fastckpt.save_async(model.state_dict(), tmp_path / "c", lazy=True)
    pending.result(60)
    assert guard not in pending.guards


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_buffers_of_every_kind_are_copied_at_the_call(tmp_path, held_background):
    """Strided, shared, sparse and nested in other modules; and those that forward changes in a hook."""
    release, begun = held_background
    model = torch.nn.utils.spectral_norm(torch.nn.Linear(30, 30))
    inner = torch.nn.Module()
    inner.register_buffer("strided", torch.ones(30, 2)[:, 0])
    inner.register_buffer("part", torch.ones(30)[3:7])
    inner.register_buffer("sparse", torch.eye(3).to_sparse())
    inner.register_buffer("quantized", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))
    inner.register_buffer("meta", torch.ones(3, device="meta"), persistent=False)
    model.inner = inner
    fastckpt.guard(model)
    state = {"model": model.state_dict(), "view": inner.part.view(2, 2)}
    before = copy.deepcopy(state)
    pending = fastckpt.save_async(state, tmp_path / "c", lazy=True)
    assert begun.wait(60)
    u = model.weight_u.clone()
    model(torch.randn(2, 30))
    assert not torch.equal(u, model.weight_u)
    inner.strided.zero_()
    inner.part.zero_()
    inner.sparse._values().zero_()
    inner.quantized.copy_(torch.zeros(4))
    release.set()
    pending.result(60)
    loaded = fastckpt.load(tmp_path / "c")
    found, expected = (each["model"].pop("inner.quantized").dequantize() for each in (loaded, before))
    assert torch.equal(found, expected)
    assert same(loaded, before)


def test_data_parallel_modules_spread_no_buffers_under_a_copy(tmp_path, held_background):
    release, begun = held_background
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        spread = torch.nn.parallel.DistributedDataParallel(norm())
        fastckpt.guard(spread)
        before = clone(spread.module.state_dict())
        pending = fastckpt.save_async(spread.state_dict(), tmp_path / "c", lazy=True)
        assert begun.wait(60)
        spread(torch.randn(5, 4))
        release.set()
        pending.result(60)
        loaded = fastckpt.load(tmp_path / "c")
        assert all(torch.equal(loaded[f"module.{name}"], before[name]) for name in before)
    finally:
        torch.distributed.destroy_process_group()


def test_a_guarded_engine_can_be_copied_while_a_save_goes_on(tmp_path, held_copy):
    _, optimizer = one_parameter()
    engine = Engine(torch.nn.BatchNorm1d(3), optimizer)
    fastckpt.guard(engine)
    pending = fastckpt.save_async({"w": torch.ones(300, 2)[:, 0]}, tmp_path / "c", lazy=True)
    copied = copy.deepcopy(engine)
    copied.module(torch.randn(4, 3))  # its tensors are in no save: nothing to wait for
    assert not pending.done()
    held_copy.set()
    pending.result(60)
