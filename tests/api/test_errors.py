"""Real errors of disks and files: each gives an exception of the right class that names the path (issue
2, item 8)."""

# ruff: noqa: PERF203, PT011, PTH208 - the errno is asserted below each; names as the directory has them

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shlex
import shutil
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

import fastckpt
from fastckpt import CheckpointError, CorruptCheckpointError
from fastckpt.exceptions import FormatVersionError, UnsupportedTypeError
from harness import cli, manifest, mounts, needs, strace, zygote
from harness.states import numbered, same, which

ENGINES = ["uring", "threads", "buffered"]
BLOCK = 4 << 20


def visible(point):
    return [name for name in manifest.listing(point) if name != "lost+found"]


# --- a full disk ---------------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("kind", "size"), [("tmpfs", 16 << 20), ("ext4", 24 << 20)])
def test_disk_full(kind, size, engine):
    """ENOSPC before or during writes leaves no files and keeps the old checkpoint; freed space can be used again."""
    with mounts.mount(kind, size=size) as point:
        too_much = numbered(1, 40 << 20)
        with pytest.raises(OSError) as caught:
            fastckpt.save(too_much, point / "first", io=engine)
        assert caught.value.errno == errno.ENOSPC
        assert str(point) in os.fsdecode(caught.value.filename)
        assert "No space left on device" in str(caught.value)
        assert visible(point) == []
        # One checkpoint fills half of the disk: a second one beside it does not fit.
        half = 11 << 20
        fastckpt.save(numbered(2, half), point / "step", io=engine)
        with pytest.raises(OSError) as caught:
            fastckpt.save(numbered(3, half), point / "step", io=engine)
        assert caught.value.errno == errno.ENOSPC
        assert visible(point) == ["step"]
        assert which(fastckpt.load(point / "step"), half) == 2
        assert fastckpt.verify(point / "step").ok
        # Free space for the next save.
        shutil.rmtree(point / "step")
        fastckpt.save(numbered(4, half), point / "step", io=engine)
        assert which(fastckpt.load(point / "step"), half) == 4
        assert visible(point) == ["step"]


@pytest.mark.root
@pytest.mark.parametrize("left", [0, 1, 2, 3, 5, 8])
def test_disk_full_at_the_last_pages(left):
    """If the shards fit but the manifest does not, the error is like any other."""
    nbytes = 1 << 20
    with mounts.mount("tmpfs", size=64 << 20) as point:
        fastckpt.save(numbered(1, nbytes), point / "probe")
        needed = sum(-(-file.stat().st_size // 4096) for file in (point / "probe").rglob("*") if file.is_file())
        fastckpt.save(numbered(2, nbytes), point / "old")
        shutil.rmtree(point / "probe")
        free = os.statvfs(point).f_bfree
        with (point / "ballast").open("wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, (free - needed + 1 + left // 2 - 3) * 4096)
        refused = None
        try:
            fastckpt.save(numbered(3, nbytes), point / "new")
        except OSError as error:
            refused = error.errno
        if refused is not None:
            assert refused == errno.ENOSPC
            assert visible(point) == ["ballast", "old"]
        else:
            assert which(fastckpt.load(point / "new"), nbytes) == 3
            manifest.read(point / "new")
        assert which(fastckpt.load(point / "old"), nbytes) == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("limit", [0, 1, 4096, 65537, 300_001, 524_288])
def test_file_size_limit_before_writing(children, tmp_path, engine, limit):
    """RLIMIT_FSIZE refuses fallocate with EFBIG, before the first byte."""
    check_file_size_limit(children, tmp_path, engine, limit, fallocate=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("limit", [4096, 65537, 300_001, 524_800, 1_048_575])
def test_true_short_write(children, tmp_path, engine, limit):
    """After fallocate, the kernel writes up to the limit and returns a short count; only the next write gets EFBIG."""
    check_file_size_limit(children, tmp_path, engine, limit, fallocate=False)


@pytest.mark.root
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("kind", "size"), [("tmpfs", 10 << 20), ("ext4", 16 << 20)])
def test_true_short_write_of_a_full_disk(children, tmp_path, kind, size, engine):
    """On a full file system, too, a short write is the first sign."""
    with mounts.mount(kind, size=size) as point:
        options = {"io": engine, "nbytes": 24 << 20, "env": {"FASTCKPT_TOP": "0"}}
        child = children.start("save_held", path=str(point / "step"), index=2, **options)
        child.next()
        inject = strace.injection("fallocate", "retval=0", "1+")
        with strace.attached(child.pid, tmp_path / "log", "fallocate", inject) as trace:
            child.go()
            end = child.outcome()
            assert any(call.injected for call in trace.calls())
        assert isinstance(end, zygote.Raised), "a write that was cut short was taken for whole"
        assert end.errno == errno.ENOSPC, end
        assert str(point) in (end.filename or ""), end
        assert visible(point) == []


@pytest.mark.parametrize("count", [512, 4096, 5000, 65536])
@pytest.mark.parametrize(
    ("engine", "call"), [("threads", "pwrite64"), ("threads", "pwritev"), ("buffered", "pwritev2")]
)
def test_short_count_is_gone_on_from(children, tmp_path, engine, call, count):
    """After a short write, the rest is written: tests with full disks do not show whether the save tries that.

    strace makes the first write return `count`. The next write must begin at that byte, or before it.
    """
    parent = tmp_path / "parent"
    parent.mkdir()
    # The tensor fits into one block, and is large enough for zero-copy.
    options = {"io": engine, "threads": 1, "nbytes": 3 << 20, "env": {"FASTCKPT_TOP": "0"}}
    # With zero-copy, one call writes several ranges of tensors and staging buffer; without it, one range.
    options["env"]["FASTCKPT_ZERO_COPY"] = "1" if call == "pwritev" else "0"
    child = children.start("save_held", path=str(parent / "step"), index=1, **options)
    child.next()
    inject = strace.injection(call, f"retval={count}", 1)
    with strace.attached(child.pid, tmp_path / "log", "pwrite64,pwritev,pwritev2", inject) as trace:
        child.go()
        end = child.outcome()
        # With direct I/O, the first call writes the bytes after the last whole page.
        first, second, *_ = trace.calls()[engine != "buffered" :]
    assert not isinstance(end, zygote.Raised), end
    assert first.injected
    assert offset_of(second) - offset_of(first) in (count, count // 4096 * 4096)


def offset_of(call):
    """The file offset of a write call: its last argument, or the last but one."""
    place = {"pwrite64": -1, "pwritev": -1, "pwritev2": -2}
    return int(call.arguments.rsplit(", ", 2)[place[call.name]])


@pytest.mark.parametrize("engine", ["threads", "uring"])
def test_short_tail_is_gone_on_from(children, tmp_path, engine):
    """After a short write of the bytes after the last whole page, the rest of them is written."""
    options = {"io": engine, "threads": 1, "nbytes": 3 << 20, "env": {"FASTCKPT_TOP": "0"}}
    child = children.start("save_held", path=str(tmp_path / "step"), index=1, **options)
    child.next()
    with strace.attached(child.pid, tmp_path / "log", "pwritev2", strace.injection("pwritev2", "retval=3", 1)) as trace:
        child.go()
        end = child.outcome()
        first, second, *more = trace.calls()
    assert not isinstance(end, zygote.Raised), end
    assert first.injected
    assert not more
    assert offset_of(first) % 4096 == 0
    assert offset_of(second) == offset_of(first) + 3


def check_file_size_limit(children, tmp_path, engine, limit, *, fallocate):
    parent = tmp_path / "parent"
    parent.mkdir()
    fastckpt.save(numbered(1), parent / "step")
    # The counters are off: after a false fallocate, access to their page would raise SIGBUS.
    options = {"io": engine, "fsize": limit, "nbytes": 1 << 21, "env": {} if fallocate else {"FASTCKPT_TOP": "0"}}
    child = children.start("save_held", path=str(parent / "step"), index=2, **options)
    child.next()
    if fallocate:
        child.go()
        end = child.outcome()
    else:
        # fallocate returns success without effect: otherwise it, or ftruncate in its place, would fail with EFBIG.
        inject = strace.injection("fallocate", "retval=0", "1+")
        with strace.attached(child.pid, tmp_path / "log", "fallocate", inject) as trace:
            child.go()
            end = child.outcome()
            assert trace.calls()
    assert isinstance(end, zygote.Raised), "a write that was cut short was taken for whole"
    assert "OSError" in end.bases, end
    assert end.errno == errno.EFBIG, end
    assert end.filename, end
    assert str(parent) in end.filename, end
    assert manifest.listing(parent) == ["step"]
    assert which(fastckpt.load(parent / "step")) == 1


# --- places where one may not write ----------------------------------------------------------------------------------


@pytest.mark.root
def test_read_only_directory(children):
    needs.root()
    with mounts.public_directory() as directory:
        locked = directory / "locked"
        locked.mkdir(mode=0o555)
        for operation in ("save", "save_async"):
            for name in ("step", "a/b/step"):
                raised = children.run("refused", path=str(locked / name), user=True, operation=operation)
                assert isinstance(raised, zygote.Raised)
                assert raised.kind == "PermissionError", raised
                assert raised.errno == errno.EACCES
                assert str(locked) in raised.filename
        assert manifest.listing(locked) == []


@pytest.mark.root
def test_checkpoint_that_one_may_not_read(children):
    needs.root()
    with mounts.public_directory() as directory:
        path = directory / "step"
        fastckpt.save(numbered(1), path)
        for victim in ("model.safetensors", manifest.NAME):
            (path / victim).chmod(0o000)
            raised = children.run("refused", path=str(path), user=True, operation="load")
            assert isinstance(raised, zygote.Raised)
            assert raised.kind == "PermissionError", raised
            assert raised.filename.endswith(victim), raised
            (path / victim).chmod(0o644)
        path.chmod(0o700)
        raised = children.run("refused", path=str(path), user=True, operation="load")
        assert isinstance(raised, zygote.Raised)
        assert raised.kind == "PermissionError", raised
        assert str(path) in raised.filename


@pytest.mark.root
def test_read_only_mount():
    with mounts.mount("tmpfs") as point:
        fastckpt.save(numbered(1), point / "step")
        with mounts.read_only(point):
            for name, save in itertools.product(("step", "other", "a/b"), (fastckpt.save, fastckpt.save_async)):
                with pytest.raises(OSError) as caught:
                    save(numbered(2), point / name)
                assert caught.value.errno == errno.EROFS
                assert str(point) in os.fsdecode(caught.value.filename)
            assert which(fastckpt.load(point / "step")) == 1, "a load needs no write permission"
            assert fastckpt.verify(point / "step").ok
        assert visible(point) == ["step"]


def test_missing_parents_are_made_by_the_save_and_by_nothing_else(tmp_path):
    path = tmp_path / "a" / "b" / "step"
    with pytest.raises(UnsupportedTypeError):
        fastckpt.save(object(), path)
    assert manifest.listing(tmp_path) == []
    fastckpt.save_async(numbered(1), path).result()
    assert which(fastckpt.load(path)) == 1
    fastckpt.save(numbered(2), tmp_path / "a" / "c" / "step", overwrite=False)
    assert manifest.listing(tmp_path / "a") == ["b", "c"]


def test_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    saves = (lambda path: fastckpt.save(numbered(1), path), lambda path: fastckpt.save_async(numbered(1), path))
    for operation in (*saves, fastckpt.load, fastckpt.open, fastckpt.verify):
        for name in ("step", "more/step"):
            with pytest.raises(NotADirectoryError) as caught:
                operation(tmp_path / "file" / name)
            assert str(tmp_path / "file") in os.fsdecode(caught.value.filename)


def test_name_too_long(tmp_path):
    with pytest.raises(OSError) as caught:
        fastckpt.save(numbered(1), tmp_path / ("n" * 256))
    assert caught.value.errno == errno.ENAMETOOLONG
    assert manifest.listing(tmp_path) == []


@pytest.mark.parametrize("operation", ["load", "open", "verify"])
def test_nothing_there(tmp_path, operation):
    with pytest.raises(FileNotFoundError) as caught:
        getattr(fastckpt, operation)(tmp_path / "step")
    assert str(tmp_path / "step") in os.fsdecode(caught.value.filename)


# --- not ours --------------------------------------------------------------------------------------------------------


def _torch_file(path, **options):
    torch.save({"w": torch.ones(3)}, path, **options)


def _old_torch_file(path):
    _torch_file(path, _use_new_zipfile_serialization=False)


def _safetensors_file(path):
    path.write_bytes(safetensors.numpy.save({"w": np.ones(3)}))


def _shard(path):
    fastckpt.save(numbered(1), path)
    return path / "model.safetensors"


def _hugging_face(path):
    path.mkdir()
    (path / "config.json").write_text("{}")
    _safetensors_file(path / "model.safetensors")


def _lost_manifest(path):
    fastckpt.save({"model": numbered(1), "other": np.ones(2)}, path)
    (path / manifest.NAME).unlink()


def _distributed(path):
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that no process group exists
        dcp.save({"weight": torch.ones(3), "step": 1}, checkpoint_id=str(path))


def _several(path):
    for step in (9, 10):
        fastckpt.save(numbered(step), path / f"step-{step}")
    (path / ".step-11.tmp").mkdir()
    (path / ".step-11.tmp" / manifest.NAME).write_bytes(b"{")


#: By foreign file: the function that makes it, its description in the error, and whether `fastckpt import` reads it.
FOREIGN = {
    "torch": (_torch_file, "a file of torch.save", True),
    "torch before 1.6": (_old_torch_file, "a file of torch.save", True),
    "safetensors": (_safetensors_file, "a file of safetensors", True),
    "text": (lambda path: path.write_text("notes"), "a checkpoint is a directory", False),
    "fifo": (os.mkfifo, "neither a directory nor a file", False),
    "shard": (_shard, "give its directory", False),
    "empty": (Path.mkdir, "an empty directory", False),
    "Hugging Face": (_hugging_face, "a model of Hugging Face", True),
    "lost manifest": (_lost_manifest, "lost its manifest", False),
    "distributed": (_distributed, "torch.distributed.checkpoint", True),
    "several": (_several, "step-10 is the newest", False),
    "other": (lambda path: (path / "logs").mkdir(parents=True), f"it holds no {manifest.NAME}", False),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_ours_is_named(tmp_path, kind):
    make, what, converts = FOREIGN[kind]
    made = make(tmp_path / "it's")
    path = made if kind == "shard" else tmp_path / "it's"
    before = manifest.listing(tmp_path)
    for operation in (fastckpt.load, fastckpt.open, fastckpt.verify):
        with pytest.raises(fastckpt.exceptions.NotACheckpointError) as caught:
            operation(path)
        assert manifest.listing(tmp_path) == before
        assert str(path) in str(caught.value)
        assert what in str(caught.value)
        assert not isinstance(caught.value, CorruptCheckpointError)
        command = re.search(r"'(fastckpt import .*) NEW_DIRECTORY' makes", str(caught.value))
        assert (command is not None) == converts
        if command is not None:
            *_, source = shlex.split(command[1])
            assert source == str(path)
    if converts:
        assert cli.main(["import", str(path), str(tmp_path / "made")]) == 0
        assert manifest.listing(tmp_path) == sorted([*before, "made"])


def test_a_manifest_that_is_damaged_is_damage_whatever_lies_beside_it(tmp_path):
    path = tmp_path / "step"
    fastckpt.save(numbered(1), path, files={"config.json": "{}"})
    (path / manifest.NAME).write_bytes(b"")
    for operation in (fastckpt.load, fastckpt.open, fastckpt.verify):
        with pytest.raises(CorruptCheckpointError, match=manifest.NAME):
            operation(path)


def test_out_of_descriptors(children, tmp_path):
    """EMFILE in the middle of a save is an error like any other; strace injects it in a child."""
    parent = tmp_path / "parent"
    parent.mkdir()
    fastckpt.save(numbered(1), parent / "step")
    for when in ("1+", "2+", "4+", "6+"):
        child = children.start("save_held", path=str(parent / "step"), index=2)
        child.next()
        with strace.attached(child.pid, tmp_path / "log", "openat", strace.injection("openat", "error=EMFILE", when)):
            child.go()
            end = child.outcome()
        if isinstance(end, zygote.Raised):
            assert end.errno == errno.EMFILE, end
            assert "OSError" in end.bases
            assert which(fastckpt.load(parent / "step")) == 1
        # If every later open fails, the leftovers cannot be opened either: the next save sweeps them.
        fastckpt.save(numbered(1), parent / "step")
        assert manifest.listing(parent) == ["step"]


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A checkpoint of two shards, with tensors of many blocks, of one block, of parts of a block, and of no bytes."""
    path = tmp_path_factory.mktemp("pristine") / "step"
    rng = np.random.default_rng(5)
    state = {
        "large": rng.integers(0, 256, 2 * BLOCK + 8192, dtype=np.uint8),
        "odd": rng.integers(0, 256, BLOCK + 777, dtype=np.uint8),
        "small": [rng.standard_normal(n) for n in (1, 5, 100)],
        "empty": np.zeros((0, 3)),
        "bits": rng.integers(0, 2, 11).astype(bool),
    }
    fastckpt.save(state, path, files=fastckpt.Files(shard_size=9 << 20))
    assert len(list(path.glob("*.safetensors"))) == 2
    return path, state


@pytest.fixture
def damaged(pristine, tmp_path):
    """A copy of the checkpoint to damage, its state, and its manifest."""
    source, state = pristine
    path = tmp_path / "step"
    shutil.copytree(source, path)
    return path, state, manifest.body_of(path)


def length(tensor):
    return manifest.DTYPE_BITS[tensor["dtype"]] * int(np.prod(tensor["shape"], dtype=object)) // 8


def flip(path, offset, bit=0):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def refuses_to_load(path, *mentions, kind=CorruptCheckpointError):
    with pytest.raises(kind) as caught:
        fastckpt.load(path)
    for mention in (str(path), *mentions):
        assert mention in str(caught.value), str(caught.value)
    return caught.value


def test_flipped_bits_in_data_are_all_found(damaged):
    """A flip in the first or last byte of any extent is found, in every block of a tensor, even if small tensors
    share the block."""
    path, _, body = damaged
    for tensor in body["tensors"]:
        file = body["shards"][tensor["shard"]]["file"]
        for start, stop in manifest.extents(tensor["offset"], length(tensor), body["block_size"]):
            for offset in {start, stop - 1}:
                flip(path / file, offset, bit=offset % 8)
                report = fastckpt.verify(path)
                assert not report.ok
                assert [damage.tensor for damage in report.damage] == [tensor["name"]]
                [damage] = report.damage
                assert damage.file == file
                assert damage.offset <= offset < damage.offset + damage.length
                assert start <= damage.offset
                assert damage.offset + damage.length <= stop
                assert damage.reason
                refuses_to_load(path, file, tensor["name"])
                flip(path / file, offset, bit=offset % 8)
    assert fastckpt.verify(path).ok


@pytest.mark.parametrize("engine", ENGINES)
def test_much_damage_is_listed_whole(damaged, engine):
    path, _, body = damaged
    expected = []
    for tensor in body["tensors"]:
        file = body["shards"][tensor["shard"]]["file"]
        for start, stop in manifest.extents(tensor["offset"], length(tensor), body["block_size"]):
            flip(path / file, (start + stop) // 2)
            expected.append((file, start, stop - start, tensor["name"]))
    report = fastckpt.verify(path, io=engine)
    found = [(damage.file, damage.offset, damage.length, damage.tensor) for damage in report.damage]
    assert found == sorted(found), "damage is listed in file order"
    assert found == sorted(expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_load_checks_unless_told_not_to(damaged, engine):
    path, state, body = damaged
    tensor = next(tensor for tensor in body["tensors"] if tensor["name"] == "odd")
    flip(path / body["shards"][tensor["shard"]]["file"], tensor["offset"] + 5)
    with pytest.raises(CorruptCheckpointError, match="odd"):
        fastckpt.load(path, io=engine)
    loaded = fastckpt.load(path, io=fastckpt.IO(engine, verify=False))
    assert loaded["odd"][5] == state["odd"][5] ^ 1
    # Damage in one tensor does not prevent reads of the others.
    assert same(fastckpt.open(path)["large"], state["large"])
    with pytest.raises(CorruptCheckpointError, match="odd"):
        fastckpt.open(path)["odd"]


def test_load_into_says_that_it_is_damaged(damaged):
    path, state, body = damaged
    tensor = next(tensor for tensor in body["tensors"] if tensor["name"] == "large")
    flip(path / body["shards"][tensor["shard"]]["file"], tensor["offset"] + BLOCK)
    into = {**state, "large": np.zeros_like(state["large"])}
    with pytest.raises(CorruptCheckpointError, match="large"):
        fastckpt.load(path, into=into)


@pytest.mark.parametrize("where", ["length", "first", "middle", "padding"])
def test_flipped_bit_in_a_header(damaged, where):
    """Checksums also cover padding: TigerBeetle found two bugs by flipping exactly those bytes."""
    path, _, body = damaged
    for shard in body["shards"]:
        text = (path / shard["file"]).read_bytes()[: shard["data_offset"]]
        offset = {"length": 0, "first": 8, "middle": text.index(b"dtype"), "padding": len(text) - 1}[where]
        flip(path / shard["file"], offset)
        report = fastckpt.verify(path)
        assert [(damage.file, damage.tensor) for damage in report.damage] == [(shard["file"], None)]
        assert report.damage[0].offset <= offset < report.damage[0].offset + report.damage[0].length
        refuses_to_load(path, shard["file"])
        flip(path / shard["file"], offset)


def test_flipped_bit_anywhere_in_the_manifest(damaged):
    path, _, _ = damaged
    raw = (path / manifest.NAME).read_bytes()
    for offset in sorted({*range(60), *range(60, len(raw), 37), len(raw) - 2, len(raw) - 1}):
        flip(path / manifest.NAME, offset, bit=offset % 7)
        for operation in (fastckpt.load, fastckpt.open, fastckpt.verify):
            # A flip in the digit of the version turns it into another version.
            with pytest.raises((CorruptCheckpointError, FormatVersionError)) as caught:
                operation(path)
            assert isinstance(caught.value, CorruptCheckpointError) or offset == raw.index(b"1")
            assert str(path) in str(caught.value)
        (path / manifest.NAME).write_bytes(raw)
    fastckpt.load(path)


def test_truncated_manifest(damaged):
    path, _, _ = damaged
    raw = (path / manifest.NAME).read_bytes()
    for size in (0, 1, 30, manifest.PREFIX - 1, manifest.PREFIX, manifest.PREFIX + 1, len(raw) // 2, len(raw) - 1):
        (path / manifest.NAME).write_bytes(raw[:size])
        refuses_to_load(path, manifest.NAME)
    (path / manifest.NAME).write_bytes(raw + b"\n")
    refuses_to_load(path, manifest.NAME)


@pytest.mark.parametrize("cut", ["one byte", "a block", "the data", "everything"])
def test_truncated_shard(damaged, cut):
    path, _, body = damaged
    shard = body["shards"][0]
    size = {"one byte": shard["bytes"] - 1, "a block": BLOCK, "the data": shard["data_offset"], "everything": 0}[cut]
    os.truncate(path / shard["file"], size)
    refuses_to_load(path, shard["file"])
    # `open` reads only the manifest, so that damage can be examined; the first read of the shard detects it.
    lazy = fastckpt.open(path)
    for name in [tensor["name"] for tensor in body["tensors"] if tensor["shard"] == 0 and length(tensor)]:
        with pytest.raises(CorruptCheckpointError, match=shard["file"]):
            lazy[name]
    report = fastckpt.verify(path)
    assert not report.ok
    assert {damage.file for damage in report.damage} == {shard["file"]}, "the report lists only the damaged shard"


def test_missing_shard(damaged):
    path, _, body = damaged
    shard = body["shards"][1]["file"]
    (path / shard).unlink()
    refuses_to_load(path, shard)
    report = fastckpt.verify(path)
    assert {damage.file for damage in report.damage} == {shard}
    assert "missing" in report.damage[0].reason or "No such file" in report.damage[0].reason


def test_extra_bytes(damaged):
    path, _, body = damaged
    shard = body["shards"][0]["file"]
    with (path / shard).open("ab") as file:
        file.write(b"x")
    refuses_to_load(path, shard)
    assert {damage.file for damage in fastckpt.verify(path).damage} == {shard}


def test_swapped_shards_and_blocks(damaged):
    """A misdirected write puts the right bytes in the wrong place."""
    path, _, body = damaged
    shard = body["shards"][0]["file"]
    raw = bytearray((path / shard).read_bytes())
    raw[4096:8192], raw[8192:12288] = raw[8192:12288], raw[4096:8192]
    (path / shard).write_bytes(raw)
    refuses_to_load(path, shard)
    raw[8192:12288] = bytes(4096)
    (path / shard).write_bytes(raw)
    refuses_to_load(path, shard)


def test_shard_of_another_step(damaged, pristine, tmp_path):
    """A shard of another training step has the same names and sizes, as in a torn copy of a directory."""
    path, state, body = damaged
    other = {**state, "large": state["large"] ^ 1, "odd": state["odd"] ^ 1}
    fastckpt.save(other, tmp_path / "other", files=fastckpt.Files(shard_size=9 << 20))
    for shard in body["shards"]:
        raw = (path / shard["file"]).read_bytes()
        shutil.copy(tmp_path / "other" / shard["file"], path / shard["file"])
        refuses_to_load(path, shard["file"])
        (path / shard["file"]).write_bytes(raw)


@pytest.mark.parametrize("version", ["0", "2", "10", "4294967297", "18446744073709551617"])
@pytest.mark.parametrize("operation", ["load", "open", "verify"])
def test_other_format_version(damaged, version, operation):
    path, _, body = damaged
    manifest.forge(path, body, version=version)
    with pytest.raises(FormatVersionError) as caught:
        getattr(fastckpt, operation)(path)
    assert str(path) in str(caught.value)
    assert version in str(caught.value)
    # Only the version counts: a later version may change everything else, including the checksum's name.
    (path / manifest.NAME).write_bytes(b'{"fastckpt":%s,"blake3":"?",\n' % version.encode())
    with pytest.raises(FormatVersionError):
        getattr(fastckpt, operation)(path)


def test_newer_version_is_not_overwritten_in_ignorance(damaged):
    """A checkpoint of a newer release of fastckpt may be replaced,
    but not mangled."""
    path, _, body = damaged
    manifest.forge(path, body, version="2")
    fastckpt.save(numbered(1), path)
    assert which(fastckpt.load(path)) == 1
    assert fastckpt.verify(path).ok


def test_damaged_checkpoint_can_be_saved_over(damaged):
    """A run that resumes from an older step must be able to save over a damaged checkpoint of a later step."""
    path, _, body = damaged
    (path / body["shards"][0]["file"]).unlink()
    fastckpt.save(numbered(1), path)
    assert which(fastckpt.load(path)) == 1
    assert fastckpt.verify(path).ok
    manifest.read(path)


def test_unknown_members_are_for_later_releases(damaged):
    path, state, body = damaged
    body["compression"] = {"kind": None}
    body["tensors"][0]["statistics"] = [1, 2.5]
    manifest.forge(path, body)
    assert same(fastckpt.load(path), state)
    assert fastckpt.verify(path).ok


def test_errors_leave_the_process_fit(damaged, tmp_path):
    """After twenty failed loads and saves, everything works and no descriptor is left open."""
    path, _, body = damaged
    flip(path / body["shards"][0]["file"], body["shards"][0]["bytes"] - 1)

    def fail():
        # pytest.raises would keep the traceback alive, and with it the reader.
        ends = []
        for operation in (
            fastckpt.load,
            lambda where: fastckpt.save(numbered(1, 4096), where / manifest.NAME / "step"),
        ):
            try:
                operation(path)
            except (OSError, CheckpointError) as error:
                ends.append(type(error).__name__)
        assert ends == ["CorruptCheckpointError", "NotADirectoryError"]

    fail()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        fail()
    assert len(os.listdir("/proc/self/fd")) == before
    fastckpt.save(numbered(1), tmp_path / "fine")
    assert which(fastckpt.load(tmp_path / "fine")) == 1


def test_hand_made_checkpoint_of_the_document_loads(tmp_path):
    """The reader accepts everything that docs/format.md permits, not only our writer's files:
    small blocks, and data that begins within a page."""
    arrays = {
        "a": np.arange(5000, dtype="<f4"),
        "b": np.array([[1, -2], [3, 4]], dtype="<i8"),
        "e": np.zeros((0,), np.uint8),
    }
    names = {"<f4": "F32", "<i8": "I64", "|u1": "U8"}
    tensors = [(key, names[value.dtype.str], list(value.shape), value.tobytes()) for key, value in arrays.items()]
    manifest.minimal(tmp_path / "step", tensors)
    assert same(fastckpt.load(tmp_path / "step"), arrays)
    assert fastckpt.verify(tmp_path / "step").ok
    # The second checkpoint has the shortest possible header, so that nothing is aligned.
    data, begin = manifest.shard_bytes(tensors, pad_to=1)
    assert begin % 4096
    directory = tmp_path / "ragged"
    body = manifest.minimal(directory, tensors)
    shift = begin - body["shards"][0]["data_offset"]
    (directory / "model.safetensors").write_bytes(data)
    body["shards"][0].update(
        bytes=len(data),
        data_offset=begin,
        header_crc=manifest.digits(manifest.crc64(data[:begin])),
        crc=manifest.digits(manifest.crc64(data)),
    )
    for tensor in body["tensors"]:
        tensor["offset"] += shift
        parts = manifest.extents(tensor["offset"], length(tensor), 4096)
        tensor["crc"] = "".join(manifest.digits(manifest.crc64(data[a:b])) for a, b in parts)
    manifest.forge(directory, body)
    manifest.read(directory)
    for engine in ENGINES:
        assert same(fastckpt.load(directory, io=engine), arrays)
        assert fastckpt.verify(directory, io=engine).ok
    # In a mapping, these elements would not be aligned for the CPU, so they are copied.
    assert body["tensors"][0]["offset"] % 4
    mapped = fastckpt.load(directory, io=fastckpt.IO(mmap=True))
    assert same(mapped, arrays)
    assert all(array.flags.aligned for array in mapped.values())


def test_what_is_written_is_what_the_document_says(tmp_path):
    """The independent reader accepts our writer's files, which have several shards and blocks."""
    state = numbered(3, 6 << 20)
    fastckpt.save(state, tmp_path / "step", files=fastckpt.Files(shard_size=2 << 20), metadata={"step": 3})
    stored = manifest.read(tmp_path / "step")
    assert stored["model.big"].data == state["model"]["big"].tobytes()
    assert stored["model.rows"].data == state["model"]["rows"].tobytes()
    assert stored["model.small.0"].shape == (3,)
    assert stored["model.small.1"].shape == ()
    assert stored["model.small.2"].shape == (0, 4)
    body = manifest.read_manifest(tmp_path / "step")
    assert body["metadata"] == [["dict", 1], "step", 3]
    assert json.dumps(body["structure"]).startswith('[["dict", 5], "step", 3, "model", ["dict", 4], "big", ["array", ')
    for shard in {entry.shard for entry in stored.values()}:
        mine = [entry for entry in stored.values() if entry.shard == shard and entry.data]
        # Section 2.1: tensors of whole pages come first, so that each of these begins at the residue of the data.
        begin = next(each["data_offset"] for each in body["shards"] if each["file"] == shard)
        assert all((entry.offset - begin) % 4096 == 0 for entry in mine if len(entry.data) % 4096 == 0)
        for entry in mine:
            assert entry.offset % max(1, manifest.DTYPE_BITS[entry.dtype] // 8) == 0
    assert Path(tmp_path / "step").is_dir()


def test_what_is_no_checkpoint_is_found_at_once(tmp_path, monkeypatch):
    file, many = tmp_path / "file", tmp_path / "many"
    file.write_bytes(b"text")
    begin = time.perf_counter()
    with pytest.raises(fastckpt.exceptions.NotACheckpointError):
        fastckpt.load(file)
    # Only on a doubtful file system does a load retry, for two seconds.
    assert time.perf_counter() - begin < 1
    many.mkdir()
    for number in range(1500):
        (many / str(number)).touch()
    looks = []
    look = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: (looks.append(path), look(path))[1])
    with pytest.raises(fastckpt.exceptions.NotACheckpointError, match="it holds no"):
        fastckpt.load(many)
    assert len(looks) <= 1100
