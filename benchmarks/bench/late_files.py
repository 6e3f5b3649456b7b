"""A file system in user space that answers each read and write after a delay, all of them at the same time.

``PYTHONPATH=tests python late_files.py POINT MILLISECONDS`` mounts it at ``POINT``, needs root, and ends when it is
unmounted. Files lie in memory. Direct operations of one file run beside each other, as on storage over a network.
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import os
import select
import struct
import sys
import time
from typing import TYPE_CHECKING

from harness import handle_buffers as files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.handle_buffers import Node

#: FUSE_ASYNC_READ, FUSE_BIG_WRITES, FUSE_ASYNC_DIO, FUSE_MAX_PAGES; FOPEN_PARALLEL_DIRECT_WRITES.
FLAGS, PARALLEL = 1 << 0 | 1 << 5 | 1 << 15 | 1 << 22, 1 << 6
LARGEST = 1 << 20


class Tree(files.Tree):
    """What is written is in its file at once."""

    def open(self, node: Node) -> bytes:
        number = next(self.numbers)
        self.handles[number] = files.Handle(node)
        return struct.pack("<QII", number, PARALLEL, 0)

    def answer(self, code: int, number: int, body: bytes) -> bytes:
        if code == files.INIT:
            pages = LARGEST // 4096
            return struct.pack("<4I2H2I2H8I", 7, 31, LARGEST, FLAGS, pages, pages, LARGEST, 1, pages, 0, *[0] * 8)
        if code != files.WRITE:
            return super().answer(code, number, body)
        data, (_, at, size, _) = self.nodes[number].data, files.MOVE.unpack_from(body)
        data.extend(bytes(max(0, at - len(data))))
        data[at : at + size] = memoryview(body)[40 : 40 + size]
        return struct.pack("<II", size, 0)


def requests(device: int, late: list[tuple[float, int, bytes]]) -> Iterator[bytes]:
    """Yield what the kernel asks, until it unmounts; send answers when they are due."""
    while True:
        now = time.monotonic()
        while late and late[0][0] <= now:
            os.write(device, heapq.heappop(late)[2])
        wait = max(0.0, late[0][0] - now) if late else None
        if not select.select([device], [], [], wait)[0]:
            continue
        try:
            yield os.read(device, LARGEST + 8192)
        except OSError as error:
            if error.errno == errno.ENODEV:  # unmounted
                return
            if error.errno not in (errno.EAGAIN, errno.EINTR, errno.ENOENT):
                raise


def main(point: str, milliseconds: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if libc.mount(b"late", point.encode(), b"fuse", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), "cannot mount", point)
    print("mounted", flush=True)
    tree = Tree("")
    late: list[tuple[float, int, bytes]] = []
    for request in requests(device, late):
        _, code, unique, number, *_ = files.HEADER.unpack_from(request)
        if code in files.UNANSWERED:
            continue
        try:
            status, answer = 0, tree.answer(code, number, request[files.HEADER.size :])
        except OSError as error:
            status, answer = -(error.errno or errno.EIO), b""
        reply = struct.pack("<IiQ", 16 + len(answer), status, unique) + answer
        if code in (files.READ, files.WRITE):
            heapq.heappush(late, (time.monotonic() + float(milliseconds) / 1e3, unique, reply))
        else:
            os.write(device, reply)


if __name__ == "__main__":
    main(*sys.argv[1:])
