"""Where tensors go when they are loaded: on the stand-in for a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fastckpt
from harness import manifest, needs, standin
from harness.same import bits

if not standin.AVAILABLE:
    needs.missing("a torch that can set up a device from Python")

DEVICE = torch.device("standin", 0)


@pytest.fixture(autouse=True)
def late(monkeypatch):
    yield from standin.late(monkeypatch, 0.001)


def there(tensor):
    """The same in host memory."""
    return standin.on_host(tensor).clone()


def training():
    return {
        "model": {"w": torch.randn(300, 300).to(DEVICE), "b": torch.nn.Parameter(torch.randn(7).to(DEVICE))},
        "optimizer": {"state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.randn(300, 300)}}},
        "fused": {"step": torch.tensor(6.0).to(DEVICE)},
        "rng": {"cpu": torch.get_rng_state(), "cuda": [torch.zeros(16, dtype=torch.uint8)]},
        "kept": torch.zeros(17, dtype=torch.uint8),
        "steps": torch.tensor(3.0),
        "vector": {"step": torch.ones(2)},
        "array": np.ones(3),
    }


def devices(state):
    """Device types by name."""
    return {
        "model.w": state["model"]["w"].device.type,
        "model.b": state["model"]["b"].device.type,
        "step": state["optimizer"]["state"][0]["step"].device.type,
        "exp_avg": state["optimizer"]["state"][0]["exp_avg"].device.type,
        "fused": state["fused"]["step"].device.type,
        "rng": state["rng"]["cpu"].device.type,
        "rng of a GPU": state["rng"]["cuda"][0].device.type,
        "kept": state["kept"].device.type,
        "steps": state["steps"].device.type,
        "vector": state["vector"]["step"].device.type,
    }


@pytest.fixture
def path(tmp_path):
    fastckpt.save(training(), tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize("name", ["standin:0", "standin", DEVICE], ids=str)
def test_what_belongs_on_the_cpu_stays_there(path, name):
    loaded = fastckpt.load(path, device=name)
    on_cpu = {name for name, kind in devices(loaded).items() if kind == "cpu"}
    # A step that was on the device goes to the device: the optimizer is fused or capturable.
    assert on_cpu == {"step", "rng", "rng of a GPU"}
    torch.set_rng_state(loaded["rng"]["cpu"])
    assert type(loaded["array"]) is np.ndarray
    assert type(loaded["model"]["b"]) is torch.nn.Parameter


def test_nothing_goes_anywhere_unasked(path):
    assert set(devices(fastckpt.load(path)).values()) == {"cpu"}
    assert set(devices(fastckpt.load(path, device="cpu")).values()) == {"cpu"}


def test_everything_goes_where_it_was(path):
    state = training()
    loaded = fastckpt.load(path, device="saved")
    assert devices(loaded) == devices(state)


def test_patterns_are_obeyed_to_the_letter(path):
    loaded = fastckpt.load(path, device={"rng.cpu": DEVICE, "*.step": "standin", "model.b": "saved", "model.*": "cpu"})
    assert {name for name, kind in devices(loaded).items() if kind != "cpu"} == {
        "rng",
        "step",
        "fused",
        "vector",
        "model.b",
    }
    loaded = fastckpt.load(path, keys="model.*", device={"model.w": None, "optimizer.*": "cpu", "*": DEVICE})
    assert [value.device.type for value in loaded["model"].values()] == ["cpu", "standin"]
    with pytest.raises(KeyError, match=r"load: device: 'modle\.\*' matches nothing; there are 'model\.w'"):
        fastckpt.load(path, device={"modle.*": "cpu"})
    fastckpt.load(path, device={"modle.*": "cpu"}, strict=False)


def test_a_function_is_obeyed_to_the_letter(path):
    seen = {}

    def where(info):
        seen[info.name] = info
        return "standin:0" if info.name.startswith("rng") else None

    loaded = fastckpt.load(path, device=where)
    assert {name for name, kind in devices(loaded).items() if kind != "cpu"} == {"rng", "rng of a GPU"}
    assert seen["model.w"] == fastckpt.open(path).info("model.w")
    assert (seen["model.w"].device, seen["kept"].device, seen["fused.step"].device) == ("standin:0", "cpu", "standin:0")
    assert "array" not in seen
    assert set(devices(fastckpt.load(path, device=lambda _: "saved")).values()) == {"cpu", "standin"}


def test_arrays_go_there_as_tensors(tmp_path):
    state = {"n": np.arange(6.0).reshape(2, 3), "swapped": np.arange(3, dtype=">i4"), "step": np.array(1.0)}
    fastckpt.save(state, tmp_path / "c")
    loaded = fastckpt.load(tmp_path / "c", framework="torch", device=DEVICE)
    assert {value.device for value in loaded.values()} == {DEVICE}
    assert {name: there(value).tolist() for name, value in loaded.items()} == {
        name: value.tolist() for name, value in state.items()
    }


def test_a_tie_is_one_tensor_on_a_device_too(tmp_path):
    w = torch.randn(100).to(DEVICE)
    fastckpt.save({"a": w, "b": torch.nn.Parameter(w), "c": w}, tmp_path / "c")
    for device in ("saved", None):
        loaded = fastckpt.load(tmp_path / "c", device=device)
        assert loaded["a"] is loaded["c"]
        assert loaded["b"].data_ptr() == loaded["a"].data_ptr()


@pytest.mark.parametrize(
    "wrong",
    ["cuda:77", "standin:1", torch.device("standin", 5), {"model.w": "standin:1"}, lambda _: "standin:1"],
    ids=range(5),
)
def test_devices_that_are_not_here(path, wrong):
    with pytest.raises(ValueError, match=r"load: device.*there is no device (cuda:77|standin:[15]) here"):
        fastckpt.load(path, device=wrong)


@pytest.mark.parametrize(
    "wrong", ["nonsense", 3.5, {"*": "nonsense"}, {"*": 3.5}, lambda _: "nonsense", ["cpu"]], ids=range(6)
)
def test_what_is_no_device(path, wrong):
    with pytest.raises(ValueError, match=r"load: device.*is not a torch\.device or its name"):
        fastckpt.load(path, device=wrong)


def test_a_saved_device_that_is_not_here(path):
    body = manifest.body_of(path)
    for token in body["structure"]:
        if type(token) is list and token[0] == "tensor":
            token[3:] = ["cuda:77"] * len(token[3:])
    manifest.forge(path, body)
    with pytest.raises(ValueError, match=r"there is no device cuda:77 here \(tensor 'model.w' was on cuda:77.*device="):
        fastckpt.load(path, device="saved")
    assert fastckpt.load(path, device="saved", keys="optimizer.*")
    assert devices(fastckpt.load(path, device=DEVICE))["model.w"] == "standin"


def test_a_cast_on_the_way_to_a_device(tmp_path, late):
    state = {
        "odd": torch.ones(4097, dtype=torch.uint8),
        "large": torch.randn(1100, 1000, dtype=torch.float64),
        "w": torch.nn.Parameter(torch.randn(70_001)),
    }
    fastckpt.save(state, tmp_path / "c")
    late.reset(late=0.001)
    loaded = fastckpt.load(tmp_path / "c", device=DEVICE, dtype={"large": "float32", "w": torch.bfloat16})
    assert late.largest < state["large"].nbytes // 2, "in pieces"
    assert bits(there(loaded["large"])) == bits(state["large"].float())
    assert bits(there(loaded["w"])) == bits(state["w"].detach().bfloat16())
    assert bits(there(loaded["odd"])) == bits(state["odd"])
    assert type(loaded["w"]) is torch.nn.Parameter


def test_a_cast_into_a_tensor_on_a_device(tmp_path):
    state = {"odd": torch.ones(3, dtype=torch.uint8), "w": torch.randn(700, 900)}
    fastckpt.save(state, tmp_path / "c")
    into = {"odd": torch.zeros(3, dtype=torch.uint8), "w": torch.zeros(900, 700, dtype=torch.float16).to(DEVICE).t()}
    fastckpt.load(tmp_path / "c", into=into, dtype="float16")
    assert torch.equal(there(into["w"]), state["w"].half())


def test_new_tensors_of_objects_go_there(tmp_path):
    class Stateful:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            self.state = state

    fastckpt.save({"w": torch.ones(3), "o": {"m": torch.ones(2), "step": torch.tensor(1.0)}}, tmp_path / "c")
    into = {"w": torch.zeros(3), "o": Stateful()}
    fastckpt.load(tmp_path / "c", into=into, device=DEVICE)
    assert (into["w"].sum(), into["o"].state["m"].device, into["o"].state["step"].device.type) == (3, DEVICE, "cpu")
    with pytest.raises(ValueError, match="load: device is for new tensors"):
        fastckpt.load(tmp_path / "c", into={"w": torch.zeros(3), "o": {}}, device=DEVICE, strict=False)
