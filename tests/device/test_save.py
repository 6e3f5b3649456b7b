"""Saves of tensors on a device."""

from __future__ import annotations

import threading

import numpy as np
import torch

import fastckpt
from harness import devices, manifest
from harness.devices import DEVICE, SAVES, OnDevice, each, fill_later, in_thread, on_device, to_host
from harness.same import same
from harness.standin import faults

from .states import host_state

MIB = 1 << 20


class TestSave(OnDevice):
    @each("way", SAVES)
    def test_what_is_on_a_device_is_saved(self, way):
        state = host_state()
        moved = on_device(state)
        moved["strided"], state["strided"] = moved["large"].t(), state["large"].t().contiguous()
        moved["some"], state["some"] = moved["double"][1:, ::2, 5:-5], state["double"][1:, ::2, 5:-5].contiguous()
        moved["conj"], state["conj"] = moved["wide"].conj(), state["wide"].conj().resolve_conj()
        moved["neg"], state["neg"] = torch._neg_view(moved["double"]), -state["double"]
        moved["host"] = state["host"] = np.arange(50_000)
        moved["tied"], state["tied"] = moved["large"], state["large"]
        report = SAVES[way](moved, self.path / "c")
        loaded = fastckpt.load(self.path / "c")
        assert same(loaded, state)
        assert loaded["tied"].data_ptr() == loaded["large"].data_ptr()
        assert fastckpt.verify(self.path / "c").ok
        assert report.bytes == sum(v.nbytes for k, v in state.items() if k != "tied")

    @each("way", SAVES)
    def test_more_than_fits_into_any_buffer(self, way):
        """Each tensor needs several copies, whatever its strides."""
        state = {
            "odd": torch.randint(0, 255, (37 * MIB + 5,), dtype=torch.uint8),
            "rows": torch.randn(2300, 2900),
            "columns": torch.randn(2900, 2300),
            "after": torch.arange(5),
        }
        moved = {name: value.to(DEVICE) for name, value in state.items()}
        moved["columns"] = moved["columns"].t()
        state["columns"] = state["columns"].t().contiguous()
        SAVES[way](moved, self.path / "c")
        assert same(fastckpt.load(self.path / "c"), state)

    @each("way", SAVES)
    def test_a_save_sees_what_the_stream_was_asked_for_before(self, way):
        """The caller's stream is still computing when the save is called."""
        state = {str(index): torch.empty(50_000, device=DEVICE) for index in range(4)}
        for index, value in enumerate(state.values()):
            fill_later(value, index + 1)
        SAVES[way](state, self.path / "c")
        loaded = fastckpt.load(self.path / "c")
        assert [float(loaded[str(index)].mean()) for index in range(4)] == [1, 2, 3, 4]

    @each("is_slow", [False, True])
    def test_the_state_may_change_when_save_async_returns(self, is_slow):
        state = {str(index): torch.full((500_000,), float(index)).to(DEVICE) for index in range(4)}
        for turn in range(5):
            if is_slow:
                devices.busy()
            pending = fastckpt.save_async(state, self.path / "c")
            with devices.on_time():
                for value in state.values():
                    value.fill_(-1.0)
                devices.synchronize()
            pending.result(60)
            loaded = fastckpt.load(self.path / "c")
            assert all((loaded[str(index)] == index).all() for index in range(4)), turn
            for index, value in enumerate(state.values()):
                value.fill_(float(index))

    @each("way", SAVES)
    def test_expanded_tensors_and_where_they_were(self, way):
        base = torch.randn(70_000, 1)
        on = base.to(DEVICE)
        state = {"base": on, "wide": on.expand(70_000, 4), "grad": torch.nn.Parameter(on[:3].t().expand(5, 3))}
        SAVES[way](state, self.path / "c")
        name = str(DEVICE)
        assert manifest.body_of(self.path / "c")["structure"] == [
            *(["dict", 3], "base", ["tensor", 0, "", name]),
            *("wide", ["expanded", [70_000, 4], ""], ["tensor", 0, "", name]),
            *("grad", ["expanded", [5, 3], "pg"], ["tensor", 1, "", name]),
        ]
        loaded = fastckpt.load(self.path / "c")
        assert torch.equal(loaded["wide"], base.expand(70_000, 4))
        assert loaded["wide"].data_ptr() == loaded["base"].data_ptr()
        again = fastckpt.load(self.path / "c", device=DEVICE)
        assert again["wide"].device == again["grad"].device == DEVICE
        assert again["wide"].stride() == (1, 0)
        assert type(again["grad"]) is torch.nn.Parameter
        assert torch.equal(devices.there(again["grad"]), base[:3].t().expand(5, 3))
        into = {"wide": torch.zeros(70_000, 1).to(DEVICE).expand(70_000, 4)}
        fastckpt.load(self.path / "c", into=into, keys="wide")
        assert torch.equal(devices.there(into["wide"]), base.expand(70_000, 4))

    def test_loads_and_saves_in_many_threads_share_the_streams(self):
        state = host_state()
        fastckpt.save(state, self.path / "c")
        expected = to_host(state)
        problems = []

        def body(number):
            for turn in range(3):
                loaded = fastckpt.load(self.path / "c", device=DEVICE)
                fastckpt.save(loaded, self.path / f"{number}")
                if not same(to_host(fastckpt.load(self.path / f"{number}")), expected):
                    problems.append((number, turn))

        threads = [threading.Thread(target=body, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []

    @each("way", SAVES)
    def test_a_save_from_another_thread(self, way):
        moved = on_device(host_state())
        faults.reset()
        in_thread(lambda: SAVES[way](moved, self.path / "c"))
        loaded = in_thread(lambda: fastckpt.load(self.path / "c", device=DEVICE))
        assert same(to_host(loaded), to_host(moved))


class TestSaveOnTheStandin(OnDevice):
    """Faults, and counts that only the stand-in keeps."""

    on = "standin"

    @each("way", SAVES)
    def test_threads_select_the_device_first(self, way):
        moved = on_device(host_state())
        faults.reset()
        in_thread(lambda: SAVES[way](moved, self.path / "c"))
        in_thread(lambda: fastckpt.load(self.path / "c", device=DEVICE))
        assert faults.copies
        assert faults.astray == 0

    def test_a_save_needs_little_memory_of_the_device(self):
        """Tensors are copied piece by piece: no copy is larger than 16 MiB, whatever the size of the tensor."""
        with devices.on_time():
            state = {"w": torch.zeros(6 * MIB).to(DEVICE), "t": torch.zeros(2000, 3000).to(DEVICE).t()}
            faults.largest = 0
            fastckpt.save(state, self.path / "c")
            assert 0 < faults.largest <= 16 * MIB

    @each("way", SAVES)
    @each("fault", ["fail_at", "refuse_at"])
    def test_an_error_in_the_middle_reaches_the_caller_and_leaves_nothing(self, way, fault):
        state = on_device(host_state())
        fastckpt.save({"old": 1}, self.path / "c")
        count = faults.copies
        SAVES[way](state, self.path / "whole")
        count = faults.copies - count
        for number in (1, count // 2, count):
            setattr(faults, fault, faults.copies + number)
            with devices.raises(RuntimeError, "standin: "):
                SAVES[way](state, self.path / "c")
            assert fastckpt.load(self.path / "c") == {"old": 1}
            assert sorted(entry.name for entry in self.path.iterdir()) == ["c", "whole"]
            faults.reset(late=self.late)
        # Buffers and streams that failed are not used again.
        expected = to_host(state)
        SAVES[way](state, self.path / "c")
        assert same(to_host(fastckpt.load(self.path / "c")), expected)

    def test_a_device_without_streams_is_waited_for(self):
        kind = type(devices.module())
        kept = {name: vars(kind)[name] for name in ("Stream", "Event", "current_stream")}
        for name in kept:
            delattr(kind, name)
        try:
            state = host_state()
            for way, save in SAVES.items():
                save(on_device(state), self.path / way)
                assert same(fastckpt.load(self.path / way), state)
            assert same(to_host(fastckpt.load(self.path / "save", device=DEVICE)), to_host(state))
        finally:
            for name, value in kept.items():
                setattr(kind, name, value)

    @each("has_choice", [True, False])
    def test_whoever_waits_for_a_copy_sleeps_where_the_device_has_the_choice(self, has_choice):
        waited = []
        kind = type(devices.module())
        usual = kind.Event

        class Watched(usual):
            def __init__(self, **options):
                if options and not has_choice:
                    raise TypeError("an unexpected keyword argument")
                super().__init__(**options)

            def synchronize(self):
                waited.append(self.blocking)
                super().synchronize()

        state = {"w": torch.arange(1 << 20).to(DEVICE)}
        kind.Event = Watched
        try:
            fastckpt.save(state, self.path / "c")
            assert same(to_host(fastckpt.load(self.path / "c", device=DEVICE)), to_host(state))
        finally:
            kind.Event = usual
        assert set(waited) == {has_choice}
