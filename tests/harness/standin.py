"""A device for machines without one: PyTorch's PrivateUse1 back end, set up from Python, with streams that are late.

``torch.empty(3, device="standin")`` is a tensor with an address, strides and views, whose memory only the stand-in's
own copies reach. Each stream is a thread that takes its time: what is used before its event is stale, and what is
written to before its event spoils the copy. So order, events and reuse show in the data.
"""

# ruff: noqa: ARG002 - the methods take what torch passes

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import backend_registration

import fastckpt
from fastckpt._tensors import device as _device

NAME = "standin"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_memory: dict[int, np.ndarray] = {}
_local = threading.local()


class Faults:
    """What goes wrong, and when; and what has been counted."""

    def __init__(self) -> None:
        self.late = 0.0
        self.random = random.Random(0)
        self.reset()

    def reset(self, late: float = 0.0) -> None:
        """As new; copies take up to ``late`` seconds."""
        self.late = late
        self.copies = 0
        self.largest = 0
        self.astray = 0
        self.fail_at: int | None = None
        self.refuse_at: int | None = None


faults = Faults()


def _use() -> None:
    """Whoever asks for something must have selected the device, but for the program itself."""
    if threading.current_thread() is not threading.main_thread() and not getattr(_local, "selected", False):
        faults.astray += 1


class Stream:
    """Does one thing after the other, in a thread of its own."""

    def __init__(self, device: Any = None) -> None:
        _use()
        self.error: BaseException | None = None
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="standin").start()

    def _run(self) -> None:
        # Else it has the name of the thread that made it, which may be one of the core's.
        ctypes.CDLL(None).prctl(15, NAME.encode())
        while True:
            task, always = self.tasks.get()
            if self.error is None or always:
                try:
                    task()
                except RuntimeError as error:
                    self.error = error
            del task

    def submit(self, task: Any, *, always: bool = False) -> None:
        self.tasks.put((task, always))

    def wait_event(self, event: Event) -> None:
        done = event.done
        self.submit(lambda: done.wait(60))

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()


class Event:
    """A point in a stream."""

    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking
        self.done = threading.Event()
        self.done.set()
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.done = threading.Event()
        self.stream = stream or current_stream()
        self.stream.submit(self.done.set, always=True)

    def synchronize(self) -> None:
        _use()
        if not self.done.wait(60):
            raise AssertionError("an event never came")
        if self.stream is not None and self.stream.error is not None:
            raise self.stream.error


_default = Stream()


def late(monkeypatch: Any, seconds: float) -> Iterator[Faults]:
    """The body of a fixture: copies take up to ``seconds``, and slabs are small next to the tensors."""
    monkeypatch.setattr(_device, "GATHERED", 1 << 16)
    fastckpt.release_buffers()
    faults.reset(late=seconds)
    yield faults
    faults.reset()
    _default.error = None
    fastckpt.drain(60)
    # Slabs are kept: these are too small for others.
    fastckpt.release_buffers()


def current_stream(device: Any = None) -> Stream:
    return getattr(_local, "stream", None) or _default


@contextmanager
def _held(name: str, value: Any) -> Any:
    """Inside, the thread's own ``name`` is ``value``."""
    before = getattr(_local, name, None)
    setattr(_local, name, value)
    try:
        yield
    finally:
        setattr(_local, name, before)


class _Module:
    """What ``torch.standin`` is."""

    Stream = Stream
    Event = Event
    current_stream = staticmethod(current_stream)
    stream = staticmethod(lambda stream: _held("stream", stream))
    device = staticmethod(lambda _device: _held("selected", True))

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: Any = None) -> None:
        _default.synchronize()


def _bytes(storage: Any) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), np.uint8)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU."""
    if tensor.is_cpu:
        return tensor.detach()
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    whole = torch.from_numpy(_bytes(tensor.untyped_storage())).view(tensor.dtype)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    tensor = torch._C._acc.create_empty_tensor(list(size), dtype)
    if not all(size):
        return tensor
    nbytes = (1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))) * dtype.itemsize
    memory = np.full(nbytes + 16, 0xA5, np.uint8)
    address = -(-memory.ctypes.data // 16) * 16
    _memory[address] = memory
    storage = torch._C._construct_storage_from_data_pointer(address, torch.device(NAME, 0), nbytes)
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(_CPU, tensor, storage, 0, list(size), list(stride))
    return tensor


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= length
    return _empty_strided(size, strides[::-1], dtype=dtype)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copies in the current stream, later."""
    faults.copies += 1
    number = faults.copies
    faults.largest = max(faults.largest, source.nbytes)
    if number == faults.refuse_at:
        raise RuntimeError("standin: out of memory")
    ours, theirs = on_host(target), on_host(source)

    def copy() -> None:
        if faults.late:
            time.sleep(faults.random.random() * faults.late)
        if number == faults.fail_at:
            raise RuntimeError("standin: unspecified launch failure")
        with torch.no_grad():
            ours.copy_(theirs)

    stream = current_stream()
    stream.submit(copy)
    if not non_blocking:
        stream.synchronize()
    return target


def _redispatch(operator: Any) -> Any:
    return lambda *arguments, **named: operator.redispatch(_CPU, *arguments, **named)


def _set_up() -> torch.library.Library:
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    library.impl("empty.memory_format", _empty)
    library.impl("empty_strided", _empty_strided)
    library.impl("_copy_from", _copy_from)
    for name in ("as_strided", "view", "_reshape_alias"):
        library.impl(name, _redispatch(getattr(torch.ops.aten, name).default))
    return library


AVAILABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")  # since torch 2.10
_library = _set_up() if AVAILABLE else None
