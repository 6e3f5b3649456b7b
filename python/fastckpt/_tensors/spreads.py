"""Describes tensors that are spread over ranks, if the state has any."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .described import Describe
    from .dtensor import DTensors
    from .spread import Spread


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
        # If the module was not imported, there are no DTensors.
        if "torch.distributed.tensor" not in sys.modules:
            return None
        if self._known is None:
            from .dtensor import DTensors  # noqa: PLC0415 - imports torch

            self._known = DTensors({number: rank for rank, number in enumerate(self.ranks)}, self._rank, self.found)
        return self._known.describe_of(kind)
