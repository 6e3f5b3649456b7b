"""A tensor that torch.distributed.checkpoint saves in boxes, as tensors of other libraries are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Boxes(torch.Tensor):
    """A placeholder for the boxes of a whole tensor, without their bytes."""

    boxes: dict[torch.Size, torch.Tensor]

    def __create_write_items__(self, key: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(key, begin),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(begin, box.shape), properties, self.shape),
            )
            for begin, box in self.boxes.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.boxes[index.offset]


def cut(
    whole: torch.Tensor,
    *lines: Sequence[int],
    keep: Callable[[int], bool] = lambda _: True,
    place: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, box: box,
) -> Boxes:
    """A tensor in boxes: the cuts of each dimension, the numbers of the existing boxes, and the place of each box."""
    sides = [itertools.pairwise([0, *at, size]) for at, size in itertools.zip_longest(lines, whole.shape, fillvalue=())]
    made = torch.empty_like(whole).as_subclass(Boxes)
    made.boxes = {
        torch.Size([start for start, _ in box]): place(number, whole[tuple(itertools.starmap(slice, box))])
        for number, box in enumerate(itertools.product(*sides))
        if keep(number)
    }
    return made
