"""A save of one process alone: tensors of which it has all boxes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fastckpt._api import in_flight
from fastckpt._api.single_process import SingleProcess
from fastckpt._files import TORCH_METADATA
from fastckpt._tensors import memory as _memory
from fastckpt._tensors.movers import Sources
from fastckpt.exceptions import CheckpointError

from . import _torch
from ._agreed import Boxes, Known, combine_cuts, combine_told, decide_cuts, decide_told
from ._brought import Boxed, Brought
from ._metadata import torch_metadata
from ._structure import finish

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastckpt._api.save_request import SaveRequest
    from fastckpt._api.write import Agreed
    from fastckpt._state.registry import Types
    from fastckpt._tensors.described import Tensor
    from fastckpt._tensors.memory import Bytes, Mover
    from fastckpt._tensors.movers import Range
    from fastckpt._tensors.pieces import Index

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
        brought = Brought(self._plan, self._planner, self._types, [_torch.global_rank()], 0)
        values: dict[str, str] = {}
        known = Known(decide_told(combine_told([brought.told()]), request.settings.model_key, values))
        boxes = Boxes(decide_cuts(combine_cuts([brought.cuts(known)]), lambda: None))
        brought.fill(request, known, boxes, alone=True)
        flat = request.flat
        cut = {index: kept for index, kept in enumerate(flat.keep) if type(kept) is Boxed}
        tensors, movers = whole(
            {index: flat.tensors[index] for index in cut}, {index: one.memories for index, one in cut.items()}
        )
        flat.movers.update(movers)
        for index, tensor in tensors.items():
            flat.tensors[index] = tensor
        request.sources = Sources(request.operation, flat.movers)
        in_flight.wait_for_paths(request.path)
        agreed = super().agree(request)
        structure, entries = finish(agreed.structure, values, agreed.tensors)
        return replace(agreed, structure=structure, files=[(TORCH_METADATA, torch_metadata(entries))])


def whole(
    tensors: Mapping[int, Tensor], memories: Mapping[int, Sequence[Memory]]
) -> tuple[dict[int, Tensor], dict[int, Mover]]:
    """What ``_core.save`` takes: each tensor with its address, or with what brings its bytes.

    Args:
        tensors: by number, those of which this process has boxes.
        memories: by number, the boxes in the memory of this process.

    Raises:
        CheckpointError: a part of a tensor is in no box.
        RuntimeError: the caller's current stream of a device that has a box is being captured into a graph.
    """
    found: dict[int, Tensor] = {}
    movers: dict[int, Mover] = {}
    fetch = _Fetch()
    for number, tensor in tensors.items():
        sizes = tensor.shape if tensor.logical is None else tensor.logical[1]
        mine = memories[number]
        alone = next((memory for memory in mine if _covers(memory, sizes)), None)
        if alone is not None:
            found[number] = tensor._replace(address=alone.address, capacity=alone.nbytes)
            if alone.mover is not None:
                movers[number] = alone.mover
            continue
        held = sum(_elements(memory) for memory in mine)
        if held < prod(sizes):
            raise CheckpointError(
                f"dcp.save: {tensor.name!r} of the sizes {list(sizes)} is not here as a whole ({held} of {prod(sizes)} "
                "elements), and this save is of one process alone: call dcp.save on all ranks, without no_dist=True"
            )
        itemsize = sum(memory.nbytes for memory in mine) // held
        parts = [(memory.box, fetch.array(memory, itemsize)) for memory in mine if _elements(memory)]
        movers[number] = _assembler(tuple(sizes), itemsize, parts)
        found[number] = tensor._replace(address=0, capacity=prod(sizes) * itemsize)
    fetch.bring()
    return found, movers


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
