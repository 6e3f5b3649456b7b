"""A mount that a separate process serves, and that takes requests as lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import zygote

TESTS = Path(__file__).parents[1]


class Mount:
    """The mount, which serves many programs.

    Args:
        point: the mount point.
        module: the serving module; it prints ``mounted``, and answers each line.
    """

    def __init__(self, point: str, module: str) -> None:
        self.point = point
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, point],
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=zygote.environment(),
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "mounted\n":
            raise AssertionError("cannot mount: this needs root and /dev/fuse")

    def ask(self, **request: Any) -> Any:
        """Send a request; the serving module describes the requests."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """Unmount it, and end the process: containers that were made meanwhile may still have the mount."""
        subprocess.run(["umount", "-l", self.point], capture_output=True, check=False)
        with self.process:
            self.process.kill()
