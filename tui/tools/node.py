"""A node of ranks that really save and load, under a monitor that records them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fastckpt_top import feed, targets
from fastckpt_top.model import Model
from fastckpt_top.record import Recorder
from fastckpt_top.session import Live

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence

REPOSITORY: Final = Path(__file__).resolve().parents[2]
BLKIO: Final = Path("/sys/fs/cgroup/blkio")
LOOK_S: Final = 0.5
PATIENCE_S: Final = 120.0
MB: Final = 10**6
TARGET: Final = 120 * MB
"""The bytes/s that a rank should write."""
READ: Final = 1.25
"""The ratio of reading to writing speed, for targets and disks."""
GOOD: Final = 150 * MB
"""Bytes/s of a disk that reaches the target."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The storage of a rank.

    Attributes:
        rate: Bytes/s that the kernel allows for writing; for reading it allows a quarter more.
        size: Bytes of a separate file system in memory, without a rate; 0 for the disk.
        refused: The errno of io_uring_setup, such as `EPERM`; empty if io_uring is allowed.
    """

    rate: int = GOOD
    size: int = 0
    refused: str = ""


class Node(ExitStack):
    """Ranks that save and load on request, and a monitor that records them. Leaving this context cleans up.

    Args:
        files: An empty directory, in which each rank gets a directory for its checkpoints.
        recording: The file to record to.
        threads: The threads of each rank.
    """

    def __init__(self, files: Path, recording: Path, threads: int) -> None:
        super().__init__()
        self._files = files
        self._threads = threads
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._answers: list[bytes] = []
        self._segments = self.enter_context(tempfile.TemporaryDirectory())
        target = targets.named(TARGET, TARGET * READ, "option")
        self.session = Live(feed.ShmFeed([self._segments]), Model(target), [Recorder(str(recording))])
        self.callback(self.session.close)

    @property
    def model(self) -> Model:
        """The monitor's model of the ranks."""
        return self.session.model

    def start(self, disks: Sequence[Disk], size: int) -> None:
        """Start ranks, and wait until they are ready.

        Args:
            disks: The disk of each rank.
            size: Bytes of each rank's state.
        """
        for rank, disk in enumerate(disks):
            self._start(rank, disk, len(disks), size)
        self.until(lambda: all(answer == b"ready\n" for answer in self._heard()))

    def _start(self, rank: int, disk: Disk, ranks: int, size: int) -> None:
        home = self._files / str(rank)
        home.mkdir()
        group = BLKIO / f"fastckpt-pictures-{os.getpid()}-{rank}"
        group.mkdir()
        self.callback(group.rmdir)
        number = home.stat().st_dev
        for way, rate in (("write", disk.rate), ("read", disk.rate * READ)):
            allowed = f"{os.major(number)}:{os.minor(number)} {rate:.0f}"
            (group / f"blkio.throttle.{way}_bps_device").write_text(allowed, "ascii")
        if disk.size:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={disk.size}", "tmpfs", home], check=True)
            self.callback(lambda: subprocess.run(["umount", "--lazy", home], check=True))
        environment = {
            **os.environ,
            # LOCAL_WORLD_SIZE is not set: with it, a load uses the page cache, which the ranks of a node share. Here
            # each rank has separate files.
            "WORLD_SIZE": str(ranks),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "FASTCKPT_JOB": "train_gpt",
            "FASTCKPT_TOP_DIR": self._segments,
            "PYTHONPATH": str(REPOSITORY / "tests"),
        }
        filtered = [sys.executable, "-m", "harness.seccomp", disk.refused, "--"] if disk.refused else []
        command = [*filtered, sys.executable, str(Path(__file__).with_name("rank.py")), str(size)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self.callback(_end, child, group)
        (group / "cgroup.procs").write_text(str(child.pid), "ascii")
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        self._ranks.append(child)
        self._answers.append(b"")

    def _heard(self) -> list[bytes]:
        """The output of each rank since its last request."""
        for rank, child in enumerate(self._ranks):
            assert child.stdout is not None
            self._answers[rank] += child.stdout.read() or b""
        return self._answers

    def save(self, step: int, bandwidth_limit: int | None = None) -> None:
        """Make all ranks save."""
        io = {"threads": self._threads, "bandwidth_limit": bandwidth_limit}
        self._tell("save", step, io=io, metadata={"step": step})

    def load(self, step: int) -> None:
        """Make all ranks load."""
        self._tell("load", step, io={"threads": self._threads})

    def _tell(self, what: str, step: int, **options: object) -> None:
        self._heard()
        self._answers = [b""] * len(self._ranks)
        for rank, child in enumerate(self._ranks):
            assert child.stdin is not None
            order = {"do": what, "path": str(self._files / str(rank) / f"step-{step}"), **options}
            child.stdin.write(json.dumps(order).encode() + b"\n")
            child.stdin.flush()

    def until(self, probe: Callable[[], bool]) -> None:
        """Watch until `probe` returns True.

        Raises:
            TimeoutError: `probe` does not return True in `PATIENCE_S` seconds.
        """
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends:
            due = time.monotonic() + LOOK_S
            self.session.tick()
            if probe():
                return
            time.sleep(max(due - time.monotonic(), 0.0))
        raise TimeoutError(f"the awaited state did not come in {PATIENCE_S:g} s: {self._heard()}")

    def until_done(self) -> None:
        """Watch until all ranks have answered, and look once more."""
        self.until(lambda: all(self._heard()))
        self.session.tick()

    def until_progress(self, share: float) -> None:
        """Watch until the progress of the running operation reaches `share`, 0 to 1."""
        self.until(lambda: (op := self.model.main) is not None and op.running and (op.progress or 0.0) >= share)

    def rest(self, seconds: float) -> None:
        """Watch for this many seconds."""
        ends = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= ends)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a rank a signal."""
        self._ranks[rank].send_signal(number)

    def remove(self, step: int) -> None:
        """Remove a checkpoint to make room for the next."""
        for rank in range(len(self._ranks)):
            shutil.rmtree(self._files / str(rank) / f"step-{step}")


def _end(child: subprocess.Popen[bytes], group: Path) -> None:
    """Kill a rank, and wait until its cgroup is empty, so that the cgroup can be removed."""
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        pipe.close()
    ends = time.monotonic() + PATIENCE_S
    while (group / "cgroup.procs").read_text("ascii") and time.monotonic() < ends:
        time.sleep(0.1)
