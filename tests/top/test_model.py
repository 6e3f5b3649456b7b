"""The model: rates, averages, ETA, verdicts, stragglers, stalls, events. Snapshots are made by hand; no clock runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from by_hand import GB, Rank, joined, look
from fastckpt_top import demo as demonstration
from fastckpt_top import jsonout, targets, text
from fastckpt_top.model import Model
from fastckpt_top.rows import Verdict, judge
from fastckpt_top.segment import Phase
from fastckpt_top.window import Sample, Window, percentile
from looking import demo


def test_the_rate_is_that_of_the_last_second_and_the_average_that_of_the_operation():
    model, rank = Model(), Rank()
    for now, done in ((0.0, 0), (0.5, 0), (1.0, 1 * GB), (1.5, 2 * GB), (2.0, 3 * GB), (2.5, 3.5 * GB), (3.0, 4 * GB)):
        look(model, now, rank.op(int(done)))
    (row,) = model.rows
    assert row.rate == pytest.approx(1 * GB)
    assert row.average == pytest.approx(4 * GB / 3)
    assert model.main.rate == pytest.approx(1 * GB)


def test_few_completions_lengthen_the_window():
    window = Window()
    for tick in range(21):  # a block of 1 GB every 2 s
        window.add(Sample(tick / 2, (tick // 4) * GB, tick // 4))
    assert window.rate() == pytest.approx(0.5 * GB, rel=0.25)
    assert Window().rate() is None


def test_the_time_before_the_first_completion_does_not_lower_the_rate():
    window = Window()
    for now, done in ((0.0, 0), (1.0, 0), (2.0, 0), (2.5, GB)):
        window.add(Sample(now, done))
    assert window.rate() == pytest.approx(2 * GB)


def test_a_counter_that_goes_back_begins_anew():
    window = Window()
    window.add(Sample(0.0, 5 * GB))
    window.add(Sample(1.0, 1 * GB))
    assert window.rate() is None
    window.add(Sample(2.0, 2 * GB, 30))
    assert window.rate() == pytest.approx(GB)


def test_progress_is_99_percent_at_most_until_all_is_being_made_durable():
    model, rank = Model(), Rank()
    assert look(model, 9.0, rank.op(10 * GB)).rows[0].progress == 0.99
    assert look(model, 9.5, rank.op(10 * GB, Phase.FSYNC)).rows[0].progress == 1.0
    assert model.rows[0].rate is None
    assert model.rows[0].average == pytest.approx(10 * GB / 9.5)


def test_eta_blends_rate_and_average_and_adds_the_last_fsync():
    model, rank = Model(), Rank()
    record = replace(demonstration._past(0, 0)[0], kind=1, result=1, sync_ns=int(2e9))
    rank.proc = replace(rank.proc, history=(record,))
    look(model, 0.5, rank.op(0))
    assert model.rows[0].eta_s is None
    for tick in range(1, 7):
        look(model, tick, rank.op(tick * GB).beat(tick))
    assert model.rows[0].eta_s == pytest.approx(4 / 1 + 2, rel=0.05)
    look(model, 20, rank)
    assert model.rows[0].stalled_s is not None
    assert model.rows[0].eta_s is model.main.eta_s is None, "a rank that has stopped has no ETA"


@pytest.mark.parametrize(
    ("average", "target", "verdict"),
    [
        (3.0, 3.0, Verdict.GOOD),
        (2.999, 3.0, Verdict.LOW),
        (2.4, 3.0, Verdict.LOW),
        (2.39, 3.0, Verdict.BAD),
        (None, 3.0, Verdict.QUIET),
    ],
)
def test_the_verdict_judges_the_average(average, target, verdict):
    assert judge(average, target) is verdict
    assert text.percent(0.9999) == "99%"


def test_targets_come_from_the_option_then_the_operation_then_the_process_then_light():
    rank = Rank().op(GB)
    assert look(Model(), 2.0, rank).main.target == 0.75 * GB
    rank.proc = replace(rank.proc, process=replace(rank.proc.process, target_save=int(1.5 * GB)))
    model = look(Model(), 2.0, rank)
    assert (model.main.target, model.main.target_name, model.node.target.source) == (1.5 * GB, "medium", "process")
    rank.proc = replace(rank.proc, operations=(replace(rank.proc.operations[0], target=3 * GB),))
    model = look(Model(), 2.0, rank)
    assert (model.main.target, model.main.target_name) == (3 * GB, "high")
    model = look(Model(targets.parse("2.7GB/s", "option")), 2.0, rank)
    assert (model.main.target, model.main.target_name) == (2.7 * GB, "custom")
    model.set_target(targets.tier("light", "key"))
    assert model.main.target == 0.75 * GB


TARGETS = [
    line.split(" -> ")
    for line in (Path(__file__).parents[1] / "data" / "targets.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize(("word", "meant"), TARGETS, ids=[word for word, _ in TARGETS])
def test_targets_are_parsed_as_the_core_does(word, meant):
    if meant == "refused":
        with pytest.raises(ValueError, match=r"give light, medium, high"):
            targets.parse(word, "option")
    else:
        target = targets.parse(word, "option")
        assert f"{int(target.save)} {int(target.load)}" == meant


def test_a_target_has_the_name_of_its_tier():
    assert [targets.parse(word, "option").name for word in ("HIGH", "save=3GB/s,load=4GB/s", "2.7GB/s")] == [
        "high",
        "high",
        "custom",
    ]


@pytest.mark.parametrize("word", ["", "write=3", "save=3;load=4", "1e999"])
def test_a_wrong_target_says_what_is_allowed(word):
    with pytest.raises(ValueError, match=r"give light, medium, high"):
        targets.parse(word, "option")


def test_a_rank_that_begins_first_does_not_stand_for_those_to_come():
    model = look(Model(targets.tier("high", "option")), 2.0, Rank(0).op(GB), Rank(1))
    assert (model.main.gpus, model.main.target, model.rows[0].target) == (2, 6 * GB, 3 * GB)


def test_the_target_is_times_the_gpus_that_live_or_those_that_are_named():
    ranks = [Rank(rank).op(GB) for rank in range(4)]
    model = look(Model(targets.tier("high", "option")), 2.0, *ranks)
    assert (model.main.gpus, model.main.target, model.rows[0].target) == (4, 12 * GB, 3 * GB)
    model = look(Model(targets.tier("high", "option"), gpus=8), 2.0, *ranks)
    assert (model.main.gpus, model.main.target, model.rows[0].target) == (8, 24 * GB, 6 * GB)
    for rank in ranks[1:]:
        rank.proc = replace(rank.proc, header=replace(rank.proc.header, gpu=-1))
    assert look(Model(targets.tier("high", "option")), 2.0, *ranks).main.gpus == 1
    ranks[0].proc = replace(ranks[0].proc, header=replace(ranks[0].proc.header, gpu=-1))
    assert look(Model(targets.tier("high", "option")), 2.0, *ranks).main.gpus == 4


def test_ranks_that_save_the_same_checkpoint_are_one_operation_and_another_one_is_not():
    model = Model()
    ranks = [Rank(rank).op(GB) for rank in range(3)]
    ranks[2].proc = replace(ranks[2].proc, operations=(replace(ranks[2].proc.operations[0], label="step-2", step=2),))
    look(model, 2.0, *ranks)
    assert sorted((op.label, op.ranks) for op in model.ops) == [("step-1", 2), ("step-2", 1)]


def test_the_average_of_the_node_runs_from_the_first_start_to_the_last_end():
    model = Model()
    first, last = Rank(0).op(0, start=0.0), Rank(1).op(0, start=1.0)
    look(model, 1.5, first, last)
    first.op(10 * GB, Phase.DONE, start=0.0, end=5.0)
    last.op(10 * GB, Phase.DONE, start=1.0, end=11.0)
    look(model, 12.0, first, last)
    assert not model.main.running
    assert model.main.elapsed_s == pytest.approx(11.0)
    assert model.main.average == pytest.approx(20 * GB / 11)
    assert model.events[-1].text.startswith("save step-1 done: 20.0 GB in 11.0 s")


def test_the_node_waits_for_the_rank_with_the_largest_eta():
    model = Model()
    ranks = [Rank(rank) for rank in range(3)]
    for tick in range(1, 6):
        look(
            model,
            float(tick),
            *(rank.op(tick * speed).beat(tick) for rank, speed in zip(ranks, (GB, GB, GB // 2), strict=True)),
        )
    assert model.main.last == "rank 2"
    assert [row.straggler for row in model.rows] == [False, False, True]
    assert model.main.eta_s == max(row.eta_s for row in model.rows)


def test_even_ranks_have_no_straggler():
    model = Model()
    ranks = [Rank(rank) for rank in range(3)]
    for tick in range(1, 6):
        look(model, float(tick), *(rank.op(tick * GB) for rank in ranks))
    assert model.main.last == ""


def test_a_slow_thread_is_marked_and_what_it_waits_for_is_named():
    model, rank = Model(), Rank(threads=4)
    for tick in range(1, 5):
        rank.op(tick * GB)
        for index in range(4):
            speed = 50_000_000 if index == 3 else 300_000_000
            rank.thread(index, bytes_op=tick * speed, requests=tick * 60, state=2)
            rank.thread(
                index,
                busy_ns=int(tick * (0.4e9 if index == 1 else 0.9e9)),
                source_wait_ns=int(tick * 0.42e9) if index == 1 else 0,
                limit_wait_ms=0,
            )
        rank.thread(2, limit_wait_ms=tick * 800)
        look(model, float(tick), rank)
    threads = model.rows[0].threads
    assert [thread.slow for thread in threads] == [False, False, False, True]
    assert [thread.wait for thread in threads] == ["disk 90%", "source 42%", "limit 80%", "disk 90%"]


def test_a_heartbeat_that_stands_still_is_a_stall_and_one_that_goes_on_ends_it():
    model, rank = Model(), Rank()
    look(model, 1.0, rank.op(GB).beat(1))
    look(model, 2.9, rank.op(2 * GB))
    assert model.rows[0].state == "WRITE"
    look(model, 3.1, rank.op(3 * GB))
    assert (model.rows[0].state, model.rows[0].alive) == ("STALL", True)
    look(model, 3.6, rank.op(3 * GB).beat(2))
    assert model.rows[0].state == "WRITE"
    assert [event.text for event in model.events] == [
        "save step-1 started",
        "rank 0 stalled: no progress for 2 s",
        "rank 0 goes on",
    ]


def test_no_bytes_in_three_seconds_are_a_stall_but_not_under_a_limit_and_not_in_fsync():
    for state, phase, expected in ((2, Phase.WRITE, "STALL"), (5, Phase.WRITE, "WRITE"), (3, Phase.FSYNC, "FSYNC")):
        model, rank = Model(), Rank()
        for tick in range(8):
            rank.op(GB, phase).beat(tick).thread(0, state=state, last_progress_mono_ns=0)
            look(model, 1 + tick / 2, rank)
        assert model.rows[0].state == expected


def test_death_in_an_operation_is_told_and_judged():
    model, rank = Model(), Rank()
    look(model, 1.0, rank.op(GB))
    look(model, 2.0, rank.op(5 * GB))
    rank.proc = replace(rank.proc, alive=False, touched=1e9)
    look(model, 3.0, rank)
    assert (model.rows[0].state, model.rows[0].verdict, model.main.phase) == ("DEAD", Verdict.FAILED, "died")
    assert model.events[-1].text == f"rank 0 pid {rank.proc.header.pid} died in save at 50%"
    assert model.node.alive == 0
    look(model, 700.0, rank)
    assert len(model.rows) == 1, "a rank stays if the monitor saw it die"
    assert look(Model(), 700.0, rank).rows == [], "long dead when first seen"


def test_a_failure_is_told_with_its_errno():
    model, rank = Model(), Rank()
    look(model, 1.0, rank.op(GB))
    look(model, 2.0, rank.op(GB, Phase.FAILED, end=1.5, error=28))
    assert (model.rows[0].state, model.rows[0].error, model.main.phase) == ("FAILED", "ENOSPC", "failed")
    assert model.events[-1].text == "rank 0 save failed: ENOSPC"


def test_two_operations_of_one_process_are_two_rows():
    model, rank = Model(), Rank()
    rank.op(GB, slot=0).op(2 * GB, Phase.READ, slot=1, kind=2)
    look(model, 1.0, rank)
    look(model, 2.0, rank.op(2 * GB, slot=0))
    assert [(row.kind, row.done) for row in model.rows] == [("save", 2 * GB), ("load", 2 * GB)]
    assert [op.kind for op in model.ops] == ["save", "load"]


def test_after_its_end_a_rank_shows_the_average_and_later_idles():
    model, rank = Model(), Rank()
    look(model, 1.0, rank.op(GB))
    look(model, 6.0, rank.op(10 * GB, Phase.DONE, end=5.0))
    row = model.rows[0]
    assert (row.state, row.rate, row.average, row.progress) == ("DONE", None, 2 * GB, 1.0)
    assert look(model, 16.0, rank).rows[0].state == "IDLE"
    assert not model.node.active


def test_another_clock_is_not_compared_with_ours():
    model, rank = Model(), Rank()
    rank.op(4 * GB, start=1000.0)
    rank.thread(0, last_progress_mono_ns=int(1004e9))
    rank.proc = replace(rank.proc, same_clock=False)
    look(model, 5.0, rank)
    assert model.rows[0].elapsed_s == pytest.approx(4.0)
    assert look(model, 6.0, rank).rows[0].elapsed_s == pytest.approx(5.0)


def test_history_joins_the_ranks_of_a_checkpoint():
    _, session = demo(0.0)
    session.tick()
    past = session.model.past
    assert [c.label for c in past.checkpoints][-1] == "step-11600"
    assert all(len(c.members) == 8 and c.bytes == 8 * demonstration.BYTES for c in past.checkpoints)
    count = len(past.checkpoints)
    session.tick()
    assert len(past.checkpoints) == count, "each record is taken in once"


def test_columns_stand_for_equal_times_however_often_one_looks():
    model, rank = Model(), Rank()
    for now in (0.0, 0.5, 0.6, 0.7, 1.0, 3.0):
        look(model, now, rank.op(int(now * GB)))
    assert len(model._series.written) == 1 + 1 + 1 + 4


def test_what_the_demonstration_does_is_seen_in_order():
    clock, session = demo(0.0)
    phases, done = [], 0
    for tick in range(110):
        clock.now = 100.0 + tick / 2
        session.tick()
        main = session.model.main
        if main.kind == "save":
            assert main.done >= done
            done = main.done
        if not phases or phases[-1] != (main.kind, main.phase):
            phases.append((main.kind, main.phase))
    save = [("save", phase) for phase in ("plan", "write", "fsync", "commit", "done")]
    assert [phase for phase in phases if phase != ("save", "commit")] == [
        *save[:3],
        save[4],
        ("load", "plan"),
        ("load", "read"),
        ("load", "done"),
    ]
    assert done == 8 * demonstration.BYTES
    texts = [event.text for event in session.model.events]
    assert texts[:2] == ["save step-11800 started", "rank 6 runs threads, not io_uring (EPERM: seccomp or sysctl?)"]


def test_percentiles_come_from_the_histogram():
    assert percentile((0,) * 16, 0.5, 0.0) is None
    assert percentile((100,) + (0,) * 15, 0.5, 0.0) == pytest.approx(32e-6)
    assert percentile((0,) * 15 + (7,), 0.99, 0.0) == pytest.approx(64e-6 * 2**14)
    slow = [percentile((0,) * 15 + (100,), share, 9.0) for share in (0.5, 0.99)]
    assert slow == [pytest.approx(1.05 + share * 7.95, rel=0.01) for share in (0.5, 0.99)], "not the bucket's bound"
    assert percentile((0,) * 10 + (100,) + (0,) * 5, 0.99, 0.04) == 0.04, "no more than was measured"


def test_many_ended_operations_of_dead_processes_are_forgotten_but_not_those_of_the_living():
    model, alive = Model(), Rank(0).op(10 * GB, Phase.DONE, end=5.0)
    look(model, 6.0, alive)
    for number in range(40):
        dead = Rank(1).op(10 * GB, Phase.DONE, start=10.0 + number, end=10.5 + number)
        dead.proc = replace(dead.proc, key=f"dead{number}", alive=False)
        look(model, 60.0 + number, alive, dead)
    assert [row.rank for row in model.rows] == [0]
    assert len(model._groups) <= 18


def test_text_pieces():
    assert text.bar(0.5, 10, text.UNICODE.bar) == "█████     "
    assert text.bar(0.001, 4, text.UNICODE.bar) == "▏   "
    assert text.bar(9, 4, text.ASCII.bar) == "####"
    assert text.bar(math.nan, 4, text.UNICODE.bar) == "    "
    assert text.spark([0, 1, 2, 3], 6, 2.0) == "   ▄▇▇", "lower than the line"
    assert text.fit("abcdef", 4) == "abc…"
    assert text.fit_front("/a/b/c", 4) == "…b/c"
    assert text.width(text.fit("日本語", 4)) == 4
    assert [text.clock(s) for s in (None, 7, 3600, 86400 * 9)] == ["--:--", "00:07", "1:00:00", "9d"]
    assert [text.rate(r) for r in (None, 0, 5e7, 2.5e9, 1.5e11, 2e12)] == [
        "-",
        "0.00",
        "0.050",
        "2.50",
        "150.0",
        "2000",
    ]
    assert text.block(16 << 20) == "16 MiB"
    assert text.clean("a\x1bb\u202ec") == "a\ufffdb\ufffdc"


def test_a_rank_that_waits_for_another_is_neither_slow_nor_stalled():
    model = Model()
    ranks = [joined(Rank(index).op(0), 2 - index) for index in range(3)]
    look(model, 0.0, *ranks)
    for now in range(1, 12):
        for rank in ranks[:2]:
            joined(rank.op(10 * GB, phase=Phase.COMMIT), 2 - ranks.index(rank), waits_for=0)
        joined(ranks[2].op(now * GB // 10), 0).beat(now)
        look(model, float(now), *ranks)
    assert [(row.rank, row.state, row.wait) for row in model.rows][1:] == [(1, "WAIT", "rank 0"), (2, "WAIT", "rank 0")]
    assert model.main.ranks == 3
    assert [row.stalled_s for row in model.rows] == [None] * 3
    assert [row.straggler for row in model.rows] == [True, False, False]
    assert model.main.last == "rank 0"


def test_a_rank_waits_also_before_its_operation_begins():
    model, rank = Model(), joined(Rank(), 2, waits_for=1)
    look(model, 0.0, rank)
    (row,) = model.rows
    assert (row.rank, row.state, row.wait) == (2, "WAIT", "rank 1")
    rank.proc = replace(rank.proc, alive=False)
    assert look(model, 1.0, rank).rows[:1] == [] or model.rows[0].state != "WAIT"


def test_a_rank_waits_in_the_end_for_the_one_that_waits_for_nobody():
    model = Model()
    ranks = [joined(Rank(index), index, waits_for=waits) for index, waits in enumerate((3, 0, 0, None))]
    look(model, 0.0, *ranks)
    assert [row.wait for row in model.rows] == ["rank 3", "rank 3", "rank 3", ""]
    joined(ranks[3], 3, waits_for=0)
    assert all(row.wait for row in look(model, 1.0, *ranks).rows), "a circle of waits may be momentary"


def test_groups_that_save_alike_at_once_are_two_operations():
    model = Model()
    ranks = [joined(Rank(index).op(0), index % 2, group=1 + index // 2) for index in range(4)]
    look(model, 0.0, *ranks)
    assert [op.ranks for op in model.ops] == [2, 2]


# A late attach, deaths and restarts must not change the figures.


def test_an_operation_that_ended_does_not_join_the_running_one_of_the_same_name():
    ranks = [Rank(index).of(gpu=index) for index in range(2)]
    for rank in ranks:
        rank.op(10 * GB, Phase.DONE, start=10.0, end=20.0, slot=0)
        rank.op(GB, start=22.0, slot=1)
        rank.named("last")
    old = Rank(3).op(10 * GB, Phase.DONE, start=0.0, end=4.0).named("last")
    model = look(Model(), 24.0, *ranks, old)
    (running,) = [op for op in model.ops if op.running]
    assert (running.ranks, running.done, running.elapsed_s) == (2, 2 * GB, pytest.approx(2.0))
    ended = next(op for op in model.ops if not op.running)
    assert (ended.ranks, ended.done, ended.elapsed_s) == (2, 20 * GB, pytest.approx(10.0))


def test_a_job_that_starts_again_after_a_crash_is_another_operation_of_the_same_name():
    old = Rank(0).op(GB, start=0.0).of(pid=7, key="old")
    old.thread(0, last_progress_mono_ns=int(4e9)).proc = replace(old.proc, alive=False, touched=1e9)
    new = Rank(0).op(2 * GB, start=5.0).of(pid=8, key="new")
    model = look(Model(), 7.0, old, new)
    (running,) = [op for op in model.ops if op.running]
    assert (running.ranks, running.done, running.failed) == (1, 2 * GB, 0)


def test_a_dead_rank_of_the_run_before_is_not_among_the_living():
    old, new = Rank(2).op(GB).of(pid=7, key="old"), Rank(2).of(pid=8, key="new")
    look(model := Model(), 1.0, old)
    old.proc = replace(old.proc, alive=False, touched=1e9)
    look(model, 2.0, old)
    assert [row.state for row in model.rows] == ["DEAD"]
    look(model, 3.0, old, new)
    assert [(row.state, row.pid) for row in model.rows] == [("IDLE", 8)]
    assert (model.node.alive, model.node.ranks) == (1, 1)


def waits(rank, now, *, begun, limit_ms=0, seconds=0.0, done=0, ever=0):
    """Make a rank's first thread have waited: its counters are the process's, its bytes the operation's."""
    rank.op(done, start=begun, slot=1 if begun else 0)
    rank.proc = replace(rank.proc, threads=((0, rank.proc.threads[-1][1]),))
    return rank.thread(
        0, bytes_op=done, bytes_ever=ever + done, requests=(ever + done) // (4 << 20), limit_wait_ms=limit_ms,
        busy_ns=int(seconds * 1e9), source_wait_ns=0, state=2, latency_sum_ns=int(now * 1e9),
    )  # fmt: skip


def test_the_first_second_of_an_operation_does_not_show_what_the_one_before_waited_for():
    model, rank = Model(), Rank(threads=1)
    look(model, 9.0, waits(rank, 9.0, begun=0.0, limit_ms=9000, seconds=9.0, done=GB))
    look(model, 9.5, waits(rank, 9.5, begun=9.4, limit_ms=9000, seconds=9.1, done=GB, ever=GB))
    (thread,) = model.rows[-1].threads
    assert (thread.waits["limit"], thread.waits["disk"]) == (0.0, pytest.approx(1.0))


def test_an_operation_that_nobody_saw_begin_shows_its_waits_from_the_second_look_on():
    model, rank = Model(), Rank(threads=1)
    look(model, 9.5, waits(rank, 9.5, begun=9.4, limit_ms=9000, seconds=9.1, done=GB, ever=GB))
    assert [thread.waits for thread in model.rows[-1].threads] == [{}]
    assert model.rows[-1].rate > GB
    look(model, 10.5, waits(rank, 10.5, begun=9.4, limit_ms=9800, seconds=9.2, done=2 * GB, ever=GB))
    look(model, 11.5, waits(rank, 11.5, begun=9.4, limit_ms=10600, seconds=9.3, done=3 * GB, ever=GB))
    assert model.rows[-1].threads[0].wait == "limit 80%"


def test_a_save_is_history_when_its_last_rank_has_ended():
    model, ranks = Model(), [Rank(0).op(0), Rank(1).op(0)]
    look(model, 1.0, *ranks)
    ranks[0].op(10 * GB, Phase.DONE, end=2.0).record(0.0, 2.0)
    look(model, 2.5, *ranks)
    assert model.past.checkpoints == []
    ranks[1].op(10 * GB, Phase.DONE, end=8.0).record(0.0, 8.0)
    (past,) = look(model, 8.5, *ranks).past.checkpoints
    assert (past.seconds, past.bytes, past.error) == (pytest.approx(8.0), 2 * GB, "")


def test_a_save_with_a_killed_rank_is_no_success_in_the_history_and_has_no_end_in_sight():
    model, ranks = Model(), [joined(Rank(index), index, size=2).op(0) for index in range(2)]
    for now in (1.0, 2.0, 3.0):
        look(model, now, *(rank.op(int(now * GB)).beat(int(now)) for rank in ranks))
    assert model.main.eta_s is not None
    ranks[1].proc = replace(ranks[1].proc, alive=False)
    look(model, 3.5, *ranks)
    assert (model.main.eta_s, model.main.failed) == (None, 1)
    assert model.events[-1].text.endswith("died in save at 30%: this checkpoint cannot be completed")
    ranks[0].op(10 * GB, Phase.FAILED, end=4.0).record(0.0, 4.0, result=2)
    (past,) = look(model, 4.5, *ranks).past.checkpoints
    assert past.error


@pytest.mark.parametrize("recorded", [True, False])
def test_the_history_names_the_rank_that_died(recorded):
    model, ranks = Model(), [Rank(0).op(GB), Rank(1).op(GB)]
    look(model, 1.0, *ranks)
    if recorded:
        ranks[0].op(10 * GB, Phase.DONE, end=2.0).record(0.0, 2.0)
    else:
        ranks[0].proc = replace(ranks[0].proc, alive=False)
    ranks[1].proc = replace(ranks[1].proc, alive=False)
    look(model, 3.0, *ranks)
    (past,) = look(model, 3.5, *ranks).past.checkpoints
    assert past.error == ("rank 1 died" if recorded else "rank 0, rank 1 died")


def test_a_save_between_two_looks_is_told_and_so_is_its_failure():
    model, rank = Model(), Rank()
    look(model, 1.0, rank.op(10 * GB, Phase.DONE, start=0.0, end=0.5))
    assert not model.events, "the save had ended before the first look"
    look(model, 3.0, rank.op(10 * GB, Phase.DONE, start=1.2, end=2.2, slot=1))
    assert [event.text.partition(":")[0] for event in model.events] == ["save step-1 done"]
    look(model, 5.0, rank.op(0, Phase.FAILED, start=3.2, end=3.3, slot=2, error=28))
    assert model.events[-1].text == "rank 0 save failed: ENOSPC"
    assert (model.rows[-1].state, model.rows[-1].verdict.value) == ("FAILED", "failed")


def test_the_target_counts_the_gpus_of_the_same_job():
    ranks = [Rank(index).of(job="a", gpu=index) for index in range(2)]
    other = Rank(3).of(job="a", launch=9, gpu=3)
    model = look(Model(targets.tier("high", "option")), 2.0, *(rank.op(GB) for rank in ranks), other)
    assert (model.main.gpus, model.main.target) == (2, 6 * GB)
    other.proc = replace(other.proc, alive=False)
    assert look(model, 2.5, *ranks).main.target == 6 * GB


def test_the_title_names_no_dead_job_and_another_jobs_target_is_not_taken():
    asks = Rank(0).of(job="gone").op(10 * GB, Phase.DONE, end=1.0)
    asks.proc = replace(asks.proc, alive=False, process=replace(asks.proc.process, target_save=int(0.08 * GB)))
    model = look(Model(), 2.0, asks)
    assert (model.node.job, model.node.target.source) == ("", "default")
    assert model.main.target == pytest.approx(0.08 * GB), "its own"
    new = Rank(1).of(job="new").op(GB)
    model = look(Model(), 3.0, asks, new)
    assert (model.main.label, model.main.target) == ("step-1", 0.75 * GB)


def test_percentiles_are_not_above_the_maximum_nor_the_peak_below_the_average():
    model, rank = Model(), Rank(threads=1)
    histogram = [0] * 16
    histogram[9] = 100  # 16 to 33 ms
    rank.op(5 * GB, start=0.0).thread(
        0, latency_hist=tuple(histogram), latency_max_ns=20_200_000, bytes_ever=5 * GB, bytes_op=5 * GB
    )
    look(model, 2.0, rank)
    assert model.rows[0].p50_s <= model.rows[0].p99_s == pytest.approx(0.0202)
    assert model.main.peak >= model.main.average == pytest.approx(2.5 * GB)


def test_figures_that_differ_look_different():
    assert text.rates(0.1195 * GB, 0.12 * GB) == ("0.119", "0.120")
    assert text.rates(2.5 * GB, 3 * GB) == ("2.50", "3.00")
    assert text.rates(None, 3 * GB) == ("-", "3.00")
    assert text.rates(3 * GB, 3 * GB) == ("3.00", "3.00")


def test_the_rate_falls_at_once_when_everything_stops_and_is_right_soon_after():
    window = Window()
    for tick in range(11):  # 7 blocks of 4 MB a second
        window.add(Sample(tick / 2, tick * 14_000_000, tick * 7 // 2))
    assert window.rate() == pytest.approx(28e6, rel=0.2)
    for tick in range(11, 14):  # stopped
        window.add(Sample(tick / 2, 10 * 14_000_000, 35))
    assert window.rate() == 0.0
    for tick in range(14, 17):
        window.add(Sample(tick / 2, (tick - 3) * 14_000_000, (tick - 3) * 7 // 2))
    assert window.rate() == pytest.approx(28e6, rel=0.35)


def test_columns_go_on_after_the_end_so_that_all_rows_show_the_same_time():
    model, rank = Model(), Rank()
    for now in (0.0, 0.5, 1.0):
        look(model, now, rank.op(int(now * GB)))
    for now in (1.5, 2.0):
        look(model, now, rank.op(10 * GB, Phase.DONE, end=1.2))
    assert len(model.rows[0].spark) == len(model._series.written)
    assert model.rows[0].spark[-2:] == (0.0, 0.0)


def test_the_history_is_judged_by_the_target_of_its_time():
    model, rank = Model(targets.tier("high", "option")), Rank().op(GB)
    look(model, 1.0, rank)
    rank.op(10 * GB, Phase.DONE, end=2.0).record(0.0, 2.0)
    look(model, 3.0, rank)
    model.set_target(targets.tier("light", "key"))
    look(model, 3.5, rank)
    assert model.past.checkpoints[0].target == 3 * GB


def test_two_jobs_of_one_name_that_save_the_same_step_are_two_operations():
    ranks = [Rank(index).of(launch=1 + index // 2, rank=index % 2).op((1 + index // 2) * GB) for index in range(4)]
    model = look(Model(), 2.0, *ranks)
    assert sorted((op.ranks, op.done) for op in model.ops) == [(2, 2 * GB), (2, 4 * GB)]


def test_a_dead_rank_is_not_hidden_by_another_job_of_the_same_name():
    dead, other = Rank(0).of(launch=1, key="a").op(GB), Rank(0).of(launch=2, key="b").op(GB)
    mate = Rank(1).of(launch=1, key="c").op(GB)
    look(model := Model(), 1.0, dead, other, mate)
    dead.proc = replace(dead.proc, alive=False)
    look(model, 2.0, dead, other, mate)
    assert sorted(row.alive for row in model.rows) == [False, True, True]
    mate.proc = replace(mate.proc, alive=False)
    look(model, 3.0, dead, other, mate)
    assert [row.alive for row in model.rows if row.rank == 0] == [True], "the whole job had ended, and it runs again"


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        (1 | 1_000_001 << 32, "warn", "nothing of the model and 100 % of the optimizer changed"),
        (250_001 | 1 << 32, "warn", "25 % of the model and nothing of the optimizer changed"),
        (250_001, "info", "25 % of the model changed"),
        (2, "info", "0.0001 % of the model changed"),
    ],
)
def test_what_has_changed_with_a_save_is_an_event_and_standing_still_is_the_sentence(changed, level, words):
    rank = Rank().op(10 * GB, start=1.0)
    model = look(Model(), 2.0, rank)
    rank.op(10 * GB, Phase.DONE, start=1.0, end=4.0)
    look(model, 4.0, rank)

    def told():
        return [(event.level, event.text) for event in model.events if "changed" in event.text]

    # The figures belong to another step.
    process = replace(rank.proc.process, changed=changed, changed_step=0)
    rank.proc = replace(rank.proc, process=process)
    assert look(model, 4.2, rank).main.changed == ()
    assert told() == []
    rank.proc = replace(rank.proc, process=replace(process, changed_step=1))
    for at in (4.5, 5.0):
        op = look(model, at, rank).main
    assert told() == [(level, f"save step-1: {words}")]
    still = [group for group, share in op.changed if share == 0]
    said = op.sentence.words[0]
    assert (
        (op.sentence.level, said) == ("warn", f"step-1: no tensor of the {still[0]} has changed since the save before")
        if still
        else "changed" not in said
    )
    (found,) = jsonout.Ticks().next(model)["ops"]
    assert found["changed"] == dict(op.changed)


def test_what_a_process_warns_of_is_an_event_once():
    rank = Rank().op(10 * GB, start=1.0)
    old = replace(rank.proc.process, warned=1, warning="ranks differ in old")
    rank.proc = replace(rank.proc, process=old)
    model = look(Model(), 2.0, rank)

    def told():
        return [(event.level, event.text.partition(": ")[2]) for event in model.events if "differ" in event.text]

    # The warning came before the first look.
    assert told() == []
    rank.proc = replace(rank.proc, process=replace(old, warned=2, warning="ranks differ in w and 3 more"))
    for at in (2.5, 3.0):
        look(model, at, rank)
    # The process is just writing another warning.
    rank.proc = replace(rank.proc, process=replace(old, warned=0, warning="ranks differ in"))
    look(model, 3.5, rank)
    assert told() == [("warn", "ranks differ in w and 3 more")]
