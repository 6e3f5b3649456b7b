"""A reader of version 1 opens every version-1 checkpoint, forever."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import pytest
import torch

import fastckpt
from harness.same import same

DATA = pathlib.Path(__file__).parents[1] / "data"


def golden():
    spec = importlib.util.spec_from_file_location("make_golden", DATA / "make_golden.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["v1", "v1-sharded"])
def test_golden_checkpoint_is_read_bit_for_bit(name, engine):
    state = fastckpt.load(DATA / name, io=engine)
    assert same(state, golden().state())
    assert state["model"]["weight"].data_ptr() == state["model"]["head"].data_ptr()


@pytest.mark.usefixtures("registry")
def test_golden_types_are_read_bit_for_bit(engine):
    module = golden()
    module.register()
    loaded, expected = fastckpt.load(DATA / "v1-types", io=engine), module.types()
    for name in ("per tensor", "per channel"):
        found, wanted = loaded.pop(name), expected.pop(name)
        assert (found.dtype, found.qscheme()) == (wanted.dtype, wanted.qscheme())
        assert torch.equal(found.int_repr(), wanted.int_repr())
        assert torch.equal(found.dequantize(), wanted.dequantize())
    found, wanted = loaded.pop("position"), expected.pop("position")
    assert found.epoch == wanted.epoch
    assert torch.equal(found.weight, wanted.weight)
    assert same(loaded, expected)


def test_golden_groups_are_read_bit_for_bit(engine):
    state = fastckpt.load(DATA / "v1-groups", io=engine)
    assert same(state, golden().training())
    assert state["model"]["embed.weight"].data_ptr() == state["average"]["embed.weight"].data_ptr()
    assert next(iter(fastckpt.open(DATA / "v1-groups"))) == "model.embed.weight"


def test_golden_expanded_tensors_are_read_bit_for_bit(engine):
    state, expected = fastckpt.load(DATA / "v1-expanded", io=engine), golden().expanded()
    assert same(state, expected)
    assert [value.stride() for value in state.values() if isinstance(value, torch.Tensor)] == [
        (0,),
        (1, 1),
        (1, 0),
        (1, 0),
    ]
    assert state["columns"].data_ptr() == state["parameter"].data_ptr() == state["base"].data_ptr()


def test_golden_classes_are_read_as_they_are(engine, undeclare):
    module = golden()
    module.register()
    loaded, expected = fastckpt.load(DATA / "v1-classes", io=engine), module.classes()
    assert list(loaded) == list(expected)
    assert loaded["plan"].schedule is module.Schedule.COSINE
    window = loaded["plan"].window
    assert (window[0], window[1].tolist(), window.maxlen) == (1.5, [1, 1], 4)
    assert (type(loaded["settings"]), loaded["settings"].version) == (module.Settings, 3)
    assert loaded["random"].random() == expected["random"].random()
    assert loaded["buffer"].getvalue() == b"bytes"
    for name in ("settings", "own", "namespaces", "set"):
        assert loaded[name] == expected[name]
        assert type(loaded[name]) is type(expected[name])
    undeclare()
    with pytest.warns(RuntimeWarning, match=r"golden\.Plan"):
        plain = fastckpt.load(DATA / "v1-classes", io=engine, registry=fastckpt.Registry(undeclared="plain"))
    assert plain["plan"]["schedule"] == "COSINE"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning", "ignore:.*is_fx_tracing.*")
def test_golden_types_of_numpy_and_torch_are_read_bit_for_bit(engine):
    state, expected = fastckpt.load(DATA / "v1-named", io=engine), golden().named()
    for name in ("dtypes", "layouts"):
        assert state[name] == expected[name]
    assert state["dtypes"][1].isalignedstruct
    for name in ("rows", "records", "objects"):
        assert type(state[name]) is type(expected[name])
        assert state[name].dtype == expected[name].dtype
        assert repr(state[name].tolist()) == repr(expected[name].tolist())
    for ours, theirs in zip(state["generators"], expected["generators"], strict=True):
        assert ours.random() == theirs.random()
        assert ours.bit_generator.spawn(1)[0].random_raw() == theirs.bit_generator.spawn(1)[0].random_raw()
    assert state["bits"].random_raw() == expected["bits"].random_raw()
    assert state["legacy"].randn() == expected["legacy"].randn()
    assert torch.equal(torch.rand(9, generator=state["torch"]), torch.rand(9, generator=expected["torch"]))
    for name in ("strided", "jagged"):
        assert state[name].layout is expected[name].layout
        assert all(map(torch.equal, state[name].unbind(), expected[name].unbind()))


def test_an_equal_state_still_gives_the_golden_shards(tmp_path):
    """The format defines the layout, so that no release may change it."""
    fastckpt.save(golden().training(), tmp_path / "c", files=fastckpt.Files(shard_size=100))
    written, kept = (
        {
            file.relative_to(path): file.read_bytes()
            for file in path.rglob("*")
            if file.is_file() and file.name != "fastckpt.json"
        }
        for path in (tmp_path / "c", DATA / "v1-groups")
    )
    assert len(written) > 4
    assert written == kept


@pytest.mark.parametrize("name", ["v1", "v1-sharded", "v1-types", "v1-groups", "v1-expanded", "v1-named", "v1-classes"])
def test_golden_checkpoint_verifies(name):
    assert fastckpt.verify(DATA / name).ok
    assert fastckpt.open(DATA / name).metadata == golden().METADATA


@pytest.mark.parametrize("way", [fastckpt.load, fastckpt.open, fastckpt.verify])
def test_a_checkpoint_from_before_the_format_was_released_is_told_apart_from_damage(way):
    with pytest.raises(
        fastckpt.exceptions.FormatVersionError, match="before format version 1 was released, when the training"
    ):
        way(DATA / "before-v1")
    (listed,) = [one for one in fastckpt.list(DATA) if one.name == "before-v1"]
    assert "before format version 1 was released" in listed.damage


def test_golden_checkpoints_hold_one_shard_and_several():
    assert [p.name for p in (DATA / "v1").glob("*.safetensors")] == ["model.safetensors"]
    assert len(list((DATA / "v1-sharded").glob("model-*-of-*.safetensors"))) > 1
    assert (DATA / "v1-sharded" / "model.safetensors.index.json").exists()


def test_golden_checkpoints_hold_every_kind_of_token():
    import json

    tokens = [
        token
        for name in ("v1", "v1-types", "v1-expanded")
        for token in json.loads(fastckpt.open(DATA / name)._reader.structure())
    ]
    found = {token[0] for token in tokens if isinstance(token, list)}
    documented = (DATA.parents[1] / "docs" / "format.md").read_text(encoding="utf-8").split("## 4. Structure")[1]
    wanted = {line.split('["')[1].split('"')[0] for line in documented.splitlines() if line.startswith('| `["')}
    assert {"dict", "tensor", "coo", "float"} <= wanted
    assert found >= wanted
