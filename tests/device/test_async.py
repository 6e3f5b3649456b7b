"""Asynchronous saves of tensors on a device: streams wait for copies where the host does not."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import torch

import fastckpt
from harness import devices, standin
from harness.devices import DEVICE, OTHER, OnDevice, each, fill_later, in_thread, raises
from harness.standin import faults

COUNT = 300_000


def trained(device=DEVICE, values=(1.0, 2.0, 3.0)):
    """Return parameters with these values, and an optimizer whose every step subtracts 1 from them."""
    parameters = [torch.nn.Parameter(torch.full((COUNT,), value, device=device)) for value in values]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters, torch.optim.SGD(parameters, lr=1.0)


def state_of(parameters):
    return {str(index): parameter.detach() for index, parameter in enumerate(parameters)}


@contextmanager
def _held():
    """Hold copies from the device until the yielded function is called."""
    if devices.IS_STANDIN:
        with faults.held() as go:
            yield go
    else:
        devices.busy(1.0)
        yield lambda: None


class TestAsync(OnDevice):
    def setUp(self):
        super().setUp()
        self.target = self.path / "c"

    def saved(self, path=None):
        """Return the value that each saved tensor has everywhere, or None for a tensor with several values."""
        loaded = fastckpt.load(path or self.target)
        return [float(value.flatten()[0]) if len(value.unique()) == 1 else None for value in loaded.values()]

    @each("keeps_streams_busy", [False, True])
    def test_a_step_may_follow_at_once(self, keeps_streams_busy):
        parameters, optimizer = trained()
        # The memory of the first save is not pinned when the save begins; the memory of later saves is.
        for turn in range(4):
            if keeps_streams_busy:
                devices.busy()
            pending = fastckpt.save_async(state_of(parameters), self.target, io=fastckpt.IO(lazy=True))
            optimizer.step()
            optimizer.step()
            pending.result(60)
            assert self.saved() == [1 - 2 * turn, 2 - 2 * turn, 3 - 2 * turn]

    def test_a_loop_that_saves_as_it_goes(self):
        parameters, optimizer = trained()
        for step in range(30):
            if step % 5 == 0:
                fastckpt.save_async(
                    state_of(parameters), self.path / str(step), io=fastckpt.IO(lazy=True, max_in_flight=2)
                )
            optimizer.step()
        fastckpt.background.drain(60)
        for step in range(0, 30, 5):
            assert self.saved(self.path / str(step)) == [1 - step, 2 - step, 3 - step]

    @each("lazy", [False, True])
    def test_on_a_stream_that_is_not_the_default_one(self, lazy):
        parameters, optimizer = trained()
        fastckpt.save_async(state_of(parameters), self.path / "first").result(60)
        devices.synchronize()
        for turn in range(3):
            with devices.side_stream():
                fill_later(parameters[0].detach(), 10.0 + turn)
                pending = fastckpt.save_async(state_of(parameters), self.target, io=fastckpt.IO(lazy=lazy))
                optimizer.step()
                pending.result(60)
            devices.synchronize()
            assert self.saved() == [10 + turn, 2 - turn, 3 - turn]

    @each("lazy", [False, True])
    def test_from_a_thread_of_its_own(self, lazy):
        parameters, optimizer = trained()

        def body():
            fill_later(parameters[0].detach(), 10.0)
            pending = fastckpt.save_async(state_of(parameters), self.target, io=fastckpt.IO(lazy=lazy))
            optimizer.step()
            return pending

        in_thread(body).result(60)
        assert self.saved() == [10, 2, 3]

    @each("lazy", [False, True])
    def test_several_devices(self, lazy):
        devices.two_devices()
        here, step_here = trained(DEVICE)
        other, step_other = trained(OTHER, values=(7.0, 8.0))
        for turn in range(3):
            fill_later(here[0].detach(), 20.0)
            fill_later(other[0].detach(), 21.0)
            pending = fastckpt.save_async(state_of([*here, *other]), self.target, io=fastckpt.IO(lazy=lazy))
            step_here.step()
            step_other.step()
            pending.result(60)
            assert self.saved() == [20, 2 - turn, 3 - turn, 21, 8 - turn]

    def test_what_is_small_or_guarded_may_change_at_once(self):
        module = torch.nn.Module()
        module.register_buffer("queue", torch.ones(COUNT, device=DEVICE))
        module.register_buffer("small", torch.ones(100, device=DEVICE))
        with fastckpt.background.guard(module):
            for _ in range(2):
                fill_later(module.queue, 5.0)
                fill_later(module.small, 6.0)
                pending = fastckpt.save_async(module.state_dict(), self.target, io=fastckpt.IO(lazy=True))
                module.queue.fill_(-1)
                module.small.fill_(-1)
                pending.result(60)
                assert self.saved() == [5, 6]

    def test_tensors_of_the_host_and_of_the_device_in_one_state(self):
        parameters, optimizer = trained()
        on_host = [torch.nn.Parameter(torch.full((COUNT,), 9.0))]
        on_host[0].grad = torch.ones(COUNT)
        optimizer.add_param_group({"params": on_host})
        for turn in range(3):
            devices.busy()
            pending = fastckpt.save_async(state_of([*parameters, *on_host]), self.target, io=fastckpt.IO(lazy=True))
            optimizer.step()
            pending.result(60)
            assert self.saved() == [1 - turn, 2 - turn, 3 - turn, 9 - turn]

    def test_what_is_not_a_step_waits_for_the_copy(self):
        parameters, _ = trained()
        for turn in range(2):
            fill_later(parameters[0].detach(), 4.0 + turn)
            pending = fastckpt.save_async(state_of(parameters), self.target, io=fastckpt.IO(lazy=True))
            pending.wait_staged(60)
            for parameter in parameters:
                parameter.detach().fill_(-1)
            pending.result(60)
            assert self.saved()[0] == 4 + turn

    def test_a_change_before_the_copy_fails_the_save(self):
        parameters, optimizer = trained()
        fastckpt.save({"old": 1}, self.target)
        for is_stepped in (False, True):
            with _held():
                pending = fastckpt.save_async(state_of(parameters), self.target, io=fastckpt.IO(lazy=True))
                parameters[1].detach().add_(1)
                if is_stepped:
                    optimizer.step()
            error = pending.exception(60)
            assert isinstance(error, RuntimeError), error
            assert "changed in place" in str(error)
            assert ": 1." in str(error)
            assert fastckpt.load(self.target) == {"old": 1}

    def test_memory_that_is_freed_while_it_is_copied(self):
        """Sharded modules free memory in this way: the tensors stay, and their memory is reused."""
        for turn in range(3):
            state = state_of(trained()[0])
            devices.busy()
            pending = fastckpt.save_async(state, self.target, io=fastckpt.IO(lazy=True))
            if turn == 0:
                # The memory of the first save is not pinned when it begins, so its copies may not be requested yet.
                pending.wait_staged(60)
            for value in state.values():
                devices.free(value)
            del value
            state.clear()
            pending.result(60)
            assert self.saved() == [1, 2, 3]

    def test_tensors_that_nobody_else_keeps(self):
        for lazy in (False, True, True):
            devices.busy()
            pending = fastckpt.save_async(state_of(trained()[0]), self.target, io=fastckpt.IO(lazy=lazy))
            for _ in range(5):
                torch.full((COUNT,), -1.0, device=DEVICE)
            pending.result(60)
            assert self.saved() == [1, 2, 3]

    def test_a_save_that_is_cancelled_while_devices_copy(self):
        parameters, _ = trained()
        fastckpt.save({"old": 1}, self.target)
        for lazy in (True, True):
            with _held() as go:
                timer = threading.Timer(0.2, go)
                timer.start()
                pending = fastckpt.save_async(state_of(parameters), self.target, io=fastckpt.IO(lazy=lazy))
                assert pending.cancel()
                # Memory that copies still write to must not be freed.
                fastckpt.background.release_buffers()
            timer.join()
            assert fastckpt.load(self.target) == {"old": 1}


class TestAsyncOnTheStandin(OnDevice):
    """Copies wait until the test releases them, and the waits until then are counted."""

    on = "standin"

    def setUp(self):
        super().setUp()
        self.target = self.path / "c"
        self.parameters, self.optimizer = trained()
        # The memory of this save is kept, and pinned.
        fastckpt.save_async(state_of(self.parameters), self.path / "first").result(60)

    def test_the_host_never_waits_and_the_stream_does(self):
        me = threading.get_ident()
        with faults.held() as go:
            hosts, streams = faults.host_waits[me], faults.stream_waits[me]
            began = time.perf_counter()
            pending = fastckpt.save_async(state_of(self.parameters), self.target, io=fastckpt.IO(lazy=True))
            asked = faults.stream_waits[me]
            self.optimizer.step()
            held = time.perf_counter() - began
            assert faults.host_waits[me] == hosts
            assert asked > streams, "the copies wait for the caller's stream"
            assert faults.stream_waits[me] > asked, "the caller's stream waits for the copies"
            assert not pending.done()
            # The step is requested, but not done.
            assert [float(devices.there(parameter).min()) for parameter in self.parameters] == [1, 2, 3]
            go()
            report = pending.result(60)
        assert report.stall <= held
        devices.synchronize()
        assert [float(devices.there(parameter).max()) for parameter in self.parameters] == [0, 1, 2]
        loaded = fastckpt.load(self.target)
        assert [float(value.max()) for value in loaded.values()] == [1, 2, 3]
        assert [float(value.min()) for value in loaded.values()] == [1, 2, 3]

    def test_later_steps_ask_for_nothing(self):
        me = threading.get_ident()
        with faults.held() as go:
            pending = fastckpt.save_async(state_of(self.parameters), self.target, io=fastckpt.IO(lazy=True))
            self.optimizer.step()
            go()
            pending.result(60)
        hosts, streams = faults.host_waits[me], faults.stream_waits[me]
        for _ in range(3):
            self.optimizer.step()
        assert (faults.host_waits[me], faults.stream_waits[me]) == (hosts, streams)

    def test_a_step_waits_for_what_is_not_asked_for_yet(self):
        """Memory is still being pinned, so the background thread has not requested the copies yet."""
        fastckpt.background.release_buffers()
        pinning, go_on = threading.Event(), threading.Event()

        def before(_address):
            pinning.set()
            assert go_on.wait(60)

        standin.cudart.before = before
        pending = fastckpt.save_async(state_of(self.parameters), self.target, io=fastckpt.IO(lazy=True))
        assert pinning.wait(60)
        timer = threading.Timer(0.3, go_on.set)
        timer.start()
        self.optimizer.step()
        assert go_on.is_set(), "the step went before the copies were asked for"
        pending.result(60)
        timer.join()
        loaded = fastckpt.load(self.target)
        assert [float(value.max()) for value in loaded.values()] == [1, 2, 3]

    def test_a_guarded_or_small_tensor_holds_the_stream_at_the_call(self):
        me = threading.get_ident()
        small = torch.ones(100, device=DEVICE)
        devices.synchronize()
        with faults.held() as go:
            hosts = faults.host_waits[me]
            pending = fastckpt.save_async(
                {"small": small, **state_of(self.parameters)}, self.target, io=fastckpt.IO(lazy=True)
            )
            small.fill_(2)
            assert faults.host_waits[me] == hosts
            assert (devices.there(small) == 1).all()
            go()
            pending.result(60)
        assert (fastckpt.load(self.target)["small"] == 1).all()
        devices.synchronize()
        assert (devices.there(small) == 2).all()

    def test_a_copy_that_fails_after_the_step_fails_the_save(self):
        fastckpt.save({"old": 1}, self.target)
        faults.fail_at = faults.copies + 2
        pending = fastckpt.save_async(state_of(self.parameters), self.target, io=fastckpt.IO(lazy=True))
        self.optimizer.step()
        with raises(RuntimeError, "standin: unspecified launch failure"):
            pending.result(60)
        assert fastckpt.load(self.target) == {"old": 1}
        devices.synchronize()
        faults.reset()
        fastckpt.save_async(state_of(self.parameters), self.target, io=fastckpt.IO(lazy=True)).result(60)
        assert [float(value.max()) for value in fastckpt.load(self.target).values()] == [0, 1, 2]

    def test_nothing_begins_while_a_graph_is_captured(self):
        fastckpt.save(state_of(self.parameters), self.path / "there")
        into = state_of(self.parameters)
        calls = {
            "save": lambda: fastckpt.save(into, self.target),
            "save_async": lambda: fastckpt.save_async(into, self.target),
            "save_async lazy": lambda: fastckpt.save_async(into, self.target, io=fastckpt.IO(lazy=True)),
            "load": lambda: fastckpt.load(self.path / "there", device=DEVICE),
            "load into": lambda: fastckpt.load(self.path / "there", into=into),
        }
        for name, call in calls.items():
            devices.synchronize()
            with standin.capturing(), raises(RuntimeError, "captured into a graph"):
                call()
            assert not self.target.exists(), name
            fastckpt.background.drain(60)
        # The capture of another stream does not disturb a save.
        with standin.capturing(standin.Stream(OTHER)):
            pass
        fastckpt.save(into, self.target)

    def test_a_step_that_is_captured_is_refused_while_copies_are_under_way(self):
        with faults.held() as go:
            pending = fastckpt.save_async(state_of(self.parameters), self.target, io=fastckpt.IO(lazy=True))
            with standin.capturing(), raises(RuntimeError, "captured into a graph"):
                self.optimizer.step()
            go()
            pending.result(60)
        assert [float(value.max()) for value in fastckpt.load(self.target).values()] == [1, 2, 3]
