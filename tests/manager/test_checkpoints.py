"""``Manager.checkpoints()``: the checkpoints, their tiers, and why they stay."""

from __future__ import annotations

import time

import numpy as np
import pytest

import fastckpt
from fastckpt import keep


def state(step):
    return {"w": np.full(1000, step)}


@pytest.fixture(params=["path", "memory"])
def remote(request, tmp_path):
    return str(tmp_path / "far") if request.param == "path" else f"memory://{tmp_path.name}/far"


@pytest.fixture
def run(tmp_path, remote):
    """A run with steps 1 to 4, of which the directory keeps two and the remote tier all except the second."""
    local = tmp_path / "run"
    with fastckpt.Manager(local, keep=2, remote=remote, remote_keep=[keep.Steps(1, 3), keep.Last(1)]) as manager:
        for step in range(1, 5):
            manager.save(step, state(step), {"loss": float(step)})
            manager.wait()
    return local


def test_both_tiers_are_listed_with_their_reasons(run, remote):
    manager = fastckpt.Manager(run, keep=2, remote=remote, remote_keep=[keep.Steps(1, 3), keep.Last(1)])
    found = {one.step: one for one in manager.checkpoints()}
    assert {step: dict(one.kept_for) for step, one in found.items()} == {
        1: {"remote": ("steps=1,3",)},
        3: {"local": ("last=2",), "remote": ("steps=1,3",)},
        4: {"local": ("last=2",), "remote": ("last=1",)},
    }
    assert [one.tiers for one in found.values()] == [("remote",), ("local", "remote"), ("local", "remote")]
    assert all(isinstance(one, fastckpt.types.ManagedCheckpoint) for one in found.values())
    assert found[1].path == f"{remote}/step-00000001"
    assert found[3].path == str(run / "step-00000003")
    assert [one.metrics for one in found.values()] == [{"loss": 1.0}, {"loss": 3.0}, {"loss": 4.0}]
    assert all(abs(time.time() - one.created) < 1000 for one in found.values())
    assert not any(one.pinned for one in found.values())
    alone = fastckpt.Manager(run, keep=1, read_only=True)
    assert {one.step: dict(one.kept_for) for one in alone.checkpoints()} == {
        3: {"local": ()},
        4: {"local": ("last=1",)},
    }


def test_facts_come_from_the_tier_that_can_be_opened(run, remote):
    (run / "step-00000003" / "fastckpt.json").write_bytes(b"{")
    manager = fastckpt.Manager(run, keep=2, remote=remote)
    one = next(one for one in manager.checkpoints() if one.step == 3)
    assert dict(one.kept_for) == {"local": ("it cannot be opened",), "remote": ("no policy",)}
    assert (one.metrics, one.path) == ({"loss": 3.0}, str(run / "step-00000003"))
    alone = fastckpt.Manager(run, keep=2, read_only=True)
    (damaged,) = [one for one in alone.checkpoints() if one.created is None]
    assert (damaged.step, damaged.metrics, damaged.tiers) == (3, {}, ("local",))


def test_a_pin_is_a_reason_also_of_a_damaged_one(run):
    with fastckpt.Manager(run, keep=2) as manager:
        manager.pin(3)
    (run / "step-00000003" / "fastckpt.json").write_bytes(b"{")
    found = {one.step: one for one in fastckpt.Manager(run, keep=1, read_only=True).checkpoints()}
    assert found[3].kept_for["local"] == ("pinned", "it cannot be opened")
    assert (found[3].pinned, found[4].pinned) == (True, False)


def test_what_cannot_be_looked_at_for_a_moment_is_not_for_removal(run, monkeypatch):
    """A failed check gives "it cannot be opened", never "nothing keeps it", which ``fastckpt prune`` removes."""
    manager = fastckpt.Manager(run, keep=keep.Last(5), read_only=True)
    identity = manager._local.place.identity
    for fails in (1, 2, 3):
        answers = {}

        def now_and_then(name, answers=answers, fails=fails):
            answers[name] = answers.get(name, 0) + 1
            return None if answers[name] == fails else identity(name)

        monkeypatch.setattr(manager._local.place, "identity", now_and_then)
        assert all(one.kept_for["local"] for one in manager.checkpoints())


def test_a_remote_that_does_not_answer_is_an_error(run, remote, monkeypatch):
    manager = fastckpt.Manager(run, remote=remote)

    def refuse():
        raise OSError("no route to the store")

    monkeypatch.setattr(manager._remote.place, "look", refuse)
    with pytest.raises(OSError, match="no route"):
        manager.checkpoints()
    assert manager.steps() == [3, 4]
