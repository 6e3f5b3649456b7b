"""A file system in user space that keeps files in memory: the base of file systems that differ in one respect.

Needs root. One thread answers all requests. It may send an answer later, after answers to newer requests.
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import itertools
import math
import os
import select
import stat
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER = struct.Struct("<IIQQIIIHH")
SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
MOVE = struct.Struct("<QQII")

(LOOKUP, FORGET, GETATTR, SET, MKDIR, UNLINK, RMDIR, RENAME, LINK) = (1, 2, 3, 4, 9, 10, 11, 12, 13)
(OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT) = (14, 15, 16, 17, 18, 20, 25, 26)
(OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, CREATE, INTERRUPT, BATCH_FORGET) = (27, 28, 29, 30, 35, 36, 42)
UNANSWERED = (FORGET, INTERRUPT, BATCH_FORGET)
# Several processes may write to one file directly at once, with requests of the full length.
DIRECT, PARALLEL = 1 << 0, 1 << 6
LONGEST = 1 << 20
FLAGS = 1 << 0 | 1 << 5 | 1 << 15 | 1 << 22  # parallel reads, large writes, parallel direct I/O, and a request limit


@dataclass
class Node:
    """A file, or a directory."""

    number: int
    mode: int
    name: str
    data: bytearray = field(default_factory=bytearray)
    children: dict[bytes, Node] = field(default_factory=dict)
    links: int = 1
    modified: int = 0

    def attributes(self) -> bytes:
        seconds, rest = divmod(self.modified, 10**9)
        times = (seconds, seconds, seconds, rest, rest, rest)
        size = len(self.data)
        owner = (os.getuid(), os.getgid())
        return struct.pack(
            "<6Q10I", self.number, size, -(-size // 512), *times, self.mode, self.links, *owner, 0, 4096, 0
        )


@dataclass
class Handle:
    """An open handle, and the writes through it since its last sync."""

    node: Node
    written: list[tuple[int, bytes]] = field(default_factory=list)


class Tree:
    """The files, and the handling of requests."""

    # The flags in the reply to each open.
    opened = 0

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.nodes: dict[int, Node] = {}
        self.handles: dict[int, Handle] = {}
        # The thread whose request is being handled, and the time.monotonic() from which the reply may be sent.
        self.thread = 0
        self.ready = 0.0
        # From this time on, all waiting replies may be sent.
        self.latest = math.inf
        self.make(stat.S_IFDIR | 0o777, b"/")

    def make(self, mode: int, name: bytes) -> Node:
        node = Node(next(self.numbers), mode, name.decode())
        self.nodes[node.number] = node
        return node

    def child(self, parent: int, name: bytes) -> Node:
        found = self.nodes[parent].children.get(name)
        if found is None:
            raise OSError(errno.ENOENT, "no such file")
        return found

    @staticmethod
    def entry(node: Node) -> bytes:
        return struct.pack("<4Q2I", node.number, 0, 0, 0, 0, 0) + node.attributes()

    def open(self, node: Node) -> bytes:
        number = next(self.numbers)
        self.handles[number] = Handle(node)
        return struct.pack("<QII", number, self.opened, 0)

    def write(self, handle: Handle, at: int, data: memoryview) -> None:
        """Take a write."""
        place = handle.node.data
        place.extend(bytes(max(0, at - len(place))))
        place[at : at + len(data)] = data

    def sync(self, handle: Handle) -> None:
        """Make writes durable."""

    def close(self, handle: Handle, *, last: bool) -> None:
        """A descriptor of a handle is being closed; ``last``: all of them are closed now."""

    def told(self, line: str) -> str:
        """The reply to a line from the process that started this one."""
        raise NotImplementedError

    def forget(self, code: int, number: int, body: memoryview) -> None:
        """Free a removed file that the kernel no longer uses."""
        forgotten = [number] if code == FORGET else []
        if code == BATCH_FORGET:
            forgotten = [each for each, _ in struct.iter_unpack("<QQ", body[8:])]
        for each in forgotten:
            if self.nodes[each].links == 0:
                del self.nodes[each]

    def answer(self, code: int, number: int, body: memoryview) -> bytes:
        """The reply to the kernel, without the header."""
        if code in (LOOKUP, UNLINK, RMDIR, MKDIR, CREATE, LINK, RENAME):
            return self.on_names(code, number, body)
        if code == INIT:
            longest = (LONGEST, 1, LONGEST >> 12, 0)
            return struct.pack("<4I2H2I2H8I", 7, 31, 1 << 17, FLAGS, 1024, 1024, *longest, *[0] * 8)
        if code == STATFS:
            return struct.pack("<5Q10I", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 4096, 255, 4096, *[0] * 7)
        node = self.nodes[number]
        if code == SET:
            valid, _, _, size, _, _, seconds, _, _, rest, _, mode, *_ = SETATTR.unpack(body[: SETATTR.size])
            if valid & 1:
                node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(mode)
            if valid & 8:
                del node.data[size:]
                node.data.extend(bytes(size - len(node.data)))
            if valid & 32:
                node.modified = seconds * 10**9 + rest
        if code in (SET, GETATTR):
            return struct.pack("<QII", 0, 0, 0) + node.attributes()
        if code in (OPEN, OPENDIR):
            return self.open(node)
        return self.on_handles(code, node, body)

    def on_names(self, code: int, number: int, body: memoryview) -> bytes:
        children = self.nodes[number].children
        skipped = {MKDIR: 8, CREATE: 16, LINK: 8, RENAME: 8}.get(code, 0)
        name, *more = bytes(body[skipped:]).rstrip(b"\0").split(b"\0")
        if code == LOOKUP:
            return self.entry(self.child(number, name))
        if code in (UNLINK, RMDIR):
            gone = self.child(number, name)
            if gone.children:
                raise OSError(errno.ENOTEMPTY, "it is not empty")
            gone.links -= 1
            del children[name]
            return b""
        if code == RENAME:
            there = self.nodes[struct.unpack_from("<Q", body)[0]].children
            if more[0] in there and there[more[0]].children:
                raise OSError(errno.ENOTEMPTY, "it is not empty")
            if more[0] in there:
                there[more[0]].links -= 1
            moved = there[more[0]] = self.child(number, name)
            del children[name]
            moved.name = more[0].decode()
            return b""
        if name in children:
            raise OSError(errno.EEXIST, "it exists")
        if code == LINK:
            linked = children[name] = self.nodes[struct.unpack_from("<Q", body)[0]]
            linked.links += 1
            return self.entry(linked)
        _, mode = struct.unpack_from("<II", body)
        if code == MKDIR:
            _, mode = 0, struct.unpack_from("<I", body)[0] | stat.S_IFDIR
        made = children[name] = self.make(mode, name)
        return self.entry(made) + (self.open(made) if code == CREATE else b"")

    def on_handles(self, code: int, node: Node, body: memoryview) -> bytes:
        if code in (FSYNCDIR, RELEASEDIR):
            return b""
        if code not in (READ, READDIR, WRITE, FSYNC, FLUSH, RELEASE):
            raise OSError(errno.ENOSYS, "this request is not supported")
        which = struct.unpack_from("<Q", body)[0]
        handle = self.handles[which] if code != RELEASE else self.handles.pop(which)
        if code in (READ, READDIR):
            _, at, size, _ = MOVE.unpack_from(body)
            if code == READ:
                return bytes(node.data[at : at + size])
            return self.listing(node, at, size)
        if code == WRITE:
            _, at, size, _ = MOVE.unpack_from(body)
            self.write(handle, at, body[40 : 40 + size])
            return struct.pack("<II", size, 0)
        if code == FSYNC:
            self.sync(handle)
        else:
            self.close(handle, last=code == RELEASE)
        return b""

    @staticmethod
    def listing(node: Node, at: int, size: int) -> bytes:
        found = b""
        for place, (name, child) in enumerate(list(node.children.items())[at:], at + 1):
            one = struct.pack("<QQII", child.number, place, len(name), stat.S_IFMT(child.mode) >> 12) + name
            one += bytes(-len(one) % 8)
            if len(found) + len(one) > size:
                break
            found += one
        return found


def process_of(thread: int) -> int:
    """The process of a thread: the kernel reports the thread that writes, and io_uring writes in its own threads."""
    status = Path(f"/proc/{thread}/status").read_text(encoding="ascii")
    return int(status.partition("\nTgid:")[2].split()[0])


def serve(tree: Tree, point: str) -> None:
    """Mount it at ``point``, print ``mounted``, answer each line of standard input, and end when it is unmounted."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if libc.mount(b"in-memory", point.encode(), b"fuse", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), "cannot mount", point)
    print("mounted", flush=True)
    waiting: list[tuple[float, int, bytes]] = []
    watched: list[Any] = [device, sys.stdin]
    while True:
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(device, heapq.heappop(waiting)[2])
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(watched, [], [], left)
        if sys.stdin in readable:
            if line := sys.stdin.readline():
                print(tree.told(line), flush=True)
                waiting = sorted((min(ready, tree.latest), *more) for ready, *more in waiting)  # type: ignore[misc]
            else:  # closed
                watched.remove(sys.stdin)
        if device not in readable:
            continue
        try:
            request = memoryview(os.read(device, LONGEST + (1 << 13)))
        except OSError as error:
            if error.errno == errno.ENODEV:  # unmounted
                return
            if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                continue
            raise
        _, code, unique, number, _, _, tree.thread, *_ = HEADER.unpack_from(request)
        body = request[HEADER.size :]
        if code in UNANSWERED:
            tree.forget(code, number, body)
            continue
        tree.ready = 0.0
        try:
            status, answer = 0, tree.answer(code, number, body)
        except OSError as error:
            status, answer = -(error.errno or errno.EIO), b""
        answer = struct.pack("<IiQ", 16 + len(answer), status, unique) + answer
        heapq.heappush(waiting, (tree.ready, unique, answer))
