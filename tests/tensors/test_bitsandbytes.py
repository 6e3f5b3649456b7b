"""bitsandbytes on the CPU: the states of its optimizers and quantised layers are plain tensors and strings."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings

import pytest
import torch

import fastckpt
from harness import needs
from harness.same import same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def bitsandbytes():
    """The module, whose import takes four seconds: only the process that runs these tests imports it."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return importlib.import_module("bitsandbytes")
    except ImportError as error:
        needs.missing(str(error))


def trained(kind, count=3):
    torch.manual_seed(3)
    model = torch.nn.Linear(128, 128, bias=False)
    optimizer = kind(model.parameters(), lr=1e-2, min_8bit_size=16)
    step(model, optimizer, count)
    return model, optimizer


def step(model, optimizer, count):
    torch.manual_seed(4)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(8, 128)).square().sum().backward()
        optimizer.step()


@pytest.mark.states("optimizer states and layers of bitsandbytes")
@pytest.mark.parametrize("kind", ["AdamW8bit", "PagedAdamW8bit", "Lion8bit"])
def test_optimizers_go_on(bitsandbytes, tmp_path, kind):
    kind = getattr(bitsandbytes.optim, kind)
    model, optimizer = trained(kind)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    fastckpt.save(state, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c")
    assert same(loaded, state)
    fresh, again = trained(kind, 1)
    fresh.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    step(model, optimizer, 2)
    step(fresh, again, 2)
    assert torch.equal(model.weight, fresh.weight)


def test_layers_of_4_and_8_bits(bitsandbytes, tmp_path):
    torch.manual_seed(1)
    weights = {"weight": torch.randn(64, 128)}
    four, eight = bitsandbytes.nn.Linear4bit(128, 64, bias=False), bitsandbytes.nn.Linear8bitLt(128, 64, bias=False)
    for layer in (four, eight):
        layer.load_state_dict(weights)
        layer.to("cpu")
    state = {"four": four.state_dict(), "eight": eight.state_dict()}
    assert state["four"]["weight"].dtype is torch.uint8
    fastckpt.save(state, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c")
    assert same(loaded, state)
    restored = bitsandbytes.nn.Params4bit.from_prequantized(
        loaded["four"].pop("weight"),
        {name.removeprefix("weight."): part for name, part in loaded["four"].items()},
        device="cpu",
    )
    rows = torch.randn(2, 128)
    fresh = bitsandbytes.nn.Linear4bit(128, 64, bias=False)
    fresh.weight = restored
    assert torch.equal(fresh(rows), four(rows))
