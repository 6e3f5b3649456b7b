"""``Manager.save_on_signal``: real signals to real processes, at every kind of moment."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from harness import points

DEADLINE = 60
#: The options of a save that outlasts every test.
SLOW = {"io": fastckpt.IO(bandwidth_limit="20kB")}

PROGRAM = """
import os, signal, sys, time
import numpy as np
import fastckpt

out, mode = sys.argv[1:3]
told = []
if "handler" in mode:
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
manager = fastckpt.Manager(out, save_when=fastckpt.when.Steps(2), **(
    dict(save_options={"io": fastckpt.IO(bandwidth_limit="20kB")}) if "slow" in mode else {}))
# In a slow mode, under the bandwidth limit, a large save takes longer than any test waits.
large = lambda step: step > 2 or "busy" in mode
state = lambda step: {"a": np.full(200_000 if large(step) else 10, step)}
manager.save_on_signal(
    signal.SIGTERM, signal.SIGUSR1, grace="2s" if "grace" in mode else None, exit="stay" not in mode)

def say(word):
    print(word, flush=True)

with manager:
    for step in range(1, 10**9):
        time.sleep(0.01)
        if manager.should_save(step):
            manager.save(step, state(step))
        if step == 2 and "busy" not in mode:
            manager.wait()
        if step == 3:
            if "evaluate" in mode:
                with manager.steady(step, state(step)):
                    say("ready")
                    while True:
                        time.sleep(0.01)
            say("ready")
            if "fork" in mode:
                child = os.fork()
                if child == 0:
                    say(f"child {os.getpid()}")
                    while True:
                        time.sleep(0.01)
        if manager.preempted is not None and ("handler" in mode or "stay" in mode):
            break
say(f"told {told} preempted {int(manager.preempted)} step {step}")
"""


class Run:
    def __init__(self, out, mode):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(out), mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.expect("ready")

    def expect(self, word):
        line = self.process.stdout.readline()
        assert line.startswith(word), line + self.process.stderr.read()
        return line

    def end(self, number):
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path):
    runs = []

    def start(mode):
        runs.append(Run(tmp_path / "run", mode))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()


def whole(tmp_path):
    manager = fastckpt.Manager(tmp_path / "run", read_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = manager.restore()
    assert (found.state["a"] == found.step).all()
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".step")]
    return found.step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_next_step_is_saved_and_the_process_ends(start, tmp_path, number):
    code, out, err = start("").end(number)
    assert (code, out, err) == (128 + number, "", "")
    assert whole(tmp_path) > 2
    assert (tmp_path / "run" / "latest").read_text().strip() == f"step-{whole(tmp_path):08d}"


def test_an_earlier_handler_is_called_once_after_the_save(start, tmp_path):
    code, out, _ = start("handler").end(signal.SIGTERM)
    assert code == 0
    assert out == f"told [15] preempted 15 step {whole(tmp_path)}\n"


def test_without_exit_the_loop_ends_by_itself(start, tmp_path):
    code, out, _ = start("stay").end(signal.SIGUSR1)
    assert code == 0
    assert out == f"told [] preempted {int(signal.SIGUSR1)} step {whole(tmp_path)}\n"


def test_during_an_evaluation_it_is_saved_at_once(start, tmp_path):
    """The signal comes during an evaluation: the loop never reaches another step boundary."""
    code, _, err = start("evaluate").end(signal.SIGTERM)
    assert (code, err) == (128 + signal.SIGTERM, "")
    assert whole(tmp_path) == 3


@pytest.mark.parametrize("mode", ["slow grace busy", "slow grace busy evaluate"])
def test_what_cannot_be_durable_in_time_is_given_up(start, tmp_path, mode):
    """The save of step 2 would take 80 s of a grace period of 2: nothing of the save stays, and the process ends."""
    code, _, err = start(mode).end(signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert "the save for SIGTERM was abandoned" in err
    assert fastckpt.Manager(tmp_path / "run").steps() == []
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".step")]


def test_a_limit_of_bandwidth_does_not_hold_the_last_save(start, tmp_path):
    """Under the bandwidth limit, the save would take 80 s."""
    assert start("slow evaluate").end(signal.SIGTERM)[0] == 128 + signal.SIGTERM
    assert whole(tmp_path) == 3


def test_a_forked_child_saves_nothing_and_dies_of_what_ends_processes(start, tmp_path):
    run = start("fork")
    child = int(run.expect("child").split()[1])
    try:
        before = set((tmp_path / "run").iterdir())
        os.kill(child, signal.SIGUSR1)
        deadline = time.monotonic() + DEADLINE
        # A notice does not end the process: the kernel shows when the signal was delivered.
        status = Path(f"/proc/{child}/status")
        while any(int(line.split()[1], 16) for line in status.read_text().splitlines() if "Pnd" in line.split(":")[0]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(child, signal.SIGTERM)
        while "\nState:\tZ" not in f"\n{status.read_text()}":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert set((tmp_path / "run").iterdir()) == before
    finally:
        os.kill(child, signal.SIGKILL)
    assert run.process.poll() is None
    assert run.end(signal.SIGTERM)[0] == 128 + signal.SIGTERM


@pytest.fixture
def manager(tmp_path):
    """A manager in this process; the earlier handlers are restored at the end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    told = []
    signal.signal(signal.SIGUSR1, lambda number, _: told.append((number, made.latest())))
    with fastckpt.Manager(tmp_path) as made:
        made.told = told
        yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def raise_signal(number):
    signal.raise_signal(number)
    # Python runs the handler only between two instructions.
    for _ in range(100):
        pass


def test_a_notice_has_the_step_saved_once_for_each_of_its_news(tmp_path):
    """Mutants: the notice is called twice at a step; its earlier answer counts as news."""
    said, asked, saved = {3: "a", 4: "a", 6: "b", 7: "a", 8: None}, [], []

    def ask():
        asked.append(step)
        return said.get(step)

    with fastckpt.Manager(tmp_path, save_when=fastckpt.when.Steps(4)) as manager:
        manager.save_on(notice=ask)
        for step in range(1, 10):
            wanted = manager.should_save(step)
            assert wanted == manager.should_save(step) == manager.save(step, {"a": step})
            saved += [step] if wanted else []
            assert not manager.should_save(step)
    assert saved == manager.steps() == [3, 4, 6]
    assert asked == [*range(1, 10)]
    with pytest.raises(RuntimeError, match=r"save_on: .*read-only"):
        fastckpt.Manager(tmp_path, read_only=True).save_on(notice=ask)


def test_what_is_saved_already_is_not_saved_again(manager, tmp_path):
    manager.save_on_signal(signal.SIGUSR1)
    manager.save(1, {"a": 1})
    manager.wait()
    before = (tmp_path / "step-00000001").stat().st_ino
    raise_signal(signal.SIGUSR1)
    assert not manager.should_save(1)
    assert manager.told == [(signal.SIGUSR1, 1)]
    assert (tmp_path / "step-00000001").stat().st_ino == before
    assert not manager.should_save(1)
    assert manager.told == [(signal.SIGUSR1, 1)]


def test_a_save_in_flight_becomes_durable_before_the_signal_is_passed_on(manager):
    manager.save_on_signal(signal.SIGUSR1)
    manager._saves.options["io"] = fastckpt.IO(bandwidth_limit="2MB")
    manager.save(1, {"a": np.zeros(100_000)})
    assert manager._saves.in_flight
    raise_signal(signal.SIGUSR1)
    assert not manager.should_save(1)
    assert manager.told == [(signal.SIGUSR1, 1)]


def test_several_signals_are_answered_by_one_save_and_each_passed_on(manager):
    seen = []
    signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    manager.save_on_signal(signal.SIGUSR1, signal.SIGUSR2)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
        raise_signal(number)
    assert manager.should_save(7)
    # A loop that ends when `preempted` is set must not end before its save.
    assert manager.preempted is None
    assert manager.save(7, {"a": 7})
    assert manager.preempted == signal.SIGUSR1
    assert (manager.told, seen, manager.steps()) == ([(signal.SIGUSR1, 7)], [signal.SIGUSR2], [7])


def test_a_signal_before_a_steady_stretch_is_answered_at_its_begin(manager):
    manager.save_on_signal(signal.SIGUSR1)
    raise_signal(signal.SIGUSR1)
    assert manager.told == []
    with manager.steady(4, {"a": 4}):
        assert manager.told == [(signal.SIGUSR1, 4)]
        # The second signal comes after the save of the step.
        raise_signal(signal.SIGUSR1)
        assert manager.told == [(signal.SIGUSR1, 4)] * 2
    assert manager.steps() == [4]


def test_a_steady_stretch_within_another_leaves_it_as_it_was(manager):
    manager.save_on_signal(signal.SIGUSR1)
    with manager.steady(4, {"a": 4}):
        with manager.steady(4, {"a": 4}):
            pass
        raise_signal(signal.SIGUSR1)
        assert manager.told == [(signal.SIGUSR1, 4)]


def test_what_is_given_up_at_the_end_is_told_by_the_log_alone(tmp_path, manager, caplog):
    other = fastckpt.Manager(tmp_path / "other", save_options=SLOW)
    other.save_on_signal(signal.SIGUSR1, grace="100ms")
    other.save(1, {"a": np.zeros(200_000)})
    waiting = other._saves.pending.result
    other._saves.pending.result = lambda *limit: (raise_signal(signal.SIGUSR1), waiting(*limit))
    with caplog.at_level(logging.ERROR, "fastckpt"), other:
        pass
    assert "was not durable in time" in caplog.text
    assert manager.told == [(signal.SIGUSR1, None)]


def test_a_signal_behind_the_last_boundary_is_passed_on_at_the_end(tmp_path, manager):
    with fastckpt.Manager(tmp_path / "other") as other:
        other.save_on_signal(signal.SIGUSR1)
        other.save(1, {"a": 1})
        raise_signal(signal.SIGUSR1)
        assert manager.told == []
    assert manager.told == [(signal.SIGUSR1, None)]
    assert other.steps() == [1]
    assert other.preempted == signal.SIGUSR1


def test_a_signal_at_the_end_gives_up_what_cannot_be_durable_in_time(tmp_path, manager, caplog):
    """The save would take 80 s."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    other = fastckpt.Manager(tmp_path / "other", save_options=SLOW)
    other.save_on_signal(signal.SIGUSR2, grace="100ms")
    other.save(1, {"a": np.zeros(200_000)})

    def signalled(wait):
        return lambda completion: (raise_signal(signal.SIGUSR2), wait(completion))

    at_the_end = points.replaced(points.COMPLETE, signalled)
    with at_the_end, caplog.at_level(logging.ERROR, "fastckpt"), pytest.raises(SystemExit):
        other.__exit__(None, None, None)
    assert "was abandoned" in caplog.text
    assert other.steps() == []


def test_a_wait_ends_with_the_grace_period(tmp_path, manager, caplog):
    """The save would take 80 s. The signal comes before or during the wait."""
    with fastckpt.Manager(tmp_path / "other", save_options=SLOW) as other:
        other.save_on_signal(signal.SIGUSR1, grace="100ms")
        other.save(1, {"a": np.zeros(200_000)})
        sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))
        sender.start()
        with caplog.at_level(logging.ERROR, "fastckpt"), pytest.raises(CancelledError):
            other.wait()
        sender.join()
        assert "was not durable in time" in caplog.text
        # The wait is not a place at which the program may end.
        assert manager.told == []
        assert not other.should_save(2)
        assert manager.told == [(signal.SIGUSR1, None)]
    assert other.steps() == []


def test_a_handler_that_is_put_back_after_its_manager_has_ended_passes_on(tmp_path, manager):
    one, two = fastckpt.Manager(tmp_path / "1"), fastckpt.Manager(tmp_path / "2")
    one.save_on_signal(signal.SIGUSR1)
    two.save_on_signal(signal.SIGUSR1)
    for each in (one, two):
        with each:
            pass
    raise_signal(signal.SIGUSR1)
    assert manager.told == [(signal.SIGUSR1, None)]
    # The manager can begin anew.
    with one:
        one.save_on_signal(signal.SIGUSR1)
        raise_signal(signal.SIGUSR1)
        assert manager.told == [(signal.SIGUSR1, None)]
        assert one.save(1, {"a": 1})
    assert manager.told == [(signal.SIGUSR1, None)] * 2


def test_a_number_that_is_no_signal_is_refused_before_anything_is_installed(manager):
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(ValueError, match="1000"):
        manager.save_on_signal(signal.SIGUSR2, 1000)
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_failed_save_is_raised_and_the_signal_is_passed_on(manager, tmp_path):
    manager.save_on_signal(signal.SIGUSR1)
    (tmp_path / "step-00000001").write_text("in the way")
    raise_signal(signal.SIGUSR1)
    with pytest.raises(FileExistsError):
        manager.save(1, {"a": 1})
    assert manager.told == [(signal.SIGUSR1, None)]


def test_a_failure_that_the_end_of_the_process_would_hide_is_in_the_log(manager, tmp_path, caplog):
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    manager.save_on_signal(signal.SIGUSR2)
    (tmp_path / "step-00000001").write_text("in the way")
    raise_signal(signal.SIGUSR2)
    with caplog.at_level(logging.ERROR, "fastckpt"), pytest.raises(SystemExit) as caught:
        manager.save(1, {"a": 1})
    assert caught.value.code == 128 + signal.SIGUSR2
    assert "the save for SIGUSR2 failed" in caplog.text


def test_a_step_whose_save_in_flight_fails_is_saved_again(manager, monkeypatch):
    manager.save_on_signal(signal.SIGUSR1)
    manager.save(1, {"a": 1})
    manager.wait()

    class Failed:
        path = "step"

        def exception(self, *_):
            return OSError("full")

        def done(self):
            return True

    manager._saves.pending = Failed()
    raise_signal(signal.SIGUSR1)
    assert manager.should_save(1)
    assert manager.told == []
    assert manager.save(1, {"a": 2})
    assert manager.told == [(signal.SIGUSR1, 1)]
    assert manager.restore().state == {"a": 2}


def test_a_boundary_that_comes_too_late_saves_nothing_and_passes_the_signal_on(manager, caplog):
    manager.save_on_signal(signal.SIGUSR1, grace="1ms")
    raise_signal(signal.SIGUSR1)
    while time.monotonic() < manager._signals.deadline:
        time.sleep(0.001)
    with caplog.at_level(logging.ERROR, "fastckpt"):
        assert not manager.should_save(1)
    assert manager.told == [(signal.SIGUSR1, None)]
    assert "the save for SIGUSR1 was abandoned: step 1: no time is left" in caplog.text
    assert manager.steps() == []


def test_an_ignored_signal_stays_without_effect(manager):
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    manager.save_on_signal(signal.SIGUSR2)
    raise_signal(signal.SIGUSR2)
    assert manager.save(1, {"a": 1})
    assert manager.steps() == [1]


def test_handlers_are_put_back_but_not_over_a_later_one(tmp_path):
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)
    try:
        with fastckpt.Manager(tmp_path) as manager:
            manager.save_on_signal(signal.SIGUSR1, signal.SIGUSR2)
            manager.save_on_signal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR2, print)
        assert signal.getsignal(signal.SIGUSR1) == before[0]
        assert signal.getsignal(signal.SIGUSR2) is print
    finally:
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGUSR2, before[1])


def test_another_process_does_not_save(tmp_path):
    manager = fastckpt.Manager(tmp_path)
    manager._process = -1
    for call in (lambda: manager.save(1, {}), lambda: manager.should_save(1), lambda: manager.pin(1)):
        with pytest.raises(RuntimeError, match="was forked from"):
            call()


def test_signals_are_taken_in_the_main_thread(tmp_path):

    caught = []

    def call():
        try:
            fastckpt.Manager(tmp_path).save_on_signal(signal.SIGUSR1)
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(DEADLINE)
    assert "main thread only" in caught[0]


def test_a_handler_that_runs_while_the_facts_are_read_waits_for_no_save_that_waits_for_them(tmp_path):
    """Two threads stand for the main thread, which answers a signal during a read, and for the thread of a save that
    ends. Mutant: a save holds its own lock when it records its facts."""
    manager = fastckpt.Manager(tmp_path)
    manager.save(1, {"a": np.zeros(10)})
    report, after, catalogue = manager.wait(), manager._after_save, manager._local.catalogue
    add, reads, ends = catalogue.add, threading.Event(), threading.Event()

    def note():
        after.note({"step": 1, "metrics": {}}, time.monotonic(), report, 0.0)

    def read_and_answer():
        with catalogue._lock:
            reads.set()
            assert ends.wait(DEADLINE)
            note()

    def adds(entry):
        ends.set()
        add(entry)

    catalogue.add = adds
    reader, writer = (threading.Thread(target=each, daemon=True) for each in (read_and_answer, note))
    reader.start()
    assert reads.wait(DEADLINE)
    writer.start()
    for thread in (reader, writer):
        thread.join(5)
        assert not thread.is_alive()
