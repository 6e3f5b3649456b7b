"""``exclude=`` of a save: the checkpoint equals that of a state without the excluded values."""

from __future__ import annotations

import collections
import dataclasses
import json

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt.exceptions import UnsupportedTypeError
from harness.same import same


def save(state, path, **options):
    return fastckpt.save(state, path, **options)


def save_async(state, path, **options):
    return fastckpt.save_async(state, path, **options).result(60)


@pytest.fixture(params=[save, save_async, fastckpt.distributed.save])
def way(request):
    return request.param


def written(path):
    """The parts of a checkpoint that depend only on the state."""
    manifest = json.loads((path / "fastckpt.json").read_text(encoding="utf-8"))
    files = {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*.safetensors")}
    body = manifest.get("body", manifest)
    return files, body["structure"], body["tensors"]


def ones(*shape):
    return torch.ones(shape)


W = torch.randn(30, 30)
V = torch.nn.Parameter(torch.randn(3, 3))


def ordered(**items):
    out = collections.OrderedDict(items)
    out._metadata = {"": {"version": 1}}
    return out


CASES = {
    "a branch": ({"model": {"w": W}, "optimizer": {"m": ones(9), "lr": 0.1}}, "optimizer", {"model": {"w": W}}),
    "by stars": ({"a": {"w": W, "b": 1}, "b": {"w": ones(2), "b": ()}}, "*.b", {"a": {"w": W}, "b": {"w": ones(2)}}),
    "several": ({"a": 1, "b": W, "c": {"d": V}}, ["a", "c.*"], {"b": W}),
    "lists close up": (
        {"layers": [{"w": ones(2)}, {"w": ones(3)}, {"w": W, "n": 3}], "x": [1, 2, (3, b"x" * 3000)]},
        ["layers.0", "layers.1", "x.1"],
        {"layers": [{"w": W, "n": 3}], "x": [1, (3, b"x" * 3000)]},
    ),
    "the first place of tied tensors": (
        {"ema": {"w": W, "v": V}, "model": {"w": W, "w2": W, "v": V}, "other": [W]},
        ["ema", "model.w2"],
        {"model": {"w": W, "v": V}, "other": [W]},
    ),
    "all but a further place": ({"a": {"w": W, "x": 1}, "model": {"w": W}}, "a.w", {"a": {"x": 1}, "model": {"w": W}}),
    "a rival of a name": ({"a": {"b": W}, "a.b": V, "c": 1}, "a", None),
    "one of two equal names": ({1: {"b": W}, "1": {"b": V}, "x": 1}, "x", {1: {"b": W}, "1": {"b": V}}),
    "what clashes with the model": (
        {"model": {"w": W}, "model.ema": {"w": V}, "step": 3},
        "model.ema",
        {"model": {"w": W}, "step": 3},
    ),
    "the model": ({"model": {"w": W}, "module": {"w": V}, "step": 3}, "model", {"module": {"w": V}, "step": 3}),
    "attributes stay": (
        {"m": ordered(a=W, b=V), "n": 1},
        ["m.a", "n"],
        {"m": ordered(b=V)},
    ),
    "defaultdicts": (
        {"d": collections.defaultdict(list, a=W, b=ones(1))},
        "d.b",
        {"d": collections.defaultdict(list, a=W)},
    ),
    "empty containers": ({"a": {}, "b": [], "c": {"x": {}}, "d": 1}, ["a", "c.x"], {"b": [], "d": 1}),
    "sparse tensors whole": ({"s": W.to_sparse(), "q": W.to_sparse(), "n": 1}, ["s.values", "n"], {"q": W.to_sparse()}),
    "odd keys": (
        {("a", 1): W, 2.5: ones(1), None: {"x": V}, frozenset({1}): 4},
        "None.*",
        {("a", 1): W, 2.5: ones(1), frozenset({1}): 4},
    ),
    "arrays and bytes": (
        {"a": np.ones(3), "b": b"x" * 9000, "c": np.arange(4), "e": W.expand(2, 30, 30)},
        ["a", "b"],
        {"c": np.arange(4), "e": W.expand(2, 30, 30)},
    ),
    "numbers and texts": (
        {"x": 1, "f": [1.5, float("nan"), -0.0, 2**70, "\ud800\u20ac", None, True, 3 + 2j], "d": np.float16(2)},
        "x",
        {"f": [1.5, float("nan"), -0.0, 2**70, "\ud800\u20ac", None, True, 3 + 2j], "d": np.float16(2)},
    ),
    "an optimizer of its own": (
        {"o": {"state": {0: {"m": W, "step": ones()}, 1: {"m": V, "step": ones()}}, "param_groups": [{"lr": 1}]}},
        "o.state.0.*",
        {"o": {"state": {1: {"m": V, "step": ones()}}, "param_groups": [{"lr": 1}]}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_as_if_it_had_not_been_there(tmp_path, case):
    state, exclude, rest = CASES[case]
    if rest is None:
        rest = {key: value for key, value in state.items() if key not in {"a", "a.b"}}
    fastckpt.save(state, tmp_path / "c", exclude=exclude)
    fastckpt.save(rest, tmp_path / "d")
    assert same(fastckpt.load(tmp_path / "c"), fastckpt.load(tmp_path / "d"))
    assert written(tmp_path / "c") == written(tmp_path / "d")


def test_every_way_leaves_out(tmp_path, way):
    state = {"model": torch.nn.Linear(3, 3).state_dict(), "optimizer": {"m": ones(100_000)}, "step": 7}
    report = way(state, tmp_path / "c", exclude="optimizer.*", metadata={"step": 7})
    assert report.bytes == 4 * 12
    assert same(fastckpt.load(tmp_path / "c"), {"model": state["model"], "step": 7})
    assert fastckpt.verify(tmp_path / "c").ok


def test_what_a_load_leaves_out_a_save_leaves_out(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state(), "epoch": [1, {"seen": 2}]}
    fastckpt.save(state, tmp_path / "all")
    for exclude in ("optimizer.state", ["*.exp_avg", "rng"], ["*.[0-1].*"], ["epoch.1", "model.?.weight"], ["*lr"]):
        fastckpt.save(state, tmp_path / "c", exclude=exclude)
        assert same(fastckpt.load(tmp_path / "c"), fastckpt.load(tmp_path / "all", exclude=exclude))


def test_a_pattern_without_wildcards_names_all_below(tmp_path):
    state = {"a": {"b": W, "bc": V, "b.d": ones(1)}, "ab": 1, "a[0]": 2}
    fastckpt.save(state, tmp_path / "c")
    assert same(fastckpt.load(tmp_path / "c", keys="a"), {"a": state["a"]})
    assert same(fastckpt.load(tmp_path / "c", keys="a.b"), {"a": {"b": W, "b.d": ones(1)}})
    assert same(fastckpt.load(tmp_path / "c", exclude=["a", "ab"]), {"a[0]": 2})
    assert fastckpt.load(tmp_path / "c", keys="a", dtype={"a": "float16"})["a"]["bc"].dtype is torch.float16
    with pytest.raises(KeyError, match=r"'a\[0\]' matches nothing"):
        fastckpt.load(tmp_path / "c", keys="a[0]")


# Values of unsupported types can be excluded.


@dataclasses.dataclass
class Pair:
    left: object
    right: object


def test_what_cannot_be_saved_may_be_left_out(tmp_path, way):
    cycle = {"w": W}
    cycle["self"] = cycle
    meta = torch.empty(3, device="meta")
    state = {"f": print, "l": [1, {"g": lambda: 1, "w": W}], "m": meta, "c": cycle, "d": collections.defaultdict(print)}
    with pytest.raises(UnsupportedTypeError, match=r"cannot store \['f'\]"):
        way(state, tmp_path / "c", exclude=["l.1.g", "m", "c.self", "d"])
    with pytest.raises(UnsupportedTypeError, match=r"cannot store \['l'\]\[1\]\['g'\]"):
        way(state, tmp_path / "c", exclude=["f", "m", "c.self", "d"])
    way(state, tmp_path / "c", exclude=["f", "*.g", "m", "c.self", "d"])
    fastckpt.save({"l": [1, {"w": W}], "c": {"w": W}}, tmp_path / "d")
    assert written(tmp_path / "c") == written(tmp_path / "d")


def test_an_object_goes_whole_with_a_part_that_cannot_be_saved(tmp_path, registry):
    registry(Pair, name="pair")
    state = {"p": Pair(W, print), "q": Pair(1, V)}
    fastckpt.save(state, tmp_path / "c", exclude="p.right")
    assert list(fastckpt.load(tmp_path / "c")) == ["q"]


@pytest.mark.parametrize("state", [torch.ones(3), 5, None], ids=["tensor", "number", "none"])
def test_of_a_state_that_is_one_value_nothing_would_be_left(tmp_path, state):
    fastckpt.save(state, tmp_path / "c")
    with pytest.raises(ValueError, match=r"^load: exclude= leaves nothing to save: the state is a single value"):
        fastckpt.load(tmp_path / "c", exclude="*")


@pytest.mark.parametrize(
    ("state", "exclude"),
    [
        ({"s": {1, print}, "n": 1}, "s.*"),
        ({"k": {frozenset({1}): print, "foo": 2}, "n": 1}, "k.f*"),
        ({"k": {(print, 1): 2}, "n": 1}, "k*"),
    ],
)
def test_what_cannot_be_left_out_by_its_name_is_refused(tmp_path, state, exclude):
    """Set members, keys, and values under keys without a name cannot be excluded."""
    with pytest.raises(UnsupportedTypeError, match="save: cannot store"):
        fastckpt.save(state, tmp_path / "c", exclude=exclude)
    assert not (tmp_path / "c").exists()


def test_default_is_asked_first(tmp_path):
    state = {"f": print, "g": print, "n": 1}
    known = fastckpt.Registry(encode=lambda value: "made" if value is print else None)
    fastckpt.save(state, tmp_path / "c", exclude="f", registry=known)
    assert fastckpt.load(tmp_path / "c") == {"g": "made", "n": 1}


def test_no_warning_of_a_class_that_is_left_out(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(Pair, "__module__", "__main__")
    fastckpt.save({"p": Pair(1, 2), "n": 1}, tmp_path / "c", exclude="p.*")
    assert not recwarn.list


# Errors.


def test_patterns_that_do_not_fit(tmp_path, way):
    state = {"model": {"w": W}, "step": 1}
    name = way.__name__
    with pytest.raises(KeyError, match=rf"{name}: exclude: 'modle\.\*' matches nothing; similar: 'model\.w'"):
        way(state, tmp_path / "c", exclude=["step", "modle.*"])
    with pytest.raises(TypeError, match=f"{name}: exclude must be a pattern or a sequence of patterns, not 3"):
        way(state, tmp_path / "c", exclude=3)
    with pytest.raises(TypeError, match=f"{name}: exclude: a pattern must be a string, not 3"):
        way(state, tmp_path / "c", exclude=[3])
    for nothing in ("*", ["model", "step"]):
        with pytest.raises(ValueError, match=f"{name}: exclude= leaves nothing to save"):
            way(state, tmp_path / "c", exclude=nothing)
    with pytest.raises(ValueError, match=f"{name}: exclude= leaves nothing to save"):
        way(W, tmp_path / "c", exclude="tensor")
    with pytest.raises(ValueError, match="'model': the state has no mapping under that key"):
        way(state, tmp_path / "c", exclude="model", files=fastckpt.Files(model_key="model"))
    assert not (tmp_path / "c").exists()


def test_no_pattern_at_all_leaves_out_nothing(tmp_path):
    fastckpt.save({"a": 1}, tmp_path / "c", exclude=[])
    assert fastckpt.load(tmp_path / "c") == {"a": 1}


def test_metadata_and_files_stay(tmp_path):
    fastckpt.save({"a": 1, "b": 2}, tmp_path / "c", exclude="a", metadata={"a": 3}, files={"a": "text"})
    with fastckpt.open(tmp_path / "c") as checkpoint:
        assert checkpoint.metadata == {"a": 3}
    assert (tmp_path / "c" / "a").read_text() == "text"
