"""The bytes of a checkpoint: by precision and optimizer, or of one on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastckpt._paths import path_of

if TYPE_CHECKING:
    from fastckpt._paths import AnyPath

#: Bytes of one weight as it is trained and saved.
WEIGHTS = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}

#: Bytes of the master copy of a weight that mixed-precision training updates.
MASTERS = {"fp32": 4.0, "bf16": 2.0, "none": 0.0}

#: Bytes of an optimizer's state per parameter, and their content.
OPTIMIZERS = {
    "adamw": (8.0, "two fp32 moments"),
    "adam": (8.0, "two fp32 moments"),
    # One byte per moment, and an fp32 scale for every block of 256: 2 * (1 + 4 / 256).
    "adam8bit": (2.03125, "two 8-bit moments with a scale a block of 256"),
    "sgd": (4.0, "fp32 momentum"),
    "lion": (4.0, "fp32 momentum"),
    "muon": (4.0, "fp32 momentum of the matrices; what is left to AdamW (embeddings, vectors) has 8"),
    "adafactor": (0.0, "factored second moments: rows and columns only, which is negligible"),
    "none": (0.0, "no state: weights only"),
}


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a checkpoint, in bytes.

    Attributes:
        weights: the weights as they are trained.
        optimizer: the optimizer's share: master weights and its state.
        expert_weights: the part of ``weights`` that belongs to routed experts.
        expert_optimizer: the part of ``optimizer`` that belongs to routed experts.
    """

    weights: float
    optimizer: float
    expert_weights: float = 0.0
    expert_optimizer: float = 0.0

    @property
    def bytes(self) -> int:
        """All bytes."""
        return round(self.weights + self.optimizer)

    def scaled(self, size: int) -> Contents:
        """The same contents, scaled to ``size`` bytes."""
        by = size / (self.weights + self.optimizer)
        parts = (self.weights, self.optimizer, self.expert_weights, self.expert_optimizer)
        return Contents(*(by * part for part in parts))


def bytes_per_parameter(
    weights: str = "bf16", master: str | None = None, optimizer: str = "adamw"
) -> tuple[float, float]:
    """Bytes per parameter: 2 + (4 + 8) = 14 under mixed-precision Adam.

    Source: the mixed-precision recipe of Megatron-LM and DeepSpeed, and the checkpoints of MLPerf Storage v2.0:
    weights, fp32 master weights, and two fp32 moments. Gradients are not saved.

    Args:
        weights: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.
        master: ``fp32``, ``bf16`` or ``none``; by default fp32, and none for fp32 weights or without an optimizer.
        optimizer: a name in :data:`OPTIMIZERS`.

    Returns:
        Bytes of the weight, and bytes that the optimizer keeps (master weight and state).

    Raises:
        ValueError: a name is unknown.
    """
    if master is None:
        master = "none" if weights == "fp32" or optimizer == "none" else "fp32"
    for name, value, known in (
        ("weights", weights, WEIGHTS),
        ("master", master, MASTERS),
        ("optimizer", optimizer, OPTIMIZERS),
    ):
        if value not in known:
            raise ValueError(f"plan: {name} must be one of {', '.join(known)}, not {value!r}")
    return WEIGHTS[weights], MASTERS[master] + OPTIMIZERS[optimizer][0]


def contents(parameters: int, experts: int, each: tuple[float, float]) -> Contents:
    """The contents of a checkpoint of a model.

    Args:
        parameters: the number of parameters of the whole model.
        experts: how many of them are in routed experts.
        each: bytes per parameter, from :func:`bytes_per_parameter`.
    """
    return Contents(*(number * part for number in (parameters, experts) for part in each))


def checkpoint_bytes(path: AnyPath) -> int:
    """Bytes of the shards of an existing checkpoint, from its manifest; nothing else is read.

    Args:
        path: the checkpoint's directory.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        CheckpointError: the checkpoint cannot be opened.
    """
    import fastckpt  # noqa: PLC0415 - a plan from numbers needs no checkpoint

    with fastckpt.open(path_of("plan", path)) as opened:
        return sum(opened.shards.values())
