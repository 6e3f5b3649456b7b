"""A file system in user space that keeps what is written per handle, as clients of object stores do.

``python -m harness.handle_buffers POINT FAILING`` mounts it at ``POINT``, and ends when it is unmounted. What a handle
wrote reaches its file when that handle is synced, and is lost otherwise: when the handle is closed, as if power had
failed then. Of files whose name ends with ``FAILING``, if that is not empty, a sync does nothing and says that all is
well, and closing a handle that wrote fails with EIO.
"""

from __future__ import annotations

import errno
import sys

from harness.in_memory import Handle, Tree, serve


class HandleBuffers(Tree):
    """Keeps what is written per handle."""

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
            raise OSError(errno.EIO, "the store did not take it")
        handle.written.clear()


if __name__ == "__main__":
    serve(HandleBuffers(sys.argv[2]), sys.argv[1])
