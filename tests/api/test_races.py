"""Readers and savers during repeated replacements of the same checkpoint."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import fastckpt

SAVES = 200  # at least, for each saver: it goes on until its standard input is closed
SAVER = """
import select, sys
import numpy as np
import fastckpt
number = int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
last = number + 2 * int(sys.argv[3])
while number < last or not select.select([sys.stdin], [], [], 0)[0]:
    number += 2
    fastckpt.save({"a": np.full(100, number), "number": number}, sys.argv[1])
print(number)
"""


@pytest.fixture
def savers(tmp_path):
    """Starts two processes that save to one path as fast as they can."""
    fastckpt.save({"a": np.zeros(100, np.int64), "number": 0}, tmp_path / "c")
    command = [sys.executable, "-c", SAVER, str(tmp_path / "c")]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    started = [subprocess.Popen([*command, str(first), str(SAVES)], text=True, **pipes) for first in (0, 1)]
    for saver in started:
        assert saver.stdout.readline() == "ready\n"
    for saver in started:
        saver.stdin.write("go\n")
        saver.stdin.flush()
    yield started
    for saver in started:
        saver.kill()
        saver.communicate()


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_never_corrupt(savers, tmp_path):
    last, replaced = 0, 0
    while replaced < 200:
        fastckpt.open(tmp_path / "c").close()
        state = fastckpt.load(tmp_path / "c")
        assert (state["a"] == state["number"]).all()
        replaced += state["number"] != last
        last = state["number"]
        assert all(saver.poll() is None for saver in savers)


def test_savers_to_one_path_all_succeed(savers, tmp_path):
    for saver in savers:
        saver.stdin.close()
        saver.stdin = None
    last = []
    for saver in savers:
        said, errors = saver.communicate(timeout=120)
        assert saver.returncode == 0, errors
        last.append(int(said))
    assert min(last) >= 2 * SAVES
    assert fastckpt.verify(tmp_path / "c").ok
    assert fastckpt.load(tmp_path / "c")["number"] in last
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
