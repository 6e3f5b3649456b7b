"""Equal states give equal files (docs/format.md, 2.1), for any way of saving and any addresses of tensors."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch

import fastckpt
from harness import standin
from harness.options import grouped

SHARD = 3_000_000


def aside(values: np.ndarray, address: int) -> np.ndarray:
    """A copy of the values at an address that is ``address`` modulo 4096."""
    memory = np.empty(values.nbytes + 8192, np.uint8)
    skip = (address - memory.ctypes.data) % 4096
    moved = memory[skip : skip + values.nbytes].view(values.dtype).reshape(values.shape)
    moved[...] = values
    assert not values.nbytes or moved.ctypes.data % 4096 == address
    return moved


def state(address=64, move=torch.from_numpy, array=lambda values: values, order=1):
    """A state for several shards of both groups, its tensors at ``address`` modulo 4096, its dicts in a given order."""
    random = np.random.default_rng(5)
    weights = {f"layers.{i}.w": random.standard_normal((300, 1024), np.float32) for i in range(7)}
    weights |= {"odd": random.standard_normal(1001), "bytes": np.arange(5, dtype=np.uint8), "none": np.zeros((0, 3))}
    places = {name: aside(values, address) for name, values in weights.items()}
    model = {name: move(values) for name, values in places.items()}
    # The state has all kinds of sources: strided views, types that safetensors lacks, and arrays.
    model["turned"] = model["layers.0.w"].t()
    moments = {i: {"m": array(aside(weights["layers.1.w"] * i, address))} for i in range(5)}
    wide = move(aside(np.arange(700_000, dtype=np.float32), address)).to(torch.complex128)
    whole = {"model": model, "optimizer": {"state": moments, "wide": wide}, "step": 7, "raw": b"x" * 5000}
    return turned(whole, order)


def turned(value, order):
    if type(value) is not dict:
        return value
    return {key: turned(item, order) for key, item in list(value.items())[::order]}


def files(path):
    """SHA-256 of every file except the manifest, and the manifest without its times and engine."""
    sums = {
        each.relative_to(path).as_posix(): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in path.rglob("*")
        if each.is_file()
    }
    manifest = json.loads((path / "fastckpt.json").read_bytes())
    del sums["fastckpt.json"]
    return sums, {name: manifest[name] for name in manifest.keys() - {"created", "saved", "crc64nvme"}}


def background(lazy):
    return lambda *given, **named: fastckpt.save_async(*given, io=fastckpt.IO(lazy=lazy), **named).result(60)


WAYS = {
    "the-same-again": (fastckpt.save, {}, {}),
    "one-thread": (fastckpt.save, {"threads": 1}, {}),
    "two-threads": (fastckpt.save, {"threads": 2}, {}),
    "seven-threads": (fastckpt.save, {"threads": 7}, {}),
    "uring": (fastckpt.save, {"io": "uring", "threads": 2}, {}),
    "threads": (fastckpt.save, {"io": "threads", "threads": 3}, {}),
    "buffered": (fastckpt.save, {"io": "buffered"}, {}),
    "limited": (fastckpt.save, {"bandwidth_limit": 10**9}, {}),
    "async": (background(lazy=False), {}, {}),
    "lazy": (background(lazy=True), {}, {}),
    "congruent-with-pages": (fastckpt.save, {}, {"address": 0}),
    "elsewhere": (fastckpt.save, {}, {"address": 2064}),
    "unaligned": (fastckpt.save, {}, {"address": 8}),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    path = tmp_path_factory.mktemp("same") / "c"
    report = fastckpt.save(state(), path, files=fastckpt.Files(shard_size=SHARD))
    found = files(path)
    assert report.shards > 5
    assert {name.split("-")[0] for name in found[0]} == {"model", "training/training", "model.safetensors.index.json"}
    return found


@pytest.mark.parametrize("way", WAYS)
def test_equal_states_give_equal_files(way, expected, tmp_path):
    save, options, built = WAYS[way]
    save(state(**built), tmp_path / "another-name", files=fastckpt.Files(shard_size=SHARD), **grouped(options))
    assert files(tmp_path / "another-name") == expected


@pytest.mark.skipif(not standin.AVAILABLE, reason="no torch that can set up a device from Python")
@pytest.mark.parametrize("save", [fastckpt.save, background(lazy=False), background(lazy=True)])
def test_tensors_of_a_device_differ_in_its_name_alone(save, expected, tmp_path):
    there = state(move=lambda values: torch.from_numpy(values).to("standin"))
    save(there, tmp_path / "c", files=fastckpt.Files(shard_size=SHARD))
    shards, manifest = files(tmp_path / "c")
    assert shards == expected[0]
    moved = [token for token in manifest["structure"] if type(token) is list and token[-1] == "standin:0"]
    assert moved
    for token in moved:
        del token[3 if token[2] else 2 :]
    assert manifest == expected[1]


def test_arrays_give_the_same_shards_as_tensors(expected, tmp_path):
    """Only the structure records the framework of a tensor."""
    fastckpt.save(state(array=torch.from_numpy), tmp_path / "c", files=fastckpt.Files(shard_size=SHARD))
    shards, manifest = files(tmp_path / "c")
    assert shards == expected[0]
    assert manifest["structure"] != expected[1]["structure"]


def test_the_order_of_dicts_changes_the_structure_alone(expected, tmp_path):
    fastckpt.save(state(order=-1), tmp_path / "c", files=fastckpt.Files(shard_size=SHARD))
    shards, manifest = files(tmp_path / "c")
    assert shards == expected[0]
    assert manifest["shards"] == expected[1]["shards"]
    by_name = lambda tensors: sorted(tensors, key=lambda tensor: tensor["name"])  # noqa: E731
    assert by_name(manifest["tensors"]) == by_name(expected[1]["tensors"])
    assert manifest["structure"] != expected[1]["structure"]


def test_what_differs_shows(expected, tmp_path):
    """After a change of one byte of one tensor, only its shard differs."""
    other = state()
    other["model"]["bytes"][4] = 77
    fastckpt.save(other, tmp_path / "c", files=fastckpt.Files(shard_size=SHARD))
    shards, _ = files(tmp_path / "c")
    assert sum(shards[name] != expected[0][name] for name in shards) == 1
