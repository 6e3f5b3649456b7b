"""The stale alarm: a save in which no weight or no moment of the optimizer has changed gives a warning."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import fastckpt
from harness.states import trained as state


def full(number):
    return np.full(8, number, np.float32)


def run(directory, *states, **options):
    """Save the states; return the report of the last save."""
    with fastckpt.Manager(directory, **options) as manager:
        found = manager.restore()
        for step, one in enumerate(states, found.step + 1 if found else 1):
            manager.save(step, one)
            report = manager.wait()
    return report


@pytest.mark.parametrize("options", [{}, {"async_save": False}, {"save_options": {"base": None}}, {"keep": 1}])
@pytest.mark.parametrize(("what", "name"), [("weights", "model"), ("moments", "optimizer")])
def test_a_group_that_does_not_change_is_told_with_its_names(tmp_path, caplog, options, what, name):
    with caplog.at_level(logging.WARNING, "fastckpt"):
        assert run(tmp_path, state(1), state(2), **options).warnings == ()
        # The alarm also works across a restart.
        report = run(tmp_path, state(3, **{what: False}), state(4, **{what: False}), **options)
        last = run(tmp_path, state(5, **{what: False}), **options)
    told = [record.message for record in caplog.records if "has changed" in record.message]
    assert len(told) == 2
    assert last.warnings == (told[1],)
    assert f"no tensor of the {name} has changed since step 4: " in told[1]
    assert f"no tensor of the {name} has changed since step 3: " in told[0]
    assert ("model.w" if name == "model" else "optimizer.exp_avg") in told[0]
    assert report.warnings == (told[0],)


def test_what_a_forward_pass_changes_is_no_weight(tmp_path):
    """Mutants: the statistics of a normalization count as weights; a layer called ``opt`` as moments."""

    def one(number):
        statistics = {"norm.running_mean": full(number), "norm.running_var": full(number)}
        model = {"w": full(1), "opt.w": full(1), **statistics}
        return {"model": model, "optimizer": {"exp_avg": full(number)}}

    (told,) = run(tmp_path, one(1), one(2)).warnings
    assert "no tensor of the model has changed since step 1: model.w, model.opt.w: " in told


@pytest.mark.parametrize("moment", ["adam.m", "AdamW.0.m", "muon.m", "state.0.exp_avg", "inner.w.momentum_buffer"])
def test_moments_are_known_by_the_names_of_optimizers_and_of_their_values(tmp_path, moment):
    """The model has no separate group. Mutants: such names are ignored; such names count as weights."""

    def one(weight, number):
        return {"policy": {"w": full(weight)}, "others": {moment: full(number)}}

    (told,) = run(tmp_path / "weights", one(1, 1), one(1, 2)).warnings
    assert "no tensor of the model has changed since step 1: policy.w: " in told
    (told,) = run(tmp_path / "moments", one(1, 1), one(2, 1)).warnings
    assert f"no tensor of the optimizer has changed since step 1: others.{moment}: " in told


def test_a_model_that_is_not_trained_raises_no_alarm(tmp_path):
    """An adapter beside or in the model is trained; or the model is frozen, and trained tensors have other names."""

    def one(number, name):
        trained = {name: {"a": full(number)}, "optimizer": {"exp_avg": full(number)}}
        return {"model": {"w": full(1)}, **trained}

    declared = {"save_options": {"files": fastckpt.Files(frozen=["model.*"])}}
    for name, options in (("adapter", {}), ("my_lora_A", {}), ("head", declared)):
        assert run(tmp_path / name, one(1, name), one(2, name), stale="raise", **options).warnings == ()
    (told,) = run(tmp_path / "ema", one(1, "ema"), one(2, "ema")).warnings
    assert "no tensor of the model has changed since step 1: model.w: " in told


def test_it_is_raised_once_by_what_comes_next_or_ignored(tmp_path, caplog):
    with fastckpt.Manager(tmp_path / "wait", stale="raise") as manager:
        manager.save(1, state(1))
        manager.wait()
        manager.save(2, state(1))
        with pytest.raises(fastckpt.CheckpointError, match="no tensor of the model and of the optimizer"):
            manager.wait()
        manager.save(3, state(3))
        manager.wait()
        manager.save(4, state(3))
        manager._saves.pending.finished.wait(60)
        manager._after_save.wait(float("inf"))
        with pytest.raises(fastckpt.CheckpointError, match="since step 3"):
            manager.save(5, state(5))
        manager.save(5, state(5))
    assert manager.steps() == [1, 2, 3, 4, 5]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fastckpt"):
        run(tmp_path / "ignore", state(1), state(1), stale="ignore")
    assert not [record for record in caplog.records if "has changed" in record.message]
    with pytest.raises(ValueError, match="stale must be"):
        fastckpt.Manager(tmp_path, stale="no")


def test_the_share_that_changed_is_recorded(tmp_path):
    run(tmp_path, state(1), state(2), state(3, moments=False), state(4))
    for manager in (fastckpt.Manager(tmp_path), fastckpt.Manager(tmp_path, read_only=True)):
        shares = [one.changed for one in manager.checkpoints()]
        assert shares[0] == {}
        assert shares[1:3] == [{"model": 0.25, "optimizer": 1.0}] * 2
    with fastckpt.open(manager.path(4)) as checkpoint:
        # These are the shares of the previous save: a save knows its own shares only after its manifest is written.
        noted = checkpoint.metadata["lineage"]
        assert (noted["changed_of"], noted["changed"]) == (3, {"model": 0.25, "optimizer": 1.0})
