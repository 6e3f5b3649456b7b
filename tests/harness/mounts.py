"""File systems that are made for one test and removed after it. All need root."""

# ruff: noqa: PTH101 - a name, not a Path

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import needs

# Sizes that each mkfs of Debian 12 accepts without special flags, with room for a few small checkpoints.
SIZES = {"ext4": 64 << 20, "xfs": 320 << 20, "btrfs": 160 << 20}
MKFS = {
    "ext4": (["mkfs.ext4", "-q", "-F", "-b", "4096"], "e2fsprogs"),
    "xfs": (["mkfs.xfs", "-q", "-f"], "xfsprogs"),
    "btrfs": (["mkfs.btrfs", "-q", "-f"], "btrfs-progs"),
}
KINDS = ("tmpfs", "ramfs", "overlay", "fuse", *SIZES)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr or done.stdout}")


@contextlib.contextmanager
def _mounted(base: Path, *arguments: str) -> Iterator[Path]:
    point = base / "mnt"
    point.mkdir()
    _run("mount", *arguments, str(point))
    try:
        yield point
    finally:
        # A busy mount is detached lazily: a failed test may leave a process inside, but no mount.
        if subprocess.run(["umount", str(point)], capture_output=True, check=False).returncode != 0:
            _run("umount", "-l", str(point))


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """A directory to which any user may write: pytest's tmp_path and its parents have mode 0700."""
    with tempfile.TemporaryDirectory(prefix="fastckpt-test-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


@contextlib.contextmanager
def mount(kind: str, *, size: int | None = None, options: str = "", image: Path | None = None) -> Iterator[Path]:
    """Mount a fresh file system of ``kind`` (tmpfs, ramfs, overlay, fuse, ext4, xfs, btrfs), or the one
    in ``image``; yields its mount point. The device of the last three kinds is ``image`` beside the mount point."""
    needs.root()
    extra = f",{options}" if options else ""
    with tempfile.TemporaryDirectory(prefix=f"fastckpt-{kind}-", ignore_cleanup_errors=True) as name:
        base = Path(name)
        base.chmod(0o755)
        if kind == "tmpfs":
            arguments = ["-t", "tmpfs", "-o", f"size={size or 64 << 20}{extra}", "tmpfs"]
        elif kind == "ramfs":
            arguments = ["-t", "ramfs", *(["-o", options] if options else []), "ramfs"]
        elif kind == "overlay":
            for part in ("lower", "upper", "work"):
                (base / part).mkdir()
            layers = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
            arguments = ["-t", "overlay", "-o", f"{layers}{extra}", "overlay"]
        elif kind == "fuse":
            # Mirrors a directory through a process, without flags of rename and fallocate.
            needs.tool("bindfs", "bindfs")
            needs.tool("mount.fuse3", "fuse3")
            (base / "below").mkdir()
            arguments = ["-t", "fuse.bindfs", "-o", f"allow_other{extra}", str(base / "below")]
        else:
            command, package = MKFS[kind]
            needs.tool(command[0], package)
            if image is None:
                image = base / "image"
                with image.open("wb") as file:
                    file.truncate(size or SIZES[kind])
                _run(*command, str(image))
            arguments = ["-t", kind, "-o", f"loop{extra}", str(image)]
        with _mounted(base, *arguments) as point:
            yield point


@contextlib.contextmanager
def twins() -> Iterator[tuple[Path, Path]]:
    """One directory behind two FUSE mounts: two clients with separate caches and locks."""
    needs.root()
    needs.tool("bindfs", "bindfs")
    needs.tool("mount.fuse3", "fuse3")
    with tempfile.TemporaryDirectory(prefix="fastckpt-twins-", ignore_cleanup_errors=True) as name:
        base = Path(name)
        (base / "below").mkdir()
        arguments = ["-t", "fuse.bindfs", "-o", "allow_other", str(base / "below")]
        with contextlib.ExitStack() as mounted:
            points = []
            for part in ("a", "b"):
                (base / part).mkdir()
                points.append(mounted.enter_context(_mounted(base / part, *arguments)))
            yield points[0], points[1]


@contextlib.contextmanager
def unanswering(point: Path) -> Iterator[None]:
    """Stop the process behind a ``fuse`` mount during the ``with`` statement, so that requests wait."""
    behind = [
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdecimal() and str(point).encode() in _command(process).split(b"\0")
    ]
    assert behind
    for process in behind:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in behind:
            os.kill(process, signal.SIGCONT)


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # the process has ended
        return b""


@contextlib.contextmanager
def _in_memory(module: str, *arguments: str) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A mount of one of the file systems on top of :mod:`harness.in_memory`, and its process."""
    needs.root()
    if not Path("/dev/fuse").exists():
        needs.missing("needs /dev/fuse (modprobe fuse)")
    with tempfile.TemporaryDirectory(prefix="fastckpt-memory-", ignore_cleanup_errors=True) as point:
        command = [sys.executable, "-m", f"harness.{module}", point, *arguments]
        above, pipe = Path(__file__).parents[1], subprocess.PIPE
        with subprocess.Popen(command, cwd=above, stdin=pipe, stdout=pipe, text=True) as daemon:
            assert daemon.stdout is not None
            try:
                assert daemon.stdout.readline() == "mounted\n"
                yield Path(point), daemon
            finally:
                subprocess.run(["umount", "-l", point], capture_output=True, check=False)
                daemon.wait(60)


@contextlib.contextmanager
def handle_buffers(failing: str = "") -> Iterator[Path]:
    """A FUSE mount that buffers writes per handle: see :mod:`harness.handle_buffers`."""
    with _in_memory("handle_buffers", failing) as (point, _):
        yield point


@contextlib.contextmanager
def hanging() -> Iterator[tuple[Path, Callable[..., None]]]:
    """A FUSE mount and a function that names the requests to leave unanswered; without names, all are answered."""
    with _in_memory("hanging") as (point, daemon):

        def hang(*requests: str) -> None:
            assert daemon.stdin is not None
            assert daemon.stdout is not None
            daemon.stdin.write(" ".join(requests) + "\n")
            daemon.stdin.flush()
            assert daemon.stdout.readline() == "so be it\n"

        try:
            yield point, hang
        finally:
            hang()


@contextlib.contextmanager
def extent_locks(
    *, extent: int = 4 << 20, grant: float = 0.01, latency: float = 0.0
) -> Iterator[tuple[Path, Callable[[], dict[str, list[int]]]]]:
    """A FUSE mount that locks extents for writers, and its counts so far: see :mod:`harness.extent_locks`."""
    with _in_memory("extent_locks", str(extent), str(grant), str(latency)) as (point, daemon):

        def counted() -> dict[str, list[int]]:
            assert daemon.stdin is not None
            assert daemon.stdout is not None
            daemon.stdin.write("\n")
            daemon.stdin.flush()
            found: dict[str, list[int]] = json.loads(daemon.stdout.readline())
            return found

        yield point, counted


@contextlib.contextmanager
def read_only(point: Path) -> Iterator[None]:
    """Remount read-only during the ``with`` statement."""
    _run("mount", "-o", "remount,ro", str(point))
    try:
        yield
    finally:
        _run("mount", "-o", "remount,rw", str(point))
