"""A file system in user space that locks extents of files for writers, like file systems of several machines.

``python -m harness.extent_locks POINT EXTENT GRANT LATENCY`` mounts it at ``POINT``, and ends when it is unmounted.
Writes to a file are direct, and several processes may write at once. Each extent of ``EXTENT`` bytes has one owner at a
time, a process. A write of another process changes the owner, which takes ``GRANT`` seconds; writes of the extent that
come meanwhile wait for it. Each write and sync takes ``LATENCY`` seconds more, and several run at once. For a line on
standard input it prints counts as JSON, by file name, of the last file of that name: how often extents were granted,
how many extents these were, and the number of writes.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field

from harness.in_memory import DIRECT, PARALLEL, Handle, Tree, process_of, serve


@dataclass
class Lock:
    """The owner of an extent, and the time.monotonic() at which it became or becomes the owner."""

    owner: int = 0
    since: float = 0.0


@dataclass
class Locks:
    """The owners of a file's extents by number, and the file's counts."""

    extents: dict[int, Lock] = field(default_factory=dict)
    grants: int = 0
    writes: int = 0


class ExtentLocks(Tree):
    """Grants extents."""

    opened = DIRECT | PARALLEL

    def __init__(self, extent: int, grant: float, latency: float) -> None:
        super().__init__()
        self.extent, self.grant, self.latency = extent, grant, latency
        self.locks: dict[int, Locks] = {}
        self.names: dict[int, str] = {}

    def write(self, handle: Handle, at: int, data: memoryview) -> None:
        super().write(handle, at, data)
        number, owner = handle.node.number, process_of(self.thread)
        locks = self.locks.setdefault(number, Locks())
        self.names[number] = handle.node.name
        locks.writes += 1
        self.ready = time.monotonic()
        for extent in range(at // self.extent, -(-(at + len(data)) // self.extent)):
            lock = locks.extents.setdefault(extent, Lock())
            if lock.owner != owner:
                lock.owner, lock.since = owner, max(lock.since, time.monotonic()) + self.grant
                locks.grants += 1
            self.ready = max(self.ready, lock.since)
        self.ready += self.latency

    def sync(self, handle: Handle) -> None:
        super().sync(handle)
        self.ready = time.monotonic() + self.latency

    def told(self, _: str) -> str:
        counted = [(self.names[number], each) for number, each in self.locks.items()]
        return json.dumps({name: (each.grants, len(each.extents), each.writes) for name, each in counted})


if __name__ == "__main__":
    serve(ExtentLocks(int(sys.argv[2]), *map(float, sys.argv[3:])), sys.argv[1])
