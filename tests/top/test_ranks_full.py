"""Many ranks in a grid, the selected one in full, and clicks on both."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fastckpt_top.rows import Verdict
from fastckpt_top.views import grid, lists, table, threads
from fastckpt_top.views.live import paint
from fastckpt_top.views.state import Ui
from painted import frame, plain, rank, thread

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
    assert len(made) == size[1]
    assert {line.width for line in made} == {size[0]}
    whole = plain(made)[2:-1]
    listed = [int(found[1]) for line in whole if (found := re.match(r"│ [▼◐●][> ] *(\d+) ", line))]
    across = max(len(re.findall(r"\br\d+ ", line)) for line in whole)
    grid = [int(number) for line in whole for number in re.findall(r"\br(\d+) ", line)]
    assert not set(listed) & set(grid)
    assert len({*listed, *grid}) == len(listed) + len(grid)
    assert listed[0] == count - 1
    if count <= size[1] - 3:
        assert not grid
        assert len(listed) == count
    else:
        assert len(listed) >= 5
    hidden = count - len(listed) - len(grid)
    if grid and not hidden:
        assert len(listed) + 1 - (1 - len(grid)) // across > size[1] - 3, "the rows and the grid use the whole height"
    assert (f"{hidden} not shown" in made[0].plain) == (hidden > 0)
    assert hidden == 0 or count > 60
    best = {row.rank for row in sorted(rows, key=lambda row: row.worst)[:hidden]}
    assert not best & {*listed, *grid}, "only the best ranks are hidden"


def test_sixty_four_ranks_are_all_seen_on_a_screen_of_80_columns():
    rows = [rank(number) for number in range(64)]
    rows[48] = rank(48, 0.58, engine="threads", fallback="EPERM")
    made = plain(table.block(frame(rows, (80, 40)), 80, 20))
    assert made[2].startswith("│ ▼>  48 WRITE")
    whole = "\n".join(made)
    assert len(set(re.findall(r"\br\d+", whole))) == 64 - sum(" WRITE " in line for line in made)
    assert "64 of 64" in made[0]


def test_the_ranks_ask_for_a_line_each_or_for_what_shows_them_all_in_a_grid():
    wanted = (
        (8, (80, 24), 11), (1, (80, 24), 4), (64, (120, 30), 18), (64, (200, 60), 36), (16, (120, 30), 18),
        (500, (80, 24), 91), (3, (40, 8), 4), (0, (80, 24), 4),
    )  # fmt: skip
    for count, size, lines in wanted:
        painted = frame([rank(number) for number in range(count)], size)
        width = 86 if size[0] == 120 else size[0]
        assert table.wanted(painted, width) == lines, (count, size)
        if count:
            made = table.block(painted, width, lines)
            assert len(made) == lines
            assert "RANK" in "".join(plain(made)[:2])
            assert "not shown" not in made[0].plain
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
    made, shown = grid.block(frame(rows), rows, None, grid.size(rows, 3, 76, 6), 6)
    whole = "\n".join(plain(made))
    assert shown == 20
    assert re.search("x   r3 +FAILED ", whole)
    assert "r4 ▆▆▆▆ 100%!" in whole


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
    assert "Esc: the slowest" in plain(threads.block(painted, row, 120, 6))[-1]


def test_a_rank_without_threads_says_what_is_known():
    row = rank(3, threads=(), kind="", engine="", block_size=0, path="", running=False, wait="")
    painted = frame([row], (80, 24))
    assert threads.wanted(painted, row) == 4
    assert plain(threads.block(painted, row, 80, 4))[1].startswith("│ no operation yet ")
    row = replace(row, kind="save", durable=10**9, device="/dev/nvme0n1", files=8, files_done=3)
    shown = plain(threads.block(painted, row, 120, 4))[1]
    for words in ("20.0 of 40.0 GB", "1.00 GB durable", "3 of 8 files", "device /dev/nvme0n1"):
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
