"""Modules, optimizers and other objects with their own state, in ``into=``."""

from __future__ import annotations

import copy

import pytest
import torch

import fastckpt
from fastckpt import CheckpointError, StructureMismatchError
from harness.reports import with_report
from harness.same import same


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def groups(model):
    return [
        {"params": list(model[0].parameters()), "lr": 0.1},
        {"params": [*model[1].parameters(), *model[3].parameters()], "weight_decay": 0.1},
    ]


OPTIMIZERS = {
    "adam": lambda model: torch.optim.Adam(groups(model), lr=0.01),
    "foreach": lambda model: torch.optim.AdamW(groups(model), lr=0.01, foreach=True, amsgrad=True),
    "fused": lambda model: torch.optim.AdamW(groups(model), lr=0.01, fused=True),
    "tensor lr": lambda model: torch.optim.Adam(groups(model), lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda model: torch.optim.SGD(groups(model), lr=0.01, momentum=0.9, nesterov=True),
    "plain": lambda model: torch.optim.SGD(groups(model), lr=0.01),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2),
    "adafactor": lambda model: torch.optim.Adafactor(groups(model), lr=0.01),
}


def train(model, optimizer, scheduler, steps, seed):
    torch.manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 4)

        def closure(x=x):
            optimizer.zero_grad()
            loss = (model(x) ** 2).sum() + model(x).sin().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        scheduler.step()


def everything(name, seed=0, steps=3):
    model = model_of(seed)
    optimizer = OPTIMIZERS[name](model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    train(model, optimizer, scheduler, steps, seed)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 3}


def states(training):
    return {
        name: copy.deepcopy(value.state_dict()) if hasattr(value, "state_dict") else value
        for name, value in training.items()
    }


@pytest.mark.parametrize("steps", [0, 1, 5], ids=["fresh", "one", "five"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path, name, steps):
    """Training continues as after torch.load and load_state_dict, whatever the optimizer held before."""
    trained = everything(name)
    fastckpt.save(states(trained), tmp_path / "c")
    torch.save(states(trained), tmp_path / "t")
    ours, theirs = everything(name, seed=7, steps=steps), everything(name, seed=8, steps=steps)
    loaded = fastckpt.load(tmp_path / "c", into={**ours, "epoch": 0})
    assert loaded["epoch"] == 3
    assert all(loaded[key] is ours[key] for key in ("model", "optimizer", "scheduler"))
    for key, state in torch.load(tmp_path / "t").items():
        if key != "epoch":
            theirs[key].load_state_dict(state)
    assert same(states(ours), states(theirs))
    for each in (trained, ours, theirs):
        train(each["model"], each["optimizer"], each["scheduler"], 4, 99)
    assert same(states(ours), states(trained))
    assert same(states(theirs), states(trained))


def test_tensors_are_filled_in_place(tmp_path):
    fastckpt.save(states(everything("adam")), tmp_path / "c")
    training = everything("adam", seed=5)
    parameters = list(training["model"].parameters())
    moments = [training["optimizer"].state[p]["exp_avg"] for p in parameters]
    weights = [p.data_ptr() for p in parameters]
    fastckpt.load(tmp_path / "c", into=training)
    assert [p.data_ptr() for p in training["model"].parameters()] == weights
    assert all(training["optimizer"].state[p]["exp_avg"] is m for p, m in zip(parameters, moments, strict=True))


def test_an_object_at_the_root_and_in_containers(tmp_path):
    source = model_of(1)
    fastckpt.save(source.state_dict(), tmp_path / "root")
    model = model_of(2)
    assert fastckpt.load(tmp_path / "root", into=model) is model
    assert same(model.state_dict(), source.state_dict())
    fastckpt.save([(source.state_dict(), 5), {"x": [torch.ones(2)]}, source.state_dict()], tmp_path / "deep")
    one, two, x = model_of(3), model_of(4), torch.zeros(2)
    loaded = fastckpt.load(tmp_path / "deep", into=[(one, 0), {"x": [x]}, two])
    assert loaded[0][0] is one
    assert loaded[0][1] == 5
    assert loaded[1]["x"][0] is x
    assert loaded[2] is two
    assert same(one.state_dict(), source.state_dict())
    assert same(two.state_dict(), source.state_dict())


class Extra(torch.nn.Module):
    """A module whose extra state is a new tensor at each request, each time of another size."""

    def __init__(self, note):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.note = note

    def get_extra_state(self):
        return torch.frombuffer(bytearray(self.note, "utf-8"), dtype=torch.uint8).clone()

    def set_extra_state(self, state):
        self.note = bytes(state.tolist()).decode()


class Nested(torch.nn.Module):
    def __init__(self, note):
        super().__init__()
        self.inner = Extra(note)
        self.norm = torch.nn.BatchNorm1d(2)
        self.notes = {}

    def get_extra_state(self):
        return {"notes": self.notes}

    def set_extra_state(self, state):
        self.notes = state["notes"]


def test_extra_state_of_a_module(tmp_path):
    source = Nested("something long")
    source.notes = {"w": torch.ones(3), "n": 5}
    fastckpt.save({"model": source.state_dict()}, tmp_path / "c")
    model = Nested("short")
    fastckpt.load(tmp_path / "c", into={"model": model})
    assert model.inner.note == "something long"
    assert same(model.notes, source.notes)
    assert same(model.state_dict(), source.state_dict())


@pytest.mark.parametrize("there", [True, False])
def test_extra_state_that_only_one_side_has(tmp_path, there):
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

    source, model = (Extra("x"), Plain()) if there else (Plain(), Extra("x"))
    before = copy.deepcopy(model.state_dict())
    fastckpt.save({"m": torch.nn.Sequential(source)}, tmp_path / "c")
    into = {"m": torch.nn.Sequential(model)}
    with pytest.raises(fastckpt.StructureMismatchError, match=r"\['m'\]: extra state .*_extra_state"):
        fastckpt.load(tmp_path / "c", into=into)
    assert same(model.state_dict(), before)
    fastckpt.load(tmp_path / "c", into=into, strict=False)
    assert same(model.layer.state_dict(), source.layer.state_dict())


class Packed(torch.nn.Module):
    """A module whose state has a value that is no tensor of the module, like the packed form of a quantised weight."""

    def __init__(self, value):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((2,), float(value)))
        self.value = value

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = torch.tensor(self.value)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        if prefix + "packed" in state_dict:
            self.value = state_dict.pop(prefix + "packed").item()
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_module_gets_what_is_not_a_tensor_of_its_own(tmp_path):
    fastckpt.save(Packed(5).state_dict(), tmp_path / "c")
    model = Packed(1)
    w = model.w.data_ptr()
    fastckpt.load(tmp_path / "c", into=model)
    assert (model.value, model.w.tolist(), model.w.data_ptr()) == (5, [5, 5], w)


class Hooked(torch.nn.Module):
    """A module that keeps a value computed from its tensors, and whose hook requires every key."""

    def __init__(self, value):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((2,), float(value)))
        self.total = None
        self.register_load_state_dict_pre_hook(lambda _, state, prefix, *__: state[prefix + "w"])
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "total", module.w.sum().item()))


def test_hooks_of_a_module_run_when_its_tensors_were_filled(tmp_path):
    fastckpt.save({"m": torch.nn.Sequential(Hooked(5), Packed(2))}, tmp_path / "c")
    model = torch.nn.Sequential(Hooked(1), Packed(1))
    w = model[0].w
    fastckpt.load(tmp_path / "c", into={"m": model})
    assert (model[0].total, model[1].value, model[0].w is w, w.tolist()) == (10, 2, True, [5, 5])
    assert w.requires_grad


class Wrapping(torch.nn.Module):
    """A module whose state has another structure than the module, which only its own methods can read."""

    def __init__(self, value):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.value = value

    def state_dict(self):
        return {"net": self.inner.state_dict(), "value": self.value}

    def load_state_dict(self, state, strict):
        assert not strict
        self.inner.load_state_dict(state["net"])
        self.value = state["value"]


def test_a_module_with_a_state_of_another_structure(tmp_path):
    source, model = Wrapping(5), Wrapping(1)
    fastckpt.save(source, tmp_path / "c")
    assert fastckpt.load(tmp_path / "c", into=model) is model
    assert same(model.state_dict(), source.state_dict())


def test_a_part_of_the_state_of_an_optimizer_changes_nothing(tmp_path):
    fastckpt.save(states(everything("adam")), tmp_path / "c")
    training = everything("adam", seed=3)
    before = copy.deepcopy(states(training))
    with pytest.raises(StructureMismatchError, match=r"\['optimizer'\]: part of an optimizer state"):
        fastckpt.load(tmp_path / "c", into=training, exclude="optimizer.state.*")
    assert same(states(training), before)


def test_a_module_whose_tensors_do_not_fit(tmp_path):
    fastckpt.save({"model": model_of(1).state_dict(), "optimizer": {}}, tmp_path / "c")
    model = model_of(2)
    model[0] = torch.nn.Linear(4, 9)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StructureMismatchError, match="nothing was changed") as caught:
        fastckpt.load(tmp_path / "c", into={"model": model, "optimizer": {}})
    assert caught.value.differences[0] == "['model']['0.weight']: shape [8, 4] in the checkpoint, [9, 4] in into="
    assert same(model.state_dict(), before)


def test_tied_and_untied_modules(tmp_path):
    class Language(torch.nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            if tied:
                self.head.weight = self.embed.weight

    tied, apart = Language(True), Language(False)
    fastckpt.save(tied.state_dict(), tmp_path / "tied")
    # A file without the head, like Hugging Face's.
    fastckpt.save({"embed.weight": tied.state_dict()["embed.weight"]}, tmp_path / "less")
    # A file with two equal tensors, as in a format without ties.
    fastckpt.save({name: value.clone() for name, value in tied.state_dict().items()}, tmp_path / "twice")
    fastckpt.save(apart.state_dict(), tmp_path / "apart")
    for path in ("tied", "less", "twice"):
        model = Language(True)
        fastckpt.load(tmp_path / path, into=model)
        assert same(model.state_dict(), tied.state_dict()), path
        assert model.head.weight is model.embed.weight
    model = Language(False)
    fastckpt.load(tmp_path / "tied", into=model)
    assert same(model.state_dict(), tied.state_dict())
    with pytest.raises(StructureMismatchError, match="tied in into= to "):
        fastckpt.load(tmp_path / "apart", into=Language(True))
    del model.head
    fastckpt.load(tmp_path / "tied", into=model)


class Stateful:
    def __init__(self, fails=False):
        self.asked = 0
        self.given = []
        self.fails = fails

    def state_dict(self):
        self.asked += 1
        return {"w": torch.zeros(9)}

    def load_state_dict(self, state):
        if self.fails:
            raise RuntimeError("no thanks")
        self.given.append(state)


def test_whatever_takes_a_state_gets_it(tmp_path):
    state = {"loader": {"w": torch.ones(3), "s": torch.eye(2).to_sparse(), "n": [1, (2,)]}, "n": 5, "none": {}}
    fastckpt.save(state, tmp_path / "c")
    loader, none = Stateful(), Stateful()
    loaded = fastckpt.load(tmp_path / "c", into={"loader": loader, "none": none})
    assert loaded == {"loader": loader, "n": 5, "none": none}
    # The load does not call its state_dict, which may have effects: a data loader would start its workers.
    assert loader.asked == 0
    assert same(loader.given, [state["loader"]])
    assert none.given == [{}]


def test_a_scaler_and_an_averaged_model(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
    scaler.scale(torch.ones(1))
    average = torch.optim.swa_utils.AveragedModel(model_of(1))
    average.update_parameters(model_of(1))
    fastckpt.save({"scaler": scaler.state_dict(), "average": average.state_dict()}, tmp_path / "c")
    fresh = torch.amp.GradScaler("cpu", init_scale=9.0)
    other = torch.optim.swa_utils.AveragedModel(model_of(2))
    fastckpt.load(tmp_path / "c", into={"scaler": fresh, "average": other})
    assert fresh.state_dict() == scaler.state_dict()
    assert same(other.state_dict(), average.state_dict())


def test_nothing_is_changed_when_anything_does_not_fit(tmp_path):
    state = states(everything("adam"))
    training = everything("adam", seed=3)
    before = copy.deepcopy(states(training))
    other = Stateful()
    for broken, line in (
        ({**state, "model": {**state["model"], "0.bias": torch.ones(3)}}, "['model']['0.bias']: shape [3]"),
        (
            {**state, "optimizer": {**state["optimizer"], "param_groups": state["optimizer"]["param_groups"][:1]}},
            "['optimizer']: groups of [2] parameters in the checkpoint, of [2, 4] in into=",
        ),
        ({**state, "optimizer": {"state": {}}}, "['optimizer']: not an optimizer state in the checkpoint"),
        ({**state, "optimizer": [1]}, "['optimizer']: a list in the checkpoint, an optimizer in into="),
        ({key: state[key] for key in state if key != "optimizer"}, "['optimizer']: not in the checkpoint"),
        ({key: state[key] for key in state if key != "scheduler"}, "['scheduler']: not in the checkpoint"),
        ({**state, "model": torch.ones(3)}, "['model']: missing from into="),
    ):
        fastckpt.save({**broken, "other": {}}, tmp_path / "c")
        with pytest.raises(StructureMismatchError) as caught:
            fastckpt.load(tmp_path / "c", into={**training, "other": other})
        assert any(line in each for each in caught.value.differences), caught.value
        assert same(states(training), before)
        assert other.given == []


@pytest.mark.parametrize(
    ("part", "other", "theirs", "mine"),
    [
        ("optimizer", lambda training: OPTIMIZERS["plain"](training["model"]), "betas", "dampening"),
        (
            "scheduler",
            lambda training: torch.optim.lr_scheduler.CosineAnnealingLR(training["optimizer"], 10),
            "gamma, step_size",
            "T_max, eta_min",
        ),
    ],
)
def test_the_state_of_another_class_is_refused(tmp_path, part, other, theirs, mine):
    """torch accepts such a state silently, or raises after filling tensors."""
    fastckpt.save(states(everything("adam")), tmp_path / "c")
    training = everything("adam", seed=3)
    training[part] = other(training)
    before = copy.deepcopy(states(training))
    with pytest.raises(StructureMismatchError) as caught:
        fastckpt.load(tmp_path / "c", into=training)
    (line,) = caught.value.differences
    name = type(training[part]).__name__
    assert line.startswith(f"['{part}']: the state of another class in the checkpoint, with ")
    assert f"{part} of class {name} in into=, with " in line
    assert theirs in line.split(";")[0]
    assert mine in line.split(";")[1]
    assert same(states(training), before)
    fastckpt.load(tmp_path / "c", into=training, strict=False)
    assert training[part].state_dict().keys() >= states(everything("adam"))[part].keys()


def test_the_state_of_another_version_of_a_class_is_taken(tmp_path):
    state = states(everything("adam"))
    for group in state["optimizer"]["param_groups"]:
        del group["decoupled_weight_decay"]
        group.update(max_lr=0.1, min_lr=0.0)
    del state["scheduler"]["_is_initial"]
    state["scheduler"]["verbose"] = False
    fastckpt.save(state, tmp_path / "c")
    training = everything("adam", seed=3)
    fastckpt.load(tmp_path / "c", into=training)
    assert training["optimizer"].param_groups[0]["max_lr"] == 0.1
    assert training["scheduler"].last_epoch == 3


def test_an_object_that_refuses_its_state(tmp_path):
    fastckpt.save({"a": {"n": 1}, "b": {"n": 2}, "c": {"n": 3}}, tmp_path / "c")
    first, last = Stateful(), Stateful()
    with pytest.raises(
        CheckpointError, match=r"load_state_dict of the Stateful at \['b'\] raised.*no thanks.*before this one"
    ):
        fastckpt.load(tmp_path / "c", into={"a": first, "b": Stateful(fails=True), "c": last})
    assert (first.given, last.given) == ([{"n": 1}], [])


def test_objects_with_keys_and_without_strictness(tmp_path):
    state = states(everything("adam"))
    fastckpt.save(state, tmp_path / "c")
    training = everything("adam", seed=3)
    before = copy.deepcopy(states(training))
    assert fastckpt.load(tmp_path / "c", into=training, exclude=["optimizer.*", "scheduler.*"]) is training
    assert same(states(training), {**before, "model": state["model"]})
    assert fastckpt.load(tmp_path / "c", into=training, keys="optimizer.*") is training
    assert same(states(training), {**state, "scheduler": before["scheduler"]})
    more = {**everything("adam", seed=4), "ema": Stateful(), "other": {"w": torch.zeros(2)}}
    more["model"].add_module("more", torch.nn.Linear(1, 1))
    _, report = with_report(fastckpt.load, tmp_path / "c", into=more, strict=False)
    assert report.missing == ("ema", "model.more.weight", "model.more.bias", "other.w")
    assert report.unexpected == ()
    assert same(more["optimizer"].state_dict(), state["optimizer"])
    more["model"] = more["model"][:3]
    report = with_report(fastckpt.load, tmp_path / "c", into=more, strict=False).report
    assert report.unexpected == ("model.3.weight", "model.3.bias")


def test_a_wrapped_model_with_a_prefix_that_comes_off(tmp_path):
    source, model = model_of(1), model_of(2)
    fastckpt.save({"model": {f"module.{name}": value for name, value in source.state_dict().items()}}, tmp_path / "c")
    with pytest.raises(StructureMismatchError, match="make keys the same with rename="):
        fastckpt.load(tmp_path / "c", into={"model": model})
    fastckpt.load(tmp_path / "c", into={"model": model}, rename=fastckpt.strip_prefix("module."))
    assert same(model.state_dict(), source.state_dict())


def test_a_module_in_another_dtype(tmp_path):
    source, model = model_of(1), model_of(2).bfloat16()
    fastckpt.save(source.state_dict(), tmp_path / "c")
    fastckpt.load(tmp_path / "c", into=model, dtype="bfloat16")
    assert same(model.state_dict(), copy.deepcopy(source).bfloat16().state_dict())


def test_the_state_of_a_fresh_optimizer_is_no_place_for_moments(tmp_path):
    state = states(everything("adam"))
    fastckpt.save({"training": [state]}, tmp_path / "c")
    model = model_of()
    fresh = OPTIMIZERS["adam"](model)
    into = {"model": model.state_dict(), "optimizer": fresh.state_dict()}
    with pytest.raises(StructureMismatchError, match="pass the optimizer itself, not its state_dict"):
        fastckpt.load(tmp_path / "c", into={"training": [into]})
