"""A device for machines without one: PyTorch's PrivateUse1 back end, set up from Python, with late streams.

``torch.empty(3, device="standin:1")`` is a tensor with an address, strides and views, whose memory only the stand-in's
own kernels reach. Each stream is a thread with delays: data that is used before its event is stale, and data that is
overwritten before its event spoils the copy. As in CUDA's caching allocator, freed memory goes to the next tensor, in
the order of the stream that it came from, and is overwritten. Host memory can be registered, and its misuse is
recorded. So errors of order, events, reuse and pinning show in the data or in :data:`faults`.

This file works without pytest.
"""

# ruff: noqa: ARG002 - torch determines the arguments of the methods

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree, backend_registration

NAME = "standin"
DEVICES = 2
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_KIND = int(torch._C._autograd.DeviceType.PrivateUse1)
_PATIENCE = 60
#: The byte that fills new memory, and the byte that fills memory given to another tensor.
NEW, REUSED = 0xA5, 0xDB
_local = threading.local()


class Faults:
    """The injected faults, their delays, and counts of calls."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.flow = threading.Event()
        self.flow.set()
        self.reset()

    def reset(self, late: float = 0.0) -> None:
        """Reset everything; from now on copies and kernels take up to ``late`` seconds."""
        self.late = late
        #: The number of all copies, and of copies between host and device.
        self.copies = 0
        self.transfers = 0
        #: The bytes of the largest copy.
        self.largest = 0
        #: The number of requests from threads that had not selected the device.
        self.astray = 0
        #: The number of the copy that fails when it runs, and of the copy that fails at its request.
        self.fail_at: int | None = None
        self.refuse_at: int | None = None
        self.kernels = 0
        self.events = 0
        self.records = 0
        #: By thread, the number of waits of streams for events, and of the host for events and streams.
        self.stream_waits: Counter[int] = Counter()
        self.host_waits: Counter[int] = Counter()
        #: Errors to which a real device would react with a crash or with wrong data.
        self.misuse: list[str] = []

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Hold copies of all but the default streams until the yielded function is called."""
        self.flow.clear()
        try:
            yield self.flow.set
        finally:
            self.flow.set()

    def delay(self) -> None:
        if self.late:
            time.sleep(self.random.random() * self.late)


faults = Faults()


def _use() -> None:
    """Count a fault if the calling thread has not selected the device, unless it is the main thread."""
    if threading.current_thread() is not threading.main_thread() and getattr(_local, "index", None) is None:
        faults.astray += 1


def _index(device: Any = None) -> int:
    if device is None:
        return getattr(_local, "index", None) or 0
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _index() if index is None else index


# Host memory.


class _Registered(NamedTuple):
    address: int
    nbytes: int


def _is_mapped(address: int, nbytes: int) -> bool:
    """Whether the first and the last page of a memory range are mapped in this process."""
    page = os.sysconf("SC_PAGESIZE")
    vector = (ctypes.c_ubyte * 1)()
    libc = ctypes.CDLL(None, use_errno=True)
    return all(
        libc.mincore(ctypes.c_void_p(at // page * page), ctypes.c_size_t(1), vector) == 0
        for at in (address, address + nbytes - 1)
    )


class Cudart:
    """The pinning calls of CUDA's runtime. Each thread has a last error, which stays until that thread reads it."""

    def __init__(self) -> None:
        self.registered: dict[int, _Registered] = {}
        self.reset()

    def reset(self) -> None:
        """Clear the faults; registered memory stays."""
        #: The status that calls return, if not 0, and the most bytes that may be registered.
        self.status = 0
        self.limit: int | None = None
        #: Called with the address before memory is registered: it may wait, or raise.
        self.before: Callable[[int], None] = lambda _address: None
        #: ``(thread, "register" or "unregister", address, bytes)``.
        self.calls: list[tuple[int, str, int, int]] = []
        self.last = threading.local()

    @property
    def bytes(self) -> int:
        """The number of registered bytes."""
        return sum(memory.nbytes for memory in tuple(self.registered.values()))

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        _use()
        self.before(address)
        self.calls.append((threading.get_ident(), "register", address, nbytes))
        if flags != 1:
            faults.misuse.append(f"memory registered with flags {flags}, which are not portable")
        if self.status:
            return self._return(self.status)
        if not _is_mapped(address, nbytes):
            return self._return(1)
        if any(_overlap(known, address, nbytes) for known in tuple(self.registered.values())):
            return self._return(712)
        if self.limit is not None and self.bytes + nbytes > self.limit:
            return self._return(2)
        self.registered[address] = _Registered(address, nbytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        _use()
        known = self.registered.get(address)
        self.calls.append((threading.get_ident(), "unregister", address, known.nbytes if known else 0))
        if known is None:
            return self._return(713)
        del self.registered[address]
        if not _is_mapped(*known):
            faults.misuse.append(f"{known.nbytes} bytes were unmapped before they were unregistered")
        return self._return(self.status)

    def _return(self, status: int) -> int:
        if status:
            self.last.error = status
        return status

    def check(self) -> None:
        """Raise the last error of this thread, as every check after a kernel does."""
        error, self.last.error = getattr(self.last, "error", 0), 0
        if error:
            raise RuntimeError(f"standin: CUDA error {error}, left behind by another call")

    def covering(self, address: int, nbytes: int) -> _Registered | None:
        """The registration that covers a host memory range, or None; raise RuntimeError if it covers only a part."""
        for known in tuple(self.registered.values()):
            if _overlap(known, address, nbytes):
                if known.address <= address and address + nbytes <= known.address + known.nbytes:
                    return known
                raise RuntimeError(
                    "standin: CUDA error: invalid argument (a copy across the edge of registered memory)"
                )
        return None


def _overlap(known: _Registered, address: int, nbytes: int) -> bool:
    return known.address < address + nbytes and address < known.address + known.nbytes


cudart = Cudart()


# Streams and events.


class _Worker:
    """Runs its tasks in order in a separate thread, each after a delay."""

    def __init__(self) -> None:
        #: The failure, after which no task runs, and whether the host has seen it.
        self.error: BaseException | None = None
        self.is_told = False
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name=NAME).start()

    def _run(self) -> None:
        # Otherwise the thread has the name of its creator, which may be a thread of the core.
        ctypes.CDLL(None).prctl(15, NAME.encode())
        while (item := self.tasks.get()) is not None:
            task, always = item
            if self.error is None or always:
                try:
                    task()
                except RuntimeError as error:
                    self.error = error
            del task, item

    def submit(self, task: Callable[[], object], *, always: bool = False) -> None:
        self.tasks.put((task, always))

    def mark(self) -> threading.Event:
        """An event that is set when all earlier tasks have ended."""
        done = threading.Event()
        self.submit(done.set, always=True)
        return done


def _come(done: threading.Event) -> None:
    if not done.wait(_PATIENCE):
        faults.misuse.append("an event did not happen")


_numbers = itertools.count(1)
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
_defaults: dict[int, Stream] = {}
#: The streams that are being captured into a graph, by number, with the capturing thread.
_captured: dict[int, int] = {}


class Stream(torch.Stream):
    """A stream of one device."""

    worker: _Worker

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:  # noqa: ARG004, PYI034 - no Self in Python 3.10
        _use()
        return super().__new__(cls, stream_id=next(_numbers), device_index=_index(device), device_type=_KIND)

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.worker = _Worker()
        _streams[self.stream_id] = self
        # Without a stream, the thread ends after its last task.
        weakref.finalize(self, self.worker.tasks.put, None).atexit = False

    def wait_event(self, event: Event) -> None:
        faults.stream_waits[threading.get_ident()] += 1
        done = event.done
        self.worker.submit(lambda: _come(done))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        _wait(self.worker.mark(), self)


class Event:
    """A point in a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        faults.events += 1
        self.blocking = blocking
        self.done = threading.Event()
        self.done.set()
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        cudart.check()
        if self.stream is not None and self.stream.device_index != stream.device_index:
            raise RuntimeError("standin: an event of one device was recorded on a stream of another")
        faults.records += 1
        self.stream = stream
        self.done = stream.worker.mark()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        _wait(self.done, self.stream)


def _wait(done: threading.Event, stream: Stream | None) -> None:
    """Make the calling thread wait for the event."""
    _use()
    faults.host_waits[threading.get_ident()] += 1
    if threading.get_ident() in _captured.values():
        raise RuntimeError("standin: operation not permitted when stream is capturing")
    if not done.wait(_PATIENCE):
        raise AssertionError("an event did not happen")
    if stream is not None and stream.worker.error is not None:
        stream.worker.is_told = True
        raise stream.worker.error


def default_stream(device: Any = None) -> Stream:
    index = _index(device)
    if index not in _defaults:
        _defaults.setdefault(index, Stream(index))
    return _defaults[index]


def current_stream(device: Any = None) -> Stream:
    index = _index(device)
    found: Stream | None = getattr(_local, "streams", {}).get(index)
    return found or default_stream(index)


def forget_errors() -> None:
    """Let failed streams continue."""
    for stream in tuple(_streams.values()):
        stream.worker.error, stream.worker.is_told = None, False


@contextmanager
def _selected(device: Any) -> Iterator[None]:
    """Make ``device`` the thread's current device."""
    before = getattr(_local, "index", None)
    _local.index = _index(device)
    try:
        yield
    finally:
        _local.index = before


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    """Make ``stream`` and its device current for the thread."""
    if stream is None:
        yield
        return
    before = getattr(_local, "streams", {})
    _local.streams = {**before, stream.device_index: stream}
    try:
        with _selected(stream.device_index):
            yield
    finally:
        _local.streams = before


@contextmanager
def capturing(stream: Stream | None = None) -> Iterator[None]:
    """Make the work of ``stream`` count as captured into a graph."""
    number = (stream or current_stream()).stream_id
    _captured[number] = threading.get_ident()
    try:
        yield
    finally:
        del _captured[number]


class _Module:
    """What ``torch.standin`` is."""

    Stream = Stream
    Event = Event
    current_stream = staticmethod(current_stream)
    default_stream = staticmethod(default_stream)
    stream = staticmethod(_stream)
    device = staticmethod(_selected)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return _index()

    def is_current_stream_capturing(self) -> bool:
        return current_stream().stream_id in _captured

    def cudart(self) -> Cudart:
        return cudart

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return DEVICES

    def synchronize(self, device: Any = None) -> None:
        index = _index(device)
        for stream in tuple(_streams.values()):
            if stream.device_index == index and not stream.worker.is_told:
                stream.synchronize()


# Device memory. Torch gets it through DLPack, which identifies kinds of devices by numbers.


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Managed(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_EXTENSION = 12  # DLPack's kind of device for PrivateUse1
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
#: torch keeps this address, where it looks for a deleter. The deleter is null, so one object serves all tensors.
_managed = _Managed()
_allocating = threading.Lock()


class _Allocation:
    """A piece of device memory until it is freed."""

    def __init__(self, nbytes: int, index: int) -> None:
        room = np.full(nbytes + 16, NEW, np.uint8)
        self.memory = room[-room.ctypes.data % 16 :][:nbytes]
        self.stream = current_stream(index)
        #: Streams that may still read the memory, according to ``record_stream``.
        self.users: dict[int, Stream] = {}

    def reuse(self) -> None:
        """Overwrite the memory like a next owner, in the order of its stream and after those of ``record_stream``."""
        memory, users = self.memory, [stream.worker.mark() for stream in self.users.values()]
        self.users = {}

        def overwrite() -> None:
            for done in users:
                _come(done)
            memory.fill(REUSED)

        self.stream.worker.submit(overwrite, always=True)


#: The memory in use, by address.
_memory: dict[int, _Allocation] = {}


def _gone(address: int) -> None:
    allocation = _memory.pop(address, None)
    if allocation is not None:
        allocation.reuse()


def _allocate(nbytes: int, index: int) -> torch.Tensor:
    allocation = _Allocation(nbytes, index)
    address = allocation.memory.ctypes.data
    with _allocating:
        _managed.data, _managed.device = address, _Device(_EXTENSION, index)
        _managed.ndim, _managed.code, _managed.bits, _managed.lanes = 1, 1, 8, 1
        _managed.shape = (ctypes.c_int64 * 1)(nbytes)
        tensor = torch._C._from_dlpack(_capsule(ctypes.addressof(_managed), b"dltensor", None))  # type: ignore[attr-defined]
    if nbytes:
        _memory[address] = allocation
        # torch keeps a storage's Python object for as long as the storage itself.
        weakref.finalize(tensor.untyped_storage(), _gone, address).atexit = False
    return tensor


def free(tensor: torch.Tensor) -> None:
    """The effect of ``tensor.untyped_storage().resize_(0)`` on memory; the stand-in's storages cannot be resized."""
    _memory[tensor.untyped_storage().data_ptr()].reuse()


def live() -> int:
    """The bytes of device memory in use."""
    return sum(allocation.memory.nbytes for allocation in tuple(_memory.values()))


def is_live(address: int) -> bool:
    """Whether the device memory at an address is in use."""
    return address in _memory


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory."""
    if tensor.is_cpu:
        return tensor.detach()
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = _memory[tensor.untyped_storage().data_ptr()].memory
    return (
        torch.from_numpy(memory[: memory.nbytes // tensor.itemsize * tensor.itemsize])
        .view(tensor.dtype)
        .as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    )


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    index = _index(device)
    if not all(size):
        return _allocate(0, index).view(dtype).as_strided(size, stride)
    nbytes = (1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))) * dtype.itemsize
    return _allocate(nbytes, index).view(dtype).as_strided(size, stride)


def _empty(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= length
    return _empty_strided(size, strides[::-1], dtype=dtype, device=device)


# The work of streams.


def _submit(stream: Stream, task: Callable[[], object]) -> None:
    cudart.check()
    faults.kernels += 1
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        faults.delay()
        if stream is not _defaults.get(stream.device_index):
            _come(faults.flow)
        with torch.inference_mode(inference), torch.no_grad():
            task()

    stream.worker.submit(run)


def _host_range(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (reach + 1) * tensor.itemsize


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Enqueue a copy in the current stream of the source's device, or else of the target's device."""
    faults.copies += 1
    number = faults.copies
    faults.largest = max(faults.largest, source.nbytes)
    if number == faults.refuse_at:
        raise RuntimeError("standin: out of memory")
    stream = current_stream((target if source.is_cpu else source).device)
    host = source if source.is_cpu else target
    is_transfer = host.is_cpu and host.numel() > 0
    memory = _host_range(host) if is_transfer else None
    registered = cudart.covering(*memory) if memory else None
    faults.transfers += is_transfer
    if not is_transfer and source.device != target.device:
        stream.wait_stream(current_stream(target.device))
    ours, theirs = on_host(target), on_host(source)

    def copy() -> None:
        if number == faults.fail_at:
            raise RuntimeError("standin: unspecified launch failure")
        if registered is not None and cudart.registered.get(registered.address) is not registered:
            faults.misuse.append("host memory was unregistered before its copy had ended")
        if memory is not None and not _is_mapped(*memory):
            faults.misuse.append("host memory was unmapped before its copy had ended")
            return
        ours.copy_(theirs)

    _submit(stream, copy)
    if not is_transfer and source.device != target.device:
        current_stream(target.device).wait_stream(stream)
    if not non_blocking:
        stream.synchronize()
    return target


def _foreach_copy(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor], non_blocking: bool = False) -> None:
    targets, sources = list(targets), list(sources)
    devices = {tensor.device for tensor in (*targets, *sources)}
    if len(devices) > 1:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking)
        return
    pairs = [(on_host(target), on_host(source)) for target, source in zip(targets, sources, strict=True)]

    def copy() -> None:
        for ours, theirs in pairs:
            ours.copy_(theirs)

    _submit(current_stream(*devices), copy)


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    allocation = _memory[tensor.untyped_storage().data_ptr()]
    if stream.stream_id != allocation.stream.stream_id:
        allocation.users[stream.stream_id] = _streams[stream.stream_id]


def _any_other(operator: Any, *arguments: Any, **named: Any) -> Any:
    """Run the CPU kernel in the current stream, or at once if the host gets the result."""
    flat, _ = _pytree.tree_flatten((arguments, named))
    device = next(item.device for item in flat if isinstance(item, torch.Tensor) and not item.is_cpu)
    stream = current_stream(device)

    def here(item: Any) -> Any:
        if isinstance(item, torch.device):
            return torch.device("cpu")
        return on_host(item) if isinstance(item, torch.Tensor) else item

    _resize_out(operator, arguments, named)
    host_arguments, host_named = _pytree.tree_map(here, (arguments, named))
    schema = operator._schema.arguments
    written = [
        arguments[number] if number < len(arguments) else named[argument.name]
        for number, argument in enumerate(schema)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if written:
        _submit(stream, lambda: operator(*host_arguments, **host_named))
        return written[0] if len(operator._schema.returns) == 1 else tuple(written) or None
    stream.synchronize()

    def there(item: Any) -> Any:
        return item.to(device) if isinstance(item, torch.Tensor) else item

    return _pytree.tree_map(there, operator(*host_arguments, **host_named))


def _resize_out(operator: Any, arguments: Any, named: Any) -> None:
    """Give an empty ``out=`` the shape of the operator's result."""
    out = named.get("out")
    if out is None or out.is_cpu or out.numel():
        return

    def bare(item: Any) -> Any:
        return item.to("meta") if isinstance(item, torch.Tensor) and (item.dim() or not item.is_cpu) else item

    shaped = operator(*_pytree.tree_map(bare, arguments), **_pytree.tree_map(bare, named))
    if shaped.shape != out.shape:
        room = _empty(shaped.shape, dtype=out.dtype, device=out.device)
        torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
            _CPU, out, room.untyped_storage(), 0, list(room.shape), list(room.stride())
        )


def _redispatch(operator: Any) -> Any:
    return lambda *arguments, **named: operator.redispatch(_CPU, *arguments, **named)


def _set_up() -> tuple[torch.library.Library, ...]:
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    library.impl("empty.memory_format", _empty)
    library.impl("empty_strided", _empty_strided)
    library.impl("_copy_from", _copy_from)
    library.impl("_foreach_copy_", _foreach_copy)
    library.impl("record_stream", _record_stream)
    for name in ("as_strided", "view", "_reshape_alias"):
        library.impl(name, _redispatch(getattr(torch.ops.aten, name).default))
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(_any_other, "PrivateUse1")
    return library, rest


AVAILABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")  # since torch 2.10
# The stand-in is not set up beside a real device: torch would take it for the machine's accelerator.
_libraries = _set_up() if AVAILABLE and os.environ.get("FASTCKPT_TEST_DEVICE", NAME) == NAME else ()
