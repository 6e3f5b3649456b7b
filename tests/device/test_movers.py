"""Parts of the code that moves bytes from and to a device for the core, and of the comparison by ranks."""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch

import fastckpt
from fastckpt import _core, _crc64
from fastckpt._api import host_memory
from fastckpt._tensors import device_sums
from fastckpt._tensors import torch as _torch
from fastckpt._tensors.movers import Sinks, Sources
from harness import devices
from harness.devices import DEVICE, OnDevice, each, on_device, there
from harness.internals import local_of

MIB = 1 << 20
#: Whole elements, cut ones, and a single byte.
CUTS = ((0, 3), (3, 4001), (4001, 7999), (7999, 8000))


class TestMovers(OnDevice):
    @each("is_strided", [False, True])
    @each("together", [False, True])
    def test_elements_that_a_block_cuts_arrive_whole(self, is_strided, together):
        """No plan of aligned tensors cuts an element, but a foreign file may."""
        value = torch.randn(40, 25, dtype=torch.float64)
        moved = value.t().contiguous().to(DEVICE).t() if is_strided else value.to(DEVICE)
        out = np.zeros(8000, np.uint8)
        ranges = [(5, start, out.ctypes.data + start, end - start) for start, end in CUTS]
        sources = Sources("save", {5: _torch.mover_out(moved)})
        assert (sources.devices, sources.is_on_device(5)) == ((DEVICE,), True)
        for asked in [ranges] if together else [[item] for item in ranges]:
            sources.fill(asked)
        assert out.tobytes() == value.numpy().tobytes()
        target = torch.zeros(25, 40, dtype=torch.float64).to(DEVICE).t() if is_strided else torch.zeros_like(moved)
        sinks = Sinks("load", {5: _torch.mover_in(target)})
        for asked in [ranges] if together else [[item] for item in ranges]:
            sinks.drain(asked)
        assert torch.equal(there(target), value)

    def test_ranges_in_any_order_from_any_place(self):
        """Neighbours in memory are not neighbours in the state, and the reverse."""
        values = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (10, 1 << 20, 3, 2 << 20, 100, 7)]
        sources = Sources("save", {n: _torch.mover_out(value.to(DEVICE)) for n, value in enumerate(values)})
        out = np.zeros(8 << 20, np.uint8)
        places, at = {}, 0
        for number in (5, 0, 3, 4, 1, 2):
            places[number] = at
            at += values[number].numel() + (number % 2) * 4096
        sources.fill([(n, 0, out.ctypes.data + place, values[n].numel()) for n, place in places.items()])
        for number, place in places.items():
            assert torch.equal(torch.from_numpy(out[place : place + values[number].numel()]), values[number])
        targets = {n: torch.zeros(value.numel(), dtype=torch.uint8, device=DEVICE) for n, value in enumerate(values)}
        sinks = Sinks("load", {n: _torch.mover_in(target) for n, target in targets.items()})
        sinks.drain([(n, 0, out.ctypes.data + place, values[n].numel()) for n, place in places.items()])
        for number, value in enumerate(values):
            assert torch.equal(there(targets[number]), value)

    def test_what_is_enqueued_holds_the_stream_and_not_the_host(self):
        value = torch.arange(3_000_000, device=DEVICE)
        devices.busy()
        value.add_(1)
        sources = Sources("save", {0: _torch.mover_out(value)})
        out = torch.zeros(3_000_000, dtype=torch.int64)
        copies = sources.enqueue([(0, 0, out.data_ptr(), out.nbytes)])
        copies.hold_streams()
        value.fill_(-1)
        copies.wait()
        assert copies.is_done()
        assert torch.equal(out, torch.arange(1, 3_000_001))
        devices.synchronize()
        assert (there(value) == -1).all()


class TestRanks(OnDevice):
    """A rank's part of the state, which ranks compare."""

    late = 0.0

    def test_tensors_are_compared_by_their_logical_bytes(self):
        """Whatever the layout on the device, a rank sends the same as for equal tensors in host memory."""
        state = {f"w{number}": torch.randn(number % 50 + 1) for number in range(300)}
        state["large"] = torch.randn(64 << 10, 3)
        moved = on_device(state)
        state["columns"], moved["columns"] = state["large"].t().contiguous(), moved["large"].t()
        state["cut"], moved["cut"] = state["large"][:, 1].contiguous(), moved["large"][:, 1]
        state["summed"], moved["summed"] = torch.arange(300_000.0), on_device({"w": torch.arange(300_000.0)})["w"]
        for replicas in ("sample", "full"):
            with mock.patch.object(Sources, "sum", autospec=True, side_effect=Sources.sum) as sums:
                assert told(moved, replicas) == told(state, replicas)
            # The device computes checksums of large contiguous tensors, so their bytes are not copied.
            assert sums.call_count == (replicas == "full")
            with mock.patch.object(Sources, "sum", return_value=_crc64.of(state["summed"].numpy())):
                assert told(moved, replicas) == told(state, replicas)
            with mock.patch.object(Sources, "sum", return_value=7):
                assert (told(moved, replicas) == told(state, replicas)) is (replicas == "sample")
            assert told({**moved, "w7": moved["w7"] + 1}, replicas) != told(state, replicas)

    def test_a_device_whose_checksums_are_wrong_makes_none(self):
        state = {"w": torch.arange(300_000.0)}
        with mock.patch.dict(device_sums._checked, clear=True), mock.patch.object(device_sums, "_PROBE_SUM", 1):
            assert told(on_device(state), "full") == told(state, "full")
            assert device_sums._checked == {str(DEVICE): False}

    def test_a_device_that_was_full_once_is_asked_again(self):
        state = {"w": torch.arange(300_000.0)}
        with mock.patch.dict(device_sums._checked, clear=True):
            with mock.patch.object(device_sums, "of", side_effect=torch.OutOfMemoryError("out of memory")):
                assert told(on_device(state), "full") == told(state, "full")
            assert device_sums._checked == {}
            assert told(on_device(state), "full") == told(state, "full")
            assert device_sums._checked == {str(DEVICE): True}


def told(state, replicas):
    """Return what the first of two ranks sends about a state that both hold."""
    local = local_of(state, 0, [0, 1])
    assert local.request.sources.devices in ((DEVICE,), ())
    tensors = local.request.flat.tensors
    options = _core.SaveOptions(shard_size=1 << 30)
    about = [(each.name, each.dtype, each.shape, each.logical, [0]) for each in tensors]
    share = _core.Share.to_save(about, [_core.Spread.ranks([0, 1])], 2, options)
    held = [(number, 0, each.address, each.capacity) for number, each in enumerate(tensors)]
    engine = _core.RankSave(share, 0, held, local.request.sources.fill, options)
    try:
        return engine.replicas(replicas, 7, lambda tensor, _: local.request.sources.sum(tensor), None).digests()
    finally:
        engine.close()
        local.request.close()
        assert (local.request.sources, local.request.flat.movers) == (None, {})


class TestStaging(OnDevice):
    """The core borrows staging memory for bytes that go to and from devices."""

    late = 0.0

    def test_copies_go_to_and_from_it(self):
        """All bytes of a save, a load and reads of an open checkpoint use this, even if converted or reordered."""
        seen = []

        def note(name):
            usual = getattr(name, "fill" if name is Sources else "drain")

            def noted(self, ranges):
                ranges = list(ranges)
                seen.extend((address, nbytes) for _, _, address, nbytes in ranges)
                usual(self, ranges)

            return mock.patch.object(name, usual.__name__, noted)

        state = on_device({"w": torch.randn(3 * MIB), "t": torch.randn(700, 900), "small": torch.ones(3)})
        state["t"] = state["t"].t()
        into = {"w": torch.zeros(3 * MIB, device=DEVICE), "t": torch.zeros(700, 900, device=DEVICE).t()}
        ways = [
            lambda: fastckpt.save(state, self.path / "c"),
            lambda: fastckpt.load(self.path / "c", device=DEVICE),
            lambda: fastckpt.load(self.path / "c", into=into, strict=False),
            lambda: fastckpt.open(self.path / "c", device=DEVICE)["w"],
            lambda: fastckpt.open(self.path / "c", device=DEVICE).tensor("w")[slice(5, MIB)],
        ]
        with note(Sources), note(Sinks):
            for way in ways:
                way()
                (memory,) = host_memory._free_staging
                assert seen
                ends = memory.core.address, memory.core.address + memory.nbytes
                assert all(ends[0] <= address and address + nbytes <= ends[1] for address, nbytes in seen)
                seen.clear()
        # All tensors are in host memory, so the core borrows nothing.
        fastckpt.background.release_buffers()
        fastckpt.save({"w": torch.ones(3).expand(3), "t": torch.ones(3, 4).t()}, self.path / "c")
        fastckpt.load(self.path / "c", dtype="bfloat16")
        assert not host_memory._free_staging
