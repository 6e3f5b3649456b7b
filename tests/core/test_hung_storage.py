"""Storage that never answers a call, or a kernel that never accepts one: the save ends, and the program continues."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from fastckpt.exceptions import DeadlineError
from harness import mounts, programs, strace, zygote

pytestmark = pytest.mark.root

#: The request that gets no answer, the name of the call in the error, and the name of its file.
CALLS = [
    ("mkdir", "make", ".c.tmp-"),
    ("open", "open", "model.safetensors"),
    ("write", "write", "model.safetensors"),
    ("fsync", "sync", "/"),
    ("flush", "close", "model.safetensors"),
    ("rename", "rename", ".c.tmp-"),
]
STATE = {"model": {"w": np.arange(300_000.0)}}


@pytest.fixture(scope="module")
def mounted():
    with mounts.hanging() as hanging:
        yield hanging


@pytest.fixture
def storage(mounted):
    yield mounted
    _, hang = mounted
    hang()


def threads():
    """The names of fastckpt's threads in this process."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            names.append((task / "comm").read_text(encoding="ascii").strip())
    return [name for name in names if name.startswith("fastckpt")]


def until(true):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def saved(path, deadline, engine="auto", *, background=False):
    io = fastckpt.IO(engine, deadline=deadline)
    if background:
        return fastckpt.save_async(STATE, path, io=io).result()
    return fastckpt.save(STATE, path, io=io)


def given_up(storage, directory, request, call, **how):
    """Save while the storage does not answer ``request``; return the error and the directory.

    On a busy machine, another call may be late, too: then a save with a longer deadline follows.
    """
    point, hang = storage
    for number in itertools.count():
        place = point / f"{directory}-{number}"
        place.mkdir()
        hang(request)
        with pytest.raises(DeadlineError) as caught:
            saved(place / "c", 0.2 * 4**number, **how)
        if f"cannot {call} `" in str(caught.value) or number == 4:
            return caught.value, place
        hang()
    raise AssertionError


def ended():
    """Wait until all threads have ended, now that the storage answers."""
    until(lambda: not threads())


@pytest.mark.parametrize(("request_", "call", "name"), CALLS)
def test_the_error_names_the_call_and_the_file(storage, request_, call, name):
    background = request_ in {"open", "fsync"}
    engine = {"write": "uring", "flush": "threads"}.get(request_, "auto")
    error, place = given_up(storage, request_, request_, call, background=background, engine=engine)
    assert f"cannot {call} `{place}" in str(error)
    assert name in error.filename
    assert (error.errno, isinstance(error, TimeoutError)) == (errno.ETIMEDOUT, False)
    assert ("may be there" in str(error)) == (request_ == "rename")
    assert threads()
    # No later save waits for that storage, and other storage works.
    with pytest.raises(DeadlineError, match="has not begun"):
        saved(place / "d", 1000.0, background=True)
    _, hang = storage
    hang()
    ended()
    left = [entry.name for entry in place.iterdir()]
    assert left == (["c"] if request_ == "rename" else [])
    saved(place / "c", 1000.0)
    assert (fastckpt.load(place / "c")["model"]["w"] == STATE["model"]["w"]).all()


@pytest.mark.parametrize("engine", ["threads", "buffered"])
def test_engines_and_elsewhere(storage, engine, tmp_path):
    error, place = given_up(storage, engine, "write", "write", engine=engine, background=True)
    assert "nothing of it gets the checkpoint's name" in str(error)
    # The next save does not use the snapshot that the hanging save still reads.
    for number in range(2):
        pending = fastckpt.save_async({"model": {"w": STATE["model"]["w"] + number}}, tmp_path / f"{number}")
        pending.result()
        assert fastckpt.load(tmp_path / f"{number}")["model"]["w"][7] == 7 + number
    _, hang = storage
    hang()
    ended()
    assert not any(place.iterdir())


def test_a_save_that_is_cancelled_while_storage_hangs_has_failed(storage, tmp_path):
    point, hang = storage
    for number in itertools.count():
        place = point / f"cancelled-{number}"
        place.mkdir()
        hang("write")
        pending = fastckpt.save_async(STATE, place / "c", io=fastckpt.IO(deadline=0.2 * 4**number))
        until(lambda: any(place.glob(".c.tmp-*/model.safetensors")))  # noqa: B023 - called here
        time.sleep(0.05 * 4**number)
        # The save has written something. On a busy machine, it may be cancelled before that.
        if not pending.cancel() or number == 4:
            break
    with pytest.raises(DeadlineError, match="cannot write"):
        pending.result()
    # The next save uses another snapshot.
    fastckpt.save_async({"w": np.zeros(300_000)}, tmp_path / "d").result()
    hang()
    ended()
    assert not any(place.iterdir())


def test_a_manager_goes_on(storage):
    point, hang = storage
    place = point / "managed"
    io = fastckpt.IO(deadline=3.0)
    with fastckpt.Manager(place, keep=1, stale="ignore", save_options={"io": io}) as manager:
        for step in (1, 2):
            manager.save(step, STATE)
            manager.wait()
        hang("mkdir")
        manager.save(3, STATE)
        with pytest.raises(DeadlineError, match="cannot make"):
            manager.wait()
        with pytest.raises(DeadlineError, match="has not begun"):
            manager.save(4, STATE)
        hang()
        ended()
        manager.save(5, STATE)
        assert manager.wait().step == 5
    assert sorted(one.name for one in place.iterdir() if one.is_dir()) == ["step-00000005"]


GOES_ON = """
import os
import sys
from pathlib import Path
import fastckpt
from fastckpt_top import segment
fastckpt.save({"step": 6}, sys.argv[2])
try:
    fastckpt.save_async({"step": 7}, sys.argv[1], io=fastckpt.IO(deadline=0.3))
except fastckpt.exceptions.DeadlineError:
    print("training goes on")
(counters,) = Path(os.environ["FASTCKPT_TOP_DIR"]).glob("*.seg")
print(segment.decode(counters.read_bytes()).process.warning)
"""


def test_the_call_comes_back_and_the_process_ends(storage, children, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(GOES_ON, encoding="utf-8")
    counters = tmp_path / "counters"
    counters.mkdir(mode=0o700)
    with mounts.unanswering(storage[0]):
        command = [script, storage[0] / "c", tmp_path / "d"]
        done = programs.run(children, command, env=os.environ | {"FASTCKPT_TOP_DIR": str(counters)})
    assert (done.returncode, done.stderr) == (0, "")
    on, seen = done.stdout.splitlines()
    assert on == "training goes on"
    # The warning that the monitor shows.
    assert re.match(rf"given up: has hung since [0-9:]{{8}}Z in [a-z ]+: (c$|{storage[0].name[:16]})", seen)


def test_what_the_kernel_refuses_for_the_moment_is_tried_again_and_then_given_up(children, tmp_path):
    for when, works in (("1..4", True), ("2+", False)):
        path = tmp_path / str(works)
        child = children.start("save_held", path=str(path), index=1, io="uring", threads=1)
        child.next()
        refuse = strace.injection("io_uring_enter", "error=EAGAIN", when)
        with strace.attached(child.pid, tmp_path / "log", "io_uring_enter", refuse) as trace:
            child.go()
            end = child.outcome()
            calls = trace.calls()
        assert sum(call.injected for call in calls) >= 4
        assert isinstance(end, zygote.Raised) != works
        if not works:
            assert (end.kind, end.errno) == ("BlockingIOError", errno.EAGAIN)
            assert "refused it for two seconds" in end.text
            assert len(calls) < 100
            assert not path.exists()
