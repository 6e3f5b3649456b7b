"""Checksums made by operations of torch are those of the core, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import _core
from fastckpt._tensors import device_sums

MIB = 1 << 20
#: Those around a row of bytes, and around 32 rows, 32 times 32, and so on.
EDGES = [1, 2, 8, 255, 256, 257, 511, 8191, 8192, 8193, 8192 * 32 - 1, 8192 * 32, 8192 * 32 + 1]


@pytest.fixture
def core_sums(tmp_path):
    """The checksums that the core writes into manifests."""

    def sums(chunks):
        fastckpt.save({f"{index:06}": chunk for index, chunk in enumerate(chunks)}, tmp_path / "c")
        reader = _core.Reader(str(tmp_path / "c"))
        return [reader.checksum(index) for index in range(len(chunks))]

    return sums


def summed(data, length):
    return device_sums.collect(device_sums.enqueue(torch, data, length), length)


@pytest.fixture(params=[torch.float32, torch.float16], ids=["single", "half"])
def number(request, monkeypatch):
    """What devices multiply in, half precision, is exact too; the processor can do it, slowly."""
    monkeypatch.setattr(device_sums, "_number", lambda *_: request.param)
    monkeypatch.setattr(device_sums, "_matrices", {})


@pytest.mark.usefixtures("number")
def test_lengths_and_alignments(core_sums):
    random = np.random.default_rng(16)
    lengths = [*EDGES, *(int(length) for length in random.integers(1, 300_000, 12))]
    chunks, found = [], []
    for length in lengths:
        count, skip = int(random.integers(1, 4)), int(random.integers(0, 64))
        data = random.integers(0, 256, skip + count * length, np.uint8)
        found += summed(torch.from_numpy(data)[skip:], length)
        chunks += [data[skip + number * length :][:length] for number in range(count)]
    assert found == core_sums(chunks)


@pytest.mark.usefixtures("number")
def test_bytes_that_are_all_alike(core_sums):
    """All bits set make the largest counts."""
    chunks = [np.full(length, value, np.uint8) for length in (256, 8192, MIB) for value in (0, 1, 128, 255)]
    assert [summed(torch.from_numpy(chunk), len(chunk))[0] for chunk in chunks] == core_sums(chunks)


def test_every_bit_counts(core_sums):
    """In each place of a row, alone."""
    rows = np.packbits(np.eye(2048, dtype=np.uint8), axis=1, bitorder="little")
    assert summed(torch.from_numpy(rows).view(-1), 256) == core_sums(list(rows))


def test_blocks_of_a_checkpoint_in_several_steps(core_sums, monkeypatch):
    """Four MiB, and more steps than one for a chunk, of which the last is shorter."""
    monkeypatch.setattr(device_sums, "STEP", 3 * MIB)
    data = np.random.default_rng(4).integers(0, 256, 8 * MIB, np.uint8)
    assert summed(torch.from_numpy(data), 4 * MIB) == core_sums(np.split(data, 2))


def test_the_callers_autocast_changes_nothing(core_sums):
    """It would multiply in bfloat16, which has no room for the counts."""
    data = np.random.default_rng(5).integers(0, 256, 8192, np.uint8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = summed(torch.from_numpy(data), 8192)
    assert found == core_sums([data])
