"""Drawn interleavings of lazy saves with training: the values at the call are saved."""

from __future__ import annotations

import copy
import random
import tempfile
import threading
from pathlib import Path

import pytest
import torch

import fastckpt
from fastckpt.types import PendingSave
from harness import limits, needs, points
from harness.draws import one_in
from harness.internals import Staging
from harness.same import same

TURNS = 1000 // one_in(2)
pytestmark = [
    pytest.mark.usefixtures("alone", "matrices_late"),
    pytest.mark.filterwarnings("ignore:.*Profiler record function:UserWarning"),
]


@pytest.fixture
def matrices_late(monkeypatch):
    """Lowers the limit so that the matrices below are copied late; biases, statistics, steps and rates are not."""
    limits.lower(monkeypatch, "copied at the call of a lazy save", 128)


class Gates:
    """Divides the late copy of each save into drawn pieces, each of which waits for a permit."""

    def __init__(self, monkeypatch, rng):
        self.rng = rng
        self.changed = threading.Condition()
        self.permits = 0
        self.open = True
        #: The number of pieces of this save that are still to be copied; None before the copy begins.
        self.left = 0
        real_stage, real_hold = Staging.stage, PendingSave._hold_step

        def stage(staging, wanted, *, last):
            if not last or not staging.late:
                real_stage(staging, wanted, last=last)
                return
            pieces = [*self.pieces(wanted), bytes(len(wanted))]
            with self.changed:
                self.left = len(pieces)
                self.changed.notify_all()
            for number, piece in enumerate(pieces, 1):
                self.enter()
                real_stage(staging, piece, last=number == len(pieces))
                self.done()

        def hold_step(pending):
            self.let_all()
            real_hold(pending)

        monkeypatch.setattr(Staging, "stage", stage)
        monkeypatch.setattr(PendingSave, "_hold_step", hold_step)

    def pieces(self, wanted):
        """Return the wanted tensors in a drawn order, some of them together."""
        order = [index for index, byte in enumerate(wanted) if byte]
        self.rng.shuffle(order)
        while order:
            count = self.rng.choice([1, 1, 2, 4])
            part, order = order[:count], order[count:]
            yield bytes(index in part for index in range(len(wanted)))

    def enter(self):
        with self.changed:
            assert self.changed.wait_for(lambda: self.open or self.permits, 60)
            self.permits -= not self.open

    def done(self):
        with self.changed:
            self.left -= 1
            self.changed.notify_all()

    def close(self):
        with self.changed:
            self.open, self.permits, self.left = False, 0, None

    def let(self, count):
        """Let the copy make ``count`` pieces of progress, and wait until it has made them."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.left is not None, 60)
            left = 0 if self.open else max(0, self.left - count)
            self.permits += 0 if self.open else self.left - left
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.open or self.left <= left, 60)

    def let_all(self):
        with self.changed:
            self.open = True
            self.changed.notify_all()


def model_of(width=8):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, width)
    )


class Training:
    """A model and the optimizer of one kind; only ``step`` changes parameters."""

    def __init__(self, make, **options):
        self.model = model_of()
        self.optimizer = make(self.model.parameters(), **options)
        self.step_once = self.optimizer.step

    def backward(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).square().mean().backward()

    def step(self):
        self.step_once()

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class InThread(Training):
    """A training in which another thread steps."""

    def step(self):
        thread = threading.Thread(target=self.optimizer.step)
        thread.start()
        thread.join(60)


class InBackward(Training):
    """A training with an optimizer for each parameter, which steps as soon as there is a gradient."""

    def __init__(self, make, **options):
        super().__init__(make, **options)
        self.each = {parameter: make([parameter], **options) for parameter in self.model.parameters()}
        for parameter in self.each:
            parameter.register_post_accumulate_grad_hook(self.hook)

    def hook(self, parameter):
        self.each[parameter].step()
        self.each[parameter].zero_grad()

    def step(self):
        pass

    def state(self):
        return {"model": self.model.state_dict(), "each": [each.state_dict() for each in self.each.values()]}


class Compiled(Training):
    """A training whose step is compiled before any lazy save."""

    def __init__(self, make, **options):
        super().__init__(make, **options)
        self.step_once = torch.compile(self.optimizer.step, backend="eager")


class Closure(Training):
    def step(self):
        self.optimizer.step(lambda: self.model(torch.ones(4, 8)).square().mean())


class Scaled(Training):
    def __init__(self, make, **options):
        super().__init__(make, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def backward(self):
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.randn(4, 8)).square().mean()).backward()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self):
        return {**super().state(), "scaler": self.scaler.state_dict()}


class Averaged(Training):
    """A training that averages the weights after each step."""

    def __init__(self, make, **options):
        super().__init__(make, **options)
        self.average = copy.deepcopy(self.model)

    def step(self):
        super().step()
        with torch.no_grad():
            for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
                # Torch does not count this change, but the step before it has waited.
                mean.data.mul_(0.9).add_(parameter.data, alpha=0.1)

    def state(self):
        return {**super().state(), "average": self.average.state_dict()}


class Adversaries(Training):
    """A training with two optimizers, each with half of the saved tensors, which step in turns."""

    def __init__(self, make, **options):
        super().__init__(make, **options)
        self.other = Training(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.turn = 0

    def backward(self):
        super().backward()
        self.other.backward()

    def step(self):
        self.turn += 1
        pair = (self.other, super())
        pair[self.turn % 2].step()
        pair[1 - self.turn % 2].step()

    def state(self):
        return {"generator": self.other.state(), "discriminator": super().state()}


class OfOnesOwn(torch.optim.Optimizer):
    """An optimizer that writes through ``data``, which torch does not count."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad.data, alpha=-0.1)


KINDS = {
    "SGD": lambda: Training(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda: Training(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda: Training(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda: Training(torch.optim.AdamW, foreach=False, amsgrad=True),
    "AdamW foreach": lambda: Training(torch.optim.AdamW, foreach=True),
    "AdamW fused": lambda: Training(torch.optim.AdamW, fused=True),
    "AdamW fused, rate in a tensor": lambda: Training(torch.optim.AdamW, lr=torch.tensor(0.01), fused=True),
    "Adagrad fused": lambda: Training(torch.optim.Adagrad, fused=True),
    "of one's own": lambda: Training(OfOnesOwn),
    "with a closure": lambda: Closure(torch.optim.SGD, lr=0.1, momentum=0.9),
    "in another thread": lambda: InThread(torch.optim.AdamW, fused=True),
    "in backward": lambda: InBackward(torch.optim.AdamW, fused=True),
    "compiled": lambda: Compiled(torch.optim.AdamW, foreach=True),
    "scaled": lambda: Scaled(torch.optim.AdamW, fused=True),
    "with an average": lambda: Averaged(torch.optim.AdamW, fused=True),
    "two": lambda: Adversaries(torch.optim.AdamW, fused=True),
}


def train(directory, gates, rng, trainings, turns):
    """Save at drawn moments, train on during the copy, and compare; return the kinds that differ or failed."""
    wrong = []
    for turn in range(turns):
        name = rng.choice(list(trainings))
        training = trainings[name]
        state = training.state()
        expected = copy.deepcopy(state)
        gates.close()
        path = directory / str(turn % 3)
        pending = fastckpt.save_async(state, path, io=fastckpt.IO("buffered", lazy=True, threads=1))
        try:
            for _ in range(rng.choice([1, 1, 2])):
                gates.let(rng.choice([0, 0, 1, 3]))
                training.backward()
                gates.let(rng.choice([0, 0, 1, 5]))
                training.step()
        finally:
            gates.let_all()
        if pending.exception(60) is not None or not same(fastckpt.load(path, io=fastckpt.IO(verify=False)), expected):
            wrong.append(name)
    return wrong


@pytest.fixture
def memory():
    """A directory in which syncs cost nothing, because durability is not tested here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: with tensors of 256 bytes, torch's threads would mostly spin for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def trainings():
    torch._dynamo.reset()
    made = {name: make() for name, make in KINDS.items()}
    for training in made.values():
        training.backward()
        training.step()
    return made


@pytest.mark.slow
def test_what_is_saved_is_what_was_there_at_the_call(memory, monkeypatch, trainings):
    """No training program here calls ``guard`` or adapts to saves."""
    rng = random.Random(0)
    gates = Gates(monkeypatch, rng)
    assert train(memory, gates, rng, trainings, TURNS) == []


def test_without_the_hook_values_differ(memory, monkeypatch, trainings):
    """Without waits, the test above fails with every kind of optimizer."""
    rng = random.Random(0)
    gates = Gates(monkeypatch, rng)
    with points.replaced(points.HOLD_STEPS, lambda _: lambda: None):
        for name, training in trainings.items():
            assert set(train(memory, gates, rng, {name: training}, 6)) == {name}


def accelerated(model, optimizer):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(model, optimizer)


def fabric(model, optimizer):
    lightning = pytest.importorskip("lightning.fabric")
    return lightning.Fabric(accelerator="cpu", devices=1).setup(model, optimizer)


@pytest.mark.parametrize(("package", "wrap"), [("accelerate", accelerated), ("lightning", fabric)])
@pytest.mark.filterwarnings("ignore::Warning")
def test_optimizers_that_frameworks_wrap_wait(memory, monkeypatch, package, wrap):
    try:
        __import__(package)
    except ImportError:
        needs.missing(f"needs {package}")

    class Wrapped(Training):
        def __init__(self):
            super().__init__(torch.optim.AdamW, fused=True)
            self.model, self.optimizer = wrap(self.model, self.optimizer)
            self.step_once = self.optimizer.step

    rng = random.Random(0)
    gates = Gates(monkeypatch, rng)
    training = Wrapped()
    training.backward()
    training.step()
    assert train(memory, gates, rng, {package: training}, 20) == []
