"""Events belong to jobs, and repeated events share a line."""

from __future__ import annotations

from dataclasses import replace

from by_hand import GB, Rank, look
from fastckpt_top.lines import LineWriter
from fastckpt_top.model import Model
from fastckpt_top.views.live import paint
from fastckpt_top.views.state import Ui
from painted import frame


def texts(model):
    return [event.text for event in model.events]


def stutter(model, ranks, times, who):
    """Play ranks of which those in `who` repeatedly stop for three seconds."""
    now, done, beat = 0.5, GB // 100, 0
    look(model, now, *(rank.op(done, total=100 * GB) for rank in ranks))
    for _ in range(times):
        for still in (*[True] * 6, False, False):
            now, beat, done = now + 0.5, beat + 1, done + GB // 100
            for number, rank in enumerate(ranks):
                if not (still and number in who):
                    rank.op(done, total=100 * GB).beat(beat)
            look(model, now, *ranks)
    return model


def test_a_rank_that_stalls_seven_times_is_one_line():
    """Mutant: each stall has a line."""
    model = stutter(Model(), [Rank(0), Rank(1)], 7, {1})
    assert texts(model) == [
        "save step-1 started",
        "rank 1 stalled 7 times: no progress for 2 s",
        "rank 1 goes on",
    ]
    assert model.event_count == 1 + 2 * 7, "an output that printed the first stalls prints the later ones, too"


def test_many_ranks_that_stall_are_two_lines_at_most():
    """Mutant: each rank has its own lines."""
    model = stutter(Model(), [Rank(0).of(rank=number, pid=100 + number) for number in range(64)], 1, range(1, 64))
    assert texts(model)[1:] == ["63 ranks stalled: no progress for 2 s", "63 ranks go on"]


def test_ranks_that_fall_back_or_fail_together_are_one_line():
    ranks = [Rank(0).of(rank=number, pid=100 + number) for number in range(8)]
    for one in ranks:
        one.op(GB)
        one.proc = replace(
            one.proc, operations=(replace(one.proc.operations[0], flags=2 | 128, fallback_errno=1, engine=2),)
        )
    model = look(Model(), 1.0, *ranks)
    assert texts(model)[1:] == ["8 ranks run threads, not io_uring (EPERM: seccomp or sysctl?)"]
    for one in ranks:
        one.proc = replace(one.proc, alive=False, touched=1e9)
    assert texts(look(model, 2.0, *ranks))[2:] == ["8 ranks died in save at 10%"]


def test_events_are_those_of_the_job_that_is_shown_and_a_log_names_it():
    """Mutant: the screen and the log mix the events of all jobs."""
    one, other = (Rank(0).of(job=name, launch=number, pid=number) for number, name in ((1, "one"), (2, "other")))
    model = look(Model(), 1.0, one.op(GB).named("a"), other.op(GB).named("b"))
    assert {(event.text, event.job) for event in model.events} == {
        ("save a started", "one:1"),
        ("save b started", "other:2"),
    }
    painted = frame((), (80, 24), Ui(view="events", job="other:2"))
    painted.model = model
    shown = paint(painted).plain
    assert "save b started" in shown
    assert "save a started" not in shown
    written = []
    writer = LineWriter(type("Out", (), {"write": lambda _, words: written.append(words), "flush": lambda _: None})())
    writer.write(model)
    assert any(line.endswith("- other:2: save b started\n") for line in written)
