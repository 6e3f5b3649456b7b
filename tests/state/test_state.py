"""Every kind of value that a state can hold, saved and loaded."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import math
import pathlib
import struct
import sys
import time
import typing

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt.exceptions import UnsupportedTypeError
from harness import limits, manifest
from harness.same import bits, same

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
QUANTIZED = [d for d in DTYPES if str(d).startswith(("torch.qint", "torch.quint"))]
DENSE = [d for d in DTYPES if d not in QUANTIZED]


def raw(dtype, *shape):
    """A tensor of any dtype, in which each byte differs from its neighbours."""
    count = math.prod(shape)
    values = np.arange(count * dtype.itemsize, dtype=np.uint8)
    if dtype is torch.bool:
        values %= 2
    return torch.from_numpy(values).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


# Tensors.

pytestmark = pytest.mark.filterwarnings("ignore:BComplex32 support is experimental")


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_dtype(dtype, trip):
    state = {"v": raw(dtype, 3, 5), "0d": raw(dtype, 1)[0], "0": raw(dtype, 0, 3), "u": raw(torch.uint8, 3)}
    assert same(trip(state), state)


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_dtype_of_non_contiguous(dtype, trip):
    state = [raw(dtype, 6, 4).t(), raw(dtype, 6, 4)[::2, 1::2], raw(dtype, 1).expand(3, 2), raw(torch.uint8, 5)]
    loaded = trip(state)
    assert same(loaded, state)
    assert [tensor.is_contiguous() for tensor in loaded] == [True, True, False, True]


def test_large_non_contiguous_over_blocks(trip):
    # 12 MB, transposed, in blocks of 4 MiB. Elements of 16 bytes are stored as bytes, so block edges may cut them.
    state = {"odd": raw(torch.uint8, 4097), "t": raw(torch.complex128, 750, 1001).t(), "w": raw(torch.bfloat16, 3, 5)}
    assert same(trip(state), state)


def test_large_tensor_is_read_where_direct_io_can_reach_it(tmp_path):
    fastckpt.save({"w": torch.randn(1 << 20)}, tmp_path / "c")
    fastckpt.save({"w": np.random.default_rng(0).random(1 << 18)}, tmp_path / "n")
    offsets = [manifest.body_of(tmp_path / name)["tensors"][0]["offset"] for name in "cn"]
    assert (fastckpt.load(tmp_path / "c")["w"].data_ptr() - offsets[0]) % 4096 == 0
    assert (fastckpt.load(tmp_path / "n")["w"].ctypes.data - offsets[1]) % 4096 == 0


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conj_and_neg_views(dtype, trip):
    exact = torch.randn(7, 3).to(torch.complex128)
    exact = torch.complex(exact.real.half().double(), torch.randn(7, 3).half().double())
    z = exact.to(dtype)
    state = {
        "conj": (z.conj(), exact.conj().resolve_conj()),
        "neg": (z.conj().imag, -exact.imag),
        "both": (torch._neg_view(z.conj()), -exact.conj().resolve_conj()),
        "negative": (torch._neg_view(z)[1:, ::2], -exact[1:, ::2]),
        "transposed": (z.t().conj(), exact.t().conj().resolve_conj()),
    }
    assert state["conj"][0].is_conj()
    assert state["neg"][0].is_neg()
    loaded = trip({name: given for name, (given, _) in state.items()})
    for name, (given, expected) in state.items():
        assert bits(loaded[name]) == bits(expected.to(given.dtype)), name
        assert not loaded[name].is_conj()
        assert not loaded[name].is_neg()


def test_conj_without_a_kernel(trip):
    dtype = getattr(torch, "bcomplex32", None)
    if dtype is None:
        pytest.skip("this torch has no bcomplex32")
    z = raw(dtype, 4)
    expected = z.view(torch.int16).clone()
    expected[1::2] ^= -(2**15)
    assert bits(trip({"z": z.conj()})["z"]) == bits(expected)


def test_nan_payloads_survive(trip):
    words = torch.tensor([0x7FC00001, 0x7F800001, -1, 0x7F800000, -0x800000], dtype=torch.int32)
    state = [words.view(torch.float32), words.view(torch.float32).reshape(5, 1).expand(5, 2)]
    assert same(trip(state), state)


def test_views_and_channels_last(trip):
    base = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    state = {
        "slice": base[1:, :, 2:3],
        "select": base[..., 0],
        "permuted": base.permute(3, 1, 0, 2),
        "channels_last": base.to(memory_format=torch.channels_last),
        "strided": base.as_strided((3, 3), (1, 1)),
        "negative": base.flip(0),
    }
    assert same(trip(state), state)


def test_empty_and_zero_dimensional(trip):
    state = [torch.empty(0), torch.empty(0, 5, 0), torch.tensor(3), torch.tensor(True), np.empty((0, 2)), np.array(5)]
    assert same(trip(state), state)


def test_requires_grad_and_parameters(trip):
    state = {
        "plain": torch.ones(2),
        "grad": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "computed": torch.ones(2, requires_grad=True) * 2,
        "int": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        "strided": torch.nn.Parameter(torch.randn(3, 2).t()),
    }
    loaded = trip(state)
    assert same(loaded, state)
    assert all(tensor.is_leaf for tensor in loaded.values())
    assert [type(tensor).__name__ for tensor in loaded.values()].count("Parameter") == 4


def test_tied_tensors_are_stored_once_and_come_back_tied(trip, tmp_path):
    w = torch.randn(300, 10)
    p = torch.nn.Parameter(w)
    t = torch.randn(4, 6).t()
    e = torch.empty(0)
    state = {
        "a": w,
        "b": w,
        "alias": w.view(300, 10),
        "p": p,
        "q": p,
        "t": t,
        "t2": t,
        "reshaped": w.view(10, 300),
        "e": [e, e],
    }
    loaded = trip(state)
    assert same(loaded, state)
    assert loaded["a"] is loaded["b"] is loaded["alias"]
    assert loaded["p"] is loaded["q"] is not loaded["a"]
    assert loaded["p"].data_ptr() == loaded["a"].data_ptr() != loaded["reshaped"].data_ptr()
    assert loaded["t"] is loaded["t2"]
    assert loaded["e"][0] is loaded["e"][1]
    with fastckpt.open(tmp_path / "trip") as checkpoint:
        assert list(checkpoint) == ["a", "t", "reshaped", "e.0"]


def test_tied_arrays_and_bytes(trip):
    a, b = np.arange(5), bytearray(range(256)) * 20
    loaded = trip([a, a, a[:], b, b])
    assert same(loaded, [a, a, a, b, b])
    assert loaded[0] is loaded[1] is loaded[2]
    assert loaded[3] is loaded[4]


def test_untied_tensors_stay_apart(trip):
    w = torch.zeros(4)
    loaded = trip({"half": w[:2], "other": w[2:], "ints": w.view(torch.int32), "whole": w})
    assert len({tensor.data_ptr() for tensor in loaded.values()}) == 4


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_coo(coalesced, trip):
    t = torch.sparse_coo_tensor(torch.tensor([[2, 0, 0], [1, 3, 3]]), torch.randn(3, 2), (4, 5, 2))
    t = t.coalesce() if coalesced else t
    state = {"t": t, "grad": t.detach().clone().requires_grad_(), "empty": torch.zeros(3, 4).to_sparse()}
    loaded = trip(state)
    assert same(loaded, state)
    assert loaded["t"].is_coalesced() is coalesced


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_sparse_compressed(layout, index, trip):
    dense = torch.tensor([[0.0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0], [0, 4, 5, 6]])
    t = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=(2, 2) if layout[0] == "b" else None)
    rows, columns = ("crow_indices", "col_indices") if layout in {"csr", "bsr"} else ("ccol_indices", "row_indices")
    t = torch.sparse_compressed_tensor(
        getattr(t, rows)().to(index), getattr(t, columns)().to(index), t.values(), t.shape, layout=t.layout
    )
    loaded = trip({"t": t, "grad": t.clone().requires_grad_()})
    assert same(loaded["t"], t)
    assert torch.equal(loaded["t"].to_dense(), dense)
    assert loaded["grad"].requires_grad


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_quantized(dtype, per, trip):
    x = torch.randn(4, 6)
    packed = str(dtype).endswith(("x2", "x4"))
    if per == "tensor":
        q = torch.quantize_per_tensor(x, 0.1, 0 if dtype is torch.qint32 else 3, dtype)
    else:
        zero = torch.zeros(4) if packed else torch.arange(4) * (dtype is not torch.qint32)
        q = torch.quantize_per_channel(x, torch.rand(4) + 0.1, zero, 0, dtype)
    loaded = trip({"q": q})["q"]
    assert (loaded.dtype, loaded.shape, loaded.qscheme()) == (q.dtype, q.shape, q.qscheme())
    assert torch.equal(loaded.int_repr(), q.int_repr())
    assert torch.equal(loaded.dequantize(), q.dequantize())
    if per == "channel":
        assert torch.equal(loaded.q_per_channel_scales(), q.q_per_channel_scales())
        assert loaded.q_per_channel_axis() == 0


def test_non_contiguous_quantized(trip):
    q = torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 3, torch.qint8).t()[1:]
    assert torch.equal(trip([q])[0].dequantize(), q.dequantize())


def test_torch_values(trip):
    state = {
        "size": torch.Size([2, 0, 3]),
        "numpy's size": torch.Size([np.int64(2), np.uint8(3)]),
        "large size": torch.Size([2**63 - 1, -(2**63)]),
        "none": torch.Size([]),
        "dtypes": DTYPES,
        "devices": [torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
        torch.float16: {torch.Size([1]): torch.device("cpu")},
    }
    assert same(trip(state), state)


def test_default_device_is_not_where_it_loads(trip):
    with torch.device("meta"):
        loaded = trip({"w": torch.ones(3, device="cpu"), "large": torch.ones(1 << 19, device="cpu")})
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}


def test_state_of_a_module_keeps_its_versions(trip):
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    state = module.state_dict()
    loaded = trip(state)
    assert same(loaded, state)
    assert type(loaded) is collections.OrderedDict
    assert loaded._metadata == state._metadata
    assert loaded._metadata["1"] == {"version": 2}
    module.load_state_dict(loaded)


def schedules():
    """A scheduler of each class of this torch, made with simple arguments."""
    kinds = torch.optim.lr_scheduler
    two = [lambda o: kinds.ConstantLR(o, total_iters=2), lambda o: kinds.ExponentialLR(o, 0.9)]
    return {
        "LambdaLR": lambda o: kinds.LambdaLR(o, lambda _: 0.5),
        "MultiplicativeLR": lambda o: kinds.MultiplicativeLR(o, lambda _: 0.5),
        "StepLR": lambda o: kinds.StepLR(o, 2),
        "MultiStepLR": lambda o: kinds.MultiStepLR(o, [2, 4, 4]),
        "ConstantLR": two[0],
        "LinearLR": kinds.LinearLR,
        "ExponentialLR": two[1],
        "PolynomialLR": kinds.PolynomialLR,
        "CosineAnnealingLR": lambda o: kinds.CosineAnnealingLR(o, 10),
        "CosineAnnealingWarmRestarts": lambda o: kinds.CosineAnnealingWarmRestarts(o, 10),
        "CyclicLR": lambda o: kinds.CyclicLR(o, 0.1, 0.2, cycle_momentum=False),
        "OneCycleLR": lambda o: kinds.OneCycleLR(o, 0.1, total_steps=10),
        "ReduceLROnPlateau": kinds.ReduceLROnPlateau,
        "SequentialLR": lambda o: kinds.SequentialLR(o, [make(o) for make in two], [2]),
        "ChainedScheduler": lambda o: kinds.ChainedScheduler([make(o) for make in two], o),
    }


def test_every_scheduler_of_torch_is_tried():
    kinds = vars(torch.optim.lr_scheduler)
    base = torch.optim.lr_scheduler.LRScheduler
    known = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, base)}
    assert {name for name in known if name[0] != "_"} - {"LRScheduler"} <= set(schedules())


# SequentialLR of torch 2.6 calls deprecated functions of torch.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("name", schedules())
def test_state_of_a_scheduler(name, trip):
    def training():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        return optimizer, schedules()[name](optimizer)

    optimizer, schedule = training()
    for _ in range(3):
        optimizer.step()
        schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    loaded = trip(schedule.state_dict())
    assert same(loaded, schedule.state_dict())
    _, other = training()
    other.load_state_dict(loaded)
    assert same(other.state_dict(), schedule.state_dict())


def test_counter(trip):
    state = {
        "c": collections.Counter("abca"),
        "w": [collections.Counter({(1, 2): torch.ones(2)}), collections.Counter()],
    }
    loaded = trip(state)
    assert same(loaded, state)
    assert loaded["c"]["missing"] == 0
    into = {"c": collections.Counter(), "w": [collections.Counter({(1, 2): torch.zeros(2)})]}
    assert trip(state, into=into)["w"][0][1, 2] is into["w"][0][1, 2]
    assert same(trip(state, keys="w.*"), {"w": state["w"]})
    assert same(trip(state, keys="w.0*"), {"w": [state["w"][0]]})
    assert same(trip(state, keys="c.b"), {"c": state["c"]})
    state["c"].name = "attribute"
    assert trip(state)["c"].name == "attribute"


def test_whole_training_state(trip):
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(8, 2, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    model(torch.randn(3, 2, 8)).sum().backward()
    optimizer.step()
    schedule.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        # Most training scripts save the legacy state.
        "rng": (torch.get_rng_state(), np.random.get_state(), np.random.default_rng(1).bit_generator.state),  # noqa: NPY002
        "random": __import__("random").getstate(),
    }
    loaded = trip(state)
    assert same(loaded, state)
    optimizer.load_state_dict(loaded["optimizer"])
    __import__("random").setstate(loaded["random"])
    np.random.set_state(loaded["rng"][1])  # noqa: NPY002


# numpy.

NUMPY = [
    *(
        "?",
        "i1",
        "u1",
        "<i2",
        "<u2",
        "<i4",
        "<u4",
        "<i8",
        "<u8",
        "<f2",
        "<f4",
        "<f8",
        "g",
        "<c8",
        "<c16",
        "G",
        "q",
        "Q",
    ),
    *(">i2", ">u4", ">i8", ">f2", ">f8", ">c16", "S5", "<U3", ">U3", "<M8[ns]", "<M8[25s]", ">M8[D]", "<m8[us]", "<m8"),
]


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_dtype(name, trip):
    dtype = np.dtype(name)
    values = np.arange(12).astype(dtype) if dtype.kind != "b" else np.arange(12) % 2 == 0
    grid = values.reshape(3, 4)
    state = {"v": grid, "t": grid.T, "s": grid[::-1, 1::2], "0": values[:0], "0d": np.array(values[3]), "w": values[:1]}
    loaded = trip(state)
    assert same(loaded, state)
    assert loaded["v"].dtype.str == dtype.str
    assert loaded["v"].flags.writeable


@pytest.mark.parametrize("name", [n for n in NUMPY if n[0] != ">" and n not in "qQ"])
def test_numpy_scalar(name, trip):
    value = np.arange(3).astype(np.dtype(name))[2] if name != "?" else np.bool_(True)
    state = {"v": [value]} if name == "<m8" else {"v": value, value: [value]}  # a time without a unit has no hash
    assert same(trip(state), state)


def test_numpy_scalars_at_their_edges(trip):
    state = [
        np.float64("nan"),
        np.float32("-inf"),
        np.str_(""),
        np.str_("a\0\0"),
        np.str_("\U0001f600"),
        np.bytes_(b""),
        np.bytes_(b"a\0"),
        np.datetime64("NaT"),
        np.datetime64("2020-02-29"),
        np.uint64(2**64 - 1),
    ]
    assert same(trip(state), state)


def test_large_numpy_non_contiguous(trip):
    state = {"w": np.random.default_rng(0).random((1100, 1000)).T, "odd": np.zeros(7, np.uint8)}
    assert same(trip(state), state)


def test_memmap_comes_back_as_an_array(trip, tmp_path):
    mapped = np.memmap(tmp_path / "m", np.float32, "w+", shape=(3, 4))
    mapped[:] = 7
    loaded = trip([mapped])[0]
    assert type(loaded) is np.ndarray
    assert (loaded == 7).all()


# Python's leaves.


@pytest.mark.parametrize("value", [0, 1, -1, 2**53, -(2**53), 2**53 + 1, -(2**53) - 1, 2**64, 10**400, -(7**5000)])
def test_int(value, trip):
    assert same(trip({"v": value, value: 1}), {"v": value, value: 1})


@pytest.mark.parametrize(
    "value",
    [
        *(0.0, -0.0, 1.0, 0.1, 1e300, 5e-324, -1e16, float("inf"), float("-inf"), float("nan")),
        struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
    ],
)
def test_float(value, trip):
    loaded = trip([value, complex(value, -0.0), complex(1, value)])
    assert same(loaded, [value, complex(value, -0.0), complex(1, value)])


@pytest.mark.parametrize("value", ["", "a", "\0", "\ud800", '\U0001f600\n"\\', "é" * 5000, "null", "a.b/c~1"])
def test_str(value, trip):
    assert same(trip({"v": value, value: 1}), {"v": value, value: 1})


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4095, 4096, 4097, 3 << 20])
def test_bytes(size, trip):
    value = bytes(i % 251 for i in range(size))
    assert same(trip([value, bytearray(value)]), [value, bytearray(value)])


def test_bool_and_none(trip):
    state = [True, False, None, {None: 1, True: 2, 0: False}]
    assert same(trip(state), state)


def test_range_and_slice(trip):
    state = [
        range(5),
        range(10, -3, -2),
        range(0),
        range(2**70, 2**71, 3),
        slice(None),
        slice(1, 2.5, "x"),
        slice([1], {2: 3}),
    ]
    assert same(trip(state), state)


def test_datetime(trip):
    zone = dt.timezone(dt.timedelta(hours=-5, seconds=7), "here")
    state = [
        dt.datetime(2024, 2, 29, 23, 59, 58, 999999),  # noqa: DTZ001 - without a zone is a case
        dt.datetime(1, 1, 1, tzinfo=dt.timezone.utc),
        dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zone),
        dt.date(9999, 12, 31),
        dt.time(1, 2, 3, 4),
        dt.time(23, 0, tzinfo=zone, fold=1),
        dt.timedelta(days=-3, seconds=5, microseconds=7),
        zone,
        dt.timezone.utc,
        dt.timezone(dt.timedelta(hours=1)),
    ]
    loaded = trip(state)
    assert same(loaded, state)
    assert [getattr(v, "fold", 0) for v in loaded] == [getattr(v, "fold", 0) for v in state]
    assert [v.tzname(None) for v in loaded[-3:]] == [v.tzname(None) for v in state[-3:]]
    assert loaded[1].tzinfo is dt.timezone.utc


def test_paths(trip):
    state = [
        pathlib.Path("/a/b c"),
        pathlib.Path(),
        pathlib.PurePosixPath("x/../y"),
        pathlib.PureWindowsPath("C:\\a"),
        pathlib.Path("\udcff"),
    ]
    assert same(trip(state), state)


# Containers.


def test_containers(trip):
    ordered = collections.OrderedDict([("z", 1), ("a", torch.ones(1))])
    default = collections.defaultdict(list, {"k": [np.arange(3)]})
    state = {
        "dict": {"b": 1, "a": {}},
        "ordered": ordered,
        "default": default,
        "defaults": [collections.defaultdict(f, {1: 2}) for f in (None, dict, int, float, set, str, bool, tuple)],
        "list": [[], [[]]],
        "tuple": ((), (1,), (torch.ones(1), [])),
        "set": {1, "a", (2, 3), None},
        "frozenset": frozenset({1, frozenset({2})}),
        "empty": [set(), frozenset(), {}, collections.OrderedDict()],
    }
    loaded = trip(state)
    assert same(loaded, state)
    assert list(loaded["dict"]) == ["b", "a"]
    assert loaded["default"]["new"] == []


def test_keys_keep_their_types(trip):
    state = {
        1: "int",
        "1": "str",
        2.5: "float",
        None: "none",
        False: "bool",
        b"x": "bytes",
        b"y" * 5000: "long bytes",
        (1, ("a", None)): "tuple",
        frozenset({3}): "fset",
        2**60: "big",
        float("inf"): "inf",
        dt.date(2020, 1, 1): "date",
        range(3): "range",
        pathlib.PurePosixPath("p"): "path",
        np.int8(77): "scalar",
    }
    assert same(trip(state), state)
    assert same(trip({float("nan"): 1}), {float("nan"): 1})


def test_tensor_as_a_key(trip):
    ((key, value),) = trip({torch.arange(3): 1}).items()
    assert torch.equal(key, torch.arange(3))
    assert value == 1


@pytest.mark.parametrize(
    "key", ["", "a.b", "a/b", "../x", "é漢\U0001f600", "\ud800", '\0\n"', "__metadata__", "~1", "x" * 3000]
)
def test_names(key, trip, tmp_path):
    state = {key: torch.arange(3), "in": {key: {key: np.arange(2)}}}
    assert same(trip(state), state)
    with fastckpt.open(tmp_path / "trip") as checkpoint:
        assert torch.equal(checkpoint[next(iter(checkpoint))], torch.arange(3))


def test_clashing_names_get_a_suffix(trip, tmp_path):
    state = {
        "a.b": torch.tensor(0),
        "a": {"b": torch.tensor(1)},
        "a.b~1": torch.tensor(2),
        1: torch.tensor(3),
        "1": torch.tensor(4),
    }
    assert same(trip(state), state)
    with fastckpt.open(tmp_path / "trip") as checkpoint:
        assert list(checkpoint) == ["a.b", "a.b~1", "a.b~1~1", "1", "1~1"]


def test_many_clashes_take_linear_time(tmp_path):
    def seconds(count):
        state = {frozenset({i}): torch.tensor(i) for i in range(count)}
        began = time.process_time()
        fastckpt.save(state, tmp_path / "c")
        return time.process_time() - began

    few = min(seconds(5_000) for _ in range(3))
    assert min(seconds(20_000) for _ in range(2)) < 8 * few
    assert list(fastckpt.open(tmp_path / "c"))[-1] == "frozenset~19999"


@pytest.mark.parametrize(
    "state", [torch.arange(5), np.arange(3), 7, None, "x", [], {}, b"x" * 5000, torch.eye(2).to_sparse()], ids=repr
)
def test_root_of_any_type(state, trip, tmp_path):
    assert same(trip(state), state)
    if type(state) in (np.ndarray, bytes) or (isinstance(state, torch.Tensor) and not state.is_sparse):
        assert list(fastckpt.open(tmp_path / "trip")) == ["tensor"]


def test_deep_nesting_whatever_the_stack(trip):
    state = torch.arange(4)
    for level in range(500):
        state = [{"k": state}, (state,), [state], {level: state}][level % 4] if level % 4 else {"k": state}
    assert same(trip(state), state)
    limit = sys.getrecursionlimit()
    deep = {"end": torch.ones(1)}
    for _ in range(9_990):
        deep = [deep]
    sys.setrecursionlimit(150)
    try:
        loaded = trip(deep)
    finally:
        sys.setrecursionlimit(limit)
    assert same(loaded, deep)


def test_too_deep():
    deep = []
    for _ in range(10_001):
        deep = [deep]
    with pytest.raises(UnsupportedTypeError, match="nested deeper than 10000 levels"):
        fastckpt.save(deep, "/nonexistent/x")


def test_depth_limits_of_both_sides_agree(tmp_path):
    def nest(depth):
        state = dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)
        for _ in range(depth):
            state = (state,)
        return state

    for depth in range(9_996, 10_003):
        try:
            fastckpt.save(nest(depth), tmp_path / "c")
        except UnsupportedTypeError:
            assert depth >= 9_998
            continue
        assert same(fastckpt.load(tmp_path / "c"), nest(depth))


def test_many_small_tensors_take_less_than_safetensors(tmp_path):
    from safetensors.torch import load_file, save_file

    def seconds(call):
        # CPU time of all threads, because other processes may use the CPU, too.
        began = time.process_time()
        call()
        return time.process_time() - began

    def best(call):
        return min(seconds(call) for _ in range(2))

    tensors = [torch.full((1,), float(i)) for i in range(30_000)]
    theirs = {str(i): tensor for i, tensor in enumerate(tensors)}
    assert best(lambda: fastckpt.save({"w": tensors}, tmp_path / "c")) < best(lambda: save_file(theirs, tmp_path / "f"))
    assert best(lambda: fastckpt.load(tmp_path / "c")) < best(lambda: load_file(tmp_path / "f"))
    assert torch.equal(torch.cat(fastckpt.load(tmp_path / "c")["w"]), torch.arange(30_000.0))


# Registered types.


@dataclasses.dataclass
class Position:
    epoch: int
    tensor: torch.Tensor


class Colour(enum.Enum):
    RED = "r"


class Pair(typing.NamedTuple):
    a: int
    b: torch.Tensor


def test_registered_types(registry, trip):
    registry(Position, lambda p: {"epoch": p.epoch, "tensor": p.tensor}, lambda v: Position(**v))
    registry(Colour, lambda c: c.value, Colour, "colour")
    registry(Pair, tuple, lambda v: Pair(*v))
    loaded = trip({"p": Position(3, torch.arange(2)), Colour.RED: [Colour.RED], "pair": Pair(1, torch.ones(2))})
    assert loaded["p"].epoch == 3
    assert torch.equal(loaded["p"].tensor, torch.arange(2))
    assert loaded[Colour.RED] == [Colour.RED]
    assert type(loaded["pair"]) is Pair


class Zone(dt.tzinfo):
    def utcoffset(self, _):
        return dt.timedelta(hours=1)

    def __eq__(self, other):
        return type(other) is Zone

    def __hash__(self):
        return 1


def test_registered_time_zone(registry, trip):
    registry(Zone, lambda _: "one hour", lambda _: Zone())
    value = dt.datetime(2024, 7, 1, tzinfo=Zone())
    assert trip([value]) == [value]
    assert trip([value])[0].tzinfo == Zone()


def test_wrapper_subclass_through_its_own_protocol(registry, trip):
    from torch.testing._internal.two_tensor import TwoTensor

    registry(TwoTensor, None, None)
    t = TwoTensor(torch.arange(3.0), torch.ones(3))
    parameter = torch.nn.Parameter(TwoTensor(torch.zeros(2), torch.ones(2)))
    loaded = trip({"t": t, "p": parameter})
    assert type(loaded["t"]) is TwoTensor
    assert torch.equal(loaded["t"].a, t.a)
    assert torch.equal(loaded["t"].b, t.b)
    assert loaded["p"].requires_grad
    assert isinstance(loaded["p"], torch.nn.Parameter)


def test_a_type_that_was_refused_can_be_registered_after_all(registry, trip):
    """The error's advice must work in the same process, even in a notebook."""

    class Late:
        def __init__(self, values):
            self.values = values

    state = {"v": Late(torch.arange(3.0))}
    for _ in range(2):
        with pytest.raises(UnsupportedTypeError, match=r"register it with fastckpt\.register_type"):
            trip(state)
    registry(Late, lambda late: late.values, Late, "late")
    loaded = trip(state)["v"]
    assert type(loaded) is Late
    assert loaded.values.tolist() == [0, 1, 2]


def test_unregistered_name(registry, undeclare, tmp_path):
    registry(Colour, lambda c: c.value, Colour, "colour")
    fastckpt.save([Colour.RED], tmp_path / "c")
    undeclare()
    with pytest.raises(UnsupportedTypeError, match=r"'colour'.*fastckpt.register_type"):
        fastckpt.load(tmp_path / "c")


def test_failing_decoder(registry, tmp_path):
    registry(Colour, lambda c: c.value, lambda _: 1 / 0, "colour")
    fastckpt.save([Colour.RED], tmp_path / "c")
    with pytest.raises(fastckpt.CheckpointError, match=r"'colour' raised ZeroDivisionError"):
        fastckpt.load(tmp_path / "c")


def test_bad_registrations(registry):
    registry(Colour, str, str, "taken")
    registry(Colour, str, str, "taken")
    with pytest.raises(ValueError, match="belongs to"):
        registry(Pair, str, str, "taken")
    for kind in (dict, int, np.ndarray, np.float32, torch.Tensor, torch.Size, dt.datetime):
        with pytest.raises(ValueError, match="without registration"):
            registry(kind, str, str)
    with pytest.raises(TypeError, match="is not a class"):
        registry("Pair", str, str)
    with pytest.raises(TypeError, match="__tensor_flatten__"):
        registry(object, None, None)
    with pytest.raises(TypeError, match="callable"):
        registry(Pair, str, None)
    with pytest.raises(ValueError, match="fastckpt's own"):
        registry(Pair, str, str, "collections.OrderedDict")
    with pytest.raises(ValueError, match="to store it in another way, give another name"):
        registry(collections.deque, list, collections.deque)
    registry(collections.deque, list, collections.deque, "mine")


# Values that cannot be saved.


def a_cycle():
    cycle = []
    cycle.append({"again": cycle})
    return cycle


def a_freed_tensor():
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    return freed


def a_jagged_size():
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return [1, jagged.shape]


def a_fake_tensor():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


UNSUPPORTED = {
    "function": (lambda: len, "builtins.builtin_function_or_method is not supported"),
    "object": (object, "fastckpt.register_type"),
    "cycle": (a_cycle, r"\[0\]\['again'\]: it contains itself"),
    "meta": (lambda: torch.ones(2, device="meta"), "meta tensor has no data"),
    "fake": (a_fake_tensor, "FakeTensor has no data"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), "layout torch._mkldnn"),
    "freed": (a_freed_tensor, "freed"),
    "jagged size": (a_jagged_size, r"\[1\]: a torch\.Size with the symbolic size j\d+ has no value"),
    "huge size": (lambda: torch.Size([2**63]), "beyond 64 bits"),
    "factory": (lambda: collections.defaultdict(lambda: 1), "factories"),
    "objects": (lambda: np.zeros(2, "i4,O"), "fields of Python objects"),
    "void": (lambda: np.void(b"xx"), "numpy.void is not supported"),
    "class": (lambda: int, "builtins.type is not supported"),
    "key": (lambda: {(1, object()): 1}, r"\(1, <object object at .*>\)"),
    "many dimensions": (lambda: torch.ones([1] * 65), "64 dimensions"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_is_named_by_place_before_anything_is_written(name, tmp_path):
    make, message = UNSUPPORTED[name]
    value = make()
    state = {"optimizer": {"param_groups": [{"fn": value}]}}
    with pytest.raises(UnsupportedTypeError, match=message) as caught:
        fastckpt.save(state, tmp_path / "c")
    assert "save: cannot store ['optimizer']['param_groups'][0]['fn']" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_tensor_inside_a_transform():
    def body(t):
        with pytest.raises(UnsupportedTypeError, match=r"\['x'\]: its memory cannot be reached"):
            fastckpt.save({"x": t}, "/nonexistent/x")
        return t

    torch.func.vmap(body)(torch.ones(2, 2))


def test_failing_encoder(registry, tmp_path):
    registry(Colour, lambda _: 1 / 0, Colour)
    with pytest.raises(UnsupportedTypeError, match=r"\['c'\].*Colour raised ZeroDivisionError"):
        fastckpt.save({"c": Colour.RED}, tmp_path / "c")


def test_encoder_that_returns_its_object(registry, tmp_path):
    registry(Position, lambda p: p, lambda v: v)
    with pytest.raises(UnsupportedTypeError, match="contains itself"):
        fastckpt.save([Position(1, torch.ones(1))], tmp_path / "c")


def test_shared_lists_that_explode_are_refused(monkeypatch):
    limits.lower(monkeypatch, "tokens of a structure", 10_000)
    state = []
    for _ in range(40):
        state = [state, state]
    with pytest.raises(UnsupportedTypeError, match="more than 10000 values"):
        fastckpt.save(state, "/nonexistent/x")
