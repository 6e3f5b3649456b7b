"""Calls that fail before their first round: turns stay in step, nothing waits forever, other ranks get an error."""

import functools
import os
import signal
import threading
import time

import pytest

import fastckpt
from fastckpt import distributed
from harness.internals import RanksJob
from harness.parallel import dist, torch


def state(value=1.0):
    return {"w": torch.full((100,), float(value))}


def from_nowhere(path, home):
    if dist.get_rank() == 1:
        os.chdir(home)
        home.rmdir()
    try:
        distributed.save(state(), "relative", ranks=distributed.Ranks(timeout=60))
    except (FileNotFoundError, fastckpt.exceptions.RanksError) as error:
        told = f"{type(error).__name__}: {error}"
    finally:
        os.chdir("/")
    return told, distributed.save(state(), path, ranks=distributed.Ranks(timeout=60)).ranks


def test_a_path_that_cannot_be_made_absolute_takes_its_turn(forge, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    with forge.group(2) as group:
        (other, saved), (own, _) = group.run(from_nowhere, tmp_path / "c", home)
    assert own.startswith("FileNotFoundError")
    assert "rank 1" in other
    assert "FileNotFoundError" in other
    assert saved == 2


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e9, 1e300, True, "3", None])
def test_a_timeout_is_a_number_of_seconds_that_clocks_can_count(tmp_path, timeout):
    error = ValueError if type(timeout) in (int, float) else TypeError
    with pytest.raises(error, match="Ranks: timeout must be"):
        distributed.Ranks(timeout=timeout)
    assert distributed.save({"w": 1}, tmp_path / "c", ranks=distributed.Ranks(timeout=1e8)).ranks == 1


def test_an_option_of_the_ranks_is_no_argument_of_its_own(tmp_path):
    calls = {
        "save": functools.partial(distributed.save, {"w": 1}),
        "save_async": functools.partial(distributed.save_async, {"w": 1}),
        "load": distributed.load,
    }
    for name, call in calls.items():
        words = rf"^{name}: .*'timeout': it is an option of ranks=fastckpt\.distributed\.Ranks\(timeout=\.\.\.\)$"
        with pytest.raises(TypeError, match=words):
            call(tmp_path / "c", timeout=60)
    assert list(tmp_path.iterdir()) == []


def interrupt(*_):
    raise KeyboardInterrupt


def interrupted(path):
    """Interrupt a call that waits for another call of the same rank; the program continues and saves again."""
    begun, go_on = threading.Event(), threading.Event()

    def first():
        def default(_):
            begun.set()
            go_on.wait(60)
            return 1

        distributed.save(
            {"w": object()},
            f"{path}-1",
            registry=fastckpt.Registry(encode=default),
            ranks=distributed.Ranks(timeout=60),
        )

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait(60)
    told = ""
    if dist.get_rank() == 0:
        former = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            distributed.save(state(), f"{path}-2", ranks=distributed.Ranks(timeout=60))
        except KeyboardInterrupt:
            told = "interrupted"
        signal.signal(signal.SIGALRM, former)
        go_on.set()
    else:
        go_on.set()
        try:
            distributed.save(state(), f"{path}-2", ranks=distributed.Ranks(timeout=60))
        except fastckpt.exceptions.RanksError as error:
            told = str(error)
    thread.join()
    return told, distributed.save(state(), f"{path}-3", ranks=distributed.Ranks(timeout=60)).ranks


def test_a_call_that_is_interrupted_before_its_turn_holds_nobody_up(forge, tmp_path):
    with forge.group(2) as group:
        (own, saved), (other, _) = group.run(interrupted, tmp_path / "c", timeout=120)
    assert own == "interrupted"
    assert "rank 0" in other
    assert "KeyboardInterrupt" in other
    assert saved == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c-1", "c-3"]


def from_below(path):
    """Call from within a save of the same thread, as a signal handler does."""
    told = []

    def default(_):
        try:
            distributed.save(state(), f"{path}-2", ranks=distributed.Ranks(timeout=60))
        except RuntimeError as error:
            told.append(str(error))
        return 1

    began = time.monotonic()
    distributed.save(
        {"w": object()}, f"{path}-1", registry=fastckpt.Registry(encode=default), ranks=distributed.Ranks(timeout=60)
    )
    distributed.save(state(), f"{path}-3", ranks=distributed.Ranks(timeout=60))
    return told, time.monotonic() - began


def test_a_call_from_within_another_is_refused_at_once(forge, tmp_path):
    with forge.group(2) as group:
        for told, seconds in group.run(from_below, tmp_path / "c", timeout=120):
            assert len(told) == 1
            assert "this thread is in a save or load of the same process group" in told[0]
            assert seconds < 30, "the error came by the timeout, and not at once"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c-1", "c-3"]


def fork_and_save(path):
    distributed.save(state(), path, ranks=distributed.Ranks(timeout=60))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = "saved"
        try:
            distributed.save(state(), f"{path}-child", ranks=distributed.Ranks(timeout=60))
        except RuntimeError as error:
            told = str(error)
        finally:
            os.write(writing, told.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        told = stream.read()
    os.waitpid(child, 0)
    return told, distributed.save(state(2), path, ranks=distributed.Ranks(timeout=60)).ranks


def test_a_process_that_was_forked_from_a_rank_is_refused(forge, tmp_path):
    with forge.group(2) as group:
        for told, saved in group.run(fork_and_save, tmp_path / "c", timeout=240):
            assert told.startswith("save: this process was forked from a rank")
            assert saved == 2
    assert fastckpt.load(tmp_path / "c")["w"][0] == 2


def test_a_process_alone_can_be_interrupted(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        distributed.save({"w": object()}, tmp_path / "c", registry=fastckpt.Registry(encode=interrupt))
    assert distributed.save({"w": 1}, tmp_path / "c").ranks == 1


def test_an_interrupt_after_the_thread_has_started_leaves_it_the_snapshot(tmp_path, monkeypatch):
    go_on = threading.Event()
    start, write = threading.Thread.start, RanksJob._write

    def started(thread):
        start(thread)
        if thread.name == "fastckpt-save":
            raise KeyboardInterrupt

    def waits(job):
        go_on.wait(60)
        return write(job)

    monkeypatch.setattr(RanksJob, "_write", waits)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", started)
        with pytest.raises(KeyboardInterrupt):
            distributed.save_async(state(7), tmp_path / "c")
    # The next save gets the memory that the first one has returned, if it has.
    distributed.save_async(state(8), tmp_path / "d", io=fastckpt.IO(max_in_flight=2))
    go_on.set()
    fastckpt.background.drain(30)
    assert fastckpt.load(tmp_path / "d")["w"].tolist() == [8.0] * 100
    assert fastckpt.load(tmp_path / "c")["w"].tolist() == [7.0] * 100
