"""The contents of a checkpoint: names, structure, metadata, single tensors and parts of them."""

from __future__ import annotations

import collections.abc
import contextlib
import datetime as dt
import enum
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

import fastckpt
from fastckpt import CorruptCheckpointError
from fastckpt.exceptions import UnsupportedTypeError
from harness import manifest
from harness.same import bits, same


@pytest.fixture(params=["uring", "threads", "buffered"])
def engines(request, monkeypatch):
    """``ckpt[...]`` and ``slice`` take no ``io=``, so the environment chooses the engine."""
    monkeypatch.setenv("FASTCKPT_IO", request.param)


@pytest.fixture
def path(tmp_path):
    w = torch.arange(24.0).reshape(2, 3, 4)
    state = {
        "w": w,
        "tied": w,
        "p": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "c": torch.arange(4).to(torch.complex128),
        "n": np.arange(10, dtype=">i4"),
        "blob": b"q" * 5000,
        "size": torch.Size([1, 2]),
        "list": [1, (None, np.array(5))],
        "sparse": torch.eye(2).to_sparse(),
    }
    fastckpt.save(state, tmp_path / "c", metadata={"step": 7, "when": dt.date(2024, 1, 1), 1: (2.5, None)})
    return tmp_path / "c"


def test_names_and_infos(path):
    with fastckpt.open(path) as checkpoint:
        names = ["w", "p", "c", "n", "blob", "list.1.1", "sparse.indices", "sparse.values"]
        assert list(checkpoint.keys()) == list(checkpoint) == names
        assert len(checkpoint) == 8
        assert "w" in checkpoint
        assert "tied" in checkpoint
        assert checkpoint.info("tied") is checkpoint.info("w")
        assert 5 not in checkpoint
        assert checkpoint.path == str(path)
        assert str(path) in repr(checkpoint)
        info = checkpoint.info("w")
        assert info == fastckpt.types.TensorInfo(
            name="w", dtype="float32", shape=(2, 3, 4), bytes=96, shard="model.safetensors", kind="tensor"
        )
        seen = {name: (i.dtype, i.shape, i.bytes, i.kind) for name in names for i in [checkpoint.info(name)]}
    assert seen["p"] == ("bfloat16", (3,), 6, "tensor")
    assert seen["c"] == ("complex128", (4,), 64, "tensor")
    assert seen["n"] == (">i4", (10,), 40, "array")
    assert seen["blob"] == ("uint8", (5000,), 5000, "bytes")


def test_metadata(path, tmp_path):
    with fastckpt.open(path) as checkpoint:
        assert same(checkpoint.metadata, {"step": 7, "when": dt.date(2024, 1, 1), 1: (2.5, None)})
        checkpoint.metadata["step"] = 8
        assert checkpoint.metadata["step"] == 7
    fastckpt.save(1, tmp_path / "none")
    assert fastckpt.open(tmp_path / "none").metadata is None
    fastckpt.save(1, tmp_path / "torch", metadata=[torch.float16, torch.Size([2])])
    assert fastckpt.open(tmp_path / "torch").metadata == [torch.float16, torch.Size([2])]


@pytest.mark.parametrize("value", [torch.ones(1), np.ones(1), b"x" * 5000, torch.eye(2).to_sparse()], ids=type)
def test_metadata_holds_no_tensors(value, tmp_path):
    with pytest.raises(
        UnsupportedTypeError, match=r"save: metadata: cannot store \['x'\].*metadata cannot hold tensors"
    ):
        fastckpt.save(1, tmp_path / "c", metadata={"x": value})
    assert not list(tmp_path.iterdir())


class Colour(enum.Enum):
    RED = 1


def test_structure(path, tmp_path, registry, undeclare):
    checkpoint = fastckpt.open(path)
    structure = checkpoint.structure
    assert structure["w"] is structure["tied"] is checkpoint.info("w")
    assert structure["size"] == (1, 2)
    assert structure["list"] == [1, (None, checkpoint.info("list.1.1"))]
    assert structure["sparse"].kind == "coo"
    assert structure["sparse"].parts == (checkpoint.info("sparse.indices"), checkpoint.info("sparse.values"))
    registry(Colour, lambda c: c.value, Colour, "colour")
    fastckpt.save({Colour.RED: torch.nn.Linear(1, 1).state_dict()}, tmp_path / "r", metadata=Colour.RED)
    undeclare()
    stranger = fastckpt.open(tmp_path / "r")
    ((key, value),) = stranger.structure.items()
    assert (key.kind, key.about, key.parts) == ("type", ("colour",), (1,))
    assert type(value) is collections.OrderedDict
    assert next(iter(stranger)).endswith(".weight")
    with pytest.warns(RuntimeWarning, match="open: metadata.*colour"):
        assert stranger.metadata == 1


@pytest.mark.usefixtures("engines")
def test_one_tensor(path):
    with fastckpt.open(path) as checkpoint:
        assert torch.equal(checkpoint["w"], torch.arange(24.0).reshape(2, 3, 4))
        assert type(checkpoint["p"]) is torch.nn.Parameter
        assert torch.equal(checkpoint["c"], torch.arange(4).to(torch.complex128))
        assert checkpoint["n"].dtype == ">i4"
        assert checkpoint["blob"] == b"q" * 5000
        assert torch.equal(checkpoint["sparse.values"], torch.ones(2))
        with pytest.raises(KeyError, match=r"no tensor 'sparse.value'; similar: 'sparse.values'"):
            checkpoint["sparse.value"]
        with pytest.raises(KeyError):
            checkpoint.info("nothing")


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(None),
        slice(1, 2),
        slice(None, None, -1),
        slice(5, 1),
        (),
        ...,
        (0, 1),
        (0, 1, 2),
        (1, ..., 0),
        (..., -1),
        (slice(None), 2),
        (slice(None, None, -1), slice(2, None, -2), slice(1, 4, 2)),
        (1, slice(0, 0)),
        slice(None, None, -(2**70)),
        np.int64(1),
    ],
    ids=repr,
)
@pytest.mark.usefixtures("engines")
def test_slice(path, index):
    expected = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)[index]
    with fastckpt.open(path) as checkpoint:
        part = checkpoint.tensor("w")[index]
    assert isinstance(part, torch.Tensor)
    assert part.is_contiguous()
    assert tuple(part.shape) == expected.shape
    assert part.numpy().tobytes() == expected.tobytes()


@pytest.mark.usefixtures("engines")
def test_slice_of_other_kinds(path):
    with fastckpt.open(path) as checkpoint:
        assert (checkpoint.tensor("n")[slice(-3, None)] == [7, 8, 9]).all()
        assert checkpoint.tensor("n")[3].shape == ()
        assert checkpoint.tensor("c")[slice(2, 0, -1)].tolist() == [2, 1]
        assert bits(checkpoint.tensor("p")[slice(1, 3)]) == bits(torch.ones(2, dtype=torch.bfloat16))
        assert checkpoint.tensor("blob")[slice(0, 3)].tobytes() == b"qqq"
        assert checkpoint.tensor("list.1.1")[()] == 5


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (2, IndexError),
        ((0, 0, 0, 0), IndexError),
        ((..., ...), IndexError),
        ((0, 0, -5), IndexError),
        (None, TypeError),
        (True, TypeError),
        ([0, 1], TypeError),
        ("0", TypeError),
        (1.0, TypeError),
        (slice(None, None, 0), ValueError),
        (np.array([True, False]), TypeError),
    ],
    ids=repr,
)
def test_bad_index(path, index, error):
    with fastckpt.open(path) as checkpoint, pytest.raises(error):
        checkpoint.tensor("w")[index]


@pytest.mark.usefixtures("engines")
def test_damage_is_found_beside_what_a_slice_takes(tmp_path):
    """Damage is found even in the unwanted half of a block, and nowhere else."""
    w = np.arange(3_000_000).reshape(3000, 1000)  # 24 MB: six blocks
    fastckpt.save({"w": w}, tmp_path / "c")
    offset = manifest.body_of(tmp_path / "c")["tensors"][0]["offset"]
    file = tmp_path / "c" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[offset + 9_500_000] ^= 1  # in block 2; row 1200 is in its other half
    file.write_bytes(content)
    with fastckpt.open(tmp_path / "c") as checkpoint:
        assert 2 == (offset + 9_500_000) >> 22 == (offset + 1200 * 8000) >> 22
        for index in [slice(1200, 1201), (slice(1200, 1202), slice(3, 9)), (slice(None, None, 600), 0)]:
            with pytest.raises(CorruptCheckpointError, match="bytes 8388608 to 12582912"):
                checkpoint.tensor("w")[index]
        for index in [slice(0, 1000), slice(1600, 3000), (slice(None, None, 2000), 5)]:
            assert (checkpoint.tensor("w")[index] == w[index]).all()


@pytest.mark.usefixtures("engines")
def test_slice_of_a_large_tensor(tmp_path):
    w = torch.arange(3_000_000).reshape(3000, 1000)
    big = torch.arange(20 * 40_000).reshape(20, 40_000)
    fastckpt.save({"w": w, "big": big}, tmp_path / "c", files=fastckpt.Files(shard_size=1))
    with fastckpt.open(tmp_path / "c") as checkpoint:
        assert torch.equal(checkpoint.tensor("w")[slice(1500, 1503)], w[1500:1503])
        assert torch.equal(checkpoint.tensor("w")[(slice(2999, None), 5)], w[2999:, 5])
        assert torch.equal(checkpoint.tensor("big")[slice(19, 2, -7)], big[[19, 12, 5]])


def test_every_name_of_a_tied_tensor_finds_it(tmp_path):
    w, b = torch.arange(3.0), torch.ones(2)
    state = {
        "model": {"embed": w, ("t", 1): [b, {2**60: w}], "é\ud800": w, "a.b": b, "a": {"b": w}},
        "": w,
        frozenset({1}): {"x": w},
    }
    fastckpt.save(state, tmp_path / "c")
    names = {"model.('t', 1).1.1152921504606846976": w, "model.é?": w, "model.a.b": b, "": w}
    with fastckpt.open(tmp_path / "c") as checkpoint:
        assert list(checkpoint) == ["model.embed", "model.('t', 1).0"]
        for name, tensor in names.items():
            assert name in checkpoint
            assert torch.equal(checkpoint[name], tensor)
            assert torch.equal(checkpoint.tensor(name)[slice(1, None)], tensor[1:])
            assert checkpoint.info(name).name in list(checkpoint)
        assert "frozenset.x" not in checkpoint


def test_a_checkpoint_is_a_mapping_of_its_tensors(path):
    with fastckpt.open(path) as checkpoint, fastckpt.open(path) as other:
        assert isinstance(checkpoint, collections.abc.Mapping)
        assert [name for name, _ in checkpoint.items()] == list(checkpoint.keys()) == list(checkpoint)
        assert same(checkpoint.get("w"), checkpoint["w"])
        assert checkpoint.get("nothing", 5) == 5
        assert checkpoint == checkpoint
        assert checkpoint != other
        assert len({checkpoint, other}) == 2
        handle = checkpoint.tensor("w")
        assert (handle.shape, handle.dtype, handle.info.name) == ((2, 3, 4), "float32", "w")
        assert "'w': float32 [2, 3, 4]" in repr(handle)
        with pytest.raises(KeyError, match="no tensor 'nothing'"):
            checkpoint.tensor("nothing")


def test_a_container_is_no_tensor_and_its_tensors_are_named(tmp_path):
    fastckpt.save({"model": {"a": torch.ones(2)}, "n": 1}, tmp_path / "c")
    message = r"'model' is not a tensor, but holds 'model\.a': load\(\.\.\., keys='model'\)"
    with fastckpt.open(tmp_path / "c") as checkpoint, pytest.raises(KeyError, match=message):
        checkpoint["model"]


def test_closed(path):
    checkpoint = fastckpt.open(path)
    checkpoint.close()
    checkpoint.close()
    assert list(checkpoint)
    assert checkpoint.info("w").shape == (2, 3, 4)
    assert checkpoint.structure["w"] is checkpoint.info("w")
    assert checkpoint.metadata["step"] == 7
    for use in (
        lambda: checkpoint["w"],
        lambda: checkpoint.tensor("w")[0],
        checkpoint.__enter__,
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_open_of_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        fastckpt.open(tmp_path / "nothing")


def test_verify(path):
    report = fastckpt.verify(path)
    assert report.ok
    assert str(report).endswith("no damage")
    shard = path / "model.safetensors"
    data = bytearray(shard.read_bytes())
    at = data.index(b"q" * 5000) + 100
    data[at] ^= 255
    shard.write_bytes(data)
    report = fastckpt.verify(path, io=fastckpt.IO(threads=1))
    assert not report.ok
    assert {damage.tensor for damage in report.damage} == {"blob"}
    assert all(d.file == "model.safetensors" and d.offset <= at < d.offset + d.length for d in report.damage)
    assert "blob" in str(report)


def shard_descriptors(of="self"):
    """The paths of the shards that a process has open."""
    names = []
    for entry in Path(f"/proc/{of}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor with which listdir read the directory
            names.append(str(entry.readlink()))
    return [name for name in names if "safetensors" in name]


def old_and_new(tmp_path, number):
    """An open checkpoint of ``number`` shards, and its state."""
    state = {f"t{index}": np.full(2000, index, np.int32) for index in range(number)}
    fastckpt.save(state, tmp_path / "c", files=fastckpt.Files(shard_size=8000))
    return fastckpt.open(tmp_path / "c"), state


@pytest.mark.parametrize("how", ["replaced", "removed", "replaced twice"])
@pytest.mark.usefixtures("engines")
def test_an_open_checkpoint_stays_readable(tmp_path, how):
    checkpoint, state = old_and_new(tmp_path, 64)
    with checkpoint:
        if how == "removed":
            shutil.rmtree(tmp_path / "c")
        for _ in range(how.count("replaced") + how.count("twice")):
            fastckpt.save({"t0": np.zeros(3)}, tmp_path / "c")
        for name, array in state.items():
            assert (checkpoint[name] == array).all()
            assert (checkpoint.tensor(name)[slice(None, None, -3)] == array[::-3]).all()
        assert checkpoint.report.bytes == 667 * 4


def test_a_checkpoint_of_many_shards_keeps_none_open(tmp_path):
    checkpoint, _ = old_and_new(tmp_path, 65)
    with checkpoint:
        assert not shard_descriptors()
        assert checkpoint["t64"][0] == 64
        fastckpt.save({"t0": np.zeros(3)}, tmp_path / "c")
        with pytest.raises(fastckpt.exceptions.ReplacedCheckpointError):
            checkpoint["t64"]


@pytest.mark.parametrize("how", ["close", "with", "dropped"])
def test_an_open_checkpoint_leaves_no_descriptors(tmp_path, how):
    checkpoint, _ = old_and_new(tmp_path, 5)
    assert len(shard_descriptors()) == 5
    checkpoint["t3"]
    if how == "close":
        checkpoint.close()
    elif how == "with":
        with checkpoint:
            pass
    else:
        del checkpoint
    assert not shard_descriptors()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_forked_child_opens_its_own_shards(tmp_path, replaced):
    """Inherited descriptors would keep disk space in use for as long as the child lives."""
    checkpoint, state = old_and_new(tmp_path, 5)
    if replaced:
        fastckpt.save({"t0": np.zeros(3)}, tmp_path / "c")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert not shard_descriptors()
            found = all((checkpoint[name] == array).all() for name, array in state.items())
            code = 0 if found and not replaced else 1
        except fastckpt.exceptions.ReplacedCheckpointError:
            code = 0 if replaced else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all((checkpoint[name] == array).all() for name, array in state.items())


def test_without_a_descriptor_to_spare_a_checkpoint_opens_all_the_same(tmp_path):
    old_and_new(tmp_path, 40)[0].close()
    code = """
import resource, os, sys
import fastckpt
import numpy
limit = max(map(int, os.listdir("/proc/self/fd"))) + 12
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
with fastckpt.open(sys.argv[1]) as checkpoint:
    held = len(os.listdir("/proc/self/fd"))
print(held)
"""
    ran = subprocess.run([sys.executable, "-c", code, tmp_path / "c"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


BOXES = {
    "scalar": np.array(7.5),
    "vector": np.arange(1000, dtype=np.uint16),
    "swapped": np.arange(300 * 5).reshape(300, 5).astype(">i4"),
    "odd": np.arange(37 * 5 * 7 * 3, dtype=np.uint8).reshape(37, 5, 7, 3),
    "text": np.array([[f"{i}{j}" for j in range(9)] for i in range(30)]),
    # The cube covers several blocks.
    "cube": np.arange(60 * 70 * 1000, dtype=np.int32).reshape(60, 70, 1000),
    "wide": np.arange(9 << 20, dtype=np.uint8).reshape(9, 1 << 20),
    "empty": np.zeros((3, 0, 2)),
}


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    path = tmp_path_factory.mktemp("boxes") / "c"
    fastckpt.save(BOXES, path)
    with fastckpt.open(path) as checkpoint:
        yield checkpoint


@given(data=st.data(), name=st.sampled_from(sorted(BOXES)))
@settings(max_examples=300, deadline=None)
def test_slices_are_those_of_numpy(boxes, data, name):
    array = BOXES[name]
    index = data.draw(basic_indices(array.shape, allow_newaxis=False))
    part = boxes.tensor(name)[index]
    assert part.dtype == array.dtype
    assert part.shape == array[index].shape
    assert (part == array[index]).all()
    assert boxes.report.bytes == part.nbytes
