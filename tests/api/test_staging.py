"""``IO(threads=, staging=)``: an operation uses the requested values, or its error shows the needed memory."""

from __future__ import annotations

import numpy as np
import pytest

import fastckpt

MIB = 1 << 20


@pytest.fixture(params=["threads", "buffered", "uring"])
def many(request, monkeypatch):
    """An ``IO`` for blocks of 1 MiB, with more threads than the default staging memory suffices for."""
    monkeypatch.setenv("FASTCKPT_BLOCK_SIZE", str(MIB))
    return fastckpt.IO(request.param, threads=60)


def test_as_many_threads_run_as_were_asked_for(tmp_path, many):
    state = {"w": np.arange(64 * MIB // 8)}
    assert fastckpt.save(state, tmp_path / "c", io=many).threads == 60
    reports = []
    how = fastckpt.IO(many.engine, threads=60, on_report=reports.append)
    loaded = fastckpt.load(tmp_path / "c", io=how)
    assert np.array_equal(loaded["w"], state["w"])
    fastckpt.load(tmp_path / "c", {"w": np.empty_like(state["w"])}, io=how)  # zero-copy
    assert [report.threads for report in reports] == [60, 60]
    assert fastckpt.verify(tmp_path / "c", io=many).threads == 60


def test_too_little_memory_for_the_threads_is_refused(tmp_path, many):
    state = {"w": np.arange(64 * MIB // 8)}
    fastckpt.save(state, tmp_path / "c")
    little = fastckpt.IO(many.engine, threads=60, staging="64MiB")
    # Staging buffers are in huge pages, so a block takes at least one huge page.
    words = "60 threads need 125829120 bytes of staging memory, 2097152 each: staging=67108864 is too little"
    for call in (
        lambda: fastckpt.save(state, tmp_path / "d", io=little),
        lambda: fastckpt.load(tmp_path / "c", io=little),
        lambda: fastckpt.verify(tmp_path / "c", io=little),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert not (tmp_path / "d").exists()
    # Without a number of threads, the staging memory limits them.
    small = fastckpt.IO("threads", staging="8MiB")
    assert fastckpt.save(state, tmp_path / "d", io=small).threads == 4
    assert fastckpt.save(state, tmp_path / "d", io=fastckpt.IO("threads", staging="1GiB")).threads == 12
    assert fastckpt.verify(tmp_path / "d").ok
