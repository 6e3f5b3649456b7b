"""Saves under pressure: changing memory, signals, lack of threads, priorities, forks, and states that are too large."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from fastckpt import distributed
from harness import manifest, needs, strace, zygote
from harness.internals import join_saves
from harness.states import which

CHANGED = "its memory changed while it was written"


# --- memory that changes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["uring", "threads", "buffered"])
def test_memory_that_changes_while_it_is_written_leaves_a_sound_checkpoint(children, tmp_path, engine):
    path = tmp_path / "step"
    child = children.start("save_changing", path=str(path), io=engine)
    child.next()
    # Without worker threads, one thread does everything; its callback between sum and write changes the memory.
    with refuse_threads(child, tmp_path / "log", "1+"):
        child.go()
        end = child.outcome()
    assert not isinstance(end, zygote.Raised), end
    assert end["paths"] == {f"{'buffered' if engine == 'buffered' else 'staged'}: {CHANGED}": 1}
    assert len(set(fastckpt.load(path)["a"])) == 1
    assert int(fastckpt.load(path)["a"][0]) > 1
    assert fastckpt.verify(path).ok


# --- allocation ------------------------------------------------------------------------------------------------------


def test_an_allocation_that_signals_always_interrupt_is_given_up(children, tmp_path):
    """Before Linux 6.11, tmpfs undoes a whole allocation at any signal, and a profiler sends one every 10 ms."""
    child = children.start("save_held", path=str(tmp_path / "step"), index=3, nbytes=4 << 20)
    child.next()
    inject = strace.injection("fallocate", "error=EINTR", "1+")
    with strace.attached(child.pid, tmp_path / "log", "fallocate,ftruncate", inject) as trace:
        child.go()
        report = child.outcome()
        calls = [call for call in trace.calls() if ".safetensors" in call.arguments]
    assert not isinstance(report, zygote.Raised), report
    names = [call.name for call in calls]
    assert names == ["fallocate"] * names.count("fallocate") + ["ftruncate"]
    assert 1 < len(names) < 20
    assert which(fastckpt.load(tmp_path / "step"), 4 << 20) == 3


def test_ctrl_c_ends_an_allocation(children, tmp_path):
    """A save ends and leaves nothing if a signal comes with each call, as from a held Ctrl-C."""
    child = children.start("save_held", path=str(tmp_path / "parent" / "step"), index=3, nbytes=64 << 20)
    (tmp_path / "parent").mkdir()
    child.next()
    inject = strace.injection("fallocate", "error=EINTR:signal=SIGINT", "1+")
    with strace.attached(child.pid, tmp_path / "log", "fallocate", inject):
        child.go()
        end = child.outcome()
    assert isinstance(end, zygote.Raised)
    assert end.kind == "KeyboardInterrupt"
    assert manifest.listing(tmp_path / "parent") == []


# --- no threads ------------------------------------------------------------------------------------------------------


def refuse_threads(child, log, when):
    inject = [strace.injection(call, "error=EAGAIN", when) for call in ("clone", "clone3")]
    return strace.attached(child.pid, log, "clone,clone3", *inject)


@pytest.mark.parametrize("engine", ["uring", "threads", "buffered"])
def test_without_threads_the_caller_does_the_work(children, tmp_path, engine):
    child = children.start("crowded", directory=str(tmp_path), nbytes=24 << 20, io=engine)
    child.next()
    with refuse_threads(child, tmp_path / "log", "1+"):
        child.go()
        end = child.outcome()
    assert not isinstance(end, zygote.Raised), end
    assert (end["loaded"], end["threads"]) == (7, 1)
    assert "no worker thread can be started" in end["fallback"]
    assert "pids.max" in end["fallback"]
    assert sum("no worker thread can be started" in text for text in end["warnings"]) == 1


def test_a_part_of_the_crew_does_the_work(children, tmp_path):
    child = children.start("crowded", directory=str(tmp_path), nbytes=24 << 20, io="threads", threads=4)
    child.next()
    with refuse_threads(child, tmp_path / "log", "3+"):
        child.go()
        end = child.outcome()
    assert not isinstance(end, zygote.Raised), end
    assert (end["loaded"], end["threads"], end["fallback"]) == (7, 2, None)


@pytest.mark.parametrize("nbytes", [1 << 16, 24 << 20])
def test_without_threads_an_asynchronous_save_is_made_at_the_call(children, tmp_path, nbytes):
    child = children.start("crowded", directory=str(tmp_path), nbytes=nbytes, asynchronous=True, nice=19)
    child.next()
    with refuse_threads(child, tmp_path / "log", "1+"):
        child.go()
        end = child.outcome()
    assert not isinstance(end, zygote.Raised), end
    assert (end["loaded"], end["nice"]) == (7, 0)
    assert any("no thread for the save, so the caller finishes it" in text for text in end["warnings"])


@pytest.mark.parametrize("nbytes", [1 << 16, 24 << 20])
def test_without_a_worker_thread_the_niceness_goes_and_not_the_save(children, tmp_path, nbytes):
    child = children.start("snapshot_held", path=str(tmp_path / "step"), nbytes=nbytes, nice=19)
    child.next()
    with refuse_threads(child, tmp_path / "log", "1+"):
        child.go()
        end = child.outcome()
    assert not isinstance(end, zygote.Raised), end
    assert (end["threads"], end["nice"]) == (1, 0)
    assert "the calling thread did the work, without nice=19" in end["fallback"]
    assert fastckpt.verify(tmp_path / "step").ok


@pytest.mark.root
def test_the_limit_of_processes_of_a_user(children):
    """The test sets a real ``ulimit -u``, which does not apply to root."""
    needs.root()
    user = 100_000 + os.getpid() % 1_000_000  # a user id that no other process has
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        child = children.start("crowded", directory=directory, nbytes=24 << 20, user=user)
        child.next()
        child.go()
        end = child.outcome()
    assert not isinstance(end, zygote.Raised), end
    assert (end["loaded"], end["threads"]) == (7, 1)


# --- niceness --------------------------------------------------------------------------------------------------------


class Saver(logging.Handler):
    """A log handler that records the niceness of the saving thread, which logs and runs callbacks."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.seen = []

    def emit(self, record):
        if record.threadName == "fastckpt-save":
            self.seen.append(os.getpriority(os.PRIO_PROCESS, 0))


@pytest.mark.parametrize("io", ["auto", "uring", "threads", "buffered"])
@pytest.mark.parametrize("size", [1 << 10, 1 << 20, 9 << 20])
@pytest.mark.parametrize("save_async", [fastckpt.save_async, distributed.save_async], ids=["alone", "ranks"])
def test_the_thread_that_runs_python_keeps_its_niceness(tmp_path, caplog, save_async, size, io):
    """The thread that runs Python writes nothing itself, for any size."""
    caplog.set_level(logging.INFO, "fastckpt")
    saver = Saver()
    logging.getLogger("fastckpt").addHandler(saver)
    try:
        state = {"w": np.zeros(size, np.uint8)}
        save_async(state, tmp_path / "c", io=fastckpt.IO(io, nice=19)).result(60)
        join_saves()
    finally:
        logging.getLogger("fastckpt").removeHandler(saver)
    assert saver.seen == [os.getpriority(os.PRIO_PROCESS, 0)]


# --- forks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["uring", "threads", "buffered"])
def test_a_child_forked_during_a_save_keeps_none_of_its_descriptors(children, tmp_path, engine):
    found = children.run("fork_in_save", path=str(tmp_path / "step"), io=engine)
    assert not isinstance(found, zygote.Raised), found

    def of_the_save(names):
        return [name for name in names if ".step.tmp-" in name or "io_uring" in name]

    assert any(name.endswith(".safetensors") for name in of_the_save(found["ours"]))
    assert of_the_save(found["theirs"]) == []
    # All other descriptors are open in the child, and the save has ended.
    assert len(found["theirs"]) >= len(found["ours"])
    assert found["ok"]


# --- too large -------------------------------------------------------------------------------------------------------


def test_a_header_that_would_be_too_large_is_refused_before_the_first_byte(tmp_path):
    with pytest.raises(
        fastckpt.exceptions.UnsupportedTypeError, match=r"header of shard `model\.safetensors` takes 1000\d+ bytes"
    ):
        fastckpt.save({"k" * 100_000_000: np.zeros(3)}, tmp_path / "c")
    assert manifest.listing(tmp_path) == []
