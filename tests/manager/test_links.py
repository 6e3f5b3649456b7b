"""A manager's saves link files that are unchanged since the previous checkpoint."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time

import numpy as np
import pytest

import fastckpt
from harness import points


def state(step):
    return {"model": {"frozen": np.arange(50_000), "head": np.full(100, step)}, "step": step}


def save(manager, step):
    assert manager.save(step, state(step))
    return manager.wait()


def check(manager, steps):
    assert manager.steps() == steps
    for step in steps:
        assert fastckpt.verify(manager.path(step)).ok
        found = fastckpt.load(manager.path(step))
        assert found["step"] == step
        assert (found["model"]["head"] == step).all()
        assert (found["model"]["frozen"] == np.arange(50_000)).all()


@pytest.mark.parametrize("async_save", [True, False])
def test_what_has_not_changed_is_linked(tmp_path, async_save):
    with fastckpt.Manager(tmp_path, keep=1, async_save=async_save) as manager:
        reports = [save(manager, step) for step in range(4)]
        assert [report.linked_files for report in reports] == [0, 0, 1, 1]
        assert reports[3].bytes == 800
        # The bases are removed, which does no harm.
        check(manager, [3])
    again = fastckpt.Manager(tmp_path, async_save=async_save)
    assert again.restore().step == 3
    assert save(again, 4).linked_files == 1, "the restored checkpoint is the base"
    assert again.save(4, state(4), force=True)
    assert again.wait().bytes == 0, "a checkpoint may be its own base"
    again.wait()
    check(again, [3, 4])


def test_saves_that_overlap_link_the_one_before(tmp_path):
    with fastckpt.Manager(tmp_path, keep=1, save_options={"io": fastckpt.IO(max_in_flight=3)}) as manager:
        for step in range(6):
            assert manager.save(step, state(step))
    check(manager, [5])
    assert manager.wait().linked_files == 1


def test_a_base_that_is_gone_or_damaged_costs_bytes_alone(tmp_path, caplog):
    manager = fastckpt.Manager(tmp_path, async_save=False)
    for step in range(3):
        save(manager, step)
    shutil.rmtree(manager.path(2))
    with caplog.at_level(logging.WARNING, "fastckpt"):
        report = save(manager, 3)
    assert report.linked_files == 0
    assert manager.path(2) in report.warnings[0]
    assert manager.path(2) in caplog.text
    save(manager, 4)
    for file in os.scandir(manager.path(4)):
        if file.name.endswith(".safetensors"):
            os.truncate(file, 100)
    report = save(manager, 5)
    assert report.linked_files == 0
    assert "it has 100 bytes" in report.warnings[0]
    assert save(manager, 6).linked_files == 1
    assert fastckpt.Manager(tmp_path).restore().step == 6


def test_after_a_save_that_failed_all_is_written(tmp_path, caplog):
    manager = fastckpt.Manager(tmp_path)
    for step in range(3):
        save(manager, step)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def late(call_back):
        # `wait` must not return before the manager has recorded the failure.
        return lambda pending: (time.sleep(0.2), call_back(pending))

    with points.replaced(points.TELL_OF_END, late):
        with points.replaced(points.WRITE_SNAPSHOT, lambda _: full), pytest.raises(OSError, match="No space left"):
            save(manager, 3)
        with caplog.at_level(logging.WARNING, "fastckpt"):
            report = save(manager, 4)
    assert (report.linked_files, report.warnings) == (0, ())
    assert "base" not in caplog.text
    check(manager, [0, 1, 2, 4])


def test_nothing_is_linked_where_that_is_not_wanted(tmp_path):
    manager = fastckpt.Manager(tmp_path, save_options={"base": None})
    assert [save(manager, step).linked_files for step in range(4)] == [0] * 4
    check(manager, [0, 1, 2, 3])
