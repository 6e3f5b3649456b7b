"""Finding and reading segments: liveness by the lock, and malicious directories."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fastckpt_top import feed
from fastckpt_top.feed import ShmFeed
from fastckpt_top.model import Model
from looking import eventually
from producer import Image

HERE = Path(__file__).parent


@pytest.fixture
def shm(place):
    made = ShmFeed([str(place)])
    yield made
    made.close()


def only(snapshot):
    (proc,) = snapshot.procs
    return proc


def test_the_environment_names_the_directory():
    assert feed.directories({}, 1000) == ["/dev/shm/fastckpt-1000"]
    assert feed.directories({"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == ["/dev/shm/fastckpt-7", "/run/user/7/fastckpt"]
    assert feed.directories({"FASTCKPT_TOP_DIR": "/x", "XDG_RUNTIME_DIR": "/y"}, 7) == ["/x"]


def test_a_missing_directory_is_no_problem(tmp_path):
    shm = ShmFeed([str(tmp_path / "none")])
    assert (shm.poll().procs, shm.poll().problems) == ((), ())


def test_a_process_that_lives_is_alive_and_its_counters_move(shm, producer):
    child = producer("--rate", 1e9)
    first = only(shm.poll())
    assert first.alive
    assert first.same_clock
    assert first.header.pid == child.pid
    assert eventually(
        lambda: sum(t.bytes_op for _, t in only(shm.poll()).threads) > sum(t.bytes_op for _, t in first.threads)
    )


def test_a_process_that_begins_later_is_found_and_one_whose_file_goes_is_dropped(shm, producer, place):
    assert shm.poll().procs == ()
    producer()
    assert only(shm.poll()).alive
    next(place.glob("*.seg")).unlink()
    assert shm.poll().procs == ()


def test_kill_9_is_seen_as_death(shm, producer):
    child = producer()
    assert only(shm.poll()).alive
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert eventually(lambda: not only(shm.poll()).alive)
    assert only(shm.poll()).operations[0].running


def test_a_stopped_process_is_alive_and_stalls(shm, producer):
    child = producer()
    model = Model()
    eventually(lambda: model.update(shm.poll()) or (model.rows and model.rows[0].rate))
    child.send_signal(signal.SIGSTOP)
    try:

        def stalled():
            model.update(shm.poll())
            return model.rows[0].state == "STALL"

        assert eventually(stalled)
        assert model.rows[0].alive
        assert model.rows[0].stalled_s >= 2
    finally:
        child.send_signal(signal.SIGCONT)
    assert eventually(lambda: model.update(shm.poll()) or model.rows[0].state == "WRITE")
    assert [event.text for event in model.events][-1] == "rank 0 goes on"


def test_a_forked_child_does_not_keep_a_dead_parent_alive(shm, producer):
    child = producer("--fork")
    grandchild = int(child.first)
    try:
        assert only(shm.poll()).alive
        child.stdin.close()
        child.wait()
        os.kill(grandchild, 0)
        assert eventually(lambda: not only(shm.poll()).alive)
    finally:
        os.kill(grandchild, signal.SIGKILL)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a PID namespace")
def test_liveness_holds_across_pid_namespaces(shm, producer):
    wrapper = producer(wrap=("unshare", "--fork", "--pid", "--mount-proc", "--kill-child"))
    proc = only(shm.poll())
    assert proc.header.pid < 10 < wrapper.pid
    assert proc.alive
    wrapper.kill()
    wrapper.wait()
    assert eventually(lambda: not only(shm.poll()).alive)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a PID namespace")
def test_a_monitor_in_another_pid_namespace_sees_the_process(producer, place):
    producer()
    code = f"from fastckpt_top.feed import ShmFeed; print([p.alive for p in ShmFeed([{str(place)!r}]).poll().procs])"
    command = ["unshare", "--fork", "--pid", "--mount-proc", sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[True]\n"


def test_without_flock_the_process_table_decides(shm, place, monkeypatch):
    monkeypatch.setattr(feed, "is_locked", lambda _: None)
    Image().write(place)
    assert only(shm.poll()).alive
    other = ShmFeed([str(place)])
    Image(start_ticks=1).write(place)
    assert not only(other.poll()).alive
    other.close()


def test_the_clock_is_only_shared_on_the_same_boot_and_time_namespace(place):
    for header, same in (({}, True), ({"time_ns": 7}, False), ({"boot_id": bytes(16)}, False)):
        Image(**header).write(place)
        shm = ShmFeed([str(place)])
        assert only(shm.poll()).same_clock is same
        shm.close()


def test_only_wanted_processes_and_ranks_are_read(place):
    Image(rank=1, pid=11).write(place, "11-1.seg")
    Image(rank=2, pid=12).write(place, "12-1.seg")
    for wanted, ranks in (({}, [1, 2]), ({"pids": [12]}, [2]), ({"ranks": [1]}, [1])):
        shm = ShmFeed([str(place)], **wanted)
        assert sorted(proc.header.rank for proc in shm.poll().procs) == ranks
        shm.close()


def test_the_later_segment_of_a_process_counts(place, shm):
    Image(rank=1).write(place, "5-5.seg")
    Image(rank=2, generation=2).write(place, "5-5-2.seg")
    assert only(shm.poll()).header.rank == 2


def test_the_history_ring_is_read_from_its_oldest_record(place, shm):
    made = Image()
    for number in range(70):
        made.record(number)
    made.set("history", 8, op_id=0)  # op_id 0: the record is being written
    made.write(place)
    assert [record.op_id for record in only(shm.poll()).history] == [*range(7, 9), *range(10, 71)]


def test_files_that_are_no_segments_are_named_with_a_reason(place, shm, tmp_path):
    good = Image().write(place, "1-1.seg")
    (place / "2-2.seg").symlink_to(good)
    os.mkfifo(place / "3-3.seg")
    (place / "4-4.seg").write_bytes(b"")
    (place / "5-5.seg").write_bytes(b"x" * 40000)
    (place / "6-6.seg").mkdir()
    os.link(Image().write(tmp_path, "source"), place / "7-7.seg")
    Image(major=9).write(place, "8-8.seg")
    (place / ".9-9.seg").write_bytes(b"")
    (place / "not.seg").write_bytes(b"")
    (place / "10-\x1b[31m.seg").write_bytes(b"")
    snapshot = shm.poll()
    assert [proc.path for proc in snapshot.procs] == [str(good)]
    assert sorted(int(Path(path).name.split("-")[0]) for path, _ in snapshot.problems) == [2, 3, 4, 5, 6, 7, 8, 10]
    assert all(path.isprintable() for path, _ in snapshot.problems)
    assert any("newer fastckpt-top" in reason for _, reason in snapshot.problems)


def test_a_file_that_is_cut_short_while_it_is_watched_is_no_crash(place, shm):
    path = Image().write(place)
    made = shm.poll()
    os.truncate(path, 100)
    shm._files[str(path)].final = None
    made = shm.poll()
    assert made.procs == ()
    assert "cut short" in made.problems[0][1]


def test_a_slot_that_never_holds_still_is_shown_as_it_was(place, shm, monkeypatch):
    made = Image()
    made.operation(bytes_durable=5)
    made.thread(0, bytes_op=7)
    path = made.write(place)
    assert only(shm.poll()).operations[0].bytes_durable == 5
    real = os.pread
    count = [0]

    def torn(fd, length, offset):
        count[0] += 1
        data = bytearray(real(fd, length, offset))
        at = 0x200 + 0x30 if offset == 0 else 0
        if len(data) > at + 8:
            data[at : at + 8] = os.urandom(8)
        return bytes(data)

    shm._files[str(path)].final = None
    monkeypatch.setattr(os, "pread", torn)
    proc = only(shm.poll())
    assert proc.operations[0].bytes_durable == 5
    assert count[0] >= 2 * feed.ATTEMPTS


@pytest.mark.parametrize("alive", [True, False])
def test_a_slot_in_the_middle_of_a_change_is_read_of_the_dead_alone(place, shm, alive):
    made = Image()
    made.operation(seq=3, bytes_durable=5)
    with made.write(place).open("rb") as file:
        if alive:
            fcntl.flock(file, fcntl.LOCK_EX)
        proc = only(shm.poll())
    assert proc.alive is alive
    assert [op.bytes_durable for op in proc.operations] == ([] if alive else [5])


def test_the_dead_are_not_read_again(place, shm, monkeypatch):
    Image().write(place)
    first = only(shm.poll())
    assert not first.alive
    monkeypatch.setattr(os, "pread", lambda *_: pytest.fail("read again"))
    assert only(shm.poll()) is first


def test_only_old_files_of_dead_processes_are_swept(place, producer, tmp_path):
    producer()
    (alive,) = place.glob("*.seg")
    young = Image().write(place, "1-1.seg")
    old = Image().write(place, "2-2.seg")
    hidden = Image().write(place, ".3-3.seg")
    other = place / "notes.txt"
    other.write_text("mine")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (place / "4-4.seg").symlink_to(victim)
    long_ago = time.time() - 601
    for path in (alive, old, hidden, other, victim):
        os.utime(path, (long_ago, long_ago))
    removed = feed.sweep([str(place), str(place / "none")], now=time.time(), uid=os.geteuid())
    assert sorted(removed) == sorted([str(old), str(hidden)])
    assert all(path.exists() for path in (alive, young, other, victim))
    assert feed.sweep([str(place)], now=time.time() + 700, uid=os.geteuid() + 1) == []


def test_both_clocks_are_read_before_the_segments(place, monkeypatch):
    """A long look on a busy machine does not change the start that an operation is shown with."""
    now = [100.0]
    shm = ShmFeed([str(place)], mono=lambda: now[0], real=lambda: now[0] + 1e9)

    def slow(*_):
        now[0] += 5.0
        return {}

    monkeypatch.setattr(shm, "_scan", slow)
    snapshot = shm.poll()
    assert (snapshot.mono, snapshot.real) == (100.0, 1e9 + 100.0)
    shm.close()
