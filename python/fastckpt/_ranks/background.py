"""Asynchronous saves of all ranks: each copies what it holds to host memory, and the rest happens in the background."""

# ruff: noqa: SLF001 - a handle and the job behind it are one thing in two parts, one for each side

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING

from fastckpt._background.background_save import BackgroundSave

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastckpt._api.save_request import SaveRequest
    from fastckpt._background.pending import PendingSave

    from .peers import Operation
    from .process_group import ProcessGroup

#: Tensors begin at such addresses in the snapshot: what the processor copies fastest.
_ALIGNED = 64
#: Bytes that one thread copies at a time.
_PIECE = 32 << 20
#: More threads than this do not copy faster.
_MOST_THREADS = 4


class Job(BackgroundSave):
    """What an asynchronous save of this rank does between the call and the durable checkpoint."""

    group: ProcessGroup

    def __init__(self, pending: PendingSave, request: SaveRequest, group: ProcessGroup, pin: int | None) -> None:
        super().__init__(pending, request, pin)
        self.group = group
        pending._total = sum(tensor.capacity for flat in request.parts for tensor in flat.tensors)

    def turn(self) -> Operation:
        """That among the operations of the group."""
        return self.group.operation

    def prepare(self) -> None:
        """Copy what this rank holds to memory of our own; then the caller's may change."""
        request, devices = self.request, self.devices
        with self.copying():
            sizes = [
                # Without gaps between them, small tensors of a device share a copy.
                tensor.capacity if devices.is_on_device(number) else -(-tensor.capacity // _ALIGNED) * _ALIGNED
                for number, tensor in enumerate(tensor for flat in request.parts for tensor in flat.tensors)
            ]
            places = list(accumulate(sizes, initial=devices.take(sum(sizes)).core.address))
            devices.pin()
            self._copy(places, is_pinned=devices.is_pinned)
            number = iter(places)
            for flat in request.parts:
                flat.tensors[:] = [tensor._replace(address=next(number)) for tensor in flat.tensors]
            request.close()

    def _copy(self, places: list[int], *, is_pinned: bool) -> None:
        """Copy everything to its place, devices and host at the same time where the memory is pinned."""
        tensors = [tensor for flat in self.request.parts for tensor in flat.tensors]
        is_on_device = self.devices.is_on_device
        afar = [
            (index, 0, places[index], tensors[index].capacity) for index in self.request.movers if is_on_device(index)
        ]
        if is_pinned:
            self.devices.ask(afar)
        pieces = []
        for index, (tensor, place) in enumerate(zip(tensors, places, strict=False)):
            mover = self.request.movers.get(index)
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
        if self.request.counters is not None:
            self.request.counters.staged(self.pending._copied)


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
