"""The past on the screen: ended operations and events, and the lists of them."""

from __future__ import annotations

import pytest
from fastckpt_top import text
from fastckpt_top.rows import Checkpoint, Event
from fastckpt_top.targets import tier
from fastckpt_top.views import history, lists, table, threads
from fastckpt_top.views.state import Ui
from painted import DASH, frame, plain, rank


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
        at = cols.places()["kind"][0]
        assert [line[at : at + 8].split() for line in lines] == [
            ["OP"], ["save"], ["save"], ["verify"], ["save"], ["load"], ["save"]
        ]  # fmt: skip
        for name, (start, _) in cols.places().items():
            assert name not in ("size", "took", "rate", "percent") or all(line[start] == " " for line in lines), width


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
                assert len(block) == height
                assert {text.width(line.plain) for line in block} == {width}
                assert glyphs is text.UNICODE or all(line.plain.isascii() for line in block)


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
