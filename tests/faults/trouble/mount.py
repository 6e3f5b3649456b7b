"""A mount whose k-th call fails or lies; its files are in memory. It removes open files as NFS does: an open file stays
in its directory under another name until it is closed.

``python -m faults.trouble.mount POINT`` mounts it at ``POINT``, and ends when it is unmounted. A line of standard input
is a request in JSON, and gets one line as an answer:

- ``{"reset": true}``: forget all files; no process may have anything open here.
- ``{"image": PATH}``: the file ``disk`` gets the content of the file at that path.
- ``{"arm": [CODES], "at": K, "errno": N, "once": BOOL}``: the K-th call with one of these codes fails, and without
  ``once`` so do later calls. With ``"lie": HOW`` in place of ``errno``, a call reports success but does something else.
- ``{"heal": true}``: no more failures; ``{"came": N, "counts": {CODE: N}}`` has failures since ``arm`` and calls.
"""

from __future__ import annotations

import json
import random
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import in_memory
from harness.in_memory import MOVE, READ, RENAME, UNLINK

if TYPE_CHECKING:
    from harness.in_memory import Handle, Node

NAME = b"disk"
PAGE = 4096
#: How a write or a read may lie.
LIES = ("a bit", "lost", "elsewhere", "a part")


class Troubled(in_memory.Tree):
    """Keeps files in memory, and injects the requested faults."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: dict[str, Any] = {}
        self.counts: Counter[int] = Counter()
        self.came = 0
        self.draw = random.Random(0)
        #: How often each file is open, and the place of each open file that was removed.
        self.opens: Counter[int] = Counter()
        self.hidden: dict[int, tuple[int, bytes]] = {}

    def answer(self, code: int, number: int, body: memoryview) -> bytes:
        struck = False
        if code in self.armed.get("arm", ()):
            seen = sum(self.counts[each] for each in self.armed["arm"]) + 1
            struck = seen == self.armed["at"] or (not self.armed["once"] and seen > self.armed["at"])
            self.came += struck
        self.counts[code] += 1
        if struck and "errno" in self.armed:
            raise OSError(self.armed["errno"], "the test injected this error")
        if struck:
            return self.lie(code, number, body)
        return super().answer(code, number, body)

    def lie(self, code: int, number: int, body: memoryview) -> bytes:
        """Reply to a write or a read as if it had succeeded."""
        how, draw = self.armed["lie"], self.draw
        _, at, size, _ = MOVE.unpack_from(body)
        pages = max(1, len(self.nodes[number].data) // PAGE)
        if code == READ:
            data = bytearray(super().answer(code, number, body))
            if how == "a bit" and data:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            elif how == "elsewhere":
                other = draw.randrange(pages) * PAGE
                data[:] = self.nodes[number].data[other : other + len(data)].ljust(len(data), b"\0")
            else:
                kept = 0 if how == "lost" else len(data) // 2
                data[kept:] = bytes(len(data) - kept)
            return bytes(data)
        asked, told = bytearray(body), super().answer
        if how == "a bit":
            asked[40 + draw.randrange(size)] ^= 1 << draw.randrange(8)
            return told(code, number, memoryview(asked))
        # The file gets the length that the write would give it.
        data = self.nodes[number].data
        before = bytes(data[at : at + size]).ljust(size, b"\0")
        kept = size // 2 if how == "a part" else 0
        if how == "elsewhere":
            other = draw.randrange(pages) * PAGE
            data[other : other + size] = asked[40 : 40 + size][: max(0, len(data) - other)]
        asked[40 + kept : 40 + size] = before[kept:]
        return told(code, number, memoryview(asked))

    def open(self, node: Node) -> bytes:
        self.opens[node.number] += stat.S_ISREG(node.mode)
        return super().open(node)

    def close(self, handle: Handle, *, last: bool) -> None:
        node = handle.node
        self.opens[node.number] -= last
        if last and not self.opens[node.number] and node.number in self.hidden:
            directory, name = self.hidden.pop(node.number)
            self.nodes[directory].children.pop(name, None)
            node.links -= 1

    def on_names(self, code: int, number: int, body: memoryview) -> bytes:
        if code == UNLINK:
            self.hide(number, bytes(body).rstrip(b"\0"))
        elif code == RENAME:
            there = int.from_bytes(body[:8], "little")
            self.hide(there, bytes(body[8:]).rstrip(b"\0").split(b"\0")[1])
        return super().on_names(code, number, body)

    def hide(self, directory: int, name: bytes) -> None:
        """Give an open file that is about to lose this name another name in the same directory."""
        node = self.nodes[directory].children.get(name)
        if node is not None and self.opens[node.number] > 0 and node.number not in self.hidden:
            hidden = b".nfs%08x" % node.number
            self.nodes[directory].children[hidden] = node
            self.hidden[node.number] = (directory, hidden)
            node.links += 1

    def told(self, line: str) -> str:
        asked = json.loads(line)
        if "reset" in asked:
            for node in self.nodes.values():
                node.links, node.children = int(node.number == 1), {}
        if "image" in asked:
            disk = self.nodes[1].children.get(NAME) or self.make(0o100666, NAME)
            self.nodes[1].children[NAME] = disk
            disk.data[:] = Path(asked["image"]).read_bytes()
        if "arm" in asked:
            self.armed, self.counts, self.came = asked, Counter(), 0
            self.draw.seed(asked.get("seed", 0))
        if "heal" in asked:
            self.armed = {}
        return json.dumps({"came": self.came, "counts": self.counts})


if __name__ == "__main__":
    in_memory.serve(Troubled(), sys.argv[1])
