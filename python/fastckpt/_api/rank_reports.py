"""Reports of one rank of several: apart, since each class costs a millisecond, and most programs save with one."""

from __future__ import annotations

from dataclasses import dataclass

from fastckpt._text import size

from .reports import LoadReport, SaveReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSaveReport(SaveReport):
    """The report of one rank in a save of several; see :class:`SaveReport`.

    ``bytes``, ``thread_bytes``, ``blocks``, ``paths`` and ``copied`` count what this rank wrote, ``shards``,
    ``tensors``, ``linked_files`` and ``linked_bytes`` the whole checkpoint. The phase ``commit`` includes the wait for
    the other ranks.

    Attributes:
        rank: the rank in the process group.
        ranks: the number of ranks.
        bytes_total: bytes of tensor data that all ranks have written.
        bytes_sent: bytes that this rank sent to ranks that wrote them.
        bytes_received: bytes that it received from others, and wrote.
    """

    rank: int
    ranks: int
    bytes_total: int
    bytes_sent: int
    bytes_received: int

    def __str__(self) -> str:
        stall = f", stall {self.stall:.3f} s" if self.staged else ""
        return self._line(f"rank {self.rank} of {self.ranks} saved", f"{stall}; {size(self.bytes_total)} together")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoadReport(LoadReport):
    """The report of one rank in a load of several; see :class:`LoadReport`. ``bytes`` are those it requested.

    Attributes:
        rank: the rank in the process group.
        ranks: the number of ranks.
        bytes_storage: bytes that this rank read from storage, for itself or for others.
        bytes_peers: bytes that it received from other ranks.
        bytes_sent: bytes that it sent to other ranks.
    """

    rank: int
    ranks: int
    bytes_storage: int
    bytes_peers: int
    bytes_sent: int

    def __str__(self) -> str:
        line = LoadReport.__str__(self)
        return (
            f"rank {self.rank} of {self.ranks} {line}: {size(self.bytes_storage)} from storage, "
            f"{size(self.bytes_peers)} from other ranks"
        )
