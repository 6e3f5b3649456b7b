"""Readers and savers that meet others who replace the same checkpoint, again and again."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

import fastckpt

SECONDS = 4.0
SAVER = """
import sys, time
import numpy as np
import fastckpt
end = time.monotonic() + float(sys.argv[3])
number = int(sys.argv[2])
while time.monotonic() < end:
    number += 2
    fastckpt.save({"a": np.full(100, number), "number": number}, sys.argv[1])
"""


@pytest.fixture
def savers(tmp_path):
    """Two processes that save to one path, as fast as they can."""
    fastckpt.save({"a": np.zeros(100, np.int64), "number": 0}, tmp_path / "c")
    command = [sys.executable, "-c", SAVER, str(tmp_path / "c")]
    started = [
        subprocess.Popen([*command, str(first), str(SECONDS)], stderr=subprocess.PIPE, text=True) for first in (0, 1)
    ]
    yield started
    for saver in started:
        saver.kill()
        saver.communicate()


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_never_corrupt(savers, tmp_path):
    end = time.monotonic() + SECONDS
    loads = 0
    while time.monotonic() < end:
        fastckpt.open(tmp_path / "c").close()
        state = fastckpt.load(tmp_path / "c")
        assert (state["a"] == state["number"]).all()
        loads += 1
    assert loads > 20


def test_savers_to_one_path_all_succeed(savers, tmp_path):
    for saver in savers:
        _, errors = saver.communicate(timeout=60)
        assert saver.returncode == 0, errors
    assert fastckpt.verify(tmp_path / "c").ok
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
