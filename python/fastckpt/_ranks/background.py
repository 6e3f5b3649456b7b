"""Asynchronous saves of all ranks: each copies what it holds to host memory, and the rest happens in the background."""

# ruff: noqa: SLF001 - a handle and the job behind it are one thing in two parts, one for each side

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate
from typing import TYPE_CHECKING

from fastckpt import _core
from fastckpt._api import in_flight
from fastckpt._api.build_report import build_report, with_warnings
from fastckpt._api.progress import ticker
from fastckpt._api.rank_reports import RankSaveReport
from fastckpt._background.background_save import BackgroundSave
from fastckpt._background.devices import Devices
from fastckpt._tensors.ranges import range_of

from .save import save_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastckpt._background.pending import PendingSave
    from fastckpt._state.flatten import Flat
    from fastckpt._tensors.memory import Mover

    from .calls import Call
    from .save import Order, Written

#: Tensors begin at such addresses in the snapshot: what the processor copies fastest.
_ALIGNED = 64
#: Bytes that one thread copies at a time.
_PIECE = 32 << 20
#: More threads than this do not copy faster.
_MOST_THREADS = 4


class Job(BackgroundSave):
    """What an asynchronous save of this rank does between the call and the durable checkpoint."""

    def __init__(self, pending: PendingSave, call: Call, order: Order, *, pin: int | None) -> None:
        super().__init__(pending)
        self.call = call
        self.order = order
        self.waited = 0.0
        self.staging = 0.0
        #: For the live counters, from the moment at which the copy begins.
        self.operation: _core.Operation | None = None
        # All that this rank holds, with one number each.
        movers: dict[int, Mover] = {}
        first = 0
        for flat in self._flats():
            movers |= {first + index: mover for index, mover in flat.movers.items()}
            first += len(flat.tensors)
        self.movers = movers
        self.devices = Devices("save_async", movers, pin)
        pending._total = sum(tensor.capacity for flat in self._flats() for tensor in flat.tensors)

    def _flats(self) -> Iterator[Flat]:
        local = self.order.local
        yield local.flat
        if local.extra is not None:
            yield local.extra

    def stage(self) -> None:
        """Copy what this rank holds to memory of our own; then the caller's may change."""
        began = time.perf_counter()
        self.operation = self.order.operation = _core.Operation(
            self.pending.path,
            self.pending._total,
            step=self.order.step,
            elapsed=began - self.pending._began,
        )
        with range_of("fastckpt.stage"):
            sizes = [
                # Without gaps between them, small tensors of a device share a copy.
                tensor.capacity if self.devices.is_on_device(number) else -(-tensor.capacity // _ALIGNED) * _ALIGNED
                for number, tensor in enumerate(tensor for flat in self._flats() for tensor in flat.tensors)
            ]
            places = list(accumulate(sizes, initial=self.devices.take(sum(sizes)).core.address))
            self.devices.pin()
            self._copy(places, is_pinned=self.devices.is_pinned)
            number = iter(places)
            for flat in self._flats():
                flat.tensors[:] = [tensor._replace(address=next(number)) for tensor in flat.tensors]
                flat.movers.clear()
            self.movers.clear()
            self.order.local.clear()
        self.staging = time.perf_counter() - began
        self.operation.plan()

    def _copy(self, places: list[int], *, is_pinned: bool) -> None:
        """Copy everything to its place, devices and host at the same time where the memory is pinned."""
        tensors = [tensor for flat in self._flats() for tensor in flat.tensors]
        is_on_device = self.devices.is_on_device
        afar = [(index, 0, places[index], tensors[index].capacity) for index in self.movers if is_on_device(index)]
        if is_pinned:
            self.devices.ask(afar)
        pieces = []
        for index, (tensor, place) in enumerate(zip(tensors, places, strict=False)):
            mover = self.movers.get(index)
            if mover is None:
                pieces += _cut(place, tensor.address, tensor.capacity)
            elif not is_on_device(index):
                mover(0, place, tensor.capacity)
                self._arrived(tensor.capacity)
        for nbytes in _copy(pieces):
            self._arrived(nbytes)
        if not is_pinned:
            self.devices.ask(afar)
        self.devices.wait(self._arrived)

    def _arrived(self, nbytes: int) -> None:
        self.pending._copied += nbytes
        if self.operation is not None:
            self.operation.staged(self.pending._copied)

    def save(self) -> BaseException | None:
        """Agree with the other ranks, and write."""
        pending = self.pending
        error: BaseException | None = None
        try:
            with self.call.operation as operation, ExitStack() as stack:
                bar = (
                    stack.enter_context(ticker("save", pending.path, shown=True))
                    if self.order.settings.progress
                    else None
                )

                def tick(done: int, total: int) -> None:
                    pending._tick(done)
                    if bar is not None:
                        bar(done, total)

                tick(0, 0)
                written = save_order(
                    self.call.session,
                    operation,
                    pending.path,
                    self.order,
                    began=pending._began,
                    timeout=self.call.timeout,
                    tick=tick,
                )
                pending._report = self._report(written)
        except BaseException as caught:  # noqa: BLE001 - `result` raises it
            error = caught
        finally:
            self.release(error)
        # Where the checkpoint is there, so is the report, whatever the end of the operation was.
        return error if pending._report is None else None

    def _report(self, written: Written) -> RankSaveReport:
        pending = self.pending
        pending._written = written.own["bytes"]
        return build_report(
            RankSaveReport,
            pending.path,
            pending._began,
            with_warnings(written.own, self.devices.warnings),
            beside={"wait": self.waited, "stage": self.staging, **written.beside},
            step=self.order.step,
            stall=time.perf_counter() - pending._began if self.inline else pending._stall(),
            staging=self.staging,
            staged=pending._total,
        )

    def release(self, error: BaseException | None) -> None:
        """Give the memory back, once nothing is copied to it any more; ``error`` is why the save failed, if it did."""
        if self.operation is not None and error is not None:
            self.operation.fail(error.errno if isinstance(error, OSError) else None)
        self.devices.give_back()
        self.order.local.clear()


def start(job: Job) -> None:
    """Wait for earlier saves, copy, and start the thread that writes.

    What it raises has been told to the other ranks.
    """
    pending = job.pending
    try:
        began = time.perf_counter()
        in_flight.admit(pending, 1)
        job.waited = time.perf_counter() - began
        job.stage()
        pending._set_staged()
        pending._called += time.perf_counter() - pending._began
        if job.start():
            return
    except BaseException as error:
        # A signal handler may have raised it while the thread starts, which then goes on.
        if not job.claim.take():
            raise
        job.release(error)
        pending._abandon(error)
        with job.call.operation:
            raise
    job.run_here()


def _cut(to: int, address: int, nbytes: int) -> list[tuple[int, int, int]]:
    """One copy as pieces."""
    return [(to + at, address + at, min(_PIECE, nbytes - at)) for at in range(0, nbytes, _PIECE)]


def _copy(pieces: list[tuple[int, int, int]]) -> Iterator[int]:
    """Copy memory to memory, and yield the bytes of each piece: ``memmove`` releases the GIL."""
    total = sum(nbytes for _, _, nbytes in pieces)
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if total < 2 * _PIECE or threads == 1:
        for piece in pieces:
            ctypes.memmove(*piece)
            yield piece[2]
        return
    with ThreadPoolExecutor(threads, "fastckpt-stage") as pool:
        for piece, _ in zip(pieces, pool.map(lambda piece: ctypes.memmove(*piece), pieces), strict=True):
            yield piece[2]
