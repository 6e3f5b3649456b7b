"""Nested tensors of both layouts."""

from __future__ import annotations

import pytest
import torch

import fastckpt
from fastckpt import CorruptCheckpointError
from harness import manifest

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_fx_tracing.*"),
]


def apart(*sizes):
    torch.manual_seed(2)
    return [torch.randn(size, 3) for size in sizes]


def alike(left, right):
    assert (type(left), left.layout, left.dtype, left.requires_grad) == (
        *(type(right), right.layout, right.dtype, right.requires_grad),
    )
    parts = left.detach().unbind(), right.detach().unbind()
    assert len(parts[0]) == len(parts[1])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*parts, strict=True))
    return True


def jagged():
    parts = apart(2, 0, 5)
    plain = torch.nested.nested_tensor(parts, layout=torch.jagged)
    padded = torch.randn(3, 6, 2)
    return {
        "plain": plain,
        "grad": torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.nested.nested_tensor(parts, layout=torch.jagged)),
        "half": plain.bfloat16(),
        "narrow": torch.nested.narrow(padded, 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1]), layout=torch.jagged),
        "last": torch.nested.nested_tensor_from_jagged(torch.randn(4, 7), torch.tensor([0, 3, 7]), jagged_dim=2),
        "grown": torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True) * 2,
    }


def test_jagged(trip):
    state = jagged()
    loaded = trip(state)
    for name, value in state.items():
        assert alike(loaded[name], value)
        assert loaded[name]._ragged_idx == value._ragged_idx
    assert loaded["grad"].is_leaf
    assert loaded["parameter"]._is_param
    assert torch.equal(loaded["narrow"].lengths(), torch.tensor([2, 3, 1]))


def test_tensors_that_are_jagged_alike_stay_so(trip):
    first = torch.nested.nested_tensor(apart(2, 4), layout=torch.jagged)
    state = {"a": first, "b": first * 2}
    loaded = trip(state)
    # torch can add them only if they share one tensor of offsets.
    assert alike(loaded["a"] + loaded["b"], state["a"] + state["b"])


def strided():
    whole = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 1)])
    return {
        "plain": whole,
        "grad": torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], requires_grad=True),
        "parameter": torch.nn.Parameter(torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])),
        "transposed": torch.nested.nested_tensor(apart(2, 4)).transpose(1, 2),
        "none": torch.nested.nested_tensor([], dtype=torch.float64),
    }


@pytest.mark.states("nested tensor, strided or jagged")
def test_strided(trip):
    state = strided()
    loaded = trip(state)
    assert all(alike(loaded[name], value) for name, value in state.items())
    assert type(loaded["parameter"]) is torch.nn.Parameter


def test_into_fills_what_nested_tensors_are_made_of(tmp_path):
    state = {"jagged": torch.nested.nested_tensor(apart(2, 4), layout=torch.jagged)}
    fastckpt.save(state, tmp_path / "c")
    into = {"jagged": torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)}
    loaded = fastckpt.load(tmp_path / "c", into=into)
    assert alike(loaded["jagged"], state["jagged"])
    assert alike(into["jagged"], state["jagged"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offsets", torch.tensor([0, 2, 7])),
        ("offsets", torch.tensor([0, 2, 1])),
        ("offsets", torch.tensor([-1, 2, 6])),
        ("offsets", torch.tensor([0.0, 2.0, 6.0])),
        ("offsets", torch.tensor([[0, 2, 6]])),
        ("offsets", torch.zeros(0, dtype=torch.int64)),
        ("offsets", torch.tensor(0)),
        ("offsets", None),
        ("lengths", torch.tensor([2, 5])),
        ("lengths", torch.tensor([-1, 4])),
        ("lengths", torch.tensor([1])),
        ("lengths", 3),
        ("jagged_dim", 0),
        ("jagged_dim", 3),
        ("jagged_dim", -1),
        ("jagged_dim", True),
        ("flags", "x"),
        ("flags", None),
        ("values", None),
        ("values", torch.tensor(1.0)),
        ("more", 1),
    ],
    ids=str,
)
def test_hostile_parts(tmp_path, name, value):
    parts = {"values": torch.randn(6, 3), "offsets": torch.tensor([0, 2, 6]), "lengths": None, "jagged_dim": 1}
    fastckpt.save({**parts, "flags": "", name: value}, tmp_path / "c")
    body = manifest.body_of(tmp_path / "c")
    body["structure"].insert(0, ["type", "torch.nested.nested_tensor"])
    manifest.forge(tmp_path / "c", body)
    with pytest.raises(CorruptCheckpointError):
        fastckpt.load(tmp_path / "c")


@pytest.mark.parametrize(
    "parts",
    [
        {"constituents": [torch.zeros(2), torch.zeros(1, 1)], "dtype": torch.float32, "flags": ""},
        {"constituents": [None], "dtype": torch.float32, "flags": ""},
        {"constituents": torch.zeros(2), "dtype": torch.float32, "flags": ""},
        {"constituents": [], "dtype": "float32", "flags": ""},
        {"constituents": [], "dtype": torch.float32, "flags": "", "more": 1},
        {"constituents": [], "dtype": torch.float32},
        [],
        None,
    ],
    ids=str,
)
def test_hostile_constituents(tmp_path, parts):
    fastckpt.save(parts, tmp_path / "c")
    body = manifest.body_of(tmp_path / "c")
    body["structure"].insert(0, ["type", "torch.nested.nested_tensor"])
    manifest.forge(tmp_path / "c", body)
    with pytest.raises(CorruptCheckpointError):
        fastckpt.load(tmp_path / "c")
