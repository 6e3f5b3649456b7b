"""What saves of lost machines left in the directory of a run: told, and removed once it has stood still."""

from __future__ import annotations

import os

import numpy as np
import pytest

import fastckpt
from fastckpt._manager.directory import Directory, Names
from fastckpt._manager.leftovers import UNCHANGED, Leftovers

STATE = {"w": np.arange(1000.0)}
#: Of a machine that nothing here can ask.
ELSEWHERE = "node7-0000000000000001-1-1-1"


def leave(run, name="step-00000001", kind="tmp", digits="0123abcd"):
    """A workspace of another machine, half written."""
    path = run / f".{name}.{kind}-{ELSEWHERE}-{digits}"
    (path / "training").mkdir(parents=True)
    (path / "fastckpt.json").touch()
    for file in ("model.safetensors", "training/training.safetensors"):
        (path / file).write_bytes(bytes(1 << 20))
    return path


class Clock:
    now = 7.0

    def __call__(self):
        return self.now


@pytest.fixture
def watched(tmp_path):
    """A run, what watches its leftovers, and the clock that it goes by."""
    clock = Clock()
    return tmp_path, Leftovers(Directory(str(tmp_path), Names("step-{step:08d}")), clock), clock


def test_a_start_tells_what_nobody_may_remove(tmp_path, caplog):
    """Mutants: silent; those of other names, too; by a read-only manager, too."""
    leave(tmp_path)
    leave(tmp_path, "step-00000002", digits="11111111")
    leave(tmp_path, "somebodys", digits="22222222")
    fastckpt.Manager(tmp_path, read_only=True)
    assert not caplog.records
    manager = fastckpt.Manager(tmp_path, async_save=False)
    (record,) = caplog.records
    for word in ("2 leftovers", "node7", "4.19 MB", "10 minutes"):
        assert word in record.getMessage()
    manager.save(3, STATE)
    assert record.getMessage() in manager.wait().warnings
    manager.save(4, STATE)
    assert record.getMessage() not in manager.wait().warnings
    assert len(fastckpt.leftovers(tmp_path)) == 3


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_removes_what_has_stood_still(tmp_path, async_save):
    path, other = leave(tmp_path), leave(tmp_path, "somebodys")
    with fastckpt.Manager(tmp_path, async_save=async_save) as manager:
        clock = manager._after_save.leftovers._clock = Clock()
        manager._after_save.leftovers.begin()
        manager.save(3, STATE)
        manager.wait()
        assert path.exists()
        # As seen by the manager: however old its files say that they are.
        clock.now += 1e6
        manager.save(4, STATE)
        manager.wait()
    assert path.exists() is False
    assert other.exists()


def test_what_changes_is_watched_anew(watched):
    """Mutants: only the directory is looked at, or only its names; the first look counts for ever."""
    run, leftovers, clock = watched
    path = leave(run)
    leftovers.begin()
    for file in ("model.safetensors", "training/training.safetensors"):
        clock.now += UNCHANGED - 1
        with (path / file).open("ab") as writing:
            writing.write(bytes(1 << 20))
        leftovers.clear()
        clock.now += 2
        leftovers.clear()
        assert path.exists()
    clock.now += UNCHANGED
    leftovers.clear()
    assert not path.exists()


def test_age_counts_for_nothing(watched):
    run, leftovers, clock = watched
    path = leave(run)
    for each in (path / "model.safetensors", path):
        os.utime(each, (1, 1))
    leftovers.begin()
    clock.now += UNCHANGED - 1
    leftovers.clear()
    assert path.exists()


def test_what_an_old_checkpoint_is_put_back_by_stays(watched):
    """Without its workspace nothing would say that the old one has to come back."""
    run, leftovers, clock = watched
    fastckpt.save(STATE, run / "step-00000001")
    path = leave(run)
    (run / "step-00000001").rename(run / f".step-00000001.old-{ELSEWHERE}-0123abcd00")
    leftovers.begin()
    clock.now += 2 * UNCHANGED
    leftovers.clear()
    assert path.exists()
    # As long as the one that was lost may live, it is read where it is.
    assert (fastckpt.load(run / "step-00000001")["w"] == STATE["w"]).all()


def test_one_that_has_come_later_is_not_taken_for_one_that_was_there(watched):
    run, leftovers, clock = watched
    first = leave(run)
    leftovers.begin()
    clock.now += UNCHANGED
    second = leave(run, "step-00000002")
    leftovers.clear()
    assert not first.exists()
    assert second.exists()
    leftovers.clear()
    assert second.exists()


def test_what_cannot_be_removed_is_told(watched, caplog, monkeypatch):
    run, leftovers, clock = watched
    leave(run)
    leftovers.begin()
    clock.now += UNCHANGED

    def refuse(*_, **__):
        raise PermissionError(13, "no")

    monkeypatch.setattr("fastckpt._manager.leftovers.remove_leftover", refuse)
    caplog.clear()
    leftovers.clear()
    assert "not removed" in caplog.text
