"""Saves from devices in the background: comparison of versions, a broken device, signal handlers."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import fastckpt
from harness import needs, points, standin, stillness
from harness.internals import kept_memory
from harness.standin import faults

if not standin.AVAILABLE:
    needs.missing("a torch that can set up a device from Python")

DEVICE = torch.device("standin", 0)
COUNT = 100_000
pytestmark = pytest.mark.usefixtures("alone", "clean")


@pytest.fixture
def clean():
    fastckpt.background.release_buffers()
    faults.reset()
    yield
    misuse = faults.misuse
    faults.reset()
    standin.cudart.reset()
    fastckpt.background.drain(60)
    standin.forget_errors()
    fastckpt.background.release_buffers()
    assert misuse == []
    assert standin.cudart.bytes == 0


def state_of(value=1.0):
    return {"w": torch.full((COUNT,), value, device=DEVICE), "b": torch.full((10,), value, device=DEVICE)}


@pytest.mark.parametrize("lazy", [False, True])
def test_memory_that_a_broken_device_wrote_to_is_not_used_again(tmp_path, lazy):
    state = state_of()
    fastckpt.save_async(state, tmp_path / "c").result(60)
    assert len(kept_memory()) == 1
    faults.fail_at = faults.copies + 1
    with pytest.raises(RuntimeError, match="standin: unspecified launch failure"):
        fastckpt.save_async(state, tmp_path / "c", io=fastckpt.IO(lazy=lazy)).result(60)
    assert kept_memory() == []
    assert standin.cudart.bytes == 0
    assert (fastckpt.load(tmp_path / "c")["w"] == 1).all()
    standin.forget_errors()
    fastckpt.save_async(state_of(2.0), tmp_path / "c", io=fastckpt.IO(lazy=lazy)).result(60)
    assert (fastckpt.load(tmp_path / "c")["w"] == 2).all()
    assert len(kept_memory()) == 1


@pytest.mark.parametrize("lazy", [False, True])
def test_a_call_that_ends_as_copies_are_asked_for_waits_for_them(tmp_path, lazy):
    """A signal handler raises before the copies are recorded."""
    state = state_of()
    fastckpt.save_async(state, tmp_path / "c").result(60)
    timers = []

    def interrupted(enqueue):
        def enqueues(sources, ranges):
            enqueue(sources, ranges)
            raise KeyboardInterrupt

        return enqueues

    with points.replaced(points.ENQUEUE, interrupted), faults.held() as go:
        timers.append(threading.Timer(0.2, go))
        timers[0].start()
        with pytest.raises(KeyboardInterrupt):
            fastckpt.save_async(state, tmp_path / "c", io=fastckpt.IO(lazy=lazy))
        assert faults.flow.is_set(), "the memory was given back before the copies had ended"
    assert len(kept_memory()) == 1


def test_a_cancelled_save_gives_its_memory_back_when_the_copies_have_ended(tmp_path):
    state = state_of()
    fastckpt.save_async(state, tmp_path / "c").result(60)
    with faults.held() as go:
        pending = fastckpt.save_async(state, tmp_path / "c", io=fastckpt.IO(lazy=True))
        canceller = threading.Thread(target=pending.cancel)
        canceller.start()
        while not pending._cancelled:
            time.sleep(0.001)
        assert not pending.done()
        assert kept_memory() == []
        go()
        canceller.join(60)
    assert pending.cancelled()
    assert len(kept_memory()) == 1


def test_time_of_the_device_is_no_stall(tmp_path):
    parameter = torch.nn.Parameter(state_of()["w"])
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0, foreach=False)
    fastckpt.save_async({"w": parameter}, tmp_path / "c").result(60)
    with faults.held() as go, stillness.watched() as still:
        began = time.monotonic()
        pending = fastckpt.save_async({"w": parameter}, tmp_path / "c", io=fastckpt.IO(lazy=True))
        optimizer.step()
        time.sleep(0.5)
        go()
        report = pending.result(60)
    assert report.staging >= 0.5
    assert report.stall < 0.5 + still.since(began)
    assert report.staged == report.bytes


def test_a_step_in_another_stream_waits_for_what_was_copied_at_the_call(tmp_path):
    """Like all other tensors, small ones hold the stream that was current at the call, and the streams of steps."""
    parameter = torch.nn.Parameter(state_of()["b"])
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0, foreach=False)
    fastckpt.save_async({"b": parameter}, tmp_path / "c").result(60)
    side = standin.Stream(DEVICE)
    side.wait_stream(standin.default_stream(DEVICE))
    with faults.held() as go:
        with torch.get_device_module(DEVICE).stream(side):
            pending = fastckpt.save_async({"b": parameter}, tmp_path / "c", io=fastckpt.IO(lazy=True))
        optimizer.step()
        assert not standin.default_stream(DEVICE).worker.mark().wait(0.2), "the step went before the copy"
        go()
    pending.result(60)
    assert (fastckpt.load(tmp_path / "c")["b"] == 1).all()


def test_late_tensors_of_the_host_hold_a_step_and_those_of_devices_do_not(tmp_path, held_background):
    release, begun = held_background
    fastckpt.save_async({**state_of(), "h": torch.ones(COUNT)}, tmp_path / "c").result(60)
    both = [torch.nn.Parameter(torch.ones(COUNT)), torch.nn.Parameter(state_of()["w"])]
    for parameter in both:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(both, lr=1.0, foreach=False)
    for state in ({"w": both[1]}, dict(zip("hw", both, strict=True))):
        release.clear()
        begun.clear()
        pending = fastckpt.save_async(state, tmp_path / "c", io=fastckpt.IO(lazy=True))
        assert begun.wait(60)
        assert pending._may_step.is_open() == ("h" not in state)
        timer = threading.Timer(0.2, release.set)
        timer.start()
        began = [float(value.detach().flatten()[0]) for value in (standin.on_host(each) for each in both)]
        optimizer.step()
        assert release.is_set() or "h" not in state
        pending.result(60)
        standin.default_stream(DEVICE).synchronize()
        loaded = fastckpt.load(tmp_path / "c")
        assert (loaded["w"] == began[1]).all()
        assert "h" not in loaded or (loaded["h"] == began[0]).all()
        timer.join()


@pytest.mark.parametrize("pin", [True, "8GB"])
def test_a_call_waits_for_no_pinning(tmp_path, pin):
    """A call waits neither for new memory nor for memory that must be pinned again because ``pin=`` differs."""
    if pin != True:  # noqa: E712 - a string, too
        fastckpt.save_async(state_of(), tmp_path / "c").result(60)
    go_on = threading.Event()
    standin.cudart.before = lambda _: go_on.wait(60)
    timer = threading.Timer(20, go_on.set)
    timer.start()
    pending = fastckpt.save_async(state_of(2.0), tmp_path / "c", io=fastckpt.IO(lazy=True, pin=pin))
    assert not go_on.is_set()
    timer.cancel()
    go_on.set()
    pending.result(60)
    loaded = fastckpt.load(tmp_path / "c")
    assert all(bool((value == 2).all()) for value in loaded.values())


@pytest.mark.parametrize("pin", [-1, 1.5, None, "much", "0", "-1GB", [1], b"8GB"])
def test_wrong_pins_are_refused(pin):
    with pytest.raises(ValueError, match=r"IO: pin must be True, False, or the most bytes to pin .* not "):
        fastckpt.IO(pin=pin)
