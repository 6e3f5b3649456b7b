"""A fast, quiet device without a disk: an ext4 image in /dev/shm on a loop device with direct I/O."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def command(*words: str) -> str:
    """Run a command; return its output.

    Raises:
        OSError: the command failed; the message contains its output.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}` failed with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


@contextmanager
def mounted(size: int, memory: Path = Path("/dev/shm")) -> Iterator[Path]:  # noqa: S108 - memory is the point
    """Mount an ext4 of ``size`` bytes and yield its directory; unmount and delete it afterwards, whatever happened.

    The whole image is allocated first, and its blocks are never freed: otherwise the first contender to write a block
    would pay for its page.

    Raises:
        OSError: not root, no loop device, no direct I/O on it, or not enough memory.
    """
    if os.geteuid() != 0:
        raise OSError("--loop mounts an image on a loop device and needs root: use sudo, or omit --loop")
    with ExitStack() as undo:
        base = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="fastckpt-loop-", dir=memory)))
        image, point = base / "ext4", base / "mnt"
        point.mkdir()
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        device = command("losetup", "--find", "--show", "--direct-io=on", str(image))
        undo.callback(command, "losetup", "--detach", device)
        if Path(f"/sys/block/{Path(device).name}/loop/dio").read_text().strip() != "1":
            raise OSError(f"{device} on {memory} does no direct I/O: tmpfs supports it since Linux 6.6")
        eager = "nodiscard,lazy_itable_init=0,lazy_journal_init=0"
        command("mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-E", eager, device)
        command("mount", "-o", "nodiscard", device, str(point))
        undo.callback(unmount, point)
        yield point


def unmount(point: Path) -> None:
    """Unmount; lazily if a process that is being killed still has a file open."""
    try:
        command("umount", str(point))
    except OSError:
        command("umount", "--lazy", str(point))
