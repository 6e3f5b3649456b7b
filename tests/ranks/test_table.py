"""The table of a rank: canonical, small and quick to make."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastckpt._ranks.offers import Told, combine_offers, offer_of
from fastckpt._ranks.table import (
    decode,
    decode_spreads,
    digest,
    encode,
    encode_spreads,
    packed,
    unpacked,
)
from fastckpt._tensors.spread import Spread
from harness.internals import local_of


def table(state, rank=0, size=2, **options):
    return local_of(state, rank, range(size), **options)


def test_a_table_comes_back_as_it_was():
    shared = torch.ones(3)
    state = {
        "model": {"w": shared, "t": shared, "c": torch.zeros(2, dtype=torch.complex128), "n\u00e4me": torch.ones(2, 0)},
        7: np.arange(5),
        "long": b"x" * 5000,
        "big": torch.zeros(20_000),
    }
    local = table(state)
    again = decode(encode(local.table))
    assert again.names == local.table.names
    assert again.kinds == local.table.kinds
    assert again.kind.tolist() == local.table.kind.tolist()
    assert again.ties == local.table.ties == [(0, "model.t")]
    assert again.outer == [("str", "model", True), ("int", "7", False), ("str", "long", False), ("str", "big", False)]
    assert again.structure == local.request.flat.structure()
    assert encode(again) == encode(local.table)


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.ones(2), "b": 2},
        {"a": torch.ones(3), "b": 1},
        {"a": torch.ones(2, 1), "b": 1},
        {"a": torch.ones(2).int(), "b": 1},
        {"b": 1, "a": torch.ones(2)},
        {"a": torch.ones(2), "b": 1, "c": None},
        {"a": torch.ones(2).requires_grad_(), "b": 1},
        {"a": np.ones(2, np.float32), "b": 1},
    ],
    ids=["value", "size", "shape", "dtype", "order", "key", "flag", "kind"],
)
def test_what_differs_has_another_digest(other):
    state = {"a": torch.ones(2), "b": 1}
    assert table(state).told.digests == table({"a": torch.ones(2), "b": 1}, rank=1).told.digests
    assert table(state).told.digests != table(other).told.digests
    assert table(state, metadata=1).told.digests == table(state).told.digests


def test_memory_has_no_say():
    """The same values, from other memory: a view with gaps, of another order, not aligned."""
    base = torch.arange(24.0).reshape(4, 6)
    gaps = torch.zeros(4, 6, 2)
    gaps[..., 0] = base
    raw = np.zeros(97, np.uint8)
    raw[1:] = np.frombuffer(base.numpy().tobytes(), np.uint8)
    states = [
        base,
        gaps[..., 0],
        base.t().contiguous().t(),
        torch.from_numpy(raw.copy())[1:].clone().view(torch.float32),
    ]
    digests = {table({"a": state.reshape(4, 6)}).told.digests for state in states}
    assert len(digests) == 1
    odd = np.frombuffer(raw.data, np.float32, offset=1).reshape(4, 6)
    assert table({"a": odd}).told.digests == table({"a": base.numpy()}).told.digests


def test_what_is_per_rank_has_no_say():
    state = {"a": torch.ones(2)}
    assert table(state, per_rank={"x": 1}).told.digests == table(state).told.digests


meshes = st.sampled_from([(4,), (2, 2), (2, 3), (2, 2, 2), (3, 1, 2), ()])


@given(st.lists(st.tuples(meshes, st.integers(0, 3), st.integers(1, 5), st.booleans()), max_size=4))
def test_spreads_come_back_as_they_were(cases):
    spreads = []
    for mesh, first, step, odd in cases:
        size = int(np.prod(mesh)) if mesh else 3
        ranks = [first + step * index for index in range(size)]
        if odd:
            ranks[-1] += 1
        spreads.append(Spread(tuple(ranks), mesh, tuple(("shard", 0, 0) for _ in mesh)))
    assert decode_spreads(encode_spreads(spreads)) == spreads


def test_meshes_of_many_ranks_are_small():
    grid = np.arange(16384).reshape(128, 16, 8)
    spread = Spread(tuple(grid[:, 3].ravel().tolist()), (128, 8), (("replicate", 0, 0), ("shard", 0, 0)))
    data = encode_spreads([spread, Spread(tuple(range(16384)))])
    assert len(data) < 200
    assert decode_spreads(data) == [spread, Spread(tuple(range(16384)))]


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_packing(parts):
    assert unpacked(packed(*parts)) == parts


def test_offers_travel_once():
    main, cuts = b"m" * 5000, b"[]"
    offers = [Told.of(rank, main + bytes([rank % 2]), cuts).offer("tables") for rank in range(100)]
    whole = combine_offers([combine_offers(offers[:40]), combine_offers(offers[40:])])
    classes, extras, blobs = offer_of(whole)
    assert sorted(map(sorted, classes.values())) == [list(range(0, 100, 2)), list(range(1, 100, 2))]
    assert extras == []
    assert set(blobs) == {digest(main + b"\0"), digest(main + b"\1"), digest(cuts)}
    assert len(whole) < 1500


def test_large_tables_are_made_in_linear_time():
    """No time that a machine might not keep: many tensors take as many times as long as few, with much room."""

    def seconds(count):
        state = {"model": {f"layers.{index}.weight": base[: index % 7 + 1] for index in range(count)}}
        best = 9e9
        for _ in range(3):
            began = time.process_time()
            local = table(state)
            decode(encode(local.table))
            best = min(best, time.process_time() - began)
        return best

    base = torch.ones(8)
    seconds(1000)
    assert seconds(32_000) < 24 * seconds(4000)
