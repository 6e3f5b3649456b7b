"""The telemetry page at moments at which only a program with access to internals can stop a save.

A save is on the page from the moment at which its state is copied, and the page agrees with the save's own report.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time

import pytest
from fastckpt_top import segment
from fastckpt_top.feed import ShmFeed
from fastckpt_top.model import Model
from fastckpt_top.segment import Phase
from looking import end, eventually, once

from harness import zygote

MB = 10**6
SIZE = 30 * MB

# Saves in one of several ways. The copy of the state waits for an input line, which names the next action.
PROGRAM = """
import json, os, sys, time
import numpy as np
import fastckpt
from harness.internals import Staging
way, path, size = sys.argv[1], sys.argv[2], int(sys.argv[3])

def held(real):
    def copy(*arguments, **options):
        print("held", flush=True)
        answer = sys.stdin.readline().strip()
        if answer == "raise":
            raise OSError(5, "no")
        if answer == "interrupt":
            raise KeyboardInterrupt
        if answer == "fork":
            child = os.fork()
            if child == 0:
                raise SystemExit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        return real(*arguments, **options)
    return copy

class Slow:
    def state_dict(self):
        held(lambda: None)()
        return {"weights": np.ones(size, np.uint8)}

def save():
    if way == "save":
        return fastckpt.save({"model": Slow()}, path)
    if way == "lazy":
        import torch
        Staging._copy_late = held(Staging._copy_late)
        return fastckpt.save_async({"a": torch.ones(size, dtype=torch.uint8)}, path, io=fastckpt.IO(lazy=True)).result()
    state = {"a": np.ones(size, np.uint8)}
    if way in ("async", "ranks"):
        Staging.stage = held(Staging.stage)
        save_async = fastckpt.save_async if way == "async" else fastckpt.distributed.save_async
        return save_async(state, path, metadata={"step": 7}).result()
    if way == "queued":
        first = fastckpt.save_async(state, path + "-first", io=fastckpt.IO(bandwidth_limit=size // 2))
        print("queued", flush=True)
        report = fastckpt.save_async(state, path).result()
        first.result()
        return report
    raise AssertionError(way)

try:
    report = save()
    told = {"seconds": report.seconds, "bytes": report.bytes, "phases": dict(report.phases)}
except SystemExit:
    raise
except BaseException as error:
    told = {"error": type(error).__name__}
print(json.dumps(told), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def program(place, tmp_path):
    """Starts the program, and kills it at the end."""
    children = []

    def start(way, size=SIZE):
        command = [sys.executable, "-c", PROGRAM, way, str(tmp_path / "step-7"), str(size)]
        environment = zygote.environment() | {"FASTCKPT_TOP_DIR": str(place)}
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        children.append(child)
        return child

    yield start
    end(children)


class Watch:
    """The data of a monitor about the only process in a directory."""

    def __init__(self, place):
        self.feed = ShmFeed([str(place)])
        self.model = Model()

    def look(self):
        self.model.update(self.feed.poll())
        return self.model.snapshot.procs[0] if self.model.snapshot.procs else None

    @property
    def row(self):
        (row,) = self.model.rows
        return row


@pytest.fixture
def watch(place):
    made = Watch(place)
    yield made
    made.feed.close()


def tell(child, word=""):
    child.stdin.write(f"{word}\n")
    child.stdin.flush()


def agrees(watch, report):
    """Check that the monitor's row and the history record agree with the report."""
    proc = watch.look()
    assert watch.row.state == "DONE"
    assert watch.row.average == pytest.approx(report["bytes"] / report["seconds"], rel=0.05)
    assert proc.history[-1].dur_ns / 1e9 == pytest.approx(report["seconds"], rel=0.05)


# The copy of the small state, by one thread, ends before it would report any progress.
@pytest.mark.parametrize(("way", "size"), [("async", SIZE), ("async", MB), ("lazy", SIZE), ("ranks", SIZE)])
def test_the_copy_is_phase_stage_and_counts_as_time_of_the_save(program, watch, way, size):
    child = program(way, size)
    assert child.stdout.readline() == "held\n"
    (op,) = watch.look().operations
    assert (op.phase, op.bytes_staged, op.bytes_to_stage, op.bytes_total) == (Phase.STAGE, 0, size, 0)
    assert op.label == "step-7"
    assert op.step == (-1 if way == "lazy" else 7)
    row = watch.row
    assert (row.state, row.stalled_s, row.rate, row.average) == ("STAGE", None, None, None)
    # The copy has to be long compared with the write.
    assert eventually(lambda: time.monotonic_ns() - op.t_start_mono_ns > 10**9)
    tell(child)
    report = json.loads(child.stdout.readline())
    assert report["phases"]["stage"] > 0.5
    agrees(watch, report)
    (op,) = watch.look().operations
    assert op.bytes_staged == size


def test_what_a_save_does_before_the_core_begins_counts_as_time(program, watch):
    child = program("save")
    assert child.stdout.readline() == "held\n"
    assert watch.look() is None
    began = time.monotonic()
    assert eventually(lambda: time.monotonic() - began > 1)
    tell(child)
    report = json.loads(child.stdout.readline())
    agrees(watch, report)
    assert report["phases"]["plan"] > 1
    assert watch.look().operations[0].bytes_to_stage == 0, "a synchronous save stages nothing"


def test_a_save_that_waits_for_another_is_not_there_and_no_stall(program, watch):
    child = program("queued")
    assert child.stdout.readline() == "queued\n"
    seen = 0
    while True:
        operations = watch.look().operations
        first = min(operations, key=lambda op: op.op_id)
        if not first.running:
            break
        assert len(operations) == 1, "the second save waits and has not begun"
        seen += 1
    assert seen
    report = json.loads(child.stdout.readline())
    assert report["phases"]["wait"] > 0.5
    agrees(watch, report)


@pytest.mark.parametrize(
    ("way", "answer", "number"),
    [("async", "raise", errno.EIO), ("async", "interrupt", 0), ("ranks", "raise", errno.EIO)],
)
def test_a_copy_that_fails_or_is_given_up_fails_the_operation(program, watch, way, answer, number):
    child = program(way)
    assert child.stdout.readline() == "held\n"
    assert watch.look().operations[0].running
    tell(child, answer)
    assert json.loads(child.stdout.readline())["error"] == ("OSError" if answer == "raise" else "KeyboardInterrupt")
    proc = watch.look()
    (op,), (record,) = proc.operations, proc.history
    assert (op.phase, op.error) == (Phase.FAILED, number)
    assert (record.result, record.error) == (2, number)
    assert proc.process.state == 0, "nothing runs any more"


@pytest.mark.parametrize("way", ["async", "ranks"])
def test_a_forked_child_that_gives_the_copy_up_leaves_the_parents_page_alone(program, watch, way):
    child = program(way)
    assert child.stdout.readline() == "held\n"
    tell(child, "fork")
    assert child.stdout.readline() == "7\n", "the child exited with its own status"
    agrees(watch, json.loads(child.stdout.readline()))


GROUP = """
import os, sys
import fastckpt
from fastckpt import _core
_core.set_group(2**63 + 5, 2, 4)
fastckpt.save({}, sys.argv[1])
_core.wait_for(1)
os.write(1, b"waits\\n")
sys.stdin.readline()
_core.wait_for(None)
os.write(1, b"waits no more\\n")
sys.stdin.readline()
"""


def test_the_process_group_and_whom_a_rank_waits_for_are_published(place, tmp_path):
    command = [sys.executable, "-c", GROUP, str(tmp_path / "c")]
    environment = {**os.environ, "FASTCKPT_TOP_DIR": str(place), "RANK": "7"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:

        def row():
            (found,) = once(place)["ranks"]
            return found["rank"], found["state"], found["wait"]

        assert child.stdout.readline() == "waits\n"
        assert row() == (2, "wait", "rank 1")
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "waits no more\n"
        assert row()[0] == 2
        assert row()[1:] == ("done", None)
        child.stdin.write("\n")


WARNS = """
import sys
import fastckpt
from fastckpt import _core
fastckpt.save({}, sys.argv[1])
for text in ("ranks differ in w", "ranks differ in " + 100 * "v"):
    _core.warn(text)
    print(flush=True)
    sys.stdin.readline()
"""


def test_what_a_process_warns_of_is_published(place, tmp_path):
    command = [sys.executable, "-c", WARNS, str(tmp_path / "c")]
    environment = {**os.environ, "FASTCKPT_TOP_DIR": str(place)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        for number, text in ((1, "ranks differ in w"), (2, "ranks differ in " + 48 * "v")):
            child.stdout.readline()
            (file,) = place.glob("*.seg")
            process = segment.decode(file.read_bytes()).process
            assert (process.warned, process.warning) == (number, text)
            child.stdin.write("\n")
            child.stdin.flush()


# A slow function produces the bytes of these tensors, as for tensors on a device.
PULLED = """
import json, sys, time
import torch
import fastckpt
from fastckpt._tensors.movers import Sources
real = Sources.fill
def slow(self, ranges):
    time.sleep(0.1)
    return real(self, ranges)
Sources.fill = slow
state = {"a": torch.ones(4000, 4000, dtype=torch.float32).t()}
report = fastckpt.save(state, sys.argv[1], io=fastckpt.IO("uring", threads=1))
print(json.dumps([report.engine, report.phases["write"]]))
"""


def test_a_slow_source_is_the_source_also_where_writes_are_under_way_meanwhile(place, tmp_path):
    environment = zygote.environment() | {"FASTCKPT_TOP_DIR": str(place)}
    command = [sys.executable, "-c", PULLED, str(tmp_path / "c")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    engine, wrote = json.loads(done.stdout)
    assert engine == "uring"
    shm = ShmFeed([str(place)])
    (proc,) = shm.poll().procs
    ((_, thread),) = proc.threads
    shm.close()
    assert thread.source_wait_ns / 1e9 > 0.1 * 64 * MB / (16 << 20), "each call sleeps"
    assert thread.source_wait_ns + thread.busy_ns <= wrote * 1.1e9, "no moment counts twice"
