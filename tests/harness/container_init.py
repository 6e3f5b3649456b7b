"""Process 1 of a container (see container.py): the host's Python in new namespaces, without imports of ours."""

# ruff: noqa: PTH102, PTH103, PTH211 - paths as the kernel takes them

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The number of the system call pivot_root.
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def main(told: Mapping[str, Any]) -> None:
    """Be process 1: make the root from its parts, enter it, and wait to be killed."""
    at = told["at"]
    os.umask(0o022)

    def mount(*arguments: str) -> None:
        subprocess.run(["mount", *arguments], check=True)

    mount("--make-rprivate", "/")
    mount("--bind", told["root"], at)
    mount("-o", "remount,bind,ro,nosuid", at)
    mount("-t", "proc", "proc", f"{at}/proc")
    mount("-t", "sysfs", "-o", "ro", "sysfs", f"{at}/sys")
    if told["groups"] and told["groups"][0][0] == "cgroup":
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", f"{at}/sys/fs/cgroup")
    for kind, options, place in told["groups"]:
        os.makedirs(f"{at}/sys/fs/cgroup/{place}", exist_ok=True)
        mount("-t", kind, "-o", options, kind, f"{at}/sys/fs/cgroup/{place}")
    mount("-t", "tmpfs", "-o", "mode=755,nosuid", "tmpfs", f"{at}/dev")
    for device in ("null", "zero", "full", "random", "urandom"):
        Path(f"{at}/dev/{device}").touch()
        mount("--bind", f"/dev/{device}", f"{at}/dev/{device}")
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{at}/dev/{name}")
    os.mkdir(f"{at}/dev/shm")
    mount("-t", "tmpfs", "-o", f"size={told['shm']},mode=1777,nosuid,nodev,noexec", "shm", f"{at}/dev/shm")
    mount("-t", "tmpfs", "-o", "mode=1777,nosuid,nodev", "tmpfs", f"{at}/tmp")
    layers = f"lowerdir={told['lower']},upperdir={told['upper']},workdir={told['work']}"
    mount("-t", "overlay", "-o", layers, "overlay", f"{at}/home")
    for where, what in told["volumes"].items():
        os.makedirs(at + where, exist_ok=True)
        mount("--bind", what, at + where)
        if where in told["read_only"]:
            mount("-o", "remount,bind,ro", at + where)
    Path("/proc/sys/kernel/hostname").write_text(told["host"], encoding="ascii")
    os.chdir(at)
    libc = ctypes.CDLL(None, use_errno=True)
    # The first call mounts the old root over the new one, and the second call unmounts it.
    if libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b".") != 0 or libc.umount2(b".", 2) != 0:  # MNT_DETACH
        raise OSError(ctypes.get_errno(), "pivot_root")
    os.chdir("/")
    print("ready", flush=True)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.execv("/bin/sleep", ["sleep", "infinity"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
