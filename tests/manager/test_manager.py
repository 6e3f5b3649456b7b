"""``fastckpt.Manager``: saving, keeping, finding and restoring, in one process."""

from __future__ import annotations

import errno
import json
import logging
import os
import tempfile
import threading
import time
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import fastckpt
from fastckpt import keep, when
from harness import limits, points
from harness.branches import take_aside
from harness.internals import join_saves
from harness.tiers import kept, pinned

#: The cache file of a Manager, beside the checkpoints (docs/manager.md).
CACHE = ".fastckpt-run.json"


def state(step):
    return {"model": {"w": np.full(1000, step)}, "step": step}


def fill(directory, steps, **options):
    with fastckpt.Manager(directory, **options) as manager:
        for step in steps:
            assert manager.save(step, state(step), {"loss": abs(step - 3)})
            manager.wait()
    return manager


def damage(path):
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_is_saved_kept_and_restored(tmp_path, async_save):
    with fastckpt.Manager(tmp_path / "run", keep=2, save_when=2, async_save=async_save) as manager:
        assert manager.restore() is None
        assert (manager.steps(), manager.latest()) == ([], None)
        saved = [step for step in range(1, 10) if manager.save(step, state(step), {"loss": 1 / step})]
        report = manager.wait()
        assert saved == [2, 4, 6, 8]
        assert report.path == manager.path(8) == str(tmp_path / "run" / "step-00000008")
        assert manager.steps() == [6, 8]
        assert manager.latest() == 8
    assert (tmp_path / "run" / "latest").read_text() == "step-00000008\n"
    again = fastckpt.Manager(tmp_path / "run")
    found = again.restore()
    assert (found.step, found.state["step"], found.metrics, found.skipped) == (8, 8, {"loss": 1 / 8}, ())
    assert (found.state["model"]["w"] == 8).all()
    # The restored state need not be saved again.
    assert not again.should_save(8)
    assert again.should_save(9)


def test_the_steps_that_remain(tmp_path):
    with fastckpt.Manager(tmp_path) as manager:
        assert list(manager.remaining(3)) == [1, 2, 3]
        for step in manager.remaining(3):
            manager.save(step, {"step": step}, force=True)
    for step, left in ((None, [4, 5]), (2, [3, 4, 5])):
        manager = fastckpt.Manager(tmp_path)
        manager.restore(step=step)
        assert list(manager.remaining(5)) == left
        assert list(manager.remaining(2)) == []
    for last in (-1, 2.5, True):
        with pytest.raises(ValueError, match="remaining: step must be a non-negative integer"):
            manager.remaining(last)


def test_restore_checks_its_arguments_before_there_is_anything_to_restore(tmp_path):
    manager = fastckpt.Manager(tmp_path / "run")
    with pytest.raises(TypeError, match="restore: unexpected keyword argument 'keyz'; similar: 'keys'"):
        manager.restore(keyz="w")
    with pytest.raises(ValueError, match="restore: framework"):
        manager.restore(framework="jax")
    assert manager.restore(keys="w") is None


def test_a_restored_state_fills_what_it_is_given(tmp_path):
    fill(tmp_path, [1, 2])
    into = state(0)
    tensor = into["model"]["w"]
    found = fastckpt.Manager(tmp_path).restore(into=into, exclude="step")
    assert found.state["model"]["w"] is tensor
    assert (tensor == 2).all()
    assert found.state is into
    assert into["step"] == 0
    assert fastckpt.Manager(tmp_path).restore(step=1).state["step"] == 1
    with pytest.raises(FileNotFoundError):
        fastckpt.Manager(tmp_path).restore(step=7)


def test_what_does_not_verify_is_skipped_with_its_reason(tmp_path):
    fill(tmp_path, [1, 2, 3, 4])
    damage(tmp_path / "step-00000004")
    (tmp_path / "step-00000003" / "fastckpt.json").unlink()
    (tmp_path / "step-00000009").mkdir()
    manager = fastckpt.Manager(tmp_path)
    assert manager.latest() == 4  # a directory without a manifest is not a checkpoint
    with pytest.warns(RuntimeWarning, match="is skipped") as caught:
        found = manager.restore()
    assert found.step == 2
    assert [step for step, _ in found.skipped] == [9, 4, 3]
    assert "model.safetensors" in found.skipped[1][1]
    assert len(caught) == 3
    assert all(one.filename == __file__ for one in caught)


def test_what_a_writer_removes_while_a_reader_looks_is_no_loss(tmp_path, recwarn):
    """Whenever the reader has chosen a checkpoint, the writer saves a newer one and removes the chosen one."""
    writer = fill(tmp_path, [1], keep=1)

    def overtaken(load):
        def late(path, **options):
            step = writer.latest() + 1
            if step < 6:
                writer.save(step, state(step))
                writer.wait()
            return load(path, **options)

        return late

    with points.replaced(points.LOAD_TO_RESTORE, overtaken):
        found = fastckpt.Manager(tmp_path, read_only=True).restore()
    assert (found.step, found.skipped) == (5, ())
    assert not recwarn.list


def test_a_reader_does_not_look_for_ever(tmp_path):
    fill(tmp_path, [1])

    def load(path, **_):
        looks.append(path)
        Path(path).rename(tmp_path / f"step-{len(looks) + 1:08d}")
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    looks = []
    with (
        points.replaced(points.LOAD_TO_RESTORE, lambda _: load),
        pytest.warns(RuntimeWarning, match="is gone"),
        pytest.raises(fastckpt.CorruptCheckpointError, match="none of 1"),
    ):
        fastckpt.Manager(tmp_path, read_only=True).restore()
    assert len(looks) == limits.of("looks of a reader for a checkpoint")


def test_nothing_that_verifies_is_an_error_and_not_a_new_beginning(tmp_path):
    fill(tmp_path, [1])
    damage(tmp_path / "step-00000001")
    with (
        pytest.warns(RuntimeWarning, match="step-00000001"),
        pytest.raises(fastckpt.CorruptCheckpointError, match="none of 1 checkpoints"),
    ):
        fastckpt.Manager(tmp_path).restore()


def test_storage_that_refuses_is_an_error_and_not_a_reason_to_skip(tmp_path):
    fill(tmp_path, [1, 2])

    def refusing(load):
        def refuse(path, **options):
            if path.endswith("2"):
                raise OSError(failure, os.strerror(failure), path)
            return load(path, **options)

        return refuse

    with points.replaced(points.LOAD_TO_RESTORE, refusing):
        failure = errno.EACCES
        with pytest.raises(PermissionError):
            fastckpt.Manager(tmp_path).restore()
        failure = errno.EIO
        with pytest.warns(RuntimeWarning, match="skipped"):
            assert fastckpt.Manager(tmp_path).restore().step == 1


def test_one_that_a_killed_save_took_aside_is_found(tmp_path):
    fill(tmp_path, [1, 2])
    take_aside(tmp_path / "step-00000002")
    manager = fastckpt.Manager(tmp_path)
    assert manager.steps() == [1]
    assert manager.restore().step == 2


def test_retention_counts_neither_damaged_ones_nor_those_of_a_later_step(tmp_path):
    """After a fallback to step 2, ``keep=1`` must not count the damaged step 3 as the one to keep."""
    fill(tmp_path, [1, 2, 3, 8])
    damage(tmp_path / "step-00000003")
    damage(tmp_path / "step-00000008")
    with fastckpt.Manager(tmp_path, keep=1) as manager:
        with pytest.warns(RuntimeWarning, match="skipped"):
            assert manager.restore().step == 2
        manager.save(4, state(4))
        manager.wait()
        assert manager.steps() == [3, 4, 8]
        assert (tmp_path / "latest").read_text() == "step-00000004\n"


def test_a_damaged_step_that_is_saved_again_counts_again(tmp_path):
    fill(tmp_path, [1, 2])
    damage(tmp_path / "step-00000002")
    with fastckpt.Manager(tmp_path, keep=1) as manager:
        with pytest.warns(RuntimeWarning, match="skipped"):
            assert manager.restore().step == 1
        for step in (2, 3):
            manager.save(step, state(step))
            manager.wait()
            assert manager.steps() == [step]


def test_what_a_damaged_one_has_more_than_an_older_one_leaves_no_trace(tmp_path):
    with fastckpt.Manager(tmp_path) as manager:
        manager.save(1, {"a": np.full(1000, 1.0)})
        manager.wait()
        manager.save(2, {"a": np.full(1000, 2.0), "b": np.full(1000, 2.0)})
    damage(tmp_path / "step-00000002")
    into = {"a": np.zeros(1000), "b": np.zeros(1000)}
    with pytest.warns(RuntimeWarning, match="step-00000002"):
        assert fastckpt.Manager(tmp_path).restore(into=into, strict=False).step == 1
    assert (into["a"] == 1).all()
    assert (into["b"] == 0).all()


def test_a_checkpoint_with_nothing_that_an_older_one_lacks_is_read_once(tmp_path):
    fill(tmp_path, [1, 2])
    damage(tmp_path / "step-00000002")
    into = {"model": {"w": np.full(1000, 5)}, "step": 5}

    def refuse(*_):
        raise AssertionError("the checkpoint must not be verified before the read")

    with points.replaced(points.VERIFY_TO_RESTORE, lambda _: refuse), pytest.warns(RuntimeWarning, match="skipped"):
        found = fastckpt.Manager(tmp_path).restore(into=into, strict=False)
    assert (found.step, found.state["step"]) == (1, 1)
    assert (into["model"]["w"] == 1).all()


def test_a_later_step_of_an_earlier_run_is_told_and_stays(tmp_path, caplog):
    fill(tmp_path, [1, 10])
    with caplog.at_level(logging.WARNING, "fastckpt"), fastckpt.Manager(tmp_path, keep=1) as manager:
        manager.save(5, state(5))
        manager.save(6, state(6))
    assert manager.steps() == [6, 10]
    (told,) = [record.message for record in caplog.records if "earlier run" in record.message]
    assert told.startswith(f"{tmp_path}: the run goes on with step 5, and step 10 of an earlier run is left behind")


def test_nothing_goes_before_the_newer_one_is_durable(tmp_path):
    """In contrast, accelerate's ``total_limit=1`` removes the only checkpoint, and then saves."""
    removed = []

    def telling(remove):
        def tell(path, **options):
            newest = fastckpt.Manager(tmp_path, read_only=True).restore()
            removed.append((Path(path).name, newest.step))
            remove(path, **options)

        return tell

    with points.replaced(points.REMOVE, telling):
        fill(tmp_path, [1, 2, 3], keep=1)
    assert removed == [("step-00000001", 2), ("step-00000002", 3)]


def test_a_failed_save_removes_nothing_and_does_not_advance_latest(tmp_path, monkeypatch):
    fill(tmp_path, [1])
    blocked = tmp_path / "step-00000002"
    blocked.write_text("in the way")
    with fastckpt.Manager(tmp_path, keep=1, async_save=False) as manager:
        with pytest.raises(FileExistsError):
            manager.save(2, state(2))
        manager.wait()
        assert manager.steps() == [1]
        assert (tmp_path / "latest").read_text() == "step-00000001\n"
        blocked.unlink()
        assert manager.save(2, state(2))
        manager.wait()
        assert manager.steps() == [2]


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken_writing():
    """Make the write of every snapshot fail."""
    return points.replaced(points.WRITE_SNAPSHOT, lambda _: no_room)


def test_a_failure_in_the_background_is_raised_once_by_wait(tmp_path):
    fill(tmp_path, [1])
    with fastckpt.Manager(tmp_path, keep=1) as manager:
        with broken_writing():
            manager.save(2, state(2))
            with pytest.raises(OSError, match="No space"):
                manager.wait()
        assert manager.steps() == [1]
        assert (tmp_path / "latest").read_text() == "step-00000001\n"
        # The step may be saved again.
        assert manager.save(2, state(2))
    assert manager.steps() == [2]


def test_a_failure_in_the_background_is_raised_by_the_next_save_which_goes_on(tmp_path):
    with fastckpt.Manager(tmp_path) as manager:
        with broken_writing():
            manager.save(1, state(1))
            join_saves()
        with pytest.raises(OSError, match="No space"):
            manager.save(2, state(2))
    assert manager.steps() == [2]
    assert (tmp_path / "latest").read_text() == "step-00000002\n"


def test_one_failed_removal_does_not_stop_the_rest_and_is_told_once(tmp_path, caplog):
    fill(tmp_path, [1, 2, 3])

    def refusing(remove):
        def refuse(path, **options):
            if path.endswith("1"):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
            remove(path, **options)

        return refuse

    with caplog.at_level(logging.WARNING, "fastckpt"), points.replaced(points.REMOVE, refusing):
        fill(tmp_path, [4, 5], keep=1)
    assert fastckpt.Manager(tmp_path).steps() == [1, 5]
    told = [record.message for record in caplog.records if "cannot be removed" in record.message]
    assert len(told) == 1
    assert "step-00000001" in told[0]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_each_save_takes_the_files_as_they_are_then(tmp_path, asynchronous):
    """Mutant: the dict is copied when the manager is made; docs/guides/trainer.md fills it before each save."""
    files = {}
    with fastckpt.Manager(tmp_path, save_options={"files": files}, async_save=asynchronous) as manager:
        for step in (1, 2):
            files["state.json"] = str(step)
            manager.save(step, {"a": step})
    assert [Path(manager.path(step), "state.json").read_text() for step in (1, 2)] == ["1", "2"]


def test_what_files_gave_goes_with_a_checkpoint_and_what_others_put_there_stays(tmp_path, caplog):
    """Only files that fastckpt wrote are removed: not notes, results, a checkpoint of torch's DCP or a directory."""
    options = {"save_options": {"files": {"config.json": "{}"}}}
    fill(tmp_path, [1], **options)
    path = tmp_path / "step-00000001"
    for name in ("NOTES.txt", ".metadata", "__0_0.distcp", "model-00001-of-00002.safetensors"):
        (path / name).write_text(name)
    (path / "eval").mkdir()
    (path / "eval" / "results.json").write_text("{}")
    with caplog.at_level(logging.WARNING, "fastckpt"):
        fill(tmp_path, [2, 3], keep=1, **options)
    assert fastckpt.Manager(tmp_path).steps() == [3]
    left = tmp_path / "step-00000001.foreign"
    names = [".metadata", "NOTES.txt", "__0_0.distcp", "eval", "model-00001-of-00002.safetensors"]
    assert sorted(each.name for each in left.iterdir()) == names
    assert (left / "eval" / "results.json").read_text() == "{}"
    (told,) = [record.message for record in caplog.records if "did not write" in record.message]
    assert f"(now in {left}: {', '.join(names)})" in told
    assert not list(tmp_path.glob("step-00000002*"))
    # A later checkpoint of the step does not replace the files there.
    fill(tmp_path, [1], **options)
    (path / "NOTES.txt").write_text("more")
    fill(tmp_path, [2], keep=1)
    assert (left / "NOTES.txt").read_text() == "NOTES.txt"
    assert (tmp_path / "step-00000001.foreign+" / "NOTES.txt").read_text() == "more"


def test_what_others_put_among_the_training_groups_files_stays(tmp_path):
    """Mutants: everything in the directory counts as written by fastckpt; the directory keeps the checkpoint's name."""
    full = {"model": {"w": np.ones(9)}, "optimizer": {"m": np.ones(9)}}
    with fastckpt.Manager(tmp_path, keep=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, full)
            manager.wait()
            if step == 1:
                (tmp_path / "step-00000001" / "training" / "notes.txt").write_text("mine")
    assert manager.steps() == [3]
    left = tmp_path / "step-00000001.foreign"
    assert [str(each.relative_to(left)) for each in left.rglob("*") if each.is_file()] == ["training/notes.txt"]


def test_the_best_and_the_pinned_stay(tmp_path):
    with fastckpt.Manager(tmp_path, keep=[keep.Last(1), keep.Best(1, "loss")]) as manager:
        for step in range(1, 8):
            manager.save(step, state(step), {"loss": abs(step - 3)})
            manager.wait()
            if step == 5:
                manager.pin(5)
        assert manager.steps() == [3, 5, 7]
        assert manager.best() == manager.best("loss") == 3
        assert manager.best("loss", "max") == 7
        assert pinned(manager) == [5]
        manager.unpin(5)
        manager.save(8, state(8))
    assert manager.steps() == [3, 8]
    assert not list(tmp_path.glob("*.pin"))
    with pytest.raises(FileNotFoundError, match="pin: there is no such checkpoint"):
        manager.pin(99)


def test_what_another_process_pins_while_others_are_removed_stays(tmp_path):
    fill(tmp_path, [1, 2])

    def pinning(remove):
        def pin(path, **options):
            remove(path, **options)
            (tmp_path / "step-00000002.pin").touch()

        return pin

    with points.replaced(points.REMOVE, pinning), fastckpt.Manager(tmp_path, keep=1) as manager:
        manager.save(3, state(3))
        manager.wait()
        assert manager.steps() == [2, 3]
        assert pinned(manager) == [2]


def test_a_pin_waits_for_a_removal_that_has_begun(tmp_path):
    fill(tmp_path, [1])
    refused = []

    def pin():
        with pytest.raises(FileNotFoundError, match="no such checkpoint"):
            manager.pin(1)
        refused.append(1)

    def while_pinning(remove):
        def removes(path, **options):
            assert manager._local._removing.locked()
            pinning.start()
            remove(path, **options)

        return removes

    pinning = threading.Thread(target=pin)
    with points.replaced(points.REMOVE, while_pinning), fastckpt.Manager(tmp_path, keep=1) as manager:
        manager.save(2, state(2))
    pinning.join(60)
    assert refused == [1]
    assert not list(tmp_path.glob("*.pin"))


def test_a_pin_of_what_another_process_removes_meanwhile_is_refused(tmp_path, monkeypatch):
    manager = fill(tmp_path, [1, 2])
    pin = manager._local.place.pin

    def late(step):
        fastckpt.remove(manager.path(step))
        pin(step)

    monkeypatch.setattr(manager._local.place, "pin", late)
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        manager.pin(1)
    assert not list(tmp_path.glob("*.pin"))


def test_a_reader_knows_what_is_kept_and_why(tmp_path):
    fill(tmp_path, [1, 2, 3, 4, 5], keep=[keep.Last(2), keep.Best(1, "loss")])
    reader = fastckpt.Manager(tmp_path, read_only=True)
    assert [str(policy) for policy in reader.policies] == ["last=2", "best=1:loss:min"]
    assert [(one.step, one.metrics) for one in reader.checkpoints()] == [
        (3, {"loss": 0}),
        (4, {"loss": 1}),
        (5, {"loss": 2}),
    ]
    assert kept(reader) == {3: ["best=1:loss:min"], 4: ["last=2"], 5: ["last=2"]}
    assert reader.best() == 3
    assert kept(fastckpt.Manager(tmp_path, keep=1, read_only=True)) == {3: [], 4: [], 5: ["last=1"]}
    cache = tmp_path / CACHE
    cache.write_text(cache.read_text().replace("last=2", "of=tomorrow"))
    with pytest.raises(ValueError, match="of=tomorrow"):
        kept(fastckpt.Manager(tmp_path, read_only=True))


def test_the_best_is_known_without_the_cache_and_with_a_damaged_one(tmp_path):
    fill(tmp_path, range(1, 6), keep=keep.Last(9))
    cache = tmp_path / CACHE
    whole = json.loads(cache.read_text())
    assert len(whole["checkpoints"]) == 5
    for content in (None, b"", b"{", b"[]", b'{"version": 1, "keep": 3, "checkpoints": {"step-00000001": 7}}'):
        cache.unlink(missing_ok=True)
        if content is not None:
            cache.write_bytes(content)
        assert fastckpt.Manager(tmp_path, read_only=True).best("loss") == 3
        assert (cache.read_bytes() if cache.exists() else None) == content
        assert fastckpt.Manager(tmp_path, keep=9).best("loss") == 3
        again = json.loads(cache.read_text())["checkpoints"]
        # The manager measures the beginning of the save, and later reads it from the manifest.
        assert all(entry.pop(3) == pytest.approx(whole["checkpoints"][name][3], abs=5) for name, entry in again.items())
        assert again == {name: [*entry[:3], *entry[4:]] for name, entry in whole["checkpoints"].items()}


def test_an_entry_of_the_cache_counts_for_the_same_directory_only(tmp_path):
    fill(tmp_path, [1, 2, 3])
    fastckpt.save(state(1), tmp_path / "step-00000001", metadata={"step": 1, "metrics": {"loss": -5.0}})
    assert fastckpt.Manager(tmp_path).best("loss") == 1


def test_a_read_only_manager_writes_nothing(tmp_path):
    fill(tmp_path, [1, 2], keep=9)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir())
    manager = fastckpt.Manager(tmp_path, keep=1, read_only=True)
    assert (manager.best("loss"), manager.latest(), manager.restore().step) == (2, 2, 2)
    assert not manager.should_save(3)
    for call in (lambda: manager.save(3, state(3)), lambda: manager.pin(1), lambda: manager.unpin(1)):
        with pytest.raises(RuntimeError, match="the manager is read-only"):
            call()
    with pytest.raises(RuntimeError, match="the manager is read-only"):
        manager.save_on_signal()
    assert sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir()) == before
    assert fastckpt.Manager(tmp_path / "nothing", read_only=True).latest() is None
    assert not (tmp_path / "nothing").exists()


def test_a_step_is_saved_once_unless_forced(tmp_path):
    with fastckpt.Manager(tmp_path, save_when=when.Steps(1)) as manager:
        assert manager.save(1, state(1))
        assert not manager.save(1, state(2))
        assert not manager.save(2, state(2))
        assert manager.save(1, state(7), force=True)
        assert manager.save(2, state(2), force=True)
    assert fastckpt.load(manager.path(1))["step"] == 7
    assert manager.steps() == [1, 2]


def test_several_managers_in_one_directory_leave_the_newest(tmp_path):
    with fastckpt.Manager(tmp_path, keep=1) as one, fastckpt.Manager(tmp_path, keep=2) as other:
        for step in range(1, 9):
            (one if step % 2 else other).save(step, state(step))
            (one if step % 2 else other).wait()
            assert other.latest() == step
    # The other manager keeps two checkpoints, and removes nothing newer than its own.
    assert other.steps() == [7, 8]


def test_metadata_and_metrics_lie_in_the_checkpoint(tmp_path):
    with fastckpt.Manager(tmp_path) as manager:
        manager.save(1, state(1), {"loss": np.float32(0.5)}, metadata={"git": "abc"})
        with pytest.raises(TypeError, match="'loss' must be a number"):
            manager.save(2, state(2), {"loss": "low"})
        with pytest.raises(ValueError, match="metrics and step are names"):
            manager.save(2, state(2), metadata={"step": 2, "metrics": 1})
    with fastckpt.open(manager.path(1)) as checkpoint:
        metadata = checkpoint.metadata
    assert metadata.pop("lineage").keys() == {"order", "continues", "forks", "files", "changed", "changed_of"}
    assert metadata == {"git": "abc", "step": 1, "metrics": {"loss": 0.5}}
    found = manager.restore()
    assert (found.metadata, found.metrics) == ({"git": "abc"}, {"loss": 0.5})


@pytest.mark.parametrize("step", [-1, 1.5, True, "1", None])
def test_a_step_is_a_whole_number(tmp_path, step):
    with pytest.raises(ValueError, match="step must be a non-negative integer"):
        fastckpt.Manager(tmp_path).save(step, {})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": "last=3"}, "keep: 'last=3' is not a policy"),
        ({"keep": [keep.Last]}, "is not a policy"),
        ({"keep": 0}, "count must be an integer of at least 1"),
        ({"save_when": "often"}, "save_when: 'often' is not a policy"),
        ({"save_when": [when.First]}, "is not a policy"),
        ({"save_when": 0}, "steps must be an integer of at least 1"),
        ({"save_options": {"overwrite": False}}, "save_options= has no overwrite: known are"),
        ({"save_options": {"threads": 1}}, r"save_options= has no threads: it is an option of io=fastckpt\.IO\("),
        ({"save_options": {"frozen": "model.*"}}, r"has no frozen: it is an option of files=fastckpt\.Files\("),
        ({"save_options": {"io": "fast"}}, "save_options: io must be"),
        ({"save_options": {"files": ["config.json"]}}, "save_options: files must be"),
        ({"save_options": {"base": "s3://bucket/step"}}, "save_options: base"),
        ({"name": "step"}, "must contain {step} exactly once"),
        ({"name": "{step}-{step}"}, "must contain {step} exactly once"),
        ({"name": "{step:x}"}, "decimal digits"),
        ({"name": "v2{step}"}, "a digit beside"),
        ({"name": "a/{step}"}, "must give a plain name"),
        ({"name": ".{step}"}, "must give a plain name"),
        ({"name": "{step"}, "must be a format"),
    ],
)
def test_arguments_out_of_range(tmp_path, options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        fastckpt.Manager(tmp_path, **options)


def test_other_names(tmp_path):
    fill(tmp_path, [5], name="gpt.{step}.ckpt")
    assert [path.name for path in tmp_path.glob("gpt*")] == ["gpt.5.ckpt"]
    assert fastckpt.Manager(tmp_path, name="gpt.{step}.ckpt").steps() == [5]
    # A directory with a name that the format does not make is not a checkpoint of the run.
    (tmp_path / "gpt.05.ckpt").mkdir()
    (tmp_path / "gpt.6.ckpt").write_text("a file")
    (tmp_path / "gpt.7.ckpt").symlink_to("gpt.5.ckpt")
    assert fastckpt.Manager(tmp_path, name="gpt.{step}.ckpt").steps() == [5]
    assert fastckpt.Manager(tmp_path).steps() == []


def test_ten_thousand_checkpoints_are_listed_without_opening_them():
    """``steps`` opens no checkpoint, and ``latest`` opens only unknown ones; both are compared with a plain listing."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        compare_listings(Path(directory))


def compare_listings(tmp_path):
    for step in range(9_999):
        (tmp_path / f"step-{step:08d}").mkdir()
    fastckpt.save(state(9_999), tmp_path / "step-00009999")
    manager = fastckpt.Manager(tmp_path, read_only=True)
    assert manager.latest() == 9999
    assert manager.steps() == list(range(10_000))

    def cpu(function):
        took = []
        for _ in range(7):
            began = time.process_time()
            function()
            took.append(time.process_time() - began)
        return min(took)

    plain = cpu(lambda: [(path.name, path.is_dir()) for path in tmp_path.iterdir()])
    assert cpu(manager.steps) < plain, plain
    # Each checkpoint needs two calls of stat, and one checkpoint is opened.
    assert cpu(manager.latest) < 6 * plain, plain


def test_what_a_killed_process_left_of_a_file_is_swept(tmp_path, monkeypatch):
    fill(tmp_path, [1])

    def die(*_):
        raise SystemExit

    # The process was killed before it could rename the file.
    directory = fastckpt.Manager(tmp_path)._local.place
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", die)
        patched.setattr(Path, "unlink", die)
        for name in (CACHE, "latest"):
            with pytest.raises(SystemExit):
                directory.replace(name, b"", durable=True)
    left = list(tmp_path.glob(".*.new"))
    assert len(left) == 2
    fastckpt.Manager(tmp_path, read_only=True)
    assert all(file.exists() for file in left)
    fastckpt.Manager(tmp_path)
    assert not any(file.exists() for file in left)


def test_a_file_that_is_swept_while_it_is_written_is_written_again(tmp_path, monkeypatch):
    manager = fill(tmp_path, [1])
    sync, swept = os.fsync, []

    def another_manager_starts(descriptor):
        sync(descriptor)
        if len(swept) < 3:
            swept.extend(tmp_path.glob(".*.new"))
            fastckpt.Manager(tmp_path)

    monkeypatch.setattr(os, "fsync", another_manager_starts)
    manager._local.place.replace("latest", b"step-00000007\n", durable=True)
    assert len(swept) == 3
    assert (tmp_path / "latest").read_text() == "step-00000007\n"
    assert not list(tmp_path.glob(".*.new"))
    # No endless loop follows if the file cannot be renamed.
    (tmp_path / "latest").unlink()
    monkeypatch.setattr(os, "fsync", lambda _: [path.unlink() for path in tmp_path.glob(".*.new")])
    with pytest.raises(FileNotFoundError):
        manager._local.place.replace("latest", b"", durable=True)


def test_a_hint_that_cannot_be_written_does_not_fail_the_save(tmp_path, caplog):
    (tmp_path / "latest").mkdir()
    with caplog.at_level(logging.WARNING, "fastckpt"):
        fill(tmp_path, [1])
    assert fastckpt.Manager(tmp_path).latest() == 1
    assert any("the file latest is not written" in record.message for record in caplog.records)
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".new"]


def test_the_hint_goes_forward_only(tmp_path):
    manager = fill(tmp_path, [1, 2])
    report = fastckpt.save(state(1), manager.path(1))
    about = {"step": 1, "metrics": {}}
    manager._after_save.note(about, time.monotonic(), report, 0.1)
    assert (tmp_path / "latest").read_text() == "step-00000001\n"
    manager._after_save.note({**about, "step": 2}, 0.0, report, 0.1)
    assert (tmp_path / "latest").read_text() == "step-00000001\n"


def test_a_policy_that_raises_removes_nothing(tmp_path, caplog):
    class Broken:
        def kept(self, *_):
            raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, "fastckpt"):
        fill(tmp_path, [1, 2], keep=[keep.Last(1), Broken()])
    assert fastckpt.Manager(tmp_path).steps() == [1, 2]
    assert any("a policy raised" in record.message for record in caplog.records)


def test_an_error_in_the_block_is_not_hidden_by_a_failed_save(tmp_path):

    def program():
        with fastckpt.Manager(tmp_path) as manager:
            manager.save(1, state(1))
            raise KeyError("the program's own")

    with broken_writing(), pytest.raises(KeyError):
        program()
    fastckpt.background.drain(60)  # raises errors that nothing raised yet


def test_wait_ends_after_a_save_whose_call_was_interrupted_behind_its_begin(tmp_path):
    manager = fastckpt.Manager(tmp_path / "run")
    interrupted = mock.patch.object(fastckpt.types.PendingSave, "add_done_callback", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        manager.save(1, {"w": np.zeros(1000)})
    assert manager.wait(20) is not None
    assert manager.steps() == [1]


def test_wait_gives_up_and_the_save_goes_on(tmp_path):
    with fastckpt.Manager(tmp_path, save_options={"io": fastckpt.IO(bandwidth_limit="1MB")}) as manager:
        manager.save(1, {"a": np.zeros(200_000)})
        with pytest.raises(TimeoutError):
            manager.wait(0.01)
    assert manager.steps() == [1]


def test_no_warning_in_an_ordinary_run(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(tmp_path, range(1, 6), keep=2)
        assert fastckpt.Manager(tmp_path).restore().step == 5


def test_a_checkpoint_of_an_adapter_alone_does_not_pass_for_the_model(tmp_path):
    """Missing keys are an error; the model does not silently keep fresh weights."""
    torch = pytest.importorskip("torch")
    model = torch.nn.ModuleDict({"base": torch.nn.Linear(4, 4), "adapter": torch.nn.Linear(4, 2)})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with fastckpt.Manager(tmp_path / "run") as manager:
        manager.save(1, {"model": {name: tensor + 1 for name, tensor in before.items() if "adapter" in name}})
        manager.wait()
        with pytest.raises(fastckpt.StructureMismatchError, match=r"base\.weight.*not in the checkpoint"):
            manager.restore(into={"model": model})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
