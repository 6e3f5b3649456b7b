"""States that each rank saves for itself, and their files."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass
class Position:
    """A type that only this module registers."""

    epoch: int


def test_types_of_a_rank_s_own_state_are_those_of_the_call(tmp_path):
    registry = fastckpt.Registry(Position)
    fastckpt.distributed.save({"w": torch.ones(2)}, tmp_path / "c", per_rank=Position(3), registry=registry)
    assert fastckpt.distributed.load_per_rank(tmp_path / "c", registry=registry) == Position(3)
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError, match="Position"):
        fastckpt.distributed.load_per_rank(tmp_path / "c")


def test_a_manager_restores_them_with_its_registry(tmp_path):
    registry = fastckpt.Registry(Position)
    ranks = fastckpt.distributed.Ranks(timeout=60)
    with fastckpt.Manager(tmp_path, ranks=ranks, save_options={"registry": registry}) as manager:
        manager.save(1, {"w": torch.ones(2)}, per_rank=Position(4))
        manager.wait()
        assert manager.restore(registry=registry).per_rank == Position(4)
