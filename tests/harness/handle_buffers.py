"""A file system in user space that buffers writes per handle, like clients of object stores.

``python -m harness.handle_buffers POINT FAILING`` mounts it at ``POINT``, and ends when it is unmounted. The writes of
a handle reach the file when the handle is synced, and are lost if it is closed without a sync, as if power had failed
then. If ``FAILING`` is not empty, a sync of a file whose name ends with it does nothing but succeeds, and
closing a handle of this file that wrote fails with EIO.
"""

from __future__ import annotations

import errno
import sys

from harness.in_memory import Handle, Tree, serve


class HandleBuffers(Tree):
    """A file system that buffers writes per handle."""

    def __init__(self, failing: str) -> None:
        super().__init__()
        self.failing = failing

    def fails(self, handle: Handle) -> bool:
        return bool(self.failing and handle.written and handle.node.name.endswith(self.failing))

    def write(self, handle: Handle, at: int, data: memoryview) -> None:
        handle.written.append((at, bytes(data)))

    def sync(self, handle: Handle) -> None:
        if not self.fails(handle):
            for at, data in handle.written:
                super().write(handle, at, memoryview(data))
            handle.written.clear()

    def close(self, handle: Handle, *, last: bool) -> None:
        if not last and self.fails(handle):
            raise OSError(errno.EIO, "the store refused the writes")
        handle.written.clear()


if __name__ == "__main__":
    serve(HandleBuffers(sys.argv[2]), sys.argv[1])
