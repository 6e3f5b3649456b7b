"""Arbitrary states, saved and loaded."""

from __future__ import annotations

import collections
import datetime as dt
import pathlib
import tempfile

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastckpt
from harness.same import same

BOUNDED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

texts = st.text(st.characters(), max_size=8)
zones = st.none() | st.integers(-86399, 86399).map(lambda s: dt.timezone(dt.timedelta(seconds=s)))
numbers = st.integers() | st.floats() | st.complex_numbers()
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
leaves = (
    numbers
    | texts
    | st.booleans()
    | st.none()
    | st.binary(max_size=40)
    | st.binary(max_size=40).map(bytearray)
    | st.builds(range, st.integers(), st.integers(), st.integers(1))
    | st.datetimes(timezones=zones)
    | st.timedeltas()
    | st.dates()
    | texts.filter(lambda t: "\0" not in t).map(pathlib.PurePosixPath)
    | st.floats(width=32).map(np.float32)
    | st.integers(-128, 127).map(np.int8)
    | st.lists(st.integers(0, 9), max_size=4).map(torch.Size)
    | st.sampled_from([torch.float32, torch.device("cuda:3"), torch.bfloat16])
)


@st.composite
def tensors(draw):
    """A tensor view of any dtype, with any strides and flags."""
    dtype = draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex128, torch.uint16])
    )
    tensor = torch.arange(600).reshape(4, 5, 6, 5).to(dtype)
    for axis in range(4):
        start, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * axis + (slice(start, draw(st.integers(0, 5)), step),)]
    tensor = tensor.permute(draw(st.permutations(range(4))))
    while tensor.dim() and draw(st.booleans()) and tensor.shape[0]:
        tensor = tensor[0]
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    if dtype.is_floating_point and draw(st.booleans()):
        tensor = torch.nn.Parameter(tensor, requires_grad=draw(st.booleans()))
    return tensor


@st.composite
def arrays(draw):
    array = (
        np.arange(60).reshape(3, 4, 5).astype(draw(st.sampled_from(["<f8", ">i2", "S3", "<U2", "<M8[s]", "?", "g"])))
    )
    array = array.transpose(draw(st.permutations(range(3))))
    return array[:: draw(st.sampled_from([1, 2, -1])), draw(st.integers(0, 2)) :]


hashable = st.recursive(
    numbers | texts | st.none() | st.binary(max_size=5), lambda inner: st.tuples(inner, inner), max_leaves=3
)
keys = texts | st.integers(-3, 3) | hashable
states = st.recursive(
    leaves | tensors() | arrays(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(texts, inner, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(lambda d: collections.defaultdict(list, d))
        | st.sets(st.integers() | texts, max_size=4)
        | st.frozensets(st.integers(), max_size=4)
        | st.lists(inner, min_size=1, max_size=2).map(lambda pair: [pair[0], *pair])  # has the same object twice
        | st.builds(slice, inner, inner, st.none())
    ),
    max_leaves=12,
)


@BOUNDED
@given(states, st.sampled_from(["uring", "threads", "buffered"]), st.integers(1, 3) | st.just(5 * 10**9))
def test_any_state(state, io, shard_size):
    with tempfile.TemporaryDirectory() as directory:
        fastckpt.save(state, f"{directory}/c", io=io, files=fastckpt.Files(shard_size=shard_size))
        assert same(fastckpt.load(f"{directory}/c", io=io), state)
        with fastckpt.open(f"{directory}/c") as checkpoint:
            for name in checkpoint:
                assert checkpoint.info(name).name == name
            checkpoint.structure  # noqa: B018 - building it is the test


@BOUNDED
@given(st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=8))
def test_any_metadata(metadata):
    with tempfile.TemporaryDirectory() as directory:
        fastckpt.save(None, f"{directory}/c", metadata=metadata)
        assert same(fastckpt.open(f"{directory}/c").metadata, metadata)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), tensors() | arrays())
def test_any_slice(data, tensor):
    basic = [st.slices(size) | (st.integers(-size, size - 1) if size else st.nothing()) for size in tensor.shape]
    index = [data.draw(part) for part in basic]
    index = index[: data.draw(st.integers(0, len(index)))]
    if data.draw(st.booleans()):
        index.insert(data.draw(st.integers(0, len(index))), Ellipsis)
        # Indices after the Ellipsis count from the last dimension, so they must fit there.
        at = index.index(Ellipsis)
        index = index[: at + 1]
    wanted = tensor.detach().resolve_conj() if isinstance(tensor, torch.Tensor) else tensor
    raw = wanted.numpy() if isinstance(wanted, torch.Tensor) and wanted.dtype is not torch.bfloat16 else wanted
    if isinstance(raw, torch.Tensor):
        raw = raw.view(torch.int16).numpy()
    expected = raw[tuple(index)]
    with tempfile.TemporaryDirectory() as directory:
        fastckpt.save({"x": tensor}, f"{directory}/c")
        with fastckpt.open(f"{directory}/c") as checkpoint:
            part = checkpoint.tensor("x")[tuple(index)]
    if isinstance(part, torch.Tensor):
        assert part.dtype == tensor.dtype
        part = (part.view(torch.int16) if part.dtype is torch.bfloat16 else part).numpy()
    assert part.shape == expected.shape
    # A single element is a scalar, whose byte order numpy chooses.
    assert np.asarray(part, raw.dtype).tobytes() == np.asarray(expected, raw.dtype).tobytes()
