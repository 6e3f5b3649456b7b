"""Other ways to and from a device: open checkpoints, parts, names, mapped files, and a captured stream."""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

import fastckpt
from fastckpt.dcp import Reader, Writer
from harness import devices, limits, standin
from harness.boxes import cut
from harness.devices import DEVICE, KIND, OnDevice, each, fill_later, on_device, raises, there, to_host
from harness.internals import local_of
from harness.reports import with_report
from harness.same import bits, same
from harness.standin import faults

from .states import host_state, training

MIB = 1 << 20

INDICES = [
    (slice(None), slice(None), slice(None)),
    (slice(1, 30), slice(3, 4), slice(5, 61)),
    (slice(None, None, 3), slice(None, None, 2), slice(7, None, 5)),
    (4, slice(None), 9),
    (..., -1),
    5,
    (1, 2, 3),
    (slice(None, None, -1), slice(40, 3, -7)),
    (slice(3, 3),),
    (slice(None), slice(5, 1, -1), 0),
]


class TestOpen(OnDevice):
    """Single tensors of an open checkpoint."""

    def test_tensors_go_where_they_are_asked_for(self):
        state = host_state()
        fastckpt.save({**state, "array": np.arange(5), "tied": state["large"]}, self.path / "c")
        with fastckpt.open(self.path / "c", device=str(DEVICE)) as checkpoint:
            for name, value in state.items():
                found = checkpoint[name]
                assert found.device == DEVICE
                assert type(found) is type(value)
                assert same(
                    there(found).requires_grad_(value.requires_grad), value.detach().requires_grad_(value.requires_grad)
                )
                assert checkpoint.report.bytes == value.nbytes
            assert type(checkpoint["array"]) is np.ndarray
            assert checkpoint["tied"].device == DEVICE
        assert fastckpt.open(self.path / "c")["large"].is_cpu

    def test_what_a_placement_says_holds(self):
        fastckpt.save(training(), self.path / "c")
        kinds = {
            "model.w": KIND,
            "optimizer.state.0.exp_avg": "cpu",
            "fused.step": KIND,
            "rng.cpu": "cpu",
        }
        opened = fastckpt.open(self.path / "c", device="saved")
        assert {name: opened[name].device.type for name in kinds} == kinds
        opened = fastckpt.open(self.path / "c", device={"optimizer.*": KIND, "fused.*": "cpu"})
        assert opened["optimizer.state.0.exp_avg"].device.type == KIND
        assert opened["fused.step"].is_cpu
        assert opened["model.w"].is_cpu
        opened = fastckpt.open(self.path / "c", device=lambda info: DEVICE if info.name == "model.b" else None)
        assert [opened[name].device.type for name in ("model.b", "model.w")] == [KIND, "cpu"]
        # States of random generators stay on the host, wherever other tensors go.
        assert fastckpt.open(self.path / "c", device=DEVICE)["rng.cpu"].is_cpu

    def test_arguments(self):
        fastckpt.save({"w": torch.zeros(3)}, self.path / "c")
        with raises(ValueError, "^open: device must be"):
            fastckpt.open(self.path / "c", device="nonsense")
        with raises(ValueError, rf"^open: device: there is no device {KIND}:77 here.*'w'"):
            fastckpt.open(self.path / "c", device={"w": f"{KIND}:77"})
        with raises(KeyError, "open: device: 'x' matches nothing"):
            fastckpt.open(self.path / "c", device={"x": KIND})
        with raises(TypeError, "^open: device: a pattern must be a string"):
            fastckpt.open(self.path / "c", device={1: KIND})

    @each("name", ["f32", "f8", "c128"])
    def test_parts(self, name):
        torch.manual_seed(2)
        base = torch.randn(64, 48, 70)
        state = {
            "f32": base,
            "f8": base.to(torch.float8_e4m3fn),
            "c128": torch.complex(base, -base).to(torch.complex128),
        }
        fastckpt.save({name: state[name]}, self.path / "c")
        opened = fastckpt.open(self.path / "c", device=DEVICE)
        on_host = fastckpt.open(self.path / "c")
        for index in INDICES:
            found, wanted = opened.tensor(name)[index], on_host.tensor(name)[index]
            assert (found.device, found.shape, found.dtype) == (DEVICE, wanted.shape, wanted.dtype), index
            assert found.is_contiguous()
            assert bits(there(found)) == bits(wanted), index

    def test_parts_of_arrays_stay(self):
        fastckpt.save({"n": np.arange(10), "w": torch.arange(10)}, self.path / "c")
        opened = fastckpt.open(self.path / "c", device=DEVICE)
        assert opened.tensor("n")[slice(2, 4)].tolist() == [2, 3]
        assert there(opened.tensor("w")[slice(2, 4)]).tolist() == [2, 3]

    def test_of_a_large_part_only_that_much_is_copied(self):
        fastckpt.save({"w": torch.arange(3 * MIB).reshape(3, MIB)}, self.path / "c")
        opened = fastckpt.open(self.path / "c", device=DEVICE)
        assert torch.equal(there(opened.tensor("w")[1]), torch.arange(MIB, 2 * MIB))
        assert torch.equal(
            there(opened.tensor("w")[(slice(None), slice(0, None, 2))]), torch.arange(0, 3 * MIB, 2).reshape(3, -1)
        )


class TestKeys(OnDevice):
    """Names choose the tensors that go to a device."""

    def test_keys_and_exclude(self):
        state = {"model": on_device({"a": torch.randn(1000), "b": torch.randn(2, 3)}), "other": {"c": torch.ones(5)}}
        fastckpt.save(state, self.path / "c")
        loaded = fastckpt.load(self.path / "c", keys="*.a", device=DEVICE)
        assert same(to_host(loaded["model"]), {"a": there(state["model"]["a"])})
        loaded = fastckpt.load(self.path / "c", exclude="model.a", device="saved")
        assert [loaded["model"]["b"].device.type, loaded["other"]["c"].device.type] == [KIND, "cpu"]
        into = {"model": on_device({"a": torch.zeros(1000), "b": torch.zeros(2, 3)})}
        fastckpt.load(self.path / "c", into=into, keys="model.b")
        assert bits(there(into["model"]["b"])) == bits(there(state["model"]["b"]))
        assert not there(into["model"]["a"]).any()


class TestMapped(OnDevice):
    """``mmap=True``: tensors on a device are copied from the pages once these are verified."""

    def save(self):
        state = host_state()
        fastckpt.save({**state, "array": np.arange(5000), "long": bytes(range(256)) * 40}, self.path / "c")
        return state

    @each("step", [(1 << 16) + 1, 16 << 20])
    @each("verify", [True, False])
    def test_new_tensors(self, step, verify):
        state = self.save()
        with limits.lowered("read from pages at a time", step):
            loaded, report = with_report(fastckpt.load, self.path / "c", device=DEVICE, mmap=True, verify=verify)
        assert loaded.pop("array").tolist() == list(range(5000))
        assert loaded.pop("long") == bytes(range(256)) * 40
        assert {value.device for value in loaded.values()} == {DEVICE}
        assert same(to_host(loaded), to_host(state))
        # The CPU copied nothing, and no tensor on the device needs the files.
        assert report.copied == 0
        gc.collect()
        assert str(self.path / "c") not in Path("/proc/self/maps").read_text(encoding="utf-8")

    def test_some_on_the_device_and_some_as_pages(self):
        state = self.save()
        loaded = fastckpt.load(self.path / "c", device={"large": DEVICE, "half": DEVICE}, io=fastckpt.IO(mmap=True))
        assert {name for name, value in loaded.items() if getattr(value, "is_cpu", True) is False} == {"large", "half"}
        assert bits(there(loaded["large"])) == bits(state["large"])
        assert bits(loaded["double"]) == bits(state["double"])

    @each("framework", ["torch"])
    def test_arrays_become_tensors_there(self, framework):
        swapped = np.arange(1000, dtype=">i4")
        fastckpt.save({"n": np.arange(6.0).reshape(2, 3), "swapped": swapped}, self.path / "c")
        loaded = fastckpt.load(self.path / "c", framework=framework, device=DEVICE, io=fastckpt.IO(mmap=True))
        assert there(loaded["n"]).tolist() == np.arange(6.0).reshape(2, 3).tolist()
        assert (loaded["swapped"].device, there(loaded["swapped"]).tolist()) == (DEVICE, swapped.tolist())

    @each("step", [(1 << 16) + 1, 16 << 20])
    def test_tensors_that_exist(self, step):
        state = self.save()
        into = on_device({name: torch.zeros_like(value.detach()) for name, value in state.items()})
        into["large"] = torch.zeros(2200, 3000, dtype=torch.int32).to(DEVICE)[::2, ::2].t()
        into["wide"] = torch.zeros(5000, dtype=torch.complex128).to(DEVICE).conj()
        into["half"] = torch.zeros(100_001, dtype=torch.bfloat16)
        into["array"] = np.zeros(10_000, np.int64)[::2]
        fill_later(into["double"], 7.0)
        with limits.lowered("read from pages at a time", step):
            loaded = fastckpt.load(self.path / "c", into=into, io=fastckpt.IO(mmap=True))
        assert loaded["large"] is into["large"]
        assert loaded.pop("long") == bytes(range(256)) * 40
        assert into.pop("array").tolist() == list(range(5000))
        devices.synchronize()
        assert bits(there(into["large"]).contiguous()) == bits(state["large"])
        # The memory of a conjugated tensor has the conjugates.
        assert bits(there(into["wide"].conj())) == bits(state["wide"].conj())
        rest = {name: value for name, value in into.items() if name not in {"large", "wide"}}
        wanted = {name: value.detach() for name, value in state.items() if name in rest}
        assert same({name: there(value.detach()) for name, value in rest.items()}, wanted)

    def test_a_damaged_checkpoint_changes_nothing(self):
        fastckpt.save({"w": torch.ones(100_000)}, self.path / "c")
        shard = self.path / "c" / "model.safetensors"
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        into = {"w": torch.zeros(100_000, device=DEVICE)}
        with raises(fastckpt.CorruptCheckpointError, "model.safetensors"):
            fastckpt.load(self.path / "c", into=into, io=fastckpt.IO(mmap=True))
        devices.synchronize()
        assert not there(into["w"]).any()
        with raises(ValueError, "cannot be combined with dtype="):
            fastckpt.load(self.path / "c", io=fastckpt.IO(mmap=True), device=DEVICE, dtype="bfloat16")


class TestDcp(OnDevice):
    """The adapters for torch.distributed.checkpoint, in one process."""

    def test_there_and_back(self):
        state = {"model": on_device(host_state()), "step": 3}
        state["model"]["t"] = state["model"]["large"].t()
        with ignored():
            dcp.save(state, storage_writer=Writer(self.path / "c"), no_dist=True)
        wanted = {name: there(value.detach()).contiguous() for name, value in state["model"].items()}
        loaded = fastckpt.load(self.path / "c")
        assert same({name: value.detach() for name, value in loaded["model"].items()}, wanted)
        empty = {"model": {name: torch.zeros_like(value.detach()) for name, value in state["model"].items()}, "step": 0}
        empty["model"]["half"] = torch.zeros(100_001, dtype=torch.float32, device=DEVICE)
        empty["model"]["wide"] = torch.zeros(5000, dtype=torch.complex128, device=DEVICE).conj()
        fill_later(empty["model"]["double"], 7.0)
        with ignored():
            dcp.load(empty, storage_reader=Reader(self.path / "c"), no_dist=True)
        devices.synchronize()
        assert empty["step"] == 3
        empty["model"]["wide"] = empty["model"]["wide"].conj()
        found = {name: there(value) for name, value in empty["model"].items()}
        assert bits(found.pop("half")) == bits(wanted.pop("half").float())
        assert bits(found.pop("t").contiguous()) == bits(wanted.pop("t"))
        # The memory of a conjugated tensor has the conjugates.
        assert bits(found.pop("wide")) == bits(wanted.pop("wide").conj())
        assert same(found, wanted)

    def test_boxes_of_several_devices_become_one_tensor(self):
        values = torch.arange(700.0 * 30).reshape(700, 30)
        places = [DEVICE, DEVICE, torch.device("cpu")]
        state = {
            "rows": cut(values, [300, 650], place=lambda number, box: box.to(places[number])),
            "columns": cut(values, [], [7, 9], place=lambda number, box: box.to(places[number])),
        }
        with ignored():
            dcp.save(state, storage_writer=Writer(self.path / "c"), no_dist=True)
        assert same(fastckpt.load(self.path / "c"), {"rows": values, "columns": values})


@contextmanager
def ignored():
    """Ignore torch's warnings about a single process inside the ``with`` statement."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated")
        yield


@contextmanager
def captured():
    """Capture the current stream of the device into a graph inside the ``with`` statement."""
    if devices.IS_STANDIN:
        with standin.capturing():
            yield
        return
    side = torch.cuda.Stream(device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


class TestCapture(OnDevice):
    """While a stream is captured, no copy is possible: the error comes before anything changes."""

    def test_saves(self):
        state = {"w": torch.ones(1000, device=DEVICE)}
        devices.synchronize()
        with captured():
            with raises(RuntimeError, "^save: .*captured"):
                fastckpt.save(state, self.path / "c")
            with raises(RuntimeError, "^save: .*captured"):
                local_of(state, 0, [0])
        assert not list(self.path.iterdir())
        assert fastckpt.save(state, self.path / "c").bytes == 4000

    def test_loads(self):
        fastckpt.save({"w": torch.ones(1000)}, self.path / "c")
        opened = fastckpt.open(self.path / "c", device=DEVICE)
        into = {"w": torch.zeros(1000, device=DEVICE)}
        devices.synchronize()
        with captured():
            for options in ({"device": DEVICE}, {"into": into}, {"into": into, "io": fastckpt.IO(mmap=True)}):
                with raises(RuntimeError, "^load: .*captured"):
                    fastckpt.load(self.path / "c", **options)
            for read in (lambda: opened["w"], lambda: opened.tensor("w")[slice(2, 4)]):
                with raises(RuntimeError, "^open: .*captured"):
                    read()
            # Other calls are still possible.
            assert fastckpt.load(self.path / "c")["w"].sum() == 1000
        devices.synchronize()
        assert not there(into["w"]).any()
        fastckpt.load(self.path / "c", into=into)
        assert there(into["w"]).sum() == 1000


class TestPinningOnTheStandin(OnDevice):
    """The report's text about memory that cannot be pinned."""

    on = "standin"

    def test_a_save_and_a_load_go_on_and_say_so(self):
        state = on_device({"w": torch.randn(MIB)})
        for refused in (False, True):
            fastckpt.background.release_buffers()
            standin.cudart.limit = 0 if refused else None
            saved = fastckpt.save(state, self.path / "c")
            loaded, report = with_report(fastckpt.load, self.path / "c", device=DEVICE)
            opened = fastckpt.open(self.path / "c", device=DEVICE)
            assert same(to_host(loaded), to_host(state))
            assert same(there(opened["w"]), there(state["w"]))
            for one in (saved, report, opened.report):
                assert any("pin" in text for text in one.warnings) is refused, one.warnings
        assert faults.copies
