"""Options of load: existing tensors, only some tensors, one framework."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import logging
import pathlib
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastckpt
from fastckpt import CorruptCheckpointError, StructureMismatchError
from fastckpt.exceptions import UnsupportedTypeError
from harness.reports import with_report
from harness.same import bits, same


@pytest.fixture
def saved(tmp_path, engine):
    def go(state):
        fastckpt.save(state, tmp_path / "c", io=engine)
        return tmp_path / "c"

    return go


# into=


def test_into_fills_what_is_there(saved, engine):
    state = {
        "w": torch.randn(5, 3),
        "big": torch.randn(1 << 20),
        "n": np.arange(6.0).reshape(2, 3),
        "deep": [(torch.ones(2), {"x": np.array(3)})],
        "step": 7,
        "blob": b"z" * 5000,
        "0": torch.empty(0, 3),
        "n0": np.zeros((0, 4)),
    }
    into = {
        "w": torch.nn.Parameter(torch.zeros(5, 3)),
        "big": torch.zeros(1 << 20),
        "n": np.zeros((2, 3)),
        "deep": [(torch.zeros(2, requires_grad=True), {"x": np.array(0)})],
        "step": 0,
        "blob": b"",
        "0": torch.empty(0, 3),
        "n0": np.zeros((0, 4)),
    }
    before, deep = dict(into), into["deep"][0]
    assert fastckpt.load(saved(state), into=into, io=engine) is into
    assert all(into[key] is before[key] for key in ("w", "big", "n", "deep", "0", "n0"))
    assert into["deep"][0] is deep
    assert same(into["n"], state["n"])
    assert into["step"] == 7
    assert into["blob"] == state["blob"]
    loaded = into
    assert bits(loaded["w"]) == bits(state["w"])
    assert bits(loaded["big"]) == bits(state["big"])
    assert (loaded["n"] == state["n"]).all()
    assert loaded["deep"][0][0].requires_grad
    assert loaded["deep"][0][1]["x"] == 3


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.complex128, torch.uint4, torch.float8_e5m2, torch.bool], ids=str
)
def test_into_strided_memory(dtype, saved, engine):
    def make(*shape):
        values = np.arange(torch.Size(shape).numel() * dtype.itemsize) % (2 if dtype is torch.bool else 251)
        if not values.size:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(values.astype(np.uint8)).view(dtype).reshape(shape)

    # A tensor of several blocks, whose edges cut elements because of the odd bytes before it.
    state = {
        "odd": torch.ones(4097, dtype=torch.uint8),
        "t": make(500, 700),
        "s": make(3, 4),
        "0d": make(1)[0],
        "e": make(0, 2),
    }
    raw = make(701, 1002)
    into = {
        "odd": torch.zeros(4097 * 2, dtype=torch.uint8)[::2],
        "t": raw.t()[1:1001:2, :700],
        "s": make(4, 3).t(),
        "0d": make(6)[5],
        "e": make(2, 0).t(),
    }
    kept = raw.clone() if dtype is not torch.uint4 else raw.view(torch.uint8).clone().view(dtype)
    loaded = fastckpt.load(saved(state), into=into, io=engine)
    for name, tensor in state.items():
        assert bits(loaded[name]) == bits(tensor), name
        assert loaded[name] is into[name]
    assert bits(raw.t()[::2]) == bits(kept.t()[::2]), "the load changed elements between the tensor's"
    assert bits(raw.t()[1:1001:2, :700]) == bits(state["t"])


def test_into_strided_arrays(saved, engine):
    state = {"a": np.random.default_rng(0).random((400, 900)), "s": np.array([["ab", "c"], ["", "xyz"]])}
    into = {"a": np.zeros((900, 400)).T, "s": np.zeros((2, 4), "<U3")[:, ::2]}
    loaded = fastckpt.load(saved(state), into=into, io=engine)
    assert loaded["a"] is into["a"]
    assert same(loaded, state)


def test_into_conj_and_neg_views(saved, engine):
    z = torch.randn(6, dtype=torch.complex64)
    base, other = torch.zeros(6, dtype=torch.complex64), torch.zeros(6, dtype=torch.complex64)
    loaded = fastckpt.load(saved({"c": z, "n": z.imag}), into={"c": base.conj(), "n": other.conj().imag}, io=engine)
    assert torch.equal(loaded["c"], z)
    assert torch.equal(base, z.conj())
    assert torch.equal(loaded["n"], z.imag)
    assert torch.equal(other.imag, -z.imag)


def test_into_inference_tensor_and_autograd_version(saved):
    path = saved({"w": torch.ones(4), "t": torch.ones(2, 3)})
    with torch.inference_mode():
        into = {"w": torch.zeros(4), "t": torch.zeros(3, 2).t()}
    assert fastckpt.load(path, into=into)["t"].sum() == 6
    w = torch.zeros(4)
    x = torch.ones(4, requires_grad=True)
    product = (w * x).sum()
    fastckpt.load(path, into={"w": w, "t": torch.zeros(2, 3)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_into_a_module_and_its_optimizer(saved):
    def training():
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    (a, optimizer_a), (b, optimizer_b) = training(), training()
    path = saved({"model": a.state_dict(), "optimizer": optimizer_a.state_dict()})
    fastckpt.load(path, into={"model": b.state_dict(), "optimizer": optimizer_b.state_dict()})
    assert torch.equal(a.weight, b.weight)
    assert same(optimizer_a.state_dict(), optimizer_b.state_dict())


def test_into_lists_every_difference_and_changes_nothing(saved):
    state = {
        "shape": torch.ones(2, 3),
        "dtype": torch.ones(2),
        "kind": torch.ones(2),
        "both": np.ones(2),
        "missing": [torch.ones(1)],
        "frozen": np.ones(2),
        "expanded": torch.ones(2),
        "overlapping": torch.ones(2, 2),
        "tied": torch.ones(2),
        "apart": torch.zeros(2),
        "good": torch.ones(2),
        "meta": torch.ones(2),
        ("k", 1): torch.ones(3),
        "sparse": torch.eye(2).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "dense": torch.ones(2),
    }
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    tied = torch.full((2,), 5.0)
    into = {
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(2, dtype=torch.float64),
        "kind": np.zeros(2, np.float32),
        "both": np.zeros((1, 2), np.float32),
        "missing": [],
        "frozen": frozen,
        "expanded": torch.zeros(1).expand(2),
        "overlapping": torch.zeros(3).as_strided((2, 2), (1, 1)),
        "tied": tied,
        "apart": tied,
        "good": torch.zeros(2),
        "meta": torch.zeros(2, device="meta"),
        ("k", 1): torch.zeros(4),
        "sparse": torch.ones(2, 2).to_sparse(),
        "quantized": state["quantized"],
        "dense": torch.ones(2).to_sparse(),
        "unexpected": {"here": torch.zeros(1)},
    }
    with pytest.raises(StructureMismatchError) as caught:
        fastckpt.load(saved(state), into=into)
    text = str(caught.value)
    for line in (
        "['shape']: shape [2, 3] in the checkpoint, [3, 2] in into=",
        "['dtype']: dtype float32 in the checkpoint, float64 in into=",
        "['kind']: a torch tensor in the checkpoint, a numpy array in into=",
        "['both']: dtype float64 in the checkpoint, float32 in into=; shape [2] in the checkpoint, [1, 2] in into",
        "['missing'][0]: missing from into=",
        "['frozen']: the array in into= is read-only",
        "['expanded']: expanded in into=, not in the checkpoint",
        "['overlapping']: elements of the tensor in into= share memory",
        "['apart']: tied in into= to 'tied', a different tensor in the checkpoint",
        "['meta']: cannot be filled: a meta tensor has no data",
        '[["tuple",2],"k",1]: shape [3] in the checkpoint, [4] in into=',
        "['sparse'].indices: shape [2, 2] in the checkpoint, [2, 4] in into=",
        "['quantized']: a quantised tensor cannot be filled in place",
        "['dense']: a dense tensor in the checkpoint, a sparse or quantised one in into=",
        "['unexpected']['here']: not in the checkpoint",
    ):
        assert line in text, line
    assert "['good']" not in text
    assert not into["good"].any()
    assert (tied == 5).all()


def test_into_counts_what_it_does_not_list(saved):
    state = {i: torch.ones(1) for i in range(50)}
    with pytest.raises(StructureMismatchError, match=r"50 differences(.|\n)*\[19\](.|\n)*and 30 more$") as caught:
        fastckpt.load(saved(state), into={})
    assert "[20]" not in str(caught.value)


def test_into_ties(saved):
    w = torch.randn(3)
    path = saved({"a": w, "b": w})
    apart = {"a": torch.zeros(3), "b": torch.zeros(3)}
    loaded = fastckpt.load(path, into=apart)
    assert loaded["a"] is apart["a"]
    assert loaded["b"] is apart["b"]
    assert torch.equal(loaded["a"], w)
    assert torch.equal(loaded["b"], w)
    one = torch.zeros(3)
    loaded = fastckpt.load(path, into={"a": one, "b": one})
    assert loaded["a"] is loaded["b"] is one
    assert torch.equal(one, w)


def test_into_targets_that_overlap(saved):
    path = saved({"a": torch.ones(6), "b": torch.zeros(6), "m": torch.ones(2, 3), "n": np.ones(6, np.float32)})
    base, table = torch.zeros(9), torch.full((6, 3), 9.0)
    apart = {"m": torch.zeros(2, 3), "n": np.zeros(6, np.float32)}
    for into, places in (
        ({"a": base[:6], "b": base[3:], **apart}, "b a"),
        ({"a": base[:6], "b": torch.zeros(6), **apart, "m": base[:6].view(2, 3)}, "m a"),
        ({"a": base[:6], "b": torch.zeros(6), **apart, "n": base.numpy()[5::-1]}, "n a"),
        ({"a": table[:, 1], "b": table[:, 2], **apart, "m": table[1:3]}, "m a"),
    ):
        with pytest.raises(StructureMismatchError, match="1 difference:") as caught:
            fastckpt.load(path, into=into)
        assert "overlaps in memory with" in str(caught.value)
        assert all(f"['{place}']" in str(caught.value) for place in places.split())
    # Interleaved tensors do not overlap.
    fastckpt.load(path, into={"a": table[:, 1], "b": table[:, 2], **apart})
    assert table[0].tolist() == [9, 1, 0]


def test_into_of_one_tied_tensor_in_two_places_that_overlap(saved):
    w, base = torch.arange(6.0), torch.zeros(9)
    path = saved({"a": w, "b": w})
    with pytest.raises(StructureMismatchError, match="overlaps"):
        fastckpt.load(path, into={"a": base[:6], "b": base[3:]})
    fastckpt.load(path, into={"a": base[:6], "b": base[:6]})


def test_mismatch_says_what_helps(saved):
    path = saved({str(i): torch.ones(1) for i in range(30)})
    with pytest.raises(StructureMismatchError, match="into= is a type: pass a state of containers, tensors") as caught:
        fastckpt.load(path, into=torch.nn.Linear)
    assert len(caught.value.differences) == 30
    assert pickle.loads(pickle.dumps(caught.value)).differences == caught.value.differences
    with pytest.raises(StructureMismatchError, match=r'keys="model".*; 1 difference:'):
        fastckpt.load(path, into={str(i): torch.ones(1) for i in range(29)})


def test_into_sparse(saved):
    state = {
        "coo": torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([3.0, 4]), (3,)).coalesce(),
        "csr": torch.eye(3).to_sparse_csr() * 7,
    }
    into = {
        "coo": torch.sparse_coo_tensor(torch.tensor([[1, 2]]), torch.zeros(2), (3,)).coalesce(),
        "csr": torch.eye(3).to_sparse_csr(),
    }
    loaded = fastckpt.load(saved(state), into=into)
    assert loaded["coo"] is into["coo"]
    assert loaded["csr"] is into["csr"]
    assert same(loaded, state)


@dataclasses.dataclass
class Box:
    w: torch.Tensor


def test_into_registered(registry, saved):
    registry(Box, lambda box: box.w, Box)
    into = {"box": Box(torch.zeros(2)), frozenset([1]): torch.zeros(1)}
    loaded = fastckpt.load(saved({"box": Box(torch.ones(2)), frozenset([1]): torch.ones(1)}), into=into)
    assert loaded["box"].w is into["box"].w
    assert into["box"].w.sum() == 2
    assert loaded[frozenset([1])] is into[frozenset([1])]


def test_into_with_keys(saved):
    path = saved({"a": [torch.ones(1), torch.ones(2)], "b": torch.ones(3)})
    into = {"a": [torch.zeros(1), torch.zeros(2)], "b": torch.zeros(9)}
    assert fastckpt.load(path, into=into, keys="a.1") is into
    assert [list(into), len(into["a"]), into["b"].shape] == [["a", "b"], 2, (9,)]
    assert into["a"][1].sum() == 2
    assert not into["a"][0].any()


# keys=


@pytest.fixture
def tree(saved):
    return saved(
        {
            "model": collections.OrderedDict([("w", torch.ones(1)), ("b", torch.ones(2)), ("name", "x")]),
            "list": [1, torch.ones(3), (2, torch.ones(4)), [torch.ones(5)]],
            "default": collections.defaultdict(list, {"k": torch.ones(6), 1: 2}),
            ("t", 1): {"x": np.ones(7)},
            "sparse": torch.eye(2).to_sparse(),
            "blob": b"x" * 5000,
            "step": 1,
            "empty": {},
        }
    )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("model.w", {"model": collections.OrderedDict(w=torch.ones(1))}),
        ("model.*", {"model": collections.OrderedDict(w=torch.ones(1), b=torch.ones(2), name="x")}),
        (["*.b", "list.3.0"], {"model": collections.OrderedDict(b=torch.ones(2)), "list": [[torch.ones(5)]]}),
        (("list.2.?",), {"list": [(2, torch.ones(4))]}),
        ("list.2.1", {"list": [(torch.ones(4),)]}),
        ("list.0", {"list": [1]}),
        ("default.1", {"default": collections.defaultdict(list, {1: 2})}),
        (["step", "empty"], {"step": 1, "empty": {}}),
        ("e*", {"empty": {}}),
        ("sparse", {"sparse": torch.eye(2).to_sparse()}),
        ("default.[k]", {"default": collections.defaultdict(list, k=torch.ones(6))}),
        ("('t', 1).x", {("t", 1): {"x": np.ones(7)}}),
        ("sparse.values", {"sparse": torch.eye(2).to_sparse()}),
        ("blob", {"blob": b"x" * 5000}),
        ([], {}),
    ],
)
def test_keys(tree, keys, expected):
    assert same(fastckpt.load(tree, keys=keys), expected)


@pytest.mark.parametrize("state", [{}, [], 5, None, "text", {"a": {}, "b": [(), 1]}, (1, {2: b"x"})])
def test_every_key_is_the_whole_state(saved, state):
    """`keys="*"` selects the whole state even if it holds no tensor."""
    assert same(fastckpt.load(saved(state), keys="*"), state)


def test_every_key_of_a_state_of_all_kinds(saved, registry):
    @dataclasses.dataclass(eq=True)
    class Note:
        text: str

    registry(Note, dataclasses.asdict, lambda value: Note(**value), "note")
    state = {
        "model": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict(),
        "values": [
            1.5,
            2**70,
            None,
            True,
            "x",
            b"y",
            slice(1, None),
            torch.Size([3]),
            torch.float16,
            pathlib.Path("p"),
        ],
        "sets": [{1, 2}, frozenset(), set()],
        "time": dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
        "note": Note("x"),
        (1, "two"): {frozenset({3}): 4},
        "count": collections.Counter("ab"),
        "sparse": torch.eye(2).to_sparse(),
        "empty": [{}, [], (), collections.OrderedDict(), collections.defaultdict(list)],
    }
    loaded = fastckpt.load(saved(state), keys="*")
    assert same(loaded, state)
    assert vars(loaded["model"])["_metadata"] == state["model"]._metadata
    assert same(fastckpt.load(saved(state), keys="time"), {"time": state["time"]})
    assert same(fastckpt.load(saved(state), keys="note.text"), {"note": state["note"]})


def test_keys_bring_what_training_goes_on_with(saved):
    def training():
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])

    model, optimizer, scheduler = training()
    fresh = optimizer.state_dict()
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "model": model.state_dict()}
    path = saved({**state, "step": 7})
    for part, target in zip(("optimizer", "scheduler", "model"), training()[1:] + training()[:1], strict=True):
        for pattern in (f"{part}.*", f"{part}*"):
            loaded = fastckpt.load(path, keys=pattern)
            assert list(loaded) == [part]
            assert same(loaded[part], state[part])
        target.load_state_dict(loaded[part])
    assert fastckpt.load(path, keys="step") == {"step": 7}
    into = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
    assert same(fastckpt.load(path, into=into, keys=["model.*", "step"])["step"], 7)
    assert same(dict(into["model"]), dict(state["model"]))
    # Before the first step the optimizer's state is an empty dict, which its load_state_dict needs.
    loaded = fastckpt.load(saved({"optimizer": fresh, "w": torch.ones(1)}), keys="optimizer.*")
    assert same(loaded, {"optimizer": fresh})


def test_types_of_what_was_not_chosen_need_not_be_known(registry, undeclare, saved):
    @dataclasses.dataclass(frozen=True)
    class Theirs:
        w: object

    registry(Theirs, lambda theirs: theirs.w, Theirs, "theirs")
    path = saved(
        {
            "model": {"w": torch.ones(2)},
            "data": {"a": Theirs(torch.ones(3)), Theirs(1): 5, "t": dt.date(2024, 1, 1)},
            "plain": 1,
        }
    )
    undeclare()
    for keys, expected in (("model.*", {"model": {"w": torch.ones(2)}}), ("plain", {"plain": 1})):
        assert same(fastckpt.load(path, keys=keys), expected)
    into = {"model": {"w": torch.zeros(2)}}
    assert fastckpt.load(path, keys="model.*", into=into)["model"]["w"] is into["model"]["w"]
    for keys in ("data.*", "data.a", "*", "*theirs*", None):
        with pytest.raises(UnsupportedTypeError, match=r"'theirs'.*fastckpt\.register_type"):
            fastckpt.load(path, keys=keys)


def test_keys_of_a_module_state_leave_its_attributes_out(saved):
    path = saved({"m": torch.nn.Linear(2, 2).state_dict()})
    loaded = fastckpt.load(path, keys="m.bias")
    assert list(loaded["m"]) == ["bias"]
    assert type(loaded["m"]) is collections.OrderedDict
    assert not vars(loaded["m"])


def test_keys_read_only_their_bytes(saved, caplog):
    path = saved({"big": torch.ones(1 << 20), "small": torch.ones(5)})
    with caplog.at_level(logging.INFO, "fastckpt"):
        fastckpt.load(path, keys="small")
    assert "loaded 20 B" in caplog.text


def test_what_torch_calls_device(tree):
    with pytest.raises(TypeError, match=r"load: unexpected keyword argument 'map_location': it is device= here$"):
        fastckpt.load(tree, map_location="cpu")


def test_keys_that_match_nothing(tree):
    with pytest.raises(KeyError, match=r"'modle\.w' matches nothing; similar: 'model\.w'"):
        fastckpt.load(tree, keys=["model.*", "modle.w"])
    with pytest.raises(KeyError, match=r"'modle' matches nothing; similar: 'model'"):
        fastckpt.load(tree, keys="modle")
    with pytest.raises(KeyError, match=r"'Model\.w' matches nothing"):
        fastckpt.load(tree, keys="Model.w")
    with pytest.raises(TypeError, match="pattern"):
        fastckpt.load(tree, keys=[1])
    for wrong in (3, b"w"):
        with pytest.raises(TypeError, match="load: keys must be a pattern or a sequence of patterns"):
            fastckpt.load(tree, keys=wrong)


def test_keys_of_tied_tensors_name_places(saved):
    w = torch.ones(2)
    path = saved({"model": {"embed": w, "head": w, ("t", 1): [w]}, frozenset({1}): w, "other": torch.zeros(1)})
    assert same(fastckpt.load(path, keys="model.head"), {"model": {"head": w}})
    assert same(fastckpt.load(path, keys="*('t', 1).0"), {"model": {("t", 1): [w]}})
    # A tied place whose key has no name follows the first place.
    assert same(fastckpt.load(path, keys="model.embed"), {"model": {"embed": w}, frozenset({1}): w})
    both = fastckpt.load(path, keys=["model.embed", "model.head"])["model"]
    assert both["embed"] is both["head"]
    into = {"model": {"head": torch.zeros(2)}}
    assert fastckpt.load(path, keys="model.head", into=into)["model"]["head"] is into["model"]["head"]
    assert into["model"]["head"].sum() == 2


def test_registered_comes_whole(registry, saved):
    @dataclasses.dataclass
    class Two:
        a: torch.Tensor
        b: list

    registry(Two, lambda two: {"a": two.a, "b": two.b}, lambda v: Two(**v), "two")
    loaded = fastckpt.load(saved({"x": Two(torch.ones(1), [torch.ones(2), 5]), "y": torch.ones(1)}), keys="x.a")
    assert list(loaded) == ["x"]
    assert loaded["x"].b[1] == 5


# framework=


def test_framework_numpy(saved):
    state = {
        "w": torch.nn.Parameter(torch.randn(3, 4)),
        "c": torch.randn(3, dtype=torch.complex128),
        "n": np.arange(3),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "tied": [0, 0],
    }
    state["tied"] = [state["n"], state["n"]]
    loaded = fastckpt.load(saved(state), framework="numpy")
    assert type(loaded["w"]) is np.ndarray
    assert (loaded["w"] == state["w"].detach().numpy()).all()
    assert (loaded["c"] == state["c"].numpy()).all()
    assert loaded["tied"][0] is loaded["n"]
    assert (loaded["size"], loaded["dtype"], loaded["device"]) == ((1, 2), "bfloat16", "cuda:1")


def test_framework_numpy_needs_no_torch(saved):
    path = saved({"w": torch.ones(3), "s": torch.Size([1]), "m": torch.nn.Linear(1, 1).state_dict()})
    code = f"""
import sys
sys.modules["torch"] = None
import fastckpt
state = fastckpt.load({str(path)!r}, framework="numpy")
assert state["w"].sum() == 3 and state["s"] == (1,), state
assert fastckpt.open({str(path)!r}).info("w").dtype == "float32"
try:
    fastckpt.load({str(path)!r})
except ImportError as error:
    assert 'framework="numpy"' in str(error), error
else:
    raise SystemExit("no ImportError")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_framework_numpy_without_the_dtype(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    path = saved({"w": torch.ones(3, dtype=torch.bfloat16), "v": torch.ones(2), "s": torch.eye(2).to_sparse()})
    with pytest.raises(UnsupportedTypeError, match="'w' has dtype bfloat16, which numpy"):
        fastckpt.load(path, framework="numpy", keys=["w", "v"])
    assert fastckpt.load(path, framework="numpy", keys="v")["v"].sum() == 2
    with pytest.raises(UnsupportedTypeError, match="a sparse tensor"):
        fastckpt.load(path, framework="numpy", keys="s.*")


def test_framework_numpy_through_ml_dtypes(saved, monkeypatch):
    # A stand-in for the bfloat16 of ml_dtypes: an integer of the same bits.
    monkeypatch.setitem(sys.modules, "ml_dtypes", types.SimpleNamespace(bfloat16=np.uint16))
    w = torch.randn(3).bfloat16()
    loaded = fastckpt.load(saved({"w": w}), framework="numpy")
    assert loaded["w"].tobytes() == bits(w)


def test_framework_torch(saved):
    state = {
        "n": np.arange(6.0).reshape(2, 3),
        "swapped": np.arange(3, dtype=">i4"),
        "0d": np.array(5),
        "w": torch.ones(2),
        "scalar": np.float32(1),
        "wide": np.arange(3, dtype=np.complex128),
    }
    loaded = fastckpt.load(saved(state), framework="torch")
    assert torch.equal(loaded["n"], torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
    assert torch.equal(loaded["swapped"], torch.arange(3, dtype=torch.int32))
    assert torch.equal(loaded["0d"], torch.tensor(5))
    assert loaded["wide"].dtype is torch.complex128
    assert type(loaded["scalar"]) is np.float32
    with pytest.raises(UnsupportedTypeError, match="'s' has dtype <U1, which torch does not have"):
        fastckpt.load(saved({"s": np.array(["a"])}), framework="torch")


# Other options.


def test_verify_off_still_loads_and_verify_on_finds_damage(saved):
    path = saved({"w": torch.ones(1000)})
    shard = path / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert fastckpt.load(path, io=fastckpt.IO(verify=False))["w"].numel() == 1000
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        fastckpt.load(path)


def test_damage_while_filling_is_an_error(saved):
    path = saved({"w": torch.ones(10, 10)})
    shard = path / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        fastckpt.load(path, into={"w": torch.zeros(10, 20)[:, ::2]})


def test_arguments(saved, tmp_path):
    path = saved([1])
    with pytest.raises(ValueError, match="load: framework must be one of auto, torch, numpy, not 'jax'"):
        fastckpt.load(path, framework="jax")
    with pytest.raises(ValueError, match="load: io must be one of"):
        fastckpt.load(path, io="x")
    with pytest.raises(ValueError, match=r"^IO: threads must be"):
        fastckpt.IO(threads=0)
    with pytest.raises(TypeError, match=r"load: io must be the name of an engine or a fastckpt\.IO, not 3"):
        fastckpt.load(path, io=3)
    with pytest.raises(FileNotFoundError):
        fastckpt.load(tmp_path / "nothing")
    with pytest.raises(TypeError, match="path must be"):
        fastckpt.load(3)


def test_all_tensors_of_a_state_without_any(tmp_path):
    fastckpt.save({"step": 7}, tmp_path / "c")
    assert isinstance(fastckpt.load(tmp_path / "c", keys="*"), dict)
    with pytest.raises(KeyError, match="matches nothing"):
        fastckpt.load(tmp_path / "c", keys="model.*")


@given(
    data=st.data(), name=st.sampled_from(["matrix", "rows", "deep", "text"]), kind=st.sampled_from(["numpy", "torch"])
)
@settings(max_examples=80, deadline=None)
def test_into_memory_of_any_strides(strided, data, name, kind):
    """With permuted dimensions, gaps and, in numpy, negative strides, a load writes only to the elements."""
    path, state = strided
    array = state[name]
    steps = [data.draw(st.sampled_from([1, 2, 3] if kind == "torch" else [1, 2, 3, -1, -2])) for _ in array.shape]
    order = data.draw(st.permutations(range(array.ndim)))
    base = np.zeros([array.shape[at] * abs(steps[at]) for at in order], array.dtype)
    target = base[tuple(slice(None, None, steps[at]) for at in order)].transpose(np.argsort(order))
    assert target.shape == array.shape
    into = torch.from_numpy(target) if kind == "torch" and name != "text" else target
    chosen = "torch" if kind == "torch" and name != "text" else "auto"
    loaded, report = with_report(fastckpt.load, path, into={name: into}, keys=name, framework=chosen)
    assert loaded[name] is into
    assert (target == array).all()
    assert np.count_nonzero(base != np.zeros((), base.dtype)) == np.count_nonzero(array != np.zeros((), array.dtype))
    assert report.bytes == array.nbytes


@pytest.fixture(scope="module")
def strided(tmp_path_factory):
    state = {
        "matrix": np.arange(1, 3001, dtype=np.float32).reshape(50, 60),
        "rows": np.arange(6 * 900_000, dtype=np.int16).reshape(6, 900_000),
        "deep": np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5),
        "text": np.array([["ab", "c"], ["", "def"]]),
    }
    path = tmp_path_factory.mktemp("strided") / "c"
    fastckpt.save(state, path)
    return path, state


def test_a_load_gives_its_report(tmp_path):
    state = {"w": torch.arange(1000), "n": 5}
    fastckpt.save(state, tmp_path / "c")
    found, report = with_report(fastckpt.load, tmp_path / "c", threads=1, io="threads")
    assert same(found, state)
    assert isinstance(report, fastckpt.types.LoadReport)
    assert (report.bytes, report.engine, report.threads, report.tensors) == (8000, "threads", 1, 1)
    assert sum(report.thread_bytes) == 8000
    assert same(fastckpt.load(tmp_path / "c", io=fastckpt.IO(on_report=None)), state)
    with pytest.raises(TypeError, match=r"^IO: on_report must be a function, not True"):
        fastckpt.IO(on_report=True)
    mapped = with_report(fastckpt.load, tmp_path / "c", mmap=True)
    assert same(mapped.state, state)
    assert mapped.report.bytes == 8000


def test_a_part_that_is_passed_without_its_key_is_no_silent_success(tmp_path):
    model = torch.nn.Linear(2, 2)
    fastckpt.save({"model": model.state_dict(), "step": 1}, tmp_path / "c")
    other = torch.nn.Linear(2, 2)
    with pytest.raises(fastckpt.StructureMismatchError, match=r'into=\{"model": model\} with keys="model"'):
        fastckpt.load(tmp_path / "c", into=other)
    with pytest.warns(RuntimeWarning, match="no tensor of the checkpoint has a place in into="):
        fastckpt.load(tmp_path / "c", into=other, strict=False)
    fastckpt.load(tmp_path / "c", into={"model": other}, keys="model")
    assert torch.equal(other.weight, model.weight)
