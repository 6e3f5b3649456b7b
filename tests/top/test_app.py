"""The application: every key at several sizes, with a replayed recording and a live source; the clock is frozen."""

from __future__ import annotations

import asyncio
import json

import pytest
import textual.app
from fastckpt_top import cli, targets, text
from fastckpt_top.app import TopApp
from fastckpt_top.model import Model
from fastckpt_top.replay import Replay
from fastckpt_top.views.state import Ui

from conftest import Clock, demo
from harness import needs

CASES = [("live", size) for size in ((80, 24), (40, 8), (20, 4), (200, 60))]
CASES += [("replay", size) for size in ((80, 24), (60, 14), (160, 50))]
KEYS = [
    "question_mark", "x", "h", "escape", "f1", "space", "up", "down", "j", "k", "pageup", "pagedown", "home", "end",
    "g", "G", "left", "right", "less_than_sign", "greater_than_sign", "s", "S", "enter", "t", "enter", "t", "o", "o",
    "a", "a", "a", "plus", "minus", "T", "e", "e", "2", "down", "end", "3", "down", "4", "pagedown", "1", "tab",
    "shift+tab", "slash", "6", "enter", "escape", "left_square_bracket", "right_square_bracket", "comma", "full_stop",
    "space", "space",
]  # fmt: skip


def drive(app, steps, size=(80, 24)):
    """Run an application without a terminal and return its exit code. Keys do not wait for the processor to rest."""

    async def breathe(*_):
        for _ in range(3):
            await asyncio.sleep(0.001)

    waits, textual.app.wait_for_idle = textual.app.wait_for_idle, breathe
    try:
        return _drive(app, steps, size)
    finally:
        textual.app.wait_for_idle = waits


def _drive(app, steps, size):
    async def go():
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await steps(pilot)
        return app.return_code

    return asyncio.run(go())


def live(begin=9.0, model=None, **values):
    clock, session = demo(begin, model)
    for tick in range(8):
        clock.now = 100.0 + tick / 2
        session.tick()
    return clock, TopApp(session, Ui(), clock=clock, **values)


def replayed(recording, tick=18):
    clock = Clock()
    session = Replay(str(recording), now=clock)
    session.step(tick)
    return clock, TopApp(session, Ui(), clock=clock)


def shown(app):
    return app.canvas.screen_text


@pytest.mark.parametrize(("kind", "size"), CASES, ids=[f"{kind}-{size[0]}x{size[1]}" for kind, size in CASES])
def test_every_key_at_every_size(recording, kind, size):
    clock, app = live() if kind == "live" else replayed(recording)

    async def steps(pilot):
        for key in KEYS:
            await pilot.press(key)
            clock.now += 0.25
            app.look()
            lines = app.canvas.painted().lines
            assert {line.width for line in lines} == {size[0]}, key
        assert not app.ui.help
        await pilot.press("q")

    assert drive(app, steps, size) in (0, None)


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
def test_keys_that_quit(key):
    _, app = live()

    async def steps(pilot):
        await pilot.press(key)
        await pilot.pause()
        assert not app.is_running

    assert drive(app, steps) in (0, None)


def test_resizing_changes_what_is_shown():
    _, app = live()

    async def steps(pilot):
        for size in ((40, 8), (20, 4), (160, 50), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            screen = app.canvas.painted()
            assert (len(screen.lines), screen.lines[0].width) == (size[1], size[0])

    drive(app, steps)


def test_views_help_and_threads():
    _, app = live()

    async def steps(pilot):
        assert "└w0" in shown(app), "the selected rank's threads"
        for key, words in (
            ("2", "THREADS"),
            ("3", "HISTORY"),
            ("4", "EVENTS"),
            ("1", "of target"),
            ("tab", "THREADS"),
            ("shift+tab", "RANK GPU"),
        ):
            await pilot.press(key)
            assert words in shown(app) or words.replace("of ", "") in shown(app), key
        await pilot.press("question_mark")
        assert "keys" in shown(app).splitlines()[0]
        await pilot.press("t")
        assert not app.ui.all_threads, "any key closes the help and does nothing else"
        await pilot.press("t")
        assert shown(app).count("└w0") > 1
        await pilot.press("t", "down", "enter")
        assert app.ui.expanded == {app.session.model.rows[1].proc_key}

    drive(app, steps)


def test_the_filter_is_typed_with_letters_that_are_keys_elsewhere():
    _, app = live()

    async def steps(pilot):
        await pilot.press("slash", *"threadsqt")
        assert app.is_running
        assert app.ui.filter == "threadsqt"
        assert not app.ui.all_threads
        await pilot.press("backspace", "backspace", "enter")
        assert app.ui.filter == "threads"
        assert "5345" in shown(app)
        assert "5327" not in shown(app)
        await pilot.press("escape")
        assert "5327" in shown(app)
        await pilot.press("t")
        assert app.ui.all_threads

    drive(app, steps, (100, 24))


def test_selection_follows_the_keys_and_the_mouse():
    _, app = live()

    async def steps(pilot):
        rows = app.session.model.rows
        await pilot.press("j", "down", "k")
        assert app.ui.selected == rows[1].key
        await pilot.press("G")
        assert app.ui.selected == rows[-1].key
        await pilot.press("g")
        assert app.ui.selected == rows[0].key
        y = next(y for y, key in app.canvas.painted().rows.items() if key == rows[3].key)
        await pilot.click(offset=(10, y))
        assert app.ui.selected == rows[3].key
        y, x, *_ = next(zone for zone in app.canvas.painted().actions if zone[3] == "help")
        await pilot.click(offset=(x + 1, y))
        await pilot.pause()
        assert app.ui.help

    drive(app, steps)


def test_sort_reverse_tier_mode_and_interval():
    _, app = live()

    async def steps(pilot):
        await pilot.press("s")
        assert app.ui.sort == "rate"
        await pilot.press("left", "S")
        assert (app.ui.sort, app.ui.reverse) == ("rank", True)
        await pilot.press("T")
        assert "light 0.75" in shown(app)
        await pilot.press("T", "T")
        assert "high 3.00" in shown(app)
        await pilot.press("S")
        assert "sorted by rank" in shown(app)
        await pilot.press("a")
        assert " avg " in shown(app)
        await pilot.press("plus")
        assert app.ui.interval == 1.0
        await pilot.press("minus", "minus")
        assert app.ui.interval == 0.25

    drive(app, steps)


def test_the_tier_key_comes_back_to_the_target_that_was_asked_for():
    _, app = live(model=Model(targets.parse("0.05", "option")))

    async def steps(pilot):
        seen = []
        for _ in range(5):
            seen.append(app.session.model.node.target.name)
            await pilot.press("T")
        assert seen == ["custom", "light", "medium", "high", "custom"]

    drive(app, steps)


def test_only_running_ranks_are_said_to_be_only_those():
    _, app = live()

    async def steps(pilot):
        assert "running only" not in shown(app)
        await pilot.press("o")
        await pilot.pause()
        assert "running only" in shown(app).splitlines()[0]

    drive(app, steps, size=(120, 30))


def test_a_theme_that_is_not_there_is_an_error_that_lists_those_that_are(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_interactive", lambda: True)
    assert cli.main(["--demo", "--theme", "nosuch"]) == 2
    assert "textual-light" in capsys.readouterr().err


def test_pause_lets_the_table_stand_and_the_header_live():
    clock, app = live()

    async def steps(pilot):
        before = shown(app).splitlines()
        await pilot.press("space")
        assert "PAUSED" in shown(app)
        clock.now += 4
        app.look()
        after = shown(app).splitlines()
        assert after[8] == before[8], "the table"
        assert after[2] != before[2], "the header"
        await pilot.press("space")
        assert shown(app).splitlines()[8] != before[8]

    drive(app, steps)


def test_time_goes_on_with_the_clock_and_not_without():
    clock, app = live()

    async def steps(pilot):
        before = shown(app)
        await pilot.pause(0.3)
        assert shown(app) == before, "the clock is frozen"
        clock.now += 2
        await pilot.pause(0.3)
        assert shown(app) != before

    drive(app, steps)


def test_replay_keys(recording):
    clock, app = replayed(recording, 18)
    replay = app.session

    async def steps(pilot):
        await pilot.press("right")
        assert replay.index == 19
        await pilot.press("left", "left")
        assert replay.index == 17
        await pilot.press("right_square_bracket")
        assert replay.index == 37
        await pilot.press("left_square_bracket")
        assert replay.index == 17
        await pilot.press("full_stop", "full_stop", "comma")
        assert replay.speed == 2.0
        await pilot.press("space")
        assert replay.playing
        clock.now += 1.0
        app.look()
        assert replay.index == 21, "two seconds at double speed"
        await pilot.press("space", "colon", *"0:05", "enter")
        assert replay.index == 10
        await pilot.press("colon", *"soon", "enter")
        assert "no time: soon" in shown(app)
        await pilot.press("end")
        assert replay.index == len(replay.recording) - 1
        await pilot.press("home")
        assert replay.index == 0
        assert "00:00/00:5" in shown(app)

    drive(app, steps, (100, 24))


def test_recording_and_screenshots_go_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clock, app = live()

    async def steps(pilot):
        await pilot.press("r")
        assert "REC" in shown(app).splitlines()[0]
        for _ in range(4):
            clock.now += 0.5
            app.look()
        await pilot.press("r")
        assert "recorded 4 ticks" in shown(app)
        await pilot.press("f12")
        assert "saved fastckpt-top-" in shown(app)

    drive(app, steps, (120, 30))
    (recorded,) = tmp_path.glob("*.jsonl.gz")
    assert recorded.stat().st_mode & 0o777 == 0o600
    assert len(Replay(str(recorded)).recording) == 4
    assert "<svg" in next(tmp_path.glob("*.svg")).read_text()
    assert "step-11800" in next(tmp_path.glob("*.txt")).read_text()


def test_a_full_disk_ends_the_recording_and_not_the_monitor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clock, app = live()

    async def steps(pilot):
        await pilot.press("r")
        monkeypatch.setattr(
            app._recorder, "write", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        clock.now += 0.5
        app.look()
        assert "No space left" in shown(app)
        assert app._recorder is None
        clock.now += 0.5
        app.look()

    drive(app, steps)


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light", "ansi-dark", "ansi-light", "nord"])
def test_light_and_dark(theme):
    _, app = live(theme=theme)
    if theme not in app.available_themes:
        needs.missing(f"needs a textual that has the theme {theme}; this one has {', '.join(app.available_themes)}")

    async def steps(pilot):
        await pilot.pause()
        assert app.theme == theme
        screen = app.canvas.painted()
        y = next(y for y, line in enumerate(screen.lines) if line.selected)
        for line in (app.canvas.render_line(y), app.canvas.render_line(y + 1)):
            for segment in line:
                style = segment.style
                assert style.color != style.bgcolor or style.color.is_default, segment
        if theme.startswith("textual"):
            colors = [segment.style.color.triplet for segment in app.canvas.render_line(y) if segment.text.strip()]
            ground = next(iter(app.canvas.render_line(y))).style.bgcolor.triplet
            assert all(sum(abs(a - b) for a, b in zip(color, ground, strict=True)) > 90 for color in colors)

    drive(app, steps)


def test_no_color_has_no_color(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    _, app = live()

    async def steps(pilot):
        await pilot.press("t", "3", "1", "question_mark", "x")
        svg = app.export_screenshot()
        assert "step-11800" in svg

    drive(app, steps, (160, 50))


def test_ascii_glyphs():
    _, app = live(glyphs=text.ASCII)

    async def steps(pilot):
        await pilot.press("t")
        assert shown(app).isascii()

    drive(app, steps, (160, 50))


def test_a_duration_ends_it():
    _, app = live(duration=0.1)

    async def steps(pilot):
        await pilot.pause(0.4)
        assert not app.is_running

    assert drive(app, steps) in (0, None)


def test_a_broken_recording_ends_it_with_4(recording, tmp_path):
    import gzip

    lines = gzip.decompress(recording.read_bytes()).decode().splitlines(keepends=True)
    tick = json.loads(lines[20])
    tick["procs"][0]["operations"] = [[1]]
    lines[20] = json.dumps(tick) + "\n"
    path = tmp_path / "broken.jsonl"
    path.write_text("".join(lines))
    clock = Clock()
    app = TopApp(Replay(str(path), now=clock), Ui(), clock=clock)

    async def steps(pilot):
        clock.now += 30
        app.look()
        await pilot.pause()

    assert drive(app, steps) == 4
