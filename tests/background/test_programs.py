"""Programs with saves in the background, each in a process of its own: its end, its forks and its signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import fastckpt
from harness import zygote

HEAD = """
import faulthandler, os, signal, sys, threading, time
from dataclasses import replace
import numpy as np
import fastckpt
state = {"w": np.arange(1 << 17)}
target = sys.argv[1]
slow = fastckpt.IO(bandwidth_limit=2_000_000)  # half a second: the program has come to its end long before

def hold():
    # Saves to the target write once the event is set.
    from harness.internals import Job
    gate, real = threading.Event(), Job._write
    def write(job):
        assert job.pending.path != target or gate.wait(60)
        return real(job)
    Job._write = write
    return gate

def late():
    # As if the link appeared between the check at the call and the save in the background.
    os.path.lexists(target + "-no") or os.symlink("nowhere", target + "-no")
    from harness import points
    points.replace(points.CHECK_TARGET, lambda _: lambda *_: None)
"""

ENDINGS = {
    "falls off the end": ("", 0),
    "sys.exit": ("sys.exit(7)", 7),
    "an unhandled exception": ("raise RuntimeError('boom')", 1),
    "daemon threads": ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", 0),
    "KeyboardInterrupt": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", -signal.SIGINT),
}


def run(tmp_path, code, *, expected=0):
    try:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", HEAD + textwrap.dedent(code), str(tmp_path / "c")],
            env=zygote.environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired as over:
        pytest.fail(f"the program does not end: {(over.stderr or b'').decode()}")
    assert done.returncode == expected, done.stderr
    return done


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends_after_the_checkpoint_is_durable(tmp_path, ending, lazy):
    code, status = ENDINGS[ending]
    run(tmp_path, f"fastckpt.save_async(state, target, io=replace(slow, lazy={lazy}))\n{code}", expected=status)
    assert (fastckpt.load(tmp_path / "c")["w"] == np.arange(1 << 17)).all()
    assert list(tmp_path.iterdir()) == [tmp_path / "c"]


def test_a_daemon_thread_may_start_it(tmp_path):
    run(
        tmp_path,
        """
        thread = threading.Thread(target=lambda: fastckpt.save_async(state, target, io=slow), daemon=True)
        thread.start()
        thread.join()
        """,
    )
    assert fastckpt.verify(tmp_path / "c").ok


@pytest.mark.parametrize("before", [False, True])
def test_exit_handlers_may_save(tmp_path, before):
    register = "import atexit; atexit.register(lambda: fastckpt.save_async(state, target, io=slow))"
    use = 'fastckpt.save_async(state, target + "-first")'
    run(tmp_path, "\n".join([register, use] if before else [use, register]))
    assert fastckpt.verify(tmp_path / "c").ok


@pytest.mark.parametrize(("ending", "status"), [("", 0), ("sys.exit(7)", 7), ("raise RuntimeError('boom')", 1)])
def test_an_unseen_failure_is_printed_at_exit(tmp_path, ending, status):
    done = run(tmp_path, f"late(); fastckpt.save_async(state, target + '-no/c')\n{ending}", expected=status)
    assert "asynchronous save to " in done.stderr
    assert "-no/c failed, and its result was never requested: FileNotFoundError: " in done.stderr
    asked = run(tmp_path, "late(); fastckpt.save_async(state, target + '-no/c').exception()")
    assert "never requested" not in asked.stderr


BROKEN = """
import multiprocessing, os, sys, time
import fastckpt
from harness.internals import Job

def broken(job):
    time.sleep(0.2)  # the program has reached its end by then
    raise OSError(5, "the disk is gone")

def save(path):
    Job._write = broken
    fastckpt.save_async({"n": 1}, path)

if __name__ == "__main__":
    method, path = sys.argv[1:]
    if method == "alone":
        save(path)
        sys.exit(0)
    if method == "fork after a save":
        fastckpt.save_async({"n": 1}, path).result()
    child = multiprocessing.get_context(method.split()[0]).Process(target=save, args=(path + "-child",))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("method", ["alone", "fork", "fork after a save", "forkserver", "spawn"])
def test_a_failure_is_told_when_it_happens_and_at_the_end(tmp_path, method):
    """Without configured logging, even children report failures; if multiprocessing forks, they never reach atexit."""
    program = tmp_path / "program.py"
    program.write_text(BROKEN)
    command, environment = [sys.executable, program, method, tmp_path / "c"], zygote.environment()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    path = f"{tmp_path}/c" + "-child" * (method != "alone")
    # Two threads print these lines, in any order.
    reason = "OSError: [Errno 5] the disk is gone"
    assert sorted(line for line in done.stderr.splitlines() if "asynchronous save" in line) == [
        f"fastckpt: the asynchronous save to {path} failed, and its result was never requested: {reason}",
        f"the asynchronous save to {path} failed: {reason}",
    ]


LOGGING = {
    "nothing": ("", True),
    "silent handlers": ("logging.getLogger().addHandler(logging.NullHandler())", True),
    "a handler of the root": ("logging.basicConfig(filename=os.devnull)", False),
    "a handler of ours": ("logging.getLogger('fastckpt').addHandler(logging.FileHandler(os.devnull))", False),
    "a root that is not asked": (
        "logging.basicConfig(filename=os.devnull); logging.getLogger('fastckpt').propagate = False",
        True,
    ),
    "no last resort": ("logging.lastResort = None", False),
    "a level": ("logging.getLogger('fastckpt').setLevel(logging.CRITICAL)", False),
}


@pytest.mark.parametrize("name", LOGGING)
def test_errors_go_to_stderr_where_no_logging_is_configured(name):
    configure, heard = LOGGING[name]
    code = f"""
import logging, os, fastckpt
{configure}
logger = logging.getLogger("fastckpt")
logger.warning("a warning")
logger.info("some news")
logger.error("an error of %s", "ours")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "an error of ours\n" * heard


def test_a_forked_child_has_no_saves_in_flight(tmp_path):
    done = run(
        tmp_path,
        """
        gate = hold()
        pending = fastckpt.save_async(state, target)
        late()
        failed = fastckpt.save_async(state, target + "-no/c", io=fastckpt.IO(max_in_flight=2))
        failed.finished.wait()
        child = os.fork()
        if not child:
            faulthandler.dump_traceback_later(50, exit=True)  # the threads of its parent are gone, and may hang it
            fastckpt.background.drain()
            for ask in (pending.result, pending.cancel, pending.wait_staged):
                try:
                    ask()
                except RuntimeError as error:
                    assert "forked" in str(error)
                else:
                    assert ask == pending.wait_staged
            fastckpt.save_async(state, target + "-child").result(60)
            assert (fastckpt.load(target + "-child")["w"] == state["w"]).all()
            fastckpt.background.release_buffers()
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        # The child did not wait for the save, or it would still wait.
        assert not pending.done()
        gate.set()
        assert failed.exception()
        """,
    )
    assert "never requested" not in done.stderr
    assert fastckpt.verify(tmp_path / "c").ok


def test_a_fork_waits_for_a_line_of_the_log(tmp_path):
    """A thread that writes a line holds the lock of stderr; a child forked at that moment would wait for it forever."""
    run(
        tmp_path,
        """
        read, write = os.pipe()
        os.set_blocking(write, False)
        try:
            while True:
                os.write(write, bytes(4096))
        except BlockingIOError:
            os.set_blocking(write, True)  # full: a write waits
        sys.stderr = open(write, "w")
        late()
        failed = fastckpt.save_async(state, target + "-no/c")
        failed.finished.wait()
        time.sleep(0.5)  # it writes that it has failed
        threading.Timer(0.5, os.read, (read, 1 << 20)).start()
        child = os.fork()
        if not child:
            signal.alarm(20)
            sys.stderr.flush()
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert failed.exception()
        """,
    )


def test_a_multiprocessing_child_ends_after_its_checkpoint_is_durable(tmp_path):
    run(
        tmp_path,
        """
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(
            target=lambda: fastckpt.save_async(state, target, io=slow) and None
        )
        child.start()
        child.join()
        assert child.exitcode == 0
        """,
    )
    assert fastckpt.verify(tmp_path / "c").ok


# Signal handlers.


@pytest.mark.parametrize("inside", ["result()", "wait_staged()", "time.sleep(0.3)", "None"])
def test_a_handler_of_sigterm_can_drain(tmp_path, inside):
    """The handler waits for the saves in flight without a deadlock, whatever the main thread is doing."""
    run(
        tmp_path,
        f"""
        def handler(*_):
            assert not pending.done()
            gate.set()
            fastckpt.background.drain(30)
            assert pending.done()
            os.write(1, b"drained")
            os._exit(5)
        signal.signal(signal.SIGTERM, handler)
        gate = hold()
        pending = fastckpt.save_async(state, target, io=fastckpt.IO(lazy=True))
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        {"pending." if "(" in inside and "sleep" not in inside else ""}{inside}
        while True:
            time.sleep(0.01)
        """,
        expected=5,
    )
    assert fastckpt.verify(tmp_path / "c").ok


def test_a_handler_can_drain_and_save_on_top_of_everything(tmp_path):
    """A loop that saves and logs gets hundreds of signals: handlers that drain and save never deadlock."""
    run(
        tmp_path,
        """
        import logging
        logging.basicConfig(level=logging.DEBUG, filename=os.devnull)
        turns = 0
        inside = False
        def handler(*_):
            global turns, inside
            if inside:
                return
            inside = True
            turns += 1
            fastckpt.background.drain(30)
            if turns % 3 == 0:
                fastckpt.save(state, target + "-handler")
            inside = False
        signal.signal(signal.SIGALRM, handler)
        state = {"w": np.arange(1 << 19)}
        signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
        end = time.monotonic() + 4
        number = 0
        while time.monotonic() < end or turns <= 20:
            number += 1
            logging.info("%s", number)
            io = fastckpt.IO(lazy=bool(number % 2), max_in_flight=1 + number % 3)
            pending = fastckpt.save_async(state, target, io=io)
            if number % 5 == 0:
                pending.result(30)
            if number % 7 == 0:
                pending.wait_staged(30)
        signal.setitimer(signal.ITIMER_REAL, 0)
        fastckpt.background.drain(30)
        """,
    )
    assert fastckpt.verify(tmp_path / "c").ok
    assert fastckpt.verify(tmp_path / "c-handler").ok
