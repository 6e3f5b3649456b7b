"""The bytes that each rank writes and reads back: tensor, pipeline, data and expert parallelism, and ZeRO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sizing import Contents

ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Share:
    """A group of GPUs that write equally many bytes each.

    Attributes:
        gpus: their number.
        bytes: the bytes that each of them writes.
    """

    gpus: int
    bytes: float


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is split over GPUs.

    Attributes:
        tp: tensor parallelism.
        pp: pipeline parallelism.
        dp: data parallelism.
        ep: expert parallelism, a part and divisor of data parallelism.
        zero: ZeRO stage; 3 is PyTorch's FSDP.
    """

    tp: int
    pp: int
    dp: int
    ep: int
    zero: int

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.tp * self.pp * self.dp

    @property
    def replica(self) -> int:
        """GPUs of one data-parallel replica, which together hold the model once."""
        return self.tp * self.pp

    def shares(self, held: Contents) -> tuple[Share, ...]:
        """The bytes that each rank writes, the busiest first; together exactly one checkpoint.

        Only one data-parallel replica must be written, because all hold the same. Experts are spread over ``ep`` ranks
        of data parallelism, so that many ranks write them. ZeRO 1 and 2 cut the optimizer state over all data-parallel
        ranks, each of which then writes its piece; ZeRO 3 cuts the weights, too. Tensor and pipeline parallelism are
        assumed to cut evenly.

        Source: Megatron-LM (3072 GPUs with data parallelism 6 have 512 writers) and DeepSpeed's ZeRO, as MLPerf Storage
        v2.0 writes it.

        Args:
            held: the contents of the checkpoint.
        """
        if self.zero == 3:  # noqa: PLR2004 - ZeRO's stage
            return (Share(self.gpus, (held.weights + held.optimizer) / self.gpus),)
        dense = held.weights - held.expert_weights
        experts = held.expert_weights
        everywhere = held.optimizer / self.gpus
        if self.zero == 0:
            dense += held.optimizer - held.expert_optimizer
            experts += held.expert_optimizer
            everywhere = 0.0
        expert = experts / (self.replica * self.ep)
        groups = [
            Share(self.replica, dense / self.replica + expert + everywhere),
            Share(self.replica * (self.ep - 1), expert + everywhere),
            Share(self.replica * (self.dp - self.ep), everywhere),
        ]
        return tuple(group for group in groups if group.gpus and group.bytes)

    def bytes_to_restore(self, held: Contents) -> float:
        """Bytes that all GPUs together read to start again.

        A restore reads more than was written: every data-parallel replica reads its whole state.

        Source: Megatron-LM's example: 6 replicas that read at 273 GB/s each need 1638 GB/s.

        Args:
            held: the contents of the checkpoint.
        """
        if self.zero == 3:  # noqa: PLR2004 - ZeRO's stage
            return held.weights + held.optimizer
        copies = self.dp // self.ep
        weights = self.dp * (held.weights - held.expert_weights) + copies * held.expert_weights
        if self.zero:
            return weights + held.optimizer
        return weights + self.dp * (held.optimizer - held.expert_optimizer) + copies * held.expert_optimizer


def layout(
    gpus: int | None = None,
    *,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    ep: int = 1,
    zero: int | None = None,
) -> Layout:
    """Fill in the missing parts of a layout, and refuse impossible ones.

    Args:
        gpus: all GPUs; by default ``tp * pp * dp``.
        tp: tensor parallelism, by default 1.
        pp: pipeline parallelism, by default 1.
        dp: data parallelism, by default the remaining factor of the GPUs.
        ep: expert parallelism.
        zero: ZeRO stage; by default 0 if tensor or pipeline parallelism cut the model, else 3, because no single GPU
            holds a large model.

    Raises:
        TypeError: a number is not an integer.
        ValueError: the numbers do not fit together.
    """
    check(gpus=gpus, tp=tp, pp=pp, dp=dp, ep=ep, zero=zero)
    if zero is None:
        zero = 0 if (tp or 1) * (pp or 1) > 1 else 3
    if gpus is None and dp is None and tp is None and pp is None:
        raise ValueError("plan: give the number of GPUs: gpus=, or tp=, pp= and dp=")
    tp, pp = tp or 1, pp or 1
    if gpus is None:
        gpus = tp * pp * (dp or 1)
    if dp is None:
        if gpus % (tp * pp):
            raise ValueError(f"plan: {gpus} GPUs are not a multiple of tp {tp} x pp {pp} = {tp * pp}")
        dp = gpus // (tp * pp)
    if tp * pp * dp != gpus:
        raise ValueError(f"plan: tp {tp} x pp {pp} x dp {dp} = {tp * pp * dp} is not the number of GPUs, {gpus}")
    if dp % ep:
        raise ValueError(f"plan: expert parallelism {ep} must divide data parallelism {dp}")
    return Layout(tp, pp, dp, ep, zero)


def check(**numbers: int | None) -> None:
    """Refuse anything but a number of GPUs or a stage of ZeRO."""
    for name, value in numbers.items():
        if value is None:
            continue
        if type(value) is not int:
            raise TypeError(f"plan: {name} must be an integer, not {value!r}")
        if name == "zero" and value not in ZERO_STAGES:
            raise ValueError(f"plan: zero must be a stage from 0 to 3, not {value}")
        if name != "zero" and value < 1:
            raise ValueError(f"plan: {name} must be at least 1, not {value}")
