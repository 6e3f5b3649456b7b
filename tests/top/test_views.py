"""The painted screen, as text.

FASTCKPT_TOP_GOLDEN=write writes the golden screens anew. Inspect them before you commit them.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
from fastckpt_top import text
from fastckpt_top.model import Model
from fastckpt_top.replay import Replay
from fastckpt_top.snapshot import Snapshot
from fastckpt_top.views.live import paint
from fastckpt_top.views.paint import STYLES, Frame
from fastckpt_top.views.state import VIEWS, Ui
from looking import demo

GOLDEN = Path(__file__).parent / "golden"
SIZES = [(80, 24), (60, 16), (60, 14), (40, 8), (20, 4), (10, 2), (160, 50), (200, 60), (30, 1), (120, 30)]
MOMENTS = {"begin": 0.0, "save": 9.0, "fsync": 14.5, "idle": 30.0, "load": 46.0}
"""Seconds into the recording."""


@pytest.fixture(scope="module")
def replay(recording):
    made = Replay(str(recording))
    made.playing = False
    return made


def at(replay, seconds):
    times = replay.recording.times
    step_to(replay, max(index for index, time in enumerate(times) if time - times[0] <= seconds))
    return replay.model


def step_to(replay, tick):
    replay.step(tick - replay.index)


def screen(model, size, ui=None, glyphs=text.UNICODE, **values):
    return paint(Frame(model, ui or Ui(), glyphs, *size, **values))


def compare(name, shown):
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("FASTCKPT_TOP_GOLDEN") == "write":
        path.write_text(shown, "utf-8")
    assert shown == path.read_text("utf-8")


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_live_view_while_saving(replay, size):
    compare(f"live-{size[0]}x{size[1]}", screen(at(replay, MOMENTS["save"]), size).plain)


@pytest.mark.parametrize("moment", ["fsync", "idle", "load"])
def test_the_live_view_at_other_moments(replay, moment):
    compare(f"live-{moment}", screen(at(replay, MOMENTS[moment]), (80, 24)).plain)


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "live"])
@pytest.mark.parametrize("size", [(80, 24), (130, 30)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_other_views(replay, view, size):
    compare(f"{view}-{size[0]}x{size[1]}", screen(at(replay, MOMENTS["load"]), size, Ui(view=view)).plain)


def test_ascii_is_ascii(replay):
    for size, view in itertools.product(SIZES, VIEWS):
        shown = screen(at(replay, MOMENTS["save"]), size, Ui(view=view), text.ASCII).plain
        assert shown.isascii()
    compare("ascii-80x24", screen(at(replay, MOMENTS["save"]), (80, 24), glyphs=text.ASCII).plain)


def test_help(replay):
    compare("help-80x24", screen(at(replay, 0.0), (80, 24), Ui(help=True)).plain)
    compare(
        "help-replay-100x30",
        screen(at(replay, 0.0), (100, 30), Ui(help=True), live=False, status=replay.status()).plain,
    )


@pytest.mark.parametrize("moment", [*MOMENTS, "empty"])
def test_each_line_is_as_wide_as_the_screen_at_every_size(replay, moment):
    model = Model() if moment == "empty" else at(replay, MOMENTS[moment])
    widths = [1, 10, 19, 20, 31, 32, 45, 46, 59, 60, 63, 67, 68, 80, 103, 104, 119, 120, 160, 200, 300]
    for width, height in itertools.product(widths, (1, 2, 5, 6, 9, 10, 15, 16, 24, 60)):
        for ui in (
            Ui(),
            Ui(graph=False),
            Ui(view=VIEWS[1 + (width + height) % 3]),
            Ui(help=True),
        ):
            shown = screen(model, (width, height), ui)
            assert len(shown.lines) == height
            assert {line.width for line in shown.lines} == {width}
            assert all(text.width(line.plain) == width for line in shown.lines)
            assert {name for line in shown.lines for _, name in line.parts} <= set(STYLES)


def test_the_selected_row_stays_on_the_screen(replay):
    model = at(replay, MOMENTS["save"])
    ui = Ui()
    for row in model.rows:
        ui.selected = row.key
        shown = screen(model, (80, 14), ui)
        assert any(line.selected for line in shown.lines) or f">r{row.rank} " in shown.plain, row.name


def test_sorting_and_filters(replay):
    model = at(replay, MOMENTS["save"])

    def ranks(**values):
        return [row.rank for row in Ui(**values).rows(model.rows)]

    assert ranks()[:2] == [6, 5], "the worst rank is first"
    assert ranks(sort="rank") == list(range(8))
    assert ranks(filter="6") == [6]
    assert ranks(filter="threads") == [6]
    assert sorted(ranks(filter="LLAMA")) == list(range(8))
    assert ranks(filter="nobody") == []
    assert "no rank matches 'nobody'" in screen(model, (80, 24), Ui(filter="nobody")).plain


def test_without_a_process_it_says_where_it_looked_and_what_to_try():
    model = Model()
    model.update(Snapshot(0.0, 0.0, "host", (), (("/x/1-1.seg", "no segment"),), ("/dev/shm/fastckpt-7",)))
    shown = screen(model, (80, 24)).plain
    for words in (
        "No fastckpt process yet",
        "/dev/shm/fastckpt-7",
        "/x/1-1.seg: no segment",
        "FASTCKPT_TOP_DIR",
        "--demo",
    ):
        assert words in shown
    assert "fastckpt process" in screen(model, (40, 1)).plain


def test_what_a_process_writes_is_never_markup_or_control():
    clock, session = demo(9.0)
    clock.now += 1
    snapshot = session.source.poll()
    procs = []
    for proc in snapshot.procs:
        ops = tuple(replace(op, label="[red]日本語日本語日本語[/]", path="[@click=quit]/x") for op in proc.operations)
        procs.append(replace(proc, operations=ops, header=replace(proc.header, job="[b]" * 20)))
    model = Model()
    model.update(replace(snapshot, procs=tuple(procs), host="[blink]"))
    for size in ((80, 24), (160, 50), (61, 20)):
        shown = screen(model, size)
        assert {text.width(line.plain) for line in shown.lines} == {size[0]}
    assert "[red]日本語" in screen(model, (160, 50)).plain


def test_a_recording_replays_to_the_same_picture(recording):
    clock, session = demo()
    replay = Replay(str(recording))
    replay.playing = False
    compared = 0
    for tick in range(104):
        clock.now = 100.0 + tick / 2
        session.tick()
        model = session.model
        if model.mono not in replay.recording.times:
            continue  # an idle tick, which is not recorded
        step_to(replay, replay.recording.times.index(model.mono))
        for view in VIEWS:
            ours, theirs = (screen(m, (160, 50), Ui(view=view)).plain for m in (model, replay.model))
            assert theirs == ours, f"tick {tick}, {view}"
        compared += 1
    assert compared > 60


def test_going_back_shows_what_was_shown(recording):
    replay = Replay(str(recording))
    replay.playing = False
    count = len(replay.recording)
    forward = []
    for tick in range(count):
        step_to(replay, tick)
        forward.append(screen(replay.model, (120, 40)).plain)
    for tick in (count - 2, 40, 39, 3, 0):
        step_to(replay, tick)
        assert screen(replay.model, (120, 40)).plain == forward[tick]


def test_shares_durations_and_counts_keep_to_their_cells():
    assert [text.percent(share) for share in (0.5, 9.999, 10.0, 45.28)] == ["50%", "999%", ">999%", ">999%"]
    assert [text.brief(seconds) for seconds in (0.0, 0.0042, 1.25, 61.04)] == ["0.000", "0.004", "1.25", "61.0"]
    assert [text.count(number, "GPU") for number in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
