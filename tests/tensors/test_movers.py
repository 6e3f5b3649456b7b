"""Movers of ranges of many tensors: their requests to devices, and what a failure leaves."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastckpt._tensors import device as _device
from fastckpt._tensors import pinned as _pinned
from fastckpt._tensors import torch as _torch
from fastckpt._tensors.cast import Cast
from fastckpt._tensors.movers import Sinks, Sources
from harness import needs, standin

if not standin.AVAILABLE:
    needs.missing("a torch that can set up a device from Python")

DEVICE, OTHER = torch.device("standin", 0), torch.device("standin", 1)
faults = standin.faults


@pytest.fixture(autouse=True)
def clean():
    _device.release()
    faults.reset(late=0.001)
    standin.cudart.reset()
    yield
    misuse = list(faults.misuse)
    faults.reset()
    standin.forget_errors()
    standin.cudart.reset()
    _device.release()
    assert misuse == []
    assert standin.cudart.registered == {}


def host(nbytes):
    """Memory with guard bytes that a write beyond its end would change."""
    return np.full(nbytes + 8, 0xEE, np.uint8)


def packed(tensors, out, gap=0):
    """Ranges that place tensors one after another in ``out``."""
    ranges, at = [], 0
    for index, tensor in enumerate(tensors):
        ranges.append((index, 0, out.ctypes.data + at, tensor.nbytes))
        at += tensor.nbytes + gap
    return ranges


def sources(tensors, operation="save"):
    return Sources(operation, {index: _torch.mover_out(tensor) for index, tensor in enumerate(tensors)})


def sinks(tensors, operation="load"):
    return Sinks(operation, {index: _torch.mover_in(tensor) for index, tensor in enumerate(tensors)})


def counted():
    return faults.transfers, faults.events, sum(faults.host_waits.values())


def test_thousands_of_small_tensors_are_one_copy_with_one_event():
    value = torch.arange(60_000, dtype=torch.int64)
    parts = value.to(DEVICE).split(10)
    out = host(value.nbytes)
    faults.reset()
    asked = sources(parts)
    assert faults.events == 1, "one event for the caller's stream, for any number of tensors"
    asked.fill(packed(parts, out))
    assert counted() == (1, 2, 1)
    assert out[:-8].tobytes() == value.numpy().tobytes()
    assert set(out[-8:]) == {0xEE}
    target = torch.zeros(60_000, dtype=torch.int64, device=DEVICE)
    faults.reset()
    sinks(target.split(10)).drain(packed(parts, out))
    assert counted() == (1, 2, 1)
    assert faults.kernels <= 3, "a copy, and one kernel that scatters it"
    assert torch.equal(standin.on_host(target), value)


def test_what_is_gathered_needs_little_memory(monkeypatch):
    monkeypatch.setattr(_device, "GATHERED", 1000)
    value = torch.arange(3000, dtype=torch.int32)
    parts = value.to(DEVICE).split(30)
    out = host(value.nbytes)
    faults.reset()
    sources(parts).fill(packed(parts, out))
    assert (faults.transfers, faults.largest) == (13, 960), "8 parts of 120 bytes at a time"
    assert out[:-8].tobytes() == value.numpy().tobytes()


def test_large_tensors_are_copied_from_where_they_are(monkeypatch):
    monkeypatch.setattr(_device, "SMALL", 1000)
    tensors = [torch.full((size,), size % 100, dtype=torch.uint8).to(DEVICE) for size in (999, 1000, 5000, 3, 4)]
    out = host(7006)
    faults.reset()
    sources(tensors).fill(packed(tensors, out))
    assert (faults.transfers, faults.largest) == (4, 5000)
    assert faults.kernels == 5, "only the last two are gathered"
    assert out[:-8].tobytes() == b"".join(standin.on_host(tensor).numpy().tobytes() for tensor in tensors)


def test_ranges_with_gaps_leave_the_gaps_alone():
    tensors = [torch.full((5,), index, dtype=torch.uint8).to(DEVICE) for index in range(4)]
    out = host(28)
    sources(tensors).fill(packed(tensors, out, gap=2))
    assert out.tolist() == [*(value for index in range(4) for value in [index] * 5 + [0xEE] * 2), *[0xEE] * 8]


@pytest.mark.parametrize("fault", ["NotImplementedError", "OutOfMemoryError"])
def test_where_nothing_can_be_gathered_tensors_are_copied_one_by_one(fault, monkeypatch):
    value = torch.arange(50)
    parts = value.to(DEVICE).split(10)
    error = NotImplementedError if fault == "NotImplementedError" else torch.OutOfMemoryError

    def refuse(*_, **__):
        raise error("standin: no")

    out = host(value.nbytes)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", refuse)
        faults.reset()
        sources(parts).fill(packed(parts, out))
    assert faults.transfers == 5
    assert out[:-8].tobytes() == value.numpy().tobytes()
    if error is torch.OutOfMemoryError:
        target = torch.zeros(50, dtype=torch.int64, device=DEVICE)
        down = sinks(target.split(10))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", refuse)
            down.drain(packed(parts, out))
        assert torch.equal(standin.on_host(target), value)


@pytest.mark.parametrize("view", ["plain", "conj", "neg", "both"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float32, torch.bfloat16])
def test_views_and_cut_elements_to_the_byte(view, strided, dtype):
    if not dtype.is_complex and view in ("conj", "both"):
        view = "neg"
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(12, 7, dtype=dtype, generator=generator)

    def viewed(tensor):
        tensor = tensor.t() if strided else tensor
        tensor = tensor.conj() if view in ("conj", "both") else tensor
        return torch._neg_view(tensor) if view in ("neg", "both") else tensor

    expected = viewed(value).resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes()
    moved = viewed(value.to(DEVICE))
    out = host(value.nbytes)
    cuts = [0, 1, 3, 4, 21, 22, 100, value.nbytes - 1, value.nbytes]
    ranges = [(0, start, out.ctypes.data + start, end - start) for start, end in itertools.pairwise(cuts)]
    sources([moved]).fill(ranges)
    assert out[:-8].tobytes() == expected
    before = out.tobytes()
    target = torch.zeros(12, 7, dtype=dtype).to(DEVICE)
    asked = sinks([viewed(target)])
    for one in reversed(ranges):
        asked.drain([one])
    assert standin.on_host(target).view(torch.uint8).numpy().tobytes() == value.view(torch.uint8).numpy().tobytes()
    assert out.tobytes() == before, "the load does not change the caller's bytes"


def test_strided_tensors_are_gathered_and_spread_like_others():
    bases = [torch.randint(0, 1 << 30, (6, 8), dtype=torch.int32) for _ in range(4)]
    on = [base.to(DEVICE) for base in bases]

    def viewed(tensors):
        # The first tensor's size leaves no element of the others aligned.
        return [tensors[3].view(torch.uint8)[1:, ::3], tensors[0].t(), tensors[1][::2, 1:], tensors[2][:, 3]]

    views, expected = viewed(on), viewed(bases)
    out = host(sum(view.nbytes for view in views))
    faults.reset()
    sources(views).fill(packed(views, out))
    assert faults.transfers == 1
    assert out[:-8].tobytes() == b"".join(view.contiguous().numpy().tobytes() for view in expected)
    targets = [torch.zeros_like(tensor) for tensor in on]
    into = viewed(targets)
    faults.reset()
    sinks(into).drain(packed(into, out))
    assert faults.transfers == 1
    for found, wanted in zip(into, expected, strict=True):
        assert torch.equal(standin.on_host(found), wanted)


def test_several_devices_and_the_callers_own_streams():
    """A copy waits for the calling thread's current stream of each device, and for no other thread's streams."""
    module = torch.get_device_module(DEVICE)
    tensors = [torch.zeros(1000, device=device) for device in (DEVICE, OTHER, DEVICE)]
    for device in (DEVICE, OTHER):
        module.synchronize(device)  # zeros and values are written in different streams
    out, go_on = host(12_000), threading.Event()
    with module.stream(module.Stream(DEVICE)), module.stream(module.Stream(OTHER)):
        for number, tensor in enumerate(tensors):
            standin.current_stream(tensor.device).worker.submit(go_on.wait)
            with module.device(tensor.device):
                tensor.fill_(number + 1)
        asked = sources(tensors)
        assert set(asked.devices) == {DEVICE, OTHER}
    worker = threading.Thread(target=asked.fill, args=(packed(tensors, out),))
    worker.start()
    while not faults.host_waits[worker.ident] and worker.is_alive():
        time.sleep(0.001)
    go_on.set()
    worker.join()
    assert out[:-8].view(np.float32).tolist() == [1.0] * 1000 + [2.0] * 1000 + [3.0] * 1000
    assert faults.astray == 0


@pytest.mark.parametrize("device", [DEVICE, OTHER])
def test_a_capture_is_refused_before_anything_is_asked_for(device):
    tensors = [torch.zeros(10, device=DEVICE), torch.zeros(10, device=OTHER)]
    out = host(80)
    copies = sources(tensors, "save_async").enqueue(packed(tensors, out))
    faults.reset()
    told = f"the current stream of {device} is being captured into a graph"
    with standin.capturing(standin.current_stream(device)):
        for make, operation in ((sources, "save"), (sinks, "load")):
            with pytest.raises(RuntimeError, match=f"{operation}: {told}"):
                make(tensors, operation)
        with pytest.raises(RuntimeError, match=f"save_async: {told}"):
            copies.hold_streams()
    assert (faults.records, sum(faults.stream_waits.values())) == (0, 0)
    copies.wait()
    with standin.capturing(standin.current_stream(device)):
        copies.hold_streams()  # nothing is left to wait for


def test_streams_wait_and_the_host_does_not():
    value = torch.arange(1000, device=DEVICE)
    out = host(value.nbytes)
    with faults.held() as go_on:
        copies = sources([value]).enqueue(packed([value], out))
        copies.hold_streams()
        value.fill_(-1)
        assert not copies.is_done()
        assert sum(faults.host_waits.values()) == 0
        go_on()
        copies.wait()
    assert copies.is_done()
    assert out[:-8].view(np.int64).tolist() == list(range(1000))
    standin.default_stream(DEVICE).synchronize()
    assert (standin.on_host(value) == -1).all()


def test_a_signal_handler_may_wait_for_the_same_copies(monkeypatch):
    value = torch.arange(1000, device=DEVICE)
    out = host(value.nbytes)
    copies = sources([value]).enqueue(packed([value], out))
    real, inner = _device.Transfer.wait, [copies.wait]

    def wait(transfer):
        if inner:
            inner.pop()()
        real(transfer)

    monkeypatch.setattr(_device.Transfer, "wait", wait)
    copies.wait()
    assert out[:-8].view(np.int64).tolist() == list(range(1000))


def test_memory_that_is_freed_while_it_is_copied_goes_to_nobody_else():
    value = torch.arange(1000, device=DEVICE)
    out = host(value.nbytes)
    with faults.held() as go_on:
        copies = sources([value]).enqueue(packed([value], out))
        standin.free(value)
        go_on()
        copies.wait()
    assert out[:-8].view(np.int64).tolist() == list(range(1000))


def test_tensors_live_until_their_copies_have_ended():
    value = torch.arange(1000, device=DEVICE)
    address = value.untyped_storage().data_ptr()
    out = host(value.nbytes)
    with faults.held() as go_on:
        asked = sources([value])
        copies = asked.enqueue(packed([value], out))
        asked.movers.clear()
        del value, asked
        gc.collect()
        assert standin.is_live(address)
        go_on()
        copies.wait()
    assert not standin.is_live(address)


def test_memory_that_was_freed_before_is_told():
    raw = SimpleNamespace(
        device=DEVICE,
        dtype=None,
        element_size=lambda: 1,
        numel=lambda: 1,
        is_contiguous=lambda: False,
        untyped_storage=lambda: SimpleNamespace(nbytes=lambda: 0),
    )
    asked = Sources("save_async", {0: _device.Download(torch, raw, None)})
    with pytest.raises(RuntimeError, match=r"of a tensor of standin:0 was freed before it was copied"):
        asked.enqueue([(0, 0, 4096, 1)])


def test_tensors_in_host_memory_are_moved_meanwhile_and_not_enqueued():
    on, here = torch.arange(10, device=DEVICE), torch.arange(20).reshape(4, 5).t()
    out = host(on.nbytes + here.nbytes)
    asked = sources([on, here])
    assert (asked.devices, asked.is_on_device(0), asked.is_on_device(1)) == ((DEVICE,), True, False)
    ranges = packed([on, here], out)
    with pytest.raises(ValueError, match="cannot be copied from a device"):
        asked.enqueue(ranges)
    asked.fill(ranges)
    assert out[:80].view(np.int64).tolist() == list(range(10))
    assert torch.equal(torch.from_numpy(out[80:-8].view(np.int64).reshape(5, 4).copy()), here)


def test_copies_have_ended_when_a_failure_beside_them_is_raised():
    on = torch.arange(1000, device=DEVICE)
    out = host(on.nbytes)

    def fails(*_):
        raise ZeroDivisionError

    asked = Sources("save", {0: _torch.mover_out(on), 1: fails})
    faults.reset(late=0.05)
    with pytest.raises(ZeroDivisionError):
        asked.fill([*packed([on], out), (1, 0, 0, 1)])
    assert out[:-8].view(np.int64).tolist() == list(range(1000))


def test_copies_of_one_device_have_ended_when_another_refuses():
    tensors = [torch.arange(1000, device=device) for device in (DEVICE, OTHER)]
    out = host(16_000)
    asked = sources(tensors)
    faults.reset(late=0.05)
    faults.refuse_at = 2
    with pytest.raises(RuntimeError, match="standin: out of memory"):
        asked.enqueue(packed(tensors, out))
    assert out[:8000].view(np.int64).tolist() == list(range(1000))


def test_copies_that_were_asked_for_have_ended_when_the_next_is_refused():
    tensors = [torch.arange(1000, device=DEVICE) for _ in range(2)]
    out = host(20_000)
    asked = sources(tensors)
    faults.reset(late=0.05)
    faults.refuse_at = 2
    with pytest.raises(RuntimeError, match="standin: out of memory"):
        asked.enqueue(packed(tensors, out, gap=8))
    assert out[:8000].view(np.int64).tolist() == list(range(1000))
    assert _device._free[DEVICE] == [], "the failed stream is not used again"


@pytest.mark.parametrize("number", [1, 2])
def test_the_error_of_a_copy_is_raised_by_each_wait(number):
    tensors = [torch.arange(1000, device=device) for device in (DEVICE, OTHER)]
    out = host(16_000)
    asked = sources(tensors)
    faults.reset(late=0.01)
    faults.fail_at = number
    copies = asked.enqueue(packed(tensors, out))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="standin: unspecified launch failure"):
            copies.wait()
    good = 8000 * (2 - number)
    assert out[good : good + 8000].view(np.int64).tolist() == list(range(1000)), "the other device's values"
    assert sum(map(len, _device._free.values())) == 1, "a stream in which something failed is not used again"


def test_streams_are_used_again():
    value = torch.arange(1000, device=DEVICE)
    out = host(value.nbytes)
    for _ in range(3):
        sources([value]).fill(packed([value], out))
        sinks([value]).drain(packed([value], out))
    assert [len(_device._free[DEVICE])] == [1]
    _device.release()
    assert _device._free[DEVICE] == []


def test_an_interrupt_does_not_end_the_wait_for_copies(monkeypatch):
    """Copies write to memory that the caller will use, so an interrupt must not end the wait."""
    value = torch.arange(1000, device=DEVICE).conj()
    out = host(value.nbytes)
    interrupts = [KeyboardInterrupt()]
    real = standin.Event.synchronize

    def synchronize(event):
        if interrupts:
            raise interrupts.pop()
        real(event)

    monkeypatch.setattr(standin.Event, "synchronize", synchronize)
    faults.reset(late=0.05)
    asked = sources([value])
    copies = asked.enqueue(packed([value], out))
    with pytest.raises(KeyboardInterrupt):
        copies.wait()
    assert out[:-8].view(np.int64).tolist() == list(range(1000))
    copies.wait()


def test_several_threads_may_wait_for_the_same_copies():
    """The copies flip signs only once, before any thread continues."""
    value = torch.full((200_000,), 1 - 1j, dtype=torch.complex64)
    on = value.to(DEVICE).conj()
    out = host(value.nbytes)
    copies = sources([on]).enqueue(packed([on], out))
    found = []

    def body():
        copies.wait()
        found.append(bool((out[:-8].view(np.complex64) == 1 + 1j).all()))

    threads = [threading.Thread(target=body) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_converted_elements_go_to_the_device_in_one_copy():
    value = torch.arange(1000, dtype=torch.int16)
    target = torch.zeros(1000, dtype=torch.int32, device=DEVICE)

    def convert(source, made):
        made.view(np.int32)[:] = np.frombuffer(source.tobytes(), np.int16)

    asked = Sinks("load", {0: Cast(convert, (2, 4), 0, _torch.mover_in(target))})
    assert asked.devices == (DEVICE,)
    at = value.numpy().ctypes.data
    cuts = [0, 3, 100, 2000]
    faults.reset()
    asked.drain([(0, start, at + start, end - start) for start, end in itertools.pairwise(cuts)])
    assert faults.events == 1
    assert sum(faults.host_waits.values()) == 1
    assert torch.equal(standin.on_host(target), value.int())


def test_copies_wait_for_memory_to_be_registered_and_are_cut_where_that_ends():
    page = 4096
    room = host(6 * page)
    begin = -room.ctypes.data % page
    value = torch.randint(0, 255, (5 * page,), dtype=torch.uint8)
    on = value.to(DEVICE)
    out = room[begin + 1 : begin + 1 + value.nbytes]
    asked = sources([on])
    faults.reset()
    pinning, go_on = threading.Event(), threading.Event()
    standin.cudart.before = lambda _address: (pinning.set(), go_on.wait(60))
    registration = _pinned.register(torch, DEVICE, room.ctypes.data + begin, 4 * page, None, 2 * page)
    assert pinning.wait(60)
    worker = threading.Thread(target=asked.fill, args=([(0, 0, out.ctypes.data, value.nbytes)],))
    worker.start()
    worker.join(0.2)
    assert (worker.is_alive(), faults.transfers) == (True, 0), "the copy waits until its memory is pinned"
    go_on.set()
    worker.join()
    assert faults.transfers == 3
    assert out.tobytes() == value.numpy().tobytes()
    target = torch.zeros_like(on)
    sinks([target]).drain([(0, 0, out.ctypes.data, value.nbytes)])
    assert torch.equal(standin.on_host(target), value)
    registration.close()


def test_a_device_without_streams_is_waited_for(monkeypatch):
    value = torch.arange(1000, device=DEVICE)
    out = host(value.nbytes)
    module = torch.get_device_module(DEVICE)
    waited = []

    def synchronize(device):
        waited.append(device)
        for stream in tuple(standin._streams.values()):
            stream.synchronize()

    bare = SimpleNamespace(synchronize=synchronize, device=module.device)
    monkeypatch.setattr(torch, "get_device_module", lambda _device: bare)
    copies = sources([value]).enqueue(packed([value], out))
    assert len(waited) == 2
    assert copies.is_done()
    copies.hold_streams()
    copies.wait()
    assert out[:-8].view(np.int64).tolist() == list(range(1000))


def test_a_mover_that_is_called_alone_waits_for_the_device_and_the_copy():
    value = torch.zeros(1000, device=DEVICE)
    standin.current_stream(DEVICE).worker.submit(lambda: threading.Event().wait(0.05))
    value.fill_(7)
    out = host(value.nbytes)
    worker = threading.Thread(target=_torch.mover_out(value), args=(0, out.ctypes.data, value.nbytes))
    worker.start()
    worker.join()
    assert (out[:-8].view(np.float32) == 7).all()
    target = torch.zeros(1000, device=DEVICE)
    _torch.mover_in(target)(0, out.ctypes.data, value.nbytes)
    assert (standin.on_host(target) == 7).all()


@pytest.mark.parametrize("strided", [False, True])
def test_inference_tensors_are_filled_by_threads_that_are_in_no_such_mode(strided):
    with torch.inference_mode():
        targets = [torch.zeros(4, 5, device=DEVICE) for _ in range(2)]
        targets = [target.t() for target in targets] if strided else targets
        asked = sinks(targets)
    for number in (1, 2):
        values = torch.full((40,), float(number))
        # Fill one tensor alone, and then both together.
        for ranges in (packed(targets, values.numpy())[:1], packed(targets, values.numpy())):
            asked.drain(ranges)
        assert all((standin.on_host(target) == number).all() for target in targets)
