"""``restore(step=, discard_newer=True)``: newer checkpoints are removed, on both tiers or on none."""

from __future__ import annotations

import errno
import logging
import shutil

import numpy as np
import pytest

import fastckpt
from harness import points
from harness.branches import FORM, damage, place, restored, save, state
from harness.tiers import at_remote


def test_what_is_newer_is_discarded_on_request(tmp_path, caplog):
    far = tmp_path / "far"
    save(tmp_path / "run", [1000, 2000, 3000, 4000], remote=far)
    fastckpt.Manager(tmp_path / "run").pin(3000)
    with fastckpt.Manager(tmp_path / "run", remote=far) as manager:
        with caplog.at_level(logging.WARNING, "fastckpt"):
            assert manager.restore(step=2000, discard_newer=True).step == 2000
        assert manager.steps() == [1000, 2000, 3000]
        # A manager without a remote tier pinned step 3000, which also stays in the remote tier.
        assert at_remote(manager) == [1000, 2000, 3000]
        assert (tmp_path / "run" / "latest").read_text() == "step-00002000\n"
        assert any("step-00003000 stays: it is pinned" in record.message for record in caplog.records)
        with pytest.raises(ValueError, match="requires step="):
            manager.restore(discard_newer=True)
        # If something else is in place of the hint, only the hint is lost.
        (tmp_path / "run" / "latest").unlink()
        (tmp_path / "run" / "latest").mkdir()
        assert manager.restore(step=1000, discard_newer=True).step == 1000
        assert (manager.steps(), at_remote(manager)) == ([1000, 3000], [1000, 3000])
    # A run that ends before its next save has still abandoned the pinned step, even on another node.
    for directory, options in ((tmp_path / "run", {}), (tmp_path / "run", {"remote": far})):
        with fastckpt.Manager(directory, **options) as manager:
            assert (manager.latest(), manager.restore().step) == (1000, 1000)
    with pytest.raises(RuntimeError, match="read-only"):
        fastckpt.Manager(tmp_path / "run", read_only=True).restore(step=1000, discard_newer=True)


def test_a_save_in_flight_is_discarded_with_what_is_newer(tmp_path):
    """Mutant: the removal does not wait for the save, which then ends after it."""
    save(tmp_path, [1, 2, 3])
    with fastckpt.Manager(tmp_path, save_options={"io": fastckpt.IO(bandwidth_limit="1MB")}) as manager:
        manager.restore()
        manager.save(4, {"a": np.zeros(200_000)})
        assert manager.restore(step=2, discard_newer=True).step == 2
        manager.wait()
        assert manager.steps() == [1, 2]
    assert restored(tmp_path) == (2, "a")
    assert (tmp_path / "latest").read_text() == "step-00000002\n"


@pytest.mark.parametrize("kind", ["path", "url"])
def test_what_is_newer_is_discarded_at_a_remote_once_it_has_the_step(tmp_path, kind):
    far = tmp_path / "far" if kind == "path" else f"memory://{tmp_path.name}/far"
    with fastckpt.Manager(tmp_path / "run", remote=far, remote_keep=2) as manager:
        for step in (1000, 2000, 3000, 4000):
            manager.save(step, state(step))
            manager.wait()
        assert at_remote(manager) == [3000, 4000]
        manager.restore(step=1000, discard_newer=True)
        assert (manager.steps(), at_remote(manager)) == ([1000], [1000])
    assert fastckpt.Manager(tmp_path / "none", remote=far, read_only=True).restore().step == 1000


def test_what_a_killed_removal_left_removes_nothing_at_the_remote(tmp_path):
    """A run goes back twice, and is killed as it begins to remove newer steps. The next run does the pending copies.

    Mutant: abandoned steps count as the newest at the remote tier, and the step to which the run went back is removed.
    """
    run, far = tmp_path / "run", tmp_path / "far"
    save(run, [1, 2, 3, 4, 5, 6], remote=far, remote_keep=2)
    save(run, [4], "b", at=3, remote=far, remote_keep=2)
    before = {tier: shutil.copytree(tier, tmp_path / f"before-{tier.name}") for tier in (run, far)}
    save(run, [], at=3, discard=True, remote=far, remote_keep=2)
    for tier, copy in before.items():
        for step in copy.glob("step-*"):
            if not (tier / step.name).exists():
                shutil.copytree(step, tier / step.name)
    with fastckpt.Manager(run, remote=far, remote_keep=2) as manager:
        assert manager.restore().step == 3
        manager.wait()
    assert (far / "latest").read_text() == "step-00000003\n"
    assert restored(tmp_path / "none", remote=far) == (3, "a")


def test_what_is_newer_is_discarded_at_a_remote_once_it_has_that_save_of_the_step(tmp_path):
    far = tmp_path / "far"
    save(tmp_path / "run", [1000, 2000, 3000], remote=far)
    save(tmp_path / "run", [2000], "b", at=1000)
    lagging = points.replaced(points.RESUME_DRAIN, lambda _: lambda _: None)
    with lagging, fastckpt.Manager(tmp_path / "run", remote=far) as manager:
        assert manager.restore(step=2000, discard_newer=True).state["branch"] == "b"
        assert at_remote(manager) == [1000, 2000]
        assert restored(tmp_path / "none", remote=far) == (2000, "b")


def test_nothing_is_discarded_while_the_remote_does_not_answer(tmp_path, monkeypatch):
    """The store answers again by the time of the removal. Mutant: the check may fail if the directory has the step."""
    far = tmp_path / "far"
    save(tmp_path / "one", [1, 2, 3], remote=far)
    with fastckpt.Manager(tmp_path / "one", remote=far) as manager:
        manager.wait()
        look, answers = manager._remote.place.look, iter([OSError("no route to the store")])

        def once():
            for error in answers:
                raise error
            return look()

        monkeypatch.setattr(manager._remote.place, "look", once)
        into = state(0)
        with pytest.raises(OSError, match="no route"):
            manager.restore(into, step=2, discard_newer=True)
        assert into["branch"] == "a"
        assert not into["model"]["w"].any()
        assert (manager.steps(), at_remote(manager)) == ([1, 2, 3], [1, 2, 3])


def test_nothing_is_discarded_before_the_remote_has_the_step(tmp_path, monkeypatch):
    """Mutants: the result of the copy is not checked; the failure of another step counts."""
    far = tmp_path / "far"
    save(tmp_path / "run", [1, 2, 3], remote=far)
    save(tmp_path / "run", [2], "b", at=1)
    lagging = points.replaced(points.RESUME_DRAIN, lambda _: lambda _: None)
    with lagging, fastckpt.Manager(tmp_path / "run", remote=far) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(manager._drain, "again", lambda _step: None)
            with pytest.raises(fastckpt.CheckpointError, match="step-00000002: nothing was removed"):
                manager.restore(step=2, discard_newer=True)
        assert (manager.steps(), at_remote(manager)) == ([1, 2, 3], [1, 2, 3])
        manager._drain._failed[1] = OSError("another step cannot be copied")
        manager.restore(step=2, discard_newer=True)
        assert (manager.steps(), at_remote(manager)) == ([1, 2], [1, 2])
        with pytest.raises(OSError, match="another step"):
            manager.wait()


@pytest.mark.parametrize("remote", ["path", "memory"])
def test_what_is_newer_is_discarded_by_a_node_whose_disk_takes_nothing(tmp_path, caplog, remote):
    """The directory does not even exist. Mutant: it is an error if the note there cannot be written."""
    far = place(tmp_path, remote)
    save(tmp_path / "one", [1, 2, 3], remote=far)

    def full(_):
        def copy(_sources, target, **_how):
            raise OSError(errno.ENOSPC, "No space left on device", target)

        return copy

    with points.replaced(points.FETCH, full):
        manager = fastckpt.Manager(tmp_path / "two", remote=far)
        assert manager.restore(step=2, discard_newer=True).step == 2
    assert at_remote(manager) == [1, 2]
    assert [one for one in caplog.messages if "cannot record which branch continues: [Errno 2]" in one]


def test_a_discard_that_fails_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    """Mutants: the run continues from the chosen step; newer steps are no longer copied; the note stays."""
    far = tmp_path / "far"
    save(tmp_path / "run", [1, 2], remote=far)
    noted = []

    def refuse(*_):
        # At this moment, a new run would continue from the step, with or without the remote tier.
        noted.append((restored(tmp_path / "run"), restored(tmp_path / "none", remote=far)))
        raise OSError("the store refuses")

    with points.replaced(points.RESUME_DRAIN, lambda _: lambda _: None), monkeypatch.context() as patch:
        manager = fastckpt.Manager(tmp_path / "run", remote=far)
        with points.replaced(points.BEGIN_DRAIN, lambda _: lambda _: None):
            manager.restore()
            manager.save(3, state(3))
            manager._saves.pending.result()
        patch.setattr(manager._remote, "remove_beyond", refuse)
        with pytest.raises(OSError, match="the store refuses"):
            manager.restore(step=1, discard_newer=True)
    assert noted == [((1, "a"), (1, "a"))]
    manager.wait()
    assert at_remote(manager) == [1, 2, 3]
    for disk in ("run", "none"):
        assert restored(tmp_path / disk, remote=far) == (3, "a")
    assert restored(tmp_path / "run") == (3, "a")
    manager.save(4, state(4))
    manager.wait()
    damage(tmp_path / "run" / FORM.format(step=4))
    with pytest.warns(RuntimeWarning, match="is skipped"):
        assert restored(tmp_path / "run") == (3, "a")


@pytest.mark.parametrize("remote", ["path", "memory"])
def test_a_run_that_goes_back_to_a_branch_it_has_left_has_it_at_the_remote(tmp_path, remote):
    """No policy of the remote tier would still keep the step. Mutant: the abandoned branch decides about copies."""
    far = place(tmp_path, remote)
    save(tmp_path / "one", [1, 3], keep=1, remote=far)
    save(tmp_path / "two", [2, 5], "b", at=1, remote=far, remote_keep=2)
    save(tmp_path / "one", [], at=3, discard=True, remote=far, remote_keep=2)
    for disk in ("one", "two", "three"):
        assert restored(tmp_path / disk, remote=far) == (3, "a")


@pytest.mark.parametrize("remote", ["none", "path", "memory"])
def test_a_run_that_goes_back_follows_it_where_nothing_is_newer(tmp_path, remote):
    """The run ends before its next save. Mutant: a note is written only if something is removed."""
    far = place(tmp_path, remote)
    one, two = (tmp_path / name for name in (("one", "two") if far else ("one", "one")))
    save(one, [1, 2, 3], remote=far)
    save(two, [2], "b", at=1, remote=far)
    save(one, [], at=3, discard=True, remote=far)
    for disk in (one, two):
        assert restored(disk, remote=far) == (3, "a")
