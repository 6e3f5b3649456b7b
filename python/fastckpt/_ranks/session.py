"""The objects that a process keeps for a process group: its peers, and the group for bytes."""

from __future__ import annotations

from typing import Any

from .exchange import Link
from .peers import Peers
from .torch_distributed import Group, kept, store_below


class Session:
    """One process group, for as long as torch has it.

    Attributes:
        group: the ranks in it.
        peers: the ranks, and their common operations.
        link: the group that sends bytes.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.peers = Peers(group.rank, group.size, group.store, group.host, serves=group.serves)
        self.link = Link(group, self.peers.host_of)
        #: Whether a save has warned that nothing distinguishes it from an earlier one.
        self.has_warned = False
        self._apart: list[Peers] = []
        self._made = 0

    def close(self) -> None:
        """Close the session: the process group is gone."""
        for peers in tuple(self._apart):
            self.end(peers)
        self.peers.close()
        self.link.drop()

    def apart(self) -> Peers:
        """Return the same ranks, with turns that wait for no save or load; all ranks call this in the same order."""
        self._made += 1
        group = self.group
        store = store_below(group.store, f"apart/{self._made}")
        self._apart.append(Peers(group.rank, group.size, store, group.host, serves=group.serves, shown=False))
        return self._apart[-1]

    def end(self, peers: Peers) -> None:
        """Close the result of :meth:`apart`."""
        if peers in self._apart:
            self._apart.remove(peers)
            peers.close()

    def name(self, rank: int, *, ask: bool = False) -> str:
        """The name of a rank in errors; with ``ask``, look up its host in the store, which may take long."""
        host = self.peers.host_of(rank) or (self.link.host_of_peer(rank) if ask else "")
        return f"rank {rank} on {host}" if host else f"rank {rank}"


def session(operation: str, process_group: Any) -> Session:
    """The session of a process group; see :func:`fastckpt._ranks.torch_distributed.kept`."""
    return kept(operation, process_group, Session)
