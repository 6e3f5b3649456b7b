"""Records the writes of a file system to its device, and mounts states that the device may have after a power cut."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import pickle
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.mounts import MKFS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = 4096
#: Bytes of a device, small so that a state is quick to make.
SIZES = {"ext4": 48 << 20, "xfs": 64 << 20, "btrfs": 112 << 20}
#: Further options of mkfs, which prevent background writes that no program requested.
MORE = {"ext4": ["-E", "lazy_itable_init=0,lazy_journal_init=0"], "xfs": ["--unsupported"], "btrfs": []}
OPTIONS = {"ext4": "", "xfs": "", "btrfs": ""}
FLUSH_BUFFERS = 0x1261
#: Flags of fallocate: the range becomes a hole, and the size stays.
HOLE = 3
LAZILY = 2
#: Flags of unshare, and of a recursive mount.
NEW_MOUNTS, PRIVATELY = 0x20000, 1 << 14 | 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout.strip()


@cache
def formatted(kind: str) -> bytes:
    """Return the image of an empty file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "image")
        with path.open("wb") as file:
            file.truncate(SIZES[kind])
        _run(*MKFS[kind][0], *MORE[kind], str(path))
        return path.read_bytes()


@contextlib.contextmanager
def loop(path: str, *options: str) -> Iterator[str]:
    """Yield a loop device for a file."""
    device = _run("losetup", "--find", "--show", *options, path)
    try:
        yield device
    finally:
        _run("losetup", "--detach", device)


def alone() -> None:
    """Give this process a private mount namespace. Otherwise, a copy of its mounts in another program's namespace would
    keep a file system alive that is unmounted here, and vice versa.

    Raises:
        OSError: no permission.
    """
    if _libc.unshare(NEW_MOUNTS) != 0 or _libc.mount(b"none", b"/", None, PRIVATELY, None) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    below = tempfile.gettempdir() + os.sep
    for line in reversed(Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()):
        if (point := line.split()[1]).startswith(below):
            _libc.umount2(point.encode(), LAZILY)


def mount(device: str, point: str, kind: str) -> None:
    """Mount the device.

    Raises:
        OSError: the file system refuses the content.
    """
    if _libc.mount(device.encode(), point.encode(), kind.encode(), 0, OPTIONS[kind].encode()) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), point)


def unmount(point: str) -> None:
    """Unmount ``point``, and wait for files there that are about to be closed.

    Raises:
        AssertionError: the mount stays busy.
    """
    for _ in range(2000):
        if _libc.umount2(point.encode(), 0) == 0:
            return
        time.sleep(0.005)
    _libc.umount2(point.encode(), LAZILY)
    raise AssertionError(f"{point} stays busy")


@contextlib.contextmanager
def mounted(device: str, point: Path, kind: str) -> Iterator[None]:
    """Mount the content of a device, without the kernel's cache of its earlier content.

    Raises:
        OSError: the file system does not accept the content.
    """
    # The open is exclusive: if the previous state were still mounted somewhere, this mount would show that state.
    file = os.open(device, os.O_RDONLY | os.O_EXCL)
    fcntl.ioctl(file, FLUSH_BUFFERS)
    os.close(file)
    mount(device, str(point), kind)
    try:
        yield
    finally:
        unmount(str(point))


@contextlib.contextmanager
def recorded(kind: str, seed: int, folder: Path) -> Iterator[tuple[Path, Callable[[str], None], list[Any]]]:
    """Mount an empty file system on a logging device. Yield the mount point, a function that marks the log, and a list
    that gets the log at the end."""
    image, fuse, point = folder / "image", folder / "fuse", folder / "mnt"
    image.write_bytes(formatted(kind))
    for each in (fuse, point):
        each.mkdir()
    command = [sys.executable, "-m", "faults.crash.device", str(fuse), str(image), str(seed)]
    pipe, log = subprocess.PIPE, []
    with (
        subprocess.Popen(command, cwd=Path(__file__).parents[2], stdin=pipe, stdout=pipe, text=True) as daemon,
        contextlib.ExitStack() as undo,
    ):
        assert daemon.stdin is not None
        assert daemon.stdout is not None
        undo.callback(daemon.wait, 60)
        undo.callback(_libc.umount2, str(fuse).encode(), LAZILY)
        assert daemon.stdout.readline() == "mounted\n"

        def tell(line: str) -> None:
            assert daemon.stdin is not None
            assert daemon.stdout is not None
            daemon.stdin.write(f"{line}\n")
            daemon.stdin.flush()
            assert daemon.stdout.readline() == "done\n"

        device = undo.enter_context(loop(str(fuse / "disk"), "--direct-io=on"))
        mount(device, str(point), kind)
        undo.callback(unmount, str(point))
        tell("mounted")
        yield point, tell, log
        tell(f"dump {folder / 'log'}")
        log += pickle.loads((folder / "log").read_bytes())


class Shelf:
    """A device in memory for a sequence of states of one size. Use :func:`shelf`."""

    def __init__(self, device: str, file: Any, size: int, point: Path) -> None:
        self._device, self._file, self.point = device, file, point
        self._pages = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8).reshape(-1, PAGE)
        self._size = size

    def put(self, image: np.ndarray, used: np.ndarray) -> None:
        """Store an image: its pages, and which pages are not all zeros."""
        _libc.fallocate64(self._file.fileno(), HOLE, ctypes.c_longlong(0), ctypes.c_longlong(self._size))
        where = np.flatnonzero(used)
        self._pages[where] = image[where]

    @contextlib.contextmanager
    def mounted(self, kind: str) -> Iterator[Path]:
        """Mount the stored image."""
        with mounted(self._device, self.point, kind):
            yield self.point


@contextlib.contextmanager
def shelf(kind: str, folder: Path) -> Iterator[Shelf]:
    """Yield a device for the states of one kind of file system."""
    point = folder / "state"
    point.mkdir()
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="fastckpt-faults-") as file:
        file.truncate(SIZES[kind])
        with loop(file.name) as device:
            yield Shelf(device, file, SIZES[kind], point)
