"""A save needs little memory beyond the state, and so does a load."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import numpy as np, fastckpt

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

path, operation, io = sys.argv[1:]
state = {"w": np.frombuffer(bytearray(np.random.default_rng(0).bytes(512 << 20)), np.uint8)}
expected = state["w"].copy() if operation == "into" else None
if operation != "save":
    fastckpt.save(state, path)
if operation == "load":
    state = None
if operation == "into":
    state["w"][:] = 0
# The peak from here on: making the state took more.
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS:")
if operation == "save":
    fastckpt.save(state, path, io=io)
else:
    state = fastckpt.load(path, into=state, io=io)
grown = status("VmHWM:") - before
assert expected is None or np.array_equal(state["w"], expected)
print(json.dumps([grown, state["w"].nbytes]))
"""


@pytest.mark.parametrize("io", ["uring", "threads", "buffered"])
@pytest.mark.parametrize(("operation", "beyond"), [("save", 128), ("load", 512 + 64), ("into", 64)])
def test_memory_beyond_the_state(tmp_path, operation, beyond, io):
    """512 MiB, in MiB: a load needs what it loads, ``into=`` not even that."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "c"), operation, io]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    grown, size = json.loads(done.stdout)
    assert size == 512 << 20
    assert grown <= beyond << 20
