"""What moves the bytes of a state that are not in order in host memory: many ranges at a time, for the core.

:class:`Sources` brings them for a save, :class:`Sinks` takes them of a load. Both are made in the caller's thread, at
the call: what its streams were asked for until then is what a save finds, and what a load must not overtake.
"""

from __future__ import annotations

import contextlib
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeAlias

from . import device as _device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .memory import Mover

#: ``(index, start, address, nbytes)``: the bytes ``[start, start + nbytes)`` of tensor or request ``index``, and the
#: host memory that they are brought to or taken from.
Range: TypeAlias = "tuple[int, int, int, int]"


class Copies:
    """Copies that devices have been asked for.

    The memory on both sides must stay until they have ended: :meth:`wait` says so to the host, and
    :meth:`hold_streams` to streams of the devices.
    """

    def __init__(self, operation: str, transfers: list[_device.Transfer]) -> None:
        self._operation = operation
        self._transfers = transfers
        self._error: BaseException | None = None
        # The thread of a save and a step that waits for it may ask at the same time, and so may a signal handler.
        self._lock = RLock()

    def wait(self) -> None:
        """Wait in the host until all have ended and their bytes are as they are stored. The GIL is free meanwhile.

        Any thread may call it, more than once.

        Raises:
            Exception: the first error of any device, after the copies of all have ended.
        """
        with self._lock:
            while self._transfers:
                transfer = self._transfers[0]
                try:
                    transfer.wait()
                except Exception as error:  # noqa: BLE001 - raised below
                    self._error = self._error or error
                self._transfers.remove(transfer)
            if self._error is not None:
                raise self._error

    def hold_streams(self) -> None:
        """Have the current streams of the calling thread wait for the copies; the host does not wait.

        What these streams are asked for from now on may change the tensors. Does nothing once :meth:`wait` has
        returned.

        Raises:
            RuntimeError: such a stream is being captured into a CUDA graph. No stream has been held.
        """
        transfers = [transfer for transfer in tuple(self._transfers) if transfer.event is not None]
        for transfer in transfers:
            transfer.link.refuse_capture(self._operation)
        for transfer in transfers:
            transfer.link.hold(transfer.event)

    def is_done(self) -> bool:
        """Whether the devices have ended all copies. :meth:`wait` may still have something to do, or to raise.

        Not to be asked while a stream is captured into a CUDA graph: that would end the capture with an error.
        """
        return all(transfer.is_done() for transfer in tuple(self._transfers))


class _Movers:
    """What is common to both directions.

    Args:
        operation: the name of the operation, for errors.
        movers: by number.
        kind: the class of those of devices.
        ask: asks one device for copies.

    Attributes:
        devices: the ``torch.device`` objects of the movers; empty when there are none.
    """

    def __init__(
        self, operation: str, movers: Mapping[int, Mover], kind: type[Any], ask: Callable[..., _device.Transfer]
    ) -> None:
        self.operation = operation
        self._movers = movers
        self._kind = kind
        self._ask_one = ask
        links: dict[Any, _device.Link] = {}
        for mover in movers.values():
            own: Any = getattr(mover, "mover", mover)  # of a Cast, what takes its elements
            if isinstance(own, kind) and own.device not in links:
                links[own.device] = _device.Link(own.torch, own.device)
        # All of them first: an event recorded in a captured stream would become part of the graph.
        for link in links.values():
            link.refuse_capture(operation)
        self._links = {device: (link, link.ready()) for device, link in links.items()}
        self.devices: tuple[Any, ...] = tuple(links)

    def is_on_device(self, index: int) -> bool:
        """Whether the bytes of that number come from or go to a device."""
        return isinstance(self._movers.get(index), self._kind)

    def _sort(self, ranges: Iterable[Range]) -> tuple[dict[Any, list[Any]], list[Any]]:
        """The jobs of each device, and those of the processor."""
        jobs: dict[Any, list[Any]] = {}
        rest: list[Any] = []
        movers, kind = self._movers, self._kind
        for index, start, address, nbytes in ranges:
            mover: Any = movers[index]
            if isinstance(mover, kind):
                jobs.setdefault(mover.device, []).append((mover, start, address, nbytes))
            else:
                rest.append((mover, start, address, nbytes))
        return jobs, rest

    def _ask(self, jobs: Mapping[Any, list[Any]]) -> Copies:
        transfers: list[_device.Transfer] = []
        copies = Copies(self.operation, transfers)
        try:
            for device, wanted in jobs.items():
                link, ready = self._links[device]
                transfers.append(self._ask_one(link, wanted, ready))
        except BaseException:
            # Those of the devices before it must have ended when the caller hears of it.
            with contextlib.suppress(Exception):
                copies.wait()
            raise
        return copies

    def _move(self, ranges: Iterable[Range]) -> None:
        """Move ranges, and wait. The processor moves what is in host memory while the devices copy."""
        jobs, rest = self._sort(ranges)
        copies = self._ask(jobs)
        try:
            for mover, start, address, nbytes in rest:
                mover(start, address, nbytes)
        finally:
            copies.wait()


class Sources(_Movers):
    """What a save copies from: tensors on devices, and tensors that are strided in host memory.

    Args:
        operation: the name of the operation, for errors.
        movers: by tensor number, for tensors without an address. They are read at each call, and may be emptied when
            all copies have been asked for.

    Attributes:
        devices: the ``torch.device`` objects that copies come from; empty when there are none.

    Raises:
        RuntimeError: the caller's current stream of a device is being captured into a CUDA graph.
    """

    def __init__(self, operation: str, movers: Mapping[int, Mover]) -> None:
        super().__init__(operation, movers, _device.Download, _device.download)

    def fill(self, ranges: Iterable[Range]) -> None:
        """Bring ranges to host memory; they are there when this returns. The core's callback, for any thread.

        Raises:
            Exception: what failed; all copies have ended.
        """
        self._move(ranges)

    def enqueue(self, ranges: Iterable[Range]) -> Copies:
        """Ask devices for copies of ranges; they are under way when this returns.

        It returns at once where the host memory is pinned, and waits for memory that is being pinned. Other memory is
        filled before it returns. Any thread may call it.

        Args:
            ranges: of tensors on devices alone.

        Raises:
            ValueError: a tensor is in host memory.
            Exception: what a device refused; nothing is under way then.
        """
        jobs, rest = self._sort(ranges)
        if rest:
            raise ValueError("a tensor in host memory comes from no device")
        return self._ask(jobs)


class Sinks(_Movers):
    """What a load copies to: tensors on devices, and host memory that takes more than a copy.

    Args:
        operation: the name of the operation, for errors.
        movers: by request number, for requests without an address. They are read at each call.

    Attributes:
        devices: the ``torch.device`` objects that copies go to; empty when there are none.

    Raises:
        RuntimeError: the caller's current stream of a device is being captured into a CUDA graph.
    """

    def __init__(self, operation: str, movers: Mapping[int, Mover]) -> None:
        super().__init__(operation, movers, _device.Upload, _device.upload)

    def drain(self, ranges: Iterable[Range]) -> None:
        """Bring ranges from host memory to where they belong. The core's callback, for any thread.

        When it returns they are there: the memory may be used again, and every stream sees them, as the host has
        waited for the copies.

        Raises:
            Exception: what failed; all copies have ended.
        """
        self._move(ranges)
