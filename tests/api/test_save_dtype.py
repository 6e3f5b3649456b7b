"""``dtype=`` of a save casts tensors on the way, for a release."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt.exceptions import UnsupportedTypeError
from harness import limits
from harness.same import bits, same


def save(state, path, **options):
    return fastckpt.save(state, path, **options)


def save_async(state, path, **options):
    return fastckpt.save_async(state, path, **options).result(60)


def save_lazily(state, path, **options):
    return fastckpt.save_async(state, path, io=fastckpt.IO(lazy=True), **options).result(60)


@pytest.fixture(params=[save, save_async, save_lazily, fastckpt.distributed.save])
def way(request):
    return request.param


def training():
    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


def cast(values, dtype):
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in values.items()}


def test_the_model_alone_is_cast(tmp_path, way):
    state = training()
    report = way(state, tmp_path / "c", dtype={"model": "bfloat16"})
    loaded = fastckpt.load(tmp_path / "c")
    expected = cast(state["model"], torch.bfloat16)
    assert same(dict(loaded["model"]), expected)
    assert same(loaded["optimizer"], state["optimizer"])
    assert not report.warnings
    assert fastckpt.verify(tmp_path / "c").ok


def test_the_checkpoint_is_that_of_a_state_of_this_dtype(tmp_path, way):
    state = {"model": {"w": torch.randn(300, 301), "t": torch.randn(40, 50).t(), "n": torch.arange(3)}}
    way(state, tmp_path / "c", dtype=torch.float16)
    state["model"] = {name: value.contiguous() for name, value in cast(state["model"], torch.float16).items()}
    fastckpt.save(state, tmp_path / "d")
    name = "model.safetensors"
    assert (tmp_path / "c" / name).read_bytes() == (tmp_path / "d" / name).read_bytes()
    with fastckpt.open(tmp_path / "c") as one, fastckpt.open(tmp_path / "d") as other:
        assert [one.info(name) for name in one] == [other.info(name) for name in other]


@pytest.mark.parametrize("target", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
def test_each_dtype_becomes_each_other_as_torch_makes_it(tmp_path, source, target):
    source, target = getattr(torch, source), getattr(torch, target)
    special = torch.tensor([0.0, -0.0, 1.0, 3e-8, math.nan, math.inf, -math.inf])
    values = torch.cat((special, torch.randn(limits.of("cast out at a time") + 1))).to(source)
    state = {
        "whole": values,
        "columns": torch.randn(33, 17).to(source).t(),
        "scalar": torch.tensor(1.5, dtype=source),
        "none": torch.empty(0, 3, dtype=source),
    }
    if source.itemsize > 1:
        state["negative"] = torch._neg_view(torch.randn(9).to(source))
    fastckpt.save(state, tmp_path / "c", dtype=target)
    loaded = fastckpt.load(tmp_path / "c")
    for name, value in state.items():
        assert loaded[name].dtype is target
        assert bits(loaded[name]) == bits(value.resolve_neg().to(target).contiguous())


def test_arrays_are_cast_to_what_numpy_has(tmp_path):
    array = np.linspace(-1, 1, 70_001)
    state = {"a": array, "columns": array[:1000].reshape(10, 100).T, "swapped": array.astype(">f4"), "n": np.arange(3)}
    fastckpt.save(state, tmp_path / "c", dtype=np.float16)
    assert same(
        fastckpt.load(tmp_path / "c"),
        {name: value if name == "n" else np.ascontiguousarray(value.astype("f2")) for name, value in state.items()},
    )
    with pytest.raises(UnsupportedTypeError, match="save: tensor 'a' cannot be cast to bfloat16, which numpy does not"):
        fastckpt.save(state, tmp_path / "c", dtype="bfloat16")


def test_the_first_pattern_decides_and_none_is_what_there_is(tmp_path):
    state = {"a": torch.ones(2), "norm": {"w": torch.ones(2)}, "b": torch.ones(2, dtype=torch.float64)}
    fastckpt.save(state, tmp_path / "c", dtype={"norm.*": None, "b": "torch.float16", "*": torch.bfloat16})
    loaded = fastckpt.load(tmp_path / "c")
    assert (loaded["a"].dtype, loaded["norm"]["w"].dtype, loaded["b"].dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float16,
    )


def test_a_function_decides(tmp_path):
    seen = {}

    def choose(info):
        seen[info.name] = (info.dtype, info.shape, info.bytes, info.kind, info.device, info.shard)
        return "float16" if info.shape == (2,) else None

    fastckpt.save({"a": torch.ones(2), "b": np.ones(3, ">f8")}, tmp_path / "c", dtype=choose)
    assert seen == {"a": ("float32", (2,), 8, "tensor", "cpu", ""), "b": (">f8", (3,), 24, "array", "cpu", "")}
    assert same(fastckpt.load(tmp_path / "c"), {"a": torch.ones(2).half(), "b": np.ones(3, ">f8")})


def test_integers_are_cast_only_where_their_name_is_given(tmp_path):
    state = {"m": {"n": torch.arange(5), "f": torch.tensor([True, False]), "b": b"x" * 5000, "w": torch.ones(2)}}
    fastckpt.save(state, tmp_path / "c", dtype={"m": "float16"})
    assert same(fastckpt.load(tmp_path / "c")["m"], {**state["m"], "w": torch.ones(2).half()})
    names = ("m.n", "m.f", "m.b")
    fastckpt.save(state, tmp_path / "c", dtype={"m": "float16", **dict.fromkeys(names, "float32")})
    assert same(
        fastckpt.load(tmp_path / "c")["m"],
        {"n": torch.arange(5).float(), "f": torch.tensor([1.0, 0.0]), "b": b"x" * 5000, "w": torch.ones(2).half()},
    )


def test_what_belongs_to_another_tensor_stays(tmp_path):
    state = {
        "q": torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "s": torch.eye(3).to_sparse(),
        "step": torch.tensor(3.0),
    }
    fastckpt.save(state, tmp_path / "c", dtype="float16")
    loaded = fastckpt.load(tmp_path / "c")
    assert loaded["q"].equal(state["q"])
    assert loaded["s"].dtype is torch.float16
    assert torch.equal(loaded["s"].to_dense(), torch.eye(3).half())
    assert loaded["step"].dtype is torch.float32
    fastckpt.save(state, tmp_path / "c", dtype={"s.indices": "float16", "*": None})
    assert same(fastckpt.load(tmp_path / "c", keys="s")["s"].indices(), state["s"].coalesce().indices())


@pytest.mark.parametrize("shape", [(7,), (300, 301)])
def test_tied_tensors_stay_tied(tmp_path, way, shape):
    parameter = torch.nn.Parameter(torch.randn(shape))
    state = {"model": {"a": parameter, "b": parameter, "row": parameter.detach()[0]}, "ema": {"a": parameter}}
    way(state, tmp_path / "c", dtype={"ema": "float64", "model": "float16"})
    loaded = fastckpt.load(tmp_path / "c")
    assert loaded["model"]["a"] is loaded["model"]["b"] is loaded["ema"]["a"]
    assert type(loaded["model"]["a"]) is torch.nn.Parameter
    assert loaded["model"]["a"].dtype is torch.float64
    assert loaded["model"]["row"].dtype is torch.float16


@pytest.mark.parametrize("io", ["uring", "threads", "buffered"])
@pytest.mark.parametrize("block", [4096, 12_288])
def test_elements_that_blocks_cut(tmp_path, monkeypatch, io, block):
    """Tensors of odd sizes precede the cast tensors, so that blocks end within elements."""
    monkeypatch.setenv("FASTCKPT_BLOCK_SIZE", str(block))
    state = {f"{n}": torch.randn(n) for n in (1, 1023, 5001, 70_003)} | {"odd": torch.ones(4097, dtype=torch.uint8)}
    fastckpt.save(state, tmp_path / "c", dtype={"1": "float8_e5m2", "*3": "bfloat16", "*": "float64"}, io=io)
    loaded = fastckpt.load(tmp_path / "c")
    dtypes = {"1": torch.float8_e5m2, "1023": torch.bfloat16, "5001": torch.float64, "70003": torch.bfloat16}
    assert same(loaded, {name: value.to(dtypes.get(name, value.dtype)) for name, value in state.items()})


# Losses of a cast.


@pytest.mark.parametrize(
    ("value", "dtype", "lost"),
    [
        (torch.tensor([1.0, 65504.0, -65504.0, math.nan, math.inf, -math.inf]), "float16", False),
        (torch.tensor([1.0, 65505.0]), "float16", True),
        (torch.tensor([1.0, -1e6, math.nan]), "float16", True),
        (torch.tensor([3.4e38]), "bfloat16", True),
        (torch.tensor([3.3e38]), "bfloat16", False),
        (torch.tensor([1e39, 1.0], dtype=torch.float64), "float32", True),
        (torch.tensor([500.0]), "float8_e4m3fn", True),
        (torch.tensor([math.inf]), "float8_e4m3fn", True),
        (torch.tensor([448.0, math.nan]), "float8_e4m3fn", False),
        (torch.tensor([70_000.0], dtype=torch.bfloat16), "float16", True),
        (torch.tensor([57344.0], dtype=torch.float8_e5m2), "float8_e4m3fn", True),
        (torch.tensor([70_000]), "float16", True),
        (torch.tensor([True]), "float16", False),
        (torch.tensor([1e6, 1.0, 2.0]).expand(2, 3).t()[1:], "float16", False),
        (np.array([1.0, 65504.0, np.nan, np.inf]), "float16", False),
        (np.array([1.0, 65505.0, np.nan]), "float16", True),
        (np.array([-(2**63)]), "float16", True),
        (np.array([1e300]), "float32", True),
    ],
)
def test_numbers_beyond_the_range_are_told(tmp_path, way, value, dtype, lost, caplog):
    report = way({"w": value, "other": torch.ones(1)}, tmp_path / "c", dtype={"w": dtype})
    expected = f"1 tensor cast to {dtype} had numbers outside its range"
    assert [text[: len(expected)] for text in report.warnings] == [expected] * lost
    assert all("'w'" in text for text in report.warnings)
    if way is save:
        assert all(text in caplog.text for text in report.warnings)


def test_a_lost_number_is_found_wherever_it_is(tmp_path):
    piece = limits.of("cast out at a time")
    for at in (0, piece - 1, piece, 2 * piece):
        value = torch.zeros(2 * piece + 1)
        value[at] = 1e9
        (warning,) = fastckpt.save({"w": value}, tmp_path / "c", dtype="float16").warnings
        assert "'w'" in warning


def test_many_tensors_that_lose(tmp_path):
    state = {f"w{n}": torch.full((2,), 1e9 if n < 5 else 1.0) for n in range(8)}
    (one, other) = fastckpt.save(state, tmp_path / "c", dtype={"w0": "float8_e5m2", "*": "float16"}).warnings
    assert one.startswith("1 tensor cast to float8_e5m2 had")
    assert "'w0'; give" in one
    assert other.startswith("4 tensors cast to float16 had")
    assert "'w1', 'w2', 'w3', ...; give" in other


# The moment at which a cast reads its tensor.


def test_a_save_in_the_background_casts_what_was_there_at_the_call(tmp_path):
    state = {"w": torch.ones(100_000), "v": torch.ones(3)}
    pending = fastckpt.save_async(state, tmp_path / "c", dtype="float16")
    for value in state.values():
        value.fill_(1e9)
    report = pending.result(60)
    assert not report.warnings
    assert report.staged == report.bytes == 2 * 100_003
    assert same(fastckpt.load(tmp_path / "c"), {"w": torch.ones(100_000).half(), "v": torch.ones(3).half()})


def test_a_lazy_save_casts_before_a_step(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(1 << 20))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones(1 << 20)
    pending = fastckpt.save_async({"w": parameter}, tmp_path / "c", dtype="bfloat16", io=fastckpt.IO(lazy=True))
    optimizer.step()
    pending.result(60)
    assert not parameter.detach().any()
    loaded = fastckpt.load(tmp_path / "c")["w"]
    assert loaded.dtype is torch.bfloat16
    assert bool((loaded == 1).all())


def test_what_a_base_has_in_another_dtype_is_written(tmp_path):
    state = {"w": torch.ones(50_000), "n": torch.arange(50_000)}
    for name, options in (("a", {}), ("b", {"base": tmp_path / "a"}), ("c", {"base": tmp_path / "b"})):
        fastckpt.save(state, tmp_path / name, dtype=None if name == "a" else "float16", **options)
        assert fastckpt.load(tmp_path / name)["w"].dtype is (torch.float32 if name == "a" else torch.float16)
        assert fastckpt.verify(tmp_path / name).ok
    files = {name: {each.stat().st_ino for each in (tmp_path / name).rglob("*.safetensors")} for name in "abc"}
    assert not files["a"] & files["b"]
    assert files["b"] == files["c"]
    fastckpt.save(state, tmp_path / "d", dtype="float16", base=tmp_path / "a", files=fastckpt.Files(frozen="w"))
    assert same(fastckpt.load(tmp_path / "d"), {"w": torch.ones(50_000).half(), "n": state["n"]})


# Errors.


def test_what_is_no_dtype(tmp_path, way):
    name = way.__name__ if way is not save_lazily else "save_async"
    for wrong in ("int8", torch.int8, int, "q", {"*": "int8"}, lambda _: 3):
        with pytest.raises(ValueError, match=rf"{name}: dtype must be a floating-point dtype"):
            way({"w": torch.ones(2)}, tmp_path / "c", dtype=wrong)
    with pytest.raises(KeyError, match=rf"{name}: dtype: 'modle\.\*' matches nothing; similar: 'model\.w'"):
        way({"model": {"w": torch.ones(2)}}, tmp_path / "c", dtype={"modle.*": "float16"})
    with pytest.raises(TypeError, match=rf"{name}: dtype: a pattern must be a string, not 3"):
        way({"w": torch.ones(2)}, tmp_path / "c", dtype={3: "float16"})
    assert not (tmp_path / "c").exists()


def test_a_refusal_lets_go_of_the_callers_buffers(tmp_path):
    """A refused save keeps no buffers, even while the error keeps all frames alive."""
    buffer = bytearray(5000)
    with pytest.raises(KeyError) as one:
        fastckpt.save({"b": buffer}, tmp_path / "c", dtype={"x": "float16"})
    buffer.append(1)
    with pytest.raises(KeyError) as other:
        fastckpt.save_async({"b": buffer}, tmp_path / "c", exclude="x")
    buffer.append(1)
    assert one.tb is not other.tb
