"""What the real kernel reports about processes, and real saves about their waits and fallbacks."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from fastckpt_top.feed import PROBE_S, ShmFeed
from fastckpt_top.model import Model
from fastckpt_top.processes import user_of
from fastckpt_top.replay import Recording
from fastckpt_top.segment import FLAG_FALLBACK, Phase, ThreadState
from fastckpt_top.snapshot import Snapshot
from fastckpt_top.tracks import HEARTBEAT_STALL_S
from looking import eventually

from harness import mounts, needs, zygote

MB = 10**6

# Saves `size` bytes in three files, at a rate if one is given.
SAVER = """
import os, sys
import numpy as np
import fastckpt
path, size, limit = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
tensors = os.environ.get("TENSORS")
values = np.memmap(tensors, np.uint8, "r") if tensors else np.ones(size, np.uint8)
state = dict(zip("abc", np.split(np.asarray(values)[: size // 3 * 3], 3)))
io, files = fastckpt.IO(bandwidth_limit=limit or None), fastckpt.Files(shard_size=size // 3)
fastckpt.save(state, path, io=io, files=files)
"""


class Clock:
    """A clock that advances by `step` at each look, so that a look asks the kernel again without waiting."""

    def __init__(self, step=PROBE_S):
        self.now = 0.0
        self.step = step

    def __call__(self):
        self.now += self.step
        return self.now


@pytest.fixture
def shm(place):
    made = ShmFeed([str(place)], mono=Clock())
    yield made
    made.close()


def only(snapshot):
    (proc,) = snapshot.procs
    return proc


@contextlib.contextmanager
def saving(place, path, size, limit=0.0, wrap=(), **variables):
    """A process that saves, which is killed at the end."""
    command = [*wrap, sys.executable, "-c", SAVER, str(path), str(size), str(limit)]
    environment = zygote.environment() | {"FASTCKPT_TOP_DIR": str(place)} | variables
    with subprocess.Popen(command, env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


def saved(place, path, size, **options):
    """The operation and the history record of a completed save."""
    with saving(place, path, size, **options) as child:
        assert child.wait(60) == 0
    shm = ShmFeed([str(place)])
    proc = only(shm.poll())
    shm.close()
    (op,), (record,) = proc.operations, proc.history
    return op, record, [thread for _, thread in proc.threads]


def test_a_stopped_process_is_t_and_one_that_goes_on_is_not(shm, producer):
    child = producer()
    assert eventually(lambda: only(shm.poll()).state in ("R", "S"))
    child.send_signal(signal.SIGSTOP)
    assert eventually(lambda: only(shm.poll()).state == "T")
    child.send_signal(signal.SIGCONT)
    assert eventually(lambda: only(shm.poll()).state in ("R", "S"))
    child.kill()
    child.wait()
    assert eventually(lambda: not only(shm.poll()).alive)
    assert only(shm.poll()).state == "", "a dead process has no state"


def test_the_kernel_is_asked_once_a_second_and_only_while_an_operation_runs(place, producer, monkeypatch):
    producer("--total", 4e6, "--rate", 4e6)
    asked = []
    clock = Clock(step=0.25)
    shm = ShmFeed([str(place)], mono=clock)
    real = shm._kernel.state
    monkeypatch.setattr(shm._kernel, "state", lambda *arguments: asked.append(clock.now) or real(*arguments))
    assert eventually(lambda: not only(shm.poll()).operations[0].running)
    assert all(later - earlier >= PROBE_S for earlier, later in pairwise(asked))
    shm.poll()
    known = len(asked)
    for _ in range(20):
        assert only(shm.poll()).operations[0].phase == Phase.DONE
    assert len(asked) == known
    assert only(shm.poll()).state == ""
    shm.close()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a PID namespace")
def test_a_process_of_another_pid_namespace_is_found_by_its_lock(shm, producer):
    wrapper = producer(wrap=("unshare", "--fork", "--pid", "--mount-proc", "--kill-child"))
    # The pid in its namespace belongs to another process here, or to none.
    assert only(shm.poll()).header.pid < 10
    inside = int(Path(f"/proc/{wrapper.pid}/task/{wrapper.pid}/children").read_text().split()[0])
    assert eventually(lambda: only(shm.poll()).state in ("R", "S"))
    os.kill(inside, signal.SIGSTOP)
    assert eventually(lambda: only(shm.poll()).state == "T")
    os.kill(inside, signal.SIGCONT)


@pytest.mark.parametrize("field", ["start_ticks", "boot_id", "time_ns"])
def test_what_may_be_another_process_has_no_state(shm, producer, field):
    producer()
    proc = only(shm.poll())
    file = Path(proc.path).stat()
    other = {name: getattr(proc.header, name) for name in ("pid", "pid_ns", "start_ticks", "boot_id", "time_ns")}
    ask = shm._kernel.state

    def state():
        header = type(proc.header)(**{name: getattr(proc.header, name) for name in proc.header.__slots__} | other)
        return ask(header, (file.st_dev, file.st_ino), (), 0.0)

    assert state() in tuple("RS")
    other[field] = "00" * 16 if field == "boot_id" else other[field] + 1
    assert state() == ""


def test_users_have_names_where_they_are_known_here():
    uid = os.getuid()
    assert user_of(uid, uid) == pwd.getpwuid(uid).pw_name
    nobody = 4_000_000_000
    assert user_of(nobody, nobody) == str(nobody), "a user without a name is shown by number"
    # In its container's user namespace the process is user 0; here its files belong to another user.
    assert user_of(0, 100_000) == "0"
    assert user_of(2**40, 2**40) == str(2**40), "a segment may hold any number"


def test_the_feed_and_a_recording_have_the_user_and_the_state(shm, producer, recording):
    producer()
    assert only(shm.poll()).user == pwd.getpwuid(os.geteuid()).pw_name
    played = Recording(str(recording)).snapshot(0).procs
    assert {(proc.user, proc.state) for proc in played} == {("mira", "S")}


@pytest.mark.root
def test_workers_that_the_storage_does_not_answer_make_the_process_d(shm, place):
    needs.root()
    needs.tool("fsfreeze", "util-linux")
    with mounts.mount("ext4") as point, saving(place, point / "step-7", 30 * MB, 3 * MB, FASTCKPT_IO="threads"):
        assert eventually(lambda: shm.poll().procs)
        assert eventually(lambda: any(thread.bytes_op for _, thread in only(shm.poll()).threads))
        # Only the worker hangs: the main thread waits for its workers normally.
        assert only(shm.poll()).state in ("R", "S")
        subprocess.run(["fsfreeze", "-f", str(point)], check=True)
        try:
            assert eventually(lambda: only(shm.poll()).state == "D")
        finally:
            subprocess.run(["fsfreeze", "-u", str(point)], check=True)
        assert eventually(lambda: only(shm.poll()).state != "D")


def held_up(shm, place, hang, state):
    """The only rank and its sentence, five looks, of a second each, after all workers stopped in `state`."""
    assert eventually(lambda: shm.poll().procs)
    assert eventually(lambda: any(thread.bytes_op for _, thread in only(shm.poll()).threads))
    model = Model()

    def stand():
        threads = [thread for _, thread in only(shm.poll()).threads]
        return {thread.state for thread in threads if thread.state != ThreadState.IDLE} == {state} and sum(
            thread.requests for thread in threads
        )

    with hang:
        last = []
        assert eventually(lambda: last.append(stand()) or (len(last) > 20 and last[-1] and len({*last[-20:]}) == 1))
        eyes = ShmFeed([str(place)], mono=Clock())
        for _ in range(6):
            model.update(eyes.poll())
            beats = only(shm.poll()).process.heartbeat
            assert eventually(lambda: only(shm.poll()).process.heartbeat != beats)  # noqa: B023 - called here
        eyes.close()
        return model.rows[0], model.main.sentence


SMALL = {"FASTCKPT_BLOCK_SIZE": str(1 << 20), "FASTCKPT_QUEUE_DEPTH": "2"}


@pytest.mark.root
@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_a_device_that_hangs_is_named_as_storage_whatever_letter_the_process_has(shm, place, engine):
    """A stopped process holds up the file of a loop device. Mutant: the storage is named only if a worker is `D`."""
    with mounts.mount("fuse") as behind:
        image = behind / "image"
        with image.open("wb") as file:
            file.truncate(256 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
        with (
            mounts.mount("ext4", image=image) as point,
            saving(place, point / "step-7", 90 * MB, 3 * MB, FASTCKPT_IO=engine, **SMALL),
        ):
            row, said = held_up(shm, place, mounts.unanswering(behind), ThreadState.IO)
    assert (row.engine, row.direct, row.state, row.wait_kind) == (engine, True, "STALL", "disk")
    # With io_uring, the state is also `D` when the kernel has no free request.
    assert engine == "uring" or row.process_state == "D"
    assert re.fullmatch(r"pid \d+: the storage has not answered for \d s", said.words[0])


@pytest.mark.root
def test_a_worker_that_waits_for_a_page_waits_for_memory_and_not_for_the_storage(shm, place, tmp_path):
    """The tensors are in a mapped file that hangs. Mutant: every thread in `D` waits for the storage."""
    with mounts.mount("fuse") as behind:
        (behind / "tensors").write_bytes(bytes(90 * MB))
        with saving(place, tmp_path / "step-7", 90 * MB, 3 * MB, TENSORS=str(behind / "tensors"), **SMALL):
            row, said = held_up(shm, place, mounts.unanswering(behind), ThreadState.SOURCE)
    assert (row.process_state, row.state, row.wait_kind) == ("D", "STALL", "memory")
    assert re.fullmatch(r"pid \d+ has made no progress for \d s: waits for memory \(mmap, page faults\)", said.words[0])


def test_silence_in_stage_is_no_stall_unless_the_process_is_stopped(shm, producer):
    from dataclasses import replace

    producer()
    first = only(shm.poll())
    model = Model()

    def look(mono, state, phase):
        op = replace(first.operations[0], phase=phase, t_start_mono_ns=0, t_phase_mono_ns=0, bytes_staged=0)
        proc = replace(first, operations=(op,), threads=(), state=state)
        model.update(Snapshot(mono, mono, "here", (proc,)))
        return model.rows[0].stalled_s

    for phase in (Phase.STAGE, Phase.PLAN):
        begin = model.mono + 100
        assert look(begin, "S", phase) is None
        assert look(begin + 60, "S", phase) is None, "the process may be waiting for a device"
        assert look(begin + 61, "", phase) is None, "the process's state is unknown"
        assert look(begin + 62, "T", phase) is None
        assert look(begin + 62 + HEARTBEAT_STALL_S, "T", phase) == HEARTBEAT_STALL_S, "since the process was stopped"
        assert look(begin + 70, "S", phase) is None
    assert look(model.mono + 60, "S", Phase.WRITE) > 60, "in phase write, workers run and raise the heartbeat"


def no_ring(*more):
    return (sys.executable, "-m", "harness.seccomp", "EPERM", "--", *more)


@pytest.mark.parametrize(
    ("how", "refused", "number"),
    [
        ("seccomp", ("io_uring",), errno.EPERM),
        pytest.param("memlock", ("io_uring",), errno.ENOMEM, marks=pytest.mark.root),
        pytest.param("ramfs", ("direct I/O",), errno.EINVAL, marks=pytest.mark.root),
        pytest.param("both", ("io_uring", "direct I/O"), errno.EPERM, marks=pytest.mark.root),
        ("chosen", (), 0),
    ],
)
def test_the_page_says_what_was_refused_and_why(place, tmp_path, how, refused, number):
    wrap, variables = (), {}
    if how in ("seccomp", "both"):
        wrap = no_ring()
    elif how == "memlock":
        needs.root()
        needs.tool("setpriv", "util-linux")
        # The process is root without the capability that lifts the limit.
        wrap = ("setpriv", "--bounding-set=-ipc_lock", "prlimit", "--memlock=0")
    elif how == "chosen":
        variables = {"FASTCKPT_IO": "threads"}
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(mounts.mount("ramfs")) if how in ("ramfs", "both") else tmp_path
        op, record, _ = saved(place, directory / "step-7", 30 * MB, wrap=wrap, **variables)
    assert op.refused == refused
    assert bool(op.flags & FLAG_FALLBACK) == bool(refused)
    assert op.fallback_errno == number
    assert (record.flags, record.fallback_errno) == (op.flags, op.fallback_errno)


def test_time_in_fsync_is_told_apart_from_the_disk(place, tmp_path):
    """Mutant: a worker's fsync also counts as a request in flight."""
    needs.tool("strace", "strace")
    log, delay = tmp_path / "log", "inject=fsync,fdatasync:delay_enter=400000"
    wrap = ("strace", "-f", "-o", str(log), "-e", "trace=fsync,fdatasync", "-e", delay)
    _, record, threads = saved(place, tmp_path / "step-7", 30 * MB, wrap=wrap)
    assert sum(thread.fsync_wait_ms for thread in threads) >= 3 * 400, "each of the three files has a slow fsync"
    workers = {thread.tid for thread in threads}
    callers = [int(line.split()[0]) for line in log.read_text().splitlines() if "sync(" in line]
    commit = 400 * 10**6 * sum(caller not in workers for caller in callers)
    assert commit, "other threads sync in the commit"
    for thread in threads:
        waits = thread.fsync_wait_ms * 10**6 + thread.busy_ns + thread.source_wait_ns
        assert waits + commit <= record.dur_ns, "no moment counts twice"
