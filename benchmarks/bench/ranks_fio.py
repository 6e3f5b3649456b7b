"""The raw device under several processes: fio with the best of several settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench import BLOCK, device

if TYPE_CHECKING:
    from pathlib import Path

# The depths to try, with one job in all and with one job per rank.
DEPTHS = (4, 8, 32)


@dataclass(frozen=True)
class Fio:
    """A setting: a number of jobs, each with a number of blocks in flight, all in one file."""

    jobs: int
    depth: int

    def __str__(self) -> str:
        return f"{self.jobs} jobs, {self.depth} blocks of 4 MiB in flight each"

    @classmethod
    def best(cls, directory: Path, size: int, ranks: int) -> Fio:
        """Try all settings twice on a quarter of the size, and return the setting that writes fastest.

        Raises:
            SystemExit: fio is not installed.
        """
        if shutil.which("fio") is None:
            raise SystemExit("the raw device is measured with fio, which is not installed (apt-get install fio)")
        settings = [cls(jobs, depth) for jobs in sorted({1, ranks}) for depth in DEPTHS]
        part = max(size // 4, BLOCK * ranks)
        path = directory / "fio"
        seconds = [min(each.run(path, part)["save"] for _ in range(2)) for each in settings]
        return settings[seconds.index(min(seconds))]

    def run(self, path: Path, size: int) -> dict[str, float]:
        """Write and read about ``size`` bytes; return fio's own seconds, scaled to that size. The file is removed."""
        try:
            os.sync()
            saved = self._transfer(path, size, "write")
            device.drop_caches(path)
            return {"save": saved, "load": self._transfer(path, size, "read")}
        finally:
            path.unlink(missing_ok=True)

    def _transfer(self, path: Path, size: int, kind: str) -> float:
        part = max(BLOCK, size // self.jobs // BLOCK * BLOCK)
        command = ["fio", "--name=raw", f"--rw={kind}", f"--bs={BLOCK}", f"--iodepth={self.depth}", "--direct=1"]
        command += ["--ioengine=io_uring", "--thread", f"--numjobs={self.jobs}", f"--size={part}"]
        command += [f"--offset_increment={part}", f"--filename={path}", "--group_reporting", "--output-format=json"]
        if kind == "write":
            # The whole file is allocated first; only the writing is timed.
            command += ["--end_fsync=1"]
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, part * self.jobs)
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        limit = 60 + size / device.SLOWEST
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=limit)
        if done.returncode:
            raise OSError(f"fio failed to {kind} {path}: {done.stderr or done.stdout}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return max(job[kind]["runtime"], 0.5) / 1000 * size / (part * self.jobs)
