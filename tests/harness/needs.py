"""What a test needs of its machine. A need that is not met skips loudly, and fails where ``CI=true``:
a silent gap is a bug."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

CAP_SYS_ADMIN = 21


def missing(what: str) -> None:
    """Skip with a reason; fail instead where CI promises that everything is there."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must provide this, and does not: {what}")
    pytest.skip(f"NOT TESTED HERE: {what}")


def root() -> None:
    """Require a root that may mount: a container's root without CAP_SYS_ADMIN is an ordinary user to these tests."""
    if os.geteuid() != 0:
        missing("needs root (mounts, loop devices, other user ids)")
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    if not effective >> CAP_SYS_ADMIN & 1:
        missing("needs CAP_SYS_ADMIN (root in a container has none; run it with --privileged)")


def tool(name: str, package: str) -> str:
    """The path of a program, or a loud skip that names the package that has it."""
    found = shutil.which(name)
    if found is None:
        missing(f"needs the program {name} (apt-get install {package})")
        raise AssertionError  # missing() has raised already
    return found
