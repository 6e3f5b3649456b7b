"""``load(io=IO(mmap=True))``: tensors are verified pages of the files, not copies."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import CorruptCheckpointError
from harness import limits, needs
from harness.reports import with_report
from harness.same import same

MIB = 1 << 20


def state(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w": torch.from_numpy(rng.integers(0, 256, 3 * MIB, np.uint8)).view(torch.bfloat16),
        "tied": {},
        "n": rng.standard_normal((100, 7)),
        "words": np.array(["some", "words"]),
        "blob": rng.bytes(5000),
        "array": bytearray(rng.bytes(11)),
        "empty": torch.empty(0, 3),
        "step": 7,
    }


@pytest.fixture
def saved(tmp_path):
    first = state()
    first["tied"] = first["w"]
    fastckpt.save(first, tmp_path / "c")
    return tmp_path / "c", first


def mappings(path):
    """The address ranges at which this process maps files inside ``path``, including deleted ones."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    found = [line.split() for line in lines if f"{path}{os.sep}" in line]
    return [tuple(int(end, 16) for end in words[0].split("-")) for words in found]


def lies_in(path, address):
    return any(first <= address < end for first, end in mappings(path))


def last_report(caplog):
    return caplog.records[-1].args[0]


def test_tensors_and_arrays_are_pages_of_the_file_and_stay_after_the_load(saved, caplog):
    path, wanted = saved
    caplog.set_level("INFO", "fastckpt")
    loaded = fastckpt.load(path, io=fastckpt.IO(mmap=True))
    assert same(loaded, wanted)
    assert loaded["tied"] is loaded["w"]
    assert lies_in(path, loaded["w"].data_ptr())
    assert lies_in(path, loaded["n"].ctypes.data)
    report = last_report(caplog)
    assert (set(report.paths), report.copied, report.engine) == ({"buffered: mapped"}, 0, "buffered")
    assert report.bytes == sum(info.bytes for info in map(fastckpt.open(path).info, fastckpt.open(path)))
    # A single tensor keeps its shard mapped, until the last tensor of the shard is freed.
    kept = loaded["n"][3]
    del loaded
    gc.collect()
    assert mappings(path)
    assert np.array_equal(kept, wanted["n"][3])
    del kept
    gc.collect()
    assert not mappings(path)


def test_writes_stay_in_memory(saved):
    path, wanted = saved
    loaded = fastckpt.load(path, io=fastckpt.IO(mmap=True))
    loaded["w"].fill_(1)
    loaded["n"] += 1
    loaded["array"][0] ^= 1
    assert fastckpt.verify(path).ok
    assert same(fastckpt.load(path, io=fastckpt.IO(mmap=True)), wanted)
    assert same(fastckpt.load(path), wanted)


def test_a_checkpoint_that_is_replaced_stays_what_it_was(saved):
    path, wanted = saved
    loaded = fastckpt.load(path, io=fastckpt.IO(mmap=True, verify=False))
    fastckpt.save(state(seed=1), path)
    assert same(loaded, wanted)
    # Mapped tensors can be saved over their own files.
    fastckpt.save(loaded, path)
    assert same(fastckpt.load(path), wanted)
    assert same(loaded, wanted)


def test_every_byte_is_checked_unless_that_is_refused(saved):
    path, _ = saved
    shard = path / "model.safetensors"
    whole = shard.read_bytes()
    info = fastckpt.open(path).info("n")
    for place in (len(whole) - 1, len(whole) // 2, 20):
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors`: (bytes \d+ to \d+|header)"):
            fastckpt.load(path, io=fastckpt.IO(mmap=True))
        assert tuple(fastckpt.load(path, io=fastckpt.IO(mmap=True, verify=False))["n"].shape) == info.shape
    shard.write_bytes(whole[:-4096])
    for verify in (True, False):
        with pytest.raises(CorruptCheckpointError, match="bytes, expected"):
            fastckpt.load(path, io=fastckpt.IO(mmap=True, verify=verify))


def test_without_a_check_nothing_is_read_until_it_is_touched(tmp_path, caplog):
    wanted = {"w": np.random.default_rng(0).integers(0, 256, 64 * MIB, np.uint8)}
    fastckpt.save(wanted, tmp_path / "c")
    with (tmp_path / "c" / "model.safetensors").open("rb") as shard:
        os.posix_fadvise(shard.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    caplog.set_level("INFO", "fastckpt")

    def read():
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

    before = read()
    loaded = fastckpt.load(tmp_path / "c", io=fastckpt.IO(mmap=True, verify=False))
    assert read() - before < 4 * MIB
    assert (last_report(caplog).bytes, last_report(caplog).paths) == (0, {})
    assert same(loaded, wanted)
    if read() == before:
        needs.missing("a temporary directory on a disk")
    assert read() - before >= 64 * MIB


def test_only_the_shards_of_what_is_wanted_are_mapped(tmp_path):
    wanted = {f"w{i}": np.full(MIB, i, np.uint8) for i in range(4)}
    fastckpt.save(wanted, tmp_path / "c", files=fastckpt.Files(shard_size=MIB))
    loaded = fastckpt.load(tmp_path / "c", keys="w2", io=fastckpt.IO(mmap=True))
    assert same(loaded, {"w2": wanted["w2"]})
    (first, end), *more = mappings(tmp_path / "c")
    assert not more
    assert MIB < end - first < 2 * MIB


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_frameworks(saved, framework):
    path, wanted = saved
    keys = ["n"] if framework == "torch" else ["n", "blob"]
    loaded = fastckpt.load(path, io=fastckpt.IO(mmap=True), framework=framework, keys=keys)
    assert np.array_equal(np.asarray(loaded["n"]), wanted["n"])
    assert isinstance(loaded["n"], torch.Tensor if framework == "torch" else np.ndarray)


def test_what_does_not_go_with_it_is_refused(saved):
    path, wanted = saved
    for options in ({"dtype": "float32"}, {"dtype": {"w": "float32"}, "into": wanted}):
        with pytest.raises(
            ValueError,
            match=r"load: IO\(mmap=True\) maps the stored bytes unchanged and cannot be combined with dtype=",
        ):
            fastckpt.load(path, io=fastckpt.IO(mmap=True), **options)
    with pytest.raises(ValueError, match=r"load: device.*there is no device cuda:77 here"):
        fastckpt.load(path, io=fastckpt.IO(mmap=True), device="cuda:77")
    for io in ("uring", "threads", "direct"):
        with pytest.raises(ValueError, match=rf"load: IO\(mmap=True\) reads through the page cache.*'{io}'"):
            fastckpt.load(path, io=fastckpt.IO(io, mmap=True))
    assert same(fastckpt.load(path, io=fastckpt.IO("buffered", mmap=True)), wanted)


def blank():
    """Memory for the state of these tests: some of it strided, some with its signs flipped."""
    return {
        "w": torch.zeros(3 * MIB // 2, 2, dtype=torch.bfloat16)[:, 0],
        "tied": None,
        "n": np.zeros((7, 100)).T,
        "words": np.array(["", ""], "<U5"),
        "blob": b"",
        "array": bytearray(),
        "empty": torch.empty(0, 3),
        "step": 0,
    }


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("step", [1 << 12, (1 << 16) + 1, 16 << 20])
def test_tensors_that_exist_are_filled_from_the_pages(saved, monkeypatch, threads, step):
    path, wanted = saved
    limits.lower(monkeypatch, "read from pages at a time", step)
    into = blank()
    into["tied"] = into["w"]
    held = [into["w"], into["n"], into["words"]]
    loaded, report = with_report(fastckpt.load, path, into=into, mmap=True, threads=threads)
    assert same(loaded, wanted)
    assert all(one is other for one, other in zip(held, (loaded["w"], loaded["n"], loaded["words"]), strict=True))
    sizes = [wanted[name].nbytes for name in ("w", "n", "words")]
    assert report.copied == sum(sizes)
    assert report.bytes == sum(sizes) + 5000
    assert report.phases["read"] <= report.seconds
    # Without the loaded state, nothing needs the mappings.
    del loaded
    gc.collect()
    assert not mappings(path)


def test_when_the_interpreter_ends(saved):
    """Thread pools accept no more work while the interpreter exits."""
    code = """if True:
        import atexit, sys, numpy, fastckpt

        def end():
            into = {"n": numpy.zeros((100, 7))}
            fastckpt.load(sys.argv[1], into=into, keys="n", io=fastckpt.IO(mmap=True))
            print(into["n"].tobytes().hex())

        atexit.register(end)
    """
    path, wanted = saved
    ran = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == wanted["n"].tobytes().hex()


def test_signs_are_flipped_in_a_copy(tmp_path):
    """The pages themselves stay unchanged: another tensor may be made from them."""
    wanted = torch.randn(3000, dtype=torch.complex64)
    fastckpt.save({"w": wanted}, tmp_path / "c")
    into = {"w": torch.zeros(3000, dtype=torch.complex64).conj()}
    fastckpt.load(tmp_path / "c", into=into, io=fastckpt.IO(mmap=True))
    assert same(into["w"].resolve_conj(), wanted)


def test_a_damaged_checkpoint_changes_nothing(saved):
    path, wanted = saved
    shard = path / "model.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    into = blank()
    into["tied"] = into["w"]
    with pytest.raises(CorruptCheckpointError):
        fastckpt.load(path, into=into, io=fastckpt.IO(mmap=True))
    assert not into["w"].any()
    assert not into["n"].any()
    loaded = fastckpt.load(path, into=into, io=fastckpt.IO(mmap=True, verify=False))
    assert same(loaded["w"], wanted["w"])


def test_what_into_lacks_is_neither_checked_nor_copied(saved):
    path, wanted = saved
    shard = path / "model.safetensors"
    whole = shard.read_bytes()
    at = whole.index(wanted["n"].tobytes())
    shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    into = {"words": np.array(["", ""], "<U5")}
    with pytest.raises(CorruptCheckpointError):
        fastckpt.load(
            path, {**into, "n": np.zeros((100, 7))}, io=fastckpt.IO(mmap=True), strict=False, keys=["n", "words"]
        )
    _, report = with_report(fastckpt.load, path, into=into, mmap=True, strict=False)
    assert into["words"].tolist() == ["some", "words"]
    assert report.copied == into["words"].nbytes


def test_objects_in_into_are_filled_from_the_pages(tmp_path):
    """Parameters are filled in place; an optimizer that has not stepped gets new tensors, which are pages."""
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(300)).sum().backward()
    optimizer.step()
    fastckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    fresh = torch.nn.Linear(300, 300)
    other = torch.optim.Adam(fresh.parameters())
    weight = fresh.weight.data_ptr()
    fastckpt.load(tmp_path / "c", into={"model": fresh, "optimizer": other}, io=fastckpt.IO(mmap=True))
    assert fresh.weight.data_ptr() == weight
    assert same(fresh.state_dict(), model.state_dict())
    assert same(other.state_dict(), optimizer.state_dict())
