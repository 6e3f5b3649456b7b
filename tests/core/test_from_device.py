"""A verification reads the device, regardless of the page cache."""

import os
from pathlib import Path

import numpy as np
import pytest

import fastckpt

NBYTES = 24_000_000


def read_from_device():
    """Bytes that devices have read for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


@pytest.fixture
def cached(tmp_path):
    """A checkpoint that is entirely in the page cache, and its state."""
    state = {"a": np.arange(NBYTES // 8), "b": np.zeros(3)}
    fastckpt.save(state, tmp_path / "c")
    for file in (tmp_path / "c").iterdir():
        file.read_bytes()
    before = read_from_device()
    for file in (tmp_path / "c").iterdir():
        file.read_bytes()
    # If memory is short, reads of program code count, too.
    assert read_from_device() - before < NBYTES // 10
    return tmp_path / "c", state


@pytest.mark.parametrize("io", ["auto", "threads", "buffered"])
def test_verify(cached, io):
    path, _ = cached
    before = read_from_device()
    assert fastckpt.verify(path, io=io).ok
    assert read_from_device() - before >= NBYTES


@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_a_base_that_is_read_again(cached, io):
    path, state = cached
    for file in path.glob("*.safetensors"):
        os.utime(file)
    before = read_from_device()
    report = fastckpt.save(state, path.with_name("d"), base=path, io=io)
    assert report.linked_bytes >= NBYTES
    assert read_from_device() - before >= NBYTES


def test_a_load_reads_what_is_cached(cached):
    path, _ = cached
    before = read_from_device()
    fastckpt.load(path)
    assert read_from_device() - before < NBYTES // 10
