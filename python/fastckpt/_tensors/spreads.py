"""Describes tensors that are spread over ranks, if the state has any."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any

from .described import OwnPart, Stored, Unsupported
from .rank_part import Part
from .spread import Spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .described import Describe
    from .dtensor import DTensors
    from .spread import Box


class Spreads:
    """Describes the tensors of a state that are spread over ranks.

    Args:
        ranks: the global ranks of the group, in its order.
        rank: this rank in the group.
        device_numbers: whether tokens of tensors on devices have the index of the device, which differs by rank.

    Attributes:
        ranks: the argument of this name.
        device_numbers: the argument of this name.
        found: the different spreads of the tensors so far; their numbers begin at 1.
    """

    def __init__(self, ranks: Sequence[int], rank: int, *, device_numbers: bool = False) -> None:
        self.found: list[Spread] = []
        self.ranks = ranks
        self.device_numbers = device_numbers
        self._rank = rank
        self._known: DTensors | None = None
        #: Parts without elements, kept so that no later object gets their identity.
        self._empty: list[object] = []

    def describe_of(self, kind: type) -> Describe | None:
        """The function that describes a type of these tensors; None for any other type."""
        if issubclass(kind, Part):
            return lambda part: self._describe_part(part, part)
        if kind.__name__ == "ShardedTensor" and kind.__module__.startswith("torch."):
            return self._describe_sharded
        # If the module was not imported, there are no DTensors.
        if "torch.distributed.tensor" not in sys.modules:
            return None
        if self._known is None:
            from .dtensor import DTensors  # noqa: PLC0415 - imports torch

            self._known = DTensors({number: rank for rank, number in enumerate(self.ranks)}, self._rank, self.found)
        return self._known.describe_of(kind)

    def _describe_sharded(self, value: Any) -> Stored:
        from .dtensor import part_of_sharded  # noqa: PLC0415 - imports torch

        return self._describe_part(part_of_sharded(value), value)

    def _describe_part(self, value: Part, owner: object) -> Stored:
        from . import torch as _torch  # noqa: PLC0415 - imports torch

        local, boxes = value.tensor, value.boxes
        describe = _torch.describe_of(type(local))
        stored = None if describe is None else describe(local)
        if type(stored) is not Stored:
            raise Unsupported(
                f"the tensor of a Part must be plain and dense, with memory for each element: {_kind(local)}"
            )
        if not _is_laid_out(local, boxes):
            raise Unsupported(f"the shape or the strides of its tensor have changed since {value!r} was made of it")
        # Each Part has its own spread: other ranks have other boxes, but must use the same numbers.
        self.found.append(Spread((self._rank,) * len(boxes), boxes=boxes))
        if boxes:
            storage = local.untyped_storage()._cdata  # noqa: SLF001 - the storage of a state is alive as long as it is
            tie: Any = (storage, local.storage_offset(), local.dtype, local.stride(), value.shape, boxes)
        else:
            # An empty Part has no memory that would distinguish it from another.
            self._empty.append(owner)
            tie = id(owner)
        logical = stored.logical
        return stored._replace(
            tie=(Part, tie),
            shape=value.shape if logical is None else (prod(value.shape) * local.itemsize,),
            logical=None if logical is None else (logical[0], value.shape),
            local=OwnPart(len(self.found), local, local.nbytes),
        )


def _is_laid_out(local: Any, boxes: Sequence[Box]) -> bool:
    """Whether a tensor has the shape of a box, or these boxes one after another."""
    sizes = [tuple(end - begin for begin, end in box) for box in boxes]
    if len(sizes) == 1 and tuple(local.shape) == sizes[0]:
        return True
    flat = local.ndim == 1 and local.is_contiguous()
    return local.numel() == sum(map(prod, sizes)) and (flat or not sizes)


def _kind(value: Any) -> str:
    layout = str(getattr(value, "layout", ""))
    return f"it is a {type(value).__name__}" + (f" of layout {layout}" if layout not in {"", "torch.strided"} else "")


def refuse_part(_: Part) -> Stored:
    """Refuse a Part in a save or load of one process."""
    raise Unsupported(
        "a Part belongs in the state of fastckpt.distributed.save, or in into= of its load, which all ranks call"
    )
