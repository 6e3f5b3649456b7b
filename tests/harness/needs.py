"""What tests require of the machine. An unmet requirement skips the test with a message, but fails if ``CI=true``:
a silent gap in CI is a bug."""

from __future__ import annotations

import importlib
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness import seccomp

CAP_NET_ADMIN = 12
CAP_IPC_LOCK = 14
CAP_SYS_ADMIN = 21


def missing(what: str) -> None:
    """Skip with a reason, but fail in CI, which must have everything."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must provide this: {what}")
    pytest.skip(f"NOT TESTED HERE: {what}", allow_module_level=True)


def root() -> None:
    """Require root with CAP_SYS_ADMIN, which may mount: a container's root without it counts as an ordinary user."""
    if os.geteuid() != 0:
        missing("needs root (mounts, loop devices, other user ids)")
    if not _capable(CAP_SYS_ADMIN):
        missing("needs CAP_SYS_ADMIN (root in a container has none; run it with --privileged)")


def network_namespaces() -> None:
    """Require that network namespaces can be made and joined."""
    root()
    if not _capable(CAP_NET_ADMIN):
        missing("needs CAP_NET_ADMIN (network namespaces; root in a container has none; run it with --privileged)")
    tool("ip", "iproute2")


def locked_memory() -> None:
    """Require that a process may lock all its memory."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY and not _capable(CAP_IPC_LOCK):
        missing("needs locked memory without a limit (ulimit -l unlimited, or CAP_IPC_LOCK)")


def ring() -> None:
    """Require that this process may set up an io_uring."""
    refused = seccomp.setup_errno()
    if refused:
        missing(f"needs io_uring ({os.strerror(refused)}: seccomp, a sysctl, or `ulimit -l`)")


def linux(version: tuple[int, int], what: str) -> None:
    """Require a kernel of at least ``version``, the first with the feature ``what``."""
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < version:
        missing(f"needs Linux {version[0]}.{version[1]} ({what})")


def of_torch(has: bool, what: str) -> None:
    """Require a feature that the oldest supported torch lacks."""
    if not has:
        missing(f"torch {importlib.import_module('torch').__version__} lacks {what}")


def torch_at_least(*version: int) -> bool:
    """Whether the installed torch is that version or a later one."""
    here = importlib.import_module("torch").__version__
    return tuple(map(int, re.findall(r"\d+", here)[: len(version)])) >= version


def _capable(capability: int) -> bool:
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    return bool(effective >> capability & 1)


def tool(name: str, package: str) -> str:
    """The path of a program; without the program, skip and name its package."""
    found = shutil.which(name)
    if found is None:
        missing(f"needs the program {name} (apt-get install {package})")
        raise AssertionError  # never reached: missing() raises
    return found


def package(name: str) -> Any:
    """The module of a package; without the package, skip and name it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        missing(f"needs the package {name} (pip install {name})")
