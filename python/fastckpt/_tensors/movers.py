"""Moves bytes of a state that are not contiguous in host memory: many ranges at a time, for the core.

:class:`Sources` reads them for a save, :class:`Sinks` writes them for a load. Both are made in the caller's thread, at
the call: a save must see the results of earlier work in its streams, and a load must not overtake that work.
"""

from __future__ import annotations

import contextlib
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeAlias

from . import device as _device
from . import device_sums as _device_sums
from . import memory as _memory
from .cast import Cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .memory import Mover

#: ``(index, start, address, nbytes)``: the bytes ``[start, start + nbytes)`` of tensor or request ``index``, and the
#: host memory that they are copied to or from.
Range: TypeAlias = "tuple[int, int, int, int]"


class Copies:
    """Copies that were requested from devices.

    The memory on both sides must stay until they have ended: :meth:`wait` waits on the host, and :meth:`hold_streams`
    in streams of the devices.
    """

    def __init__(self, operation: str, transfers: list[_device.Transfer]) -> None:
        self._operation = operation
        self._transfers = transfers
        self._error: BaseException | None = None
        # The thread of a save, a step that waits for it and a signal handler may call this at the same time.
        self._lock = RLock()

    def wait(self) -> None:
        """Wait on the host until all have ended and their bytes are in stored form. The GIL is released meanwhile.

        Any thread may call it, more than once.

        Raises:
            Exception: the first error of any device, after the copies of all have ended.
        """
        interrupt: BaseException | None = None
        with self._lock:
            while self._transfers:
                transfer = self._transfers[0]
                try:
                    transfer.wait()
                except Exception as error:  # noqa: BLE001 - raised below
                    self._error = self._error or error
                except BaseException as error:  # noqa: BLE001 - of a signal handler, raised below
                    interrupt = error
                    if transfer.event is not None:
                        continue  # copies may still run, in memory that the caller will use
                    self._error = self._error or error
                if transfer in self._transfers:  # a signal handler may have waited for it meanwhile
                    self._transfers.remove(transfer)
            if interrupt is not None:
                raise interrupt
            if self._error is not None:
                raise self._error

    def hold_streams(self) -> None:
        """Make the current streams of the calling thread wait for the copies; the host does not wait.

        Later work of these streams may change the tensors. Does nothing once :meth:`wait` has returned.

        Raises:
            RuntimeError: one of these streams is being captured into a CUDA graph. No stream waits.
        """
        # Another thread may be waiting: an event is None once it has been reached.
        events = [
            (transfer.link, event) for transfer in tuple(self._transfers) if (event := transfer.event) is not None
        ]
        for link, _ in events:
            link.refuse_capture(self._operation)
        for link, event in events:
            link.hold(event)

    def is_done(self) -> bool:
        """Whether the devices have ended all copies. :meth:`wait` may still have work to do, or an error to raise.

        Do not call it while a stream is captured into a CUDA graph: that would end the capture with an error.
        """
        return all(transfer.is_done() for transfer in tuple(self._transfers))


class _Movers:
    """The common part of both directions.

    Args:
        operation: the name of the operation, for errors.
        movers: the movers, by number.
        kind: the class of movers for devices.

    Attributes:
        movers: the mapping that was given, not a copy.
        devices: the ``torch.device`` objects of the movers; empty when there are none.
    """

    def __init__(self, operation: str, movers: Mapping[int, Mover], kind: type[Any]) -> None:
        self._operation = operation
        self.movers = movers
        self._kind = kind
        links: dict[Any, _device.Link] = {}
        for mover in movers.values():
            own: Any = mover.mover if isinstance(mover, Cast) else mover
            if isinstance(own, kind) and own.device not in links:
                links[own.device] = _device.Link(own.torch, own.device)
        # Check all devices first: an event recorded in a captured stream would become part of the graph.
        for link in links.values():
            link.refuse_capture(operation)
        self._links = {device: (link, link.ready()) for device, link in links.items()}
        self.devices: tuple[Any, ...] = tuple(links)

    def is_on_device(self, index: int) -> bool:
        """Whether the bytes of this number come from or go to a device."""
        return isinstance(self.movers.get(index), self._kind)

    def synchronize(self) -> None:
        """Wait until the devices have ended all requested work."""
        for link, _ in self._links.values():
            link.synchronize()

    def _sort(self, ranges: Iterable[Range]) -> tuple[dict[Any, list[Any]], list[Any], list[Any]]:
        """The jobs of each device, the jobs of the CPU, and temporary memory for the device jobs."""
        jobs: dict[Any, list[Any]] = {device: [] for device in self.devices}
        rest: list[Any] = []
        kept: list[Any] = []
        movers, kind = self.movers, self._kind
        for index, start, address, nbytes in ranges:
            mover: Any = movers[index]
            if isinstance(mover, kind):
                jobs[mover.device].append((mover, start, address, nbytes))
            elif isinstance(mover, Cast) and isinstance(mover.mover, kind):
                made: list[tuple[int, Any]] = []
                mover.convert(start, address, nbytes, lambda *each, made=made: made.append(each))
                jobs[mover.mover.device] += [
                    (mover.mover, at, _memory.address_of(data), len(data)) for at, data in made
                ]
                kept += made
            else:
                rest.append((mover, start, address, nbytes))
        return jobs, rest, kept

    def _ask(self, jobs: Mapping[Any, list[Any]], ask: Callable[..., _device.Transfer]) -> Copies:
        transfers: list[_device.Transfer] = []
        copies = Copies(self._operation, transfers)
        try:
            for device, (link, ready) in self._links.items():
                if jobs[device]:
                    transfers.append(ask(link, jobs[device], ready))
        except BaseException:
            # The copies of the earlier devices must have ended before the caller sees the error.
            with contextlib.suppress(Exception):
                copies.wait()
            raise
        return copies

    def _move(self, ranges: Iterable[Range], ask: Callable[..., _device.Transfer]) -> None:
        """Move ranges, and wait. The CPU moves the parts in host memory while the devices copy."""
        jobs, rest, _kept = self._sort(ranges)
        copies = self._ask(jobs, ask)
        try:
            for mover, start, address, nbytes in rest:
                mover(start, address, nbytes)
        finally:
            copies.wait()


class Sources(_Movers):
    """The sources of a save: tensors on devices, and tensors that are strided in host memory.

    Args:
        operation: the name of the operation, for errors.
        movers: by tensor number, for tensors without an address. The mapping is read at each call, and may be emptied
            when all copies have been requested.

    Attributes:
        devices: the ``torch.device`` objects that copies come from; empty if there are none.

    Raises:
        RuntimeError: the caller's current stream of a device is being captured into a CUDA graph.
    """

    def __init__(self, operation: str, movers: Mapping[int, Mover]) -> None:
        super().__init__(operation, movers, _device.Download)

    def fill(self, ranges: Iterable[Range]) -> None:
        """Copy ranges to host memory, and wait for the copies. The core's callback, for any thread.

        Raises:
            Exception: the failure; all copies have ended.
        """
        self._move(ranges, _device.download)

    def sum(self, index: int) -> int | None:
        """The CRC-64 of all bytes of a tensor, computed by its device; None if the device cannot.

        Any thread may call it.
        """
        mover: Any = self.movers[index]
        if not isinstance(mover, self._kind) or mover.flat is None or mover.flip is not None:
            return None
        if not _device_sums.is_exact(mover.torch, mover.device):
            return None
        link, ready = self._links[mover.device]
        return link.aside(ready, partial(_device_sums.of, mover.torch, mover.flat))

    def enqueue(self, ranges: Iterable[Range]) -> Copies:
        """Request copies of ranges from devices; they are in progress when this returns.

        It returns at once if the host memory is pinned, and waits for memory that is being pinned. Other memory is
        filled before it returns. Any thread may call it.

        The tensors are kept until the copies have been waited for, and their memory, even if it is freed earlier, is
        not reused before they have ended.

        Args:
            ranges: ranges of tensors on devices only.

        Raises:
            ValueError: a tensor is in host memory.
            RuntimeError: the memory of a tensor has been freed.
            Exception: a device refused; no copy is in progress.
        """
        jobs, rest, _ = self._sort(ranges)
        if rest:
            raise ValueError("a tensor in host memory cannot be copied from a device")
        return self._ask(jobs, partial(_device.download, outlives=True))


class Sinks(_Movers):
    """The destinations of a load: tensors on devices, and host memory that needs more than a plain copy.

    Args:
        operation: the name of the operation, for errors.
        movers: by request number, for requests without an address. They are read at each call.

    Attributes:
        devices: the ``torch.device`` objects that copies go to; empty when there are none.

    Raises:
        RuntimeError: the caller's current stream of a device is being captured into a CUDA graph.
    """

    def __init__(self, operation: str, movers: Mapping[int, Mover]) -> None:
        super().__init__(operation, movers, _device.Upload)

    def drain(self, ranges: Iterable[Range]) -> None:
        """Copy ranges from host memory to their destinations. The core's callback, for any thread.

        When this returns, the copies have ended: the memory may be reused, and every stream sees the results, because
        the host has waited for the copies.

        Raises:
            Exception: the failure; all copies have ended.
        """
        self._move(ranges, _device.upload)
