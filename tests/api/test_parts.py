"""Partial loads: exclusions, allowed differences, other keys, other dtypes."""

from __future__ import annotations

import collections
import logging
import sys

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import CorruptCheckpointError, StructureMismatchError
from fastckpt.exceptions import UnsupportedTypeError
from harness.reports import with_report
from harness.same import bits, same


@pytest.fixture
def saved(tmp_path):
    def go(state):
        fastckpt.save(state, tmp_path / "c")
        return tmp_path / "c"

    return go


def training():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


# exclude=


@pytest.mark.parametrize(
    ("keys", "exclude", "expected"),
    [
        (None, "optimizer.*", {"model", "step"}),
        (None, ["optimizer.*", "step"], {"model"}),
        ("*", ("model.*", "step"), {"optimizer"}),
        (["optimizer.*", "step"], "step", {"optimizer"}),
        ("step", "*", set()),
    ],
)
def test_exclude_wins(saved, keys, exclude, expected):
    state = training()
    loaded = fastckpt.load(saved(state), keys=keys, exclude=exclude)
    assert same(loaded, {name: state[name] for name in state if name in expected})


def test_exclude_inside_containers(saved):
    state = {"list": [1, torch.ones(2), {"a": 1, "b": ()}], "odict": collections.OrderedDict(x=1, y=torch.ones(3))}
    path = saved(state)
    assert same(
        fastckpt.load(path, exclude=["list.0", "*.b", "odict.x"]),
        {"list": [torch.ones(2), {"a": 1}], "odict": collections.OrderedDict(y=torch.ones(3))},
    )
    assert same(fastckpt.load(path, exclude="list.*"), {"odict": state["odict"]})


@pytest.mark.parametrize("pattern", ["sparse", "sparse.values", "sparse.*"])
def test_what_is_made_of_several_stays_out_whole(saved, pattern):
    path = saved({"sparse": torch.eye(2).to_sparse(), "w": torch.ones(2)})
    assert same(fastckpt.load(path, exclude=pattern), {"w": torch.ones(2)})
    assert same(fastckpt.load(path, keys=["sparse.indices", "w"], exclude=pattern), {"w": torch.ones(2)})


def test_types_are_asked_for_only_in_what_is_left(tmp_path):
    path, registry = tmp_path / "c", fastckpt.Registry()
    registry.register(Odd, lambda odd: {"n": odd.n, "w": odd.w}, lambda value: Odd(**value), "odd")
    fastckpt.save({"odd": Odd(1, torch.ones(2)), "w": torch.ones(2)}, path, registry=registry)
    with pytest.raises(UnsupportedTypeError):
        fastckpt.load(path)
    assert same(fastckpt.load(path, exclude="odd.n"), {"w": torch.ones(2)})


class Odd:
    def __init__(self, n, w):
        self.n = n
        self.w = w


def test_only_what_is_left_is_read(saved, engine):
    path = saved({"a": torch.ones(1000), "b": torch.ones(10)})
    assert with_report(fastckpt.load, path, exclude="a", io=engine).report.bytes == 40


def test_patterns_that_match_nothing(saved):
    path = saved(training())
    with pytest.raises(KeyError, match=r"load: exclude: 'optimiser\.\*' matches nothing"):
        fastckpt.load(path, exclude="optimiser.*")
    with pytest.raises(TypeError, match="load: exclude must be a pattern"):
        fastckpt.load(path, exclude=3)
    with pytest.raises(TypeError, match="load: exclude: a pattern must be a string"):
        fastckpt.load(path, exclude=[3])
    loaded, report = with_report(fastckpt.load, path, keys=["step", "stop*"], exclude="nothing", strict=False)
    assert loaded == {"step": 7}
    assert (report.missing, report.unexpected) == (("stop*",), ())


# strict=


def test_strict_is_the_default(saved):
    path = saved({"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(StructureMismatchError, match="strict=False") as caught:
        fastckpt.load(path, into={"b": torch.zeros(3), "c": torch.zeros(1)})
    assert caught.value.differences == ("['a']: missing from into=", "['c']: not in the checkpoint")


def test_not_strict_leaves_out_what_one_side_has(saved, caplog, engine):
    path = saved({"list": [torch.ones(2), torch.ones(3), 5], "s": torch.eye(2).to_sparse(), "only": {"w": np.ones(4)}})
    into = {"list": [torch.zeros(2)], "new": torch.full((3,), 7.0), "deep": {"x": np.zeros(2), "n": 1}}
    with caplog.at_level(logging.INFO, "fastckpt"):
        loaded, report = with_report(fastckpt.load, path, into=into, strict=False, io=engine)
    assert loaded is into
    kept = {"new": torch.full((3,), 7.0), "deep": {"x": np.zeros(2), "n": 1}}
    assert same(into, {"list": [torch.ones(2), 5], **kept})
    assert report.missing == ("new", "deep.x", "deep.n")
    assert report.unexpected == ("list.1", "s.indices", "s.values", "only.w")
    assert report.bytes == 8
    assert "3 missing ('new', 'deep.x', 'deep.n'), 4 unexpected ('list.1', 's.indices', 's.values', ...)" in caplog.text


def test_not_strict_still_asks_for_shapes_and_dtypes(saved):
    path = saved({"a": torch.ones(2), "b": torch.ones(3)})
    into = {"a": torch.zeros(3), "c": torch.zeros(1)}
    with pytest.raises(StructureMismatchError, match="1 difference") as caught:
        fastckpt.load(path, into=into, strict=False)
    assert caught.value.differences == ("['a']: shape [2] in the checkpoint, [3] in into=",)
    assert not into["a"].any()


def test_a_part_that_is_missing_leaves_out_the_whole(saved, registry):
    registry(Odd, lambda odd: {"n": odd.n, "w": odd.w}, lambda value: Odd(**value), "odd")
    path = saved({"odd": Odd(torch.ones(1), torch.ones(2)), "w": torch.ones(2)})
    into = {"odd": Odd(torch.zeros(1), 5), "w": torch.zeros(2)}
    odd = into["odd"]
    report = with_report(fastckpt.load, path, into=into, strict=False).report
    assert same(into["w"], torch.ones(2))
    assert report.unexpected == ("odd.n", "odd.w")
    assert into["odd"] is odd
    assert not odd.n.any()


def test_keys_choose_in_into_too(saved):
    """The checkpoint must have the values of into= that keys= selects; the rest of into= stays unchanged."""
    path = saved({"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(StructureMismatchError, match=r"\['c'\]: not in the checkpoint"):
        fastckpt.load(path, into={"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, keys="*")
    into = {"a": torch.zeros(2), "b": torch.zeros(9), "c": torch.zeros(1)}
    for how in ({"exclude": ["b", "c*"], "strict": False}, {"keys": "a"}):
        into["a"].zero_()
        assert fastckpt.load(path, into=into, **how) is into
        assert same(into, {"a": torch.ones(2), "b": torch.zeros(9), "c": torch.zeros(1)})


# Ties.


def test_a_place_that_is_tied_need_not_be_in_the_checkpoint(saved):
    path = saved({"embed": torch.ones(4, 2), "other": torch.ones(1)})
    w = torch.zeros(4, 2)
    into = {"embed": w, "head": w, "other": torch.zeros(1)}
    loaded, report = with_report(fastckpt.load, path, into=into)
    assert (loaded["head"] is w, report.missing) == (True, ())
    assert w.sum() == 8
    with pytest.raises(StructureMismatchError, match=r"\['head'\]: not in the checkpoint"):
        fastckpt.load(path, into={**into, "head": torch.zeros(4, 2)})


def test_a_tie_of_the_checkpoint_need_not_be_in_into(saved):
    w = torch.ones(4, 2)
    path = saved({"head": w, "embed": w, "flags": torch.nn.Parameter(w)})
    into = {"embed": torch.zeros(4, 2)}
    loaded, report = with_report(fastckpt.load, path, into=into)
    assert loaded["head"] is loaded["embed"] is loaded["flags"] is into["embed"]
    assert (into["embed"].sum(), report.unexpected) == (8, ())


@pytest.mark.parametrize("size", [6, 3 << 20])
def test_what_is_tied_in_into_may_be_stored_apart_if_it_is_equal(saved, engine, size):
    """Checksums of whole tensors show that tensors are equal; those of extents depend on where a tensor starts."""
    w, odd = torch.randn(size), torch.ones(size % 7 + 3, dtype=torch.uint8)
    path = saved({"a": w, "odd": odd, "b": w.clone(), "c": w + 1, "d": w.view(torch.int32).clone()})
    one = torch.zeros(size)
    into = {"a": one, "odd": torch.zeros_like(odd), "b": one, "c": torch.zeros(size), "d": torch.zeros_like(one).int()}
    loaded = fastckpt.load(path, into=into, io=engine)
    assert loaded["a"] is loaded["b"] is one
    assert torch.equal(one, w)
    with pytest.raises(StructureMismatchError, match=r"\['c'\]: tied in into= to 'a', a different tensor"):
        fastckpt.load(path, into={**into, "c": one})
    with pytest.raises(StructureMismatchError, match=r"1 difference.*\n.*'d'.*dtype int32"):
        fastckpt.load(path, into={**into, "d": one})


# rename=


def test_prefixes_of_wrappers_come_off(saved):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))

    class Wrapped(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    wrapped = Wrapped(torch.compile(model))
    state = wrapped.state_dict()
    assert "module._orig_mod.0.weight" in state
    path = saved({"model": state, "module.x": 5})
    for prefixes in (["module.", "_orig_mod."], ("_orig_mod.", "module."), ["none.", "module.", "_orig_mod."]):
        loaded = fastckpt.load(path, rename=fastckpt.strip_prefix(*prefixes))
        assert list(loaded["model"]) == list(model.state_dict())
        assert loaded["x"] == 5
        # The renaming includes the modules' versions.
        assert loaded["model"]._metadata["1"] == {"version": 2}
        model.load_state_dict(loaded["model"])
    fresh = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    fastckpt.load(path, into={"model": fresh.state_dict()}, rename=fastckpt.strip_prefix("module.", "_orig_mod."))
    assert same(fresh.state_dict(), model.state_dict())


def test_each_prefix_comes_off_once_and_never_the_whole_key(saved):
    path = saved({"module.module.w": 1, "module.": 2, "x.module.w": 3})
    assert fastckpt.load(path, rename=fastckpt.strip_prefix("module.")) == {
        "module.w": 1,
        "module.": 2,
        "x.module.w": 3,
    }


def test_rename_by_dict_and_function(saved):
    state = {"a": {"w": torch.ones(1), 3: "w"}, "b": [{"w": 1}], ("a", "w"): 2, "c": {"w"}}
    path = saved(state)
    expected = {"A": {"v": torch.ones(1), 3: "w"}, "b": [{"v": 1}], ("a", "w"): 2, "c": {"w"}}
    assert same(fastckpt.load(path, rename={"w": "v", "a": "A"}), expected)
    assert same(fastckpt.load(path, rename=lambda key: {"w": "v", "a": "A"}.get(key, key)), expected)
    # keys= uses the names in the file; rename= applies after it.
    assert same(fastckpt.load(path, keys="a.w", rename={"w": "v"}), {"a": {"v": torch.ones(1)}})
    into = {"a": {"v": torch.zeros(1)}, "more": torch.zeros(1)}
    assert fastckpt.load(path, keys="a.*", rename={"w": "v"}, into=into)["a"]["v"] is into["a"]["v"]
    assert into["a"]["v"] == 1


def test_rename_in_what_is_not_a_plain_dict(saved, registry):
    registry(Odd, lambda odd: {"n": odd.n, "w": odd.w}, lambda value: Odd(**value), "odd")
    state = {"odd": Odd(1, 2), "dd": collections.defaultdict(list, w=1), "od": collections.OrderedDict(w=[{"w": 1}])}
    state["od"].w = {"w": {"w": 1}}
    loaded = fastckpt.load(saved(state), rename=lambda key: key.replace("w", "v"))
    assert (loaded["odd"].w, loaded["dd"], loaded["od"]) == (2, {"v": 1}, {"v": [{"v": 1}]})
    assert loaded["dd"].default_factory is list
    assert vars(loaded["od"]) == {"w": {"v": {"v": 1}}} or vars(loaded["od"]) == {"w": {"w": {"v": 1}}}


def test_two_keys_that_become_one(saved):
    path = saved({"module.w": torch.ones(1), "w": torch.ones(2), "x": 1})
    with pytest.raises(ValueError, match=r"load: the keys 'module\.w' and 'w' both become 'w': choose one"):
        fastckpt.load(path, rename=fastckpt.strip_prefix("module."))
    with pytest.raises(ValueError, match="'w' and 'x' both become 'w'"):
        fastckpt.load(path, rename={"x": "w"})
    assert same(fastckpt.load(path, rename=fastckpt.strip_prefix("module."), exclude="w"), {"w": torch.ones(1), "x": 1})


def test_arguments_of_renaming(saved):
    path = saved({"weight": 1})
    with pytest.raises(KeyError, match="load: rename: there is no key 'wieght'; similar: 'weight'"):
        fastckpt.load(path, rename={"wieght": "w"})
    assert fastckpt.load(path, rename={"wieght": "w"}, strict=False) == {"weight": 1}
    for wrong in ({"a": 1}, 5):
        with pytest.raises(TypeError, match="load: rename must"):
            fastckpt.load(path, rename=wrong)
    with pytest.raises(TypeError, match="load: rename= returned 5 for the key 'weight'"):
        fastckpt.load(path, rename=lambda _: 5)
    for wrong in ([""], [3], ["a", ["b"]], []):
        with pytest.raises(TypeError, match="strip_prefix: each prefix must be"):
            fastckpt.strip_prefix(*wrong)


# dtype=

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_cast_gives_what_to_would(saved, engine, target):
    """A cast equals `to`, even if block edges cut elements, because tensors of odd lengths precede them."""
    generator = torch.Generator().manual_seed(0)
    state = {"odd": torch.ones(4097, dtype=torch.uint8)}
    for dtype in FLOATS:
        size = (9 << 20) // dtype.itemsize + 13 if dtype is torch.float64 else 1000
        state[str(dtype)] = (torch.randn(size, generator=generator, dtype=torch.float32) * 100).to(dtype)
    state |= {
        "0d": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "int": torch.arange(5),
        "complex": torch.ones(2, dtype=torch.complex64),
        "bool": torch.ones(3, dtype=torch.bool),
        "text": b"x" * 5000,
        "array": np.arange(6, dtype=">f8").reshape(2, 3),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "quantized": torch.quantize_per_channel(
            torch.ones(2, 2), torch.ones(2, dtype=torch.float64), torch.zeros(2), 0, torch.qint8
        ),
        "sparse": torch.eye(3).to_sparse(),
    }
    if target not in (torch.float64, torch.float32, torch.float16):
        del state["array"]
    path = saved(state)
    for wish in (target, str(target).removeprefix("torch."), {"*": target}, lambda _: target):
        loaded, report = with_report(fastckpt.load, path, dtype=wish, io=engine)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_quantized:
                assert loaded[name].dtype is target, name
                expected = value.detach().to(target)
                if name != "sparse":
                    assert bits(loaded[name].detach()) == bits(expected), name
                else:
                    assert bits(loaded[name].coalesce().values()) == bits(expected.coalesce().values())
            elif name == "array":
                assert loaded[name].dtype == np.dtype(str(target).removeprefix("torch."))
                assert (loaded[name] == value).all()
            elif name == "quantized":
                assert torch.equal(loaded[name].int_repr(), value.int_repr())
                assert torch.equal(loaded[name].q_per_channel_scales(), value.q_per_channel_scales())
            else:
                assert same(loaded[name], value), name
        assert type(loaded["parameter"]) is torch.nn.Parameter
        assert report.bytes == with_report(fastckpt.load, path).report.bytes


def test_one_dtype_for_all_leaves_the_step_of_optimizers(saved):
    """In bfloat16, a step count would stay at 1000, because 1000 + 1 is 1000."""
    path = saved({"o": {"state": {0: {"step": torch.tensor(1001.0), "m": torch.ones(2)}}}, "step": torch.ones(1)})
    loaded = fastckpt.load(path, dtype="bfloat16")
    assert loaded["o"]["state"][0]["step"].item() == 1001
    assert loaded["o"]["state"][0]["m"].dtype == loaded["step"].dtype == torch.bfloat16
    assert fastckpt.load(path, dtype={"*": "bfloat16"})["o"]["state"][0]["step"].dtype == torch.bfloat16


def test_a_dtype_of_numpys_does_not_fit_a_torch_tensor(saved):
    path = saved({"w": np.arange(3, dtype=">f8")})
    w = torch.zeros(3)
    with pytest.raises(StructureMismatchError, match="dtype >f8 in the checkpoint, which torch does not have"):
        fastckpt.load(path, into={"w": w}, framework="torch", dtype="float32")
    assert fastckpt.load(path, framework="torch", dtype="float32")["w"].tolist() == [0, 1, 2]


def test_patterns_of_dtypes(saved):
    path = saved({"norm": {"w": torch.ones(2)}, "fc": {"w": torch.ones(2), "b": torch.ones(2)}, "n": torch.arange(2)})
    loaded = fastckpt.load(path, dtype={"norm.*": "float32", "*.b": None, "*": "bfloat16"})
    assert [loaded["norm"]["w"].dtype, loaded["fc"]["w"].dtype, loaded["fc"]["b"].dtype] == [
        torch.float32,
        torch.bfloat16,
        torch.float32,
    ]
    seen = []
    loaded = fastckpt.load(path, keys="fc.*", dtype=lambda info: seen.append(info) or "float16")
    assert [(info.name, info.dtype, info.device) for info in seen] == [
        ("fc.w", "float32", "cpu"),
        ("fc.b", "float32", "cpu"),
    ]
    # Patterns apply to the whole checkpoint: matched tensors need not be loaded.
    assert fastckpt.load(path, keys="fc.*", dtype={"norm.*": "float16"})["fc"]["w"].dtype is torch.float32
    with pytest.raises(KeyError, match=r"load: dtype: 'nrom\.\*' matches nothing; similar: 'norm\.w'"):
        fastckpt.load(path, dtype={"nrom.*": "float16"})
    fastckpt.load(path, dtype={"nrom.*": "float16"}, strict=False)


def test_a_tied_tensor_has_the_dtype_of_the_first_pattern_that_matches_a_name_of_it(saved):
    w = torch.ones(3)
    loaded = fastckpt.load(saved({"a": w, "b": w}), dtype={"b": "float16", "a": "float64"})
    assert loaded["a"] is loaded["b"]
    assert loaded["a"].dtype is torch.float16


@pytest.mark.parametrize("wrong", ["int8", torch.int32, "float", 3, complex, "bfloat8", np.int8, ["float32"]])
def test_dtypes_that_cannot_be_asked_for(saved, wrong):
    path = saved({"w": torch.ones(2)})
    with pytest.raises(ValueError, match="load: dtype must be a floating-point dtype or its name"):
        fastckpt.load(path, dtype=wrong)
    with pytest.raises(ValueError, match="load: dtype must be a floating-point dtype or its name"):
        fastckpt.load(path, dtype={"w": wrong})


@pytest.mark.parametrize(
    ("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("FP32", "float32"), ("f64", "float64")]
)
def test_a_short_name_of_a_dtype_is_told_its_name(saved, short, name):
    with pytest.raises(ValueError, match=rf"function, not '{short}' \(\"{name}\"\?\): only"):
        fastckpt.load(saved({"w": torch.ones(2)}), dtype=short)
    with pytest.raises(ValueError, match="function, not 'i8': only"):
        fastckpt.load(saved({"w": torch.ones(2)}), dtype="i8")


def test_dtypes_of_numpy_and_of_python_are_names_too(saved):
    path = saved({"w": torch.ones(2)})
    assert fastckpt.load(path, dtype=np.float16)["w"].dtype is torch.float16
    assert fastckpt.load(path, dtype=np.dtype("f8"))["w"].dtype is torch.float64


def test_mmap_casts_nothing(saved):
    with pytest.raises(
        ValueError, match=r"load: IO\(mmap=True\) maps the stored bytes unchanged and cannot be combined with dtype="
    ):
        fastckpt.load(saved({"w": torch.ones(2)}), io=fastckpt.IO(mmap=True), dtype="float16")


def test_a_dtype_that_is_not_there(saved, monkeypatch):
    path = saved({"w": torch.ones(2), "n": np.ones(2)})
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UnsupportedTypeError, match="'n' cannot be cast to bfloat16, which numpy"):
        fastckpt.load(path, dtype="bfloat16")
    assert fastckpt.load(path, dtype="bfloat16", framework="torch")["n"].dtype is torch.bfloat16


def test_framework_numpy_casts_too(saved):
    state = {"w": torch.randn(70_000), "n": np.random.default_rng(0).random(5), "big": np.float64([1e300, 1])}
    loaded = fastckpt.load(saved(state), framework="numpy", dtype="float16")
    assert {value.dtype for value in loaded.values()} == {np.dtype("float16")}
    with np.errstate(over="ignore"):
        assert all((loaded[name] == np.asarray(state[name]).astype("float16")).all() for name in state)


def test_into_with_a_cast(saved, engine):
    size = 1 << 20
    state = {
        "odd": torch.ones(4097, dtype=torch.uint8),
        "w": torch.randn(3, size),
        "n": np.random.default_rng(0).random((4, 5)),
        "0": torch.ones(()),
    }
    path = saved(state)
    raw = torch.full((size, 6), 9.0, dtype=torch.bfloat16)
    into = {
        "odd": torch.zeros(4097, dtype=torch.uint8),
        "w": raw.t()[::2],
        "n": np.zeros((5, 4), np.float32).T,
        "0": torch.zeros((), dtype=torch.float64),
    }
    wishes = {"w": "bfloat16", "n": "float32", "0": "float64"}
    loaded = fastckpt.load(path, into=into, dtype=wishes, io=engine)
    assert all(loaded[name] is into[name] for name in into)
    assert torch.equal(into["w"], state["w"].to(torch.bfloat16))
    assert (raw.t()[1::2] == 9).all(), "the load changed elements between the tensor's"
    assert (into["n"] == state["n"].astype(np.float32)).all()
    with pytest.raises(StructureMismatchError, match="dtype float16 by dtype=, bfloat16 in into="):
        fastckpt.load(path, into=into, dtype={**wishes, "w": "float16"})
    with pytest.raises(StructureMismatchError, match="or cast floating-point tensors with dtype="):
        fastckpt.load(path, into=into)


def test_into_a_conj_view_and_an_inference_tensor_with_a_cast(saved):
    path = saved({"n": torch.arange(4.0), "i": torch.ones(2)})
    base = torch.zeros(4, dtype=torch.complex128)
    with torch.inference_mode():
        into = {"n": base.conj().imag, "i": torch.zeros(2, dtype=torch.float64)}
    fastckpt.load(path, into=into, dtype="float64")
    assert into["n"].tolist() == [0, 1, 2, 3]
    assert (-base.imag).tolist() == [0, 1, 2, 3]
    assert into["i"].sum() == 2


def test_a_cast_finds_damage_too(saved):
    path = saved({"w": torch.ones(3 << 20)})
    shard = path / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        fastckpt.load(path, dtype="bfloat16")
    assert fastckpt.load(path, dtype="bfloat16", io=fastckpt.IO(verify=False))["w"].dtype is torch.bfloat16


MADE_OF_SEVERAL = {
    "expanded": torch.ones(1, 3).expand(4, 3),
    "broadcast": np.broadcast_to(np.ones(3), (4, 3)),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("kind", [*MADE_OF_SEVERAL])
@pytest.mark.parametrize("into", [{"a": np.zeros(3)}, {"b": torch.zeros(3)}])
@pytest.mark.filterwarnings("ignore:.*no tensor of the checkpoint has a place")
def test_tensors_made_of_several_that_have_no_place_in_into(saved, kind, into):
    value = MADE_OF_SEVERAL[kind]
    path = saved({"x": value, "b": torch.ones(3)})
    assert "x" not in fastckpt.load(path, into=dict(into), strict=False)
    if kind != "broadcast":
        # A selected value comes with its containers, and with a tensor that is its key.
        path = saved({value: 1, "b": torch.ones(3)})
        loaded = fastckpt.load(path, into=dict(into), strict=False)
        (key,) = (key for key in loaded if type(key) is not str)
        assert torch.equal(key.to_dense(), value.to_dense())
    assert same(fastckpt.load(saved(value), into=dict(into), strict=False), value)
