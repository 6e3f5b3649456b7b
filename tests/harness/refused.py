"""Run a command as on a machine that refuses calls: ``python -m harness.refused EPERM|ENOSYS|user -- command ...``.

``EPERM`` and ``ENOSYS``: io_uring_setup returns that error, as under a container's profile. ``user``: an ordinary user
without capabilities, with RLIMIT_MEMLOCK 0 and a read-only home, made by a user namespace. This user may still read
root's files.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import seccomp

USER = ["unshare", "--user", "--map-user=65534", "--map-group=65534"]


def main() -> int:
    kind, separator, *command = sys.argv[1:]
    if separator != "--" or not command:
        raise SystemExit("usage: python -m harness.refused EPERM|ENOSYS|user -- command ...")
    with tempfile.TemporaryDirectory(prefix="fastckpt-home-") as home:
        if kind == "user":
            Path(home).chmod(0o500)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
            os.environ["HOME"] = home
            command = [*USER, *command]
        else:
            seccomp.install(kind)
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
