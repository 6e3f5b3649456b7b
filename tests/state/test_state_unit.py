"""Internals of decoding: harmful tokens, which raise CorruptCheckpointError soon and in bounded memory, and
types and tensors that no interpreter here has.
"""

from __future__ import annotations

import collections
import json
import pathlib
import random
import resource
import time

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import CorruptCheckpointError, Registry
from fastckpt._api.destinations import Targets
from fastckpt._core import LogicalType, StoredTensor
from fastckpt._state import hashes, structural
from fastckpt._state.builders import StateBuilder, Validator
from fastckpt._state.unflatten import parse, unflatten
from fastckpt.exceptions import FormatVersionError, UnsupportedTypeError
from harness.same import same

STORED = [
    StoredTensor("a", "F32", (2, 3), 0, 4096, 24),
    StoredTensor("b", "U8", (5000,), 0, 4120, 5000),
    StoredTensor("z", "U8", (16,), 0, 9120, 16, LogicalType("torch.complex128", (1,))),
    StoredTensor("n", "U8", (8,), 0, 9136, 8, LogicalType("numpy.>f8", (1,))),
    StoredTensor("i", "I64", (2, 3), 0, 9144, 48),
    StoredTensor("evil", "U8", (8,), 0, 9192, 8, LogicalType("torch.load", (1,))),
    StoredTensor("object", "U8", (8,), 0, 9200, 8, LogicalType("numpy.|O8", (1,))),
    StoredTensor("small", "U8", (8,), 0, 9208, 8, LogicalType("torch.complex128", (1,))),
    StoredTensor("huge", "F32", (2**62, 2**62, 0), 0, 9216, 0),
    StoredTensor("vast", "U8", (0,), 0, 9216, 0, LogicalType("numpy.<f16", (2**40, 2**40, 0))),
    StoredTensor("field", "U8", (8,), 0, 9216, 8, LogicalType("numpy.(999999999,999999999)f8", (1,))),
    StoredTensor("long text", "U8", (8,), 0, 9224, 8, LogicalType("numpy.<U9999999999", (1,))),
    StoredTensor("quantized", "U8", (8,), 0, 9232, 8, LogicalType("torch.quint8", (8,))),
]


def decode(source, stored=STORED, reader=None):
    """Decode a structure as a load does, without reading a file."""
    tokens = parse(source if isinstance(source, str) else json.dumps(source))
    check = Validator(stored)
    unflatten(tokens, check)
    targets = Targets(stored, "auto")
    targets.make(check.found)
    for request in targets.requests:
        assert stored[request.tensor].nbytes == request.capacity
        assert request.address
    if reader is not None:
        reader.read(targets.requests, verify=True, io="threads", threads=1, drain=None, tick=None)
    return unflatten(tokens, StateBuilder("auto", targets.values()))


NOTHING_FOLLOWS = [
    [],
    ["a", "b"],
    [["list", 1]],
    [["list", 0], 1],
    [["dict", 1], "k"],
    [["dict", 10**12]],
    [["list", 2**62]],
    [["dict", -1]],
    [["dict", True]],
    [["dict", 1.0], "k", 1],
    [["dict", "1"], "k", 1],
    [["dict", None]],
    [["dict"]],
    [["dict", 0, 0]],
    [[]],
    [[["list"]]],
    [[None]],
    [[{}, 1]],
    [{}],
    [{"a": 1}],
    [["dict", 1], ["list", 0], 1],
    [["dict", 1], ["dict", 0], 1],
    [["dict", 2], "k", 1, "k", 2],
    [["dict", 2], 1, 1, True, 2],
    [["set", 2], 1, 1],
    [["set", 1], ["list", 0]],
    [["fset", 1], ["bytearray", ""]],
    [["ddict", 0]],
    [["ddict", 0], "eval"],
    [["ddict", 0], 1],
    [["ddict", 0], ["list", 0]],
    [["slice", 1], 1, 2, 3],
    [["slice"], 1, 2],
    [2**53 + 1],
    [-(2**64)],
    [["int", "1"]],
    [["int", "0x"]],
    [["int", "0x1_0"]],
    [["int", " 0x1"]],
    [["int", 1]],
    [["int", None]],
    [["int"]],
    [["float", "00"]],
    [["float", "zz" * 8]],
    [["float", 1.5]],
    [["complex", "00" * 8]],
    [["complex", "00" * 8, 1]],
    [["bytes", "a"]],
    [["bytes", "!!!!"]],
    [["bytes", "QQ=\n"]],
    [["bytes", "QQ==QQ=="]],
    [["bytes", 1]],
    [["bytes", 0, "tensor"]],
    [["bytes", 2, "tensor"]],
    [["bytes", 1, "text"]],
    [["bytes", 99, "tensor"]],
    [["bytearray", 1, 2, 3]],
    [["size", 1]],
    [["size", [1.5]]],
    [["size", [True]]],
    [["size", ["1"]]],
    [["size", [2**63]]],
    [["size"]],
    [["dtype", "__doc__; import os"]],
    [["dtype", 1]],
    [["dtype", ["float32"]]],
    [["device", "evil"]],
    [["device", 0]],
    [["device", "cuda:9999999999999999999"]],
    [["range", "0", "1", "0"]],
    [["range", "1e5", "1", "1"]],
    [["range", "9" * 5000, "1", "1"]],
    [["range", "1_0", "1", "1"]],
    [["range", "\u0661", "1", "1"]],
    [["range", 0, 1, 1]],
    [["range", "0", "1"]],
    [["datetime", [2024, 13, 1, 0, 0, 0, 0, 0]], None],
    [["datetime", [2024, 1, 1, 0, 0, 0, 0]], None],
    [["datetime", [2024, 1, 1, 0, 0, 0, 0, 2]], None],
    [["datetime", [2024, 1, 1, 0, 0, 0, 0, 0]], 5],
    [["datetime", [2024, 1, 1, 0, 0, 0, 0, True]], None],
    [["datetime", "2024"], None],
    [["datetime", [2024, 1, 1, 0, 0, 0, 0, 0]]],
    [["date", [0, 1, 1]]],
    [["date", [2**62, 1, 1]]],
    [["time", [25, 0, 0, 0, 0]], None],
    [["timedelta", [10**15, 0, 0]]],
    [["timedelta", [1]]],
    [["tz", [2, 0, 0], None]],
    [["tz", [0, 0, 0], 5]],
    [["tz", [0, 0, 0]]],
    [["path", "PosixPath", "x"]],
    [["path", "Path", 1]],
    [["path", ["Path"], "x"]],
    [["scalar", "O", "00"]],
    [["scalar", "|O8", "00" * 8]],
    [["scalar", "<f8", "00"]],
    [["scalar", "i4,i4", "00" * 8]],
    [["scalar", "<U1", "ffffffff"]],
    [["scalar", "<f8", "zz" * 8]],
    [["scalar", "|V8", "00" * 8]],
    [["scalar", "<M8[parsecs]", "00" * 8]],
    [["scalar", "<f3", "000000"]],
    [["scalar", "<U99999999999", ""]],
    [["tensor", 99]],
    [["tensor", -1]],
    [["tensor", True]],
    [["tensor", 0.0]],
    [["tensor", "0"]],
    [["tensor", None]],
    [["tensor"]],
    [["tensor", 0, "x"]],
    [["tensor", 0, ["g"]]],
    [["tensor", 0, "g", 1]],
    [["tensor", 0, "gp"]],
    [["tensor", 4, "g"]],
    [["tensor", 4, "pg"]],
    [["tensor", 3]],
    [["tensor", 7]],
    [["tensor", 8]],
    [["array", 2]],
    [["array", 0, "g"]],
    [["array", 6]],
    [["array", 8]],
    [["array", 9]],
    [["array", 10]],
    [["array", 11]],
    [["coo", [2, 3], True, ""], ["tensor", 4]],
    [["coo", [2, 3], 1, ""], ["tensor", 4], ["tensor", 0]],
    [["coo", [2, -3], True, ""], ["tensor", 4], ["tensor", 0]],
    [["coo", [2, 3], True, "q"], ["tensor", 4], ["tensor", 0]],
    [["coo", [2, 3], True, ""], ["tensor", 0], ["tensor", 0]],
    [["coo", [2, 3], True, ""], ["array", 4], ["tensor", 0]],
    [["coo", [2, 3], True, ""], 5, None],
    [["coo", [2**62, 2**62], True, ""], ["tensor", 4], ["tensor", 4]],
    [["coo", [2, 3], True, ""], ["tensor", 4], ["coo", [2, 3], True, ""], ["tensor", 4], ["tensor", 0]],
    [["compressed", "csr", [2, 3], ""], ["tensor", 4], ["tensor", 4], ["tensor", 0]],
    [["compressed", "xyz", [2, 3], ""], ["tensor", 4], ["tensor", 4], ["tensor", 0]],
    [["compressed", ["csr"], [2, 3], ""], ["tensor", 4], ["tensor", 4], ["tensor", 0]],
    [["quantized", "quint8", [5000], "per_tensor"], ["tensor", 1], 0.1, 2**60, 1],
    [["quantized", "quint8", [5001], "per_tensor"], ["tensor", 1], 0.1, 0, None],
    [["quantized", "quint8", [-5000], "per_tensor"], ["tensor", 1], 0.1, 0, None],
    [["quantized", "quint8", [2**62, 2**62], "per_tensor"], ["tensor", 1], 0.1, 0, None],
    [["quantized", "qint8", [5000], "per_tensor"], ["tensor", 1], 0.1, 0, None],
    [["quantized", "float32", [5000], "per_tensor"], ["tensor", 1], 0.1, 0, None],
    [["quantized", "quint8", [5000], "per_tensor"], ["tensor", 1], "x", 0, None],
    [["quantized", "quint8", [5000], "per_channel"], ["tensor", 1], ["tensor", 0], ["tensor", 4], 0],
    [["quantized", "quint8", [5000], "per_channel"], ["tensor", 1], ["tensor", 1], ["tensor", 1], 7],
    [["type", 1], 1],
    [["type"], 1],
    [["type", "collections.Counter"], 1],
    [["type", "collections.Counter"], ["odict", 0]],
    [["type", "collections.Counter"], ["list", 1], "a"],
    [["type", "collections.Counter"], ["dict", 2], "a", 1, "a", 2],
    [["type", "collections.Counter"]],
    [["type", "collections.OrderedDict"], 1],
    [["type", "collections.OrderedDict"], ["tuple", 2], ["dict", 0], ["dict", 0]],
    [["type", "collections.OrderedDict"], ["tuple", 2], ["odict", 0], ["dict", 1], "items", 1],
    [["type", "collections.OrderedDict"], ["tuple", 2], ["odict", 0], ["dict", 1], 1, 1],
    [["type", "collections.OrderedDict"], ["tuple", 3], ["odict", 0], ["dict", 0], 1],
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("tokens", NOTHING_FOLLOWS, ids=lambda tokens: json.dumps(tokens)[:60])
def test_malformed(tokens):
    began = time.process_time()
    with pytest.raises(CorruptCheckpointError):
        decode(tokens)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("kind", ["unknown", "__class__", "\x1b[2J"])
def test_a_kind_that_is_not_known_is_of_a_later_release(kind):
    with pytest.raises(FormatVersionError, match="which this release does not know: upgrade fastckpt-io") as caught:
        decode([[kind, 1]])
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "source",
    [
        "",
        "{}",
        "1",
        '"x"',
        "null",
        "[",
        "[NaN]",
        "[Infinity]",
        "[1e999]",
        "[[[[" * 100_000,
        f"[{'9' * 10**6}]",
        '[["size",[123456789012345678901]]]',
    ],
    ids=lambda source: source[:20],
)
def test_malformed_text(source):
    with pytest.raises(CorruptCheckpointError):
        decode(source)


@pytest.mark.parametrize(
    "token", [["tensor", 5], ["tensor", 12], ["type", "os.system"], ["dtype", "float512"]], ids=str
)
def test_what_this_program_lacks_is_said_to_be_lacking(token):
    with pytest.raises(UnsupportedTypeError):
        decode([token, "x"] if token[0] == "type" else [token])


def test_depth_bomb():
    with pytest.raises(CorruptCheckpointError, match="deeper than 10000"):
        decode([["list", 1]] * 1_000_000 + [1])


def test_bytes_named_a_million_times_are_there_once():
    loaded = decode([["list", 100_000], *[["bytes", 1, "tensor"]] * 50_000, *[["bytearray", 1, "tensor"]] * 50_000])
    assert len({id(item) for item in loaded}) == 2


def test_an_unread_tensor_is_not_allocated():
    stored = [StoredTensor("a", "F32", (2**40,), 0, 4096, 2**42)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decode([["dict", 0]], stored) == {}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.filterwarnings("ignore")
def test_mutated_tokens(tmp_path):
    """A change of a valid structure gives a state or an error of fastckpt."""
    import datetime as dt

    state = {
        "w": torch.ones(2),
        "s": torch.eye(2).to_sparse(),
        "c": torch.eye(2).to_sparse_csr(),
        "q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        1: [1.5, float("nan"), 2j, 2**70, b"x", b"y" * 5000, range(3), slice(1), {1}, np.arange(3), np.float32(1)],
        "t": dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
        "d": {str(i): i for i in range(30)},
        "m": torch.nn.Linear(1, 1).state_dict(),
    }
    fastckpt.save(state, tmp_path / "c")
    reader = fastckpt._core.Reader(str(tmp_path / "c"))
    good, stored = json.loads(reader.structure()), reader.tensors()
    pool = [*good, None, 1, -1, 1.5, "x", "", [], {}, ["list", 2], ["tensor", 0], ["tensor", 3, "pg"], ["dict", 1]]
    rng = random.Random(7)
    decoded = 0
    for _ in range(600):
        tokens = json.loads(json.dumps(good))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(tokens))
            way = rng.randrange(4)
            if way == 0:
                tokens[at] = rng.choice(pool)
            elif way == 1:
                del tokens[at]
            elif way == 2:
                tokens.insert(at, rng.choice(pool))
            elif isinstance(tokens[at], list) and tokens[at]:
                tokens[at][rng.randrange(len(tokens[at]))] = rng.choice(pool)
        try:
            decode(tokens, stored, reader)
            decoded += 1
        except (CorruptCheckpointError, FormatVersionError, UnsupportedTypeError):
            pass
    assert 0 < decoded < 600


class Default(collections.defaultdict):
    pass


def test_built_in_types_that_are_made_at_run_time_have_no_attributes(monkeypatch, tmp_path):
    """From Python 3.12 on, ``defaultdict`` is such a type."""
    monkeypatch.setattr(structural, "_HEAP", collections.defaultdict.__flags__)
    fastckpt.save(Default(list, a=[1]), tmp_path / "c")
    assert fastckpt.load(tmp_path / "c", registry=Registry(Default)).default_factory is list


KINDS = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


def test_fill_in_pieces_for_ordinary_tensors(monkeypatch, trip):
    """Contiguous CPU tensors take the code path for tensors on other devices."""
    from fastckpt._tensors import torch as _torch

    describe = _torch._describe_other
    taken = []

    def other(value, flags):
        taken.append(value)
        return _torch._describe_strided(value, flags)

    monkeypatch.setattr(_torch, "_describe", other)
    state = {str(kind): torch.arange(15).to(kind).reshape(5, 3) for kind in KINDS} | {
        "large": torch.randn(3 << 20),
        "0d": torch.tensor(1.5),
    }
    assert same(trip(state), state)
    assert len(taken) == len(state)
    assert describe is _torch._describe_other


def test_what_is_part_of_the_structure_is_never_registered(registry):
    from fastckpt._state.by_type import DESCRIBE, Attributed, Bare
    from fastckpt._state.values import ENCODERS, PLAIN

    assert set(DESCRIBE) | set(ENCODERS) == PLAIN | {Attributed, Bare}
    for kind in (*PLAIN, type(pathlib.Path()), pathlib.PureWindowsPath, torch.Tensor, torch.nn.Parameter, torch.Size):
        with pytest.raises(ValueError, match="without registration"):
            registry(kind, str, str)


def test_slices_are_too_deep_for_keys_where_tuples_are():
    """Slices can be keys since Python 3.12."""
    cut = None
    for _ in range(101):
        cut = slice(cut)
    assert hashes.too_deep([cut])
    assert not hashes.too_deep([cut.stop])
