"""Drawn interleavings of lazy saves from devices with training: streams wait, and the values at the call are saved.

The copies of the stand-in wait in their streams until they are released, so only the order on the device keeps a
requested step from changing tensors that the copies have not read yet.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree

import fastckpt
from harness import limits, needs, points, standin
from harness.draws import one_in
from harness.same import same

if not standin.AVAILABLE:
    needs.missing("a torch that can set up a device from Python")

TURNS = 600 // one_in(2)
DEVICE, OTHER = torch.device("standin", 0), torch.device("standin", 1)
SIDE = (40, 30)
pytestmark = pytest.mark.usefixtures("alone", "clean")


@pytest.fixture
def clean(monkeypatch):
    """Matrices are copied late, and biases at the call; nothing is gathered, so there are many copies."""
    limits.lower(monkeypatch, "copied at the call of a lazy save", 1024)
    limits.lower(monkeypatch, "copied on a device where it is", 0)
    standin.faults.reset(late=0.0005)
    yield
    misuse = standin.faults.misuse
    standin.faults.reset()
    fastckpt.background.drain(60)
    fastckpt.background.release_buffers()
    assert misuse == []


@pytest.fixture
def directory():
    """A directory in which syncs cost nothing, because durability is not tested here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


class Training:
    """Parameters on devices, their gradients, and the optimizer of one kind."""

    #: Whether a step makes only changes in place. For other changes, the stand-in has to wait on the host.
    in_place = True

    def __init__(self, make=torch.optim.SGD, devices=(DEVICE,), **options):
        options = options or {"lr": 0.5, "momentum": 0.5, "foreach": False}
        shapes = [SIDE, (SIDE[0],), SIDE, SIDE]
        self.parameters = [
            torch.nn.Parameter(torch.rand(shape).to(devices[number % len(devices)]))
            for number, shape in enumerate(shapes)
        ]
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer = make(self.parameters, **options)
        self.step()

    def backward(self):
        for parameter in self.parameters:
            parameter.grad.mul_(-0.75)

    def step(self):
        self.optimizer.step()

    def state(self):
        return {"parameters": [each.detach() for each in self.parameters], "optimizer": self.optimizer.state_dict()}

    def save(self, path, **options):
        return fastckpt.save_async(self.state(), path, io=fastckpt.IO(lazy=True, **options))


class Functional(Training):
    in_place = False


class InThread(Training):
    """A training in which another thread steps."""

    def step(self):
        thread = threading.Thread(target=self.optimizer.step)
        thread.start()
        thread.join(60)


class FromStream(Training):
    """A training that saves in a separate stream, which follows the training stream."""

    def __init__(self):
        self.stream = standin.Stream(DEVICE)
        super().__init__()

    def save(self, path, **options):
        self.stream.wait_stream(standin.current_stream(DEVICE))
        with torch.get_device_module(DEVICE).stream(self.stream):
            return super().save(path, **options)


class Averaged(Training):
    """A training whose steps update an average, a change that torch does not count."""

    def __init__(self):
        self.average = None
        super().__init__()
        self.average = [each.detach().clone() for each in self.parameters]

    def step(self):
        super().step()
        for mean, parameter in zip(self.average or (), self.parameters, strict=False):
            mean.data.mul_(0.5).add_(parameter.data, alpha=0.5)

    def state(self):
        return {**super().state(), "average": self.average}


class Turns(Training):
    """A training in which two optimizers with disjoint parameters step in turns."""

    def __init__(self):
        self.other = Training()
        self.turn = 0
        super().__init__()

    def backward(self):
        super().backward()
        self.other.backward()

    def step(self):
        self.turn += 1
        both = (super().step, self.other.step)
        both[self.turn % 2]()
        both[1 - self.turn % 2]()

    def state(self):
        return {"one": super().state(), "other": self.other.state()}


class OfOnesOwn(torch.optim.Optimizer):
    """An optimizer that writes through ``data``, which torch does not count."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad.data, alpha=-group["lr"])


KINDS = {
    "SGD": Training,
    "SGD foreach": lambda: Training(lr=0.5, momentum=0.5, foreach=True),
    "AdamW": lambda: Functional(torch.optim.AdamW, lr=0.1, foreach=False),
    "AdamW foreach": lambda: Functional(torch.optim.AdamW, lr=0.1, foreach=True),
    "of one's own": lambda: Training(OfOnesOwn, lr=0.5),
    "in another thread": InThread,
    "saved in another stream": FromStream,
    "with an average": Averaged,
    "two": Turns,
    "two devices": lambda: Training(devices=(DEVICE, OTHER)),
}


def synchronize():
    for device in (DEVICE, OTHER):
        torch.get_device_module(device).synchronize(device)


def values_of(state):
    """Return a copy on the host of a state's current values on the device."""
    synchronize()
    return _pytree.tree_map(lambda one: standin.on_host(one).clone() if isinstance(one, torch.Tensor) else one, state)


def turn_of(training, path, rng, *, let_go):
    """Save, train on, and return whether the values at the call were saved; ``let_go`` is when copies may begin."""
    expected = values_of(training.state())
    with standin.faults.held() as go:
        # This change is not done when the save is called, but the save still comes after it.
        first = training.state()["one" if type(training) is Turns else "parameters"]
        first = first["parameters"][0] if isinstance(first, dict) else first[0]
        first.add_(1)
        (expected["one"] if type(training) is Turns else expected)["parameters"][0] += 1
        pending = training.save(path, pin=rng.choice([True, True, True, False]), engine="buffered")
        timer = threading.Timer(rng.random() * 0.01, go)
        if let_go == "some time":
            timer.start()
        for number in range(rng.choice([1, 1, 2])):
            training.backward()
            if let_go == "before a step" and number == 0:
                go()
            training.step()
        if let_go == "when the steps are done":
            synchronize_default()
    timer.cancel()
    if let_go == "some time":
        timer.join()  # so that it releases nothing that a later turn holds
    return pending.exception(60) is None and same(fastckpt.load(path, io=fastckpt.IO(verify=False)), expected)


@pytest.mark.slow
def test_what_is_saved_is_what_was_there_at_the_call(directory):
    rng = random.Random(0)
    trainings = {name: make() for name, make in KINDS.items()}
    for number in range(TURNS):
        name = rng.choice(list(trainings))
        training = trainings[name]
        late = ["after the steps"] * 2 if training.in_place else []
        let_go = rng.choice(["some time", "before a step", *late])
        if rng.random() < 0.1:
            # The next save gets new memory, which is pinned while its copies are requested in the background.
            fastckpt.background.release_buffers()
        assert turn_of(training, directory / str(number % 3), rng, let_go=let_go), (number, name, let_go)


@pytest.mark.parametrize("without", [points.HOLD_STEPS, points.HOLD_STREAMS], ids=["unhooked", "unheld"])
@pytest.mark.parametrize("name", KINDS)
def test_without_the_hook_or_what_it_does_values_differ(directory, monkeypatch, unhook, without, name):
    """Without waits, the test above fails with every kind of training."""
    rng = random.Random(0)
    training = KINDS[name]()
    # Nothing is copied at the call: such a copy would hold the stream that the steps follow.
    limits.lower(monkeypatch, "copied at the call of a lazy save", 0)
    # From here on, the memory is pinned, so the copies of a lazy save are requested at the call.
    training.save(directory / "c").result(60)
    unhook()
    with points.replaced(without, lambda _: lambda *_: None):
        for _ in range(3):
            assert not turn_of(training, directory / "c", rng, let_go="when the steps are done")


@pytest.mark.parametrize("protected", [True, False])
def test_memory_that_is_freed_goes_to_others_when_it_has_been_copied(directory, protected):
    """FSDP frees gathered tensors despite references, so a reference alone does not help."""
    fastckpt.save_async({"w": torch.ones(SIDE).to(DEVICE)}, directory / "c").result(60)
    tensor = torch.ones(SIDE).to(DEVICE)
    unprotected = points.replaced(points.PROTECT, lambda _: lambda *_: None)
    with contextlib.nullcontext() if protected else unprotected, standin.faults.held():
        pending = fastckpt.save_async({"w": tensor}, directory / "c", io=fastckpt.IO(lazy=True))
        standin.free(tensor)
        if not protected:
            synchronize_default()
    pending.result(60)
    assert bool((fastckpt.load(directory / "c")["w"] == 1).all()) == protected


def synchronize_default():
    """Wait for the training streams of the program, but not for streams of copies."""
    for device in (DEVICE, OTHER):
        standin.default_stream(device).synchronize()
