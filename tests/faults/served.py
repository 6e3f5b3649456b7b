"""A mount that a process of the tests serves, with requests in lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import zygote

TESTS = Path(__file__).parents[1]


class Mount:
    """The mount, for many programs.

    Args:
        point: where.
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
        """Send a request; see the module that serves it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """Unmount it. Containers that were made meanwhile may still have the mount, and would keep the process."""
        subprocess.run(["umount", "-l", self.point], capture_output=True, check=False)
        with self.process:
            self.process.kill()
