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


class Spreads:
    """Describes the tensors of a state that are spread over ranks.

    Args:
        ranks: the global ranks of the group, in its order.
        rank: this rank in the group.
        device_numbers: whether tokens of tensors on devices have the index of the device, which each rank has another.

    Attributes:
        ranks: as given.
        device_numbers: as given.
        found: the different spreads of the tensors so far; their numbers begin at 1.
    """

    def __init__(self, ranks: Sequence[int], rank: int, *, device_numbers: bool = False) -> None:
        self.found: list[Spread] = []
        self.ranks = ranks
        self.device_numbers = device_numbers
        self._rank = rank
        self._known: DTensors | None = None

    def describe_of(self, kind: type) -> Describe | None:
        """How to describe a type of such tensors; None for any other type."""
        if kind is Part:
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

        local = value.tensor
        describe = _torch.describe_of(type(local))
        stored = None if describe is None else describe(local)
        if type(stored) is not Stored:
            what = getattr(local, "layout", None) if describe is not None else type(local).__name__
            raise Unsupported(f"the tensor of a Part must be a dense torch.Tensor, not {what}")
        if sum(prod(end - begin for begin, end in box) for box in value.boxes) != local.numel():
            raise Unsupported(f"its tensor has another size than when {value!r} was made of it")
        # One for each: other ranks have other boxes, and their numbers must be the same.
        self.found.append(Spread((self._rank,) * len(value.boxes), boxes=value.boxes))
        logical = stored.logical
        return stored._replace(
            # Empty ones have no memory by which they could be told apart.
            tie=(Part, id(owner)),
            shape=value.shape if logical is None else (prod(value.shape) * local.itemsize,),
            logical=None if logical is None else (logical[0], value.shape),
            local=OwnPart(len(self.found), local, local.nbytes),
        )


def refuse_part(_: Part) -> Stored:
    """Describe a part where no ranks are."""
    raise Unsupported("it is a Part: fastckpt.distributed.save and load, called by all ranks, take it")
