"""A run that goes back follows its new branch."""

from __future__ import annotations

import json
import shutil
import signal
import time

import pytest

import fastckpt
from fastckpt import keep
from harness import points
from harness.branches import CACHE, FORM, damage, place, restored, save, silence, state, take_aside
from harness.tiers import at_remote, kept


@pytest.fixture
def rolled(tmp_path):
    """A run with steps 1000, 2000 and 3000, which went back to 2000 and saved 2100."""
    save(tmp_path, [1000, 2000, 3000])
    save(tmp_path, [2100], "b", at=2000)
    return tmp_path


def test_a_restart_follows_the_branch_that_saved_last(rolled):
    assert restored(rolled) == (2100, "b")
    manager = fastckpt.Manager(rolled, read_only=True)
    assert (manager.latest(), manager.best("loss", "max"), manager.steps()) == (2100, 2100, [1000, 2000, 2100, 3000])
    assert kept(manager)[3000] == ["left behind, until the run has passed it"] or not manager.policies
    # A restore does not fall back to a step that only the old branch has; that step is still there under its number.
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
            # Abandoned steps are removed when the run has passed them, like all older steps.
            assert manager.steps() == left
    assert restored(rolled) == (3100, "b")


def test_a_step_saved_again_belongs_to_the_new_branch(rolled):
    save(rolled, [3000], "b")
    assert restored(rolled) == (3000, "b")
    # The run goes back to the first branch, of which step 2000 is left.
    save(rolled, [2500], "c", at=2000)
    assert restored(rolled) == (2500, "c")
    damage(rolled / "step-00002500")
    with pytest.warns(RuntimeWarning, match="step-00002500"):
        assert restored(rolled) == (2000, "a")


def test_what_a_killed_save_took_aside_stays_on_its_branch(rolled):
    # The run was saving step 3000 again, which the abandoned branch also has.
    take_aside(rolled / "step-00003000")
    assert restored(rolled) == (2100, "b")


def test_what_a_branch_left_below_its_highest_step_is_not_its_own(tmp_path):
    """A run goes back to an older branch, between whose steps are some of the later branch. Mutant: only higher steps
    count as abandoned."""
    save(tmp_path, [1000, 2000, 3000])
    save(tmp_path, [1500, 2500], "b", at=1000)
    save(tmp_path, [3100], "a", at=3000)
    manager = fastckpt.Manager(tmp_path, keep=[keep.Last(2), keep.Best(1, "loss", mode="max")], read_only=True)
    assert {step for step, why in kept(manager).items() if why} == {3000, 3100}
    for step, falls_to in ((3100, 3000), (3000, 2000)):
        damage(tmp_path / FORM.format(step=step))
        with pytest.warns(RuntimeWarning, match="is skipped"):
            assert restored(tmp_path) == (falls_to, "a")
    # The run goes back to the other branch again, with a restart in between.
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
    """A function that sets this host's clock ahead by some seconds."""
    real = time.time_ns
    return lambda ahead: monkeypatch.setattr("time.time_ns", lambda: real() + int(ahead * 1e9))


@pytest.mark.parametrize("ahead", [3600, 5, -5, -3600])
@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("remote", ["none", "path", "memory"])
def test_the_branch_that_saved_last_is_followed_whatever_the_clocks_say(tmp_path, skewed, remote, discard, ahead):
    """With a remote tier, the node that goes back has an empty disk. Mutants: the orders at the remote tier are
    not read; a run that goes back writes its note only after its saves."""
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
            # Step 3000 no longer belongs to the other branch.
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
    """The remote tier may fail to answer for minutes."""
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
        # The writer still restores, without the remote tier.
        silence(patch, writer)
        with pytest.warns(RuntimeWarning, match="does not answer and is skipped: no route"):
            assert writer.restore(step=1).step == 1
    look, looks = writer._remote.place.look, []
    monkeypatch.setattr(writer._remote.place, "look", lambda: (looks.append(1), look())[1])
    writer.restore(step=1)
    # Listed again, a checkpoint is not read again.
    with points.replaced(points.READ_FACTS, lambda _: None):
        writer.restore(step=2)
    assert len(looks) == 2


@pytest.mark.parametrize("how", ["save", "steady"])
def test_a_directory_that_cannot_be_looked_at_once_is_looked_at_again(tmp_path, skewed, monkeypatch, caplog, how):
    """No rank may raise alone. Mutants: the call raises; the directory counts as read."""
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
        assert [one for one in caplog.messages if "an earlier run before the first save: [Errno 116]" in one]
        manager.save(100, state(100, "b"))
    assert restored(tmp_path) == (100, "b")


def test_a_new_beginning_comes_after_all_that_it_leaves(tmp_path, skewed):
    """The directory has only a checkpoint of an abandoned branch, and the run begins anew on purpose."""
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
    """The remote tier did not answer when the run went back, and by its clock it has a later save of the step."""
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
        assert at_remote(manager) == [1000, 2000]
        # No restore removes this run's only save of the step.
        for step in (None, 2000):
            assert manager.restore(step=step).state["branch"] == "a"
            assert fastckpt.load(manager.path(2000))["branch"] == "b"
        # The failure is reported once, and the advice of the message fixes it.
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
    # The remote tier has a different step 3000 than the first disk, whose files do not count as files of that step.
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
    # Only the abandoned branch has step 3.
    assert manager.restore(step=3).state["branch"] == "a"
    # A step that is not yet in the remote tier is not skipped in favour of a step there.
    shard = tmp_path / "two" / FORM.format(step=2) / "model.safetensors"
    with points.replaced(points.BEGIN_DRAIN, lambda _: lambda _: None):
        save(tmp_path / "two", [2], "c", at=1, remote=far)
        manager = fastckpt.Manager(tmp_path / "two", remote=far)
        assert manager.restore(step=2).state["branch"] == "c"
        whole = shard.read_bytes()
        damage(shard.parent)
        with pytest.raises(fastckpt.CorruptCheckpointError, match="step-00000002"):
            manager.restore(step=2)
    # Repair the file for the drain, which continues at the end of this process.
    shard.write_bytes(whole)


@pytest.mark.parametrize("discard", [False, True])
def test_two_nodes_that_go_on_from_one_step_get_orders_of_their_own(tmp_path, skewed, discard):
    """The clocks of the nodes are behind. Mutant: an order is the last order plus one."""
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
    """The abandoned save is the later one. Mutants: it is loaded; it is replaced; it counts as missing in the remote
    tier."""
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
    """The current branch saved the step later. Mutant: the fetched step replaces the save of this node."""
    far = place(tmp_path, remote)
    save(tmp_path / "one", [1], remote=far)
    save(tmp_path / "one", [2], "b")
    save(tmp_path / "two", [2], "c", at=1, remote=far)
    with fastckpt.Manager(tmp_path / "one", remote=far) as manager:
        for step in (2, None):
            assert manager.restore(step=step).state["branch"] == "c"
        assert fastckpt.load(manager.path(2))["branch"] == "b"


def test_what_a_branch_has_left_does_not_replace_its_own_at_the_remote(tmp_path):
    """A node goes back, saves a step again, and is lost before the upload; another node continues from the remote tier,
    and then the first returns."""
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


def test_other_metadata_and_other_saves_do_not_make_a_branch(tmp_path):
    """No manager saved the checkpoints, and some have invalid lineage metadata."""
    for step, about in ((3, {"lineage": "x"}), (1, {"lineage": {"order": "y", "forks": [], "files": []}}), (2, None)):
        fastckpt.save(state(step), tmp_path / FORM.format(step=step), metadata=about)
    assert restored(tmp_path) == (3, "a")


@pytest.mark.parametrize("order", [float("inf"), float("nan"), 10.0**30, 2**62, "7"])
def test_an_order_that_none_can_follow_is_none(tmp_path, order):
    """Mutants: such an order is an error; the next save gets an order that metadata cannot hold."""
    save(tmp_path, [1, 2])
    for name, about in ((7, [order, []]), (8, [9, [[order, 1, 9]]])):
        noted = dict(zip(("order", "forks"), about, strict=True), files=[])
        fastckpt.save(state(name, "b"), tmp_path / FORM.format(step=name), metadata={"lineage": noted})
    with fastckpt.Manager(tmp_path) as manager:
        assert manager.restore(step=2).state["branch"] == "a"
        # The step counts like a checkpoint that no manager saved.
        assert manager.restore(step=8).lineage == (0, (), ())
        manager.save(9, state(9, "c"))
    assert restored(tmp_path) == (9, "c")


def test_a_checkpoint_that_is_written_again_by_other_means_stays_on_its_branch(tmp_path):
    """The checkpoint is newer than the step from which the run continues, but has a lower number. Mutants: its order
    counts as if a manager saved it; the run continues the branch of the checkpoint that was written last."""
    save(tmp_path, [10, 20, 30])
    fastckpt.save(state(10, "again"), tmp_path / FORM.format(step=10), overwrite=True)
    save(tmp_path, [21], "b", at=20)
    fastckpt.save(state(20, "again"), tmp_path / FORM.format(step=20), overwrite=True)
    for name in (CACHE, None):
        if name is not None:
            (tmp_path / name).unlink()
        manager = fastckpt.Manager(tmp_path, keep=3, read_only=True)
        assert [step for step, why in kept(manager).items() if why == ["last=3"]] == [10, 20, 21]
        assert restored(tmp_path) == (21, "b")
