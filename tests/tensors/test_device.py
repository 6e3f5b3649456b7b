"""Host memory that is pinned for a device: what CUDA's runtime is asked for, and what is left behind."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from fastckpt._tensors import device as _device


class Cudart:
    """CUDA's runtime, as far as pinning goes: each thread has a last error, kept until that thread asks for it."""

    def __init__(self, status):
        self.status = status
        self.calls = []
        self.last = threading.local()

    def _call(self, *call):
        self.calls.append((threading.get_ident(), *call))
        if self.status:
            self.last.error = self.status
        return self.status

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802 - CUDA's name
        return self._call("register", address, nbytes, flags)

    def cudaHostUnregister(self, address):  # noqa: N802
        return self._call("unregister", address)

    def launch(self):
        """What every check after a kernel does."""
        error, self.last.error = getattr(self.last, "error", 0), 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


class FakeTorch:
    """torch with that runtime. A call must come with its device selected."""

    def __init__(self, cudart):
        self.cuda = self
        self.selected = threading.local()
        self._cudart = cudart

    def get_device_module(self, device):
        assert device.type == "cuda"
        return self

    @contextlib.contextmanager
    def device(self, device):
        self.selected.device = device
        yield
        self.selected.device = None

    def cudart(self):
        if threading.current_thread() is not threading.main_thread():
            assert self.selected.device is CUDA
        if isinstance(self._cudart, Exception):
            raise self._cudart
        return self._cudart


CUDA = torch.device("cuda", 3)


@pytest.mark.parametrize("status", [0, 2, 712])
def test_a_refused_pin_leaves_no_error_in_the_training_thread(status, caplog):
    cudart = Cudart(status)
    undo = _device.pin(FakeTorch(cudart), CUDA, 4096, 8192)
    assert _device._is_pinned(4096, 8192) == (not status)
    cudart.launch()
    # What was pinned and is gone meanwhile cannot be unpinned.
    cudart.status = status or 713
    undo()
    cudart.launch()
    assert not _device._is_pinned(4096, 8192)
    assert [call[1:] for call in cudart.calls] == [("register", 4096, 8192, 1), ("unregister", 4096)][
        : 1 + (not status)
    ]
    assert threading.get_ident() not in {thread for thread, *_ in cudart.calls}
    told = f"cannot pin 8192 bytes for the snapshot (CUDA error {status})" if status else "cannot unpin 8192 bytes"
    # A save of the test before may log its end here.
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [told in message for message in warnings] == [True]


@pytest.mark.parametrize("failure", ["cudart", "thread"])
def test_a_pin_that_cannot_be_tried_is_done_without(failure, caplog, monkeypatch):
    cudart = Cudart(0)
    if failure == "cudart":
        cudart = RuntimeError("no CUDA here")
    else:

        def start(thread):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
    undo = _device.pin(FakeTorch(cudart), CUDA, 4096, 8192)
    assert not _device._is_pinned(4096, 8192)
    undo()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("at", ["start", "join"])
def test_a_pin_that_is_interrupted_is_undone(at, monkeypatch):
    """Else the memory goes while CUDA still knows it."""
    cudart = Cudart(0)
    real = {name: getattr(threading.Thread, name) for name in ("start", "join")}
    interrupts = [KeyboardInterrupt()]
    registering, interrupted = threading.Event(), threading.Event()

    def slow(address, nbytes, flags):
        registering.set()
        assert interrupted.wait(60)
        return Cudart.cudaHostRegister(cudart, address, nbytes, flags)

    def interrupt():
        if interrupts:
            assert registering.wait(60)
            raise interrupts.pop()

    def start(thread):
        real["start"](thread)
        if at == "start":
            interrupt()

    def join(thread, timeout=None):
        if at == "join":
            interrupt()
        interrupted.set()
        real["join"](thread, timeout)

    cudart.cudaHostRegister = slow
    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(threading.Thread, "join", join)
    try:
        with pytest.raises(KeyboardInterrupt):
            _device.pin(FakeTorch(cudart), CUDA, 4096, 8192)
    finally:
        interrupted.set()
    assert [name for _, name, *_ in cudart.calls] == ["register", "unregister"]
    assert not _device._is_pinned(4096, 8192)


def test_a_pin_that_is_interrupted_before_it_begins_is_not_made(monkeypatch):
    """The thread is on its way, and nobody will wait for it."""
    cudart = Cudart(0)
    real = threading.Thread.start
    late = []

    def start(thread):
        late.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        _device.pin(FakeTorch(cudart), CUDA, 4096, 8192)
    real(late[0])
    late[0].join()
    assert cudart.calls == []
    assert not _device._is_pinned(4096, 8192)


@pytest.mark.parametrize("begun", [False, True])
def test_memory_is_unpinned_despite_an_interrupt(begun, monkeypatch):
    cudart = Cudart(0)
    undo = _device.pin(FakeTorch(cudart), CUDA, 4096, 8192)
    real = threading.Thread.start
    late = []

    def start(thread):
        if late:
            real(thread)
            return
        late.append(thread)
        if begun:
            real(thread)
            thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        undo()
    if not begun:
        real(late[0])
        late[0].join()
    assert [name for _, name, *_ in cudart.calls] == ["register", "unregister"]
