"""What moves ranges of tensors on a device for the core."""

from __future__ import annotations

import numpy as np
import torch

from fastckpt._tensors import torch as _torch
from fastckpt._tensors.movers import Sinks, Sources
from harness import devices
from harness.devices import DEVICE, OnDevice, each, there

#: Whole elements, cut ones, and a single byte.
CUTS = ((0, 3), (3, 4001), (4001, 7999), (7999, 8000))


class TestMovers(OnDevice):
    @each("is_strided", [False, True])
    @each("together", [False, True])
    def test_elements_that_a_block_cuts_arrive_whole(self, is_strided, together):
        """Not what the plan does for aligned tensors, but what a foreign file may ask for."""
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
        """Neighbours in memory that are none in the state, and the reverse."""
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
