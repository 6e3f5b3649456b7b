"""Asynchronous saves: changes by the caller during a save, failures, and memory."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import functools
import gc
import re
import resource
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from fastckpt import distributed
from harness import points
from harness.internals import Job, RanksJob, join_saves, kept_memory, waiting_calls
from harness.machines import wait_until
from harness.states import numbered, same, which

SLOWLY = 10_000  # bytes a second: a megabyte takes a minute and a half, so that a test can cancel a save in time


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    try:
        fastckpt.background.drain(60)  # raises errors that no call raised yet
    finally:
        fastckpt.background.release_buffers()


@pytest.fixture
def late(tmp_path):
    """Make ``no`` a dangling link, as if it became one between the check at the call and the background save."""
    (tmp_path / "no").symlink_to("nowhere")
    with points.replaced(points.CHECK_TARGET, lambda _: lambda *_: None):
        yield


@pytest.fixture
def hold(monkeypatch):
    """``hold(path)`` returns an event: a save to that path completes its snapshot, and writes once the event is set."""
    gates = {}
    real = Job._write

    def write(job):
        gate = gates.get(job.pending.path)
        assert gate is None or gate.wait(60)
        return real(job)

    monkeypatch.setattr(Job, "_write", write)

    def hold(path):
        return gates.setdefault(str(path), threading.Event())

    yield hold
    for gate in gates.values():
        gate.set()


def release_when_admission_waits(gate, seconds=0.0):
    """Set ``gate`` in another thread, ``seconds`` after a call has begun to wait until it may save."""

    def body():
        wait_until(waiting_calls)
        time.sleep(seconds)
        gate.set()

    thread = threading.Thread(target=body)
    thread.start()
    return thread


def entries(directory):
    return sorted(entry.name for entry in directory.iterdir())


def test_what_was_there_at_the_call_is_saved(tmp_path, hold):
    for lazy in (False, True):
        gate = hold(tmp_path / "c")
        gate.clear()
        state = numbered(3)
        note = ["before"]
        state["note"] = note
        pending = fastckpt.save_async(state, tmp_path / "c", io=fastckpt.IO(lazy=lazy), metadata={"step": 3})
        # NumPy arrays are always copied at the call.
        for array in state["model"].values():
            if isinstance(array, np.ndarray):
                array.view(np.uint8)[...] = 0
        note[0] = "after"
        state["step"] = 4
        assert not pending.done()
        gate.set()
        report = pending.result(60)
        loaded = fastckpt.load(tmp_path / "c")
        assert loaded.pop("note") == ["before"]
        expected = numbered(3)
        assert all(same(loaded[key], expected[key]) for key in expected if key != "note")
        assert fastckpt.verify(tmp_path / "c").ok
        assert fastckpt.open(tmp_path / "c").metadata == {"step": 3}
        assert report.staged == report.bytes
        assert list(report.phases) == ["wait", "stage", "plan", "write", "fsync", "commit"]
        assert sum(report.phases.values()) == pytest.approx(report.seconds)
        assert 0 < report.staging <= report.stall < report.seconds


def test_torch_states_come_back_whole(tmp_path):
    import torch

    from harness.same import same as same_state

    base = torch.arange(1 << 19, dtype=torch.float32)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    model(torch.randn(4, 300)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "large": base,
        "tied": base,
        "strided": base.view(512, 1024).t(),
        "view": base[5:100],
        "conj": torch.randn(70, 50, dtype=torch.complex64).conj(),
        "sparse": torch.eye(5).to_sparse(),
        "half": torch.randn(1000).bfloat16(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.0),
        "parameter": torch.nn.Parameter(torch.randn(7)),
        "array": np.arange(10)[::2],
        "bytes": b"x" * 100_000,
        "more": bytearray(b"y" * 100_000),
    }
    fastckpt.save(state, tmp_path / "sync")
    for lazy in (False, True):
        fastckpt.save_async(state, tmp_path / "async", io=fastckpt.IO(lazy=lazy)).result(60)
        loaded = fastckpt.load(tmp_path / "async")
        assert same_state(loaded, fastckpt.load(tmp_path / "sync"))
        assert loaded["tied"].data_ptr() == loaded["large"].data_ptr()
    # Tied tensors are copied once.
    alone = fastckpt.save_async({"a": base, "b": base}, tmp_path / "tied").result(60)
    assert alone.staged == base.nbytes


def test_the_handle_tells_how_far_it_is(tmp_path, hold):
    gate = hold(tmp_path / "c")
    pending = fastckpt.save_async(numbered(1), tmp_path / "c")
    assert (pending.path, pending.done(), pending.cancelled()) == (str(tmp_path / "c"), False, False)
    assert "writing" in repr(pending)
    first = pending.progress()
    assert first.phase == "writing"
    assert first.staged == first.total > 1 << 20
    pending.wait_staged(0)
    with pytest.raises(concurrent.futures.TimeoutError, match=r"not finished after 0\.01 s"):
        pending.result(0.01)
    with pytest.raises(concurrent.futures.TimeoutError):
        pending.exception(0)
    gate.set()
    assert pending.exception() is None
    last = pending.progress()
    assert (last.phase, last.written, last.staged) == ("done", last.total, last.total)
    assert pending.done()
    assert pending.result() is pending.result()
    assert not pending.cancel(), "too late"
    assert which(fastckpt.load(tmp_path / "c")) == 1


def test_callbacks_run_once_each_whenever_they_are_added(tmp_path, caplog, hold):
    seen = []
    gate = hold(tmp_path / "c")
    pending = fastckpt.save_async(numbered(1), tmp_path / "c")

    def broken(_):
        raise RuntimeError("in a callback")

    pending.add_done_callback(broken)
    pending.add_done_callback(lambda done: seen.append((done is pending, done.done(), done.result().bytes > 0)))
    assert seen == []
    gate.set()
    pending.result(60)
    wait_until(lambda: len(seen) == 1)
    pending.add_done_callback(lambda done: seen.append((done is pending, done.done(), True)))
    assert seen == [(True, True, True)] * 2
    wait_until(lambda: "in a callback" in caplog.text)


def test_it_can_be_awaited(tmp_path, late, hold):
    async def main():
        gate = hold(tmp_path / "c")
        pending = fastckpt.save_async(numbered(2), tmp_path / "c")
        beats = 0

        async def beat():
            nonlocal beats
            while True:
                beats += 1
                if beats > 5:
                    gate.set()
                await asyncio.sleep(0.01)

        beating = asyncio.create_task(beat())
        report = await pending
        beating.cancel()
        assert beats > 5, "the loop was held"
        assert (await pending) is report
        gate.clear()
        second = fastckpt.save_async(numbered(3), tmp_path / "c")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_wait(second), 0.05)
        assert not second.done(), "a cancelled wait does not cancel the save"
        gate.set()
        await second
        broken = fastckpt.save_async(numbered(4), tmp_path / "no" / "parent")
        with pytest.raises(FileNotFoundError):
            await broken
        return report

    async def _wait(pending):
        return await pending

    assert asyncio.run(main()).bytes > 0
    assert which(fastckpt.load(tmp_path / "c")) == 3


# Order of saves.


def test_a_second_save_waits_for_the_first_and_says_so(tmp_path, hold):
    gate = hold(tmp_path / "1")
    first = fastckpt.save_async(numbered(1), tmp_path / "1")
    release = release_when_admission_waits(gate, 1.0)
    began = time.perf_counter()
    second = fastckpt.save_async(numbered(2), tmp_path / "2")
    waited = time.perf_counter() - began
    release.join()
    assert first.done()
    report = second.result(60)
    # The call includes the stall, and the stall includes the wait.
    assert 1.0 <= report.phases["wait"] <= report.stall <= waited
    assert first.result().phases["wait"] < 0.5


def test_more_can_be_in_flight_but_never_two_to_one_path(tmp_path, hold):
    gates = [hold(tmp_path / "1"), hold(tmp_path / "2")]
    first = fastckpt.save_async(numbered(1), tmp_path / "1")
    second = fastckpt.save_async(numbered(2), tmp_path / "2", io=fastckpt.IO(max_in_flight=2))
    assert not first.done()
    assert not second.done()
    release = release_when_admission_waits(gates[0])
    again = fastckpt.save_async(numbered(3), tmp_path / "1", io=fastckpt.IO(max_in_flight=9))
    release.join()
    assert first.done()
    assert not second.done()
    again.result(60)
    gates[1].set()
    second.result(60)
    assert which(fastckpt.load(tmp_path / "1")) == 3, "the later one"
    assert which(fastckpt.load(tmp_path / "2")) == 2


def test_whichever_ends_first_makes_room(tmp_path, hold):
    gates = [hold(tmp_path / "1"), hold(tmp_path / "2")]
    slow = fastckpt.save_async(numbered(1), tmp_path / "1")
    fastckpt.save_async(numbered(2, 4096), tmp_path / "2", io=fastckpt.IO(max_in_flight=2))
    release = release_when_admission_waits(gates[1])
    third = fastckpt.save_async(numbered(3, 4096), tmp_path / "3", io=fastckpt.IO(max_in_flight=2))
    release.join()
    assert not slow.done()
    third.result(60)
    assert not slow.done()
    gates[0].set()
    slow.result(60)
    assert not waiting_calls()


def test_a_save_counts_from_the_return_of_the_call(tmp_path, monkeypatch):
    """A save counts even if its thread has not run yet."""
    real = Job.run

    def late(job):
        time.sleep(0.2)
        real(job)

    monkeypatch.setattr(Job, "run", late)
    first = fastckpt.save_async(numbered(1), tmp_path / "c")
    second = fastckpt.save_async(numbered(2), tmp_path / "c")
    assert first.done()
    fastckpt.background.drain(60)
    assert second.done()
    assert which(fastckpt.load(tmp_path / "c")) == 2


def _let_go_where_it_is_waited_for(gate, pending):
    """Let a held save continue once a call waits for its path, and check that the save has ended after the wait."""

    def letting_go(wait_for_paths):
        def wait(*paths):
            assert not pending.done()
            gate.set()
            wait_for_paths(*paths)
            assert pending.done()

        return wait

    return points.replaced(points.WAIT_FOR_PATHS, letting_go)


def test_a_synchronous_save_to_the_same_path_comes_after(tmp_path, hold):
    gate = hold(tmp_path / "c")
    first = fastckpt.save_async(numbered(1), tmp_path / "c")
    with _let_go_where_it_is_waited_for(gate, first):
        fastckpt.save(numbered(2), tmp_path / "c")
    assert first.done()
    assert which(fastckpt.load(tmp_path / "c")) == 2
    assert fastckpt.save(numbered(2), tmp_path / "c").stall > 0


def test_a_load_of_a_path_that_is_being_saved_to_finds_what_is_saved(tmp_path, hold):
    fastckpt.save(numbered(1), tmp_path / "c")
    gate = hold(tmp_path / "c")
    pending = fastckpt.save_async(numbered(2), tmp_path / "c")
    with _let_go_where_it_is_waited_for(gate, pending):
        assert which(fastckpt.load(tmp_path / "c")) == 2
    assert pending.done()


def test_threads_that_save_at_once_share_the_flights(tmp_path):
    def body(number):
        for turn in range(5):
            fastckpt.save_async(numbered(number, 4096), tmp_path / f"{number}-{turn}")

    threads = [threading.Thread(target=body, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    fastckpt.background.drain(60)
    assert len(entries(tmp_path)) == 30
    assert all(which(fastckpt.load(tmp_path / name), 4096) == int(name[0]) for name in entries(tmp_path))


# Failures.


def test_a_failure_comes_out_of_result_and_the_save_can_be_repeated(tmp_path, caplog, late):
    target = tmp_path / "no" / "c"
    for lazy in (False, True):
        pending = fastckpt.save_async(numbered(1), target, io=fastckpt.IO(lazy=lazy))
        with pytest.raises(FileNotFoundError, match="leads nowhere"):
            pending.result(60)
        assert isinstance(pending.exception(), FileNotFoundError)
        assert pending.progress().phase == "failed"
        pending.wait_staged(0)
    wait_until(lambda: [record.levelname for record in caplog.records] == ["ERROR", "ERROR"])
    target.parent.unlink()
    fastckpt.save_async(numbered(1), target).result(60)
    assert which(fastckpt.load(target)) == 1


def test_an_unseen_failure_is_raised_by_the_next_save(tmp_path, late):
    broken = fastckpt.save_async(numbered(1), tmp_path / "no" / "c")
    broken.finished.wait(60)
    with pytest.warns(RuntimeWarning, match=r"no/c failed, and its result was never requested"):
        # A synchronous save may be the last act of a failing program, so it saves, and only warns.
        fastckpt.save(numbered(2), tmp_path / "sync")
    assert which(fastckpt.load(tmp_path / "sync")) == 2
    with pytest.raises(FileNotFoundError) as caught:
        fastckpt.save_async(numbered(3), tmp_path / "c")
    if sys.version_info >= (3, 11):
        text = "".join(traceback.format_exception(caught.value))
        assert (
            f"asynchronous save to {broken.path}; save_async raised it because its result was never requested" in text
        )
        assert f"the save of this call, to {tmp_path / 'c'}, goes on" in text
    # The call started its save first, and the error has the handle of that save.
    assert caught.value.pending_save.path == str(tmp_path / "c")
    assert caught.value.pending_save.result(60).bytes > 0
    assert which(fastckpt.load(tmp_path / "c")) == 3
    fastckpt.save_async(numbered(2), tmp_path / "c").result(60)
    assert which(fastckpt.load(tmp_path / "c")) == 2


def test_each_failure_is_raised_once_and_no_save_is_lost(tmp_path, late):
    # A loop saves despite failures: every second save fails, and all others become durable.
    errors = []
    for turn in range(6):
        bad = tmp_path / "no" / "c" if turn % 2 else None
        try:
            pending = fastckpt.save_async(numbered(turn), bad or tmp_path / str(turn))
        except FileNotFoundError as error:
            errors.append(error)
            pending = error.pending_save
        pending.finished.wait(60)
    assert len(errors) == 2
    with pytest.raises(FileNotFoundError):
        fastckpt.background.drain()
    assert entries(tmp_path) == ["0", "2", "4", "no"]


def test_a_function_is_told_of_a_failure_when_it_happens(tmp_path, late, hold, caplog):
    told = []

    def ask(pending):
        told.append((threading.current_thread().name, pending, pending.exception()))

    gate = hold(tmp_path / "no" / "c")
    broken = fastckpt.save_async(numbered(1), tmp_path / "no" / "c")
    broken.add_done_callback(ask)
    gate.set()
    wait_until(lambda: told)
    assert told[0][:2] == ("fastckpt-save", broken)
    assert isinstance(told[0][2], FileNotFoundError)
    # The failure was raised, so it is not reported again.
    fastckpt.background.drain()

    def raises(_):
        raise RuntimeError("the messenger")

    fastckpt.save_async(numbered(1), tmp_path / "no" / "c").add_done_callback(raises)
    wait_until(lambda: "the messenger" in caplog.text)
    join_saves()
    with pytest.raises(FileNotFoundError):
        fastckpt.background.drain()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_functions_that_end_their_thread_keep_nothing_from_others(tmp_path, monkeypatch):
    gate, called = threading.Event(), []

    def write(_):
        assert gate.wait(60)
        raise OSError("the disk")

    def leave(_):
        sys.exit(3)

    monkeypatch.setattr(Job, "_write", write)
    pending = fastckpt.save_async(numbered(1), tmp_path / "c")
    for function in (leave, leave, called.append):
        pending.add_done_callback(function)
    gate.set()
    wait_until(lambda: called)
    with pytest.raises(OSError, match="the disk"):
        fastckpt.background.drain()
    # The exception that ended the thread belongs to this test, not to the next.
    for thread in threading.enumerate():
        if thread.name == "fastckpt-save":
            thread.join(60)


def test_drain_waits_and_raises_what_nobody_asked_for(tmp_path, late, hold):
    fastckpt.background.drain()
    gate = hold(tmp_path / "slow")
    slow = fastckpt.save_async(numbered(1), tmp_path / "slow")
    with pytest.raises(concurrent.futures.TimeoutError, match="and continues"):
        fastckpt.background.drain(0.01)
    assert not slow.done()
    gate.set()
    fastckpt.background.drain(60)
    assert slow.done()
    fastckpt.save_async(numbered(1), tmp_path / "no" / "c")
    with pytest.raises(FileNotFoundError):
        fastckpt.background.drain()
    fastckpt.background.drain()


def test_what_cannot_be_saved_is_refused_at_the_call(tmp_path):
    with pytest.raises(fastckpt.exceptions.UnsupportedTypeError, match=r"save_async: cannot store \['x'\]"):
        fastckpt.save_async({"x": object()}, tmp_path / "c")
    for name, wrong in (
        ("max_in_flight", 0),
        ("max_in_flight", True),
        ("nice", -1),
        ("nice", 20),
        ("nice", True),
        ("threads", 0),
        ("bandwidth_limit", 0),
    ):
        with pytest.raises(ValueError, match=f"IO: {name}"):
            fastckpt.save_async({}, tmp_path / "c", io=fastckpt.IO(**{name: wrong}))
        with pytest.raises(TypeError, match=rf"'{name}': it is an option of io=fastckpt\.IO\({name}=\.\.\.\)"):
            fastckpt.save_async({}, tmp_path / "c", **{name: wrong})
    with pytest.raises(ValueError, match="Files: shard_size"):
        fastckpt.save_async({}, tmp_path / "c", files=fastckpt.Files(shard_size=0))
    with pytest.raises(ValueError, match="save_async: io must be"):
        fastckpt.save_async({}, tmp_path / "c", io="x")
    assert entries(tmp_path) == []
    fastckpt.background.drain(1)  # nothing is in flight


def test_a_copy_that_fails_leaves_nothing(tmp_path):
    import torch

    state = {"t": torch.arange(20_000.0).view(200, 100).t()}

    def broken(*_):
        raise RuntimeError("cannot copy")

    with points.replaced(points.COPY_OUT, lambda _: broken):
        with pytest.raises(RuntimeError, match="cannot copy"):
            fastckpt.save_async(state, tmp_path / "c")
        fastckpt.background.drain(1)  # nothing is in flight
        pending = fastckpt.save_async(state, tmp_path / "c", io=fastckpt.IO(lazy=True))
        pending.wait_staged(60)
        with pytest.raises(RuntimeError, match="cannot copy"):
            pending.result(60)
    assert pending.progress() == fastckpt.types.SaveProgress("failed", 0, 0, 80_000)
    assert entries(tmp_path) == []
    fastckpt.save_async(state, tmp_path / "c").result(60)


def test_a_call_that_a_signal_handler_ends_leaves_nothing(tmp_path):
    """Wherever the exception is raised, the save continues or does not exist: nothing waits for it forever."""

    def interrupted(real, *, before):
        def call(*arguments, **named):
            if before:
                raise KeyboardInterrupt
            real(*arguments, **named)
            raise KeyboardInterrupt

        return call

    for place in (points.ADMIT, points.STAGE, points.START, "threading:Thread.start"):
        for before in (True, False):
            interrupt = functools.partial(interrupted, before=before)
            with points.replaced(place, interrupt), pytest.raises(KeyboardInterrupt):
                fastckpt.save_async(numbered(1), tmp_path / "c", io=fastckpt.IO(lazy=True))
            # A thread other than the main one, in which code below a signal handler is not a special case.
            drained = []
            thread = threading.Thread(target=lambda drained=drained: drained.append(fastckpt.background.drain(60)))
            thread.start()
            thread.join()
            assert drained == [None]
            fastckpt.save_async(numbered(2), tmp_path / "c").result(60)
            assert entries(tmp_path) == ["c"]
            assert which(fastckpt.load(tmp_path / "c")) == 2
            assert len(kept_memory()) == 1


def test_no_memory_for_a_snapshot(tmp_path):
    def full(_):
        raise OSError(errno.ENOMEM, "no memory")

    with points.replaced(points.MEMORY, lambda _: full), pytest.raises(OSError, match="no memory"):
        fastckpt.save_async(numbered(1), tmp_path / "c")
    fastckpt.background.drain(1)  # nothing is in flight
    fastckpt.save_async(numbered(1), tmp_path / "c").result(60)


# Cancelling.


@pytest.mark.parametrize("lazy", [False, True])
def test_cancel_leaves_nothing_behind(tmp_path, lazy):
    fastckpt.save(numbered(1), tmp_path / "c")
    pending = fastckpt.save_async(numbered(2), tmp_path / "c", io=fastckpt.IO(lazy=lazy, bandwidth_limit=SLOWLY))
    assert pending.cancel()
    assert pending.cancel()
    assert pending.cancelled()
    assert pending.done()
    assert entries(tmp_path) == ["c"]
    assert which(fastckpt.load(tmp_path / "c")) == 1
    for ask in (pending.result, pending.exception):
        with pytest.raises(concurrent.futures.CancelledError):
            ask()
    pending.wait_staged(0)
    assert pending.progress().phase == "cancelled"
    fastckpt.save_async(numbered(3), tmp_path / "c").result(60)  # a cancelled save is not reported
    assert which(fastckpt.load(tmp_path / "c")) == 3


def test_cancel_at_any_moment_gives_the_old_or_the_new(tmp_path):
    rng = np.random.default_rng(0)
    outcomes = set()
    fastckpt.save(numbered(0, 1 << 16), tmp_path / "c")
    now = 0
    for turn in range(1, 60):
        pending = fastckpt.save_async(numbered(turn, 1 << 16), tmp_path / "c", io=fastckpt.IO(lazy=bool(turn % 2)))
        time.sleep(rng.uniform(0, 0.02))
        cancelled = pending.cancel()
        outcomes.add(cancelled)
        now = now if cancelled else turn
        assert which(fastckpt.load(tmp_path / "c"), 1 << 16) == now
        assert entries(tmp_path) == ["c"]
    print(outcomes)


# Memory, and everything else that may leak.


def minor_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def mappings():
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_the_second_save_allocates_nothing(tmp_path):
    state = {f"w{index}": np.full(1 << 20, index) for index in range(8)}
    mapped = []

    def counting(memory):
        return lambda nbytes: (mapped.append(nbytes), memory(nbytes))[1]

    with points.replaced(points.MEMORY, counting):
        for _ in range(2):
            fastckpt.save_async(state, tmp_path / "c").result(60)
        before = minor_faults()
        for _ in range(3):
            fastckpt.save_async(state, tmp_path / "c")
        fastckpt.background.drain(60)
        faults = (minor_faults() - before) / 3
    assert len(mapped) == 1
    assert 1.0 <= mapped[0] / (64 << 20) < 1.1, "one copy of the state"
    # 64 MiB are 16,384 pages, and 32 huge ones.
    assert faults < 2000, faults


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_release_buffers_frees_them_also_those_in_use(tmp_path, hold):
    state = {"w": np.ones(8 << 20)}
    for release_first in (False, True):
        before = resident()
        gate = hold(tmp_path / "c")
        gate.clear()
        pending = fastckpt.save_async(state, tmp_path / "c")
        assert resident() - before > 60 << 20
        if release_first:
            fastckpt.background.release_buffers()
            assert resident() - before > 60 << 20
            gate.set()
            pending.result(60)
        else:
            gate.set()
            pending.result(60)
            assert resident() - before > 60 << 20
            fastckpt.background.release_buffers()
        wait_until(lambda before=before: resident() - before < 32 << 20)
    assert fastckpt.verify(tmp_path / "c").ok


def test_a_larger_state_takes_the_place_of_the_smaller(tmp_path):
    for millions in (1, 8, 2, 8):
        fastckpt.save_async({"w": np.ones(millions << 17)}, tmp_path / "c").result(60)
    wait_until(lambda: len(kept_memory()) == 1)
    assert kept_memory()[0].nbytes == 10 << 20, "8 MiB and a header, in whole huge pages"


def test_two_hundred_saves_leak_nothing(tmp_path):
    """Resident memory is flat after the third save; no threads, descriptors, mappings or temporary files are left."""
    fastckpt.background.release_buffers()
    state = {"w": np.arange(1 << 19), "many": [np.arange(5) for _ in range(200)], "n": list(range(500))}
    held = []
    for turn in range(200):
        pending = fastckpt.save_async(state, tmp_path / f"{turn % 3}", io=fastckpt.IO(lazy=bool(turn % 2)))
        if turn % 10 == 0:
            pending.result(60)
            gc.collect()
            held.append((resident(), len(list(Path("/proc/self/fd").iterdir())), mappings()))
    fastckpt.background.drain(60)
    wait_until(lambda: not any(thread.name == "fastckpt-save" for thread in threading.enumerate()))
    sizes, descriptors, maps = zip(*held[1:], strict=True)
    assert max(sizes) - sizes[0] < 4 << 20, sizes
    assert max(descriptors) <= descriptors[0], descriptors
    assert max(maps) - maps[0] < 20, maps
    assert entries(tmp_path) == ["0", "1", "2"]


BOTH = pytest.mark.parametrize(
    ("save", "options"),
    [(fastckpt.save_async, {"io": fastckpt.IO(lazy=True)}), (distributed.save_async, {})],
    ids=["alone", "ranks"],
)


@pytest.fixture
def threadless(monkeypatch):
    """Makes threads fail to start; ``threadless(happens)`` calls ``happens`` in the middle of a save."""

    def start(_):
        raise RuntimeError("can't start new thread")

    def meanwhile(happens):
        for where in (Job, RanksJob):
            real = where._write

            def wrapped(*args, real=real, **more):
                happens()
                return real(*args, **more)

            monkeypatch.setattr(where, "_write", wrapped)

    monkeypatch.setattr(threading.Thread, "start", start)
    return meanwhile


@BOTH
def test_without_a_thread_the_caller_saves(tmp_path, threadless, caplog, save, options):
    pending = save(numbered(1), tmp_path / "c", **options)
    assert pending.done()
    assert "the caller finishes it" in caplog.text
    report = pending.result()
    assert report.stall == pytest.approx(report.seconds, rel=0.5)
    assert which(fastckpt.load(tmp_path / "c")) == 1


@BOTH
def test_a_handler_does_not_wait_for_the_save_that_it_interrupts(tmp_path, threadless, save, options):
    """A handler runs in the calling thread, so the test calls it there. Mutant: it waits for that thread."""
    threadless(lambda: fastckpt.background.drain(1))
    assert save(numbered(1), tmp_path / "c", **options).done()
    assert which(fastckpt.load(tmp_path / "c")) == 1


@BOTH
def test_without_a_thread_what_ends_the_program_ends_the_call(tmp_path, threadless, save, options):
    def interrupted():
        raise KeyboardInterrupt

    threadless(interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(numbered(1), tmp_path / "c", **options)
    assert entries(tmp_path) == []


@pytest.mark.parametrize("obstacle", ["parent", "link", "file", "directory", "existing"])
def test_a_bad_path_is_told_at_the_call(tmp_path, obstacle):
    path, expected = tmp_path / "step", FileExistsError
    if obstacle in ("parent", "file"):
        path.write_text("the only copy")
    elif obstacle == "link":
        path.symlink_to("nowhere")
    elif obstacle == "directory":
        (path / "sub").mkdir(parents=True)
    else:
        fastckpt.save({"a": 1}, path)
    if obstacle == "parent":
        path, expected = path / "a" / "b", NotADirectoryError
    with pytest.raises(expected, match=re.escape(str(tmp_path))):
        fastckpt.save_async({"a": np.zeros(3)}, path, overwrite=obstacle != "existing")
    fastckpt.save_async({"a": 2}, tmp_path / "other").result()
