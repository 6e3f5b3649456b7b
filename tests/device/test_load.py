"""Loads of tensors to a device, and which tensors go there."""

from __future__ import annotations

import threading

import numpy as np
import torch

import fastckpt
from harness import devices, manifest
from harness.devices import DEVICE, KIND, OnDevice, each, on_device, there, to_host
from harness.same import bits, same
from harness.standin import faults

from .states import host_state, training

MIB = 1 << 20


class TestLoad(OnDevice):
    @each("framework", ["auto", "torch"])
    def test_load_puts_new_tensors_on_the_device(self, framework):
        state = host_state()
        fastckpt.save({**state, "array": np.arange(5), "tied": state["large"]}, self.path / "c")
        loaded = fastckpt.load(self.path / "c", device=str(DEVICE), framework=framework)
        array = loaded.pop("array")
        if framework == "torch":
            assert array.device == DEVICE
            array = array.cpu().numpy()
        assert (array == np.arange(5)).all()
        assert {value.device for value in loaded.values()} == {DEVICE}
        assert loaded.pop("tied").data_ptr() == loaded["large"].data_ptr()
        assert [type(loaded[name]) for name in ("parameter", "grad")] == [torch.nn.Parameter, torch.Tensor]
        assert loaded["grad"].requires_grad
        assert same(to_host(loaded), to_host(state))
        assert fastckpt.load(self.path / "c", keys="half", device=DEVICE)["half"].device == DEVICE
        assert fastckpt.load(self.path / "c", keys="half", device="cpu")["half"].is_cpu

    def test_load_fills_tensors_of_the_device(self):
        state = host_state()
        fastckpt.save({**state, "t": state["large"].t().contiguous(), "c": state["wide"]}, self.path / "c")
        into = on_device({name: torch.zeros_like(value.detach()) for name, value in state.items()})
        base = torch.zeros(2200, 3000, dtype=torch.int32).to(DEVICE)
        into["t"] = base[::2, ::2]
        into["c"] = torch.zeros(5000, dtype=torch.complex128).to(DEVICE).conj()
        fastckpt.load(self.path / "c", into=into)
        into["c"] = into["c"].conj()
        found = to_host(into)
        assert torch.equal(found.pop("t").contiguous(), state["large"].t())
        assert torch.equal(found.pop("c").resolve_conj(), state["wide"].conj().resolve_conj())
        assert same(found, to_host(state))

    def test_more_than_fits_into_any_buffer(self):
        state = {
            "odd": torch.randint(0, 255, (37 * MIB + 5,), dtype=torch.uint8),
            "rows": torch.randn(2300, 2900),
            "columns": torch.randn(2900, 2300),
            "after": torch.arange(5),
        }
        fastckpt.save(state, self.path / "c")
        assert same(to_host(fastckpt.load(self.path / "c", device=DEVICE)), state)
        into = on_device({name: torch.zeros_like(value) for name, value in state.items()})
        into["columns"] = torch.zeros(2300, 2900).to(DEVICE).t()
        fastckpt.load(self.path / "c", into=into)
        assert same({name: value.contiguous() for name, value in to_host(into).items()}, state)

    def test_a_load_does_not_overtake_the_callers_stream(self):
        """Earlier work in the stream ends before the load, even on the tensors that are filled."""
        fastckpt.save({"w": torch.arange(1_000_000)}, self.path / "c")
        into = {"w": torch.zeros(1_000_000, dtype=torch.int64, device=DEVICE)}
        devices.fill_later(into["w"], 7)
        fastckpt.load(self.path / "c", into=into)
        devices.synchronize()
        assert torch.equal(there(into["w"]), torch.arange(1_000_000))

    def test_arguments_of_device(self):
        fastckpt.save({"w": torch.zeros(3)}, self.path / "c")
        with devices.raises(ValueError, "device must be"):
            fastckpt.load(self.path / "c", device="nonsense")
        with devices.raises(ValueError, "device must be"):
            fastckpt.load(self.path / "c", device=3.5)
        with devices.raises(ValueError, "tensors passed with into= stay"):
            fastckpt.load(self.path / "c", device=KIND, into={"w": torch.zeros(3)})
        with devices.raises(ValueError, "have no device"):
            fastckpt.load(self.path / "c", device=KIND, framework="numpy")

    def test_a_cast_on_the_way_to_a_device(self):
        state = {
            "odd": torch.ones(4097, dtype=torch.uint8),
            "large": torch.randn(2100, 1100, dtype=torch.float64),
            "w": torch.nn.Parameter(torch.randn(70_001)),
        }
        fastckpt.save(state, self.path / "c")
        loaded = fastckpt.load(self.path / "c", device=DEVICE, dtype={"large": "float32", "w": torch.bfloat16})
        assert bits(there(loaded["large"])) == bits(state["large"].float())
        assert bits(there(loaded["w"])) == bits(state["w"].detach().bfloat16())
        assert bits(there(loaded["odd"])) == bits(state["odd"])
        assert type(loaded["w"]) is torch.nn.Parameter

    def test_a_cast_into_a_tensor_on_a_device(self):
        state = {"odd": torch.ones(3, dtype=torch.uint8), "w": torch.randn(700, 900)}
        fastckpt.save(state, self.path / "c")
        into = {"odd": torch.zeros(3, dtype=torch.uint8), "w": torch.zeros(900, 700, dtype=torch.float16).to(DEVICE)}
        into["w"] = into["w"].t()
        fastckpt.load(self.path / "c", into=into, dtype="float16")
        assert torch.equal(there(into["w"]), state["w"].half())


class TestPlacement(OnDevice):
    """The placement of loaded tensors."""

    late = 0.001

    def setUp(self):
        super().setUp()
        fastckpt.save(training(), self.path / "c")

    @each("name", [str(DEVICE), KIND, DEVICE])
    def test_what_belongs_on_the_cpu_stays_there(self, name):
        loaded = fastckpt.load(self.path / "c", device=name)
        on_cpu = {name for name, kind in _kinds(loaded).items() if kind == "cpu"}
        # A step that was on the device returns there: the optimizer is fused or capturable.
        assert on_cpu == {"step", "rng", "rng of a GPU"}
        torch.set_rng_state(loaded["rng"]["cpu"])
        assert type(loaded["array"]) is np.ndarray
        assert type(loaded["model"]["b"]) is torch.nn.Parameter

    def test_nothing_goes_anywhere_unasked(self):
        assert set(_kinds(fastckpt.load(self.path / "c")).values()) == {"cpu"}
        assert set(_kinds(fastckpt.load(self.path / "c", device="cpu")).values()) == {"cpu"}

    def test_everything_goes_where_it_was(self):
        assert _kinds(fastckpt.load(self.path / "c", device="saved")) == _kinds(training())

    def test_patterns_are_obeyed_to_the_letter(self):
        path = self.path / "c"
        loaded = fastckpt.load(path, device={"rng.cpu": DEVICE, "*.step": KIND, "model.b": "saved", "model.*": "cpu"})
        assert {name for name, kind in _kinds(loaded).items() if kind != "cpu"} == {
            "rng",
            "step",
            "fused",
            "vector",
            "model.b",
        }
        loaded = fastckpt.load(path, keys="model.*", device={"model.w": None, "optimizer.*": "cpu", "*": DEVICE})
        assert [value.device.type for value in loaded["model"].values()] == ["cpu", KIND]
        with devices.raises(KeyError, r"load: device: 'modle\.\*' matches nothing; similar: 'model\.w'"):
            fastckpt.load(path, device={"modle.*": "cpu"})
        fastckpt.load(path, device={"modle.*": "cpu"}, strict=False)

    def test_a_function_is_obeyed_to_the_letter(self):
        seen = {}
        path = self.path / "c"

        def where(info):
            seen[info.name] = info
            return str(DEVICE) if info.name.startswith("rng") else None

        loaded = fastckpt.load(path, device=where)
        assert {name for name, kind in _kinds(loaded).items() if kind != "cpu"} == {"rng", "rng of a GPU"}
        assert seen["model.w"] == fastckpt.open(path).info("model.w")
        known = [seen[name].device for name in ("model.w", "kept", "fused.step")]
        assert known == [str(DEVICE), "cpu", str(DEVICE)]
        assert "array" not in seen
        assert set(_kinds(fastckpt.load(path, device=lambda _: "saved")).values()) == {"cpu", KIND}

    def test_arrays_go_there_as_tensors(self):
        state = {"n": np.arange(6.0).reshape(2, 3), "swapped": np.arange(3, dtype=">i4"), "step": np.array(1.0)}
        fastckpt.save(state, self.path / "c")
        loaded = fastckpt.load(self.path / "c", framework="torch", device=DEVICE)
        assert {value.device for value in loaded.values()} == {DEVICE}
        assert {name: there(value).tolist() for name, value in loaded.items()} == {
            name: value.tolist() for name, value in state.items()
        }

    def test_a_tie_is_one_tensor_on_a_device_too(self):
        w = torch.randn(100).to(DEVICE)
        fastckpt.save({"a": w, "b": torch.nn.Parameter(w), "c": w}, self.path / "c")
        for device in ("saved", None):
            loaded = fastckpt.load(self.path / "c", device=device)
            assert loaded["a"] is loaded["c"]
            assert loaded["b"].data_ptr() == loaded["a"].data_ptr()

    @each(
        "wrong",
        ["cuda:77", f"{KIND}:77", torch.device(KIND, 78), {"model.w": f"{KIND}:77"}, lambda _: f"{KIND}:77"],
    )
    def test_devices_that_are_not_here(self, wrong):
        with devices.raises(ValueError, rf"load: device.*there is no device (cuda|{KIND}):7[78] here"):
            fastckpt.load(self.path / "c", device=wrong)

    @each("wrong", ["nonsense", 3.5, {"*": "nonsense"}, {"*": 3.5}, lambda _: "nonsense", ["cpu"]])
    def test_what_is_no_device(self, wrong):
        with devices.raises(ValueError, r"load: device.*is not a torch\.device or its name"):
            fastckpt.load(self.path / "c", device=wrong)

    def test_a_saved_device_that_is_not_here(self):
        path = self.path / "c"
        body = manifest.body_of(path)
        for token in body["structure"]:
            if type(token) is list and token[0] == "tensor":
                token[3:] = ["cuda:77"] * len(token[3:])
        manifest.forge(path, body)
        with devices.raises(ValueError, r"there is no device cuda:77 here \(tensor 'model.w' was on cuda:77.*device="):
            fastckpt.load(path, device="saved")
        assert fastckpt.load(path, device="saved", keys="optimizer.*")
        assert _kinds(fastckpt.load(path, device=DEVICE))["model.w"] == KIND

    def test_new_tensors_of_objects_go_there(self):
        class Stateful:
            def state_dict(self):
                return {}

            def load_state_dict(self, state):
                self.state = state

        fastckpt.save({"w": torch.ones(3), "o": {"m": torch.ones(2), "step": torch.tensor(1.0)}}, self.path / "c")
        into = {"w": torch.zeros(3), "o": Stateful()}
        fastckpt.load(self.path / "c", into=into, device=DEVICE)
        kinds = [into["o"].state[name].device.type for name in ("m", "step")]
        assert (into["w"].sum(), kinds) == (3, [KIND, "cpu"])
        with devices.raises(ValueError, "load: device= applies to new tensors only"):
            fastckpt.load(self.path / "c", into={"w": torch.zeros(3), "o": {}}, device=DEVICE, strict=False)


def _kinds(state):
    """Return device types by name."""
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


class TestLoadOnTheStandin(OnDevice):
    """Faults, and counts that only the stand-in keeps."""

    on = "standin"

    @each("fault", ["fail_at", "refuse_at"])
    def test_an_upload_that_fails_fails_the_load(self, fault):
        state = host_state()
        fastckpt.save(state, self.path / "c")
        before = faults.copies
        fastckpt.load(self.path / "c", device=DEVICE)
        count = faults.copies - before
        for number in (1, count // 2, count):
            setattr(faults, fault, faults.copies + number)
            with devices.raises(RuntimeError, "standin: "):
                fastckpt.load(self.path / "c", device=DEVICE)
            faults.reset(late=self.late)
            fastckpt.background.release_buffers()
        assert same(to_host(fastckpt.load(self.path / "c", device=DEVICE)), to_host(state))

    def test_a_load_needs_little_memory_of_the_device(self):
        fastckpt.save({"large": torch.randn(5 * MIB), "wide": torch.randn(3 * MIB).double()}, self.path / "c")
        with devices.on_time():
            faults.largest = 0
            fastckpt.load(self.path / "c", device=DEVICE, dtype={"wide": "float32"})
            assert 0 < faults.largest <= 16 * MIB

    def test_a_load_waits_for_its_copies_whoever_else_loads(self):
        """Another load begins and ends in the middle of the copies of the first, without waiting for them."""
        state = {"w": torch.randint(0, 1 << 30, (3_000_000,), dtype=torch.int32)}
        fastckpt.save(state, self.path / "c")
        fastckpt.save({"w": torch.zeros(10)}, self.path / "other")
        others = []

        def delayed():
            # This call is in the middle of the first copies of the load below.
            if not others and threading.current_thread().name == "standin":
                others.append(threading.Thread(target=fastckpt.load, args=(self.path / "other",), kwargs=named))
                others[0].start()
                others[0].join(0.2)
            usual()

        named = {"device": DEVICE}
        usual = faults.delay
        faults.reset(late=0.05)
        faults.delay = delayed
        try:
            loaded = fastckpt.load(self.path / "c", device=DEVICE)
            assert same(to_host(loaded), state)
        finally:
            del faults.delay
        assert others
        others[0].join()
