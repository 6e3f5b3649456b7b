"""A real NFSv4.2 server with two clients, in a user-mode Linux: an ordinary process that needs no privileges here.

Its root file system is this machine's, read-only. Its first process, ``uml/init.py``, starts the server and mounts it
at ``/run/a`` and ``/run/b``. ``uml/fetch`` downloads its programs. It has one CPU and boots in about three seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import needs, zygote

HERE = Path(__file__).resolve().parent / "uml"
UNPACKED = HERE.parents[2] / "target" / "uml"
SERVER, CLIENTS = Path("/run/disk/shared"), (Path("/run/a"), Path("/run/b"))
OUT = Path("/run/out")
DISK = 512 << 20


def require() -> Path:
    """The directory of the programs; without them, skip and name the command that fetches them."""
    if not (UNPACKED / "whole").exists() or not (UNPACKED / "xstate.so").exists():
        needs.missing("needs user-mode Linux and an NFS server (run tests/harness/uml/fetch)")
    needs.tool("mkfs.ext4", "e2fsprogs")
    needs.tool("strace", "strace")
    return UNPACKED


def boot(program: Path, *arguments: str, seconds: int) -> list[dict[str, Any]]:
    """Run a Python program between two clients; returns the JSON lines that it wrote to ``OUT/results``."""
    programs = require()
    with tempfile.TemporaryDirectory(prefix="fastckpt-uml-") as name:
        out = Path(name)
        disk = out / "disk"
        with disk.open("wb") as file:
            file.truncate(DISK)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(disk)], check=True)
        # The kernel's command line is short, and the kernel adds to it, so a file passes the command.
        (out / "program").write_text(json.dumps([str(program), *arguments]), encoding="utf-8")
        command = [
            *("timeout", "--signal=KILL", str(seconds), str(programs / "usr/bin/linux.uml")),
            *("rootfstype=hostfs", "rootflags=/", "root=none", "ro", "mem=1G", "quiet", f"ubda={disk}"),
            *("con=null", "con0=null,fd:1", f"uml_dir={out}"),
            *(f"PYTHONPATH={zygote.environment()['PYTHONPATH']}", f"init={sys.executable}", "--"),
            *(str(HERE / "init.py"), str(programs), name),
        ]
        variables = {
            **{key: value for key, value in os.environ.items() if not key.startswith("FASTCKPT_")},
            "LD_PRELOAD": str(programs / "xstate.so"),
        }
        # `timeout` ends a separate session as a whole: each process inside is a process of this machine.
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=variables, check=False, start_new_session=True
        )
        log = out / "log"
        said = done.stdout.decode(errors="replace") + (log.read_text(errors="replace") if log.exists() else "")
        results = out / "results"
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        found = [json.loads(line) for line in lines]
        if not found or found[-1] != {"end": True}:
            raise AssertionError(f"exit {done.returncode} after {found}: {said[-4000:]}")
        print(said)
        return found[:-1]
