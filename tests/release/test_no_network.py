"""Neither fastckpt nor the monitor uses the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from harness import needs

LIBRARY = """
import sys, numpy, fastckpt
path = sys.argv[1]
state = {"w": numpy.arange(1000.0), "step": 1}
fastckpt.save(state, path)
fastckpt.load(path)
fastckpt.load(path, into=state)
fastckpt.load(path, io=fastckpt.IO(mmap=True))
fastckpt.verify(path)
fastckpt.save_async(state, path).result()
with fastckpt.open(path) as checkpoint:
    checkpoint["w"]
fastckpt.list(".")
fastckpt.tools.doctor(".", probe=False)
fastckpt.tools.plan(params="7B", gpus=8)
assert "torch" not in sys.modules
"""

COMMANDS = """
set -eu
"$PYTHON" -W error -c "$LIBRARY" step-1
"$PYTHON" -m fastckpt info step-1
"$PYTHON" -m fastckpt verify step-1
"$PYTHON" -m fastckpt doctor || test $? = 1
"$PYTHON" -m fastckpt plan --params 7B --gpus 8
"$PYTHON" -m fastckpt_top --once
# The control: sockets that this test must see.
"$PYTHON" -c "import socket; socket.socket(socket.AF_INET).close(); socket.socket(socket.AF_INET6).close()"
"""


def test_no_socket_of_the_internet_is_made(tmp_path):
    strace = needs.tool("strace", "strace")
    log = tmp_path / "log"
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [strace, "-f", "--seccomp-bpf", "-o", log, "-e", "trace=%network", "sh", "-c", COMMANDS],
        cwd=work,
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "LIBRARY": LIBRARY,
            "FASTCKPT_TOP_DIR": str(tmp_path / "segments"),
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    for word in ("verified", "io_uring", "verify step-1: ", "7.00 B parameters"):
        assert word in done.stdout, done.stdout
    internet = re.findall(r"^\d+ +(\w+)\(.*\b(AF_INET6?|AF_NETLINK|AF_PACKET)\b", log.read_text("utf-8"), re.MULTILINE)
    assert internet == [("socket", "AF_INET"), ("socket", "AF_INET6")], "the control, and nothing else"
