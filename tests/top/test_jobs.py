"""Jobs: their processes, their counts, and their selection."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from by_hand import GB, Rank, joined, look, moving
from fastckpt_top import jsonout, lines, prometheus, targets
from fastckpt_top.lines import LineWriter
from fastckpt_top.model import Model
from fastckpt_top.segment import Kind, Phase
from looking import demo
from producer import Image
from prometheus_client.parser import text_string_to_metric_families


def two_jobs(model, now=4.0, names=("a", "b")):
    """Two jobs of two ranks each that save the same step."""
    ranks = [
        Rank(index).of(job=names[index // 2], launch=1 + index // 2, rank=index % 2, pid=100 + index, gpu=index % 2)
        for index in range(4)
    ]
    for at in (now - 1.0, now - 0.5, now):
        look(model, at, *(moving(rank, at, (1 + index // 2) * GB) for index, rank in enumerate(ranks)))
    return ranks


def test_two_jobs_of_the_same_step_are_shown_apart_with_their_own_targets():
    two_jobs(model := Model(targets.tier("high", "option")))
    assert [(job.name, job.ranks, job.alive, job.gpus, job.active) for job in model.jobs] == [
        ("a", 2, 2, 2, True),
        ("b", 2, 2, 2, True),
    ]
    assert [(op.job_key, op.target, op.done) for op in model.ops] == [
        ("a:100", 6 * GB, 8 * GB),
        ("b:102", 6 * GB, 16 * GB),
    ]
    assert [row.job_key for row in model.rows] == ["a:100", "b:102", "a:100", "b:102"]
    assert model.node.gpus == 4


def test_a_process_group_and_a_launcher_each_make_a_job_and_both_together_one():
    ranks = [Rank(index).of(launch=index // 2, pid=100 + index) for index in range(4)]
    model = look(Model(), 1.0, *ranks)
    assert [job.ranks for job in model.jobs] == [2, 2]
    joined(ranks[1], 1, group=7)
    joined(ranks[2], 2, group=7)
    together = look(model, 2.0, *ranks).jobs
    assert sorted(job.ranks for job in together) == [1, 3], "launch 0 is unknown, and joins no ranks"
    for index, rank in enumerate(ranks):
        joined(rank.of(launch=5 + index, key=rank.proc.key), index, group=7)
    assert [job.ranks for job in look(model, 3.0, *ranks).jobs] == [4]


def test_a_job_keeps_its_key_when_its_first_rank_has_gone_and_another_job_gets_another():
    ranks = [Rank(index).of(pid=100 + index) for index in range(2)]
    model = look(Model(), 1.0, *ranks)
    assert [job.key for job in model.jobs] == ["llama70b:100"]
    look(model, 2.0, ranks[1])
    assert [job.key for job in model.jobs] == ["llama70b:100"]
    other = Rank(0).of(launch=2, pid=100, key="in another container")
    look(model, 3.0, ranks[1], other)
    assert sorted(job.key for job in model.jobs) == ["llama70b:100", "llama70b:100.2"]


def test_jobs_that_run_come_first_and_those_that_are_over_stay_newest_first():
    idle, busy = Rank(0).of(job="idle", launch=1, pid=7), Rank(1).of(job="busy", launch=2, pid=8)
    idle.op(10 * GB, Phase.DONE, end=1.0)
    model = look(Model(), 4.0, idle, moving(busy, 4.0, GB, start=2.0))
    assert [job.name for job in model.jobs] == ["busy", "idle"]
    assert [(op.job_key, op.running) for op in model.ops] == [("busy:8", True), ("idle:7", False)]
    idle.proc = replace(idle.proc, alive=False)
    busy.op(10 * GB, Phase.DONE, start=2.0, end=3.0)
    busy.proc = replace(busy.proc, alive=False)
    idle.op(10 * GB, Phase.DONE, end=3.5)
    model = look(Model(), 5.0, busy, idle)
    assert [(job.name, job.alive, job.active) for job in model.jobs] == [("idle", 0, False), ("busy", 0, False)]
    assert [op.job_key for op in model.ops] == ["idle:7", "busy:8"]
    # An ended job stays even beside a living job, but not forever.
    other = Rank(2).of(job="other", launch=3, pid=9)
    assert [job.name for job in look(model, 6.0, busy, idle, other).jobs] == ["idle", "busy", "other"]
    assert [job.name for job in look(model, 603.2, busy, idle, other).jobs] == ["idle", "other"]


def test_the_dead_of_other_launches_are_one_line_and_do_not_hide_a_save():
    """A test suite on the machine may have killed hundreds of processes."""
    dead = [Rank(0).of(job="-c", launch=1 + index % 3, rank=-1, pid=100 + index) for index in range(121)]
    for index, one in enumerate(dead):
        one.op(GB, start=index / 100, slot=index % 5).thread(0, last_progress_mono_ns=int(2e9))
        one.proc = replace(one.proc, alive=False, touched=1e9)
    mine = Rank(0).of(job="train.py", launch=9, pid=7).op(10 * GB, Phase.DONE, start=2.0, end=4.0)
    mine.proc = replace(mine.proc, alive=False, touched=1e9)
    model = Model()
    for at in (5.0, 6.0):
        look(model, at, *dead, mine)
    assert [(job.key, job.alive) for job in model.jobs] == [("train.py:7", 0)]
    assert [op.label for op in model.ops] == ["step-1"]
    assert (model.node.ranks, [row.state for row in model.rows], model.others) == (0, ["EXIT"], 121)
    shown = lines.table(model)
    assert "save step-1: 10.0 of 10.0 GB" in shown
    assert shown.splitlines()[-1].startswith("- 121 processes of other launches died before that")
    # The processes that died last are shown, and the save stays beside them.
    late = Rank(0).of(job="late", launch=10, rank=-1, pid=8).op(GB, start=5.0, slot=1)
    late.thread(0, last_progress_mono_ns=int(6e9)).proc = replace(late.proc, alive=False, touched=1e9)
    model = look(model, 7.0, *dead, mine, late)
    assert [job.key for job in model.jobs] == ["late:8", "train.py:7"]
    assert (model.node.ranks, model.others) == (1, 121)


def test_a_rank_that_died_stays_beside_those_of_its_job_that_live():
    """Another job ended after the death. Mutant: the dead rank counts among other launches."""
    dead, alive = (Rank(rank).of(job="train.py", launch=9, pid=7 + rank) for rank in (0, 1))
    dead.op(GB, start=1.0).thread(0, last_progress_mono_ns=int(2e9))
    dead.proc = replace(dead.proc, alive=False, touched=1e9)
    other = Rank(0).of(job="eval.py", launch=10, rank=-1, pid=20).op(GB, Phase.DONE, start=3.0, end=4.0)
    other.proc = replace(other.proc, alive=False, touched=1e9)
    model = look(Model(), 5.0, dead, alive, other)
    assert (model.others, model.node.ranks, [row.rank for row in model.rows]) == (0, 2, [0, 1, None])


def test_what_a_job_saved_before_it_was_started_again_leaves_the_list():
    """Mutant: the old save stays for as long as that of a job which was not started again."""
    before = Rank(0).of(job="train.py", launch=9, pid=7).op(GB, Phase.DONE, start=1.0, end=2.0)
    before.proc = replace(before.proc, alive=False, touched=1e9)
    other = Rank(0).of(job="eval.py", launch=10, rank=-1, pid=20).op(GB, Phase.DONE, start=3.0, end=4.0)
    assert [job.key for job in look(Model(), 5.0, before, other).jobs] == ["eval.py:20", "train.py:7"]
    again = Rank(0).of(job="train.py", launch=11, pid=30)
    model = look(Model(), 5.0, before, other, again)
    assert [job.key for job in model.jobs] == ["eval.py:20", "train.py:30"]
    assert len(model.ops) == 1


def test_a_job_that_failed_and_was_run_again_is_judged_by_that_run_also_when_it_is_over():
    """Mutant: both runs are judged, and the first run's values are in the series of their name."""
    failed = Rank(0).of(job="train.py", launch=9, pid=7).op(0, Phase.FAILED, start=1.0, end=2.0, error=27)
    again = Rank(0).of(job="train.py", launch=10, pid=8).op(10 * GB, Phase.DONE, start=3.0, end=4.0)
    for one, begun in ((failed, 1), (again, 3)):
        one.of(real0_ns=(10**9 + begun) * 10**9)
        one.proc = replace(one.proc, alive=False, touched=1e9 + begun + 1)
    model = look(Model(), 5.0, failed, again)
    assert ([job.key for job in model.jobs], lines.check(model, 0)[0]) == (["train.py:8"], True)


@pytest.mark.parametrize("phase", [Phase.PLAN, Phase.FSYNC, Phase.DRAIN])
def test_who_died_before_another_job_ended_is_none_that_ended_last_whatever_it_was_at(phase):
    """Mutant: the death of a process that moved no bytes counts as of the monitor's start."""
    kind = Kind.DRAIN if phase == Phase.DRAIN else Kind.SAVE
    dead = Rank(0, threads=0).of(job="train.py", launch=9, pid=7).op(0, phase, start=1.0, kind=kind)
    other = Rank(0).of(job="eval.py", launch=10, rank=-1, pid=20).op(GB, Phase.DONE, start=3.0, end=4.0)
    for one in (dead, other):
        one.proc = replace(one.proc, alive=False, touched=1e9 + 1)
    model = look(Model(), 5.0, dead, other)
    assert ([job.key for job in model.jobs], model.others) == (["eval.py:20"], 1)


@pytest.mark.parametrize("fate", ["died", "failed"])
def test_a_rank_that_was_lost_before_another_one_began_is_lost_to_their_save(fate):
    """Ranks begin at different times. Mutant: a rank that begins later makes another attempt, which succeeds."""
    lost, well = (Rank(rank, threads=0).of(launch=9, pid=7 + rank) for rank in (0, 1))
    lost.op(0, Phase.WRITE if fate == "died" else Phase.FAILED, start=1.0, end=1.25 if fate == "failed" else 0.0)
    lost.proc = replace(lost.proc, alive=fate == "failed")
    well.op(10 * GB, Phase.DONE, start=1.5, end=4.0)
    model = look(Model(), 5.0, lost, well)
    assert [(op.ranks, op.failed) for op in model.ops] == [(2, 1)]
    assert lines.check(model, 0)[0] is False


def test_check_judges_each_job_and_one_that_fails_fails_all():
    ranks = two_jobs(model := Model(targets.parse("1.5GB/s", "option")))
    good, words = lines.check(model, 100)
    assert good is False
    assert [line.split(" (")[0] for line in words.splitlines()] == [
        "BELOW TARGET: a:100 save step-1",
        "ok: b:102 save step-1",
    ]
    for rank in ranks[2:]:
        rank.op(10 * GB, Phase.DONE, end=4.0)
    for rank in ranks[:2]:
        moving(rank, 5.0, 2 * GB)
    assert lines.check(look(model, 5.0, *ranks), 80)[0] is True
    ranks[3].op(0, Phase.FAILED, start=5.0, end=5.1, slot=1, error=28).named("step-2", 2)
    assert lines.check(look(model, 5.5, *ranks), 80)[0] is False, "the last save of the idle job"


@pytest.mark.parametrize("wanted", ["b", "b:102"])
def test_one_job_alone_by_its_name_or_key(wanted):
    model = Model(targets.tier("high", "option"), job=wanted)
    two_jobs(model)
    assert [job.key for job in model.jobs] == ["b:102"]
    assert {row.job for row in model.rows} == {"b"}
    assert (model.node.alive, model.node.gpus, len(model.ops)) == (2, 2, 1)
    assert "a:100" not in lines.table(model)
    assert "fastckpt_process_up" in prometheus.render(model)
    assert 'job_name="a"' not in prometheus.render(model)


def test_a_job_that_is_not_there():
    two_jobs(model := Model(job="c"))
    assert (model.jobs, model.rows) == ([], [])
    assert lines.check(model, 100) == (None, "no process of job c in any directory")


def test_the_option_in_all_modes(place, top, tmp_path):
    for number, name in enumerate(("one", "two")):
        made = Image(rank=0, job=name.encode(), pid=100 + number, launch=1 + number)
        now = made.get("header", 0, "mono0_ns")
        made.operation(phase=6, t_start_mono_ns=now - 4 * 10**9, t_end_mono_ns=now, bytes_total=(1 + number) * 10**9)
        made.record(0, bytes=(1 + number) * 10**9)
        made.write(place, f"{100 + number}-1.seg")
    assert top("--check", "--job", "one", "--target", "0.3GB/s").returncode == 1
    assert top("--check", "--job", "two", "--target", "0.3GB/s").returncode == 0
    missing = top("--once", "--job", "three")
    assert (missing.returncode, "no process of job three" in missing.stderr) == (3, True)
    (line,) = top("--once", "--json", "--job", "two:101").stdout.splitlines()
    assert [op["bytes"] for op in json.loads(line)["ops"]] == [2 * 10**9]
    record = tmp_path / "r.jsonl"
    assert top("--count", 1, "--record", record).returncode == 0
    assert top("--replay", record, "--check", "--job", "one", "--target", "0.3GB/s").returncode == 1
    assert top("--replay", record, "--check", "--job", "two", "--target", "0.3GB/s").returncode == 0


def test_the_table_has_a_block_a_job_and_lines_name_theirs():
    two_jobs(model := Model())
    shown = lines.table(model)
    assert [line.split("  ")[0] for line in shown.splitlines() if line.startswith("job ")] == ["job a:100", "job b:102"]
    assert shown.count("RANK GPU") == 2
    LineWriter(out := io.StringIO()).write(model)
    assert sum(" a:100 save step-1: " in line for line in out.getvalue().splitlines()) == 1
    _, session = demo(4.0)
    session.tick()
    assert "\njob " not in lines.table(session.model), "one job needs no name"


def test_equal_ranks_of_two_jobs_are_two_series():
    ranks = two_jobs(model := Model(targets.tier("high", "option")))

    def series(name):
        return {
            tuple(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(prometheus.render(model))
            for sample in family.samples
            if sample.name == name
        }

    moved = series("fastckpt_io_bytes_total")
    assert moved == {("a", "0", "0"): 4 * GB, ("b", "0", "0"): 8 * GB, ("a", "1", "1"): 4 * GB, ("b", "1", "1"): 8 * GB}
    assert series("fastckpt_target_bytes_per_second")["a", "save", "high"] == 6 * GB
    assert {key: value for key, value in series("fastckpt_job_level").items() if value} == {
        ("a", "warn"): 1,
        ("b", "warn"): 1,
    }
    for rank in ranks:
        rank.of(job="same", key=rank.proc.key)
    look(model := Model(), 5.0, *ranks)
    assert len(series("fastckpt_io_bytes_total")) == 4
    for rank in ranks[:2]:
        rank.proc = replace(rank.proc, alive=False)
    look(model, 6.0, *ranks)
    assert series("fastckpt_io_bytes_total")["same", "0", "0"] == 8 * GB, "the name belongs to the living process"


def test_the_gravest_of_a_jobs_sentences_is_its_own():
    rank = Rank(0).of(pid=100)
    model = Model(targets.tier("high", "option"))
    for tick in range(1, 9):
        moving(rank, tick / 2, 4.5 * GB, kind=3, phase=Phase.READ)
        rank.op(int(tick / 2 * GB), start=0.25, slot=1)
        look(model, tick / 2, rank)
    assert [op.sentence.level for op in model.ops] == ["info", "warn"]
    assert model.jobs[0].sentence == model.ops[1].sentence


def test_a_user_has_a_name_or_a_number():
    named, other = Rank(0).of(uid=1000), Rank(1).of(uid=4711)
    named.proc, other.proc = replace(named.proc, user="anna"), replace(other.proc, user="")
    model = look(Model(), 1.0, named, other)
    assert [row.user for row in model.rows] == ["anna", "4711"]
    assert model.jobs[0].user == "anna"


def test_json_names_the_job_of_all():
    two_jobs(model := Model())
    tick = jsonout.Ticks().next(model)
    assert [job["key"] for job in tick["jobs"]] == ["a:100", "b:102"]
    assert {rank["job"] for rank in tick["ranks"]} == {op["job"] for op in tick["ops"]} == {"a:100", "b:102"}
