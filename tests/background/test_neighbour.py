"""An asynchronous save beside training: niceness, the GIL, the budget of threads."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from fastckpt import distributed
from harness import points, strace, zygote

TASKS = Path("/proc/self/task")


@pytest.fixture(autouse=True)
def _clean():
    yield
    fastckpt.background.drain(60)
    fastckpt.background.release_buffers()


def workers(prefix="fastckpt-"):
    """Return the niceness of the core's writing threads, by thread id; their names are numbers."""
    found = {}
    for task in TASKS.iterdir():
        try:
            name = (task / "comm").read_text().strip()
            stat = (task / "stat").read_text()
        except OSError:  # it ended
            continue
        if name.removeprefix(prefix).isdigit():
            found[int(task.name)] = int(stat.rpartition(")")[2].split()[16])
    return found


BOTH = pytest.mark.parametrize("save_async", [fastckpt.save_async, distributed.save_async], ids=["alone", "ranks"])


@BOTH
def test_only_the_writing_threads_stand_back(tmp_path, save_async):
    before = os.getpriority(os.PRIO_PROCESS, 0)
    # The save takes twice as long as the wait below: the workers stay until it is cancelled.
    state = {"w": np.zeros(2 << 20)}
    pending = save_async(state, tmp_path / "c", io=fastckpt.IO(bandwidth_limit=140_000, threads=2, nice=11))
    deadline = time.monotonic() + 60
    try:
        while True:
            found = workers()
            # A thread gets its name before its niceness.
            if list(found.values()) == [11] * 2:
                break
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
        # The calling thread and the thread that may hold the GIL keep their niceness.
        everybody = {int(task.name) for task in TASKS.iterdir()}
        assert len(everybody - set(found)) >= 2
        assert all(os.getpriority(os.PRIO_PROCESS, thread) == before for thread in everybody - set(found))
    finally:
        assert pending.cancel()
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    save_async(state, tmp_path / "c", io=fastckpt.IO(threads=2, nice=11)).result(60)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@BOTH
def test_a_niceness_that_the_kernel_refuses_is_told_and_left_out(tmp_path, caplog, save_async):
    def refuse(_):
        raise PermissionError(1, "no")

    with points.replaced(points.TRY_NICE, lambda _: refuse), points.replaced(points.TRIED_NICE, lambda _: {}):
        for _ in range(2):
            save_async({}, tmp_path / "c", io=fastckpt.IO(nice=3)).result(60)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "save_async: nice=3: the kernel refuses: [Errno 1] no"
    ]


@pytest.fixture
def children(children_with_torch):
    return children_with_torch


def threads_started(children, directory, **options):
    """Count the threads that an asynchronous save starts to copy, to write, and for the rest; they need not overlap."""
    child = children.start("snapshot_of_floats", path=str(directory / "c"), count=8 << 20, **options)
    child.next()
    with strace.attached(child.pid, directory / "log", "clone,clone3,prctl") as trace:
        child.go()
        report = child.outcome()
        calls = trace.calls()
    assert not isinstance(report, zygote.Raised), report
    names = [name for call in calls if "PR_SET_NAME" in call.arguments for name in call.strings()]
    copying = [name for name in names if name.startswith("fastckpt-copy-")]
    writing = [name for name in names if name.removeprefix("fastckpt-").isdigit()]
    started = [call for call in calls if call.name.startswith("clone") and call.ok]
    assert report["threads"] == len(writing)
    return {"copy": len(copying), "write": len(writing), "more": len(started) - len(copying) - len(writing)}


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_threads_are_a_budget(children, tmp_path, lazy, strided):
    # The others are the Python thread, which waits for the rest, and two threads that a hanging call would keep: one
    # for the check at the call, and one for the save.
    assert threads_started(children, tmp_path, threads=1, lazy=lazy, strided=strided) == {
        "copy": 1,
        "write": 1,
        "more": 3,
    }


def test_threads_beyond_a_budget_are_noticed(children, tmp_path):
    assert threads_started(children, tmp_path, threads=2, lazy=False, strided=True) == {
        "copy": 2,
        "write": 2,
        "more": 3,
    }


def held(name, action):
    """Return the longest time in seconds that the thread ``name`` kept others from running Python during ``action``.

    The switch interval of the GIL is set to minutes, so the ticking thread runs only when the GIL is released
    voluntarily. A gap counts as far as the thread ``name`` was on a CPU in it, minus the time that the ticking thread
    waited for a CPU: on a busy machine, the scheduler causes most gaps.
    """
    longest = [0.0]
    stop = threading.Event()
    ready = threading.Event()

    def used():
        found = next((thread for thread in threading.enumerate() if thread.name == name and thread.ident), None)
        try:
            return time.clock_gettime(time.pthread_getcpuclockid(found.ident)) if found else 0.0
        except OSError:  # it has ended
            return 0.0

    def tick():
        with open(f"/proc/self/task/{threading.get_native_id()}/schedstat") as schedstat:  # noqa: PTH123 - read in place

            def clocks():
                schedstat.seek(0)
                delayed = int(schedstat.read().split()[1]) / 1e9
                return time.perf_counter() - delayed, used()

            last = clocks()
            ready.set()
            while not stop.is_set():
                time.sleep(0.0001)
                now = clocks()
                longest[0] = max(longest[0], min(now[0] - last[0], now[1] - last[1]))
                last = now

    interval = sys.getswitchinterval()
    ticking = threading.Thread(target=tick)
    ticking.start()
    ready.wait()
    sys.setswitchinterval(300)
    try:
        action()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        ticking.join()
    return longest[0]


@pytest.mark.parametrize("lazy", [False, True])
def test_the_gil_is_not_held_in_the_background(tmp_path, lazy):
    """With 100,000 tensors, each walk over them takes tens of milliseconds: no walk happens in the background."""
    import torch

    count = 100_000
    base = torch.zeros(count, 2)
    state = {f"parameter.{index}": row for index, row in enumerate(base.unbind())}

    def save():
        assert fastckpt.save_async(state, tmp_path / "c", io=fastckpt.IO(lazy=lazy)).result(60).tensors == count

    # The time is below 1 ms, and a little above on a busy machine, which may interrupt a try.
    for _ in range(5):
        longest = held("fastckpt-save", save)
        if longest < 0.005:
            break
    assert longest < 0.005, longest


def test_a_held_gil_is_noticed():
    def work():
        time.sleep(0.1)
        sum(range(2_000_000))
        time.sleep(0.1)

    def hold():
        thread = threading.Thread(target=work, name="holder")
        thread.start()
        thread.join()

    assert held("holder", hold) > 0.01


@pytest.mark.parametrize("shape", [(1000, 3), (513, 700), (257, 2), (1, 1), (256, 2), (5, 300, 4)])
def test_strips_of_a_transposed_matrix_meet(tmp_path, shape):
    import torch

    whole = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    state = {"t": whole.mT, "c": whole.mT.to(torch.complex64).conj(), "s": whole[..., ::2].mT}
    fastckpt.save_async(state, tmp_path / "c").result(60)
    loaded = fastckpt.load(tmp_path / "c")
    assert all(torch.equal(loaded[key], state[key]) for key in state)
