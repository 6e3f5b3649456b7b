"""Every row of the table in docs/states.md, with values of the real packages, which a save and load keep."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import pathlib
import random
import re
import types
import typing
import uuid
import warnings
import zoneinfo

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt.exceptions import UnsupportedTypeError
from harness import needs
from harness.options import grouped
from harness.same import same

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the packages, which are not under test
ROOT = pathlib.Path(__file__).parents[2]


def package(name):
    """The module of a package; CI must have it."""
    import importlib

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        return needs.missing(str(error))


@pytest.fixture
def back(tmp_path):
    def go(state, registry=None, **options):
        fastckpt.save(state, tmp_path / "c", **grouped(options))
        return fastckpt.load(tmp_path / "c", registry=registry)

    return go


def trained(kind=torch.optim.AdamW, **options):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = kind(model.parameters(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step(*((lambda: model(torch.ones(2, 4)).sum(),) if kind is torch.optim.LBFGS else ()))
    return model, optimizer


def row(name):
    return pytest.mark.states(name)


def test_every_row_of_the_guide_has_a_test():
    text = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")][1:]
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    tested = {
        name for text in tests for name in re.findall(r'^@(?:row|pytest\.mark\.states)\("(.*)"\)$', text, re.MULTILINE)
    }
    assert len(rows) > 20
    assert set(rows) == tested


@row("state of a module: Parameters, buffers, ties, `_metadata`")
def test_state_of_a_module(back):
    model, _ = trained()
    model.tied = model[0].weight
    model[0].weight.tensor_model_parallel = True
    loaded = back(model.state_dict(keep_vars=True))
    assert same(loaded, model.state_dict(keep_vars=True))
    assert loaded["tied"].data_ptr() == loaded["0.weight"].data_ptr()
    assert isinstance(loaded["0.weight"], torch.nn.Parameter)
    assert not hasattr(loaded["0.weight"], "tensor_model_parallel")


@row("a module, an optimizer or a scheduler itself")
def test_objects_themselves(back, tmp_path):
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    assert same(back(state), {name: value.state_dict() for name, value in state.items()})
    other, fresh = trained(lr=7.0)
    into = {"model": other, "optimizer": fresh, "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(fresh, 3)}
    fastckpt.load(tmp_path / "c", into=into)
    assert all(same(into[name].state_dict(), value.state_dict()) for name, value in state.items())


@row("states of torch's optimizers")
@pytest.mark.parametrize(
    "kind",
    [
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop"),
        *("SGD", "Adafactor"),
    ],
)
def test_states_of_optimizers(kind, back):
    _, optimizer = trained(getattr(torch.optim, kind), lr=0.1)
    assert same(back(optimizer.state_dict()), optimizer.state_dict())


@row("states of schedulers, `GradScaler`, `AveragedModel`")
def test_schedulers_and_the_rest(back):
    from torch.optim import lr_scheduler as lr

    model, optimizer = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    schedulers = [
        lr.LambdaLR(optimizer, [lambda epoch: 1 / (epoch + 1)]),
        lr.MultiStepLR(optimizer, [3, 6, 6]),
        lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], [2]),
        lr.OneCycleLR(optimizer, 0.1, total_steps=5),
        lr.ReduceLROnPlateau(optimizer),
        lr.CosineAnnealingWarmRestarts(optimizer, 3),
    ]
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    state = [*(one.state_dict() for one in schedulers), torch.amp.GradScaler("cpu").state_dict(), average.state_dict()]
    assert same(back(state), state)


@row("state of a compiled module or of DDP")
def test_compiled(back, tmp_path):
    model, _ = trained()
    state = {"model": torch.compile(model).state_dict()}
    assert same(back(state), state)
    assert next(iter(state["model"])) == "_orig_mod.0.weight"
    assert list(fastckpt.load(tmp_path / "c", rename=fastckpt.strip_prefix("_orig_mod."))["model"]) == list(
        model.state_dict()
    )


class Recipe(enum.Enum):
    DELAYED = "delayed"


class Extra(torch.nn.Linear):
    """A layer like TransformerEngine's, whose state has values other than tensors."""

    extra: typing.Any = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@row("`_extra_state` as a tensor, a dict, an enum or `io.BytesIO`")
def test_extra_state(back):
    buffer = io.BytesIO()
    torch.save({"scale": torch.ones(3)}, buffer)
    model = torch.nn.ModuleList([Extra(1, 1) for _ in range(4)])
    for layer, extra in zip(model, [buffer, torch.ones(2), {"a": [1]}, Recipe.DELAYED], strict=True):
        layer.extra = extra
    loaded = back({"model": model}, fastckpt.Registry(Recipe))["model"]
    assert torch.load(loaded["0._extra_state"])["scale"].tolist() == [1, 1, 1]
    assert loaded["1._extra_state"].tolist() == [1, 1]
    assert loaded["2._extra_state"] == {"a": [1]}
    assert loaded["3._extra_state"] is Recipe.DELAYED


@row("states of random generators of torch, numpy and Python")
def test_random_states(back):
    own = random.Random(3)
    state = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - what trainers hold
        "generator": np.random.default_rng(3).bit_generator.state,
        "python": random.getstate(),
    }
    loaded = back({**state, "own": own})
    assert loaded.pop("own").random() == own.random()
    assert same(loaded, state)
    random.setstate(loaded["python"])
    torch.set_rng_state(loaded["torch"])


@row("state of torchdata's `StatefulDataLoader`")
def test_stateful_data_loader(back):
    kind = package("torchdata.stateful_dataloader").StatefulDataLoader
    loader = kind(list(range(20)), batch_size=2, shuffle=True, num_workers=0)
    rest = iter(loader)
    seen = [next(rest).tolist() for _ in range(3)]
    loaded = back({"loader": loader})
    expected = [batch.tolist() for batch in rest]
    fresh = kind(list(range(20)), batch_size=2, shuffle=True, num_workers=0)
    fresh.load_state_dict(loaded["loader"])
    assert [batch.tolist() for batch in fresh] == expected
    assert len(seen) + len(expected) == 10


@row("a checkpoint of Lightning")
def test_lightning(back, tmp_path):
    lightning, omegaconf = package("lightning.pytorch"), package("omegaconf")

    class Module(lightning.LightningModule):
        def __init__(self, cfg):  # noqa: ARG002 - save_hyperparameters sees it
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, _):
            return self.layer(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.hparams.cfg.lr)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)))
    module = Module(omegaconf.OmegaConf.create({"lr": 0.1, "twice": "${lr}"}))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(module, data)
    checkpoint = trainer._checkpoint_connector.dump_checkpoint()
    # This call takes the parameters out of its argument.
    loaded = back(copy.deepcopy(checkpoint), fastckpt.Registry(omegaconf.DictConfig))
    assert list(loaded) == list(checkpoint)
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step"):
        assert same(loaded[name], checkpoint[name]), name
    cfg = loaded["hyper_parameters"]["cfg"]
    assert (type(cfg), cfg.twice) == (omegaconf.DictConfig, 0.1)


@row("states of accelerate's optimizer and scheduler")
def test_accelerate(back):
    package("accelerate")
    import accelerate

    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerate.Accelerator(cpu=True).prepare(model, optimizer, scheduler)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    assert same(back(state), {name: value.state_dict() for name, value in state.items()})


@row("`TrainerState` and `TrainingArguments` of transformers")
def test_transformers_state(back, tmp_path):
    package("accelerate")
    transformers = package("transformers")
    from transformers.trainer_utils import IntervalStrategy

    state = transformers.TrainerState(epoch=1.5, global_step=7, log_history=[{"loss": 0.5}])
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True)
    known = fastckpt.Registry(type(state), type(arguments), *enums_in(vars(arguments)), IntervalStrategy)
    keep = {"state": state, "arguments": arguments}
    loaded = back(keep, known, encode=repr)
    assert type(loaded["state"]) is type(state)
    assert loaded["state"] == state
    assert loaded["arguments"].accelerator_config == arguments.accelerator_config
    theirs, ours = ({**one.to_dict(), "accelerator_config": None} for one in (arguments, loaded["arguments"]))
    assert theirs == ours
    with pytest.warns(RuntimeWarning, match="TrainerState"):
        plain = fastckpt.load(tmp_path / "c", registry=fastckpt.Registry(undeclared="plain"))
    assert plain["state"]["global_step"] == 7


def enums_in(values):
    return {type(value) for value in values.values() if isinstance(value, enum.Enum) or dataclasses.is_dataclass(value)}


@row("`ModelOutput` of transformers")
def test_model_output(back, tmp_path):
    package("transformers")
    from transformers.modeling_outputs import BaseModelOutput

    output = BaseModelOutput(last_hidden_state=torch.ones(2), hidden_states=(torch.zeros(1), torch.ones(1)))
    loaded = back({"out": output}, fastckpt.Registry(BaseModelOutput))["out"]
    assert type(loaded) is BaseModelOutput
    assert list(loaded) == ["last_hidden_state", "hidden_states"]
    assert torch.equal(loaded["last_hidden_state"], output.last_hidden_state)
    assert loaded.last_hidden_state.data_ptr() == loaded["last_hidden_state"].data_ptr()
    assert loaded.attentions is None
    assert len(loaded.to_tuple()) == 2
    with pytest.warns(RuntimeWarning, match="BaseModelOutput"):
        plain = fastckpt.load(tmp_path / "c", registry=fastckpt.Registry(undeclared="plain"))["out"]
    assert type(plain) is collections.OrderedDict


@row("`DictConfig` and `ListConfig` of OmegaConf")
def test_omegaconf(back):
    omegaconf = package("omegaconf")
    cfg = omegaconf.OmegaConf.create({"a": {"b": 1}, "c": "${a.b}", "list": [1, {"d": "???"}]})
    loaded = back({"cfg": cfg, "list": cfg.list})
    assert loaded == {"cfg": {"a": {"b": 1}, "c": "${a.b}", "list": [1, {"d": "???"}]}, "list": [1, {"d": "???"}]}
    loaded = back({"cfg": cfg, "list": cfg.list}, fastckpt.Registry(omegaconf.DictConfig, omegaconf.ListConfig))
    assert loaded["cfg"] == cfg
    assert loaded["cfg"].c == 1
    assert type(loaded["list"]) is omegaconf.ListConfig


class Position(typing.NamedTuple):
    epoch: int
    weight: torch.Tensor


@dataclasses.dataclass
class Config:
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)


class Text(str):
    __slots__ = ("note",)


class Tree(dict):
    pass


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


@row("named tuple, dataclass")
def test_named_tuple_and_dataclass(back):
    loaded = back([Position(3, torch.ones(2)), Config(0.1)], fastckpt.Registry(Position, Config))
    assert (type(loaded[0]), loaded[0].epoch, loaded[0].weight.tolist()) == (Position, 3, [1, 1])
    assert loaded[1] == Config(0.1)


@row("enum, flags")
def test_enum(back):
    state = {Recipe.DELAYED: Level.LOW | Level.HIGH}
    loaded = back(state, fastckpt.Registry(Recipe, Level))
    assert loaded == state
    assert type(loaded[Recipe.DELAYED]) is Level


@row("subclass of `dict`, `list`, `str`, `int` or another built-in type")
def test_subclasses(back):
    tree, text = Tree(w=torch.ones(2)), Text("x")
    tree.version, text.note = 1, "n"
    loaded = back([tree, text], fastckpt.Registry(Tree, Text))
    assert list(map(type, loaded)) == [Tree, Text]
    assert (loaded[0].version, loaded[1].note, loaded[1]) == (1, "n", "x")


@row("`argparse.Namespace`, `types.SimpleNamespace`")
def test_namespaces(back):
    state = [argparse.Namespace(lr=0.1, args=["a"]), types.SimpleNamespace(a=1)]
    assert back(state) == state


@row("`deque`, `Counter`, `Decimal`, `Fraction`, `UUID`")
def test_small_types(back):
    window = collections.deque([1.5, 2.5], maxlen=100)
    state = [window, collections.Counter("aab"), decimal.Decimal("0.10"), fractions.Fraction(1, 3), uuid.UUID(int=7)]
    loaded = back(state)
    assert repr(loaded) == repr(state)


@row("dates and times with `zoneinfo` time zones")
def test_times(back):
    zone = zoneinfo.ZoneInfo("America/New_York")
    state = [dt.datetime(2024, 7, 1, 12, tzinfo=zone), dt.time(1, tzinfo=zone), zone, dt.date(2024, 7, 1)]
    assert back(state) == state


@row("sets")
def test_sets(back):
    state = {"done": {"shard-1", "shard-2", 3, (1, "x")}, "frozen": frozenset({1.5, None})}
    assert back(state) == state


@row("`torch.__version__`")
def test_version(back):
    loaded = back({"torch": torch.__version__})["torch"]
    assert (type(loaded), loaded) == (type(torch.__version__), torch.__version__)


@row("functions, lambdas, `functools.partial`, classes, generators")
@pytest.mark.parametrize("value", [len, lambda: 1, functools.partial(len), torch.nn.Linear, iter([])])
def test_code_is_refused(value, back):
    with pytest.raises(UnsupportedTypeError, match=r"\['fn'\]: type .* is not supported.*encode="):
        back({"fn": value})
    assert back({"fn": value}, encode=lambda _: "code") == {"fn": "code"}


@row("tensors without data (meta, fake), tensors that are spread over processes (DTensor, ShardedTensor, `Part`)")
def test_tensors_without_data_are_refused(back, tmp_path):
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import Replicate, distribute_tensor

    with FakeTensorMode():
        fake = torch.ones(2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(torch.ones(2), mesh, [Replicate()])
        for value, reason in ((torch.ones(2, device="meta"), "meta"), (fake, "FakeTensor"), (sharded, "full_tensor")):
            with pytest.raises(UnsupportedTypeError, match=reason):
                back([value])
    finally:
        dist.destroy_process_group()
