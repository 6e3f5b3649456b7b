"""A file system in user space that stops answering chosen requests.

``python -m harness.hanging POINT`` mounts it at ``POINT``, and ends when it is unmounted. A line on standard input
names the requests that it leaves unanswered from then on, and optionally the only process that is affected; an
empty line makes it answer all requests, including those that wait.
"""

from __future__ import annotations

import math
import sys
import time

from harness import in_memory
from harness.in_memory import DIRECT, PARALLEL, Tree, process_of, serve

#: The requests that a line may name.
REQUESTS = {
    "lookup": in_memory.LOOKUP,
    "getattr": in_memory.GETATTR,
    "mkdir": in_memory.MKDIR,
    "create": in_memory.CREATE,
    "open": in_memory.OPEN,
    "write": in_memory.WRITE,
    "fsync": in_memory.FSYNC,
    "flush": in_memory.FLUSH,
    "rename": in_memory.RENAME,
    "readdir": in_memory.READDIR,
    "statfs": in_memory.STATFS,
    "fsyncdir": in_memory.FSYNCDIR,
}


class Hanging(Tree):
    """A file system that leaves some requests unanswered."""

    opened = DIRECT | PARALLEL

    def __init__(self) -> None:
        super().__init__()
        self.silent: set[int] = set()
        self.processes: set[int] = set()

    def answer(self, code: int, number: int, body: memoryview) -> bytes:
        if code in self.silent and not (self.processes and process_of(self.thread) not in self.processes):
            self.ready = time.monotonic() + 3600
        return super().answer(code, number, body)

    def told(self, line: str) -> str:
        self.silent = {REQUESTS[name] for name in line.split() if not name.isdecimal()}
        self.processes = {int(number) for number in line.split() if number.isdecimal()}
        self.latest = math.inf if self.silent else 0.0
        return "so be it"


if __name__ == "__main__":
    serve(Hanging(), sys.argv[1])
