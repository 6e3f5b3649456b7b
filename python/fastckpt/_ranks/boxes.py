"""The parts of a tensor on one rank, as boxes, for a read by this rank only."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt import _core
from fastckpt._tensors import memory as _memory
from fastckpt._tensors.spread import part_of, pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt._api.destinations import Drain
    from fastckpt._tensors.movers import Range
    from fastckpt._tensors.spread import Ranges, Spread

    from .demands import Demand


class Boxed:
    """Demands as requests of ``_core.Reader.read``.

    Attributes:
        requests: the requests.
        drain: receives the bytes of requests without an address; None if there are none.
    """

    def __init__(
        self,
        demands: Sequence[Demand],
        stored: Sequence[_core.StoredTensor],
        spreads: Sequence[Spread],
        rank: int,
        drain: Drain,
    ) -> None:
        self.requests: list[_core.ReadRequest] = []
        self.drain: Drain | None = None
        self._drain = drain
        # By the number of a request: the number of its demand, and its offset in the memory of the demand. Then the
        # demands whose bytes are read into temporary memory, and drained afterwards.
        self._numbers: dict[int, tuple[int, int]] = {}
        self._later: list[tuple[int, Any]] = []
        for number, demand in enumerate(demands):
            if not demand.nbytes:
                continue
            tensor = stored[demand.tensor]
            shape = tensor.shape if tensor.logical is None else tensor.logical.shape
            spread = spreads[demand.spread - 1] if demand.spread else None
            if spread is not None and spread.boxes is not None:
                self._ask_boxes(number, demand, spread)
                continue
            ranges = None if spread is None else part_of(shape, spread, rank)
            if ranges is None or all(part == [(0, size)] for part, size in zip(ranges, shape, strict=True)):
                self._ask(number, demand, None)
            elif all(len(part) == 1 for part in ranges):
                self._ask(number, demand, [(part[0][0], part[0][1], 1) for part in ranges])
            else:
                self._ask_parts(number, demand, ranges, tensor.nbytes // math.prod(shape))

    def _ask_boxes(self, number: int, demand: Demand, spread: Spread) -> None:
        pieces = pieces_of(spread, demand.nbytes)
        for box, (start, stop) in zip(spread.boxes or (), pieces, strict=True):
            steps = demand.strides if len(pieces) == 1 else None
            own = demand._replace(address=demand.address and demand.address + start, nbytes=stop - start, strides=steps)
            self._ask(number, own, [(begin, end, 1) for begin, end in box], start)

    def _ask(self, number: int, demand: Demand, box: list[tuple[int, int, int]] | None, within: int = 0) -> None:
        if not demand.address:
            self._numbers[len(self.requests)] = number, within
            self.drain = self._take
        self.requests.append(
            _core.ReadRequest(demand.tensor, demand.address, demand.nbytes, box=box, strides=demand.strides)
        )

    def _take(self, ranges: Sequence[Range]) -> None:
        """The core's callback."""
        found = self._numbers
        self._drain(
            [(found[request][0], found[request][1] + start, at, nbytes) for request, start, at, nbytes in ranges]
        )

    def _ask_parts(self, number: int, demand: Demand, ranges: list[Ranges], itemsize: int) -> None:
        """Several boxes that are adjacent in the memory of the demand."""
        sizes = [sum(stop - start for start, stop in part) for part in ranges]
        address = demand.address
        if not address:
            held = np.empty(demand.nbytes, np.uint8)
            self._later.append((number, held))
            address = _memory.address_of(held)
        strides = demand.strides
        if strides is None:
            strides = [itemsize * math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        # If strides are negative, the address is not that of the first element.
        first = address + sum(-step * (size - 1) for step, size in zip(strides, sizes, strict=True) if step < 0)
        placed = [list(_placed(part)) for part in ranges]
        for box in itertools.product(*placed):
            begin = first + sum(at * step for (_, _, at), step in zip(box, strides, strict=True))
            reach = [(stop - start - 1) * step for (start, stop, _), step in zip(box, strides, strict=True)]
            low = begin + sum(step for step in reach if step < 0)
            high = begin + sum(step for step in reach if step > 0) + itemsize
            self.requests.append(
                _core.ReadRequest(
                    demand.tensor, low, high - low, box=[(start, stop, 1) for start, stop, _ in box], strides=strides
                )
            )

    def finish(self) -> None:
        """Finish after everything has been read."""
        if self._later:
            self._drain([(number, 0, _memory.address_of(held), held.nbytes) for number, held in self._later])
        self._later.clear()


def _placed(part: Ranges) -> list[tuple[int, int, int]]:
    """Ranges of a dimension, and their offsets in local memory."""
    out, at = [], 0
    for start, stop in part:
        out.append((start, stop, at))
        at += stop - start
    return out
