"""The ranks on the screen: their order, their columns at every width, their rows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fastckpt_top import text
from fastckpt_top.rows import Job, Verdict, judge
from fastckpt_top.targets import tier
from fastckpt_top.views import cells, table
from fastckpt_top.views.paint import VERDICT_STYLES, Frame
from fastckpt_top.views.state import PINNED, SORTS, Ui, pin
from hypothesis import given
from hypothesis import strategies as st
from looking import demo
from painted import DASH, TARGET, frame, plain, rank, thread


def saving(glyphs=text.UNICODE, ticks=14):
    """The demonstration in the middle of a save, tick by tick."""
    clock, session = demo(3.0)
    for tick in range(ticks):
        clock.now = 100.0 + tick / 2
        session.tick()
        yield session.model


# --- order and selection ---------------------------------------------------------------------------------------------


def test_the_worst_rank_stands_first_and_is_selected():
    *_, model = saving()
    made = plain(table.block(Frame(model, Ui(), text.UNICODE, 80, 24), 80, 11))
    assert "8 ranks · slowest first" in made[0]
    assert f"1{DASH}8 of 8" in made[0]
    assert made[2].startswith("│ ▼>   6 WRITE")
    assert made[3].startswith("│ ▼    5 WRITE")
    assert "threads! disk 98%" in made[2]


def test_rows_do_not_move_for_noise_and_one_moves_when_it_is_worse():
    noise = random.Random(7)
    level = {number: 10.0 + noise.uniform(0, PINNED / 2) for number in range(12)}
    ui = Ui()
    first = None
    for _ in range(100):
        rows = [rank(number, worst=level[number] + noise.uniform(0, PINNED / 2)) for number in level]
        order = [row.rank for row in ui.rows(rows)]
        first = first or order
        assert order == first
    worse = first[-3]
    rows = [rank(number, worst=level[number] + (3 * PINNED if number == worse else 0)) for number in level]
    assert [row.rank for row in ui.rows(rows)] == [worse, *(number for number in first if number != worse)]


@given(st.lists(st.dictionaries(st.integers(0, 9), st.floats(0, 5 * PINNED), min_size=1), min_size=1, max_size=6))
def test_no_row_ever_stands_above_one_that_is_clearly_worse(looks):
    order = []
    for look in looks:
        rows = [rank(number, worst=look[number]) for number in sorted(look)]
        made = pin(rows, order)
        assert sorted(row.rank for row in made) == sorted(look)
        for place, row in enumerate(made):
            assert all(below.worst <= row.worst + PINNED for below in made[place + 1 :])
        order = [row.key for row in made]
        assert [row.key for row in pin(rows, order)] == order, "a second look at the same rows keeps their order"


def test_rows_at_rest_stand_in_the_order_of_their_ranks_the_slower_before_the_faster():
    assert [row.rank for row in pin([rank(number) for number in range(20)], [])] == list(range(20))
    ended = [rank(number, share, running=False, worst=0.0) for number, share in enumerate((0.9, 0.5, 0.9, 0.7))]
    assert [row.rank for row in pin(ended, [])] == [1, 3, 0, 2]
    assert [row.rank for row in pin([*ended, rank(4, average=None, worst=0.0)], [])] == [1, 3, 0, 2, 4]


def test_the_selection_follows_the_worst_until_the_user_chooses_and_escape_gives_it_back():
    ui = Ui()
    rows = [rank(0), rank(1), rank(2, 0.5)]
    assert ui.selection(ui.rows(rows)).rank == 2
    rows = [rank(0, 0.1), rank(1), rank(2, 0.5)]
    assert ui.selection(ui.rows(rows)).rank == 0
    for ui.sort in SORTS:
        assert ui.selection(ui.rows(rows)).rank == 0, ui.sort
    ui.selected = "p1/1"
    rows = [rank(0, 0.1), rank(1), rank(2, 0.01)]
    assert ui.selection(ui.rows(rows)).rank == 1
    again = [replace(row, key=f"{row.proc_key}/2") for row in rows]
    assert ui.selection(ui.rows(again)).rank == 1, "the same process's next operation"
    ui.filter = "WRITE"
    ui.clear()
    assert (ui.filter, ui.selected) == ("", "")
    assert ui.selection(ui.rows(rows)).rank == 2


def job(key, **values):
    known = {"name": key, "pid": 1, "user": "ann", "ranks": 2, "alive": 2, "gpus": 2, "active": True}
    return Job(key=key, target=tier("high", "default"), **known | values)


def test_one_job_is_shown_the_first_until_another_is_chosen():
    painted = frame([rank(0, job_key="a"), rank(1, job_key="b"), rank(2, job_key="b")])
    model, ui = painted.model, painted.ui
    assert len(ui.shown(model)) == 3, "without jobs, all ranks are shown"
    model.jobs = [job("a"), job("b")]
    assert [row.rank for row in ui.shown(model)] == [0]
    ui.job = "b"
    assert [row.rank for row in ui.shown(model)] == [1, 2]
    assert "2 ranks" in plain(table.block(painted, 80, 8))[0]
    ui.job = "gone"
    assert [row.rank for row in ui.shown(model)] == [0]


def test_the_ranks_stand_in_one_of_two_orders_and_the_title_says_which():
    painted = frame([rank(0, 0.9), rank(1, 0.2), rank(2, 0.5)], (200, 24))
    for sort, words, order in (("worst", "slowest first", "120"), ("rank", "by rank", "012")):
        painted.ui.sort = sort
        title, _, *rows = plain(table.block(painted, 200, 8))
        assert f"3 ranks · {words} ─" in title
        assert "".join(line[4:9].strip() for line in rows[:3]) == order


def test_a_rank_and_what_it_waits_for_fit_into_twenty_cells():
    rows = [rank(number, 1.1 - number / 10, engine="threads", fallback="EPERM") for number in range(8)]
    rows[3] = replace(rows[3], wait="source 98%", average=90 * TARGET, rate=90 * TARGET, worst=500.0)
    made = plain(table.block(frame(rows, (20, 4)), 20, 2))
    assert made == ["▼>3 270.0  90x src! ".replace("▼", "●"), "▼ 7  1.20  40% disk!"]


def test_the_title_says_what_hides_ranks():
    painted = frame([rank(0), rank(1, running=False)], ui=Ui(filter="rank 0"))
    title = plain(table.block(painted, 80, 8))[0]
    assert "1 rank · slowest first · filter rank 0" in title
    painted.ui.filter = "nobody"
    assert "no rank matches 'nobody'" in plain(table.block(painted, 80, 8))[2]


# --- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [30, 40, 59, 76, 82, 120, 196])
def test_columns_stand_still_while_a_save_goes_on(width):
    heads = set()
    for model in saving():
        painted = Frame(model, Ui(), text.UNICODE, width, 15)
        made = plain(table.block(painted, width, 10))
        heads.add(made[0])
        cols = table.columns(model.rows, width)
        places = {name: start + 1 for name, (start, _) in cols.places().items()}
        for line in made[1:9]:
            assert text.width(line) == width
            assert all(line[at - 1] == " " for name, at in places.items() if name not in ("rank", "wait")), line
            if cols["bar"]:
                mark = places["bar"] + cells.mark_at(cols["bar"])
                assert (line[mark], made[0][mark]) == ("│", "│")
    assert len(heads) == 1


def test_what_holds_a_rank_up_is_said_at_every_width():
    rows = [
        rank(0, 0.5, engine="threads", fallback="EPERM"),
        rank(1, wait="source 100%", wait_kind="source"),
        rank(2, wait="rank 0", wait_kind="peers", state="WAIT"),
        rank(3, wait="limit 80%", wait_kind="limit"),
    ]
    for width in range(30, 201):
        for height in (12, 24):
            made = plain(table.block(frame(rows, (width, height)), width, 9))
            whole = "\n".join(made)
            for word in ("WAITS", "disk", "source", "limit"):
                assert word in whole, (width, height)
            assert "rank 0" in whole or "r0 " in whole
            assert "threads!" in whole or "disk!" in whole or "disk 98%!" in whole, (width, height)
            if width >= 60:
                assert "source 100%" in whole


def test_gpu_and_pid_go_first_then_spark_threads_and_engine():
    rows = [rank(number) for number in range(8)]
    gone = []
    for width in range(200, 29, -1):
        cols = table.columns(rows, width)
        assert cols["wait"]
        for name in ("pid", "gpu", "spark", "threads", "engine", "done", "bar", "eta", "state"):
            if name not in gone and not cols[name]:
                gone.append(name)
    assert gone == ["pid", "gpu", "spark", "threads", "engine", "done", "bar", "eta", "state"]


@given(st.floats(0, 20), st.integers(4, 60))
def test_a_bar_reaches_its_mark_if_and_only_if_the_target_is_reached(fraction, size):
    made = cells.gauge(fraction, size, "good", text.UNICODE).plain
    at = cells.mark_at(size)
    assert len(made) == size
    assert made[at] == "│"
    assert (set(made[:at]) == {"▆"}) == (fraction >= 1)
    assert ("▆" in made) == (fraction > 0)
    assert "░" not in made or fraction < 1.25
    assert abs(at / size - 0.8) <= 1 / size


def test_the_head_of_the_bars_names_the_target_where_all_have_the_same():
    rows = [rank(0), rank(1)]
    assert "│3 " in plain(table.block(frame(rows, (82, 12)), 82, 6))[0]
    rows[1] = replace(rows[1], target=4e9)
    assert "│3 " not in plain(table.block(frame(rows, (82, 12)), 82, 6))[0]


# --- what a row says -------------------------------------------------------------------------------------------------


@given(st.floats(0.01, 3), st.floats(0.01, 3), st.booleans())
def test_mark_colour_and_percentage_judge_the_same_figure(rate, average, moving):
    row = rank(0, rate, average=average * TARGET, verdict=judge(average * TARGET, TARGET), threads=())
    row = row if moving else replace(row, rate=None)
    painted = frame([row])
    found = cells.figure(row)
    shown = rate if moving else average
    assert found.verdict is judge(shown * TARGET, TARGET)
    line = table.rank_line(painted, row, table.columns([row], 76), selected=False)
    assert line.parts[0] == (painted.glyph(found.verdict), VERDICT_STYLES[found.verdict])
    assert text.percent(shown * TARGET / TARGET) in line.plain
    styles = {style for words, style in line.parts if "█" in words}
    assert styles <= {VERDICT_STYLES[found.verdict] if moving else "dim"}


def test_a_rank_whose_threads_run_out_of_work_does_not_turn_red():
    ended = tuple(thread(index, None, state="IDLE", waits={}) for index in range(3))
    row = rank(0, 0.25, average=TARGET, threads=(*ended, thread(3, 1.0)), verdict=Verdict.GOOD, progress=0.95)
    line = table.rank_line(frame([row]), row, table.columns([row], 76), selected=False)
    assert not {style for _, style in line.parts} & {"bad", "low"}
    assert "100%" in line.plain
    never = tuple(replace(one, done=0) for one in ended)
    slow = replace(row, threads=(*never, thread(3, 1.0)))
    assert "25%" in table.rank_line(frame([slow]), slow, table.columns([slow], 76), selected=False).plain


def words_of(row, width=76):
    return table.rank_line(frame([row]), row, table.columns([row], width), selected=False).plain


def test_a_rank_that_stands_still_says_how():
    stalled = rank(0, 0.0, state="STALL", stalled_s=12.4)
    for letter, kind, state, words in (
        ("T", "disk", "STOP", "stopped 12s"),
        ("S", "disk", "STUCK", "storage 12s"),
        ("D", "memory", "STALL", "memory 12s"),
        ("D", "", "STALL", "silent 12s"),
    ):
        row = replace(stalled, process_state=letter, wait_kind=kind)
        assert f" {state:<6} " in words_of(row)
        assert words_of(row).rstrip().endswith(words)
        assert words_of(row, 40).rstrip().endswith("12s")
        assert words_of(row, 30).rstrip().endswith(state)
    failed = rank(0, state="FAILED", running=False, error="ENOSPC", verdict=Verdict.FAILED, wait="")
    assert words_of(failed).startswith("x ")
    assert words_of(failed).rstrip().endswith("ENOSPC")
    dead = rank(0, state="DEAD", running=False, alive=False, verdict=Verdict.FAILED, wait="", rate=None, average=None)
    assert words_of(dead).rstrip().endswith("died")
    assert words_of(rank(0, state="IDLE", running=False, rate=None, wait=""), 30).rstrip().endswith("idle")
    for word in ("STOP", "STUCK", "STALL", "DEAD FAILED", "WAIT"):
        assert word in dict(cells.STATE_WORDS)


def test_time_left_keeps_to_its_cells():
    for seconds, shown in ((0.0, "00:00"), (3599.0, "59:59"), (3600.0, " 1h00"), (360_000.0, "   4d"), (None, "--:--")):
        assert cells.eta(rank(0, eta_s=seconds)) == shown
    assert cells.eta(rank(0, running=False)) == "    -"


def test_each_thread_is_one_cell_as_high_as_its_share():
    row = rank(0, threads=(thread(0, 1.0), thread(1, 0.5), thread(2, 0.0), thread(3, None)))
    for glyphs, wanted in ((text.UNICODE, "▆▃▁·"), (text.ASCII, "+:..")):
        made = cells.threads(frame([row], glyphs=glyphs), row, 4)
        assert made.plain == wanted
        assert [style for _, style in made.parts] == ["good", "bad", "bad", "dim"]
        assert (
            wanted in table.rank_line(frame([row], glyphs=glyphs), row, table.columns([row], 76), selected=False).plain
        )
    row = rank(0, threads=(*row.threads[:3], thread(3, 0.0, state="ERROR")))
    assert cells.threads(frame([row]), row, 4).plain == "▆▃▁x"


@pytest.mark.parametrize("count", [17, 24, 64, 100])
def test_more_threads_than_cells_are_grouped_by_the_worst(count):
    slow = count // 2
    row = rank(0, threads=tuple(thread(index, 0.3 if index == slow else 1.0, count) for index in range(count)))
    assert table.columns([row], 196)["threads"] == 16
    made = cells.threads(frame([row]), row, 16).plain
    assert sorted(made) == sorted("▆" * 15 + "▂")
    cell = made.index("▂")
    assert cell * count // 16 <= slow < (cell + 1) * count // 16


def test_with_sixteen_threads_the_cells_still_fit_at_80_columns():
    cols = table.columns([rank(0, count=16)], 76)
    assert cols["threads"] >= 4
    assert cols["engine"]
    assert cols["bar"]
