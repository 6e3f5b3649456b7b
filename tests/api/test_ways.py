"""The I/O paths of blocks, all of which give the same bytes.

Whether memory is in huge pages depends on the machine, so these tests set FASTCKPT_ZERO_COPY, except for one test of
the rule itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from harness import manifest, mounts, needs

MIB = 1 << 20
ENGINES = ["uring", "threads", "buffered"]


def memory(nbytes: int, residue: int) -> np.ndarray:
    """Random bytes at an address ``residue`` bytes after a page boundary."""
    whole = np.empty(nbytes + 8192, np.uint8)
    skip = (residue - whole.ctypes.data) % 4096
    part = whole[skip : skip + nbytes]
    part[:] = np.random.default_rng(nbytes + residue).integers(0, 256, nbytes, np.uint8)
    return part


def ragged() -> dict[str, np.ndarray]:
    """Large tensors, congruent and not, that begin and end within blocks and pages, among small ones."""
    return {
        "a": memory(9 * MIB, 64),
        "b": memory(4096, 64),
        "c": memory(5 * MIB + 4096, 64),
        "d": memory(3 * MIB, 16),
        "e": memory(6 * MIB + 12345, 64),
        **{f"s.{i}": memory(1000 + i, 8) for i in range(50)},
        "f": memory(MIB + 7, 100),
    }


def huge(nbytes: int) -> np.ndarray:
    """Memory in huge pages, if the kernel grants them, congruent with the start of data."""
    mapping = mmap.mmap(-1, nbytes + 4 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    skip = -start % (2 * MIB) + 64
    mapping.madvise(mmap.MADV_HUGEPAGE)
    part = np.frombuffer(mapping, np.uint8)[skip : skip + nbytes]
    part[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    return part


def same(left, right) -> bool:
    return list(left) == list(right) and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("zero_copy", ["0", "1"])
def test_every_way_brings_the_same_bytes(tmp_path, monkeypatch, zero_copy, engine):
    monkeypatch.setenv("FASTCKPT_ZERO_COPY", zero_copy)
    state = ragged()
    report = fastckpt.save(state, tmp_path / "c", io=engine)
    stored = manifest.read(tmp_path / "c")  # an independent reader
    assert all(stored[name].data == array.tobytes() for name, array in state.items())
    assert fastckpt.verify(tmp_path / "c").ok
    straight = report.blocks["zero-copy"]
    if engine == "buffered":
        assert set(report.paths) == {"buffered: as asked"}
    else:
        assert (straight > 0) == (zero_copy == "1"), report
    for reader in ENGINES:
        for residue in (64, 16, 3):
            into = {name: memory(array.nbytes, residue) for name, array in state.items()}
            assert same(fastckpt.load(tmp_path / "c", io=reader, into=into), state)
        assert same(fastckpt.load(tmp_path / "c", io=reader), state)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("beyond", [-1, 0, 1, 4095, 4096, 4097])
def test_files_end_anywhere(tmp_path, monkeypatch, beyond, engine):
    """A file may end at a block's end, within the page before or after it, or with a block shorter than a page."""
    block = 1 << 16
    monkeypatch.setenv("FASTCKPT_BLOCK_SIZE", str(block))
    array = memory(3 * block - 4160 + beyond, 64)  # after a header of one page and the residue
    report = fastckpt.save({"a": array}, tmp_path / "c", io=fastckpt.IO(engine, threads=1))
    (shard,) = (tmp_path / "c").glob("*.safetensors")
    assert shard.stat().st_size == 3 * block + beyond
    assert manifest.read(tmp_path / "c")["a"].data == array.tobytes()
    assert report.paths.get("buffered: less than a page", 0) == (engine != "buffered" and beyond in (1, 4095))
    assert np.array_equal(fastckpt.load(tmp_path / "c", io=engine)["a"], array)


def test_what_lies_right_is_not_copied(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCKPT_ZERO_COPY", "1")
    state = {"a": memory(32 * MIB, 64), "b": memory(32 * MIB, 64)}
    report = fastckpt.save(state, tmp_path / "c", io="threads")
    # Some pages at the edges of each tensor, and the header, are copied.
    assert report.copied < 64 * 1024, report
    assert set(report.paths) <= {"zero-copy", "staged: small tensors"}
    monkeypatch.setenv("FASTCKPT_ZERO_COPY", "0")
    assert fastckpt.save(state, tmp_path / "c", io="threads").copied >= 64 * MIB


def test_data_begins_at_the_residue_wherever_tensors_lie(tmp_path):
    for residue in (0, 16, 64):
        fastckpt.save({"a": memory(8 * MIB, residue), "b": memory(5000, residue)}, tmp_path / "c")
        assert manifest.read_manifest(tmp_path / "c")["shards"][0]["data_offset"] == 4096 + 64


def test_rule_writes_huge_pages_as_they_lie_and_small_ones_through_slabs(tmp_path, monkeypatch):
    monkeypatch.delenv("FASTCKPT_ZERO_COPY", raising=False)
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii"):
        needs.missing("needs huge pages (transparent_hugepage is set to never)")
    report = fastckpt.save({"w": huge(16 * MIB)}, tmp_path / "h", io="threads")
    assert report.paths["zero-copy"] >= 3, report
    # The mapping is set to have no huge pages, because the default differs between machines.
    mapping = mmap.mmap(-1, 17 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    small = np.frombuffer(mapping, np.uint8)[64 : 64 + 16 * MIB]
    small[:] = huge(16 * MIB)
    report = fastckpt.save({"w": small}, tmp_path / "s", io="threads")
    assert report.paths["staged: memory in small pages"] >= 3, report
    into = fastckpt.load(tmp_path / "s", io="threads", into={"w": small.copy()})
    assert np.array_equal(into["w"], small)


def test_hot_checkpoint_comes_from_the_page_cache_and_a_cold_one_does_not(tmp_path, caplog):
    needs.ring()
    state = {"w": memory(24 * MIB, 64)}
    fastckpt.save(state, tmp_path / "c")
    for file in (tmp_path / "c").iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    caplog.set_level("INFO", "fastckpt")

    def ways(**options):
        caplog.clear()
        assert same(fastckpt.load(tmp_path / "c", **options), state)
        return caplog.records[-1].args[0]

    cold = ways()
    assert (cold.blocks["buffered"], cold.engine) == (0, "uring"), cold
    (tmp_path / "c" / "model.safetensors").read_bytes()
    hot = ways()
    assert set(hot.paths) == {"buffered: in the page cache"}, hot
    assert (hot.engine, hot.fallback) == ("buffered", None)
    # A verification must read the disk, not the page cache.
    assert fastckpt.verify(tmp_path / "c").blocks["buffered"] == 0
    # A named engine is not replaced.
    for engine in ("uring", "threads", "direct"):
        assert ways(io=engine).blocks["buffered"] == 0


def test_direct_is_refused_where_it_cannot_be_had(tmp_path):
    needs.root()
    state = {"w": memory(5 * MIB, 64)}
    report = fastckpt.save(state, tmp_path / "c", io="direct")
    assert report.blocks["buffered"] == 0
    assert same(fastckpt.load(tmp_path / "c", io="direct"), state)
    with mounts.mount("ramfs") as directory:  # ramfs refuses O_DIRECT with EINVAL
        with pytest.raises(OSError, match=r"cannot use direct I/O on `.*model.safetensors`.*support it.*io=\"auto\""):
            fastckpt.save(state, directory / "c", io="direct")
        assert list(directory.iterdir()) == []
        fastckpt.save(state, directory / "c")
        with pytest.raises(OSError, match="cannot use direct I/O on"):
            fastckpt.load(directory / "c", io="direct")


@pytest.mark.parametrize("operation", ["save", "load"])
def test_buffered_never_opens_without_the_cache(tmp_path, operation):
    needs.tool("strace", "strace")
    fastckpt.save({"w": memory(5 * MIB, 64)}, tmp_path / "c")
    code = {
        "save": "import fastckpt, numpy; fastckpt.save({'w': numpy.ones(5 << 20)}, PATH, io=IO)",
        "load": "import fastckpt; fastckpt.load(PATH, io=IO)",
    }[operation]
    opened = {}
    for engine in ("buffered", "threads"):
        log = tmp_path / f"{engine}.log"
        script = code.replace("PATH", repr(str(tmp_path / "c"))).replace("IO", repr(engine))
        command = ["strace", "-f", "-qq", "-e", "trace=openat,openat2", "-o", str(log), sys.executable, "-c", script]
        subprocess.run(command, check=True)
        opened[engine] = len(re.findall(r"O_DIRECT\b", log.read_text(encoding="utf-8")))
    assert opened["buffered"] == 0
    assert opened["threads"] > 0, "as a check of the test, strace must see some calls"


def read_bytes(call) -> int:
    """Bytes that this process requests in reads during the call."""

    def count() -> int:
        text = Path("/proc/self/io").read_text(encoding="ascii")
        return int(text.partition("rchar: ")[2].split()[0])

    before = count()
    call()
    return count() - before


def test_parts_are_read_without_what_lies_between(tmp_path):
    state = {name: memory(MIB, 64) for name in "abcdefgh"}
    state |= {f"s.{i}": memory(4096, 64) for i in range(16)}
    fastckpt.save(state, tmp_path / "c")
    whole = read_bytes(lambda: fastckpt.load(tmp_path / "c", io="threads"))
    assert whole > 8 * MIB
    # Two tensors of one block, with two others between them, are two reads.
    apart = read_bytes(lambda: fastckpt.load(tmp_path / "c", keys=["a", "d"], io="threads"))
    assert 2 * MIB <= apart < 2.5 * MIB, apart
    # Tensors close to each other are read together: 16 small tensors are not 16 operations.
    small = read_bytes(lambda: fastckpt.load(tmp_path / "c", keys="s.*", io="threads"))
    assert small < MIB // 2, small
    # A part of a tensor reads the whole extent in the block, because of its checksum.
    with fastckpt.open(tmp_path / "c") as checkpoint:
        row = read_bytes(lambda: checkpoint.tensor("h")[slice(0, 100)])
        assert MIB <= row < 1.5 * MIB, row


def test_close_ranges_are_one_operation(tmp_path):
    needs.tool("strace", "strace")
    state = {f"s.{i:02}": memory(8192, 64) for i in range(64)}
    fastckpt.save(state, tmp_path / "c")
    script = f"import fastckpt; fastckpt.load({str(tmp_path / 'c')!r}, keys='s.*0', io='threads')"
    log = tmp_path / "log"
    command = ["strace", "-f", "-qq", "-y", "-e", "trace=pread64,preadv", "-o", str(log), sys.executable, "-c", script]
    subprocess.run(command, check=True)
    reads = [line for line in log.read_text(encoding="utf-8").splitlines() if "model.safetensors" in line]
    # One read is for the header, and one for all seven tensors.
    assert len(reads) <= 2, reads


def test_settings_for_measurements_are_checked(tmp_path, monkeypatch):
    for name, bad in (
        ("FASTCKPT_BLOCK_SIZE", "4097"),
        ("FASTCKPT_BLOCK_SIZE", "128M"),
        ("FASTCKPT_QUEUE_DEPTH", "0"),
        ("FASTCKPT_ZERO_COPY", "yes"),
    ):
        monkeypatch.setenv(name, bad)
        with pytest.raises(ValueError, match=f"environment variable {name}: `{bad}` is out of range"):
            fastckpt.save({"w": np.ones(3)}, tmp_path / "c")
        monkeypatch.delenv(name)
    monkeypatch.setenv("FASTCKPT_BLOCK_SIZE", str(1 << 20))
    fastckpt.save({"w": memory(3 * MIB, 64)}, tmp_path / "c")
    assert manifest.read_manifest(tmp_path / "c")["block_size"] == 1 << 20


@pytest.mark.parametrize("engine", ["uring", "threads", "direct"])
def test_more_stretches_than_one_operation_takes(tmp_path, monkeypatch, engine):
    """A call takes at most 1,024 ranges of memory, and a block of 64 MiB may have more."""
    if engine != "threads":
        needs.ring()
    monkeypatch.setenv("FASTCKPT_BLOCK_SIZE", str(64 * MIB))
    monkeypatch.setenv("FASTCKPT_ZERO_COPY", "1")
    size, count = 74_512, 800
    whole = memory(size * count, 64)
    state = {f"t.{i:03}": whole[i * size : (i + 1) * size] for i in range(count)}
    report = fastckpt.save(state, tmp_path / "c", io=engine)
    assert report.blocks == {"zero-copy": 1, "staged": 0, "buffered": 0}
    assert report.fallback is None
    assert same(fastckpt.load(tmp_path / "c", io=engine), state)
    blank = np.zeros_like(whole)
    into = {name: blank[i * size : (i + 1) * size] for i, name in enumerate(state)}
    assert same(fastckpt.load(tmp_path / "c", io=engine, into=into), state)


def test_waiting_for_a_limit_can_be_interrupted(tmp_path):
    class RungError(Exception):
        pass

    def ring(*_):
        raise RungError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    began = time.monotonic()
    try:
        with pytest.raises(RungError):
            fastckpt.save({"w": memory(MIB, 64)}, tmp_path / "c", io=fastckpt.IO(bandwidth_limit=10_000))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 60, "the limit alone takes 100 s"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("io", ["auto", "threads"])
def test_a_few_bytes_that_lie_far_apart_have_several_workers(tmp_path, caplog, io):
    caplog.set_level("INFO", "fastckpt")
    state = {f"{i}.{kind}": memory(size, 64) for i in range(4) for kind, size in (("big", 8 * MIB), ("small", 5000))}
    fastckpt.save(state, tmp_path / "c", files=fastckpt.Files(shard_size=9 * MIB))
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 4
    loaded = fastckpt.load(tmp_path / "c", keys="*.small", io=io)
    assert same(loaded, {name: state[name] for name in state if name.endswith("small")})
    assert caplog.records[-1].args[0].threads > 1
    # For a single place, one thread reads.
    fastckpt.load(tmp_path / "c", keys="1.small", io=io)
    assert caplog.records[-1].args[0].threads == 1
