"""Tensors on devices, and their copies from and to host memory, in separate streams.

Copies are requested without waiting for the previous one: an operation requests many from a stream, with one event
after all of them. The following relies on CUDA's guarantees, and holds for every device whose module in torch has
``Stream`` and ``Event``; for other devices, ``synchronize`` waits.

- A stream executes its work in order. Our stream first waits for an event in the caller's stream (``ready``), so a copy
  sees the results of the work in that stream.
- Temporary memory on the device is allocated while our stream is the current one. torch's allocator then assigns it to
  that stream, and after it is freed reuses it only for later work of the same stream. So it may be freed as soon as its
  copy has been requested. Expandable segments change the address of this memory, not its stream.
- A copy between the device and pinned memory returns at once. With other host memory it returns when the host's part is
  done: from the device after the whole copy, and to the device when the bytes have left host memory. This is
  slower, but correct.
- A copy may not cross the border of a registered range: :mod:`.pinned` cuts it there.

This file does not import torch: :mod:`.torch` passes it in.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from . import memory as _memory
from . import pinned as _pinned
from .pieces import elements, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from .memory import Bytes

    #: ``(data, start)``: changes the signs in bytes of a tensor, of which the first is its logical byte ``start``.
    Flip = Callable[[Bytes, int], None]

T = TypeVar("T")

#: The most bytes of temporary memory on a device for one copy. A multiple of every element's size.
GATHERED = 16 << 20
#: Ranges of fewer bytes share a copy with their neighbours.
SMALL = 1 << 20

#: Streams without work in progress, by device. The lists change in atomic steps: signal handlers save, too.
_free: dict[Any, list[Any]] = {}


def release() -> None:
    """Free the streams that are not in use."""
    for streams in tuple(_free.values()):
        streams.clear()


class Link:
    """The facts about a device that one operation needs.

    Args:
        torch: the module.
        device: a ``torch.device``.
    """

    def __init__(self, torch: ModuleType, device: Any) -> None:
        self.torch = torch
        self.device = device
        self.module: Any = torch.get_device_module(device)
        self.has_streams = all(hasattr(self.module, name) for name in ("Stream", "Event", "stream", "current_stream"))

    def selected(self) -> Any:
        """A context in which the device is the thread's current one.

        A new thread has the first device, and at its first call CUDA would initialise that device for this process,
        which takes memory.
        """
        select = getattr(self.module, "device", None)
        return contextlib.nullcontext() if select is None else select(self.device)

    def refuse_capture(self, operation: str) -> None:
        """RuntimeError while the caller's current stream is captured into a CUDA graph.

        An event recorded there would become a part of the graph, and no other stream may wait for that.
        """
        is_capturing = getattr(self.module, "is_current_stream_capturing", None)
        if is_capturing is None:
            return
        with self.selected():
            if is_capturing():
                raise RuntimeError(
                    f"{operation}: the current stream of {self.device} is being captured into a graph, which nothing "
                    "outside of it can wait for: call this before the capture begins or after it has ended"
                )

    def ready(self) -> Any:
        """An event after all work of the caller's current stream; None if the host has waited for it."""
        with self.selected():
            if not self.has_streams:
                self.module.synchronize(self.device)
                return None
            event = self.module.Event()
            event.record(self.module.current_stream(self.device))
            return event

    def hold(self, event: Any) -> None:
        """Make the caller's current stream wait for ``event``; the host does not."""
        with self.selected():
            self.module.current_stream(self.device).wait_event(event)

    def synchronize(self) -> None:
        """Wait for all work of the device in any stream."""
        with self.selected():
            self.module.synchronize(self.device)

    def take(self) -> Any:
        """An idle stream; None if there are no streams."""
        if not self.has_streams:
            return None
        try:
            return _free.setdefault(self.device, []).pop()
        except IndexError:
            return self.module.Stream(device=self.device)

    def give(self, stream: Any) -> None:
        """Take back a stream in which all work has succeeded."""
        if stream is not None:
            _free.setdefault(self.device, []).append(stream)

    def aside(self, ready: Any, body: Callable[[], T]) -> T:
        """The result of ``body``, run in a separate stream after the event ``ready``; it must wait for its own work."""
        with self.selected():
            if ready is not None:
                ready.synchronize()
            stream = self.take()
            try:
                with contextlib.nullcontext() if stream is None else self.module.stream(stream):
                    found = body()
            except BaseException:
                # The device may still read memory that the caller will free. Do not use the stream again.
                with contextlib.suppress(Exception):
                    self.synchronize() if stream is None else stream.synchronize()
                raise
            self.give(stream)
            return found

    def mark(self, stream: Any) -> Any:
        """An event after the work of a stream; None if the host has waited for the device."""
        if stream is None:
            self.module.synchronize(self.device)
            return None
        try:
            # A waiter sleeps: CUDA's own wait would spin on a core that training may need.
            event = self.module.Event(blocking=True)
        except TypeError:  # not every kind of device supports it
            event = self.module.Event()
        event.record(stream)
        return event


class _Tensor:
    """A device tensor as its stored bytes, in their logical order.

    Args:
        torch: the module.
        raw: the tensor, as integers of its element's size; or as a vector of bytes, if it is in order.
        flip: the conversion of its bytes on the host, or None; for a vector None.
    """

    __slots__ = ("device", "flat", "flip", "nbytes", "raw", "size", "torch")

    def __init__(self, torch: ModuleType, raw: Any, flip: Flip | None) -> None:
        self.torch = torch
        self.raw = raw
        self.flip = flip
        self.device = raw.device
        self.size: int = raw.element_size()
        self.nbytes: int = raw.numel() * self.size
        #: The bytes in memory, if they are in order.
        self.flat = raw if _is_vector(torch, raw) else _bytes(torch, raw) if raw.is_contiguous() else None

    def _pieces(self, first: int, last: int) -> Iterator[tuple[Any, int]]:
        """The elements ``[first, last)`` as parts of the tensor, in order, each with its bytes."""
        for index, count in pieces(tuple(self.raw.shape), first, last):
            yield (self.raw[index] if index else self.raw), count * self.size


def _bytes(torch: ModuleType, contiguous: Any) -> Any:
    # The stride is given: torch calls a tensor of one element contiguous whatever its stride is.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def _is_vector(torch: ModuleType, part: Any) -> bool:
    return part.dtype is torch.uint8 and part.dim() == 1 and part.is_contiguous()


class Download(_Tensor):
    """Copies ranges of a tensor to the host: for :class:`.movers.Sources`, which requests many at once.

    Called as a mover, it waits for all earlier work of the device, and for the copy.
    """

    __slots__ = ()

    def __call__(self, start: int, address: int, nbytes: int) -> None:
        """See :data:`._memory.Mover`."""
        link = Link(self.torch, self.device)
        link.synchronize()
        download(link, [(self, start, address, nbytes)], None).wait()

    def parts(self, start: int, nbytes: int) -> Iterator[tuple[Any, int]]:
        """Vectors of bytes on the device that make up a range, in order, each with its length."""
        if self.flat is not None:
            yield (self.flat if nbytes == self.nbytes else self.flat[start : start + nbytes]), nbytes
            return
        first, last, _ = elements(start, nbytes, self.size)
        # Elements at the edges of the range may be cut.
        skip, left = start - first * self.size, nbytes
        step = max(1, GATHERED // self.size)
        for begin in range(first, last, step):
            for part, size in self._pieces(begin, min(last, begin + step)):
                taken = min(size - skip, left)
                yield _bytes(self.torch, self.ordered(part))[skip : skip + taken], taken
                left -= taken
                skip = 0

    def ordered(self, part: Any) -> Any:
        """A part of the tensor with its elements in order, as they are stored."""
        return part.contiguous()


class Upload(_Tensor):
    """Copies ranges of a tensor from the host: for :class:`.movers.Sinks`, which requests many at once.

    Called as a mover, it waits for all earlier work of the device, and for the copy.

    Args:
        torch: the module.
        raw: the tensor, as integers of its element's size.
        flip: the conversion of its bytes on the host, or None.
        inference: whether it is an inference tensor.
    """

    __slots__ = ("inference",)

    def __init__(self, torch: ModuleType, raw: Any, flip: Flip | None, *, inference: bool) -> None:
        super().__init__(torch, raw, flip)
        self.inference = inference

    def __call__(self, start: int, address: int, nbytes: int) -> None:
        """See :data:`._memory.Mover`."""
        link = Link(self.torch, self.device)
        link.synchronize()
        upload(link, [(self, start, address, nbytes)], None).wait()

    def parts(self, start: int, nbytes: int) -> Iterator[tuple[Any, int]]:
        """Parts of the tensor that make up a range, in order, each with its bytes.

        The parts are vectors of bytes, or have whole elements of the tensor's size.
        """
        if self.flat is not None:
            yield (self.flat if nbytes == self.nbytes else self.flat[start : start + nbytes]), nbytes
            return
        first, last, whole = elements(start, nbytes, self.size)
        if not whole:
            # The bytes of one element are adjacent, so only bytes in the range are written: two threads may have the
            # two halves.
            skip = start - first * self.size
            if skip or nbytes < self.size:
                taken = min(self.size - skip, nbytes)
                ((part, _),) = self._pieces(first, first + 1)
                yield _bytes(self.torch, part)[skip : skip + taken], taken
                first, nbytes = first + 1, nbytes - taken
            tail = nbytes % self.size
            last -= bool(tail)
        step = max(1, GATHERED // self.size)
        for begin in range(first, last, step):
            yield from self._pieces(begin, min(last, begin + step))
        if not whole and tail:
            ((part, _),) = self._pieces(last, last + 1)
            yield _bytes(self.torch, part)[:tail], tail


class Transfer:
    """Copies that were requested from a separate stream, with one event after them.

    Args:
        link: the device.
        ready: an event that they come after, or None.
        ask: requests the copies; called with this object, while the stream is the current one.

    Raises:
        Exception: the error of a request; copies that were requested have ended.
    """

    def __init__(self, link: Link, ready: Any, ask: Callable[[Transfer], None]) -> None:
        self.link = link
        #: Objects that must stay alive until the copies have ended.
        self.kept: list[Any] = []
        #: The remaining work of the host afterwards: ``flip``, address, nbytes and logical start.
        self.flips: list[tuple[Flip, int, int, int]] = []
        self.stream = None
        with link.selected():
            try:
                self.stream = link.take()
                if self.stream is None:
                    ask(self)
                else:
                    if ready is not None:
                        self.stream.wait_event(ready)
                    with link.module.stream(self.stream):
                        ask(self)
                self.event = link.mark(self.stream)
            except BaseException:
                # Copies may still run, in memory that the caller will use or free. Do not use the stream again.
                with contextlib.suppress(Exception):
                    link.module.synchronize(link.device) if self.stream is None else self.stream.synchronize()
                raise

    def is_done(self) -> bool:
        """Whether the copies have ended on the device, with success or not."""
        if self.event is None:
            return True
        with self.link.selected():
            try:
                return bool(self.event.query())
            except Exception:  # noqa: BLE001 - `wait` raises it
                return True

    def wait(self) -> None:
        """Wait until the copies have ended, and do the remaining work of the host.

        It may be called again if a signal handler ended it while :attr:`event` is not None.
        """
        if self.event is not None:
            with self.link.selected():
                self.event.synchronize()
            self.link.give(self.stream)
            self.event = None
        for flip, address, nbytes, start in self.flips:
            flip(_memory.at(address, nbytes), start)
        self.kept.clear()

    def copy(self, part: Any, address: int, nbytes: int, *, to_host: bool) -> None:
        """Request a copy between a vector of bytes on the device and host memory."""
        _pinned.wait(address, nbytes)
        begin = address
        for at, size in _pinned.split(address, nbytes):
            host = self.link.torch.from_numpy(_memory.at(at, size))
            device = part if size == nbytes else part[at - begin : at - begin + size]
            if to_host:
                host.copy_(device, non_blocking=True)
            else:
                device.copy_(host, non_blocking=True)


class _Run:
    """Neighbours in host memory that share a copy.

    Args:
        move: receives parts on the device, their sizes, and the address in host memory.
    """

    def __init__(self, move: Callable[[list[Any], list[int], int], None]) -> None:
        self.move = move
        self.parts: list[Any] = []
        self.sizes: list[int] = []
        self.begin = self.end = 0

    def add(self, part: Any, address: int, nbytes: int) -> None:
        """Add a range; the earlier ones are moved first if it is not adjacent, or too large."""
        if address != self.end or nbytes >= SMALL or self.end + nbytes > self.begin + GATHERED:
            self.flush()
            self.begin = self.end = address
        self.parts.append(part)
        self.sizes.append(nbytes)
        self.end += nbytes
        if nbytes >= SMALL:
            self.flush()

    def flush(self) -> None:
        """Move the collected ranges."""
        if self.parts:
            self.move(self.parts, self.sizes, self.begin)
            self.parts, self.sizes = [], []
        self.begin = self.end


def _protect(tensors: Sequence[Any], stream: Any) -> None:
    """Make torch's allocator keep the memory of tensors until the future work of ``stream`` has ended.

    A reference does not keep it: ``untyped_storage().resize_(0)`` frees the memory of a tensor despite references to
    it, as sharded modules do between steps.
    """
    for tensor in tensors:
        if not tensor.untyped_storage().nbytes():
            raise RuntimeError(
                f"the memory of a tensor of {tensor.device} was freed before it was copied, as sharded modules do "
                "between steps: call wait_staged() of the save first, or save what they hold between steps"
            )
    # Not every allocator supports this, and not every kind of stream is a torch stream.
    with contextlib.suppress(RuntimeError, TypeError):
        for tensor in tensors:
            tensor.record_stream(stream)


def download(
    link: Link, jobs: Sequence[tuple[Download, int, int, int]], ready: Any, *, outlives: bool = False
) -> Transfer:
    """Request ranges of tensors of one device; they are in host memory after a wait for the transfer.

    Args:
        link: the device.
        jobs: for each range: the tensor, the start, the address and the bytes.
        ready: an event that the copies come after, or None.
        outlives: whether the transfer may outlive the requesting call; if so, the tensors are protected.
    """
    torch = link.torch

    def ask(transfer: Transfer) -> None:
        if outlives and transfer.stream is not None:
            _protect([mover.raw for mover, *_ in jobs], transfer.stream)

        def move(parts: list[Any], sizes: list[int], address: int) -> None:
            if len(parts) > 1:
                # If the device does not support this, or is full, parts are copied one by one.
                with contextlib.suppress(NotImplementedError, torch.OutOfMemoryError):
                    parts, sizes = [torch.cat(parts)], [sum(sizes)]
            for part, nbytes in zip(parts, sizes, strict=True):
                transfer.copy(part, address, nbytes, to_host=True)
                address += nbytes

        run = _Run(move)
        for mover, start, address, nbytes in jobs:
            if mover.flip is not None:
                transfer.flips.append((mover.flip, address, nbytes, start))
            for part, size in mover.parts(start, nbytes):
                run.add(part, address, size)
                address += size  # noqa: PLW2901 - it goes on through the range
        run.flush()
        transfer.kept.append(jobs)

    return Transfer(link, ready, ask)


def upload(link: Link, jobs: Sequence[tuple[Upload, int, int, int]], ready: Any) -> Transfer:
    """Request that ranges of tensors of one device be filled from host memory; arguments as for :func:`download`."""

    def ask(transfer: Transfer) -> None:
        run = _Run(lambda parts, sizes, address: _spread(transfer, parts, sizes, address))
        for mover, start, address, nbytes in jobs:
            if mover.flip is not None:
                # The caller's bytes must not be changed.
                data = np.array(_memory.at(address, nbytes))
                mover.flip(data, start)
                transfer.kept.append(data)
                address = _memory.address_of(data)  # noqa: PLW2901 - the flipped bytes are sent instead
            for part, size in mover.parts(start, nbytes):
                run.add(part, address, size)
                address += size  # noqa: PLW2901 - it goes on through the range
        run.flush()
        transfer.kept.append(jobs)

    inference = any(mover.inference for mover, *_ in jobs)
    with link.torch.inference_mode(inference):
        return Transfer(link, ready, ask)


def _spread(transfer: Transfer, parts: list[Any], sizes: list[int], address: int) -> None:
    """Fill parts of tensors from neighbours in host memory: one copy, and one kernel."""
    torch, device = transfer.link.torch, transfer.link.device
    if len(parts) == 1 and _is_vector(torch, parts[0]):
        transfer.copy(parts[0], address, sizes[0], to_host=False)
        return
    try:
        gathered = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        if len(parts) == 1:
            raise
        for part, nbytes in zip(parts, sizes, strict=True):
            _spread(transfer, [part], [nbytes], address)
            address += nbytes
        return
    transfer.copy(gathered, address, sum(sizes), to_host=False)
    vectors: tuple[list[Any], list[Any]] = [], []
    for part, piece in zip(parts, gathered.split(sizes), strict=True):
        if _is_vector(torch, part):
            vectors[0].append(part)
            vectors[1].append(piece)
        else:
            aligned = piece.clone() if piece.storage_offset() % part.element_size() else piece
            part.copy_(aligned.view(part.dtype).view(part.shape), non_blocking=True)
    if vectors[0]:
        torch._foreach_copy_(*vectors, True)
