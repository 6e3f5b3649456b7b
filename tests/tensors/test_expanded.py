"""Tensors and arrays that repeat a base: only the base is stored, and a load repeats it again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import CorruptCheckpointError, StructureMismatchError
from harness import manifest
from harness.same import same

SAVES = {
    "save": fastckpt.save,
    "async": lambda *arguments, **named: fastckpt.save_async(*arguments, **named).result(60),
    "lazy": lambda *arguments, **named: fastckpt.save_async(*arguments, io=fastckpt.IO(lazy=True), **named).result(60),
}


def expanded():
    torch.manual_seed(3)
    complexes = torch.randn(4, 1, dtype=torch.complex64)
    return {
        "vector": torch.randn(1).expand(1000),
        "columns": torch.randn(5, 1).expand(5, 3),
        "rows": torch.randn(3).expand(4, 3),
        "inside": torch.randn(2, 1, 3).expand(2, 7, 3),
        "strided": torch.randn(3, 8)[:, ::2].unsqueeze(1).expand(3, 2, 4),
        "conj": complexes.expand(4, 2).conj(),
        "neg": torch._neg_view(complexes.real.expand(4, 2)),
        "float8": torch.randn(1, 6).to(torch.float8_e4m3fn).expand(2, 6),
        "wide": torch.randn(1, 2, dtype=torch.complex128).expand(3, 2),
        "scalar": torch.tensor(2.5).expand(3),
        "grad": torch.randn(1).expand(3).requires_grad_(),
        "parameter": torch.nn.Parameter(torch.randn(1).expand(3)),
        "frozen": torch.nn.Parameter(torch.randn(1).expand(3), requires_grad=False),
        "nothing": torch.ones(0, 1).expand(0, 4),
    }


def restructure(path, tokens):
    """Replace the only value of the state by ``tokens``."""
    body = manifest.body_of(path)
    body["structure"][2:] = tokens
    manifest.forge(path, body)


def repeats(value):
    """The dimensions of stride 0, along which a tensor repeats its base."""
    return [
        step == 0 and value.numel() > 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True)
    ]


@pytest.mark.states("expanded tensor, broadcast array (stride 0)")
@pytest.mark.parametrize("way", SAVES)
@pytest.mark.parametrize("mmap", [False, True])
def test_expanded_tensors_come_back_expanded(tmp_path, way, mmap):
    state = expanded()
    SAVES[way](state, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c", io=fastckpt.IO(mmap=mmap))
    assert same(loaded, state)
    assert [type(value) for value in loaded.values()] == [type(value) for value in state.values()]
    assert [repeats(value) for value in loaded.values()] == [repeats(value) for value in state.values()]


def test_only_the_base_is_stored(tmp_path):
    fastckpt.save({"mask": torch.ones(1).expand(50_000_000), "bias": torch.ones(3).expand(9, 3)}, tmp_path / "c")
    with fastckpt.open(tmp_path / "c") as checkpoint:
        assert [(info.name, info.shape) for info in map(checkpoint.info, checkpoint)] == [
            ("mask", (1,)),
            ("bias", (1, 3)),
        ]
        assert checkpoint["mask"].shape == (1,)
        assert checkpoint.tensor("bias")[(0, slice(1, 2))].tolist() == [1.0]
        assert checkpoint.structure["mask"].kind == "expanded"
        assert checkpoint.structure["mask"].parts == (checkpoint.info("mask"),)
    assert sum(file.stat().st_size for file in (tmp_path / "c").iterdir()) < 10_000


def test_expansions_of_one_base_are_tied(tmp_path):
    base = torch.randn(3, 1)
    strided = torch.randn(3, 2)[:, :1]
    other = np.arange(3.0).reshape(3, 1)
    state = {
        "wide": base.expand(3, 5),
        "base": base,
        "narrow": torch.nn.Parameter(base.expand(3, 2)),
        "strided": strided,
        "strided wide": strided.expand(3, 4),
        "other": other,
        "other wide": np.broadcast_to(other, (3, 4)),
    }
    assert fastckpt.save(state, tmp_path / "c").tensors == 3
    loaded = fastckpt.load(tmp_path / "c")
    assert loaded["wide"].data_ptr() == loaded["base"].data_ptr() == loaded["narrow"].data_ptr()
    assert loaded["strided"].data_ptr() == loaded["strided wide"].data_ptr()
    assert np.shares_memory(loaded["other"], loaded["other wide"])
    # Every place in the state has its own name.
    assert list(fastckpt.load(tmp_path / "c", keys="narrow")) == ["narrow"]
    assert list(fastckpt.load(tmp_path / "c", keys="*wide")) == ["wide", "strided wide", "other wide"]


def test_other_overlapping_strides_are_written_whole(trip):
    windows = torch.arange(6.0).as_strided((4, 3), (1, 1))
    loaded = trip({"windows": windows})["windows"]
    assert torch.equal(loaded, windows)
    assert loaded.is_contiguous()


def test_broadcast_arrays(trip):
    state = {"rows": np.broadcast_to(np.arange(3), (4, 3)), "big-endian": np.broadcast_to(np.array(7, ">i2"), (2, 5))}
    loaded = trip(state)
    assert same(loaded, state)
    for name, value in loaded.items():
        assert value.strides == state[name].strides
        assert not value.flags.writeable
    as_tensors = trip(state, framework="torch")
    assert as_tensors["rows"].stride() == (0, 1)
    assert as_tensors["big-endian"].tolist() == [[7] * 5] * 2


def test_numpy_gets_a_broadcast_view(trip):
    loaded = trip({"mask": torch.nn.Parameter(torch.ones(2, 1).expand(2, 9))}, framework="numpy")["mask"]
    assert (loaded.shape, loaded.strides, loaded.flags.writeable) == ((2, 9), (4, 0), False)
    assert (loaded == 1).all()


def test_parts_of_sparse_tensors_that_are_expanded_are_stored_in_full(tmp_path):
    def sparse(values):
        return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (4, 3), check_invariants=True)

    state = {
        "first": torch.ones(1).expand(2),
        "sparse": sparse(torch.full((1, 1), 3.0).expand(2, 3)),
        "last": torch.ones(1).expand(4),
    }
    fastckpt.save(state, tmp_path / "c")
    assert fastckpt.open(tmp_path / "c").info("sparse.values").shape == (2, 3)
    assert same(fastckpt.load(tmp_path / "c"), state)
    into = {"first": torch.zeros(1).expand(2), "sparse": sparse(torch.zeros(2, 3)), "last": torch.zeros(1).expand(4)}
    loaded = fastckpt.load(tmp_path / "c", into=into)
    assert all(loaded[name] is into[name] for name in into)
    assert same(into, state)


def test_into_fills_the_base(tmp_path):
    state = {
        "columns": torch.randn(5, 1).expand(5, 3),
        "parameter": torch.nn.Parameter(torch.randn(2).expand(4, 2)),
        "array": np.broadcast_to(np.arange(3), (4, 3)),
    }
    fastckpt.save(state, tmp_path / "c")
    base = np.zeros(3, np.int64)
    into = {
        "columns": torch.zeros(5, 1).expand(5, 3),
        "parameter": torch.nn.Parameter(torch.zeros(2).expand(4, 2)),
        "array": np.lib.stride_tricks.as_strided(base, (4, 3), (0, 8)),
    }
    loaded = fastckpt.load(tmp_path / "c", into=into)
    assert all(loaded[name] is into[name] for name in into)
    assert same(into, state)
    assert base.tolist() == [0, 1, 2]
    assert into["columns"]._version == 1


@pytest.mark.parametrize(
    ("into", "difference"),
    [
        (torch.zeros(4, 7), "['v']: expanded to the shape [4, 7] in the checkpoint, not in into="),
        (torch.zeros(4, 1), "['v']: expanded to the shape [4, 7] in the checkpoint, not in into="),
        (torch.zeros(4, 1).expand(4, 9), "['v']: shape [4, 7] in the checkpoint, [4, 9] in into=, both expanded"),
        (torch.zeros(1, 7).expand(4, 7), "['v']: shape [4, 1] in the checkpoint, [1, 7] in into="),
        (np.lib.stride_tricks.as_strided(np.zeros(4), (4, 7), (8, 0)), "['v']: a torch tensor in the checkpoint"),
        (torch.ones(2).to_sparse(), "['v']: expanded to the shape [4, 7] in the checkpoint, not in into="),
    ],
)
def test_into_that_does_not_fit(tmp_path, into, difference):
    fastckpt.save({"v": torch.ones(4, 1).expand(4, 7)}, tmp_path / "c")
    with pytest.raises(StructureMismatchError) as caught:
        fastckpt.load(tmp_path / "c", into={"v": into})
    assert caught.value.differences[0].startswith(difference)


def test_a_dense_tensor_does_not_fit_one_that_is_expanded(tmp_path):
    fastckpt.save({"v": torch.ones(1)}, tmp_path / "c")
    with pytest.raises(StructureMismatchError, match="expanded in into=, not in the checkpoint"):
        fastckpt.load(tmp_path / "c", into={"v": torch.zeros(1).expand(5)})
    indices = torch.tensor([[0, 1]])
    fastckpt.save({"v": torch.sparse_coo_tensor(indices, torch.ones(2), (3,))}, tmp_path / "c")
    into = {"v": torch.sparse_coo_tensor(indices, torch.zeros(1).expand(2), (3,))}
    with pytest.raises(StructureMismatchError, match=r"\['v'\]\.values: expanded in into=.*: give a contiguous copy"):
        fastckpt.load(tmp_path / "c", into=into)


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize(
    "sizes",
    [[-1], [0], [2**63], [2**62], [2**62, 4], [2, 3], [], [2.0], [True], "5", None, [[5]]],
    ids=str,
)
def test_hostile_sizes(tmp_path, framework, sizes):
    fastckpt.save({"v": torch.ones(1, dtype=torch.float64).expand(5)}, tmp_path / "c")
    restructure(tmp_path / "c", [["expanded", sizes, ""], ["tensor", 0]])
    with pytest.raises(CorruptCheckpointError):
        fastckpt.load(tmp_path / "c", framework=framework)


def test_sizes_need_no_memory(tmp_path):
    fastckpt.save({"v": torch.ones(1, dtype=torch.uint8).expand(2**62)}, tmp_path / "c")
    assert fastckpt.load(tmp_path / "c")["v"].shape == (2**62,)
    assert fastckpt.load(tmp_path / "c", framework="numpy")["v"].shape == (2**62,)


@pytest.mark.parametrize(
    "tokens",
    [
        [["expanded", [5], "x"], ["tensor", 0]],
        [["expanded", [5], "g"], ["array", 0]],
        [["expanded", [5], ""], ["expanded", [5], ""], ["tensor", 0]],
        [["expanded", [5], ""], None],
        [["expanded", [5], ""], ["bytes", 0, "tensor"]],
        [["expanded", [5], ""]],
        [["expanded", [5]], ["tensor", 0]],
        [["expanded", [5], "", ""], ["tensor", 0]],
        [["coo", [5], False, ""], ["expanded", [5], ""], ["array", 0], ["tensor", 0]],
        [["tensor", 0, "g", "cpu", ""]],
        [["tensor", 0, "x", "cuda:0"]],
        [["tensor", 0, "", None]],
        [["tensor", 0, []]],
    ],
    ids=str,
)
def test_hostile_tokens(tmp_path, tokens):
    fastckpt.save({"v": torch.ones(1, dtype=torch.uint8)}, tmp_path / "c")
    restructure(tmp_path / "c", tokens)
    with pytest.raises(CorruptCheckpointError):
        fastckpt.load(tmp_path / "c")
