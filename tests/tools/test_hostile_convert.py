"""``fastckpt import``, ``export`` and malicious input: no files, shared memory, and pickles that make many objects."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from harness import needs

try:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save
except ImportError as error:
    needs.missing(str(error))


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def hugging_face(shard=None, index=None):
    def make(path):
        path.mkdir()
        if index is None:
            (path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
        else:
            index(path / "model.safetensors.index.json")
        if shard is not None:
            shard(path / "a.safetensors")

    return make


def long_index(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def one_shard(spoil):
    def make(path):
        path.mkdir()
        spoil(path / "model.safetensors")

    return make


NO_FILES = {
    "fifo.pt": fifo,
    "fifo.bin": fifo,
    "fifo.safetensors": fifo,
    "device.pt": device,
    "device.safetensors": device,
    "fifo in a directory": one_shard(fifo),
    "device in a directory": one_shard(device),
    "fifo as a shard": hugging_face(shard=fifo),
    "device as a shard": hugging_face(shard=device),
    "fifo as an index": hugging_face(index=fifo),
    "device as an index": hugging_face(index=device),
}


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_not_a_file_is_refused(tmp_path, import_, name):
    NO_FILES[name](tmp_path / name)
    done = import_(tmp_path / name, tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert "not a regular file" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_index_without_end_is_not_read(tmp_path, import_):
    hugging_face(index=long_index)(tmp_path / "model")
    done = import_(tmp_path / "model", tmp_path / "out")
    assert done.returncode == 2
    assert "is not an index" in done.stderr


@pytest.fixture
def fp4():
    if not hasattr(torch, "float4_e2m1fn_x2"):
        needs.missing("torch.float4_e2m1fn_x2")
    return torch.arange(128, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


def test_fp4_has_the_header_that_the_library_gives_it(tmp_path, export, fp4):
    """One element in torch is two values in the format, so the last dimension doubles."""
    shapes = [(128,), (8, 16), (2, 4, 16), (1, 128, 1), (0, 3), (3, 0)]
    state = {str(shape): (fp4 if 0 not in shape else fp4[:0]).reshape(shape) for shape in shapes}
    state["w"] = torch.ones(3)
    fastckpt.save(state, tmp_path / "c")
    done = export(tmp_path / "c", tmp_path / "m.safetensors")
    assert done.returncode == 0, done
    (tmp_path / "library.safetensors").write_bytes(save({name: tensor.clone() for name, tensor in state.items()}))
    back = load_file(tmp_path / "m.safetensors")
    with (
        safe_open(tmp_path / "m.safetensors", framework="pt") as ours,
        safe_open(tmp_path / "library.safetensors", framework="pt") as theirs,
    ):
        assert set(ours.keys()) == set(theirs.keys())
        for name, tensor in state.items():
            mine, its = ours.get_slice(name), theirs.get_slice(name)
            assert (mine.get_dtype(), mine.get_shape()) == (its.get_dtype(), its.get_shape())
            assert back[name].shape == tensor.shape
            assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8))


def test_fp4_without_dimensions_is_refused(tmp_path, export, fp4):
    """The tensor has two values in the format, but no dimension for them; the library also refuses it."""
    fastckpt.save({"w": fp4[0]}, tmp_path / "c")
    done = export(tmp_path / "c", tmp_path / "m.safetensors")
    assert done.returncode == 2, done
    assert "['w'] is a tensor of torch.float4_e2m1fn_x2 without dimensions" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["c"]  # noqa: PTH208 - names


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused(tmp_path, export, layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    fastckpt.save({"w": nested}, tmp_path / "c")
    done = export(tmp_path / "c", tmp_path / "m.safetensors")
    assert done.returncode == 2, done
    assert "['w'] is a " in done.stderr
    assert "which a safetensors file cannot hold" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["c"]  # noqa: PTH208 - names


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path, export):
    fastckpt.save({"w": np.zeros(4), "x": "text"}, tmp_path / "c")
    assert export(tmp_path / "c", tmp_path / "m.safetensors").returncode == 2
    assert sorted(os.listdir(tmp_path)) == ["c"]  # noqa: PTH208 - names
    assert Path(tmp_path / "c").is_dir()
