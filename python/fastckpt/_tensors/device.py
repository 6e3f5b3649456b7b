"""Tensors of other devices, brought to and from host memory piece by piece, on streams of their own.

A copy has what the caller's current stream was asked to compute before the save was called: the copying stream
waits for an event recorded there and then. It reads or writes pinned memory: either a snapshot's, or one of two staging
buffers (slabs) that take turns: the device fills one while the host empties the other. A slab is used again only after
the event behind its last copy.

This file does not import torch: :mod:`.torch` hands it over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from bisect import bisect_right, insort
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import memory as _memory
from .pieces import Index, elements, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType

    from .memory import Bytes, Mover

    Flip = Callable[[Bytes], None] | None

#: Bytes of a slab; a lane has two. A multiple of every element's size, and half a block of the core's.
SLAB = 2 << 20

logger = logging.getLogger("fastckpt")


class Lane:
    """A stream with its two slabs, used by one thread at a time.

    Args:
        torch: the module.
        device: a ``torch.device``.
    """

    def __init__(self, torch: ModuleType, device: Any) -> None:
        self.torch = torch
        self.device = device
        module = torch.get_device_module(device)
        self.streams = all(hasattr(module, name) for name in ("Stream", "Event", "stream", "current_stream"))
        self.module = module
        self.stream = module.Stream(device=device) if self.streams else None
        self.slabs = [_host_memory(torch, device, SLAB) for _ in range(2)]
        #: By slab: the event behind the last copy that used it.
        self.busy: list[Any] = [None, None]
        self.turn = 0

    def begin(self, ready: Any) -> Any:
        """Inside, copies go to this lane's stream, after ``ready``."""
        if self.stream is None:
            return contextlib.nullcontext()
        if ready is not None:
            self.stream.wait_event(ready)
        return self.module.stream(self.stream)

    def mark(self) -> Any:
        """An event behind what the stream has been asked for."""
        if self.stream is None:
            self.module.synchronize(self.device)
            return None
        event = _event(self.module)
        event.record(self.stream)
        return event

    def slab(self) -> int:
        """The number of the next slab, free to be used."""
        number, self.turn = self.turn, 1 - self.turn
        event, self.busy[number] = self.busy[number], None
        if event is not None:
            event.synchronize()
        return number

    def settle(self) -> None:
        """Wait for all copies."""
        if self.stream is not None:
            with _selected(self.module, self.device):
                self.stream.synchronize()


def _event(module: ModuleType) -> Any:
    """An event whose waiter sleeps: CUDA's would spin, on a core that training may want."""
    try:
        return module.Event(blocking=True)
    except TypeError:  # not every kind of device has the choice
        return module.Event()


def _selected(module: ModuleType, device: Any) -> Any:
    """Inside, ``device`` is the thread's own.

    A new thread has the first device, and CUDA would set that up for this process, with memory of its own, when the
    thread asks for anything at all.
    """
    select = getattr(module, "device", None)
    return contextlib.nullcontext() if select is None else select(device)


def _host_memory(torch: ModuleType, device: Any, nbytes: int) -> Any:
    """Host memory that the device can copy from and to by itself; ordinary memory where there is none."""
    if device.type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


#: Lanes not in use, by device. A lane belongs to a thread only while that copies one range: the core's threads
#: come and go with each operation. They change in atomic steps.
_free: dict[Any, list[Lane]] = {}


@contextlib.contextmanager
def _lane(torch: ModuleType, device: Any) -> Any:
    with _selected(torch.get_device_module(device), device):
        free = _free.setdefault(device, [])
        try:
            lane = free.pop()
        except IndexError:
            lane = Lane(torch, device)
        try:
            yield lane
        except BaseException:
            # Its copies may still run: the slabs must not be used before they have ended.
            with contextlib.suppress(Exception):
                lane.settle()
            raise
        free.append(lane)


def release() -> None:
    """Free the slabs that are not in use."""
    for lanes in tuple(_free.values()):
        lanes.clear()


def settle(movers: Iterable[Mover]) -> None:
    """Wait until everything that ``movers`` have copied to devices is there.

    Raises:
        Exception: the first error of any, after all have ended.
    """
    first = None
    for lane in {lane for mover in movers if isinstance(mover, Upload) for lane in mover.lanes}:
        try:
            lane.settle()
        except Exception as error:  # noqa: BLE001, PERF203 - raised below
            first = first or error
    if first is not None:
        raise first


class _Pinned(NamedTuple):
    """Host memory of ours that is pinned."""

    start: int
    end: int


_pinned: list[_Pinned] = []


def pin(torch: ModuleType, device: Any, address: int, nbytes: int) -> Callable[[], None]:
    """Pin host memory for copies from ``device``, where that can be done, and return what undoes it."""
    if device.type != "cuda":
        return lambda: None

    def unpin(cudart: Any) -> Any:
        return cudart.cudaHostUnregister(address)

    # Portable: for every device.
    status = _apart(torch, device, lambda cudart: cudart.cudaHostRegister(address, nbytes, 1), back=unpin)
    if status:
        logger.warning(
            "cannot pin %d bytes for the snapshot (%s): copies from the device go through staging buffers",
            nbytes,
            status,
        )
        return lambda: None

    def undo() -> None:
        status = _apart(torch, device, unpin)
        if status:
            logger.warning("cannot unpin %d bytes of a snapshot (%s)", nbytes, status)

    return _registered(address, nbytes, undo)


def _apart(
    torch: ModuleType, device: Any, call: Callable[[Any], Any], back: Callable[[Any], Any] | None = None
) -> str | None:
    """Make a call of CUDA's runtime in a thread of its own; why it failed, or None.

    When a signal handler raises meanwhile, a call that has begun is waited for, and ``back`` undoes it; one that has
    not never will. A call without ``back`` is made all the same: it undoes another.

    The runtime keeps the last error of each thread until it is asked for, and the next to ask is the check after the
    caller's next kernel: training would die of our failure. An error goes with the thread that has it.
    """
    outcome: list[str | None] = []
    # The first to take it decides: the thread makes the call, or the caller gives it up.
    decision = threading.Lock()

    def run() -> None:
        if not decision.acquire(blocking=False):
            return
        try:
            with _selected(torch.get_device_module(device), device):
                status = int(call(torch.cuda.cudart()))
            outcome.append(f"CUDA error {status}" if status else None)
        except Exception as error:  # noqa: BLE001 - raised below
            outcome.append(str(error))

    thread = threading.Thread(target=run, name="fastckpt-pin")
    interrupt = _run_to_end(thread, decision)
    if interrupt is None:
        return outcome[0]
    if isinstance(interrupt, RuntimeError) and thread.ident is None:
        return str(interrupt)  # the process may have no more threads, or is ending
    if back is None:
        if not outcome:
            _apart(torch, device, call)
    elif outcome and outcome[0] is None:
        _apart(torch, device, back)
    raise interrupt


def _run_to_end(thread: threading.Thread, decision: threading.Lock) -> BaseException | None:
    """Start a thread and wait for it; the last error that was raised here meanwhile.

    An error before the thread has taken ``decision`` takes it, and ends the wait.
    """
    interrupt: BaseException | None = None
    started = ended = False
    while not ended:
        try:
            if not started:
                started = True
                thread.start()
            thread.join()
            ended = True
        except BaseException as error:  # noqa: BLE001, PERF203 - the caller raises it
            interrupt = error
            ended = decision.acquire(blocking=False)
    return interrupt


def _registered(address: int, nbytes: int, undo: Callable[[], object]) -> Callable[[], None]:
    memory = _Pinned(address, address + nbytes)
    insort(_pinned, memory)

    def unpin() -> None:
        _pinned.remove(memory)
        undo()

    return unpin


def _is_pinned(address: int, nbytes: int) -> bool:
    known = tuple(_pinned)
    at = bisect_right(known, (address, 1 << 64)) - 1
    return at >= 0 and address + nbytes <= known[at].end


class _Ranges:
    """A strided tensor of a device, as its logical bytes.

    Args:
        torch: the module.
        raw: the tensor, as integers of its element's size.
        flip: what must be done to its bytes on the host, or None.
    """

    def __init__(self, torch: ModuleType, raw: Any, flip: Flip) -> None:
        self.torch = torch
        self.raw = raw
        self.flip = flip
        self.device = raw.device
        self.shape: Sequence[int] = tuple(raw.shape)
        self.size: int = raw.element_size()
        module = torch.get_device_module(self.device)
        self.ready = None
        if hasattr(module, "Event") and hasattr(module, "current_stream"):
            self.ready = module.Event()
            self.ready.record(module.current_stream(self.device))
        else:
            module.synchronize(self.device)

    def _each(self, host: Any, first: int, last: int) -> Any:
        """The parts of the elements ``[first, last)``, each with its place in ``host``, a tensor of bytes."""
        done = 0
        for index, count in pieces(self.shape, first, last):
            part = self.raw[index] if index else self.raw
            yield part, host[done : done + count * self.size].view(self.raw.dtype).view(part.shape)
            done += count * self.size

    def _steps(self, first: int, last: int) -> Any:
        step = SLAB // self.size
        for start in range(first, last, step):
            yield start, min(last, start + step)


class Download(_Ranges):
    """A mover that brings ranges to the host; they are there when it returns."""

    def __call__(self, start: int, address: int, nbytes: int) -> None:
        """See :data:`._memory.Mover`."""
        first, last, whole = elements(start, nbytes, self.size)
        target = _memory.at(address, nbytes)
        with _lane(self.torch, self.device) as lane:
            if whole and not address % self.size and _is_pinned(address, nbytes):
                with lane.begin(self.ready):
                    for part, host in self._each(self.torch.from_numpy(target), first, last):
                        host.copy_(part, non_blocking=True)
                    event = lane.mark()
                if event is not None:
                    event.synchronize()
                if self.flip is not None:
                    self.flip(target)
                return
            before: tuple[int, int, int] | None = None
            for begin, end in self._steps(first, last):
                # While this one is being filled, the one before it is emptied.
                number = lane.slab()
                with lane.begin(self.ready):
                    for part, host in self._each(lane.slabs[number], begin, end):
                        host.copy_(part, non_blocking=True)
                    lane.busy[number] = lane.mark()
                if before is not None:
                    self._empty(lane, before, start, target)
                before = number, begin, end
            if before is not None:
                self._empty(lane, before, start, target)

    def _empty(self, lane: Lane, filled: tuple[int, int, int], start: int, target: Bytes) -> None:
        """Bring a slab's bytes to where they belong, once they have arrived."""
        number, begin, end = filled
        event, lane.busy[number] = lane.busy[number], None
        if event is not None:
            event.synchronize()
        data = lane.slabs[number].numpy()[: (end - begin) * self.size]
        if self.flip is not None:
            self.flip(data)
        # Elements at the edges of the range may be cut.
        skip = max(0, start - begin * self.size)
        at = begin * self.size + skip - start
        data = data[skip : skip + len(target) - at]
        target[at : at + len(data)] = data


class Upload(_Ranges):
    """A mover that brings ranges from the host. They are under way when it returns; :func:`settle` waits for them.

    Args:
        torch: the module.
        raw: the tensor, as integers of its element's size.
        flip: what must be done to its bytes on the host, or None.
        inference: whether it is an inference tensor.
    """

    def __init__(self, torch: ModuleType, raw: Any, flip: Flip, *, inference: bool) -> None:
        super().__init__(torch, raw, flip)
        self.inference = inference
        #: Those with copies that have not been waited for.
        self.lanes: set[Lane] = set()

    def __call__(self, start: int, address: int, nbytes: int) -> None:
        """See :data:`._memory.Mover`."""
        first, last, whole = elements(start, nbytes, self.size)
        source = _memory.at(address, nbytes)
        with _lane(self.torch, self.device) as lane:
            if not whole:
                self._cut(lane, start, address, nbytes)
                return
            self.lanes.add(lane)
            for begin, end in self._steps(first, last):
                number = lane.slab()
                data = lane.slabs[number].numpy()[: (end - begin) * self.size]
                data[:] = source[begin * self.size - start : end * self.size - start]
                if self.flip is not None:
                    self.flip(data)
                self._send(lane, lane.slabs[number], begin, end)
                lane.busy[number] = lane.mark()

    def _send(self, lane: Lane, host: Any, first: int, last: int) -> None:
        with self.torch.inference_mode(self.inference), lane.begin(self.ready):
            for part, piece in self._each(host, first, last):
                part.copy_(piece, non_blocking=True)

    def _cut(self, lane: Lane, start: int, address: int, nbytes: int) -> None:
        """A range that cuts elements: rare, so whole elements are read, changed and written back, and waited for."""
        torch = self.torch

        def copy(index: Index, contiguous: Bytes) -> None:
            part = self.raw[index] if index else self.raw
            with torch.inference_mode(self.inference), lane.begin(self.ready):
                part.copy_(torch.from_numpy(_flipped(contiguous, self.flip)).view(part.dtype).view(part.shape))
            lane.settle()

        def back(index: Index, contiguous: Bytes) -> None:
            part = self.raw[index] if index else self.raw
            with lane.begin(self.ready):
                torch.from_numpy(contiguous).view(part.dtype).view(part.shape).copy_(part)
            lane.settle()
            if self.flip is not None:
                self.flip(contiguous)

        _memory.copy_in(self.shape, self.size, copy, back, start, address, nbytes)


def _flipped(data: Bytes, flip: Flip) -> Bytes:
    data = np.array(data)
    if flip is not None:
        flip(data)
    return data
