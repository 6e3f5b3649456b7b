"""Tensor subclasses that name their parts, that have additional data, or that cannot be stored."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import fastckpt
from fastckpt import CheckpointError, Registry
from fastckpt.exceptions import UnsupportedTypeError
from harness.same import same


class Kind(enum.Enum):
    SYMMETRIC = 1


class Config(NamedTuple):
    fast: bool
    kind: Kind


@dataclass(frozen=True)
class Rows:
    dim: int
    config: Config


class Wrapped(torch.Tensor):
    """A tensor of several parts, with a context such as those in frameworks."""

    @staticmethod
    def __new__(cls, data, scale, context):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, device=data.device)

    def __init__(self, data, scale, context):
        self.data_ = data
        self.scale = scale
        self.context = context

    def __tensor_flatten__(self):
        return ["data_", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["data_"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        if function is torch.ops.aten.detach.default:
            (value,) = arguments
            return cls(value.data_, value.scale, value.context)
        raise NotImplementedError(f"{function}")


CONTEXT = {"rows": Rows(-1, Config(True, Kind.SYMMETRIC)), "block": [1, 8], "size": torch.Size([2]), "out": torch.int4}
KNOWN = Registry(Wrapped, Rows, Config, Kind)


def wrapped():
    return Wrapped(torch.arange(8, dtype=torch.int8), torch.ones(1, dtype=torch.float64), CONTEXT)


@pytest.mark.states("another tensor subclass, of parts or with its own data")
def test_wrappers_are_saved_without_a_word(trip):
    loaded = trip({"w": wrapped()}, registry=KNOWN)["w"]
    assert type(loaded) is Wrapped
    assert loaded.context == CONTEXT
    assert [type(part) for part in loaded.context["rows"].config] == [bool, Kind]
    assert same([loaded.data_, loaded.scale], [wrapped().data_, wrapped().scale])


def test_wrappers_that_are_not_known(tmp_path):
    fastckpt.save({"w": wrapped()}, tmp_path / "c")
    with pytest.raises(UnsupportedTypeError, match=r"test_subclasses\.Kind"):
        fastckpt.load(tmp_path / "c")
    with pytest.warns(RuntimeWarning, match="Wrapped"):
        inner, context, size, _ = fastckpt.load(tmp_path / "c", registry=Registry(undeclared="plain"))["w"]
    assert same(inner, {"data_": wrapped().data_, "scale": wrapped().scale})
    assert context["rows"] == {"dim": -1, "config": {"fast": True, "kind": "SYMMETRIC"}}
    assert size == torch.Size([8])


def test_classes_that_torch_is_told_are_safe_are_known(tmp_path):
    fastckpt.save({"w": wrapped()}, tmp_path / "c")
    with torch.serialization.safe_globals([Wrapped, Rows, Config, Kind]):
        assert fastckpt.load(tmp_path / "c")["w"].context == CONTEXT


def test_wrappers_of_wrappers_and_parameters(trip):
    inner = TwoTensor(torch.ones(3), torch.zeros(3))
    state = {
        "nested": TwoTensor(inner, TwoTensor(torch.ones(3), torch.ones(3))),
        "parameter": torch.nn.Parameter(TwoTensor(torch.ones(3), torch.zeros(3))),
        "tied": inner,
    }
    loaded = trip(state, registry=Registry(TwoTensor))
    assert loaded["nested"].b.a.tolist() == [1, 1, 1]
    assert loaded["nested"].a.a.data_ptr() == loaded["tied"].a.data_ptr()
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert loaded["parameter"].requires_grad


def test_into_fills_the_parts_of_a_wrapper(tmp_path):
    fastckpt.save({"w": TwoTensor(torch.ones(3), torch.zeros(3))}, tmp_path / "c")
    into = {"w": TwoTensor(torch.zeros(3), torch.ones(3))}
    parts = into["w"].a, into["w"].b
    fastckpt.load(tmp_path / "c", into=into, registry=Registry(TwoTensor))
    assert [part.tolist() for part in parts] == [[1] * 3, [0] * 3]


class Image(torch.Tensor):
    """A tensor with additional data, like those of torchvision and fastai."""


class Weight(torch.nn.Parameter):
    """A Parameter with additional attributes, like those of inference engines."""


def test_subclasses_with_data_of_their_own(trip):
    base = torch.randn(4, 3)
    image, weight = base.as_subclass(Image), Weight(torch.randn(3))
    image.space = "rgb"
    weight.output_dim = 1
    state = {"image": image, "base": base, "weight": weight, "frozen": Weight(torch.ones(2), requires_grad=False)}
    loaded = trip(state, registry=Registry(Image, Weight))
    assert [type(value) for value in loaded.values()] == [Image, torch.Tensor, Weight, Weight]
    assert (loaded["image"].space, loaded["weight"].output_dim) == ("rgb", 1)
    assert loaded["image"].data_ptr() == loaded["base"].data_ptr()
    assert [value.requires_grad for value in loaded.values()] == [False, False, True, False]
    assert loaded["weight"].is_leaf
    assert torch.equal(loaded["weight"], weight)
    with pytest.warns(RuntimeWarning, match="Image"):
        plain = trip(state, undeclared="plain")
    assert type(plain["image"]) is torch.Tensor
    assert torch.equal(plain["image"], base)


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


def distributed():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(torch.ones(2))


def dispatching():
    class Counting(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, arguments=(), named=None):
            return NotImplemented

    return torch.ones(2).as_subclass(Counting)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (fake, "a FakeTensor has no data"),
        (distributed, r"may not have arrived yet: call its wait\(\)"),
        (torch.nn.parameter.UninitializedParameter, "run the module once"),
        (torch.nn.parameter.UninitializedBuffer, "run the module once"),
        (dispatching, r"has no __tensor_flatten__.*encode=.*register_type\(Counting, encode, decode\)"),
    ],
)
def test_what_cannot_be_stored_says_what_to_do(tmp_path, make, advice):
    with pytest.raises(UnsupportedTypeError, match=rf"cannot store \['v'\]: .*{advice}"):
        fastckpt.save({"v": make()}, tmp_path / "c")
    assert not list(tmp_path.iterdir())
    fastckpt.save({"v": make()}, tmp_path / "c", registry=Registry(encode=lambda value: repr(type(value))))
    assert type(make()).__name__ in fastckpt.load(tmp_path / "c")["v"]


def test_a_tensor_of_a_transform(tmp_path):
    def save(value):
        fastckpt.save({"v": value}, tmp_path / "c")
        return value

    with pytest.raises(UnsupportedTypeError, match="its memory cannot be reached"):
        torch.func.vmap(save)(torch.ones(3))


def test_a_class_that_does_not_fit_says_so(tmp_path):
    fastckpt.save({"w": TwoTensor(torch.ones(3), torch.zeros(3))}, tmp_path / "c")
    registry = Registry()
    registry.register(Wrapped, name="torch.testing._internal.two_tensor.TwoTensor")
    with pytest.raises(CheckpointError, match=r"cannot make \['w'\]:.*__tensor_unflatten__ raised KeyError"):
        fastckpt.load(tmp_path / "c", registry=registry)
