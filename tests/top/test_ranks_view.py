"""The ranks on the screen: their order, their columns at every width, the grid, the selected one in full, the past."""

from __future__ import annotations

import ast
import asyncio
import random
import re
from dataclasses import replace

import pytest
from fastckpt_top import text
from fastckpt_top.app import TopApp
from fastckpt_top.model import Model
from fastckpt_top.rows import Checkpoint, Event, Job, Row, ThreadRow, Verdict, judge
from fastckpt_top.targets import tier
from fastckpt_top.views import cells, grid, history, lists, table, threads
from fastckpt_top.views.live import paint
from fastckpt_top.views.paint import VERDICT_STYLES, Frame
from fastckpt_top.views.state import PINNED, SORTS, Ui, pin
from hypothesis import given
from hypothesis import strategies as st

from conftest import demo

TARGET = 3e9
DASH = "\N{EN DASH}"


def thread(index, share=1.0, count=4, **values):
    target = TARGET / count
    rate = None if share is None else share * target
    known = {
        "index": index, "slot": index, "tid": 5400 + index, "cpu": 0, "state": "WRITE", "rate": rate, "done": 10**9,
        "in_flight": 8, "latency_s": 0.01, "latency_max_s": 0.2, "busy": 0.98, "source": 0.01, "limit": 0.0,
        "target": target, "slow": False, "retries": 0, "shorts": 0, "errors": 0, "spark": (target,) * 20,
        "p50_s": 0.0069, "p99_s": 0.0495,
    }  # fmt: skip
    return ThreadRow(**known | values)


def rank(number, share=1.0, count=4, **values):
    rate = share * TARGET
    known = {
        "key": f"p{number}/1", "proc_key": f"p{number}", "rank": number, "gpu": number, "pid": 5327 + number,
        "uid": 1000, "user": "ann", "job": "job", "version": "1", "alive": True, "kind": "save", "running": True,
        "state": "WRITE", "rate": rate, "average": rate, "target": TARGET, "done": 2 * 10**10, "total": 4 * 10**10,
        "progress": 0.5, "eta_s": 20.0, "verdict": judge(rate, TARGET), "engine": "uring", "direct": True,
        "label": "step-100", "path": "/mnt/nvme0/runs/a/step-100", "block_size": 16 << 20, "queue_depth": 8,
        "wait": "disk 98%", "wait_kind": "disk", "wait_share": 0.98, "spark": (rate,) * 20,
        "threads": tuple(thread(index, share, count) for index in range(count)),
        "worst": 10 + 400 * max(1 - share, 0.0),
    }  # fmt: skip
    return Row(**known | values)


def frame(rows=(), size=(80, 24), ui=None, glyphs=text.UNICODE):
    model = Model()
    model.rows = list(rows)
    return Frame(model, ui or Ui(), glyphs, *size)


def plain(block):
    return [line.plain for line in block.lines]


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
    assert "8 ranks · slowest first ▾" in made[0]
    assert f"1{DASH}8 of 8" in made[0]
    assert made[2].startswith("│ ▼>  6 WRITE")
    assert made[3].startswith("│ ▼   5 WRITE")
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
        assert [row.key for row in pin(rows, order)] == order, "a second look at the same changes nothing"


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
    assert len(ui.shown(model)) == 3, "without jobs all"
    model.jobs = [job("a"), job("b")]
    assert [row.rank for row in ui.shown(model)] == [0]
    ui.job = "b"
    assert [row.rank for row in ui.shown(model)] == [1, 2]
    assert "2 ranks" in plain(table.block(painted, 80, 8))[0]
    ui.job = "gone"
    assert [row.rank for row in ui.shown(model)] == [0]


HEADS = {
    "": "worst", "RK": "rank", "PID": "pid", "STATE": "state", "GB/s": "rate", "%": "target", "DONE": "done",
    "ETA": "eta",
}  # fmt: skip


@pytest.mark.parametrize(("word", "sort"), HEADS.items(), ids=HEADS.values())
def test_each_head_sorts_by_its_column_and_the_title_says_how(word, sort):
    painted = frame([rank(0, 0.9), rank(1, 0.5), rank(2, 0.2)], (200, 24), Ui(sort="rank" if word != "RK" else "pid"))
    made = table.block(painted, 200, 8)
    ((y, start, end, _),) = [zone for zone in made.actions if zone[3] == f"sort_by({sort!r})"]
    assert word in made.lines[y].plain[start : end + 1]
    seen = []
    for turned in (False, True):
        painted.ui.sort_by(sort)
        assert (painted.ui.sort, painted.ui.reverse) == (sort, turned)
        title, heads, *rows = plain(table.block(painted, 200, 8))
        sign = "▴" if (sort in ("rank", "pid", "state")) != turned else "▾"
        assert f"{word}{sign}" in heads
        assert title.split("ranks · ")[1].split("─")[0].rstrip().endswith(sign)
        seen.append([line[2:] for line in rows[:3]])
    assert seen[0] == seen[1][::-1] or sort in ("state", "done", "eta"), "these are all alike"


def test_a_rank_and_what_it_waits_for_fit_into_twenty_cells():
    rows = [rank(number, 1.1 - number / 10, engine="threads", fallback="EPERM") for number in range(8)]
    rows[3] = replace(rows[3], wait="source 98%", average=90 * TARGET, rate=90 * TARGET, worst=500.0)
    made = plain(table.block(frame(rows, (20, 4)), 20, 2))
    assert made == ["▼>3 270.0  90x src! ".replace("▼", "●"), "▼ 7  1.20  40% disk!"]


def test_the_title_says_what_hides_ranks():
    painted = frame([rank(0), rank(1, running=False)], ui=Ui(filter="0", active_only=True, mode="average"))
    title = plain(table.block(painted, 80, 8))[0]
    assert "1 rank · slowest first ▾ · averages · running only · filter 0" in title
    painted.ui.filter = "nobody"
    assert "no rank matches 'nobody'" in plain(table.block(painted, 80, 8))[2]


# --- columns ---------------------------------------------------------------------------------------------------------


def starts(cols):
    """The first cell of each column."""
    found, at = {}, 2
    sizes = (
        ("rank", cols.rank), ("gpu", cols.gpu), ("pid", cols.pid), ("state", cols.state), ("rate", cols.rate),
        ("bar", cols.bar), ("percent", cols.percent), ("spark", cols.spark), ("threads", cols.threads),
        ("done", cols.done), ("eta", cols.eta), ("engine", cols.engine), ("wait", cols.wait),
    )  # fmt: skip
    for name, size in sizes:
        if size:
            found[name] = at
            at += size + 1
    return found


@pytest.mark.parametrize("width", [30, 40, 59, 76, 82, 120, 196])
def test_columns_stand_still_while_a_save_goes_on(width):
    heads = set()
    for model in saving():
        painted = Frame(model, Ui(), text.UNICODE, width, 15)
        made = plain(table.block(painted, width, 10))
        heads.add(made[0])
        cols = table.columns(model.rows, width)
        places = starts(cols)
        for line in made[1:9]:
            assert text.width(line) == width
            assert all(line[at - 1] == " " for name, at in places.items() if name not in ("rank", "wait")), line
            if cols.bar:
                mark = places["bar"] + cells.mark_at(cols.bar)
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
        assert cols.wait
        for name in ("pid", "gpu", "spark", "threads", "engine", "done", "bar", "eta", "state"):
            if name not in gone and not getattr(cols, name):
                gone.append(name)
    assert gone == ["pid", "gpu", "spark", "threads", "engine", "done", "bar", "eta", "state"]


@given(st.floats(0, 20), st.integers(4, 60))
def test_a_bar_reaches_its_mark_if_and_only_if_the_target_is_reached(fraction, size):
    made = cells.gauge(fraction, size, "good", text.UNICODE).plain
    at = cells.mark_at(size)
    assert len(made) == size
    assert made[at] == "│"
    assert (set(made[:at]) == {"█"}) == (fraction >= 1)
    assert ("█" in made) == (fraction > 0)
    assert "░" not in made or fraction < 1.25
    assert abs(at / size - 0.8) <= 1 / size


def test_the_head_of_the_bars_names_the_target_where_all_have_the_same():
    rows = [rank(0), rank(1)]
    assert "│3 " in plain(table.block(frame(rows, (82, 12)), 82, 6))[0]
    rows[1] = replace(rows[1], target=4e9)
    assert "│3 " not in plain(table.block(frame(rows, (82, 12)), 82, 6))[0]


# --- what a row says -------------------------------------------------------------------------------------------------


@given(st.floats(0.01, 3), st.floats(0.01, 3), st.sampled_from(["current", "average"]))
def test_mark_colour_and_percentage_judge_the_same_figure(rate, average, mode):
    row = rank(0, rate, average=average * TARGET, verdict=judge(average * TARGET, TARGET), threads=())
    painted = frame([row], ui=Ui(mode=mode))
    found = cells.figure(painted, row)
    shown = rate if mode == "current" else average
    assert found.verdict is judge(shown * TARGET, TARGET)
    line = table.rank_line(painted, row, table.columns([row], 76), selected=False)
    assert line.parts[0] == (painted.glyph(found.verdict), VERDICT_STYLES[found.verdict])
    assert text.percent(shown * TARGET / TARGET) in line.plain
    styles = {style for words, style in line.parts if "█" in words}
    assert styles <= {VERDICT_STYLES[found.verdict] if mode == "current" else "dim"}


def test_a_rank_whose_threads_run_out_of_work_does_not_turn_red():
    ended = tuple(thread(index, None, state="IDLE", busy=None) for index in range(3))
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
    for letter, state, words in (
        ("T", "STOP", "stopped 12s"),
        ("D", "STUCK", "storage 12s"),
        ("S", "STALL", "silent 12s"),
    ):
        row = replace(stalled, process_state=letter)
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
    for glyphs, wanted in ((text.UNICODE, "▆▃▁·"), (text.ASCII, "*-..")):
        made = cells.threads(row, 4, glyphs)
        assert made.plain == wanted
        assert [style for _, style in made.parts] == ["good", "bad", "bad", "dim"]
        assert (
            wanted in table.rank_line(frame([row], glyphs=glyphs), row, table.columns([row], 76), selected=False).plain
        )
    row = rank(0, threads=(*row.threads[:3], thread(3, 0.0, state="ERROR")))
    assert cells.threads(row, 4, text.UNICODE).plain == "▆▃▁x"


@pytest.mark.parametrize("count", [17, 24, 64, 100])
def test_more_threads_than_cells_are_grouped_by_the_worst(count):
    slow = count // 2
    row = rank(0, threads=tuple(thread(index, 0.3 if index == slow else 1.0, count) for index in range(count)))
    assert table.columns([row], 196).threads == 16
    made = cells.threads(row, 16, text.UNICODE).plain
    assert sorted(made) == sorted("▆" * 15 + "▂")
    cell = made.index("▂")
    assert cell * count // 16 <= slow < (cell + 1) * count // 16


def test_with_sixteen_threads_the_cells_still_fit_at_80_columns():
    cols = table.columns([rank(0, count=16)], 76)
    assert cols.threads >= 4
    assert cols.engine
    assert cols.bar


# --- many ranks ------------------------------------------------------------------------------------------------------


def named(number):
    return f"r{number}"


@pytest.mark.parametrize("count", [5, 6, 17, 64, 500])
@pytest.mark.parametrize("size", [(80, 13), (120, 24), (200, 50)])
def test_ranks_that_do_not_fit_stand_in_a_grid_and_none_is_lost(count, size):
    rows = [rank(number, 0.9 + number / 10_000) for number in range(count)]
    rows[-1] = rank(count - 1, 0.4)
    painted = frame(rows, (size[0], 60))
    made = table.block(painted, *size)
    assert len(made.lines) == size[1]
    assert {line.width for line in made.lines} == {size[0]}
    keys = {
        ast.literal_eval(what[7:-1]): (y, start, end) for y, start, end, what in made.actions if what[:6] == "select"
    }
    listed = list(made.rows.values())
    assert not set(listed) & set(keys)
    assert len(listed) == len(set(listed))
    assert listed[0] == f"p{count - 1}/1"
    if count <= size[1] - 3:
        assert not keys
        assert len(listed) == count
    else:
        assert len(listed) >= 5
    for key, (y, start, end) in keys.items():
        assert named(key[1:-2]) in re.split("[ >]+", made.lines[y].plain[start : end + 1])
    hidden = count - len(listed) - len(keys)
    if keys and not hidden:
        across = grid.across(len(str(count - 1)), size[0] - 4)
        assert len(listed) + 1 - (1 - len(keys)) // across > size[1] - 3, "as many rows as leave room for the others"
    assert (f"{hidden} not shown" in made.lines[0].plain) == (hidden > 0)
    assert hidden == 0 or count > 60
    best = {row.key for row in sorted(rows, key=lambda row: row.worst)[:hidden]}
    assert not best & (set(listed) | set(keys)), "what is hidden is the best"


def test_sixty_four_ranks_are_all_seen_on_a_screen_of_80_columns():
    rows = [rank(number) for number in range(64)]
    rows[48] = rank(48, 0.58, engine="threads", fallback="EPERM")
    made = plain(table.block(frame(rows, (80, 40)), 80, 20))
    assert made[2].startswith("│ ▼> 48 WRITE")
    whole = "\n".join(made)
    assert len(set(re.findall(r"\br\d+", whole))) == 64 - 5
    assert "64 of 64" in made[0]


def test_the_ranks_ask_for_a_line_each_or_for_what_shows_them_all_in_a_grid():
    wanted = (
        (8, (80, 24), 11), (1, (80, 24), 4), (64, (120, 30), 18), (64, (200, 60), 36), (16, (120, 30), 18),
        (500, (80, 24), 107), (3, (40, 8), 4), (0, (80, 24), 4),
    )  # fmt: skip
    for count, size, lines in wanted:
        painted = frame([rank(number) for number in range(count)], size)
        width = 86 if size[0] == 120 else size[0]
        assert table.wanted(painted, width) == lines, (count, size)
        if count:
            made = table.block(painted, width, lines)
            assert len(made.lines) == lines
            assert "RK" in "".join(plain(made)[:2])
            assert "not shown" not in made.lines[0].plain
    whole = paint(frame([rank(number) for number in range(64)], (120, 30))).plain
    assert "64 of 64" in whole


@pytest.mark.parametrize("count", [17, 64, 500])
def test_the_selection_moves_through_rows_and_grid_and_is_always_seen(count):
    painted = frame([rank(number, 0.9 + number / 10_000) for number in range(count)], (80, 24))
    for row in painted.ui.shown(painted.model):
        painted.ui.selected = row.key
        made = plain(table.block(painted, 80, 13))[2:-1]
        chosen = [line for line in made if ">" in line]
        assert len(chosen) == 1
        assert chosen[0].split(">")[1].split()[0] in (str(row.rank), named(row.rank))


def test_a_grid_says_who_failed_and_who_fell_back():
    rows = [rank(number) for number in range(20)]
    rows[3] = rank(3, state="FAILED", running=False, error="EIO", verdict=Verdict.FAILED, worst=0.0)
    rows[4] = rank(4, fallback="EPERM", engine="threads")
    made, shown = grid.block(frame(rows), rows, None, 3, 76, 6)
    whole = "\n".join(plain(made))
    assert shown == 20
    assert "x   r3 FAILED" in whole
    assert "r4 ▆ 100%!" in whole


def test_opened_rows_show_their_threads_and_scroll():
    rows = [rank(number) for number in range(12)]
    painted = frame(rows, (80, 24), Ui(all_threads=True))
    assert table.wanted(painted, 80) == 12 * 5 + 3
    for row in rows:
        painted.ui.selected = row.key
        made = table.block(painted, 80, 13)
        assert sum(line.selected > 0 for line in made.lines) == 1
        assert [key for line, key in made.rows.items() if made.lines[line].selected] == [row.key]
        assert list(made.rows.values()).count(row.key) == 5, "with all of its threads"


# --- the selected rank -----------------------------------------------------------------------------------------------


def test_a_rank_with_one_thread_is_shown_in_full():
    row = rank(6, 0.58, 1, engine="threads", fallback="EPERM")
    painted = frame([row], (120, 30))
    made = plain(threads.block(painted, row, 120, threads.wanted(painted, row)))
    title = made[0]
    for words in (
        "rank 6",
        "pid 5333",
        "ann",
        "threads+direct (fallback: EPERM)",
        "16 MiB \N{MULTIPLICATION SIGN} 8",
        "runs/a/step-100",
    ):
        assert words in title
    assert "the slowest" not in title
    for word in ("THR", "TID", "STATE", "GB/s", "QD", "p50 ms", "p99 ms", "WAITS FOR"):
        assert word in made[1]
    for words in ("w0", "5400", "1.74", "58%", " 8 ", "6.90", "49.5", "disk 98%"):
        assert words in made[2]
    assert "average 1.74 of 3.00 GB/s" in made[3]
    painted.ui.selected = row.key
    assert "Esc: the slowest" in plain(threads.block(painted, row, 120, 6))[0]


def test_a_rank_without_threads_says_what_is_known():
    row = rank(3, threads=(), kind="", engine="", block_size=0, path="", running=False, wait="")
    painted = frame([row], (80, 24))
    assert threads.wanted(painted, row) == 4
    assert plain(threads.block(painted, row, 80, 4))[1].startswith("│ no operation yet ")
    row = replace(row, kind="save", durable=10**9, st_dev=0x10301, files=8, files_done=3)
    shown = plain(threads.block(painted, row, 120, 4))[1]
    for words in ("20.0 of 40.0 GB", "1.00 GB durable", "3 of 8 files", "device 259:1"):
        assert words in shown
    assert "THR" not in shown


def test_a_long_path_loses_its_beginning():
    row = rank(0, path="/mnt/" + "deep/" * 40 + "step-100")
    title = plain(threads.block(frame([row]), row, 80, 8))[0]
    assert "/step-100" in title
    assert "…" in title


def test_threads_that_do_not_fit_show_the_worst_first_and_a_count():
    row = rank(0, threads=tuple(thread(index, 1.0 - index / 20, 12) for index in range(12)))
    made = plain(threads.block(frame([row]), row, 80, 8))
    assert [line.split()[2] for line in made[2:6]] == ["w11", "w10", "w9", "w8"]
    assert "8 more, none of them worse" in made[6]
    row = rank(0, threads=(*row.threads, thread(12, 1.0, 13, state="ERROR")))
    assert plain(threads.block(frame([row]), row, 80, 8))[2].split()[1:3] == ["x", "w12"]


def test_the_list_of_threads_names_the_rank_at_every_width():
    rows = [rank(number, 1 - number / 10) for number in range(3)]
    for width in (30, 40, 60, 80, 140):
        made = lists.paint(frame(rows, (width, 24), Ui(view="threads")), 22)
        body = [line.plain.strip("│ ").split() for line in made if " w0 " in line.plain]
        assert [words[1] for words in body] == ["2", "1", "0"], width


# --- the past --------------------------------------------------------------------------------------------------------


def past(number=0, **values):
    known = {
        "kind": "save", "label": f"step-{100 * number}", "step": 100 * number, "start": 1000.0 + 60 * number,
        "end": 1010.0 + 60 * number, "bytes": 24 * 10**10, "target": 24e9, "engines": {"uring"},
    }  # fmt: skip
    return Checkpoint(**known | values)


def remembered(size, *checkpoints, **values):
    painted = frame((), size, Ui(**values))
    painted.model.past.checkpoints = list(checkpoints)
    return painted


def test_the_past_is_judged_by_the_target_that_it_had():
    painted = remembered((80, 24), past(), past(1, target=48e9), past(2, bytes=1))
    painted.model.set_target(tier("light", "option"))
    cols = history.columns(50)
    shares = [history.line(painted, one, cols).plain.split()[-1] for one in painted.model.past.checkpoints]
    assert shares == ["100%", "50%", "0%"]


def test_columns_of_the_past_stand_still_whatever_is_in_them():
    ones = [
        past(), past(1, target=1.0), past(2, kind="verify", end=99_999.0), past(3, bytes=1, label="x" * 90),
        past(4, kind="load", bytes=10**14), past(5, fallback="EPERM", engines={"threads", "uring"}, p99_s=12.0),
    ]  # fmt: skip
    for width in range(30, 197):
        painted = remembered((width, 24), *ones)
        cols = history.columns(width)
        lines = [history.head(painted, cols).plain, *(history.line(painted, one, cols).plain for one in ones)]
        assert {text.width(line) for line in lines} == {width}
        at = 1 + (cols.when + 1 if cols.when else 0)
        assert [line[at : at + 8].split() for line in lines] == [
            ["OP"], ["save"], ["save"], ["verify"], ["save"], ["load"], ["save"]
        ]  # fmt: skip
        at += 1 + history.KIND + 1 + cols.label
        for size in (cols.size, cols.took, cols.rate, cols.percent):
            assert all(line[at] == " " for line in lines) or not size, width
            at += size + 1 if size else 0


def test_at_a_screen_of_120_columns_the_past_has_its_duration_and_its_share():
    painted = remembered((120, 30), past(118, end=8095.2), past(119, end=8140.0 + 99.96, target=1.0))
    cols = history.columns(30)
    shown = [history.line(painted, one, cols).plain for one in painted.model.past.checkpoints]
    assert [line.split()[1:] for line in [history.head(painted, cols).plain, *shown]] == [
        ["LABEL", "TOOK", "GB/s", "%"],
        ["save", "11800", "15.2", "15.79", "65%"],
        ["save", "11900", "100", "2.40", "999x"],
    ]


def test_a_failed_operation_says_why_and_a_short_column_keeps_the_step():
    painted = remembered((80, 24), past(3, error="ENOSPC"), past(2, error="rank 3 died"), past(1180))
    cols = history.columns(76)
    shown = [history.line(painted, one, cols) for one in painted.model.past.checkpoints]
    assert "failed: ENOSPC" in shown[0].plain
    assert "rank 3 died" in shown[1].plain
    assert shown[0].parts[0] == ("x", "bad")
    long = past(1180, label="llama-run-step-118000")
    assert " 118000 " in history.line(painted, long, history.columns(40)).plain
    assert " …8000 " in history.line(painted, long, history.columns(30)).plain


def test_the_block_beside_the_ranks_has_both_the_past_and_the_events():
    painted = remembered((120, 30), *(past(number) for number in range(40)))
    for number in range(40):
        painted.model.events.append(Event(1000.0 + number, "bad" if number == 39 else "info", f"event {number}"))
    made = plain(history.block(painted, 44, 12))
    assert len(made) == 12
    assert "3900" in made[2]
    assert sum("save" in line for line in made) == 6
    assert "x event 39" in made[8]
    empty = plain(history.block(remembered((120, 30)), 34, 6))
    assert "no operation has ended yet" in empty[1]


@pytest.mark.parametrize("glyphs", [text.UNICODE, text.ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("screen", [(59, 15), (200, 60)], ids=["bare", "boxed"])
def test_blocks_have_exactly_the_size_that_is_asked_for(glyphs, screen):
    rows = [rank(number, 0.4 + number / 10, job="日本語", path="/日本語/step") for number in range(9)]
    rows += [rank(9, threads=(), kind="", running=False, state="IDLE", engine=""), rank(100, rank=None, pid=4_194_304)]
    painted = frame(rows, screen, glyphs=glyphs)
    painted.model.past.checkpoints = [past(number, label="日本語日本語") for number in range(3)]
    painted.model.events.append(Event(0.0, "warn", "日本語 " * 30))
    for width in (4, 5, 9, 20, 30, 40, 59, 60, 80, 120, 200):
        for height in (1, 2, 3, 4, 5, 9, 14, 30):
            made = [table.block(painted, width, height), history.block(painted, width, height)]
            made += [threads.block(painted, row, width, height) for row in rows[8:]]
            for block in made:
                assert len(block.lines) == height
                assert {text.width(line.plain) for line in block.lines} == {width}
                assert glyphs is text.UNICODE or all(line.plain.isascii() for line in block.lines)
                assert all(0 <= line < height for line in block.rows)


@pytest.mark.parametrize("view", ["threads", "history", "events"])
def test_lists_scroll_and_say_where_they_are(view):
    painted = remembered((80, 24), *(past(number) for number in range(50)), view=view)
    painted.model.rows = [rank(number) for number in range(20)]
    painted.model.events.extend(Event(float(number), "info", f"event {number}") for number in range(60))
    before = [line.plain for line in lists.paint(painted, 20)]
    painted.ui.scroll[view] = 7
    after = [line.plain for line in lists.paint(painted, 20)]
    assert f"1{DASH}" in before[0]
    assert f"8{DASH}" in after[0]
    head = 1 if view == "events" else 2
    assert after[head] == before[head + 7]
    painted.ui.scroll[view] = 10_000
    lists.paint(painted, 20)
    assert painted.ui.scroll[view] < 100


# --- in the application ----------------------------------------------------------------------------------------------


def test_heads_and_cells_of_the_grid_are_clicked_and_escape_follows_the_slowest_again():
    class Still:
        live = True

        def __init__(self):
            self.model = frame([rank(number, 0.9 + number / 1000) for number in range(64)]).model

        def tick(self):
            """Nothing moves."""

        def status(self):
            return "live"

    async def go():
        app = TopApp(Still(), Ui())
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()

            async def click(action):
                y, x, *_ = next(zone for zone in app.canvas.painted().actions if zone[3] == action)
                await pilot.click(offset=(x, y))
                await pilot.pause()

            await click("select('p7/1')")
            assert app.ui.selected == "p7/1"
            assert ">r7 " in app.canvas.screen_text.replace("> ", ">")
            await click("sort_by('rank')")
            assert app.ui.sort == "rank"
            await pilot.press("down")
            assert app.ui.selected == "p8/1"
            await pilot.press("escape")
            await pilot.pause()
            assert app.ui.selected == ""
            assert ">  0 WRITE" in app.canvas.screen_text

    asyncio.run(go())
