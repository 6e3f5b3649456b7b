"""The figures of reports for loggers of scalars."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import fastckpt
from harness.reports import with_report

STATE = {"w": np.arange(1000.0), "v": np.ones(7)}
COMMON = {"seconds", "gigabytes_per_second", "bytes", "copied_bytes", "threads", "fallback"}
OF_SAVES = {"total_bytes", "sent_bytes", "received_bytes"}
OF_LOADS = {"storage_bytes", "peer_bytes", "sent_bytes"}


def figures(report):
    """The scalars by their names without a prefix."""
    before = f"checkpoint/{report.operation}_"
    found = report.scalars()
    assert all(name.startswith(before) for name in found)
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    return {name[len(before) :]: value for name, value in found.items()}


def test_a_save(tmp_path):
    report = fastckpt.save(STATE, tmp_path / "c", metadata={"step": 7})
    found = figures(report)
    phases = {"plan_seconds", "write_seconds", "fsync_seconds", "commit_seconds"}
    assert set(found) == COMMON | phases | {"stall_seconds", "staged_bytes", "step"} | OF_SAVES
    assert found["total_bytes"] == report.bytes
    assert found["seconds"] == found["stall_seconds"] == report.seconds
    assert found["bytes"] == report.bytes
    assert found["gigabytes_per_second"] == report.gigabytes_per_second
    assert found["write_seconds"] == report.phases["write"]
    assert found["step"] == report.step == 7


def test_an_asynchronous_save(tmp_path):
    report = fastckpt.save_async(STATE, tmp_path / "c", metadata={"step": 9}).result(60)
    found = figures(report)
    assert (found["stall_seconds"], found["staged_bytes"]) == (report.stall, report.staged)
    assert (found["stage_seconds"], found["wait_seconds"]) == (report.phases["stage"], report.phases["wait"])
    assert found["step"] == 9


@pytest.mark.parametrize("metadata", [None, {"step": "7"}, {"step": True}, {"step": -1}, "step 7"])
def test_a_save_without_a_step(tmp_path, metadata):
    report = fastckpt.save(STATE, tmp_path / "c", metadata=metadata)
    assert report.step is None
    assert "step" not in figures(report)


def test_a_load_and_a_verification(tmp_path):
    fastckpt.save(STATE, tmp_path / "c")
    into = {"w": np.zeros(1000), "more": np.zeros(2)}
    report = with_report(fastckpt.load, tmp_path / "c", into=into, strict=False).report
    found = figures(report)
    assert set(found) == COMMON | {"plan_seconds", "read_seconds", "missing", "unexpected"} | OF_LOADS
    assert (found["missing"], found["unexpected"]) == (1, 1)
    found = figures(fastckpt.verify(tmp_path / "c"))
    assert set(found) == COMMON | {"plan_seconds", "read_seconds", "damage"}
    assert found["damage"] == 0


def test_a_fallback_is_a_figure(tmp_path):
    report = fastckpt.save(STATE, tmp_path / "c", io="buffered")
    assert figures(report)["fallback"] == 0
    assert figures(dataclasses.replace(report, fallback="io_uring: EPERM"))["fallback"] == 1


def test_ranks(tmp_path):
    of_rank = {"rank": 1, "ranks": 2, "bytes_sent": 6}
    save = dataclasses.replace(fastckpt.save(STATE, tmp_path / "c"), **of_rank, bytes_total=5, bytes_received=7)
    found = figures(save)
    assert (found["total_bytes"], found["sent_bytes"], found["received_bytes"]) == (5, 6, 7)
    alone = with_report(fastckpt.load, tmp_path / "c").report
    load = dataclasses.replace(alone, **{**of_rank, "bytes_sent": 7}, bytes_storage=5, bytes_peers=6)
    found = figures(load)
    assert (found["storage_bytes"], found["peer_bytes"], found["sent_bytes"]) == (5, 6, 7)


def test_the_prefix(tmp_path):
    report = fastckpt.save(STATE, tmp_path / "c")
    assert report.scalars(prefix="")["save_bytes"] == report.scalars("a/b/")["a/b/save_bytes"] == report.bytes
