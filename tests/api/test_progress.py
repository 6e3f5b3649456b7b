"""The lines that a long operation writes to the training log while it runs."""

from __future__ import annotations

import logging

import numpy as np

import fastckpt
from harness import limits


def lines(caplog):
    return [record.getMessage() for record in caplog.records if " GB/s, " in record.getMessage()]


def test_long_operations_log_their_progress(tmp_path, monkeypatch, caplog):
    limits.lower(monkeypatch, "seconds between lines of progress", 0.2)
    caplog.set_level(logging.INFO, "fastckpt")
    report = fastckpt.save({"a": np.zeros(60_000_000, np.uint8)}, tmp_path / "c", io=fastckpt.IO(bandwidth_limit=40e6))
    found = lines(caplog)
    assert report.seconds > 1.2
    assert 2 <= len(found) <= report.seconds / 0.2
    assert all(line.startswith("save: ") and line.endswith(str(tmp_path / "c")) for line in found)
    assert "60.00 MB" in found[0]
    assert "s left" in found[-1]
    assert caplog.records[-1].getMessage().startswith("saved 60.00 MB")


def test_short_operations_log_their_report_alone(tmp_path, caplog):
    caplog.set_level(logging.INFO, "fastckpt")
    fastckpt.save({"a": np.zeros(10)}, tmp_path / "c")
    fastckpt.load(tmp_path / "c")
    assert lines(caplog) == []
    assert [record.getMessage().split()[0] for record in caplog.records] == ["saved", "loaded"]
