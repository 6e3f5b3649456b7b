"""``fastckpt.randomness()``: generators give the same numbers after a load as after the save."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import fastckpt

# ruff: noqa: NPY002 - the global generators are under test


def drawn():
    return random.random(), np.random.random_sample(), torch.rand(1).item(), torch.randint(10**9, (1,)).item()


@pytest.mark.parametrize("way", ["into", "values"])
def test_the_same_is_drawn_again(tmp_path, way):
    drawn()
    fastckpt.save({"random": fastckpt.randomness(), "step": 3}, tmp_path / "c")
    first, second = drawn(), drawn()
    assert first != second
    if way == "into":
        fastckpt.load(tmp_path / "c", into={"random": fastckpt.randomness(), "step": 0})
    else:
        fastckpt.randomness().load_state_dict(fastckpt.load(tmp_path / "c")["random"])
    assert (drawn(), drawn()) == (first, second)


def test_a_normal_number_that_was_drawn_ahead_comes_again(tmp_path):
    """Python's and numpy's generators draw normal numbers in pairs, and keep the second one."""
    random.gauss(0, 1)
    np.random.standard_normal()
    fastckpt.save({"random": fastckpt.randomness()}, tmp_path / "c")
    first = random.gauss(0, 1), np.random.standard_normal(), random.random()
    fastckpt.load(tmp_path / "c", into={"random": fastckpt.randomness()})
    assert (random.gauss(0, 1), np.random.standard_normal(), random.random()) == first


def test_each_rank_draws_its_own(tmp_path):
    torch.manual_seed(5)
    fastckpt.distributed.save({}, tmp_path / "c", per_rank={"random": fastckpt.randomness()})
    first = drawn()
    fastckpt.randomness().load_state_dict(fastckpt.distributed.load_per_rank(tmp_path / "c")["random"])
    assert drawn() == first


def test_devices_that_are_not_here_are_left_out(monkeypatch):
    state = fastckpt.randomness().state_dict()
    state["torch"]["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * 2
    set_on = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _, number: set_on.append(number))
    fastckpt.randomness().load_state_dict(state)
    assert set_on == [0]
