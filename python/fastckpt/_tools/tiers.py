"""Reference data for checkpoint storage: NVIDIA's tiers and the workloads of MLPerf Storage.

GB is 10^9 bytes, GiB 2^30. The compiled core and the monitor, which share no Python code with this package, have the
same tiers for ``set_target`` and ``--target``; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30

#: Bytes of a checkpoint per parameter under mixed-precision Adam: weights in bf16, then the optimizer's state in fp32:
#: its master copy of the weights and two moments.
WEIGHT_BYTES = 2
OPTIMIZER_BYTES = 4 + 8


@dataclass(frozen=True, slots=True)
class Tier:
    """The throughput that storage should give each GPU.

    Attributes:
        name: ``light``, ``medium`` or ``high``.
        read: GB/s read per GPU.
        write: GB/s written per GPU.
        meant_for: the jobs that need it.
    """

    name: str
    read: float
    write: float
    meant_for: str


#: Source: NVIDIA's storage sizing for DGX H100.
TIERS = {
    tier.name: tier
    for tier in (
        Tier("light", 1.0, 0.75, "up to 128 nodes; data sets that fit the local cache"),
        Tier("medium", 2.0, 1.5, "LLMs on more than 128 nodes; jobs over 12 h with checkpoints"),
        Tier("high", 4.0, 3.0, "LLMs on more than 256 nodes; jobs over 24 h with checkpoints"),
    )
}


@dataclass(frozen=True, slots=True)
class Workload:
    """One checkpoint workload of MLPerf Storage v2.0.

    Attributes:
        name: as for ``--workload``: ``llama3-8b``.
        tp: tensor parallelism.
        pp: pipeline parallelism.
        dp: data parallelism.
        zero: ZeRO stage.
        gib: the published size of the whole checkpoint, in GiB (MLPerf prints "GB" and means 2^30).
        parameters: the number that gives this size at 14 bytes each.
    """

    name: str
    tp: int
    pp: int
    dp: int
    zero: int
    gib: int
    parameters: int

    @property
    def processes(self) -> int:
        """Processes of the job, one per GPU, all of which write."""
        return self.tp * self.pp * self.dp

    @property
    def bytes(self) -> int:
        """Bytes of the whole checkpoint."""
        return (WEIGHT_BYTES + OPTIMIZER_BYTES) * self.parameters

    def share(self, rank: int = 0) -> tuple[int, int]:
        """Bytes that one process writes.

        Stage 3 cuts weights and optimizer state over all processes. Stage 1 cuts only the optimizer state: the weights
        are written by the first data-parallel replica, that is by the first ``tp * pp`` ranks. Tensor and pipeline
        parallelism are assumed to cut evenly.

        Args:
            rank: 0 to ``processes - 1``; tensor-parallel ranks vary fastest, data-parallel ones slowest.

        Returns:
            Bytes of weights and bytes of optimizer state.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.processes:
            raise ValueError(f"workload {self.name}: rank must be from 0 to {self.processes - 1}, not {rank}")
        replica = self.tp * self.pp
        cut = self.processes if self.zero == 3 else replica  # noqa: PLR2004 - ZeRO's stage
        weights = WEIGHT_BYTES * self.parameters // cut if self.zero == 3 or rank < replica else 0  # noqa: PLR2004
        return weights, OPTIMIZER_BYTES * self.parameters // self.processes


#: Source: MLPerf Storage v2.0, submission guidelines, table 2. Parameters are counted from the architectures of that
#: table, which differ from Meta's models: 70B has 128 attention heads instead of 64, so its 8 key-value heads are half
#: as wide. The published 912 is 8 nodes of a rounded 114. For 1T the count of the published architecture (1.183e12,
#: 15,425 GiB) differs from the published one (18 TB, and 161 GB for 8 processes), as does the nominal 1e12 (13,039
#: GiB): here the size is taken as given, and the parameters follow from it.
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("llama3-8b", 1, 1, 8, 3, 105, 8_030_261_248),
        Workload("llama3-70b", 8, 1, 8, 3, 912, 69_882_617_856),
        Workload("llama3-405b", 8, 32, 2, 1, 5290, 405_853_388_800),
        Workload("llama3-1t", 8, 64, 2, 1, 18000, 1_380_500_000_000),
    )
}
