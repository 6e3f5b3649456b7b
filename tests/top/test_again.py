"""Jobs that are restarted, jobs started by wrappers, and switches between jobs; recordings of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from by_hand import GB, Rank, look, moving
from fastckpt_top import text
from fastckpt_top.model import Model
from fastckpt_top.record import Recorder
from fastckpt_top.replay import Recording, Replay
from fastckpt_top.segment import Phase
from fastckpt_top.views import threads
from fastckpt_top.views.live import paint
from fastckpt_top.views.paint import Frame
from fastckpt_top.views.state import Ui
from looking import demo, end, eventually, once
from painted import frame, plain, rank

# Saves at a limited or full rate, and exits when its input is closed.
SAVER = """
import sys
import numpy as np
import fastckpt
limit = float(sys.argv[2]) or None
fastckpt.save({"w": np.ones(4_000_000, np.uint8)}, sys.argv[1], io=fastckpt.IO(bandwidth_limit=limit))
print("saved", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def saver(place):
    """Starts processes that save, each below its own launcher if `wrapped`, and kills them at the end."""
    children = []

    def start(path, limit=0, *, wrapped=False, **environment):
        known = os.environ | {"FASTCKPT_TOP_DIR": str(place), "FASTCKPT_JOB": "job"} | environment
        command = [sys.executable, "-c", SAVER, str(path), str(limit)]
        command = ["sh", "-c", '"$@"; :', "sh", *command] if wrapped else command
        pipe = subprocess.PIPE
        children.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=known))
        return children[-1]

    yield start
    end(children)


def test_ranks_below_shells_of_their_own_are_one_job(saver, place, tmp_path):
    """Mutant: a rank with its own launcher is its own job."""
    for number in range(3):
        environment = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        child = saver(tmp_path / str(number) / "step-1", wrapped=True, **environment)
        assert child.stdout.readline() == "saved\n"
    tick = once(place)
    assert [(job["ranks"], job["alive"]) for job in tick["jobs"]] == [(3, 3)]
    (op,) = tick["ops"]
    assert (op["ranks"], op["gpus"], op["missing"]) == (3, 3, [])


def test_equal_ranks_below_shells_are_apart_and_so_are_those_of_another_time():
    """Ranks of two jobs with one name cannot be told apart. Mutant: such ranks form one job."""

    def jobs(*ranks):
        return sorted(job.ranks for job in look(Model(), 1.0, *ranks).jobs)

    def one(number, launch, **header):
        return Rank(0).of(rank=number, launch=launch, pid=launch, world=2, local_world=2, **header).op(GB)

    assert jobs(one(0, 1), one(1, 2)) == [2]
    assert jobs(one(0, 1), one(1, 2), one(0, 3)) == [1, 1, 1]
    before = one(0, 1)
    before.proc = replace(before.proc, alive=False, touched=1e9)
    assert jobs(before, one(1, 2, real0_ns=int(2e18))) == [1, 1]


def test_a_job_that_is_started_again_without_a_rank_has_no_dead_row(saver, place, tmp_path, top):
    """Mutant: a dead process without a rank stays beside its replacement."""
    first = saver(tmp_path / "a", 20_000)
    assert eventually(lambda: list(place.glob("*.seg")))
    assert eventually(lambda: [row["state"] for row in once(place)["ranks"]] == ["write"])
    first.kill()
    first.wait()
    assert [row["state"] for row in once(place)["ranks"]] == ["dead"]
    again = saver(tmp_path / "a")
    assert again.stdout.readline() == "saved\n"
    tick = once(place)
    assert [(row["pid"], row["state"]) for row in tick["ranks"]] == [(again.pid, "done")]
    assert [job["alive"] for job in tick["jobs"]] == [1]
    assert top("--check", "0").returncode == 0


def test_who_died_while_another_of_the_name_was_at_work_stays():
    """The other process is another program. Mutant: any process of that name is the dead one's successor."""
    dead, other = (Rank(0).of(rank=-1, launch=number, pid=number, real0_ns=int(1e18)) for number in (1, 2))
    look(model := Model(), 1.0, dead.op(GB), other.op(GB))
    dead.proc = replace(dead.proc, alive=False, touched=1e9)
    assert [row.state for row in look(model, 2.0, dead, other).rows] == ["DEAD", "WRITE"]


def test_the_numbers_of_jobs_do_not_change_under_the_user():
    """Mutant: a job's number is its place in the list, which changes when another job begins to save."""
    ranks = [Rank(0).of(job=name, launch=number, pid=number) for number, name in enumerate("abc", 1)]
    model = look(Model(), 1.0, *ranks)

    def numbers():
        found = {}
        for job in model.jobs:
            screen = paint(Frame(model, Ui(job=job.key), text.UNICODE, 120, 30)).plain
            found[job.name] = re.search(r"job (\d) of 3", screen)[1]
        return found

    assert numbers() == {"a": "1", "b": "2", "c": "3"}
    look(model, 2.0, ranks[0], ranks[1], moving(ranks[2], 2.0, GB, start=1.5))
    assert model.jobs[0].name == "c", "at work"
    assert numbers() == {"a": "1", "b": "2", "c": "3"}


def test_both_figures_of_an_operation_count_the_rank_that_failed_early():
    """Not `FSYNC 75 %` beside `0.60/0.60 GB`. Mutant: a rank that failed before its plan adds no bytes."""
    ranks = [Rank(0).of(rank=number, pid=number) for number in range(4)]
    for number, one in enumerate(ranks):
        one.op(0 if number == 3 else GB, Phase.FAILED if number == 3 else Phase.FSYNC, total=0 if number == 3 else GB)
    ranks[3].op(0, Phase.FAILED, total=0, end=0.5)
    op = look(Model(), 2.0, *ranks).main
    assert (op.progress, op.done, op.total) == (0.75, 3 * GB, 4 * GB)
    assert (op.eta_s, op.no_eta) == (None, "never")


def test_an_end_that_nobody_knows_has_its_reason():
    """Mutants: an unknown end is `--:--`; an ended operation has a reason, too."""
    model, one = Model(), Rank()
    assert look(model, 0.5, one.op(GB)).main.no_eta == "just begun"
    for tick in range(2, 9):
        look(model, tick / 2, moving(one, tick / 2, GB, total=20 * GB))
    assert (model.main.no_eta, model.main.eta_s is None) == ("", False)
    assert look(model, 15.0, one).main.no_eta == "stalled"
    assert " stalled " in paint(Frame(model, Ui(), text.UNICODE, 120, 30)).lines[1].plain
    assert look(model, 16.0, one.op(20 * GB, Phase.FSYNC, total=20 * GB).beat(99)).main.no_eta == "in fsync"
    for phase in (Phase.DONE, Phase.FAILED):
        assert look(model, 17.0, one.op(20 * GB, phase, total=20 * GB, end=16.5)).main.no_eta == ""


def test_only_a_save_is_durable():
    for kind, durable in (("save", True), ("load", False)):
        row = rank(3, kind=kind, durable=10**9)
        whole = "\n".join(plain(threads.block(frame([row], (160, 40)), row, 160, 12)))
        assert ("GB durable" in whole) == durable


# --- recordings ------------------------------------------------------------------------------------------------------


def test_a_replay_begins_at_the_first_operation(tmp_path):
    """Mutant: a replay begins with the pause before the first operation."""
    path = tmp_path / "r.jsonl"
    clock, session = demo(26.0)
    session.sinks.append(Recorder(str(path)))
    for tick in range(46):
        clock.now = 100.0 + tick
        session.tick()
    session.close()
    replay = Replay(str(path))
    assert replay.model.main.running
    assert replay.model.main.kind == "load"
    assert 0 < replay.index == replay.recording.first
    replay.home()
    assert replay.index == 0


def test_a_recording_has_a_largest_size_and_goes_on_in_a_new_file(tmp_path):
    """Mutants: a recording grows without bound; the next file lacks facts from the previous one."""
    for name, other in (("r.jsonl", "r.1.jsonl"), ("z.jsonl.gz", "z.1.jsonl.gz")):
        path = tmp_path / name
        clock, session = demo(0.0)
        recorder = Recorder(str(path), largest=100_000)
        session.sinks.append(recorder)
        for tick in range(300):
            clock.now = 100.0 + tick / 2
            session.tick()
        session.close()
        assert {file.name for file in tmp_path.glob(f"{name[0]}*")} == {name, other}
        parts = [tmp_path / other, path]
        assert all(part.stat().st_size < 400_000 for part in parts)
        assert all(part.stat().st_mode & 0o777 == 0o600 for part in parts)
        first, last = (Recording(str(part)) for part in parts)
        assert first.times[-1] < last.times[0], "the new file continues the old one"
        replay = Replay(str(path))
        replay.end()
        assert replay.model.ops[0].label == session.model.ops[0].label
        assert len(replay.model.past.checkpoints) == len(session.model.past.checkpoints)
