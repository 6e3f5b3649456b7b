"""A mount that records all operations below the page cache, in their order and with their bytes.

``python -m faults.simulated_mount POINT`` mounts it at ``POINT``, and ends when it is unmounted. To add a mark to the
record, a program looks up a name that never exists, ``.mark.`` and JSON, in the root of the mount. Each line of
standard input is a request in JSON, and gets one line as an answer:

- ``{"kill": [PIDS], "at": N}``: kill these processes after ``N`` more operations that change something.
- ``{"reset": true}``: forget everything; no process may have anything open here.
- ``{"reboot": SEED}``: cut the power, and continue from the resulting state; no process may have anything open here.
- ``{"exchange": false}``: refuse to exchange names, as most network file systems do.
- ``{"record": PATH}``: write the record so far.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import signal
import stat
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.simulated_disk import Disk, Make, Mark, Names, Reboot, Size, Sync, Write
from harness import in_memory
from harness.in_memory import CREATE, FSYNC, FSYNCDIR, LINK, LOOKUP, MKDIR, RENAME, RMDIR, SET, UNLINK, WRITE

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = ".mark."
FALLOCATE, RENAME_WITH_FLAGS = 43, 45
NO_REPLACE, EXCHANGE, KEEP_SIZE = 1, 2, 1


def mark(point: str, **said: Any) -> None:
    """Add a mark to the record of the mount at ``point``."""
    text = json.dumps(said, separators=(",", ":"))
    if os.path.lexists(f"{point}/{MARK}{text}"):
        raise AssertionError(f"{point} is not a mount that records")


class Recorder(in_memory.Tree):
    """Keeps files in memory, and the record."""

    def __init__(self) -> None:
        super().__init__()
        self.record: list[Any] = []
        self.disk = Disk()
        self.exchanges = True
        self.doomed: list[int] = []
        self.left = 0

    def answer(self, code: int, number: int, body: memoryview) -> bytes:
        if code == LOOKUP and bytes(body).startswith(MARK.encode()):
            self.note(Mark(json.loads(bytes(body).rstrip(b"\0")[len(MARK) :])))
            raise OSError(errno.ENOENT, "a mark")
        if code == FALLOCATE:
            return self.allocate(number, body)
        if code == RENAME_WITH_FLAGS:
            return self.rename(number, body)
        size = len(self.nodes[number].data) if code == SET else 0
        found = super().answer(code, number, body)
        if code == SET and len(self.nodes[number].data) != size:
            self.note(Size(number, len(self.nodes[number].data)))
        told = self.told_of.get(code)
        if told is not None:
            told(self, code, number, bytes(body))
        return found

    def note(self, operation: Any) -> None:
        self.record.append(operation)
        self.disk.apply(operation)
        if self.doomed and not isinstance(operation, Mark):
            self.left -= 1
            if self.left <= 0:
                for process in self.doomed:
                    os.kill(process, signal.SIGKILL)
                self.doomed = []

    def allocate(self, number: int, body: memoryview) -> bytes:
        _, at, length, mode, _ = struct.unpack_from("<QQQII", body)
        data = self.nodes[number].data
        if mode & ~KEEP_SIZE:
            raise OSError(errno.EOPNOTSUPP, "another way to allocate")
        if not mode and at + length > len(data):
            data.extend(bytes(at + length - len(data)))
            self.note(Size(number, len(data)))
        return b""

    def rename(self, number: int, body: memoryview) -> bytes:
        there, flags, _ = struct.unpack_from("<QII", body)
        if flags & ~(NO_REPLACE | EXCHANGE) or not self.exchanges:
            raise OSError(errno.EINVAL, "these flags are not supported here")
        old, new = bytes(body[16:]).rstrip(b"\0").split(b"\0")
        if flags & EXCHANGE:
            one, other = self.child(number, old), self.child(there, new)
            self.nodes[number].children[old], self.nodes[there].children[new] = other, one
            self.note(Names(((number, old.decode(), other.number), (there, new.decode(), one.number))))
            return b""
        if flags & NO_REPLACE and new in self.nodes[there].children:
            raise OSError(errno.EEXIST, "it exists")
        plain = struct.pack("<Q", there) + bytes(body[16:])
        return self.answer(RENAME, number, memoryview(plain))

    def made(self, code: int, number: int, body: bytes) -> None:
        name = body[16 if code == CREATE else 8 :].rstrip(b"\0")
        node = self.nodes[number].children[name].number
        if code != LINK:
            self.note(Make(node, code == MKDIR))
        self.note(Names(((number, name.decode(), node),)))

    def unlinked(self, code: int, number: int, body: bytes) -> None:  # noqa: ARG002 - one of several
        self.note(Names(((number, body.rstrip(b"\0").decode(), 0),)))

    def renamed(self, code: int, number: int, body: bytes) -> None:  # noqa: ARG002
        (there,) = struct.unpack_from("<Q", body)
        old, new = body[8:].rstrip(b"\0").split(b"\0")
        node = self.nodes[there].children[new].number
        self.note(Names(((number, old.decode(), 0), (there, new.decode(), node))))

    def wrote(self, code: int, number: int, body: bytes) -> None:  # noqa: ARG002
        _, at, size, _ = in_memory.MOVE.unpack_from(body)
        self.note(Write(number, at, body[40 : 40 + size]))

    def synced(self, code: int, number: int, body: bytes) -> None:  # noqa: ARG002
        self.note(Sync(number))

    told_of: dict[int, Callable[[Recorder, int, int, bytes], None]] = {  # noqa: RUF012 - never changed
        CREATE: made,
        MKDIR: made,
        LINK: made,
        UNLINK: unlinked,
        RMDIR: unlinked,
        RENAME: renamed,
        WRITE: wrote,
        FSYNC: synced,
        FSYNCDIR: synced,
    }

    def request(self, asked: dict[str, Any]) -> Any:
        """Handle a request from standard input."""
        if "reset" in asked:
            self.disk, self.record = Disk(), []
            self.go_on_with({}, {1: {}})
        if "kill" in asked:
            self.doomed, self.left = asked["kill"], asked["at"]
        if "exchange" in asked:
            self.exchanges = asked["exchange"]
        if "reboot" in asked:
            self.reboot(asked["reboot"])
        if "record" in asked:
            Path(asked["record"]).write_bytes(pickle.dumps(self.record))
        return len(self.record)

    def reboot(self, seed: int) -> None:
        """Continue from the state after a power cut."""
        left = self.disk.crash(random.Random(seed))
        self.note(Reboot(left.files, left.folders))
        self.go_on_with(left.files, left.folders)

    def go_on_with(self, files: dict[int, bytes], folders: dict[int, dict[str, int]]) -> None:
        """Replace all files and directories by these."""
        for node in self.nodes.values():
            node.links, node.children = 0, {}
        for number, names in folders.items():
            for name, inner in names.items():
                kind = stat.S_IFREG | 0o644 if inner in files else stat.S_IFDIR | 0o755
                # The mount may have forgotten a node that was removed.
                node = self.nodes.setdefault(inner, in_memory.Node(inner, kind, name))
                self.nodes[number].children[name.encode()] = node
                node.links += 1
        self.nodes[1].links = 1
        for number, data in files.items():
            self.nodes[number].data = bytearray(data)

    def told(self, line: str) -> str:
        return json.dumps(self.request(json.loads(line)))


if __name__ == "__main__":
    in_memory.serve(Recorder(), sys.argv[1])
