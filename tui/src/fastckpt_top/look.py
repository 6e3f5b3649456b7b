"""One look of the model: the processes of one moment, their tracks, and their targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastckpt_top.segment import Kind
from fastckpt_top.targets import DEFAULT_TIER, TIERS, Target, tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fastckpt_top.groups import Group
    from fastckpt_top.snapshot import Proc
    from fastckpt_top.tracks import ProcTrack


@dataclass(frozen=True, slots=True)
class Look:
    """The common inputs of the builders of rows, operations and jobs.

    Attributes:
        mono: Reader's clock, seconds.
        real: Seconds since the epoch.
        procs: The processes.
        tracks: The track of each process, by process key.
        job_of: Process key -> key of its job.
        target: The user's target; None to follow the processes.
        gpus: GPUs that targets are multiplied by; None to count them.
        devices: `Snapshot.devices`.
    """

    mono: float
    real: float
    procs: tuple[Proc, ...]
    tracks: Mapping[str, ProcTrack]
    job_of: Mapping[str, str]
    target: Target | None
    gpus: int | None
    devices: Mapping[int, str]

    def count_gpus(self, procs: Iterable[Proc]) -> int:
        """The number of GPUs by which the target of these processes is multiplied."""
        return self.gpus if self.gpus is not None else count_ranks(procs)

    def per_gpu(self, procs: Iterable[Proc]) -> Target:
        """The target of these processes: the user's, else the one that any of them has set, even an idle one."""
        return self.target or asked(procs)

    def target_of(self, group: Group) -> Target:
        """The target of an operation, per GPU."""
        if self.target is not None:
            return self.target
        wanted = max(track.op.target for track in group.members.values())
        if not wanted:
            return asked(track.proc for track in group.members.values())
        column = 0 if group.kind == Kind.SAVE else 1
        name = next((name for name, pair in TIERS.items() if pair[column] == wanted), "custom")
        return Target(float(wanted), float(wanted), name, "process")


def count_ranks(procs: Iterable[Proc]) -> int:
    """The number of ranks with a GPU, or of all if none has."""
    has_gpu = [proc.header.gpu >= 0 for proc in procs]
    return sum(has_gpu) or len(has_gpu)


def asked(procs: Iterable[Proc]) -> Target:
    """The target that processes set; `light` if none does."""
    save = load = 0
    for proc in procs:
        save, load = max(save, proc.process.target_save), max(load, proc.process.target_load)
        for op in proc.operations:
            if op.running and op.target:
                save, load = (max(save, op.target), load) if op.kind == Kind.SAVE else (save, max(load, op.target))
    if not save and not load:
        return tier(DEFAULT_TIER, "default")
    for name, (tier_save, tier_load) in TIERS.items():
        if save in (0, tier_save) and load in (0, tier_load):
            return tier(name, "process")
    light_save, light_load = TIERS[DEFAULT_TIER]
    return Target(save or light_save, load or light_load, "custom", "process")
