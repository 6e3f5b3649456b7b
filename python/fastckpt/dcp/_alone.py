"""A save of one process alone: tensors of which it has all boxes."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt._api import in_flight
from fastckpt._api.single_process import SingleProcess
from fastckpt._api.write import Agreed
from fastckpt._files import TORCH_METADATA
from fastckpt._tensors import memory as _memory
from fastckpt._tensors.described import Tensor
from fastckpt._tensors.movers import Sources
from fastckpt.exceptions import CheckpointError

from ._metadata import torch_metadata
from ._take import take
from ._unite import memories_of, unite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastckpt._api.save_request import SaveRequest
    from fastckpt._state.registry import Types
    from fastckpt._tensors.memory import Bytes, Mover
    from fastckpt._tensors.movers import Range
    from fastckpt._tensors.pieces import Index

    from . import _torch
    from ._unite import United
    from ._values import Box, Memory


class Alone(SingleProcess):
    """This process alone, with a plan.

    Args:
        plan: what it saves.
        planner: knows the tensors.
        types: the types with names that are known.
    """

    def __init__(self, plan: _torch.SavePlan, planner: _torch.SavePlanner, types: Types) -> None:
        self._plan, self._planner, self._types = plan, planner, types

    def agree(self, request: SaveRequest) -> Agreed:
        """Resolve the plan.

        Raises:
            CheckpointError: a part of a tensor is in no box.
            RuntimeError: the caller's current stream of a device that has a box is being captured into a graph.
            UnsupportedTypeError: something cannot be stored; the message names it.
            ValueError: the plan does not fit together, or ``model_key`` leads to no mapping.
        """
        taken = take(self._plan, self._planner, self._types)
        request.flat.keep.append(taken)
        united = unite([taken.table()], request.settings.model_key)
        tensors, movers = whole(united, memories_of(taken, united))
        sources = Sources(request.operation, movers)
        in_flight.wait_for_paths(request.path)
        return Agreed(
            prefix=united.prefix,
            files=[(TORCH_METADATA, torch_metadata(united.entries))],
            tensors=tensors,
            structure=united.structure,
            metadata=request.metadata.structure(),
            fill=sources.fill if movers else None,
            devices=sources.devices,
            pulled=sum(tensors[index].capacity for index in movers),
        )


def whole(united: United, memories: Mapping[int, Sequence[Memory]]) -> tuple[list[Tensor], dict[int, Mover]]:
    """What ``_core.save`` takes: each tensor with its address, or with what brings its bytes.

    Args:
        united: the table of this process.
        memories: by tensor number, its boxes in the memory of this process.

    Raises:
        CheckpointError: a part of a tensor is in no box.
        RuntimeError: the caller's current stream of a device that has a box is being captured into a graph.
    """
    tensors: list[Tensor] = []
    movers: dict[int, Mover] = {}
    fetch = _Fetch()
    for number, (name, dtype, shape, logical) in enumerate(united.tensors):
        sizes = shape if logical is None else logical[1]
        mine = memories[number]
        alone = next((memory for memory in mine if _covers(memory, sizes)), None)
        if alone is not None:
            tensors.append(Tensor(name, dtype, shape, alone.address, alone.nbytes, logical))
            if alone.mover is not None:
                movers[number] = alone.mover
            continue
        held = sum(_elements(memory) for memory in mine)
        if held < prod(sizes):
            raise CheckpointError(
                f"dcp.save: {name!r} of the sizes {list(sizes)} is not here as a whole ({held} of {prod(sizes)} "
                "elements), and this save is of one process alone: call dcp.save on all ranks, without no_dist=True"
            )
        itemsize = sum(memory.nbytes for memory in mine) // held
        parts = [(memory.box, fetch.array(memory, itemsize)) for memory in mine if _elements(memory)]
        movers[number] = _assembler(tuple(sizes), itemsize, parts)
        tensors.append(Tensor(name, dtype, shape, 0, prod(sizes) * itemsize, logical))
    fetch.bring()
    return tensors, movers


def _covers(memory: Memory, sizes: Sequence[int]) -> bool:
    return all(start == 0 and stop == size for (start, stop), size in zip(memory.box, sizes, strict=True))


def _elements(memory: Memory) -> int:
    return prod(stop - start for start, stop in memory.box)


def _assembler(sizes: tuple[int, ...], itemsize: int, parts: Sequence[tuple[Box, Any]]) -> Mover:
    """Brings ranges of a tensor from its boxes, none of which overlaps another."""

    def copy(index: Index, contiguous: Bytes) -> None:
        ranges = [_range(step, size) for step, size in zip((*index, *_rest(index, sizes)), sizes, strict=True)]
        target = contiguous.view(f"V{itemsize}").reshape([stop - start for start, stop in ranges])
        for box, array in parts:
            shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(ranges, box, strict=True)]
            if all(start < stop for start, stop in shared):
                to = tuple(slice(a - begin, b - begin) for (a, b), (begin, _) in zip(shared, ranges, strict=True))
                source = tuple(slice(a - begin, b - begin) for (a, b), (begin, _) in zip(shared, box, strict=True))
                np.copyto(target[to], array[source])

    return partial(_memory.copy_out, sizes, itemsize, copy)


def _rest(index: Index, sizes: Sequence[int]) -> list[slice]:
    return [slice(0, size) for size in sizes[len(index) :]]


def _range(step: Any, size: int) -> tuple[int, int]:
    if isinstance(step, slice):
        start, stop, _ = step.indices(size)
        return start, stop
    return int(step), int(step) + 1


class _Fetch:
    """Boxes that are not in order in host memory, copied there: all that a device has at once."""

    def __init__(self) -> None:
        self._movers: dict[int, Mover] = {}
        self._ranges: list[Range] = []

    def array(self, memory: Memory, itemsize: int) -> Any:
        """A box as an array of opaque elements; one that is copied has them after :meth:`bring`."""
        if memory.mover is None:
            data = _memory.at(memory.address, memory.nbytes, memory.keep)
        else:
            data = np.empty(memory.nbytes, np.uint8)
            self._ranges.append((len(self._movers), 0, _memory.address_of(data), data.nbytes))
            self._movers[len(self._movers)] = memory.mover
        return data.view(f"V{itemsize}").reshape([stop - start for start, stop in memory.box])

    def bring(self) -> None:
        """Copy them."""
        Sources("dcp.save", self._movers).fill(self._ranges)
