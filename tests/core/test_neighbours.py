"""Another user of the machine, who may read but not write a checkpoint, or who created a directory first."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import fastckpt
from harness import mounts, needs

#: Locks the files below a directory, prints their names, and holds the locks until its standard input is closed.
LOCKS = """
import fcntl, os, sys
os.setgroups([]), os.setresgid(*[65534] * 3), os.setresuid(*[65534] * 3)
for place, _, files in os.walk(sys.argv[1]):
    for name in (place, *(os.path.join(place, file) for file in files)):
        fcntl.flock(os.open(name, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        print(name, file=sys.stderr)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.root
def test_locks_of_a_reader_hold_nobody_up():
    needs.root()
    with mounts.public_directory() as directory:
        directory.chmod(0o755)
        path = directory / "step-1"
        fastckpt.save({"w": np.ones(1000)}, path)
        command = [sys.executable, "-c", LOCKS, directory]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as neighbour:
            assert neighbour.stdout is not None
            assert neighbour.stdout.readline() == "locked\n"
            assert fastckpt.load(path)["w"].sum() == 1000
            assert fastckpt.verify(path).ok
            fastckpt.save({"w": np.zeros(1000)}, path)
            assert fastckpt.load(path)["w"].sum() == 0
            fastckpt.remove(path)
            _, locked = neighbour.communicate("")
        assert len(locked.splitlines()) >= 4
        assert sorted(directory.iterdir()) == []


@pytest.mark.root
@pytest.mark.parametrize("trap", ["owner", "mode", "link"])
def test_nothing_is_published_where_somebody_else_was_first(tmp_path, trap):
    """If the directory of live counters is unsafe, a process counts in private memory, and its save works."""
    needs.root()
    counters = tmp_path / "counters"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    if trap == "link":
        counters.symlink_to(tmp_path / "elsewhere")
    else:
        counters.mkdir(mode=0o700)
    if trap == "owner":
        os.chown(counters, 65534, 65534)
    if trap == "mode":
        counters.chmod(0o777)
    code = """
import os, sys, numpy, fastckpt
fastckpt.save({"w": numpy.ones(9)}, sys.argv[1])
print(*os.listdir(sys.argv[2]))
"""
    run = [sys.executable, "-c", code, tmp_path / "c", counters]
    environment = {**os.environ, "FASTCKPT_TOP_DIR": str(counters)}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
    assert fastckpt.verify(tmp_path / "c").ok
    # In a safe directory, a process does publish its counters.
    environment["FASTCKPT_TOP_DIR"] = str(tmp_path / "elsewhere")
    run[-1] = tmp_path / "elsewhere"
    assert ".seg" in subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
