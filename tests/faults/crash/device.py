"""A disk with a volatile cache, below a loop device: a file system in user space with the one file ``disk``.

    python -m faults.crash.device POINT IMAGE SEED

The disk completes writes late and out of order, and logs everything. A flush covers only the writes that were complete
when it arrived. A line of standard input is a mark for the log, or ``dump PATH``, which writes the log there.
"""

from __future__ import annotations

import pickle
import random
import sys
import time
from pathlib import Path
from typing import Any

from harness.in_memory import Handle, Tree, serve

#: Half of the writes complete at once, a quarter soon, and a quarter late, within these seconds. A program that does
#: not wait for late writes reports its success before they complete.
SOON, LATE = 0.003, (0.02, 0.1, 0.4)
NAME = b"disk"


class Disk(Tree):
    """The file, and the log: ``("write", offset, bytes)``, ``("flush", numbers of writes that it covers)``, and
    ``("mark", text)``, in the order of their arrival."""

    def __init__(self, image: Path, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.late = self.draw.choice(LATE)
        disk = self.make(0o100666, NAME)
        disk.data = bytearray(image.read_bytes())
        self.nodes[1].children[NAME] = disk
        self.log: list[tuple[str, Any, Any]] = []
        #: The writes that no flush covers: the number in the log, and the time of completion.
        self.uncovered: list[tuple[int, float]] = []

    def write(self, handle: Handle, at: int, data: memoryview) -> None:
        handle.node.data[at : at + len(data)] = data
        longest = self.draw.choice((0.0, 0.0, SOON, self.late))
        self.ready = time.monotonic() + self.draw.uniform(0, longest)
        self.uncovered.append((len(self.log), self.ready))
        self.log.append(("write", at, bytes(data)))

    def sync(self, _: Handle) -> None:
        now = time.monotonic()
        self.log.append(("flush", [number for number, ready in self.uncovered if ready <= now], None))
        self.uncovered = [one for one in self.uncovered if one[1] > now]

    def told(self, line: str) -> str:
        what, _, rest = line.strip().partition(" ")
        if what == "dump":
            Path(rest).write_bytes(pickle.dumps(self.log))
        else:
            self.log.append(("mark", line.strip(), None))
        return "done"


if __name__ == "__main__":
    serve(Disk(Path(sys.argv[2]), int(sys.argv[3])), sys.argv[1])
