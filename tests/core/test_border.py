"""The border between Python and the core: an address comes with a number of bytes, buffers stay exported while
the core reads them, and the core reads the environment only under the GIL."""

from __future__ import annotations

import array
import ctypes
import itertools
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from fastckpt import _core
from fastckpt._api.destinations import Targets
from fastckpt._api.into import Into
from fastckpt._tensors.described import Tensor
from fastckpt._tensors.memory import at
from fastckpt._tensors.movers import Sources
from fastckpt._tensors.pieces import pieces
from harness import manifest, needs

torch = pytest.importorskip("torch")

LONG = 1 << 16


# --- addresses and capacities ----------------------------------------------------------------------------------------


def lying(path, nbytes, **claim):
    """A checkpoint with one tensor of ``nbytes``, right checksums, and a false logical dtype and shape."""
    body = manifest.minimal(path, [("w", "U8", [nbytes], b"\xab" * nbytes)])
    body["tensors"][0]["as"] = claim
    body["structure"] = [["dict", 1], "w", ["tensor" if claim["dtype"].startswith("torch") else "array", 0]]
    manifest.forge(path, body)


@pytest.mark.parametrize("kind", ["torch", "torch strided", "numpy", "numpy strided"])
@pytest.mark.parametrize("nbytes", [200, 12_000, 4])
def test_into_is_not_written_beyond_its_end(tmp_path, kind, nbytes):
    """The test's memory surrounds the tensor, so that a write beyond it shows, and does not crash."""
    path = tmp_path / "c"
    lying(path, nbytes, dtype="torch.complex128" if "torch" in kind else "numpy.<c16", shape=[3])
    around = np.zeros(4096, np.complex128)
    # A strided target, which callbacks would fill as a whole array, or a contiguous one.
    target = around[1000:1006:2] if "strided" in kind else around[1000:1003]
    state = {"w": torch.from_numpy(target) if "torch" in kind else target}
    with pytest.raises(fastckpt.CorruptCheckpointError, match="'w': its logical dtype and shape do not fit its bytes"):
        fastckpt.load(path, into=state)
    assert not around.any()


@pytest.mark.parametrize("way", ["memory", "memory, without sums", "drain", "beyond by one"])
def test_the_core_itself_refuses_what_its_memory_cannot_take(tmp_path, way):
    """The core refuses a request for more bytes than the declared memory, even without Python's checks."""
    fastckpt.save({"w": np.arange(1000, dtype=np.uint8)}, tmp_path / "c")
    memory = np.zeros(2000, np.uint8)
    room = 999 if way == "beyond by one" else 12
    address = 0 if way == "drain" else memory.__array_interface__["data"][0]
    drained = []
    options = {"io": "threads", "threads": 1, "tick": None, "drain": lambda *where: drained.append(where)}
    reader = _core.Reader(str(tmp_path / "c"))
    with pytest.raises(ValueError, match=f"request 0 is for 1000 bytes, and its memory has {room}"):
        reader.read([_core.ReadRequest(0, address, room)], verify="sums" not in way, **options)
    assert not memory.any()
    assert not drained
    # The same holds for a box of the tensor.
    with pytest.raises(ValueError, match="request 0 is for 100 bytes, and its memory has 99"):
        reader.read([_core.ReadRequest(0, address, 99, [(900, 1000, 1)])], verify=True, **options)
    assert not memory.any()
    assert not drained
    reader.read([_core.ReadRequest(0, address, 100, [(900, 1000, 1)])], verify=True, **options)
    assert drained or memory[:100].tolist() == [n % 256 for n in range(900, 1000)]
    assert not memory[100:].any()


def refused(tmp_path, match, *request, tensor=0):
    """Check that a request is refused and changes nothing in the memory around its own."""
    if not (tmp_path / "c").exists():
        fastckpt.save({"w": np.arange(24, dtype=np.uint16).reshape(4, 6)}, tmp_path / "c")
    memory = np.zeros(4096, np.uint8)
    request = _core.ReadRequest(tensor, memory.ctypes.data + 2048, *request)
    with pytest.raises((ValueError, IndexError), match=match):
        _core.Reader(str(tmp_path / "c")).read([request], verify=True, io="threads", threads=1, drain=None, tick=None)
    assert not memory.any()


LAST = 2**63 - 1


def test_the_core_itself_refuses_strides_that_leave_the_memory(tmp_path):
    """The capacity must reach from the lowest byte to the highest, for strides of any sign."""
    rows, all_of = [(1, 4, 2), (0, 6, 1)], [(0, 4, 1), (0, 6, 1)]
    for box, strides, reach in (
        (rows, [100, 2], 112),
        (rows, [-100, 2], 112),
        (rows, [100, -2], 112),
        (rows, [2, -4], 24),
        (all_of, [-100, -16], 382),
        (None, [12, 2], 48),
        (None, [2, 8], 48),
        (rows, None, 24),
    ):
        refused(tmp_path, f"request 0 is for {reach} bytes, and its memory has {reach - 1}", reach - 1, box, strides)
    for stride in (LAST, -LAST, -(2**63), 2**61, LAST // 3 + 1):
        refused(tmp_path, "its strides are out of range", LAST, None, [stride, 2])
    # Each part is in range, but their sum is not.
    refused(tmp_path, "its strides are out of range", LAST, None, [2**60, 2**60])


def test_the_core_itself_refuses_strides_along_which_elements_overlap(tmp_path):
    for strides in ([0, 2], [2, 2], [12, 1], [12, 0], [2, 6], [-3, 3]):
        refused(tmp_path, "overlap or interleave", 2048, None, strides)
    # With a single index, the stride along its dimension does not matter.
    fits = _core.ReadRequest(0, np.zeros(100, np.uint8).ctypes.data, 0, [(1, 2, 1), (0, 0, 1)], [0, 0])
    reader = _core.Reader(str(tmp_path / "c"))
    report = reader.read([fits], verify=True, io="threads", threads=1, drain=None, tick=None)
    assert report["bytes"] == 0


def test_the_core_itself_refuses_what_is_no_box_of_the_tensor(tmp_path):
    for box, match in (
        ([(0, 5, 1), (0, 6, 1)], "0..5 in steps of 1 is not in dimension 0 of size 4"),
        ([(0, 4, 1), (3, 2, 1)], "3..2 in steps of 1 is not in dimension 1"),
        ([(0, 4, 0), (0, 6, 1)], "0..4 in steps of 0 is not in dimension 0"),
        ([(0, 4, 1), (2**64 - 1, 2**64 - 1, 1)], "is not in dimension 1"),
        ([(0, 4, 1)], "it has 1 dimensions, but the tensor has 2"),
        ([(0, 1, 1)] * 70, "it has 70 dimensions"),
        ([], "it has 0 dimensions"),
    ):
        refused(tmp_path, match, 2048, box)
    refused(tmp_path, "it has 3 dimensions", 2048, None, [1, 1, 1])
    refused(tmp_path, "there is no tensor 1", 2048, tensor=1)


def test_a_box_goes_to_a_callback_in_row_major_order(tmp_path):
    """Each piece comes with its start in the box, also over several blocks."""
    whole = np.arange(3 << 20, dtype=np.uint32).reshape(3 << 10, 1 << 10)
    fastckpt.save({"w": whole}, tmp_path / "c")
    part = whole[5:3000:7, 3:900:2]
    seen = np.zeros(part.nbytes, np.uint8)

    def drain(ranges):
        for request, start, address, nbytes in ranges:
            assert request == 0
            seen[start : start + nbytes] = at(address, nbytes)

    request = _core.ReadRequest(0, 0, part.nbytes, [(5, 3000, 7), (3, 900, 2)])
    reader = _core.Reader(str(tmp_path / "c"))
    reader.read([request], verify=True, io="threads", threads=2, drain=drain, tick=None)
    assert (seen.view(np.uint32).reshape(part.shape) == part).all()


def test_the_core_itself_refuses_a_tensor_of_another_size(tmp_path):
    memory = np.ones(1000, np.uint8)
    address = memory.__array_interface__["data"][0]
    tensor = Tensor("w", "F32", (250,), address, 999)
    options = _core.SaveOptions(shard_size=1 << 30)
    with pytest.raises(ValueError, match="request 0 is for 1000 bytes, and its memory has 999"):
        _core.save(
            str(tmp_path / "c"),
            [tensor],
            '[["array",0]]',
            "[null]",
            options,
            None,
            None,
        )
    with pytest.raises(ValueError, match="its memory has 999"):
        _core.Snapshot([tensor], '[["array",0]]', "[null]", options, None)
    assert not list(tmp_path.iterdir())


def test_a_mapping_has_no_address_beyond_its_end(tmp_path):
    fastckpt.save({"w": np.arange(1000)}, tmp_path / "c")
    reader = _core.Reader(str(tmp_path / "c"))
    size = reader.shards()[0].nbytes
    mappings = reader.map([0])
    assert mappings.address(0, size, 0) - mappings.address(0, 0, size) == size
    for offset, nbytes in ((size, 1), (0, size + 1), (1, 2**64 - 1)):
        with pytest.raises(IndexError):
            mappings.address(0, offset, nbytes)


def test_pieces_end_where_the_array_does():
    """A range that is too long raises: once, such a range was walked forever."""
    for shape in ((), (3,), (2, 3)):
        count = int(np.prod(shape))
        assert sum(n for _, n in pieces(shape, 0, count)) == count
        with pytest.raises(ValueError, match="of an array that has"):
            list(itertools.islice(pieces(shape, 0, count + 1), 10))


def test_into_whose_storage_was_cut(tmp_path):
    """The tensor's shape claims memory that has been freed."""
    fastckpt.save({"w": torch.ones(1000)}, tmp_path / "c")
    for view in (slice(None), slice(None, None, 2)):
        target = torch.zeros(1000 * (view.step or 1))[view]
        target.untyped_storage().resize_(100)
        with pytest.raises(fastckpt.StructureMismatchError, match="has been freed"):
            fastckpt.load(tmp_path / "c", into={"w": target})


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("save", [fastckpt.save, fastckpt.save_async])
def test_a_tensor_whose_storage_was_cut_is_not_saved(tmp_path, save, step):
    """Beyond a tensor's storage is foreign memory or none."""
    whole = torch.ones(2000)[::step]
    # The last tensor begins beyond the remaining storage.
    for tensor in (whole, whole[5:], whole[-1:]):
        tensor.untyped_storage().resize_(100)
        with pytest.raises(fastckpt.exceptions.UnsupportedTypeError, match=r"\['w'\].*freed"):
            save({"w": tensor}, tmp_path / "c")
    fastckpt.save({"w": whole[:3]}, tmp_path / "c")


def test_every_tensor_of_into_is_held_against_its_own_memory(tmp_path, monkeypatch):
    """A load compares sizes even without a comparison of dtypes and shapes."""
    fastckpt.save({"w": np.ones(100, np.uint8)}, tmp_path / "c")
    monkeypatch.setattr(Into, "_tensor", lambda *_: None)
    around = np.zeros(1000, np.uint8)
    with pytest.raises(fastckpt.CorruptCheckpointError, match="do not fit its bytes"):
        fastckpt.load(tmp_path / "c", into={"w": around[:10]})
    assert not around.any()


# --- buffers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def meanwhile(monkeypatch):
    """Functions to run in the core's callback, while the core reads the state, and the exceptions that they raise."""
    raised = []
    actions = []
    fill = Sources.fill

    def wrapped(self, ranges):
        for action in actions:
            try:
                action()
            except BufferError as error:  # noqa: PERF203 - one action
                raised.append(error)
        fill(self, ranges)

    monkeypatch.setattr(Sources, "fill", wrapped)
    return actions, raised


def state_of(value):
    # The core uses callbacks to read values that are not contiguous.
    return {"strided": np.ones((64, 64))[:, ::2], "value": value}


@pytest.mark.parametrize("how", ["save", "async", "lazy"])
def test_a_bytearray_cannot_be_resized_while_it_is_read(tmp_path, meanwhile, how):
    actions, raised = meanwhile
    value = bytearray(b"x" * LONG)
    actions.append(lambda: value.extend(b"y" * LONG))
    state = state_of(value)
    if how == "save":
        fastckpt.save(state, tmp_path / "c")
    else:
        pending = fastckpt.save_async(state, tmp_path / "c", io=fastckpt.IO(lazy=how == "lazy"))
        # The save has copied the value, so the caller may change it again.
        value.extend(b"z")
        pending.result(60)
    assert raised
    actions.clear()
    value.extend(b"z")
    assert fastckpt.load(tmp_path / "c")["value"] == b"x" * LONG


@pytest.mark.parametrize("kind", ["numpy over a bytearray", "numpy over an array", "numpy over a mapping"])
def test_what_others_export_stays_exported(tmp_path, meanwhile, kind):
    actions, raised = meanwhile
    if kind.endswith("bytearray"):
        owner = bytearray(LONG)
        actions.append(lambda: owner.extend(b"y"))
    elif kind.endswith("mapping"):
        owner = mmap.mmap(-1, LONG)
        actions.append(owner.close)
    else:
        owner = array.array("b", bytes(LONG))
        actions.append(lambda: owner.append(1))
    state = state_of(np.frombuffer(owner, np.uint8))
    fastckpt.save(state, tmp_path / "c")
    assert raised


@pytest.mark.parametrize("value", [memoryview(bytearray(LONG)), array.array("b", bytes(LONG)), mmap.mmap(-1, LONG)])
def test_other_buffers_are_no_state(tmp_path, value):
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError):
        fastckpt.save(state_of(value), tmp_path / "c")


@pytest.mark.parametrize("how", ["value", "metadata", "target", "core"])
@pytest.mark.parametrize("save", [fastckpt.save, fastckpt.save_async])
def test_a_failed_save_lets_go_of_buffers(tmp_path, how, save):
    """A failed save keeps no buffers, even while the caller keeps the error and its traceback."""
    value = bytearray(LONG)
    state = state_of(value)
    metadata = object() if how == "metadata" else None
    if how == "value":
        state["last"] = object()
    path = tmp_path / "c"
    if how == "target":
        (tmp_path / "no").symlink_to("nowhere")
        path = tmp_path / "no" / "c"
    if how == "core":
        path.write_text("in the way")

    def attempt():
        pending = save(state, path, metadata=metadata)
        if save is fastckpt.save_async:
            pending.result(60)

    with pytest.raises((OSError, fastckpt.exceptions.UnsupportedTypeError)) as caught:
        attempt()
    value.extend(b"y")
    assert caught.value.__traceback__ is not None


def test_a_bytearray_that_is_read_cannot_be_resized(tmp_path):
    fastckpt.save(bytearray(LONG), tmp_path / "c")
    targets = Targets(_core.Reader(str(tmp_path / "c")).tensors(), "auto")
    targets.make([["bytearray", 0, "tensor"]])
    [value] = targets._values
    with pytest.raises(BufferError):
        value.append(0)
    del value
    [value] = targets.values()
    value.append(0)


# --- the environment -------------------------------------------------------------------------------------------------

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static char *(*real)(const char *);
static int (*held)(void);
static int log_to = -1;

void watch(int descriptor) {
    held = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    log_to = descriptor;
}

char *getenv(const char *name) {
    if (!real) real = (char *(*)(const char *))dlsym(RTLD_NEXT, "getenv");
    if (log_to >= 0) {
        Dl_info info;
        const char *from = "?";
        if (dladdr(__builtin_return_address(0), &info) && info.dli_fname) from = info.dli_fname;
        dprintf(log_to, "%d %s %s\n", held(), name, from);
    }
    return real(name);
}
"""

OPERATIONS = r"""
import ctypes, os, sys
import numpy as np
import fastckpt
from fastckpt import _core

log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
shim = ctypes.CDLL(sys.argv[2])
shim.watch(log)
# Check of the test: ctypes releases the GIL for a CDLL, and keeps it for a PyDLL.
ctypes.CDLL(None).getenv(b"WITHOUT")
ctypes.PyDLL(None).getenv(b"WITH")
base = sys.argv[3]
state = {"large": np.zeros(6 << 20, np.uint8), "small": np.arange(10), "strided": np.zeros((4, 4)).T}


def operations(prefix):
    # The first operation of a process creates its page of counters.
    fastckpt.save({"small": 1}, f"{base}/{prefix}-small")
    for io in ("auto", "threads", "buffered"):
        path = f"{base}/{prefix}-{io}"
        fastckpt.save(state, path, io=io)
        fastckpt.load(path, io=io)
        fastckpt.load(path, into=state, io=io)
        fastckpt.verify(path, io=io)
    fastckpt.load(path, io=fastckpt.IO(mmap=True))
    with fastckpt.open(path) as checkpoint:
        checkpoint["large"], checkpoint.tensor("large")[3]
    fastckpt.save_async(state, f"{base}/{prefix}-async", io=fastckpt.IO(nice=1, bandwidth_limit=1e12)).result(60)
    fastckpt.save_async(state, f"{base}/{prefix}-lazy", io=fastckpt.IO(lazy=True)).result(60)
    fastckpt.tools.set_target("high")
    _core.probe(base, io="auto")


operations("parent")
child = os.fork()
if child == 0:
    operations("child")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_the_environment_is_read_under_the_gil_alone(tmp_path):
    """A replacement of getenv records whether the calling thread has the GIL, so the test needs no race."""
    compiler = needs.tool("cc", "gcc")
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c", "-ldl"], check=True)
    log = tmp_path / "log"
    (tmp_path / "top").mkdir(mode=0o700)
    plain = {name: value for name, value in os.environ.items() if name != "FASTCKPT_TOP"}
    preloaded = ":".join(filter(None, (plain.get("LD_PRELOAD"), str(shim))))
    environment = {**plain, "LD_PRELOAD": preloaded, "FASTCKPT_TOP_DIR": str(tmp_path / "top")}
    ended = subprocess.run(
        [sys.executable, "-c", OPERATIONS, log, shim, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    calls = [line.split(" ", 2) for line in log.read_text().splitlines()]
    assert [(held, name) for held, name, _ in calls if name.startswith("WITH")] == [("0", "WITHOUT"), ("1", "WITH")]
    ours = [(name, held) for held, name, path in calls if Path(path).name.startswith("_core")]
    assert {name for name, held in ours if held == "0"} == set()
    # Each operation reads even the variables that only the first operation of a process needs.
    counts = {name: sum(one == name for one, _ in ours) for name, _ in ours}
    assert counts["LOCAL_WORLD_SIZE"] == counts["FASTCKPT_TOP_DIR"] >= 2 * 19, json.dumps(counts)
    pages = list((tmp_path / "top").iterdir())
    assert len(pages) >= 1, pages


# --- parts of a snapshot ----------------------------------------------------------------------------------------------


OPTIONS = _core.SaveOptions(shard_size=1_000_000, threads=2)


def test_more_options_than_a_checkpoint_keeps_are_refused():
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError, match=r"1025 options, .* 1024 .*: keep fewer"):
        _core.SaveOptions(shard_size=1_000_000, kept=[("exclude", "a")] * 1025)


def part(value, *, is_here=True):
    return Tensor("", "U8", (value.nbytes,), value.ctypes.data if is_here else 0, value.nbytes, None)


def test_parts_are_copied_to_their_places():
    arrays = [np.arange(size, dtype=np.uint8) for size in (5, 3, 70_000, 0, 3 << 20)]
    asked = []

    def fill(ranges):
        for index, start, address, nbytes in ranges:
            asked.append(index)
            ctypes.memmove(address, arrays[index].ctypes.data + start, nbytes)

    parts = [part(array, is_here=index != 1) for index, array in enumerate(arrays)]
    snapshot = _core.Snapshot.of_parts(parts, bytes([0, 1, 1, 0, 0]), fill)
    memory = _core.Memory(snapshot.nbytes)
    snapshot.attach(memory)
    places = snapshot.places()
    # The second and the third part are adjacent, like copies from one device.
    assert [address - memory.address for address, _ in places] == [0, 64, 67, 70_080, 70_080]
    assert [nbytes for _, nbytes in places] == [one.nbytes for one in arrays]
    snapshot.stage(bytes([1, 1, 0, 1, 1]), last=False, options=OPTIONS)
    ctypes.memmove(places[2][0], arrays[2].ctypes.data, arrays[2].nbytes)
    with pytest.raises(ValueError, match="more bytes"):
        snapshot.copied(70_001)
    snapshot.copied(70_000)
    snapshot.stage(bytes(5), last=True, options=OPTIONS)
    assert snapshot.staged == snapshot.total == sum(one.nbytes for one in arrays)
    assert asked == [1]
    for (address, nbytes), one in zip(places, arrays, strict=True):
        assert ctypes.string_at(address, nbytes) == one.tobytes()
    snapshot.close()
    memory.close()


def test_parts_are_no_files(tmp_path):
    array = np.ones(3, dtype=np.uint8)
    with pytest.raises(ValueError, match="one byte for each part"):
        _core.Snapshot.of_parts([part(array)], b"", None)
    with pytest.raises(ValueError, match="needs a callback"):
        _core.Snapshot.of_parts([part(array, is_here=False)], b"\0", None)
    snapshot = _core.Snapshot.of_parts([part(array)], b"\0", None)
    snapshot.attach(_core.Memory(snapshot.nbytes))
    with pytest.raises(RuntimeError, match="not whole"):
        snapshot.stage(b"\0", last=True, options=OPTIONS)
    snapshot = _core.Snapshot.of_parts([part(array)], b"\0", None)
    snapshot.attach(_core.Memory(snapshot.nbytes))
    snapshot.stage(b"\1", last=True, options=OPTIONS)
    with pytest.raises(RuntimeError, match="of parts, not of files"):
        snapshot.save(str(tmp_path / "c"), OPTIONS, None)
