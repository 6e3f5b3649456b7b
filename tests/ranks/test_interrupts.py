"""A call that is interrupted at any of its lines leaves neither a turn nor a save behind that others wait for."""

from __future__ import annotations

import tempfile

import pytest

from harness import programs

PROGRAM = """
import faulthandler, sys, threading

import numpy as np

import fastckpt
from fastckpt import distributed

kind, directory = sys.argv[1:]
state = {"w": np.arange(1000.0)}
calls = {
    "alone": lambda: fastckpt.save_async(state, f"{directory}/a"),
    "ranks": lambda: distributed.save_async(state, f"{directory}/a", max_in_flight=1),
    "lazy": lambda: distributed.save_async(state, f"{directory}/a", lazy=True),
}


class At:
    \"""Interrupts the calling thread at a line of this package.\"""

    def __init__(self, number):
        self.left, self.where = number, None

    def __call__(self, frame, event, _):
        if "/fastckpt/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


number = 0
while True:
    number += 1
    at = At(number)
    faulthandler.dump_traceback_later(120, exit=True)
    sys.settrace(at)
    try:
        calls[kind]()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    if at.where is None:
        break
    print(number, at.where, flush=True)
    distributed.save(state, f"{directory}/b")
    fastckpt.drain(60)
print(number, "lines")
"""


@pytest.mark.parametrize("kind", ["alone", "ranks", "lazy"])
def test_a_call_that_is_interrupted_at_any_line_holds_up_no_later_one(children, tmp_path, kind):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        done = programs.run(children, [script, kind, memory], timeout=600)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr
    assert int(done.stdout.split()[-2]) > 500, "the lines of the package are not traced"


OVERTAKES = """
import faulthandler, sys, threading

import fastckpt
from fastckpt import distributed
from fastckpt._api import in_flight

directory, second = sys.argv[1:]
faulthandler.dump_traceback_later(60, exit=True)
admit = in_flight.admit


def overtaken(save, most):
    # Another thread calls, or a signal handler, when the first call has taken its turn.
    if not calls:
        calls.append(save.path)
        handles.append(distributed.save_async({"w": 2}, f"{directory}/{second}", max_in_flight=1))
    admit(save, most)


calls, handles = [], []
in_flight.admit = overtaken
first = distributed.save_async({"w": 1}, f"{directory}/a", max_in_flight=1)
print(first.result().path, handles[0].result().path, fastckpt.load(f"{directory}/{second}")["w"])
"""


@pytest.mark.parametrize("second", ["b", "a"])
def test_a_call_does_not_wait_for_one_that_has_overtaken_it_and_waits_for_its_turn(children, tmp_path, second):
    script = tmp_path / "program.py"
    script.write_text(OVERTAKES)
    done = programs.run(children, [script, tmp_path, second])
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/a {tmp_path}/{second} 2\n"
