"""Checksums computed by torch's operations equal those of the core."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import _core
from fastckpt._tensors import device_sums

MIB = 1 << 20
#: Lengths around the size of a row of bytes, of 32 rows, and of 32 times 32 rows.
EDGES = [1, 2, 8, 255, 256, 257, 511, 8191, 8192, 8193, 8192 * 32 - 1, 8192 * 32, 8192 * 32 + 1]


@pytest.fixture
def core_sums(tmp_path):
    """The checksums that the core writes into manifests."""

    def sums(chunks):
        fastckpt.save({f"{index:06}": chunk for index, chunk in enumerate(chunks)}, tmp_path / "c")
        reader = _core.Reader(str(tmp_path / "c"))
        return [reader.checksum(index) for index in range(len(chunks))]

    return sums


def summed(data):
    return device_sums.of(torch, torch.from_numpy(data))


@pytest.fixture(params=[torch.float32, torch.float16], ids=["single", "half"])
def number(request, monkeypatch):
    """The dtype of the sums: half precision, which devices use, is exact, too; the CPU supports it slowly."""
    monkeypatch.setattr(device_sums, "_number", lambda *_: request.param)
    monkeypatch.setattr(device_sums, "_matrices", {})


@pytest.mark.usefixtures("number")
def test_lengths_and_alignments(core_sums):
    random = np.random.default_rng(16)
    lengths = [*EDGES, *(int(length) for length in random.integers(1, 300_000, 12))]
    chunks, found = [], []
    for length in lengths:
        data = random.integers(0, 256, length + 64, np.uint8)[int(random.integers(0, 64)) :][:length]
        found.append(summed(data))
        chunks.append(data)
    assert found == core_sums(chunks)


@pytest.mark.usefixtures("number")
def test_bytes_that_are_all_alike(core_sums):
    """With all bits set, the counts are largest."""
    chunks = [np.full(length, value, np.uint8) for length in (256, 8192, MIB) for value in (0, 1, 128, 255)]
    assert [summed(chunk) for chunk in chunks] == core_sums(chunks)


def test_every_bit_counts(core_sums):
    """Rows with a single bit, in each place of a row, have the right sums."""
    rows = np.packbits(np.eye(2048, dtype=np.uint8), axis=1, bitorder="little")
    assert [summed(row) for row in rows] == core_sums(list(rows))


def test_several_stretches_in_several_steps(core_sums, monkeypatch):
    """The last stretch and the last step are shorter than the others."""
    monkeypatch.setattr(device_sums, "STEP", MIB)
    monkeypatch.setattr(device_sums, "_STRETCH", 3 * MIB)
    data = np.random.default_rng(4).integers(0, 256, 8 * MIB + 5, np.uint8)
    assert [summed(data)] == core_sums([data])


def test_the_callers_autocast_changes_nothing(core_sums):
    """Autocast would multiply in bfloat16, which cannot represent the counts."""
    data = np.random.default_rng(5).integers(0, 256, 8192, np.uint8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = summed(data)
    assert [found] == core_sums([data])
