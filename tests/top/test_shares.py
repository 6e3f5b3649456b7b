"""Each thread beside its share of the target, during and after its work, at every screen size."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from by_hand import GB, Rank, look, moving
from fastckpt_top import text
from fastckpt_top.feed import ShmFeed, mounted
from fastckpt_top.model import Model
from fastckpt_top.segment import Phase
from fastckpt_top.views import cells, table
from fastckpt_top.views.live import paint
from fastckpt_top.views.paint import Frame
from fastckpt_top.views.state import Ui
from painted import frame, plain, rank, thread

# Saves, prints its report, and exits when its input is closed.
SAVER = """
import json, sys
import numpy as np
import fastckpt
report = fastckpt.save({"w": np.ones(40_000_000, np.uint8)}, sys.argv[1], io=fastckpt.IO("threads", threads=2))
print(json.dumps([report.bytes, report.seconds]), flush=True)
sys.stdin.readline()
"""


def shown(model, size, **choices):
    return paint(Frame(model, Ui(**choices), text.UNICODE, *size)).plain


@pytest.fixture
def saved(place, tmp_path):
    """A process that has saved, with the bytes and seconds of its report; it exits when its input is closed."""
    environment = os.environ | {"FASTCKPT_TOP_DIR": str(place)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SAVER, str(tmp_path / "step-7")]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as child:
        yield child, json.loads(child.stdout.readline())


def looked(place):
    """The data of a monitor that has just started."""
    feed, model = ShmFeed([str(place)]), Model()
    model.update(feed.poll())
    feed.close()
    return model


def test_the_averages_of_the_threads_stay_when_a_real_save_has_ended_and_when_its_process_has(saved, place, tmp_path):
    """Mutants: a thread without a current rate has no average; a late monitor shows advice, not the last save."""
    child, (size, seconds) = saved
    for state in ("DONE", "EXIT"):
        model = looked(place)
        (row,) = model.rows
        assert row.state == state
        assert {thread.state for thread in row.threads if thread.done} == {"DONE"}
        parts = [thread.average or 0.0 for thread in row.threads]
        assert sum(parts) == pytest.approx(row.average) == pytest.approx(size / seconds, rel=0.1)
        screen = shown(model, (120, 30))
        worst = min((thread for thread in row.threads), key=lambda thread: thread.average or 0.0)
        assert re.search(rf" w{worst.index} .* DONE +{re.escape(text.rate(worst.average))} ", screen)
        assert "step-7" in screen
        assert "container" not in screen
        child.stdin.close()
        child.wait()
    device = mounted().get(tmp_path.stat().st_dev)
    assert not device or f"device {device}" in shown(model, (160, 50)), "and its device has a name"


def two_ranks(model, until=6):
    """Two ranks of two threads; the second rank's second thread is slow."""
    ranks = [Rank(0), Rank(1)]
    for tick in range(1, until):
        now = tick / 2
        for number, one in enumerate(ranks):
            moving(one, now, (2 if number == 0 else 1) * GB)
        ranks[1].thread(0, bytes_op=int(0.8 * GB * now), bytes_ever=int(0.8 * GB * now))
        ranks[1].thread(1, bytes_op=int(0.2 * GB * now), bytes_ever=int(0.2 * GB * now))
        look(model, now, *ranks)
    return model


def test_the_pane_says_what_the_share_of_a_thread_is():
    screen = shown(two_ranks(Model()), (120, 30))
    assert "a thread's share: 0.75 / 2 = 0.38 GB/s" in screen
    assert re.search(r"▼ w1 .* 0\.20 .* 53%", screen)


@pytest.mark.parametrize("size", [(40, 8), (40, 10), (59, 15), (80, 24)], ids=str)
def test_without_a_pane_the_slowest_thread_of_the_slowest_rank_has_a_line(size):
    """Mutants: the line shows the first thread, or a thread of rank 0."""
    assert re.search(r"rank 1 w1[:,] 0\.20(/| of )0\.38( GB/s)? 53%", shown(two_ranks(Model()), size))


def test_at_64_ranks_each_has_its_threads_as_cells_and_a_word_says_their_scale():
    rows = [rank(number, threads=tuple(thread(index, 1.0, 8) for index in range(8))) for number in range(64)]
    rows[40] = replace(rows[40], threads=(*rows[40].threads[:6], thread(6, 0.3, 8), thread(7, 1.0, 8)), worst=9.0)
    for size, grouped in (((120, 30), "▆▆▆▂"), ((200, 60), "▆▆▆▆▆▆▂▆")):
        screen = paint(frame(rows, size)).plain
        assert f"r40 {grouped}" in screen
        assert len(set(re.findall(r"\br\d+ [▁-▇]{4}", screen))) > 30
        assert re.search("▆ (is a thread at its share, 3.00 / 8 = 0.38|a thread at 0.38) GB/s", screen)


def test_no_figure_is_cut_to_another_one():
    """A target of 0.75 must not appear as 0. Mutant: a label over the bars that does not fit is cut."""
    for size in range(1, 41):
        for target in (0.75e9, 0.375e9, 24e9, 123.4e9, 1e12):
            words = {0.75e9: "0.75", 0.375e9: "0.38", 24e9: "24", 123.4e9: "123.4", 1e12: "1000"}[target]
            head = cells.gauge_head(size, target, text.UNICODE).plain
            assert len(head) == size
            assert head.replace("│", " ").split() in (["0", words], ["0"], [words], []), (size, target)
    rows = [rank(number, threads=tuple(thread(index, 1.0, 8) for index in range(8))) for number in range(9)]
    for width in range(60, 200):
        foot = plain(table.block(frame(rows, (width, 40)), width, 20))[-1]
        assert "share" not in foot or "3.00 / 8 = 0.38 GB/s" in foot
        assert "a thread at 0" not in foot or "a thread at 0.38 GB/s" in foot


def test_the_averages_are_those_of_the_operation_that_the_row_shows():
    model = two_ranks(Model())
    ranks = [Rank(0).op(4 * GB, Phase.DONE, total=4 * GB, end=4.0)]
    (row,) = look(model, 6.0, *ranks).rows
    assert [one.average for one in row.threads] == [0.5 * GB, 0.5 * GB]
