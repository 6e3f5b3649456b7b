"""Host memory is registered with the device in the background, within limits, and unregistered before it is freed."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import torch

import fastckpt
from harness import devices, limits
from harness.devices import DEVICE, SAVES, OnDevice, each, raises, there
from harness.same import same
from harness.standin import cudart, faults

from .states import host_state

MIB = 1 << 20
COUNT = 300_000


def state_of(megabytes=8, device=DEVICE):
    return {str(index): torch.full((MIB // 4,), float(index), device=device) for index in range(megabytes)}


@contextmanager
def _small_pieces():
    """Register memory a MiB at a time inside the ``with`` statement."""
    with limits.lowered("pinned at a time", MIB), limits.lowered("staging memory pinned at a time", MIB):
        yield


def ordered(calls):
    """Return the calls of the runtime, without their threads."""
    return [call[1] for call in calls]


class TestPinning(OnDevice):
    """The saved bytes are right, whether memory is pinned or not."""

    @each("pin", [True, False, 3 * MIB, "2MB", 0])
    @each("lazy", [False, True])
    def test_any_limit(self, pin, lazy):
        state = state_of()
        for turn in range(3):
            state["0"].fill_(turn)
            pending = fastckpt.save_async(state, self.path / "c", io=fastckpt.IO(lazy=lazy, pin=pin))
            pending.wait_staged()
            state["0"].fill_(-1)
            pending.result(60)
            loaded = fastckpt.load(self.path / "c")
            assert [float(value.mean()) for value in loaded.values()] == [turn, 1, 2, 3, 4, 5, 6, 7]

    def test_arguments(self):
        for wrong in (-1, "much", float("nan"), [1]):
            with raises((TypeError, ValueError), "pin"):
                fastckpt.save_async(state_of(1), self.path / "c", io=fastckpt.IO(pin=wrong))
        assert not (self.path / "c").exists()


class TestPinningOnTheStandin(OnDevice):
    on = "standin"

    def pinned(self):
        return cudart.bytes

    @each("way", SAVES)
    def test_memory_is_registered_and_reused(self, way):
        state = state_of()
        reports = [SAVES[way](state, self.path / "c")]
        count = len(cudart.calls)
        assert set(ordered(cudart.calls)) == {"register"}
        assert self.pinned() >= 8 * MIB
        reports += [SAVES[way](state, self.path / "c") for _ in range(2)]
        assert len(cudart.calls) == count
        assert [report.warnings for report in reports] == [()] * 3
        fastckpt.background.release_buffers()
        assert self.pinned() == 0

    def test_a_load_registers_what_it_reads_into(self):
        state = state_of()
        devices.synchronize()
        fastckpt.save({name: there(value) for name, value in state.items()}, self.path / "c")
        assert cudart.calls == []
        assert same(
            {n: there(v) for n, v in fastckpt.load(self.path / "c", device=DEVICE).items()},
            {n: there(v) for n, v in state.items()},
        )
        assert self.pinned() > 0
        count = len(cudart.calls)
        fastckpt.load(self.path / "c", into=state)
        assert len(cudart.calls) == count
        fastckpt.background.release_buffers()
        assert self.pinned() == 0

    def test_tensors_of_the_host_need_none(self):
        fastckpt.save_async(host_state(), self.path / "c").result(60)
        fastckpt.load(self.path / "c")
        assert cudart.calls == []

    def test_what_is_too_small_is_unregistered_before_it_goes(self):
        fastckpt.save_async(state_of(2), self.path / "c").result(60)
        first = ordered(cudart.calls)
        fastckpt.save_async(state_of(20), self.path / "c").result(60)
        assert ordered(cudart.calls)[: len(first) + 1] == [*first, "unregister"]
        assert 20 * MIB <= self.pinned() < 22 * MIB + 4096

    def test_never_on_the_callers_thread_for_a_whole_state(self):
        """A lazy save returns while its memory is being registered."""
        pinning, go_on = threading.Event(), threading.Event()

        def before(_address):
            pinning.set()
            assert go_on.wait(60)

        cudart.before = before
        pending = fastckpt.save_async(state_of(), self.path / "c", io=fastckpt.IO(lazy=True))
        assert pinning.wait(60)
        assert not pending.done()
        go_on.set()
        pending.result(60)
        assert threading.get_ident() not in {thread for thread, *_ in cudart.calls}

    @each("pin", [False, 0])
    def test_no_pinning(self, pin):
        report = fastckpt.save_async(state_of(), self.path / "c", io=fastckpt.IO(pin=pin)).result(60)
        assert cudart.calls == []
        # The caller asked for no pinning, so no warning is due.
        assert report.warnings == ()

    @each("limit", [MIB, 5 * MIB + 123])
    @each("lazy", [False, True])
    def test_a_cap_is_kept(self, limit, lazy):
        report = fastckpt.save_async(state_of(), self.path / "c", io=fastckpt.IO(pin=limit, lazy=lazy)).result(60)
        assert self.pinned() <= limit
        assert max((nbytes for _, _, _, nbytes in cudart.calls), default=0) <= limit
        assert len(report.warnings) <= 1
        report = fastckpt.save_async(state_of(), self.path / "c", io=fastckpt.IO(pin=True, lazy=lazy)).result(60)
        assert self.pinned() >= 8 * MIB, "a later save may pin more"
        assert report.warnings == ()

    @each("way", SAVES)
    @each("status", [2, 712])
    def test_a_refusal_is_told_and_leaves_no_error_behind(self, way, status):
        state = state_of()
        cudart.status = status
        report = SAVES[way](state, self.path / "c")
        # A kernel of the training thread raises no error except its own.
        torch.zeros(3, device=DEVICE)
        cudart.check()
        assert self.pinned() == 0
        assert len(report.warnings) == 1, report.warnings
        assert str(status) in report.warnings[0]
        assert [float(value.mean()) for value in fastckpt.load(self.path / "c").values()] == list(range(8))
        assert threading.get_ident() not in {thread for thread, *_ in cudart.calls}

    @each("way", SAVES)
    def test_what_can_be_registered_in_part(self, way):
        """Copies go to the registered and the other part, but never across the edge."""
        cudart.limit = 5 * MIB
        state = {"all": torch.arange(8 * MIB // 4, device=DEVICE, dtype=torch.int32)}
        with _small_pieces():
            SAVES[way](state, self.path / "c")
            assert 0 < self.pinned() <= 5 * MIB
            assert torch.equal(fastckpt.load(self.path / "c")["all"], there(state["all"]))
            loaded = fastckpt.load(self.path / "c", device=DEVICE)
            assert torch.equal(there(loaded["all"]), there(state["all"]))

    @each("way", SAVES)
    def test_copies_are_cut_where_pieces_meet(self, way):
        state = {"odd": torch.arange(9 * MIB + 777, device=DEVICE).to(torch.uint8), **state_of(3)}
        with _small_pieces():
            for _ in range(2):
                SAVES[way](state, self.path / "c")
                loaded = fastckpt.load(self.path / "c", device=DEVICE)
                assert same({n: there(v) for n, v in loaded.items()}, {n: there(v) for n, v in state.items()})
        registered = [nbytes for _, what, _, nbytes in cudart.calls if what == "register"]
        assert len(registered) > 5, "pieces were small"

    def test_what_cannot_be_unregistered_is_logged(self):
        fastckpt.save_async(state_of(), self.path / "c").result(60)
        cudart.status = 713
        with self.assertLogs("fastckpt", "WARNING") as logs:
            fastckpt.background.release_buffers()
        assert any("713" in message for message in logs.output), logs.output
        cudart.status = 0
        cudart.check()
        cudart.registered.clear()

    @each("failure", ["cudart", "thread"])
    def test_where_pinning_cannot_even_be_tried(self, failure):
        state = state_of()
        kind = type(devices.module())
        usual = kind.cudart, threading.Thread.start

        def refuse(*_):
            raise RuntimeError("no runtime here")

        def start(thread):
            if thread.name.startswith("fastckpt-pin"):
                raise RuntimeError("can't start new thread")
            usual[1](thread)

        if failure == "cudart":
            kind.cudart = refuse
        else:
            threading.Thread.start = start
        try:
            report = fastckpt.save_async(state, self.path / "c").result(60)
        finally:
            kind.cudart, threading.Thread.start = usual
        assert len(report.warnings) == 1, report.warnings
        assert [float(value.mean()) for value in fastckpt.load(self.path / "c").values()] == list(range(8))

    def test_memory_in_use_is_not_given_back(self):
        """``release_buffers`` is called during a save."""
        state = state_of()
        fastckpt.save_async(state, self.path / "c").result(60)
        with faults.held() as go:
            pending = fastckpt.save_async(state, self.path / "c", io=fastckpt.IO(lazy=True))
            fastckpt.background.release_buffers()
            assert self.pinned() >= 8 * MIB
            go()
            pending.result(60)
        assert self.pinned() == 0
        assert [float(value.mean()) for value in fastckpt.load(self.path / "c").values()] == list(range(8))

    def test_two_devices_share_what_is_registered(self):
        state = {"a": torch.ones(COUNT, device=DEVICE), "b": torch.ones(COUNT, device=devices.OTHER)}
        fastckpt.save_async(state, self.path / "c").result(60)
        count = len(cudart.calls)
        fastckpt.save_async({"b": state["b"]}, self.path / "c").result(60)
        fastckpt.save_async({"a": state["a"]}, self.path / "c").result(60)
        assert len(cudart.calls) == count
