"""The application: every key at several sizes, with a replayed recording and a live source; the clock is frozen."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import textual.app
from fastckpt_top import cli, config, targets, text
from fastckpt_top.app import TopApp
from fastckpt_top.model import Model
from fastckpt_top.replay import Replay
from fastckpt_top.rows import Sentence
from fastckpt_top.views import colours
from fastckpt_top.views.paint import STYLES
from fastckpt_top.views.state import Ui
from looking import Clock, demo

from harness import needs

CASES = [("live", size) for size in ((80, 24), (40, 8), (20, 4), (200, 60))]
CASES += [("replay", size) for size in ((80, 24), (60, 14), (160, 50))]
KEYS = [
    "question_mark", "x", "h", "escape", "f1", "space", "up", "down", "j", "k", "pageup", "pagedown", "home", "end",
    "g", "G", "left", "right", "s", "s", "enter", "enter", "t", "enter", "T", "e", "e", "2", "down", "end", "3",
    "down", "4", "pagedown", "1", "tab", "shift+tab", "slash", "6", "enter", "escape", "left_square_bracket",
    "right_square_bracket", "comma", "full_stop", "space", "space", "z", "z", "j", "c", "e", "e",
]  # fmt: skip


def drive(app, steps, size=(80, 24)):
    """Run an application without a terminal and return its exit code. Keys do not wait until the CPU is idle."""

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
    return app.canvas.painted().plain


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
        assert "rank 6 · pid 5345" in shown(app), "the threads of the slowest rank"
        for key, words in (
            ("2", "32 threads of 8 ranks"),
            ("3", "history"),
            ("4", "events"),
            ("1", "slowest first"),
            ("tab", "32 threads"),
            ("shift+tab", "slowest first"),
        ):
            await pilot.press(key)
            assert words in shown(app), key
        await pilot.press("question_mark")
        assert shown(app).startswith(" Keys\n")
        await pilot.press("down", "pagedown")
        assert app.ui.help, "these scroll"
        assert not shown(app).startswith(" Keys\n")
        await pilot.press("t")
        assert app.ui.view == "live", "any other key closes the help and does nothing else"
        assert not app.ui.help
        await pilot.press("t")
        assert shown(app).count(" w0 ") > 1
        await pilot.press("1", "down", "enter")
        assert "│ ◐    5 w0 " in shown(app).splitlines()[3], "the threads of the selected rank first"
        await pilot.press("enter")
        assert app.ui.view == "live"

    drive(app, steps, (120, 30))


def test_the_filter_is_typed_with_letters_that_are_keys_elsewhere():
    _, app = live()

    async def steps(pilot):
        await pilot.press("slash", *"threadsqt")
        assert app.is_running
        assert app.ui.filter == "threadsqt"
        assert app.ui.view == "live"
        await pilot.press("backspace", "backspace", "enter")
        assert app.ui.filter == "threads"
        assert "1 rank · slowest first" in shown(app)
        await pilot.press("escape")
        assert "8 ranks · slowest first" in shown(app)
        await pilot.press("t")
        assert app.ui.view == "threads"

    drive(app, steps, (100, 24))


def test_selection_follows_the_slowest_then_the_keys():
    _, app = live()

    async def steps(pilot):
        def order():
            return [row.key for row in app.ui.shown(app.session.model)]

        assert not app.ui.selected
        await pilot.press("down", "down", "up")
        assert app.ui.selected == order()[1]
        await pilot.press("G")
        assert app.ui.selected == order()[-1]
        await pilot.press("g")
        assert app.ui.selected == order()[0]
        await pilot.press("escape")
        assert not app.ui.selected

    drive(app, steps)


def test_sort_and_tier():
    _, app = live()

    async def steps(pilot):
        await pilot.press("s")
        assert app.ui.sort == "rank"
        assert "by rank" in shown(app).splitlines()[4], "the border names the order"
        await pilot.press("s", "T")
        assert app.ui.sort == "worst"
        assert "light 0.75" in shown(app)
        await pilot.press("T", "T")
        assert "high 3.00" in shown(app)

    drive(app, steps)


def test_the_tier_key_comes_back_to_the_target_that_was_asked_for():
    _, app = live(model=Model(targets.parse("0.05GB/s", "option")))

    async def steps(pilot):
        seen = []
        for _ in range(5):
            seen.append(app.session.model.node.target.name)
            await pilot.press("T")
        assert seen == ["custom", "light", "medium", "high", "custom"]

    drive(app, steps)


def test_a_theme_that_is_not_there_is_an_error_that_lists_those_that_are(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_interactive", lambda: True)
    assert cli.main(["--demo", "--theme", "nosuch"]) == 2
    assert "textual-light" in capsys.readouterr().err


@pytest.mark.parametrize("size", [(120, 30), (80, 24), (40, 8)], ids=str)
def test_space_freezes_the_whole_screen_and_the_model_goes_on(size):
    clock, app = live()

    async def steps(pilot):
        await pilot.press("space")
        before = shown(app)
        assert "FROZEN" in before
        looks = app.session.model.mono
        for _ in range(8):
            clock.now += 0.5
            app.look()
        assert shown(app) == before
        assert app.session.model.mono == looks + 4
        await pilot.press("3", "1")
        assert shown(app) == before, "looking at another view and back changes nothing"
        await pilot.press("space")
        after = shown(app)
        assert "FROZEN" not in after
        assert text.percent(app.session.model.main.progress) in after
        assert text.percent(app.session.model.main.progress) not in before

    drive(app, steps, size)


def test_zoom_and_graph():
    _, app = live()

    async def steps(pilot):
        assert "zoom 1 min" in shown(app)
        for minutes in (2, 5, 10, 1):
            await pilot.press("z")
            assert f"zoom {minutes} min" in shown(app)
        await pilot.press("e")
        assert "written" not in shown(app)
        assert "slowest first" in shown(app)
        await pilot.press("e")
        assert "written" in shown(app)

    drive(app, steps, (120, 30))


def two_jobs(model):
    """Move half of the ranks to another job, in which a rank has died."""
    (job,) = model.jobs
    sentence = Sentence("bad", ("rank 3 died: this checkpoint cannot be completed",))
    model.jobs = [job, replace(job, key="b", name="bert", pid=77, sentence=sentence, since=job.since + 1)]
    model.ops = [*model.ops, replace(model.ops[0], job_key="b", label="step-7", sentence=sentence)]
    model.rows = [replace(row, job_key="b") if (row.rank or 0) > 3 else row for row in model.rows]


def test_j_goes_from_job_to_job_and_trouble_elsewhere_is_said():
    _, app = live()
    two_jobs(app.session.model)

    async def steps(pilot):
        two_jobs(app.session.model)
        app.canvas.repaint()
        first = shown(app)
        assert "job 1 of 2 · j next" in first
        assert "step-11800" in first
        assert "▼ bert: rank 3 died: this checkpoint cannot be completed" in first
        assert "4 ranks · slowest first" in first
        await pilot.press("j")
        second = shown(app)
        assert "bert(77) · job 2 of 2 · j next" in second
        assert "step-7 " in second
        assert "▼ rank 3 died: this checkpoint cannot be completed" in second
        assert "bert: rank 3" not in second
        await pilot.press("j")
        assert "job 1 of 2" in shown(app)

    drive(app, steps, (120, 30))


def test_with_one_job_j_says_so():
    _, app = live()

    async def steps(pilot):
        await pilot.press("j")
        assert "there is one job" in shown(app)
        assert "j next" not in shown(app)

    drive(app, steps)


def colours_of(app):
    return {name: app.canvas._style_of(name, selected=False) for name in STYLES if name != "select"}


@pytest.mark.parametrize("theme", ["ansi-dark", "ansi-light"])
def test_sixteen_colours_tell_apart_what_must_be(theme):
    _, app = live(theme=theme)
    if theme not in app.available_themes:
        needs.missing(f"needs a textual that has the theme {theme}; this one has {', '.join(app.available_themes)}")

    async def steps(pilot):
        await pilot.pause()
        found = colours_of(app)
        chosen = [found[name].color.name for name in ("good", "low", "bad", "graph", "read", "target")]
        assert len(set(chosen)) == len(chosen)
        assert all(style.color.type.name in ("STANDARD", "DEFAULT") for style in found.values())
        assert all(style.bgcolor.is_default for style in found.values())

    drive(app, steps)


def luminance(color):
    parts = [value / 255 for value in color.triplet]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(factor * part for factor, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(style):
    low, high = sorted((luminance(style.color), luminance(style.bgcolor)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light", "nord", "solarized-light"])
def test_all_styles_can_be_read_on_dark_and_light(theme):
    _, app = live(theme=theme)

    async def steps(pilot):
        await pilot.pause()
        found = {name: contrast(style) for name, style in colours_of(app).items()}
        assert {name: ratio for name, ratio in found.items() if ratio < 3.0} == {}

    drive(app, steps)


def test_without_colours_bad_stands_out_more_than_good(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    _, app = live()

    async def steps(pilot):
        await pilot.pause()
        found = colours_of(app)
        assert found["bad"].bold
        assert not found["good"].bold
        assert contrast(found["bad"]) >= contrast(found["good"]) > contrast(found["dim"])
        await pilot.press("c")
        assert "NO_COLOR" in shown(app)

    drive(app, steps, (120, 30))


def test_c_goes_through_the_themes_and_says_which():
    _, app = live()

    async def steps(pilot):
        first = app.theme
        seen = []
        for _ in range(len(app.available_themes)):
            await pilot.press("c")
            await pilot.pause()
            assert f"theme {app.theme}" in shown(app)
            seen.append(app.theme)
        assert sorted(seen) == sorted(app.available_themes)
        assert seen[-1] == first

    drive(app, steps, (120, 30))


THEMES = ["textual-dark", "textual-light", "ansi-dark", "ansi-light", "nord"]


@pytest.mark.parametrize(
    ("themes", "environ", "sixteen", "wanted"),
    [
        (THEMES, {}, False, "textual-dark"),
        (THEMES, {"COLORFGBG": "0;15"}, False, "textual-light"),
        (THEMES, {"COLORFGBG": "15;0"}, True, "ansi-dark"),
        (THEMES, {"COLORFGBG": "0;default;15"}, True, "ansi-light"),
        (["textual-dark", "textual-ansi"], {}, True, "textual-ansi"),
        (["textual-dark"], {}, True, "textual-dark"),
        ([], {}, True, ""),
    ],
)
def test_the_theme_for_a_terminal(themes, environ, sixteen, wanted):
    assert colours.default(themes, environ, sixteen=sixteen) == wanted


def test_a_terminal_of_sixteen_colours_is_offered_only_those():
    assert colours.choices(THEMES, sixteen=True) == ["ansi-dark", "ansi-light"]
    assert colours.choices(["nord"], sixteen=True) == ["nord"]
    assert colours.choices(THEMES, sixteen=False) == sorted(THEMES)


# --- what is remembered ----------------------------------------------------------------------------------------------


def test_choices_are_remembered(tmp_path):
    file = tmp_path / "config" / "fastckpt" / "top.json"
    _, app = live(remembered=file)

    async def steps(pilot):
        assert not file.exists(), "the user has chosen nothing yet"
        await pilot.press("c", "3", "s", "z", "e")
        assert json.loads(file.read_text()) == {"theme": app.theme, "sort": "rank", "zoom": 120.0}

    drive(app, steps)
    assert [path.name for path in file.parent.iterdir()] == ["top.json"], "no temporary file is left"
    found, problem = config.load(file)
    assert found["zoom"] == 120.0
    assert not problem


def test_a_file_that_cannot_be_written_is_told_once_and_the_choice_holds(tmp_path):
    (tmp_path / "fastckpt").write_text("a file where the directory should be")
    _, app = live(remembered=tmp_path / "fastckpt" / "top.json")

    async def steps(pilot):
        await pilot.press("z")
        await pilot.pause()
        assert "cannot write" in shown(app)
        assert app.ui.zoom_s == 120.0
        await pilot.press("z")
        await pilot.pause()
        assert "cannot write" not in shown(app)

    drive(app, steps, (120, 30))


@pytest.mark.parametrize(
    ("content", "kept", "words"),
    [
        (b"", {}, "it is not JSON"),
        (b"\xff\xfe", {}, "it is not JSON"),
        (b"[" * 60_000, {}, "it is not JSON"),
        (b"[1]", {}, "no JSON object"),
        (b'{"theme": true, "zoom": 60}', {"zoom": 60}, "theme: value ignored"),
        (b'{"theme": NaN, "zoom": ["live"], "sort": "rank"}', {"sort": "rank"}, "theme, zoom: value ignored"),
        (b'{"later": 1, "view": "history", "sort": "rank"}', {"sort": "rank"}, ""),
    ],
)
def test_a_broken_file_is_told_of_and_the_rest_is_kept(tmp_path, content, kept, words):
    file = tmp_path / "top.json"
    file.write_bytes(content)
    found, problem = config.load(file)
    assert found == kept
    assert words in problem
    assert bool(words) == bool(problem)
    assert config.remember(file, "sort", "worst") == ""
    assert config.load(file) == ({**kept, "sort": "worst"}, problem if "value" not in problem and kept else "")


def test_the_file_stands_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config.path() == tmp_path / "fastckpt" / "top.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert config.path() == Path("~/.config/fastckpt/top.json").expanduser()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), ("live", "rank", 0.5, "gruvbox", 300.0)),
        (
            ("--view", "events", "--sort", "worst", "-d", "0.2", "--theme", "dracula"),
            ("events", "worst", 0.2, "dracula", 300.0),
        ),
        (("--no-config",), ("live", "worst", 0.5, "", 0.0)),
    ],
)
def test_options_come_before_what_is_remembered(options, wanted, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    kept = {"view": "history", "sort": "rank", "theme": "gruvbox", "zoom": 300.0}
    (tmp_path / "fastckpt").mkdir()
    (tmp_path / "fastckpt" / "top.json").write_text(json.dumps(kept))
    monkeypatch.setattr(cli, "_interactive", lambda: True)
    seen = []

    def run(self, **_):
        seen.append((self.ui.view, self.ui.sort, self.ui.interval, self._theme_wanted, self.ui.zoom_s))
        assert (self._remembered is None) == ("--no-config" in options)

    monkeypatch.setattr(TopApp, "run", run)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["--demo", *options]) == 0
    assert seen == [wanted]
    # Mutant: the handler stays installed, so that a later SIGTERM ends the calling program like Ctrl-C.
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_remembered_theme_that_is_gone_is_ignored(tmp_path):
    _, app = live(theme="nosuch")

    async def steps(pilot):
        await pilot.pause()
        assert app.theme == "textual-dark"

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
        await pilot.press("space")
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
        assert await found(pilot, tmp_path, "*.svg")

    async def found(pilot, place, pattern):
        for _ in range(600):  # one of Textual's threads writes the file
            if files := [file for file in place.glob(pattern) if file.read_text().endswith("</svg>\n")]:
                return files
            await pilot.pause(0.05)
        return []

    drive(app, steps, (120, 30))
    (recorded,) = tmp_path.glob("*.jsonl.gz")
    assert recorded.stat().st_mode & 0o777 == 0o600
    assert len(Replay(str(recorded)).recording) == 4
    assert "step-11800" in next(tmp_path.glob("*.svg")).read_text()


def test_a_full_disk_ends_the_recording_and_not_the_monitor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clock, app = live()

    async def steps(pilot):
        await pilot.press("r")
        monkeypatch.setattr(
            app.recorder, "write", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        clock.now += 0.5
        app.look()
        assert "No space left" in shown(app)
        assert app.recorder is None
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
