"""Guards: large buffers that forward changes are copied when a lazy save is called."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import fastckpt
from harness import limits
from harness.same import same

pytestmark = pytest.mark.usefixtures("alone")
LARGE = limits.of("copied at the call of a lazy save") // 4


class Queue(torch.nn.Module):
    """As in contrastive learning, forward changes a large buffer through ``data``, which torch does not count."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(LARGE, 2)
        self.register_buffer("queue", torch.zeros(4, LARGE))

    def forward(self, x):
        self.queue.data[0] += 1
        return self.project(x)


def save_and_forward(tmp_path, held_background, model):
    """Return the result of a lazy save whose copy begins before a forward and continues after it."""
    release, begun = held_background
    release.clear()
    begun.clear()
    pending = fastckpt.save_async(model.state_dict(), tmp_path / "c", io=fastckpt.IO(lazy=True))
    assert begun.wait(60)
    model(torch.randn(5, LARGE))
    assert pending.progress().phase == "staging"
    release.set()
    pending.result(60)
    return dict(fastckpt.load(tmp_path / "c"))


@pytest.mark.parametrize("compiled", [None, "before", "after"])
def test_buffers_of_a_guarded_module_are_copied_at_the_call(tmp_path, held_background, compiled):
    torch._dynamo.reset()
    model = Queue()
    unguarded = copy.deepcopy(model.state_dict())
    assert not same(save_and_forward(tmp_path, held_background, model), dict(unguarded)), "so this test can fail"
    if compiled == "before":
        model.compile(backend="eager")
        model(torch.randn(5, LARGE))
    with fastckpt.background.guard(model) as guard:
        if compiled == "after":
            model.compile(backend="eager")
        assert fastckpt.background.guard(model) is guard
        for _ in range(2):
            before = copy.deepcopy(model.state_dict())
            assert same(save_and_forward(tmp_path, held_background, model), dict(before))
    before = copy.deepcopy(model.state_dict())
    assert not same(save_and_forward(tmp_path, held_background, model), dict(before)), "it was removed"


def test_a_guard_that_comes_after_the_save_waits_for_it_once(tmp_path, held_background, when_waited_for):
    release, begun = held_background
    model = Queue()
    before = copy.deepcopy(model.state_dict())
    pending = fastckpt.save_async(model.state_dict(), tmp_path / "c", io=fastckpt.IO(lazy=True))
    assert begun.wait(60)
    when_waited_for(release.set)
    fastckpt.background.guard(model)
    assert pending.progress().phase != "staging"
    model(torch.randn(5, LARGE))
    pending.result(60)
    assert same(dict(fastckpt.load(tmp_path / "c")), dict(before))
    # The next save copies guarded buffers at the call, and needs no wait.
    release.clear()
    begun.clear()
    pending = fastckpt.save_async(model.state_dict(), tmp_path / "c", io=fastckpt.IO(lazy=True))
    assert begun.wait(60)
    fastckpt.background.guard(model)
    assert pending.progress().phase == "staging"
    release.set()
    pending.result(60)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_buffers_of_every_kind_are_copied_at_the_call(tmp_path, held_background):
    """The buffers are strided, shared, sparse, quantised, or belong to nested modules."""
    release, begun = held_background
    model, inner = torch.nn.Linear(LARGE, 2), torch.nn.Module()
    inner.register_buffer("strided", torch.ones(LARGE, 2)[:, 0])
    inner.register_buffer("part", torch.ones(2 * LARGE)[3 : 3 + LARGE])
    inner.register_buffer("sparse", torch.ones(LARGE).to_sparse())
    inner.register_buffer("quantized", torch.quantize_per_tensor(torch.ones(4 * LARGE), 0.1, 0, torch.qint8))
    inner.register_buffer("meta", torch.ones(3, device="meta"), persistent=False)
    model.inner = inner
    fastckpt.background.guard(model)
    state = {"model": model.state_dict(), "view": inner.part.view(2, -1)}
    before = copy.deepcopy(state)
    pending = fastckpt.save_async(state, tmp_path / "c", io=fastckpt.IO(lazy=True))
    assert begun.wait(60)
    inner.strided.zero_()
    inner.part.zero_()
    inner.sparse._values().zero_()
    inner.quantized.copy_(torch.zeros(4 * LARGE))
    release.set()
    pending.result(60)
    loaded = fastckpt.load(tmp_path / "c")
    found, expected = (each["model"].pop("inner.quantized").dequantize() for each in (loaded, before))
    assert torch.equal(found, expected)
    assert same(loaded, before)


def test_a_thousand_guards_keep_nothing_alive():
    model = Queue()
    guards = {id(guard): guard for guard in (fastckpt.background.guard(model) for _ in range(1000))}
    (guard,) = guards.values()
    gone = [weakref.ref(model), weakref.ref(guard)]
    del model, guard
    guards.clear()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize(
    "wrong", [None, 5, {}, [], "model", torch.zeros(3), object()], ids=lambda wrong: type(wrong).__name__
)
def test_what_cannot_be_guarded_is_told(wrong):
    with pytest.raises(TypeError, match=rf"guard: {type(wrong).__qualname__} is not a module; call wait_staged\(\)"):
        fastckpt.background.guard(wrong)


def test_an_optimizer_needs_no_guard():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(TypeError, match="guard: SGD is an optimizer, or wraps one, and needs no guard"):
        fastckpt.background.guard(optimizer)
