"""Arrays whose elements are not plain numbers or strings, and numpy's dtypes as values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import CorruptCheckpointError
from fastckpt.exceptions import UnsupportedTypeError
from harness import manifest, needs

DTYPES = [
    *(np.dtype(text) for text in ("?", "<f4", ">i8", "<U3", "S7", "<M8[ns]", "m8[25s]", "<c16", "V5", "O")),
    np.dtype(("<f4", (2, 3))),
    np.dtype([]),
    np.dtype([("a", "<f4"), ("b", ">i2", (2,)), ("c", "S3")]),
    np.dtype([(("title", "a"), "<f4"), ("b", "u1")]),
    np.dtype([("a", [("x", "u1"), ("y", [("z", "<f8")], (2,))]), ("\u00e4", "<U2")]),
    np.dtype([("a", "u1"), ("b", "<f8")], align=True),
    np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [8, 2], "itemsize": 32}),
    np.dtype({"names": ["whole", "half"], "formats": ["<u4", "<u2"], "offsets": [0, 2]}),
    np.dtype([("object", "O"), ("n", "<i4")]),
]
ROWS = np.dtype([("key", "<i4"), ("value", "<f8", (2,)), ("name", "<U4")])


def rows(*shape):
    array = np.zeros(shape, ROWS)
    array["key"].flat = range(array.size)
    array["value"] = array["key"][..., None] / 2
    array["name"] = "n\u00e4"
    return array


def alike(left, right):
    """Whether two values are equal in type, dtype, shape and every element."""
    assert type(left) is type(right)
    assert left.dtype == right.dtype
    assert left.dtype.isalignedstruct == right.dtype.isalignedstruct
    assert left.shape == right.shape
    assert repr(left.tolist()) == repr(right.tolist())
    return True


@pytest.mark.parametrize("framework", ["auto", "torch", "numpy"])
def test_dtypes(tmp_path, framework):
    state = {"dtypes": DTYPES, "key": {np.dtype("<f4"): 1}}
    fastckpt.save(state, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c", framework=framework)
    assert loaded == state
    for found, wanted in zip(loaded["dtypes"], DTYPES, strict=True):
        assert (found.isalignedstruct, found.itemsize, found.fields) == (
            wanted.isalignedstruct,
            wanted.itemsize,
            wanted.fields,
        )


@pytest.mark.states("structured array, `recarray`, raw bytes, `numpy.dtype`")
def test_structured_arrays(trip):
    large = rows(8_000)
    state = {
        "rows": rows(3, 4),
        "large": large,
        "every other": rows(6)[::2],
        "transposed": rows(2, 3).T,
        "one": rows(1)[0, ...],
        "none": rows(0, 3),
        "void": np.frombuffer(b"0123456789", "V5"),
        "nothing": np.zeros((2, 3), []),
        "records": rows(4).view(np.recarray),
        "aligned": np.ones(3, np.dtype([("a", "u1"), ("b", "<f8")], align=True)),
    }
    loaded = trip(state)
    assert all(alike(loaded[name], value) for name, value in state.items())
    assert loaded["records"].key.tolist() == [0, 1, 2, 3]


def test_structured_arrays_that_share_memory_are_stored_once(tmp_path):
    whole = rows(5)
    fastckpt.save({"a": whole, "b": whole, "wide": np.broadcast_to(whole[:1], (100_000,))}, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c")
    assert np.shares_memory(loaded["a"], loaded["b"])
    assert loaded["wide"].strides == (0,)
    assert alike(loaded["wide"][:3], whole[[0, 0, 0]])
    with fastckpt.open(tmp_path / "c") as checkpoint:
        assert list(checkpoint) == ["a.data", "wide.data"]
        assert sum(checkpoint.info(name).bytes for name in checkpoint) == 6 * ROWS.itemsize


@pytest.mark.states("array of Python objects")
def test_object_arrays(trip):
    state = {
        "mixed": np.array([[1, "a", None], [2.5, (1, [2]), torch.ones(2)]], object),
        "scalar": np.array({"a": 1}, object),
        "none": np.zeros((0, 2), object),
        "arrays": np.fromiter([np.array(5), np.zeros(2), [1, 2]], object, 3),
    }
    loaded = trip(state)
    assert all(alike(loaded[name], value) for name, value in state.items())
    # An array without dimensions must not come back as its element.
    assert [type(item) for item in loaded["arrays"]] == [np.ndarray, np.ndarray, list]


def test_frameworks(tmp_path):
    fastckpt.save({"rows": rows(3), "objects": np.array([1, None], object)}, tmp_path / "c")
    for framework in ("torch", "numpy"):
        loaded = fastckpt.load(tmp_path / "c", framework=framework)
        assert alike(loaded["rows"], rows(3))
        assert loaded["objects"].tolist() == [1, None]


def test_arrays_of_themselves_and_deep_ones_are_refused(tmp_path):
    loop = np.zeros(1, object)
    loop[0] = loop
    deep = np.dtype("u1")
    for _ in range(40):
        deep = np.dtype([("a", deep)])
    for value, why in (
        (loop, "it contains itself"),
        (np.zeros(2, [("object", "O")]), r"cannot store \['v'\]: a structured array with fields of Python objects"),
        (np.zeros(2, deep), "nested deeper than 32 levels"),
        (deep, "nested deeper than 32 levels"),
        (np.dtype([((5, "a"), "u1")]), "titles that are not text"),
    ):
        with pytest.raises(UnsupportedTypeError, match=why):
            fastckpt.save({"v": value}, tmp_path / "c")


def test_dtypes_that_numpy_cannot_name_are_refused(tmp_path):
    if not hasattr(np.dtypes, "StringDType"):
        needs.missing("numpy 2")
    with pytest.raises(UnsupportedTypeError, match=r"numpy alone does not know it|not supported"):
        fastckpt.save({"v": np.dtypes.StringDType()}, tmp_path / "c")
    with pytest.raises(UnsupportedTypeError, match=r"numpy alone does not know it|not supported"):
        fastckpt.save({"v": np.array(["a"], np.dtypes.StringDType())}, tmp_path / "c")


def dtype_tokens(names, formats, offsets, size, **more):
    def listed(values):
        return [["list", len(values)], *values]

    pairs = {"names": names, "formats": formats, "offsets": offsets, **more}
    flat = [token for name, values in pairs.items() for token in (name, *listed(values))]
    return [["dict", len(pairs) + 1], *flat, "itemsize", size]


def deep_tokens(depth):
    tokens = ["|u1"]
    for _ in range(depth):
        tokens = [
            *(["dict", 4], "names", ["list", 1], "a", "formats", ["list", 1]),
            *(*tokens, "offsets", ["list", 1], 0, "itemsize", 1),
        ]
    return tokens


@pytest.mark.parametrize(
    "described",
    [
        ["f4"],
        ["<f4,<f4"],
        ["|V99999999999"],
        ["T"],
        [7],
        [None],
        [["list", 1], "<f4"],
        [["tuple", 2], "<f4", ["tuple", 0]],
        [["tuple", 2], "<f4", ["tuple", 1], -1],
        [["tuple", 2], "<f4", ["tuple", 2], 2**31, 2**31],
        [["tuple", 1], "<f4"],
        dtype_tokens(["a"], ["<f4"], [0], 3),
        dtype_tokens(["a"], ["<f4"], [-1], 8),
        dtype_tokens(["a"], ["<f4"], [2**31 - 2], 8),
        dtype_tokens(["a"], ["<f4"], [0], -8),
        dtype_tokens(["a"], ["<f4"], [0], 2**53),
        dtype_tokens(["a", "a"], ["<f4", "<f4"], [0, 4], 8),
        dtype_tokens(["a"], ["<f4", "<f4"], [0, 4], 8),
        dtype_tokens([1], ["<f4"], [0], 8),
        dtype_tokens(["a"], ["<f4"], [0], 8, titles=[5]),
        dtype_tokens(["a"], ["<f4"], [0], 8, titles=[]),
        dtype_tokens(["a"], ["<f4"], [0], 8, more=[]),
        dtype_tokens(["a"], ["__import__('os')"], [0], 8),
        deep_tokens(200),
        deep_tokens(3000),
    ],
    ids=lambda tokens: str(tokens)[:60],
)
def test_hostile_dtypes(tmp_path, described):
    fastckpt.save({"v": None}, tmp_path / "c")
    body = manifest.body_of(tmp_path / "c")
    for tokens in (
        [["dict", 1], "v", ["type", "numpy.dtype"], *described],
        [["dict", 1], "v", ["type", "numpy.ndarray"], ["dict", 2], "dtype", *described, "data", None],
    ):
        body["structure"] = tokens
        manifest.forge(tmp_path / "c", body)
        with pytest.raises(CorruptCheckpointError):
            fastckpt.load(tmp_path / "c")


@pytest.mark.parametrize(
    "parts",
    [
        ["dtype", "|O", "data", ["array", 0]],
        ["dtype", "|V3", "data", ["array", 0]],
        ["dtype", "|V4", "data", ["array", 1]],
        ["dtype", "|V4", "data", ["bytes", "AAAA"]],
        ["dtype", "|V4", "data", ["array", 0], "more", None],
        ["dtype", "|O", "shape", ["tuple", 1], 3, "data", ["list", 2], 1, 2],
        ["dtype", "|O", "shape", ["tuple", 2], -1, -2, "data", ["list", 2], 1, 2],
        ["dtype", "|O", "shape", ["tuple", 1], 2.0, "data", ["list", 2], 1, 2],
        ["dtype", "|V4", "shape", ["tuple", 1], 2, "data", ["list", 2], 1, 2],
        ["dtype", "|O", "shape", ["tuple", 1], 2, "data", ["tuple", 2], 1, 2],
        ["dtype", "|O", "data", ["list", 2], 1, 2],
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["ndarray", "recarray"])
def test_hostile_arrays(tmp_path, parts, kind):
    fastckpt.save({"u1": np.zeros((2, 4), np.uint8), "f4": np.zeros((2, 4), "<f4")}, tmp_path / "c")
    body = manifest.body_of(tmp_path / "c")
    members = parts.count("dtype") + parts.count("data") + parts.count("shape") + parts.count("more")
    body["structure"] = [["list", 1], ["type", f"numpy.{kind}"], ["dict", members], *parts]
    manifest.forge(tmp_path / "c", body)
    with pytest.raises(CorruptCheckpointError):
        fastckpt.load(tmp_path / "c")


def test_the_dtype_of_an_array_says_its_bytes(tmp_path):
    """The load refuses bytes of another size before it passes them to numpy."""
    fastckpt.save({"v": rows(2)}, tmp_path / "c")
    body = manifest.body_of(tmp_path / "c")
    at = body["structure"].index("itemsize")
    body["structure"][at + 1] += 8
    manifest.forge(tmp_path / "c", body)
    with pytest.raises(CorruptCheckpointError, match="elements whose size is not that of the dtype"):
        fastckpt.load(tmp_path / "c")
