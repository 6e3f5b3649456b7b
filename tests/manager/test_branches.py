"""A run that goes back follows its new branch, and where a run was nobody begins anew by accident."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from fastckpt import keep
from harness import manifest, points, s3

FORM = "step-{step:08d}"

#: What Manager caches beside its checkpoints (docs/manager.md).
CACHE = ".fastckpt-run.json"


def state(step, branch="a"):
    return {"model": {"w": np.full(1000, step)}, "branch": branch}


def save(directory, steps, branch="a", *, at=None, discard=False, **options):
    """Save steps with a manager of their own, after a restore of the newest, or of ``at``."""
    with fastckpt.Manager(directory, **options) as manager:
        found = manager.restore(step=at, discard_newer=discard)
        for step in steps:
            manager.save(step, state(step, branch), {"loss": float(step)})
            manager.wait()
    return found


def restored(directory, **options):
    found = fastckpt.Manager(directory, read_only=True, **options).restore()
    return found.step, found.state["branch"]


def damage(path):
    with Path(path, "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")


@pytest.fixture
def rolled(tmp_path):
    """Steps 1000, 2000, 3000, then back to 2000, and 2100."""
    save(tmp_path, [1000, 2000, 3000])
    save(tmp_path, [2100], "b", at=2000)
    return tmp_path


def test_a_restart_follows_the_branch_that_saved_last(rolled):
    assert restored(rolled) == (2100, "b")
    manager = fastckpt.Manager(rolled, read_only=True)
    assert (manager.latest(), manager.best("loss", "max"), manager.steps()) == (2100, 2100, [1000, 2000, 2100, 3000])
    assert manager.kept()[3000] == ["left behind, until the run has passed it"] or not manager.policies
    # What the new branch does not have is not taken from the old one, which is still there under its number.
    damage(rolled / "step-00002100")
    with pytest.warns(RuntimeWarning, match="step-00002100"):
        assert restored(rolled) == (2000, "a")
    assert fastckpt.Manager(rolled).restore(step=3000).state["branch"] == "a"


def test_a_newest_without_manifest_or_cache_falls_back_within_its_branch(rolled):
    manifest = rolled / "step-00002100" / "fastckpt.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-9])
    with pytest.warns(RuntimeWarning, match="step-00002100"):
        assert restored(rolled) == (2000, "a")
    manifest.write_bytes(whole)
    (rolled / CACHE).unlink()
    assert restored(rolled) == (2100, "b")


def test_retention_counts_the_branch_alone(rolled):
    with fastckpt.Manager(rolled, keep=keep.Last(2)) as manager:
        assert manager.restore().step == 2100
        for step, left in ((2200, [2100, 2200, 3000]), (2900, [2200, 2900, 3000]), (3100, [2900, 3100])):
            manager.save(step, state(step, "b"))
            manager.wait()
            # What was left behind goes when the run has passed it, as all that is older.
            assert manager.steps() == left
    assert restored(rolled) == (3100, "b")


def test_a_step_saved_again_belongs_to_the_new_branch(rolled):
    save(rolled, [3000], "b")
    assert restored(rolled) == (3000, "b")
    # And back to the first one, of which 2000 is left.
    save(rolled, [2500], "c", at=2000)
    assert restored(rolled) == (2500, "c")
    damage(rolled / "step-00002500")
    with pytest.warns(RuntimeWarning, match="step-00002500"):
        assert restored(rolled) == (2000, "a")


def test_what_a_branch_left_below_its_highest_step_is_not_its_own(tmp_path):
    """Back to an older branch: between its steps lie some of the one that came after. Mutant: only higher steps count
    as left behind."""
    save(tmp_path, [1000, 2000, 3000])
    save(tmp_path, [1500, 2500], "b", at=1000)
    save(tmp_path, [3100], "a", at=3000)
    manager = fastckpt.Manager(tmp_path, keep=[keep.Last(2), keep.Best(1, "loss", mode="max")], read_only=True)
    kept = {step for step, why in manager.kept().items() if why}
    assert kept == {3000, 3100}
    for step, falls_to in ((3100, 3000), (3000, 2000)):
        damage(tmp_path / FORM.format(step=step))
        with pytest.warns(RuntimeWarning, match="is skipped"):
            assert restored(tmp_path) == (falls_to, "a")
    # And once more back to the other one, by a restart in between.
    save(tmp_path, [2600], "b", at=2500)
    save(tmp_path, [2700], "b")
    assert restored(tmp_path) == (2700, "b")
    for step in (2700, 2600, 2500):
        damage(tmp_path / FORM.format(step=step))
    with pytest.warns(RuntimeWarning, match="is skipped"):
        assert restored(tmp_path) == (1500, "b")


def test_branches_are_told_apart_whatever_the_clock_says(tmp_path, monkeypatch):
    save(tmp_path, [1000, 2000, 3000])
    monkeypatch.setattr("time.time_ns", lambda: 7)
    save(tmp_path, [2100], "b", at=2000)
    assert restored(tmp_path) == (2100, "b")


@pytest.fixture
def skewed(monkeypatch):
    """Have this host's clock so many seconds ahead."""
    real = time.time_ns
    return lambda ahead: monkeypatch.setattr("time.time_ns", lambda: real() + int(ahead * 1e9))


def silence(patch, manager):
    """Have the remote tier of a manager refuse; returns what it is asked."""
    asked = []

    def refuse(*_):
        asked.append(1)
        raise OSError("no route to the store")

    for name in ("look", "identity", "read"):
        patch.setattr(manager._remote.place, name, refuse)
    return asked


def place(tmp_path, kind):
    return {"none": None, "path": str(tmp_path / "far"), "memory": f"memory://{tmp_path.name}/far"}[kind]


@pytest.mark.parametrize("ahead", [3600, 5, -5, -3600])
@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("remote", ["none", "path", "memory"])
def test_the_branch_that_saved_last_is_followed_whatever_the_clocks_say(tmp_path, skewed, remote, discard, ahead):
    """Where there is a remote tier, the node that goes back has an empty disk. Mutants: the orders at the remote are
    not looked at; what is noted there for a run that goes back comes after its saves."""
    far = place(tmp_path, remote)
    one, two, three = (tmp_path / name for name in ("one", "two", "three")) if far else [tmp_path / "one"] * 3
    skewed(ahead)
    save(one, [1000, 2000, 3000], remote=far)
    skewed(0)
    with fastckpt.Manager(two, remote=far) as manager:
        assert manager.restore(step=2000, discard_newer=discard).state["branch"] == "a"
        for step in (2100, 2200, 3000):
            manager.save(step, state(step, "b"))
            manager.wait()
            for disk in (three, two):
                assert restored(disk, remote=far) == (step, "b")
        if far:
            # It has not stayed the other branch's.
            assert fastckpt.load(f"{far}/step-00003000")["branch"] == "b"


@pytest.mark.parametrize("how", ["should_save", "steady"])
@pytest.mark.parametrize("at", [None, 2000])
def test_a_save_for_a_signal_comes_after_all_others_whatever_the_clocks_say(tmp_path, skewed, how, at):
    """The first save after a run went back, by restore or by itself. Mutant: only ordinary saves look for others."""
    skewed(3600)
    save(tmp_path, [1000, 2000, 3000])
    skewed(0)
    with fastckpt.Manager(tmp_path, save_when=10**6) as manager:
        manager.save_on_signal(signal.SIGTERM, exit=False)
        if at is not None:
            manager.restore(step=at)
        if how == "steady":
            with manager.steady(2001, state(2001, "b")):
                signal.raise_signal(signal.SIGTERM)
        else:
            signal.raise_signal(signal.SIGTERM)
            assert manager.save(2001, state(2001, "b"))
        assert manager.preempted == signal.SIGTERM
    assert restored(tmp_path) == (2001, "b")


@pytest.mark.parametrize("how", ["should_save", "save", "steady"])
@pytest.mark.parametrize("remote", ["path", "memory"])
def test_a_step_boundary_asks_no_remote(tmp_path, monkeypatch, remote, how):
    """It may not answer for minutes."""
    far = place(tmp_path, remote)
    save(tmp_path / "one", [1000], remote=far)
    manager = fastckpt.Manager(tmp_path / "two", remote=far)
    with monkeypatch.context() as patch, points.replaced(points.BEGIN_DRAIN, lambda _: lambda _: None):
        asked = silence(patch, manager)
        if how == "steady":
            with manager.steady(2000, state(2000)):
                pass
        else:
            getattr(manager, how)(2000, *[state(2000)] * (how == "save"))
        assert not asked
    manager.wait()


@pytest.mark.parametrize("remote", ["path", "memory"])
def test_a_writer_asks_the_remote_when_it_goes_back_and_a_reader_does_not(tmp_path, monkeypatch, remote):
    far = place(tmp_path, remote)
    save(tmp_path / "run", [1, 2], remote=far)
    reader = fastckpt.Manager(tmp_path / "run", remote=far, read_only=True)
    writer = fastckpt.Manager(tmp_path / "run", remote=far)
    writer.wait()
    with monkeypatch.context() as patch:
        asked = silence(patch, reader)
        assert reader.restore(step=1).step == 1
        assert not asked
        # It goes on all the same.
        silence(patch, writer)
        with pytest.warns(RuntimeWarning, match="does not answer and is skipped: no route"):
            assert writer.restore(step=1).step == 1
    look, looks = writer._remote.place.look, []
    monkeypatch.setattr(writer._remote.place, "look", lambda: (looks.append(1), look())[1])
    writer.restore(step=1)
    # What it lists again it does not read again.
    with points.replaced(points.READ_FACTS, lambda _: None):
        writer.restore(step=2)
    assert len(looks) == 2


@pytest.mark.parametrize("how", ["save", "steady"])
def test_a_directory_that_cannot_be_looked_at_once_is_looked_at_again(tmp_path, skewed, monkeypatch, caplog, how):
    """And no rank raises alone. Mutants: it raises; it counts as looked at."""
    skewed(3600)
    save(tmp_path, [1000, 2000])
    skewed(0)

    def stale():
        raise OSError(116, "Stale file handle")

    with fastckpt.Manager(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(manager._local.place, "look", stale)
            if how == "save":
                assert manager.should_save(100)
            else:
                with manager.steady(100, state(100)):
                    pass
        assert [one for one in caplog.messages if "it cannot be looked at before the first save: [Errno 116]" in one]
        manager.save(100, state(100, "b"))
    assert restored(tmp_path) == (100, "b")


def test_a_new_beginning_comes_after_all_that_it_leaves(tmp_path, skewed):
    """Only a checkpoint that the run has left is there, and the run begins anew on purpose."""
    far = tmp_path / "far"
    skewed(3600)
    save(tmp_path / "one", [1, 2], remote=far)
    fastckpt.Manager(tmp_path / "one", remote=far).pin(2)
    save(tmp_path / "one", [], at=1, discard=True, remote=far)
    for directory in (tmp_path / "one", far):
        fastckpt.remove(directory / FORM.format(step=1))
    skewed(0)
    with fastckpt.Manager(tmp_path / "two", remote=far) as manager:
        assert manager.restore(fresh=True) is None
        manager.save(1, state(1, "b"))
    assert restored(tmp_path / "three", remote=far) == (1, "b")


def test_a_save_that_the_remote_does_not_take_is_no_success(tmp_path, skewed, monkeypatch):
    """The remote did not answer when the run went back, and has a later save of the step by its clock."""
    far = tmp_path / "far"
    skewed(3600)
    save(tmp_path / "one", [1000, 2000], remote=far)
    skewed(0)
    save(tmp_path / "two", [1000], "b")

    with fastckpt.Manager(tmp_path / "two", remote=far) as manager:
        with monkeypatch.context() as patch, points.replaced(points.BEGIN_DRAIN, lambda _: lambda _: None):
            silence(patch, manager)
            with pytest.warns(RuntimeWarning, match="does not answer and is skipped"):
                manager.restore(step=1000)
            manager.save(2000, state(2000, "b"))
        with pytest.raises(
            fastckpt.CheckpointError, match=r"00002000 is not copied, and stays: .*other run \(save again"
        ):
            manager.wait()
        assert manager.remote_steps() == [1000, 2000]
        # No restore costs the only save of the step by this run.
        for step in (None, 2000):
            assert manager.restore(step=step).state["branch"] == "a"
            assert fastckpt.load(manager.path(2000))["branch"] == "b"
        # It is told once, and mended as the message says.
        manager.save(2000, state(2000, "c"), force=True)
        manager.wait()
    assert restored(tmp_path / "three", remote=far) == (2000, "c")


def test_a_loop_that_goes_back_by_itself_leaves_what_it_had(tmp_path):
    with fastckpt.Manager(tmp_path) as manager:
        for step in (1, 2, 3, 2):
            manager.save(step, state(step, str(manager.steps())), force=True)
            manager.wait()
    assert restored(tmp_path) == (2, "[1, 2, 3]")


@pytest.mark.parametrize("remote", ["path", "memory"])
def test_another_node_follows_the_branch_at_the_remote(tmp_path, remote):
    far = str(tmp_path / "far") if remote == "path" else f"memory://{tmp_path.name}/branches"
    save(tmp_path / "one", [1000, 2000, 3000], remote=far)
    # A node with an empty disk goes back; a third one has the disk of the first.
    save(tmp_path / "two", [2100], "b", at=2000, remote=far)
    for disk in ("two", "none", "one"):
        assert restored(tmp_path / disk, remote=far) == (2100, "b")
    # The remote has another 3000 than the disk of the first, whose files are not taken for it.
    save(tmp_path / "two", [3000], "b", remote=far)
    with fastckpt.Manager(tmp_path / "one", remote=far) as manager:
        assert manager.restore().state["branch"] == "b"


@pytest.mark.parametrize("remote", ["path", "memory"])
def test_a_step_that_two_nodes_have_is_the_one_of_the_branch_that_saved_last(tmp_path, remote):
    far = place(tmp_path, remote)
    save(tmp_path / "one", [1, 2, 3], remote=far)
    save(tmp_path / "two", [2], "b", at=1, remote=far)
    manager = fastckpt.Manager(tmp_path / "one", remote=far)
    assert manager.restore(step=2).state["branch"] == "b"
    # Only the branch that was left has this one.
    assert manager.restore(step=3).state["branch"] == "a"
    # What is not yet at the remote is not passed over for what is.
    shard = tmp_path / "two" / FORM.format(step=2) / "model.safetensors"
    with points.replaced(points.BEGIN_DRAIN, lambda _: lambda _: None):
        save(tmp_path / "two", [2], "c", at=1, remote=far)
        manager = fastckpt.Manager(tmp_path / "two", remote=far)
        assert manager.restore(step=2).state["branch"] == "c"
        whole = shard.read_bytes()
        damage(shard.parent)
        with pytest.raises(fastckpt.CorruptCheckpointError, match="step-00000002"):
            manager.restore(step=2)
    # For the drain, which goes on at the end of this process.
    shard.write_bytes(whole)


@pytest.mark.parametrize("discard", [False, True])
def test_two_nodes_that_go_on_from_one_step_get_orders_of_their_own(tmp_path, skewed, discard):
    """Their clocks are behind. Mutant: an order is one above the last."""
    skewed(3600)
    save(tmp_path / "one", [1, 2])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    skewed(0)
    orders = []
    for disk in ("one", "two"):
        save(tmp_path / disk, [], at=1, discard=discard)
        noted = json.loads((tmp_path / disk / CACHE).read_text())["last"][0]
        save(tmp_path / disk, [3])
        with fastckpt.open(tmp_path / disk / FORM.format(step=3)) as checkpoint:
            orders.append((noted, checkpoint.metadata["lineage"]["order"]))
    (one, first), (two, second) = orders
    assert first != second
    assert (one != two) == discard
    assert one < first < one + 2**20 + 2


@pytest.mark.parametrize("remote", ["path", "memory"])
@pytest.mark.parametrize("discard", [False, True])
def test_a_step_that_a_lost_node_saved_again_is_the_one_of_the_branch_that_goes_on(tmp_path, remote, discard):
    """The save that the branch has left is the later one. Mutants: the later one is loaded; it is replaced; it counts
    as what the remote lacks."""
    far = place(tmp_path, remote)
    save(tmp_path / "one", [1, 2], remote=far)
    save(tmp_path / "one", [2], "b", at=1)
    save(tmp_path / "two", [3], remote=far)
    with fastckpt.Manager(tmp_path / "one", remote=far) as manager:
        assert manager.restore(step=2, discard_newer=discard).state["branch"] == "a"
        assert fastckpt.load(manager.path(2))["branch"] == "b"
    assert fastckpt.load(f"{far}/{FORM.format(step=2)}")["branch"] == "a"
    for disk in ("one", "two", "three"):
        assert restored(tmp_path / disk, remote=far) == (2 if discard else 3, "a")


@pytest.mark.parametrize("remote", ["path", "memory"])
def test_no_restore_replaces_a_save_that_the_remote_lacks(tmp_path, remote):
    """The going branch has saved the step later. Mutant: it is fetched to where this one is."""
    far = place(tmp_path, remote)
    save(tmp_path / "one", [1], remote=far)
    save(tmp_path / "one", [2], "b")
    save(tmp_path / "two", [2], "c", at=1, remote=far)
    with fastckpt.Manager(tmp_path / "one", remote=far) as manager:
        for step in (2, None):
            assert manager.restore(step=step).state["branch"] == "c"
        assert fastckpt.load(manager.path(2))["branch"] == "b"


def test_what_a_branch_has_left_does_not_replace_its_own_at_the_remote(tmp_path):
    """A node goes back, saves a step again, and is lost before its upload; another goes on from what the remote has,
    and then the first comes back."""
    far = tmp_path / "far"
    save(tmp_path / "one", [10, 20, 30], remote=far)
    with points.replaced(points.BEGIN_DRAIN, lambda _: lambda _: None):
        save(tmp_path / "one", [20], "b", at=10, remote=far)
    save(tmp_path / "two", [40], remote=far)
    with fastckpt.Manager(tmp_path / "one", remote=far) as manager:
        found = manager.restore()
        assert (found.step, found.state["branch"]) == (40, "a")
        manager.wait()
    assert fastckpt.load(far / "step-00000020")["branch"] == "a"
    for step in (40, 30):
        damage(far / FORM.format(step=step))
    with pytest.warns(RuntimeWarning, match="is skipped"):
        assert restored(tmp_path / "none", remote=far) == (20, "a")


def test_what_is_newer_is_discarded_on_request(tmp_path, caplog):
    far = tmp_path / "far"
    save(tmp_path / "run", [1000, 2000, 3000, 4000], remote=far)
    fastckpt.Manager(tmp_path / "run").pin(3000)
    with fastckpt.Manager(tmp_path / "run", remote=far) as manager:
        with caplog.at_level(logging.WARNING, "fastckpt"):
            assert manager.restore(step=2000, discard_newer=True).step == 2000
        assert manager.steps() == [1000, 2000, 3000]
        # It was pinned by a manager without a remote tier, and stays there, too.
        assert manager.remote_steps() == [1000, 2000, 3000]
        assert (tmp_path / "run" / "latest").read_text() == "step-00002000\n"
        assert any("step-00003000 stays: it is pinned" in record.message for record in caplog.records)
        with pytest.raises(ValueError, match="requires step="):
            manager.restore(discard_newer=True)
        # What others have put in the place of the hint costs the hint alone.
        (tmp_path / "run" / "latest").unlink()
        (tmp_path / "run" / "latest").mkdir()
        assert manager.restore(step=1000, discard_newer=True).step == 1000
        assert (manager.steps(), manager.remote_steps()) == ([1000, 3000], [1000, 3000])
    # A run that ends before its next save has left the pinned one behind all the same, also on another node.
    for directory, options in ((tmp_path / "run", {}), (tmp_path / "run", {"remote": far})):
        with fastckpt.Manager(directory, **options) as manager:
            assert (manager.latest(), manager.restore().step) == (1000, 1000)
    with pytest.raises(RuntimeError, match="read-only"):
        fastckpt.Manager(tmp_path / "run", read_only=True).restore(step=1000, discard_newer=True)


def test_a_save_in_flight_is_discarded_with_what_is_newer(tmp_path):
    """Mutant: the removal does not wait for it, and it comes after."""
    save(tmp_path, [1, 2, 3])
    with fastckpt.Manager(tmp_path, save_options={"bandwidth_limit": "1MB"}) as manager:
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
        assert manager.remote_steps() == [3000, 4000]
        manager.restore(step=1000, discard_newer=True)
        assert (manager.steps(), manager.remote_steps()) == ([1000], [1000])
    assert fastckpt.Manager(tmp_path / "none", remote=far, read_only=True).restore().step == 1000


def test_what_is_newer_is_discarded_at_a_remote_once_it_has_that_save_of_the_step(tmp_path):
    far = tmp_path / "far"
    save(tmp_path / "run", [1000, 2000, 3000], remote=far)
    save(tmp_path / "run", [2000], "b", at=1000)
    lagging = points.replaced(points.RESUME_DRAIN, lambda _: lambda _: None)
    with lagging, fastckpt.Manager(tmp_path / "run", remote=far) as manager:
        assert manager.restore(step=2000, discard_newer=True).state["branch"] == "b"
        assert manager.remote_steps() == [1000, 2000]
        assert restored(tmp_path / "none", remote=far) == (2000, "b")


def test_nothing_is_discarded_while_the_remote_does_not_answer(tmp_path, monkeypatch):
    """It answers again by the time of the removal. Mutant: the look may fail where the directory has the step."""
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
        assert (manager.steps(), manager.remote_steps()) == ([1, 2, 3], [1, 2, 3])


def test_nothing_is_discarded_before_the_remote_has_the_step(tmp_path, monkeypatch):
    """Mutants: what the copy has done is not looked at; another step that fails counts."""
    far = tmp_path / "far"
    save(tmp_path / "run", [1, 2, 3], remote=far)
    save(tmp_path / "run", [2], "b", at=1)
    lagging = points.replaced(points.RESUME_DRAIN, lambda _: lambda _: None)
    with lagging, fastckpt.Manager(tmp_path / "run", remote=far) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(manager._drain, "again", lambda _step: None)
            with pytest.raises(fastckpt.CheckpointError, match="step-00000002: nothing was removed"):
                manager.restore(step=2, discard_newer=True)
        assert (manager.steps(), manager.remote_steps()) == ([1, 2, 3], [1, 2, 3])
        manager._drain._failed[1] = OSError("another step cannot be copied")
        manager.restore(step=2, discard_newer=True)
        assert (manager.steps(), manager.remote_steps()) == ([1, 2], [1, 2])
        with pytest.raises(OSError, match="another step"):
            manager.wait()


@pytest.mark.parametrize("remote", ["path", "memory"])
def test_what_is_newer_is_discarded_by_a_node_whose_disk_takes_nothing(tmp_path, caplog, remote):
    """Its directory does not even exist. Mutant: what cannot be noted there is an error."""
    far = place(tmp_path, remote)
    save(tmp_path / "one", [1, 2, 3], remote=far)

    def full(_):
        def copy(_sources, target, **_how):
            raise OSError(errno.ENOSPC, "No space left on device", target)

        return copy

    with points.replaced(points.FETCH, full):
        manager = fastckpt.Manager(tmp_path / "two", remote=far)
        assert manager.restore(step=2, discard_newer=True).step == 2
    assert manager.remote_steps() == [1, 2]
    assert [one for one in caplog.messages if "which branch goes on is not noted here: [Errno 2]" in one]


def test_a_discard_that_fails_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    """Mutants: the run continues from the other step; what is newer is not copied any more; the note stays."""
    far = tmp_path / "far"
    save(tmp_path / "run", [1, 2], remote=far)
    noted = []

    def refuse(*_):
        # A node that is lost now goes on from the step also without the remote.
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
    assert manager.remote_steps() == [1, 2, 3]
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
    """By then no policy of the remote would keep the step. Mutant: the branch that is left decides what is copied."""
    far = place(tmp_path, remote)
    save(tmp_path / "one", [1, 3], keep=1, remote=far)
    save(tmp_path / "two", [2, 5], "b", at=1, remote=far, remote_keep=2)
    save(tmp_path / "one", [], at=3, discard=True, remote=far, remote_keep=2)
    for disk in ("one", "two", "three"):
        assert restored(tmp_path / disk, remote=far) == (3, "a")


@pytest.mark.parametrize("remote", ["none", "path", "memory"])
def test_a_run_that_goes_back_follows_it_where_nothing_is_newer(tmp_path, remote):
    """It ends before its next save. Mutant: only a removal is noted."""
    far = place(tmp_path, remote)
    one, two = (tmp_path / name for name in (("one", "two") if far else ("one", "one")))
    save(one, [1, 2, 3], remote=far)
    save(two, [2], "b", at=1, remote=far)
    save(one, [], at=3, discard=True, remote=far)
    for disk in (one, two):
        assert restored(disk, remote=far) == (3, "a")


def test_other_metadata_and_other_saves_do_not_make_a_branch(tmp_path):
    """Checkpoints that no manager has saved, and a claim that is none."""
    for step, about in ((3, {"lineage": "x"}), (1, {"lineage": {"order": "y", "forks": [], "files": []}}), (2, None)):
        fastckpt.save(state(step), tmp_path / FORM.format(step=step), metadata=about)
    assert restored(tmp_path) == (3, "a")


@pytest.mark.parametrize("order", [float("inf"), float("nan"), 10.0**30, 2**62, "7"])
def test_an_order_that_none_can_follow_is_none(tmp_path, order):
    """Mutants: it is an error; the next save gets an order that metadata do not take."""
    save(tmp_path, [1, 2])
    for name, about in ((7, [order, []]), (8, [9, [[order, 1, 9]]])):
        noted = dict(zip(("order", "forks"), about, strict=True), files=[])
        fastckpt.save(state(name, "b"), tmp_path / FORM.format(step=name), metadata={"lineage": noted})
    with fastckpt.Manager(tmp_path) as manager:
        assert manager.restore(step=2).state["branch"] == "a"
        # As one that no manager has saved.
        assert manager.restore(step=8).lineage == (0, (), ())
        manager.save(9, state(9, "c"))
    assert restored(tmp_path) == (9, "c")


def test_a_checkpoint_that_is_written_again_by_other_means_stays_on_its_branch(tmp_path):
    """It is newer than the one that the run goes on from, and yet below it. Mutants: its order counts as that of a save
    by a manager; the last checkpoint that was written is the branch that goes on."""
    save(tmp_path, [10, 20, 30])
    fastckpt.save(state(10, "again"), tmp_path / FORM.format(step=10), overwrite=True)
    save(tmp_path, [21], "b", at=20)
    fastckpt.save(state(20, "again"), tmp_path / FORM.format(step=20), overwrite=True)
    for name in (CACHE, None):
        if name is not None:
            (tmp_path / name).unlink()
        manager = fastckpt.Manager(tmp_path, keep=3, read_only=True)
        assert [step for step, why in manager.kept().items() if why == ["last=3"]] == [10, 20, 21]
        assert restored(tmp_path) == (21, "b")


def test_what_is_left_behind_stays_where_the_branch_has_lost_all(tmp_path):
    first, aside = tmp_path / "run" / FORM.format(step=0), tmp_path / "aside"
    save(tmp_path / "run", [0])
    shutil.copytree(first, aside)
    with fastckpt.Manager(tmp_path / "run") as writer:
        writer.restore()
        writer.save(0, state(0, "b"), force=True)
    shutil.rmtree(first)
    aside.rename(first)
    manager = fastckpt.Manager(tmp_path / "run", keep=1, read_only=True)
    assert (manager.latest(), manager.kept()) == (None, {0: ["left behind, until the run has passed it"]})
    begin(tmp_path / "run", r"every checkpoint here is on a branch that it left; .* call restore\(step=0\)")
    assert manager.restore(step=0).state["branch"] == "a"


# A new beginning.


def begin(directory, text, kind=fastckpt.CheckpointError, **options):
    """A restore is an error that says ``text``, unless it is told to begin anew."""
    for read_only in (False, True):
        manager = fastckpt.Manager(directory, read_only=read_only, **options)
        with pytest.raises(kind, match=text) as raised:
            manager.restore()
        assert type(raised.value) is kind
        assert manager.restore(fresh=True) is None


def test_nothing_is_a_new_beginning(tmp_path):
    (tmp_path / "run" / "logs-1").mkdir(parents=True)
    (tmp_path / "run" / "events.1").touch()
    fastckpt.save(state(0), tmp_path / "run" / "pretrained")
    for directory in (tmp_path / "none", tmp_path / "run"):
        for remote in (None, tmp_path / "far", f"memory://{tmp_path.name}/nothing"):
            assert fastckpt.Manager(directory, remote=remote).restore() is None
    # A first save that was killed left its workspace, and whoever asked for the best one wrote the cache.
    (tmp_path / "run" / ".step-00000001.tmp-node-0123456789abcdef-1-2-3-01234567").mkdir()
    fastckpt.Manager(tmp_path / "run", keep=keep.Best(1, "loss")).best()
    assert fastckpt.Manager(tmp_path / "run").restore() is None


def test_another_form_of_names_is_no_new_beginning(tmp_path):
    save(tmp_path, [1000])
    begin(tmp_path, "step-00001000 is a checkpoint whose name does not fit name=", name="step-{step}")


@pytest.mark.parametrize("kept", ["latest", CACHE, "step-00000001.pin"])
def test_a_lost_checkpoint_is_no_new_beginning(tmp_path, kept):
    save(tmp_path, [1], keep=1)
    fastckpt.Manager(tmp_path).pin(1)
    fastckpt.remove(tmp_path / "step-00000001")
    for name in ("latest", CACHE, "step-00000001.pin"):
        if name != kept:
            (tmp_path / name).unlink()
    begin(tmp_path, kept.replace(".", r"\."))


def test_a_disk_that_is_not_mounted_is_no_new_beginning(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "disk" / "runs")
    begin(tmp_path / "runs" / "gpt", "symbolic link to .*/disk/runs, which is missing")
    table = tmp_path / "fstab"
    table.write_text(f"# a disk\nLABEL=data {tmp_path}/my\\040disk ext4 defaults 0 2\n")
    with points.replaced(points.MOUNTS, lambda _: table):
        begin(tmp_path / "my disk" / "gpt", "fstab names .*/my disk, where nothing is mounted")
    assert fastckpt.Manager(tmp_path / "other").restore() is None


def test_objects_without_a_manifest_are_no_new_beginning(tmp_path):
    url = f"memory://{tmp_path.name}/lost"
    save(tmp_path / "one", [1000], remote=url)
    s3.objects(f"{url}/step-00001000").remove(["fastckpt.json"])
    begin(tmp_path / "two", "there are objects below step-00001000/, but no manifest", remote=url)
    begin(tmp_path / "two", "there are objects below", remote=url, remote_keep=1)
    s3.objects(url).remove([*s3.objects(url).sizes()])
    save(tmp_path / "one", [2000], remote=url)
    begin(tmp_path / "two", "step-00001000 is a checkpoint|step-00002000 is", remote=url, name="{step}")


@pytest.mark.parametrize("name", ["step-{step:08d}", "ckpt-{step}"])
def test_other_names_in_a_store_hide_no_earlier_run(tmp_path, name):
    """Mutant: only the last names with a number are looked at."""
    url = f"memory://{tmp_path.name}/hidden"
    save(tmp_path / "one", [1000], remote=url, name=name)
    store = s3.objects(url)
    if name == FORM:
        store.remove([f"{FORM.format(step=1000)}/fastckpt.json"])
    store.remove([CACHE, "latest"])
    for number in range(40):
        store.write(f"tensorboard-{number:03d}/events", [b"x"], 1, None)
    words = "no manifest" if name == FORM else "ckpt-1000 is a checkpoint whose name does not fit name="
    begin(tmp_path / "two", words, remote=url)


def test_a_part_of_a_copy_at_a_remote_directory_is_no_new_beginning(tmp_path):
    (tmp_path / "far" / ".step-00000007.copy-0123456789abcdef").mkdir(parents=True)
    begin(tmp_path / "run", "step-00000007.copy-0123456789abcdef is a part of a checkpoint", remote=tmp_path / "far")


def test_checkpoints_of_another_library_are_not_damaged_ones(tmp_path):
    for name in ("step-00000001", "step-00000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    for directory, options in ((tmp_path, {}), (tmp_path, {"name": "other-{step}"})):
        if not options:
            with pytest.warns(RuntimeWarning, match="fastckpt convert"):
                begin(directory, "torch.distributed.checkpoint; 'fastckpt convert", fastckpt.NotACheckpointError)
        else:
            begin(directory, "torch.distributed.checkpoint", fastckpt.NotACheckpointError, **options)


def test_a_report_is_not_asked_for(tmp_path):
    save(tmp_path, [1])
    with pytest.raises(TypeError, match="leave out report="):
        fastckpt.Manager(tmp_path).restore(report=True)


def test_a_kind_of_value_that_is_not_known_is_of_a_later_release_and_no_damage(tmp_path):
    """After a library is rolled back, a run must not pass over its newest checkpoints as damaged."""
    manager = fastckpt.Manager(tmp_path)
    for step in (1, 2):
        manager.save(step, {"step": step})
    manager.wait()
    newest = Path(manager.path(2))
    body = manifest.body_of(newest)
    body["structure"] = [["from-tomorrow", 1] if token == 2 else token for token in body["structure"]]
    manifest.forge(newest, body)
    for way in (fastckpt.load, lambda _path: fastckpt.Manager(tmp_path).restore()):
        with pytest.raises(fastckpt.FormatVersionError, match=r"'from-tomorrow'.*upgrade fastckpt-io"):
            way(newest)
