"""A file system in user space that answers each read and write after a delay, in parallel.

``PYTHONPATH=tests python late_files.py POINT MILLISECONDS`` mounts it at ``POINT``, needs root, and ends when it is
unmounted. Direct operations on one file run in parallel, as on network storage.
"""

from __future__ import annotations

import sys
import time

from harness.in_memory import PARALLEL, READ, WRITE, Tree, serve


class Late(Tree):
    """Answers late."""

    opened = PARALLEL

    def __init__(self, delay: float) -> None:
        super().__init__()
        self.delay = delay

    def answer(self, code: int, number: int, body: memoryview) -> bytes:
        if code in (READ, WRITE):
            self.ready = time.monotonic() + self.delay
        return super().answer(code, number, body)


if __name__ == "__main__":
    serve(Late(float(sys.argv[2]) / 1e3), sys.argv[1])
