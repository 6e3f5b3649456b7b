"""A call that is interrupted at any line leaves no turn and no save for which others would wait."""

from __future__ import annotations

import re
import tempfile

import pytest

from harness import programs

#: Runs a function at a line of a program, like a signal handler.
AT = """
import sys


class At:
    \"""Calls a function once, in the calling thread, at line ``number`` of those run below a folder.\"""

    def __init__(self, folder, number, function):
        self.folder, self.left, self.function = folder, number, function
        self.where = None

    def __call__(self, frame, event, _):
        if self.folder not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                self.function()
        return self
"""

PROGRAM = """
import faulthandler

import numpy as np

import fastckpt
from fastckpt import distributed

kind, directory = sys.argv[1:]
state = {"w": np.arange(1000.0)}
calls = {
    "alone": lambda: fastckpt.save_async(state, f"{directory}/a"),
    "ranks": lambda: distributed.save_async(state, f"{directory}/a", io=fastckpt.IO(max_in_flight=1)),
    "lazy": lambda: distributed.save_async(state, f"{directory}/a", io=fastckpt.IO(lazy=True)),
}


def interrupt():
    raise KeyboardInterrupt


number = 0
while True:
    number += 1
    at = At("/fastckpt/", number, interrupt)
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
    fastckpt.background.drain(60)
print(number, "lines")
"""


@pytest.mark.parametrize("kind", ["alone", "ranks", "lazy"])
def test_a_call_that_is_interrupted_at_any_line_holds_up_no_later_one(children, tmp_path, kind):
    script = tmp_path / "program.py"
    script.write_text(AT + PROGRAM)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        done = programs.run(children, [script, kind, memory], timeout=600)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr
    assert int(done.stdout.split()[-2]) > 500, "the trace missed lines of the package"


OVERTAKES = """
import faulthandler, sys, threading

import fastckpt
from fastckpt import distributed
from fastckpt._api import in_flight

directory, second = sys.argv[1:]
faulthandler.dump_traceback_later(60, exit=True)
admit = in_flight.admit


def overtaken(save, most):
    # Another thread or a signal handler calls when the first call has taken its turn.
    if not calls:
        calls.append(save.path)
        handles.append(distributed.save_async({"w": 2}, f"{directory}/{second}", io=fastckpt.IO(max_in_flight=1)))
    admit(save, most)


calls, handles = [], []
in_flight.admit = overtaken
first = distributed.save_async({"w": 1}, f"{directory}/a", io=fastckpt.IO(max_in_flight=1))
print(first.result().path, handles[0].result().path, fastckpt.load(f"{directory}/{second}")["w"])
"""


@pytest.mark.parametrize("second", ["b", "a"])
def test_a_call_does_not_wait_for_one_that_has_overtaken_it_and_waits_for_its_turn(children, tmp_path, second):
    script = tmp_path / "program.py"
    script.write_text(OVERTAKES)
    done = programs.run(children, [script, tmp_path, second])
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/a {tmp_path}/{second} 2\n"


ON_TOP = """
import faulthandler, sys

import fastckpt
from fastckpt import distributed

below, above, directory = sys.argv[1:]
faulthandler.dump_traceback_later(60, exit=True)


class Interrupted:
    \"""A value during whose save a signal handler runs.\"""


def handle(_):
    handlers[above]()
    return {}


def save():
    try:
        distributed.save({"w": 2}, f"{directory}/b")
    except RuntimeError as error:
        print(error)


def save_async():
    distributed.save_async({"w": 2}, f"{directory}/a")
    fastckpt.background.drain()


fastckpt.register_type(Interrupted, handle, lambda _: Interrupted(), name="interrupted")
handlers = {"save": save, "save_async": save_async}
getattr(distributed, below)({"w": 1, "i": Interrupted()}, f"{directory}/a")
fastckpt.background.drain()
print(fastckpt.load(f"{directory}/a", keys="w"))
"""


@pytest.mark.parametrize("below", ["save", "save_async"])
@pytest.mark.parametrize(
    ("above", "told"),
    [("save", "this thread is in a save or load of the same process group.*'w': 1"), ("save_async", "{'w': 2}")],
)
def test_a_signal_handler_does_not_wait_for_a_turn_behind_the_call_that_it_has_interrupted(
    children, tmp_path, below, above, told
):
    script = tmp_path / "program.py"
    script.write_text(ON_TOP)
    done = programs.run(children, [script, below, above, tmp_path])
    assert done.returncode == 0, done.stderr
    assert re.match(told, done.stdout, re.DOTALL)


DRAINS = """
import faulthandler, threading

import fastckpt
from fastckpt import distributed
from fastckpt._ranks import background

directory = sys.argv[1]
write = background.Job._write


def held(job):
    begins.wait(0.2)
    return write(job)


def drain():
    # A handler drains while an earlier save has its turn.
    global earlier
    earlier = not pending.done()
    begins.set()
    fastckpt.background.drain(30)


background.Job._write = held
number, earlier = 0, True
while earlier:
    number += 1
    begins, at = threading.Event(), At("/fastckpt/_ranks/", number, drain)
    faulthandler.dump_traceback_later(120, exit=True)
    pending = distributed.save_async({"w": 1}, f"{directory}/a")
    sys.settrace(at)
    try:
        distributed.save({"w": 2}, f"{directory}/b")
    finally:
        sys.settrace(None)
    fastckpt.background.drain()
print(number, "lines")
"""


def test_a_signal_handler_drains_at_any_line_of_a_call_that_takes_its_turn(children, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(AT + DRAINS)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        done = programs.run(children, [script, memory], timeout=600)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr
    assert int(done.stdout.split()[-2]) > 50, "the trace missed lines of the package"
