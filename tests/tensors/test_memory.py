"""Saves and loads need little memory beyond the state."""

from __future__ import annotations

import errno
import itertools
import json
import mmap
import os
import resource
import subprocess
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from fastckpt._tensors import memory as _memory
from harness import needs

MIB = 1 << 20

PROGRAM = """
import json, sys
import numpy as np, fastckpt

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

path, operation, io = sys.argv[1:]
state = {"w": np.frombuffer(bytearray(np.random.default_rng(0).bytes(256 << 20)), np.uint8)}
expected = state["w"].copy() if operation == "into" else None
if operation != "save":
    fastckpt.save(state, path)
if operation == "load":
    state = None
if operation == "into":
    state["w"][:] = 0
# Reset the peak, because making the state took more memory.
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS:")
if operation == "save":
    fastckpt.save(state, path, io=io)
else:
    state = fastckpt.load(path, into=state, io=io)
grown = status("VmHWM:") - before
assert expected is None or np.array_equal(state["w"], expected)
print(json.dumps([grown, state["w"].nbytes]))
"""


@pytest.mark.parametrize("io", ["uring", "threads", "buffered"])
@pytest.mark.parametrize(("operation", "beyond"), [("save", 128), ("load", 256 + 64), ("into", 64)])
def test_memory_beyond_the_state(tmp_path, operation, beyond, io):
    """For 256 MiB, a load needs only the memory of its tensors, and a load with ``into=`` not even that."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "c"), operation, io]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    grown, size = json.loads(done.stdout)
    assert size == 256 * MIB
    assert grown <= beyond * MIB


def mappings() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("\n")


def resident() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def buffers(count: int, nbytes: int) -> list[np.ndarray]:
    """Memory for tensors that follow each other in a file, at the residue that torch's memory usually has."""
    return [_memory.buffer(nbytes, 64 + number * nbytes, 2) for number in range(count)]


@pytest.mark.parametrize("nbytes", [4 * MIB, 6_300_000, 31 * MIB])
def test_tensors_share_mappings(nbytes):
    """A process may have 65,530 mappings, fewer than a model may have tensors. The test touches no pages."""
    if Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip() == "2":
        needs.missing("address space beyond the memory (vm.overcommit_memory is 2)")
    count = 3000
    before = mappings()
    kept = buffers(count, nbytes)
    # Each mapping has 256 MiB, of which less than one tensor's size may be unused; malloc may add a few mappings.
    assert mappings() - before <= count * nbytes / (224 * MIB) + 50
    assert {array.ctypes.data % 4096 for array in kept} == {(64 + i * nbytes) % 4096 for i in range(count)}
    # No byte belongs to two tensors.
    places = sorted((array.ctypes.data, array.nbytes) for array in kept)
    assert all(left + size <= right for (left, size), (right, _) in itertools.pairwise(places))
    del kept
    assert mappings() - before <= 50


@pytest.mark.parametrize("nbytes", [5 * MIB + 4, 40 * MIB])
def test_a_tensor_that_dies_gives_its_memory_back(nbytes):
    count = 400 * MIB // nbytes
    before = resident()
    kept = buffers(count, nbytes)
    for number, array in enumerate(kept):
        array[:] = number % 251
    whole = resident() - before
    assert whole >= count * nbytes * 0.95
    # Every second tensor dies, so each one is between two that stay.
    del kept[1::2], array
    assert resident() - before <= whole * 0.55
    assert all((array == 2 * number % 251).all() for number, array in enumerate(kept))
    kept = kept[:1]
    assert resident() - before <= 2 * nbytes + 16 * MIB
    assert (kept[0] == 0).all()


@pytest.mark.parametrize("granule", [16 << 10, 64 << 10])
def test_a_tensor_that_dies_takes_no_byte_of_its_neighbours(granule, monkeypatch):
    """A kernel with larger pages refuses ranges that start within a page, and drops whole pages."""
    dropped = []

    class Kernel(mmap.mmap):
        def madvise(self, advice, start=0, length=None):
            length = len(self) - start if length is None else length
            if advice == mmap.MADV_DONTNEED:
                address = _memory.address_of(np.frombuffer(self, np.uint8)) + start
                # The mapping itself may begin within a page of that size, because this kernel's pages are smaller.
                if address % granule:
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                dropped.append((address, address + length))
                length = -(-length // granule) * granule
            super().madvise(advice, start, length)

    monkeypatch.setattr(_memory, "_GRANULE", granule)
    monkeypatch.setattr(_memory, "_regions", deque(maxlen=1))
    monkeypatch.setattr(_memory, "_locked", lambda: False)
    monkeypatch.setattr(mmap, "mmap", Kernel)
    sizes = [4 * MIB + 4 + 4096 * number for number in range(20)]
    places = itertools.accumulate(sizes, initial=64)
    kept = [_memory.buffer(nbytes, place, 4) for nbytes, place in zip(sizes, places, strict=False)]
    for number, array in enumerate(kept):
        array[:] = number
    spans = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in kept]
    assert {first % 4096 for first, _ in spans} != {0}
    del kept[1::2], array
    assert len(dropped) == 10
    for (start, end), (first, last) in zip(dropped, spans[1::2], strict=True):
        assert start % granule == end % granule == 0
        assert start <= first
        assert last <= end
    for first, last in spans[::2]:
        assert all(end <= first or last <= start for start, end in dropped)
    assert all((array == 2 * number).all() for number, array in enumerate(kept))


def test_only_what_locked_pages_answer_is_passed_over():
    answers = []

    class Kernel:
        def madvise(self, *_):
            if answers:
                raise OSError(answers.pop(0), "no")

    for given in ([], [errno.EINVAL], [errno.EINVAL, errno.EINVAL]):
        answers[:] = given
        _memory._Pages(Kernel(), 0, 4096).__del__()
        assert not answers
    for given in ([errno.ENOMEM], [errno.EINVAL, errno.ENOMEM]):
        answers[:] = given
        with pytest.raises(OSError, match="no"):
            _memory._Pages(Kernel(), 0, 4096).__del__()
        assert not answers


LOCKED = """
import ctypes, json, os, sys
from fastckpt._tensors import memory as _memory

MIB = 1 << 20
CURRENT, FUTURE, ONFAULT = 1, 2, 4

def lock(flags):
    if ctypes.CDLL(None, use_errno=True).mlockall(flags):
        raise OSError(ctypes.get_errno(), "mlockall")

def resident():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))

def buffers(count):
    kept = [_memory.buffer(5 * MIB, 64 + i * 5 * MIB, 4) for i in range(count)]
    for array in kept:
        array[:] = 1
    return kept

"""


def locked(program: str) -> None:
    needs.locked_memory()
    done = subprocess.run(
        [sys.executable, "-c", LOCKED + program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("onfault", ["", " | ONFAULT"])
def test_a_process_whose_memory_is_locked_has_no_arena(onfault):
    """With locked memory, an arena of 256 MiB would be resident at once."""
    locked(
        f"""
lock(FUTURE{onfault})
before = resident()
kept = buffers(1)
assert resident() - before <= 12 * MIB, resident() - before
assert kept[0].ctypes.data % 4096 == 64
kept += buffers(20)
assert resident() - before >= 100 * MIB
del kept
assert resident() - before <= 12 * MIB, resident() - before
"""
    )


def test_a_tensor_that_was_locked_gives_its_memory_back():
    needs.linux((5, 18), "MADV_DONTNEED_LOCKED")
    locked(
        """
before = resident()
kept = buffers(20)
lock(CURRENT | ONFAULT)
assert resident() - before >= 100 * MIB
del kept[1:]
assert resident() - before <= 16 * MIB, resident() - before
assert (kept[0] == 1).all()
"""
    )


def limited(path: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run ``program``, in which a call of ``limit()`` leaves it 200 MiB of additional address space."""
    prelude = f"""
import errno, mmap, resource, sys
import numpy as np, fastckpt
from fastckpt._tensors import memory as _memory
path = {str(path)!r}

def limit():
    size = int(open("/proc/self/statm").read().split()[0]) * {resource.getpagesize()} + (200 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    try:
        mmap.mmap(-1, 256 << 20)
    except OSError:
        return
    sys.exit("the limit has no effect")
"""
    command = [sys.executable, "-c", prelude + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_no_room_for_an_arena_is_no_failure(tmp_path):
    state = {f"w{i}": np.random.default_rng(i).integers(0, 256, 5 * MIB + i, np.uint8) for i in range(6)}
    fastckpt.save(state, tmp_path / "c")
    done = limited(
        tmp_path / "c",
        """
limit()
loaded = fastckpt.load(path, io=fastckpt.IO("threads", threads=1))
for i in range(6):
    assert np.array_equal(loaded[f"w{i}"], np.random.default_rng(i).integers(0, 256, (5 << 20) + i, np.uint8))
""",
    )
    assert done.returncode == 0, done.stderr


def test_no_room_to_map_a_shard_tells_what_helps(tmp_path):
    fastckpt.save({"w": np.zeros(256 * MIB, np.uint8)}, tmp_path / "c")
    done = limited(
        tmp_path / "c",
        """
limit()
try:
    fastckpt.load(path, io=fastckpt.IO(mmap=True))
except OSError as error:
    assert error.errno == errno.ENOMEM, error
    sys.exit(str(error))
""",
    )
    assert done.returncode == 1
    assert "cannot map `" in done.stderr
    assert "model.safetensors`: Cannot allocate memory: " in done.stderr
    for remedy in ("mmap=True", "vm.max_map_count", "ulimit -v"):
        assert remedy in done.stderr


def test_what_is_empty_may_have_no_address():
    """Empty tensors have no address, and numpy before 2 accepts no null pointer."""
    assert _memory.at(0, 0).shape == (0,)
    nothing = _memory.laid_out(0, (0, 3), (12, 4), 4)
    assert (nothing.shape, nothing.itemsize) == ((0, 3), 4)
    assert _memory.is_nested(nothing)
