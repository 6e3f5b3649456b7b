"""``dtype=`` and ``exclude=`` of saves of tensors on a device: elements are converted there."""

from __future__ import annotations

import math
import threading

import torch

import fastckpt
from harness import limits, points
from harness.devices import DEVICE, SAVES, OnDevice, each, fill_later, on_device
from harness.same import same


class TestShipped(OnDevice):
    @each("way", SAVES)
    def test_what_is_on_a_device_is_cast(self, way):
        wide = torch.randn(2300, 2900)
        state = {
            "large": wide,
            "half": torch.randn(70_001).half(),
            "double": torch.randn(5, 6, 7, dtype=torch.float64),
            "small": torch.ones(3),
            "scalar": torch.tensor(2.5),
            "none": torch.ones(0, 3),
            "n": torch.arange(9),
        }
        moved = on_device(state) | {"gone": torch.ones(9, device=DEVICE)}
        moved["columns"], state["columns"] = moved["large"].t(), wide.t().contiguous()
        moved["some"], state["some"] = moved["double"][1:, ::2, 2:-2], state["double"][1:, ::2, 2:-2].contiguous()
        moved["tied"] = moved["large"]
        report = SAVES[way](moved, self.path / "c", dtype="bfloat16", exclude="gone")
        expected = {key: value.bfloat16() if value.is_floating_point() else value for key, value in state.items()}
        loaded = fastckpt.load(self.path / "c")
        assert loaded.pop("tied") is loaded["large"]
        assert same(loaded, expected)
        assert report.bytes == sum(value.nbytes for value in expected.values())
        assert not report.warnings
        assert fastckpt.verify(self.path / "c").ok

    @each("way", SAVES)
    def test_what_a_cast_loses_is_told(self, way):
        state = {f"{value}": torch.full((1000,), value) for value in (1.0, 1e6, math.inf, math.nan, -1e6)}
        (warning,) = SAVES[way](on_device(state), self.path / "c", dtype="float16").warnings
        assert "2 tensors cast to float16 had numbers outside its range" in warning
        assert "'1000000.0', '-1000000.0'; " in warning
        assert same(fastckpt.load(self.path / "c"), {name: value.half() for name, value in state.items()})

    @each("way", SAVES)
    def test_a_cast_sees_what_the_stream_was_asked_for_before(self, way):
        state = {str(index): torch.empty(50_000, device=DEVICE) for index in range(3)}
        for index, value in enumerate(state.values()):
            fill_later(value, float(index + 1))
        SAVES[way](state, self.path / "c", dtype="float16")
        expected = {str(index): torch.full((50_000,), index + 1.0).half() for index in range(3)}
        assert same(fastckpt.load(self.path / "c"), expected)

    def test_pieces_are_bounded(self):
        """No piece made on the device is larger than the buffers of other copies there."""
        made = []

        def noting(parts):
            def note(download, start, nbytes):
                for part, size in parts(download, start, nbytes):
                    made.append((threading.get_ident(), part.nbytes))
                    yield part, size

            return note

        with points.replaced(points.CUT_FOR_DEVICE, noting):
            fastckpt.save({"w": torch.ones(12 << 20, device=DEVICE)}, self.path / "c", dtype="float64")
        assert sum(size for _, size in made) == 96 << 20
        assert max(size for _, size in made) <= limits.of("gathered on a device")
