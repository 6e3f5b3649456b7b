"""States that ranks save for themselves, and the files in which they lie."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

import fastckpt


def names(path):
    with safe_open(path, "pt") as opened:
        return list(opened.keys())


@pytest.mark.parametrize(("state", "model"), [({"w": torch.ones(5)}, "w"), ({"model": {"w": torch.ones(5)}}, "w")])
def test_what_a_rank_saves_for_itself_is_not_in_the_files_of_the_model(state, model, tmp_path):
    path = tmp_path / "c"
    fastckpt.distributed.save(state, path, per_rank={"random": torch.arange(3)})
    assert names(path / "model.safetensors") == [model]
    assert names(path / "training" / "training.safetensors") == ["per_rank.0.random"]
    assert fastckpt.load(path).keys() == state.keys()
    assert torch.equal(fastckpt.distributed.load_per_rank(path)["random"], torch.arange(3))
    assert fastckpt.verify(path).ok


def test_a_key_of_the_state_may_be_called_per_rank(tmp_path):
    path = tmp_path / "c"
    state = {"per_rank": [{"random": torch.ones(2)}]}
    fastckpt.distributed.save(state, path)
    assert names(path / "model.safetensors") == ["per_rank.0.random"]
    fastckpt.distributed.save(state, path, per_rank={"random": torch.zeros(2)})
    assert names(path / "training" / "training.safetensors") == ["per_rank.0.random", "per_rank.0.random~1"]
    assert torch.equal(fastckpt.load(path)["per_rank"][0]["random"], torch.ones(2))
    assert torch.equal(fastckpt.distributed.load_per_rank(path)["random"], torch.zeros(2))
