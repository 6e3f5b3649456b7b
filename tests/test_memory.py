"""A save needs little memory beyond the state."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys
import numpy as np, fastckpt

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

state = {"w": np.frombuffer(bytearray(np.random.default_rng(0).bytes(512 << 20)), np.uint8)}
# The peak from here on: making the state took more.
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS:")
report = fastckpt.save(state, sys.argv[1])
print(json.dumps([status("VmHWM:") - before, report.bytes]))
"""


def test_a_save_of_512_mib_needs_128_mib_at_most(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "c")], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, written = json.loads(done.stdout)
    assert written == 512 << 20
    assert grown <= 128 << 20
