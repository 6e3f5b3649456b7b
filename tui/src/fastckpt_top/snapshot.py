"""The result of one look at all segments: the only input of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastckpt_top.segment import Header, History, Operation, Process, Thread

_MOST: Final = 2**31 - 1
"""The highest rank that is accepted."""


@dataclass(frozen=True, slots=True)
class Proc:
    """One process at one moment.

    Attributes:
        key: The same in each snapshot of one process, and unique to it.
        path: The segment's file.
        header: Its identity.
        process: Its totals.
        operations: Its operation slots, running and ended.
        threads: Slot index and contents of each thread slot in use.
        history: Its ended operations; a source may leave out those that it gave before.
        alive: Whether the process lives.
        same_clock: Whether its monotonic clock is the reader's.
        touched: When an operation last started or ended, seconds since the epoch.
        state: Letter of /proc/PID/stat; empty if it cannot be known.
        user: Name of its user, or the number if it has none; empty if it is not known.
    """

    key: str
    path: str
    header: Header
    process: Process
    operations: tuple[Operation, ...]
    threads: tuple[tuple[int, Thread], ...]
    history: tuple[History, ...]
    alive: bool
    same_clock: bool
    touched: float
    state: str = ""
    user: str = ""

    @property
    def rank(self) -> int:
        """The rank: that of the process group if it saves or loads with others, else the launcher's; -1 if unknown."""
        return min(self.process.group_rank, _MOST) if self.process.group else self.header.rank

    @property
    def died(self) -> bool:
        """Whether the process ended in the middle of an operation."""
        return not self.alive and any(op.running for op in self.operations)

    @property
    def team(self) -> str:
        """The common fields of processes that do one operation together."""
        return f"group {self.process.group}" if self.process.group else f"job {self.header.job} {self.header.launch}"

    @property
    def waits_for(self) -> int | None:
        """The rank that the process waits for; None if there is none."""
        waits = self.process.waits_for
        return min(waits - 1, _MOST) if waits and self.process.group and self.alive else None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All processes at one moment.

    Attributes:
        mono: The reader's monotonic clock, seconds.
        real: Seconds since the epoch.
        host: Name of the machine.
        procs: The processes, in no order.
        problems: File and reason of each segment that could not be read.
        places: The directories that were looked at.
        devices: The number and the name of each device that an operation uses, if it is mounted here.
    """

    mono: float
    real: float
    host: str
    procs: tuple[Proc, ...]
    problems: tuple[tuple[str, str], ...] = ()
    places: tuple[str, ...] = ()
    devices: Mapping[int, str] = field(default_factory=dict)


def proc_key(header: Header) -> str:
    """The identity of a process: pids are reused, and are unique only within a namespace."""
    return f"{header.boot_id[:8]}-{header.pid_ns}-{header.pid}-{header.start_ticks}"
