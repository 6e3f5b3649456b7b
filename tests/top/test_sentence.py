"""The sentence: which rank holds an operation back and why, in each situation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from by_hand import GB, Rank, joined, look, moving
from fastckpt_top import jsonout, lines, targets, text
from fastckpt_top.model import Model
from fastckpt_top.rows import Verdict
from fastckpt_top.segment import (
    FLAG_DIRECT,
    FLAG_FALLBACK,
    FLAG_NO_DIRECT,
    FLAG_NO_RING,
    FLAG_NO_WORKERS,
    Phase,
    ThreadState,
)

HIGH = targets.tier("high", "option")
FALLBACK = {"engine": 2, "flags": FLAG_FALLBACK | FLAG_DIRECT | FLAG_NO_RING, "fallback_errno": 1}


def watch(model, ranks, each, begin=0.5, end=6.0):
    """Look twice a second, after `each(number, rank, now)` has set the state of each rank."""
    for tick in range(int(begin * 2), int(end * 2) + 1):
        for number, rank in enumerate(ranks):
            each(number, rank, tick / 2)
        look(model, tick / 2, *ranks)
    return model


def said(model):
    """Level and longest form of the sentence about the main operation, and the rank that it names."""
    sentence = model.main.sentence
    if sentence is None:
        return None
    widths = [text.width(words) for words in sentence.words]
    assert widths == sorted(set(widths), reverse=True), sentence.words
    assert widths[-1] <= 36
    row = next((row.rank for row in model.rows if row.key == sentence.row), None)
    return sentence.level, sentence.words[0], row


def changed(rank, **values):
    """Set values of the rank's operations."""
    rank.proc = replace(rank.proc, operations=tuple(replace(op, **values) for op in rank.proc.operations))
    return rank


@pytest.mark.parametrize("attached", [0.5, 20.0])
def test_the_rank_that_the_others_wait_for_and_why_also_when_attached_late(attached):
    def each(number, rank, now):
        moving(rank, now, (3.1, 1.76, 3.0)[number] * GB, share=0.98)
        if number == 1:
            changed(rank, **FALLBACK)

    model = watch(Model(HIGH), [Rank(index) for index in range(3)], each, attached, attached + 4)
    words = "Held back by rank 1: 1.76 of 3.00 GB/s, waits for the disk 98 %; runs threads, not io_uring (EPERM)"
    assert said(model) == ("warn", words, 1)
    assert model.main.sentence.words[-4:] == (
        "rank 1 holds it: 1.76 of 3.00 GB/s, disk 98 %",
        "rank 1: 1.76/3.00, disk 98 %, threads!",
        "rank 1: 1.76/3.00, disk, threads!",
        "held back by rank 1",
    )
    assert "rank 1 holds it: 1.76/3.00 GB/s, disk 98 %; threads, not uring (EPERM)" in model.main.sentence.words
    row = next(row for row in model.rows if row.straggler)
    assert (row.wait, row.wait_kind) == ("disk 98%", "disk")
    assert text.rate(row.rate) in words, "the row's own figure"


@pytest.mark.parametrize(("rate", "level"), [(1.0, "warn"), (3.0, "info")])
def test_a_rank_below_its_target_that_delays_the_end_is_a_warning_though_the_average_is_good(rate, level):
    def each(number, rank, now):
        moving(rank, now, (5.0, 5.0, rate)[number] * GB)

    model = watch(Model(HIGH), [Rank(index) for index in range(3)], each)
    assert model.main.verdict is Verdict.GOOD
    assert said(model)[0] == level
    words = "Held back by rank 2: " if level == "warn" else "on target; rank 2 is the last: "
    assert said(model)[1].startswith(words)
    assert (lines.check(model, 100)[0], "Held back" in lines.check(model, 100)[1]) == (True, level == "warn")


def test_two_alike_stragglers_do_not_take_turns():
    model, ranks = Model(HIGH), [Rank(index) for index in range(4)]

    def each(number, rank, now):
        wave = (0.02 if int(now * 2) % 2 else -0.02) * (1 if number else -1)
        moving(rank, now, (1.0 + wave if number < 2 else 3.0) * GB)

    watch(model, ranks, each, end=3.0)
    first = said(model)[2]
    for now in range(7, 24):
        for number, rank in enumerate(ranks):
            each(number, rank, now / 2)
        assert said(look(model, now / 2, *ranks))[2] == first


def test_what_a_rank_waits_for_is_known_at_the_second_look_of_who_attaches_late():
    model, rank = Model(HIGH), Rank(0)
    for now, wait in ((1.5, ""), (2.0, "disk 97%")):
        moving(rank, now, GB)
        for index, (_, thread) in enumerate(rank.proc.threads):  # earlier operations used the slots
            rank.thread(index, bytes_ever=thread.bytes_ever + GB, busy_ns=thread.busy_ns + 10**12)
        assert look(model, now, rank).rows[0].wait == wait


def test_nothing_is_said_in_the_first_second():
    def each(number, rank, now):
        return rank.op(0, Phase.STAGE) if number else moving(rank, now, GB)

    assert said(watch(Model(HIGH), [Rank(0)], lambda _, rank, now: each(0, rank, now), end=0.5)) is None
    assert said(watch(Model(HIGH), [Rank(0)], lambda _, rank, now: each(1, rank, now), end=0.5)) is None


def test_a_killed_rank_is_said_while_the_others_go_on_and_after_the_end():
    model, ranks = Model(HIGH), [joined(Rank(index), index) for index in range(3)]
    watch(model, ranks, lambda _, rank, now: moving(rank, now, GB), end=3.0)
    ranks[2].proc = replace(ranks[2].proc, alive=False)
    look(model, 4.0, *(moving(rank, 4.0, GB) for rank in ranks[:2]), ranks[2])
    assert said(model) == ("bad", "rank 2 died: this checkpoint cannot be completed", 2)
    for rank in ranks[:2]:
        rank.op(4 * GB, Phase.FAILED, end=4.5, total=100 * GB)
    look(model, 5.0, *ranks)
    assert said(model) == ("bad", "rank 2 died: this checkpoint was not completed", 2)
    assert model.jobs[0].sentence == model.main.sentence
    assert max(model.rows, key=lambda row: row.worst).rank == 2


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("T", "rank 1 stopped (SIGSTOP) for 4 s"),
        ("t", "rank 1 stopped (debugger) for 4 s"),
        ("D", "rank 1: the storage has not answered for 4 s"),
        ("S", "rank 1 has made no progress for 4 s"),
        ("", "rank 1 has made no progress for 4 s"),
    ],
)
def test_a_stalled_rank_and_what_its_state_says(state, words):
    model, ranks = Model(HIGH), [Rank(index) for index in range(2)]
    watch(model, ranks, lambda _, rank, now: moving(rank, now, GB), end=3.0)
    ranks[1].proc = replace(ranks[1].proc, state=state)
    for tick in range(7, 15):
        look(model, tick / 2, moving(ranks[0], tick / 2, GB), ranks[1])
    assert said(model) == ("bad", words, 1)
    stalled = max(model.rows, key=lambda row: row.worst)
    assert (stalled.rank, stalled.state, text.ago(stalled.stalled_s)) == (1, "STALL", "4s")


@pytest.mark.parametrize(
    ("workers", "letter", "beats", "flags", "words"),
    [
        (ThreadState.IO, "S", True, 0, "rank 0: the storage has not answered for 4 s"),
        (ThreadState.IO, "S", False, 0, "rank 0 has made no progress for 4 s"),  # like a frozen process
        (ThreadState.IO, "S", False, FLAG_NO_WORKERS, "rank 0: the storage has not answered for 4 s"),
        (ThreadState.SOURCE, "D", True, 0, "rank 0 has made no progress for 4 s: waits for memory (mmap, page faults)"),
        (ThreadState.SOURCE, "S", True, 0, "rank 0 has made no progress for 4 s: waits for the source"),
        (ThreadState.FSYNC, "D", False, 0, "rank 0 has made no progress for 4 s: waits for fsync"),
    ],
)
def test_a_stalled_rank_waits_for_what_its_workers_last_began(workers, letter, beats, flags, words):
    """Mutants: only the state letter decides; a request in flight blames the storage even if the process is stopped."""
    model, rank = Model(HIGH), Rank(0)
    watch(model, [rank], lambda _, rank, now: moving(rank, now, GB), end=3.0)
    (op,) = rank.proc.operations
    rank.proc = replace(rank.proc, state=letter, operations=(replace(op, flags=flags),))
    for index in range(rank.count):
        rank.thread(index, state=workers, in_flight=int(workers == ThreadState.IO))
    for tick in range(7, 15):
        look(model, tick / 2, rank.beat(1000 + tick) if beats else rank)
    assert said(model) == ("bad", words, 0)


@pytest.mark.parametrize("phase", [Phase.PLAN, Phase.FSYNC])
def test_a_call_to_the_storage_that_hangs_is_said_until_it_ends(phase):
    model, ranks = Model(HIGH), [Rank(index).op(10 * GB, phase, start=0.5) for index in range(2)]
    for tick, warning in enumerate(("", "ranks differ in w", "has hung since 12:34:56Z in sync: model.safetensors")):
        process = replace(ranks[1].proc.process, warned=tick, warning=warning)
        ranks[1].proc = replace(ranks[1].proc, process=process)
        look(model, 1.0 + tick / 2, *(rank.beat(tick) for rank in ranks))
        assert ("has hung" in str(said(model))) == ("has hung" in warning)
    assert said(model) == ("bad", f"rank 1 {warning}", 1)
    row = max(model.rows, key=lambda row: row.worst)
    assert (row.rank, row.state, row.wait_kind, row.hangs) == (1, "STALL", "disk", warning)
    ranks[1].proc = replace(ranks[1].proc, process=replace(process, warned=3, warning="the storage answers again"))
    look(model, 2.5, *(rank.beat(9) for rank in ranks))
    assert "has hung" not in str(said(model))


def test_of_several_that_stalled_the_longest_time_is_said():
    model, ranks = Model(HIGH), [Rank(index) for index in range(3)]
    for tick in range(1, 15):
        for rank, until in zip(ranks, (7.0, 4.0, 2.0), strict=True):
            if tick / 2 <= until:
                moving(rank, tick / 2, GB)
        look(model, tick / 2, *ranks)
    assert said(model) == ("bad", "rank 1, rank 2 have made no progress for 5 s", 2)


def test_a_failure_between_two_looks():
    model, rank = Model(HIGH), Rank(0)
    look(model, 1.0, rank)
    rank.op(0, Phase.FAILED, start=1.2, end=1.3, error=28).named("step-300", 300)
    look(model, 2.0, rank)
    assert said(model) == ("bad", "ENOSPC in step-300: nothing was replaced", 0)


def test_a_load_that_failed_touches_no_checkpoint():
    model, ranks = Model(HIGH), [Rank(0), Rank(1)]
    ranks[0].op(GB, Phase.DONE, end=1.0, kind=2)
    ranks[1].op(0, Phase.FAILED, end=1.0, kind=2, error=5)
    look(model, 2.0, *ranks)
    assert said(model) == ("bad", "rank 1: EIO in step-1, load failed", 1)


def test_a_limit_of_the_callers_own_is_named_and_no_rank_is_blamed():
    rates = (0.05, 0.052, 0.04)
    model = watch(
        Model(HIGH), [Rank(index) for index in range(3)],
        lambda number, rank, now: moving(rank, now, rates[number] * GB, "limit"), end=12.0,
    )  # fmt: skip
    assert said(model) == ("warn", "held at 0.14 of 9.00 GB/s by bandwidth_limit", None)
    assert [row.wait_kind for row in model.rows] == ["limit"] * 3


def test_a_fallback_is_said_where_all_is_on_target():
    def each(number, rank, now):
        moving(rank, now, 3.1 * GB)
        if number == 1:
            changed(rank, **FALLBACK)

    model = watch(Model(HIGH), [Rank(0), Rank(1)], each)
    assert said(model) == ("info", "rank 1 runs threads, not io_uring (EPERM)", 1)
    model = watch(Model(HIGH), [Rank(0), Rank(1)], lambda _, rank, now: moving(rank, now, 3.1 * GB))
    assert said(model) == ("info", "on target: average 6.20 of 6.00 GB/s", None)


def test_ranks_that_fell_back_for_the_same_reason_are_named_together():
    def each(number, rank, now):
        moving(rank, now, 3.1 * GB)
        changed(rank, **(FALLBACK | {"fallback_errno": (1, 12, 1)[number]}))

    model = watch(Model(HIGH), [Rank(index) for index in range(3)], each)
    assert said(model) == ("info", "rank 0, rank 2 run threads, not io_uring (EPERM)", 0)


@pytest.mark.parametrize(
    ("engine", "refused", "number", "words", "hint"),
    [
        (1, FLAG_NO_DIRECT, 22, "uring without direct I/O (EINVAL", "not on this file system?"),
        (2, FLAG_NO_DIRECT, 22, "threads without direct I/O (EINVAL", "not on this file system?"),
        (3, FLAG_NO_RING, 38, "buffered, not io_uring (ENOSYS", "not in this kernel?"),
        (2, FLAG_NO_RING | FLAG_NO_DIRECT, 1, "threads without io_uring and direct I/O (EPERM", "seccomp or sysctl?"),
        (2, FLAG_NO_WORKERS, 11, "threads without worker threads (EAGAIN", "ulimit -u?"),
        (2, 0, 0, "threads without what was asked for (unknown", ""),
    ],
)
def test_a_fallback_says_what_was_refused(engine, refused, number, words, hint):
    def each(_, rank, now):
        changed(moving(rank, now, 3.1 * GB), engine=engine, flags=FLAG_FALLBACK | refused, fallback_errno=number)

    model = watch(Model(HIGH), [Rank(0)], each)
    assert said(model)[1] == f"rank 0 runs {words})"
    (event,) = [event.text for event in model.events if event.level == "warn"]
    assert event.startswith(f"rank 0 runs {words}")
    assert event.endswith(f": {hint})" if hint else ")")


def test_a_restart_with_the_same_step_speaks_of_the_new_run():
    old = moving(Rank(0).of(pid=7, key="old"), 4.0, GB)
    old.proc = replace(old.proc, alive=False, touched=1e9)
    new = Rank(0).of(pid=8, key="new")
    model = Model(HIGH)
    for tick in range(12, 18):
        look(model, tick / 2, old, moving(new, tick / 2, 3.3 * GB, start=5.0))
    assert said(model) == ("info", "on target: average 3.30 of 3.00 GB/s", None)
    assert [job.alive for job in model.jobs] == [1]


def test_peers_wait_for_the_rank_that_is_at_work():
    def each(number, rank, now):
        if number:
            joined(rank.op(10 * GB, Phase.COMMIT), number, waits_for=0)
        else:
            joined(moving(rank, now, GB), 0)

    model = watch(Model(HIGH), [Rank(index) for index in range(3)], each)
    words = "Held back by rank 0 (2 ranks wait for it): 1.00 of 3.00 GB/s, waits for the disk 97 %"
    assert said(model) == ("warn", words, 0)
    assert [row.wait_kind for row in model.rows] == ["disk", "peers", "peers"]


def waiting(rank, now, kind, share, state, done=0):
    """Make the rank's threads have waited for fsync, or for bytes of others, for `share` of the time."""
    rank.op(done, kind=2 if kind == "peer" else 1, phase=Phase.READ if kind == "peer" else Phase.WRITE, total=100 * GB)
    for index in range(rank.count):
        rank.thread(
            index, state=state, bytes_ever=done // 2, busy_ns=int(0.1 * now * 1e9), source_wait_ns=0, limit_wait_ms=0,
            requests=int(now * 10), **{f"{kind}_wait_ms": int(share * now * 1e3)},
        )  # fmt: skip
    return rank.beat(int(now * 10))


def test_who_waits_for_bytes_of_others_says_so_and_is_no_straggler():
    def each(number, rank, now):
        if number:
            waiting(rank, now, "peer", 0.8, 6, int(now * GB) // 2)
        else:
            moving(rank, now, GB, kind=2, phase=Phase.READ)

    model = watch(Model(HIGH), [Rank(index) for index in range(3)], each)
    waits = [(row.wait_kind, row.wait) for row in model.rows]
    assert waits == [("disk", "disk 97%"), ("peers", "peers 90%"), ("peers", "peers 90%")], "what ranks wait for"
    assert said(model)[1] == "average 2.00 of 12.00 GB/s: 2 of 3 ranks wait for other ranks 90 %"
    tick = jsonout.Ticks().next(model)
    assert tick["ranks"][1]["threads"][0]["peers_wait"] == pytest.approx(0.9)
    assert tick["ranks"][1]["threads"][0]["fsync_wait"] == 0.0


def test_fsync_between_the_files_of_a_save_is_told_from_the_disk():
    def each(_, rank, now):
        waiting(rank, now, "fsync", 0.75, 2, int(now * GB))

    model = watch(Model(HIGH), [Rank(0)], each)
    (row,) = model.rows
    assert (row.wait, row.threads[0].wait) == ("fsync 75%", "fsync 75%")
    assert said(model)[1] == "average 1.00 of 3.00 GB/s: rank 0 waits for fsync 75 %"

    def one(number, rank, now):
        waiting(rank, now, "fsync", 0.75, 2, int(now * GB)) if number else moving(rank, now, 3 * GB)

    model = watch(Model(HIGH), [Rank(0), Rank(1)], one)
    assert said(model)[1] == "Held back by rank 1: 1.00 of 3.00 GB/s, waits for fsync 75 %"


@pytest.mark.parametrize(("kind", "state", "stalled"), [("fsync", 3, False), ("peer", 6, False), ("fsync", 2, True)])
def test_to_wait_for_fsync_or_others_is_no_stall(kind, state, stalled):
    model = Model(HIGH)
    for tick in range(1, 20):
        look(model, tick / 2, waiting(Rank(0), tick / 2, kind, 0.5, state, GB))
    assert (model.rows[0].stalled_s is not None) == stalled


def test_peers_wait_for_a_rank_of_another_machine():
    model = watch(
        Model(HIGH), [Rank(index) for index in range(2)],
        lambda number, rank, _: joined(rank.op(10 * GB, Phase.COMMIT), number, waits_for=9),
    )  # fmt: skip
    assert said(model)[1] == "rank 0, rank 1 wait for rank 9, which is at no work on this machine"


@pytest.mark.parametrize(
    ("kind", "phase", "hint"),
    [
        (1, Phase.WRITE, "copy, checksum or device"),
        (2, Phase.READ, "checksum or copy"),
        (3, Phase.READ, "checksum or copy"),
    ],
)
def test_a_slow_source_in_save_load_and_verify(kind, phase, hint):
    model = watch(
        Model(HIGH), [Rank(index) for index in range(4)],
        lambda _, rank, now: moving(rank, now, GB, "source", 0.8, kind=kind, phase=phase),
    )  # fmt: skip
    of = "12.00" if kind == 1 else "16.00"
    assert said(model) == ("warn", f"average 4.00 of {of} GB/s: all 4 ranks wait for the source 80 % ({hint})", None)
    assert model.main.sentence.words[-1] == "all: source 80 %"


def test_most_ranks_wait_for_the_disk():
    model = watch(
        Model(HIGH), [Rank(index) for index in range(4)],
        lambda number, rank, now: moving(rank, now, GB, "disk" if number else "source"),
    )  # fmt: skip
    assert said(model)[1] == "average 4.00 of 12.00 GB/s: 3 of 4 ranks wait for the disk 97 %"


def test_the_copy_of_an_asynchronous_save():
    def each(number, rank, now):
        rank.op(0, Phase.STAGE, total=0).beat(int(now * 10))
        changed(rank, bytes_to_stage=(number + 1) * GB, bytes_staged=int((number + 1) * GB * now / 10))

    model = watch(Model(HIGH), [Rank(0)], each, end=4.0)
    words = "rank 0 copies the state into memory, 40 %; training goes on when that is done"
    assert said(model) == ("info", words, None)
    assert model.main.sentence.words[-1] == "copies the state, 40 %"
    (row,) = model.rows
    assert (row.state, row.progress, model.main.progress, model.main.done) == ("STAGE", 0.4, 0.4, 0)
    assert "stage 40%" in lines.table(model)

    # One of two ranks writes already: while the phase is the copy, the percentage is that of the copy.
    ranks = [Rank(0), Rank(1).op(3 * GB, Phase.WRITE)]
    each(0, ranks[0], 4.0)
    model = look(Model(HIGH), 4.0, *ranks)
    assert (model.main.phase, model.main.progress) == ("stage", 0.7)
    look(model, 5.0, ranks[0].op(GB, Phase.WRITE), ranks[1])
    assert (model.main.phase, model.main.progress) == ("write", pytest.approx(0.2))


def test_a_copy_of_unknown_size_has_no_figure():
    model = watch(Model(HIGH), [Rank(0)], lambda _, rank, now: rank.op(0, Phase.STAGE, total=0).beat(int(now * 10)))
    assert said(model)[1] == "rank 0 copies the state into memory; training goes on when that is done"
    assert model.main.progress is None


def test_a_rank_of_which_all_threads_but_one_have_no_work_left():
    def each(number, rank, now):
        moving(rank, now, (3.0, 1.0)[number] * GB, total=20 * GB)
        for index in range(1, 4 * number):
            rank.thread(index, state=0)

    model = watch(Model(HIGH), [Rank(0, 4), Rank(1, 4)], each, end=5.0)
    assert said(model)[1].startswith("Held back by rank 1: ")
    assert "only 1 of 4 threads has work left" in said(model)[1]


def test_fsync_of_one_and_of_all():
    def each(number, rank, now):
        if number < 2 and now > 2:
            rank.op(100 * GB, Phase.DONE, end=2.0, total=100 * GB)
        else:
            moving(rank, now, 50 * GB)
            if now > 2:
                rank.op(100 * GB, Phase.FSYNC, total=100 * GB).beat(int(now * 10))
                changed(rank, t_phase_mono_ns=int(2e9))

    model = watch(Model(HIGH), [Rank(index) for index in range(3)], each)
    assert said(model) == ("info", "only rank 2 is left, in fsync for 4 s", 2)

    def both(_, rank, now):
        moving(rank, now, GB)
        if now > 2:
            changed(rank.op(100 * GB, Phase.FSYNC, total=100 * GB).beat(int(now * 10)), t_phase_mono_ns=int(2e9))

    model = watch(Model(HIGH), [Rank(index) for index in range(3)], both)
    assert said(model)[1] == "all data is written; all 3 ranks are in fsync for 4 s"


def test_the_last_rank_at_work_is_named():
    def each(number, rank, now):
        if number and now > 2:
            rank.op(2 * GB, Phase.DONE, end=2.0, total=2 * GB)
        else:
            moving(rank, now, GB, total=6 * GB + 1)

    model = watch(Model(HIGH), [Rank(0), Rank(1)], each)
    assert said(model) == ("warn", "only rank 0 is left: 1.00 of 3.00 GB/s, waits for the disk 97 %", 0)


def test_without_a_wish_the_default_target_is_called_one():
    model = watch(Model(), [Rank(0)], lambda _, rank, now: moving(rank, now, GB / 2))
    words = "average 0.50 of 0.75 GB/s (light, the default target): rank 0 waits for the disk 97 %"
    assert said(model) == ("warn", words, 0)


def test_without_a_target_nothing_is_below_it():
    only_loads = targets.parse("load=3GB/s", "option")
    model = watch(Model(only_loads), [Rank(0)], lambda _, rank, now: moving(rank, now, GB / 2))
    assert said(model) == ("info", "average 0.50 GB/s: rank 0 waits for the disk 97 %", 0)


def test_the_slowest_rank_is_named_though_nobody_waits_for_it():
    def each(number, rank, now):
        moving(rank, now, (3.0, 3.0, 1.0)[number] * GB, total=(90, 90, 30)[number] * GB)

    model = watch(Model(HIGH), [Rank(index) for index in range(3)], each)
    assert said(model) == ("warn", "slowest is rank 2: 1.00 of 3.00 GB/s, waits for the disk 97 %", 2)


def test_after_the_end_it_says_how_it_went_and_what_held_it_back():
    model, ranks = Model(HIGH), [Rank(index) for index in range(3)]
    watch(
        model, ranks, lambda number, rank, now: moving(rank, now, (2.0, 0.5, 2.0)[number] * GB, total=10 * GB), end=4.0
    )
    for rank in ranks:
        rank.op(10 * GB, Phase.DONE, end=20.0)
    look(model, 21.0, *ranks)
    words = "step-1 stayed below its target: 1.50 of 9.00 GB/s, held back by rank 1"
    assert said(model) == ("warn", words, None)


def test_two_jobs_each_with_its_own_sentence():
    good = [joined(Rank(index).of(job="good", launch=1), index, group=1, size=2) for index in range(2)]
    ill = [joined(Rank(index).of(job="ill", launch=2, pid=90 + index), index, group=2, size=2) for index in range(2)]
    model = Model(HIGH)
    watch(model, good + ill, lambda _, rank, now: moving(rank, now, 3.1 * GB), end=3.0)
    ill[1].proc = replace(ill[1].proc, alive=False)
    for tick in range(7, 12):
        for rank in [*good, ill[0]]:
            moving(rank, tick / 2, 3.1 * GB)
        look(model, tick / 2, *good, *ill)
    assert [(job.name, job.sentence.level) for job in model.jobs] == [("good", "info"), ("ill", "bad")]
    assert lines.check(model, 10)[0] is False
    shown = lines.table(model)
    assert shown.count("\njob ") == 2
    assert "x rank 1 died: this checkpoint cannot be completed\n" in shown
    (one, other) = jsonout.Ticks().next(model)["jobs"]
    assert (one["sentence"]["level"], other["sentence"]["level"]) == ("info", "bad")


def test_the_shortest_words_are_short_whatever_a_process_calls_itself():
    model, rank = Model(HIGH), Rank(0).of(rank=-1, pid=4194304)
    look(model, 1.0, rank)
    rank.op(0, Phase.FAILED, start=1.2, end=1.3, error=4095).named("x" * 63, 300)
    look(model, 2.0, rank)
    words = model.main.sentence.words
    assert text.width(words[-1]) <= 36
    assert list(words) == sorted(words, key=text.width, reverse=True)


def test_a_rank_is_the_worse_the_more_it_holds_the_others_up():
    def each(number, rank, now):
        moving(rank, now, (3.0, 2.0, 1.0, 2.5)[number] * GB)

    model = watch(Model(HIGH), [Rank(index) for index in range(4)], each)
    order = [row.rank for row in sorted(model.rows, key=lambda row: -row.worst)]
    assert order == [2, 1, 3, 0]
