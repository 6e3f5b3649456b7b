"""The frame of the screen: layout, the box at the top, the graph, the last line, help, colours."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
from fastckpt_top import text
from fastckpt_top.keys import KEYS, REPLAY_KEYS
from fastckpt_top.model import Model
from fastckpt_top.rows import Event, Sentence, Verdict, share
from fastckpt_top.views import cells, footer, graph, help, history, operation
from fastckpt_top.views.live import paint, share_out
from fastckpt_top.views.paint import STYLES, VERDICT_STYLES, Frame
from fastckpt_top.views.state import SORTS, VIEWS, Ui
from hypothesis import given, settings
from hypothesis import strategies as st
from looking import demo


def looks():
    """The demonstration's model after each look: a save, a pause, a load."""
    clock, session = demo()
    for tick in range(110):
        clock.now = 100.0 + tick / 2
        session.tick()
        yield session.model


@pytest.fixture(scope="module")
def saving():
    return next(itertools.islice(looks(), 18, None))


def frame(model, size, ui=None, glyphs=text.UNICODE, **values):
    return Frame(model, ui or Ui(), glyphs, *size, **values)


def said(model, sentence):
    """The model with this sentence in its operations."""
    kept = Model()
    kept.__dict__.update(model.__dict__)
    kept.ops = [replace(model.ops[0], sentence=sentence), *model.ops[1:]]
    return kept


# --- the box at the top --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(40, 8), (60, 16), (80, 24), (120, 30), (200, 60)], ids=str)
def test_nothing_moves_from_one_look_to_the_next(size):
    places = {}
    for model in looks():
        if model.main is None or not model.main.running:
            continue
        lines = operation.lines(frame(model, size), size[0] - 4)
        assert len(lines) == 3, "the box has three lines in each state"
        for number, line in enumerate(lines[:2]):
            for word in ("done", "speed", "of", "GB/s", "now", "peak", "elapsed", "ETA", "%", "│", "GB "):
                found = line.plain.find(word)
                if found >= 0:
                    places.setdefault((number, word), set()).add(found)
    assert (1, "%") in places
    assert {key: len(found) for key, found in places.items() if len(found) > 1} == {}
    bars = {word: next(iter(found)) for (_, word), found in places.items() if word == "%"}
    assert bars, "both percentages end in one column"
    assert places[0, "%"] == places[1, "%"]


def test_both_bars_stand_in_the_same_columns_and_the_target_at_four_fifths(saving):
    for width in (40, 60, 76, 116, 196):
        done, speed = operation.lines(frame(saving, (width + 4, 30)), width)[:2]
        spans = [re.search(r"[█▏▎▍▌▋▊▉▆░│]{6,}", line.plain).span() for line in (done, speed)]
        assert spans[0] == spans[1]
        first, last = spans[1]
        assert speed.plain.index("│") - first == round((last - first) / 1.25)
        assert done.plain.count("█") == int(saving.main.progress * (last - first))


def test_the_end_of_a_save_with_one_rank_left_is_not_red():
    model = next(
        model
        for model in looks()
        if model.main.kind == "load" and model.main.rate is not None and model.main.rate < 0.4 * model.main.target
    )
    assert model.main.verdict in (Verdict.GOOD, Verdict.LOW), "the verdict is about the average"
    speed = operation.lines(frame(model, (120, 30)), 116)[1]
    assert "bad" not in {style for _, style in speed.parts}
    now = speed.plain.split("now")[1].split()[0]
    assert now == text.rate(model.main.rate)
    assert next(style for content, style in speed.parts if content.strip() == now) == "text", "the rate is plain"


def test_mark_colour_word_bar_and_percentage_judge_the_average(saving):
    for factor in (0.5, 0.79999, 0.8, 0.99, 1.0, 1.3):
        op = saving.ops[0]
        from fastckpt_top.rows import judge

        average = factor * op.target
        verdict = judge(average, op.target)
        model = said(saving, None)
        model.ops = [replace(op, average=average, rate=0.01 * op.target, verdict=verdict)]
        speed = operation.lines(frame(model, (120, 30)), 116)[1]
        styles = {content.strip(): style for content, style in speed.parts if content.strip()}
        wanted = VERDICT_STYLES[verdict]
        assert styles[text.percent(share(average, op.target))] == wanted
        mark = {"good": "●", "low": "◐", "bad": "▼"}[wanted]
        assert styles[f"{mark} {operation.VERDICT_WORDS[verdict]}"] == wanted
        assert next(style for content, style in speed.parts if "▆" in content) == wanted


def test_the_sentence_takes_the_longest_wording_that_fits_and_says_its_level(saving):
    sentence = Sentence("bad", ("Held back by rank 6: 1.76 of 3.00 GB/s, waits for the disk 98 %", "rank 6: disk 98 %"))
    full = len(sentence.words[0]) + 2
    for width, wanted in ((120, sentence.words[0]), (full, sentence.words[0]), (full - 1, sentence.words[1])):
        line = operation.lines(frame(said(saving, sentence), (width, 24)), width)[2]
        assert line.plain.rstrip() == f"▼ {wanted}"
        assert line.parts[0][1] == "bad"
    for level, mark in (("warn", "!"), ("info", "·")):
        line = operation.lines(frame(said(saving, replace(sentence, level=level)), (80, 24)), 76)[2]
        assert line.plain.startswith(f"{mark} ")
    for size in ((40, 8), (40, 4), (40, 3)):
        assert "▼ rank 6: disk 98 %" in paint(frame(said(saving, sentence), size)).plain
    failed = said(saving, sentence)
    failed.ops[0] = replace(failed.ops[0], failed=1, verdict=Verdict.FAILED)
    lines = paint(frame(failed, (40, 8))).plain.splitlines()
    assert (lines[1].split()[-2], lines[2][0]) == ("x", "x"), "both lines have the same mark"


@pytest.mark.parametrize("high", [4, 5, 12])
def test_a_narrow_screen_says_who_and_why_in_two_lines(saving, high):
    for words, wanted in (
        (("Held back by rank 6: 1.76/3.00, disk 98 %", "rank 6: 1.76/3.00, disk, threads!"), "disk, threads!"),
        (("held at 0.20 of 0.48 GB/s by bandwidth_limit", "held at 0.20 by bandwidth_limit"), "bandwidth_limit"),
        (("one two three four five six seven eight nine", "one two three four five six"), "five six"),
        (("rank 6",), ""),
        (("nothing of this fits into two lines of that screen",), "fits into two lines…"),
    ):
        lines = paint(frame(said(saving, Sentence("warn", words)), (20, high))).plain.splitlines()
        at = next(number for number, line in enumerate(lines) if line.startswith("! "))
        assert lines[at + 1] == wanted
        assert lines[at].removeprefix("! ") + " " + wanted.removesuffix("…") in " ".join(words) + " "


def test_the_border_says_only_what_the_sentence_does_not(saving):
    def border(level, words, *events):
        model = said(saving, Sentence(level, (words,)))
        model._events = Model()._events
        model._events.kept.extend(Event(model.real - 1, *event) for event in events)
        return paint(frame(model, (120, 30))).lines[4].plain

    fell, died = ("warn", "rank 6 fell back to threads: EPERM"), ("bad", "rank 2 died")
    assert "rank 6 fell back" in border("info", "on target", fell)
    assert "rank 6 fell back" not in border("warn", "held back by rank 6", fell)
    assert "rank 6 fell back" not in border("info", "rank 6 runs threads, not io_uring (EPERM)", fell)
    assert "rank 2 died" in border("warn", "held back by rank 6", died, fell)
    assert "rank 2 died" not in border("bad", "rank 2 died: this checkpoint cannot be completed", died)


def test_the_target_in_the_border_is_that_of_the_operation(saving):
    model = said(saving, None)
    model.jobs = [replace(model.jobs[0], gpus=7, alive=7)]
    assert "3.00 GB/s \N{MULTIPLICATION SIGN} 8 GPUs" in paint(frame(model, (120, 30))).lines[0].plain, (
        "the target is 24.00 GB/s in total"
    )


def test_the_history_says_an_event_in_two_lines_where_one_is_too_short(saving):
    text_of = "rank 6 fell back to threads: EPERM"
    event = replace(saving.events[1], text=text_of)
    for width, wanted in ((60, 1), (34, 2), (30, 2)):
        lines = [line.plain for line in history.event_lines(frame(saving, (120, 30)), event, width, 2)]
        assert len(lines) == wanted
        assert {len(line) for line in lines} == {width}
        assert text_of in " ".join(" ".join(lines).split())


SMALL = [((20, 4), ["WRITE  60% ETA 00:15", "21.55/24.00  89% ◐"]), ((10, 2), [" 60% 00:15", "21.55  89%"])]


@pytest.mark.parametrize(("size", "wanted"), SMALL)
def test_small_screens_say_how_far_how_long_still_and_how_fast(saving, size, wanted):
    assert paint(frame(saving, size)).plain.splitlines()[:2] == wanted


def test_what_matters_least_leaves_the_title_first(saving):
    seen = []
    for width in range(20, 100):
        shown = operation.title(frame(saving, (width, 14))).plain
        seen.append(tuple(word in shown for word in ("live", "gpu07", "GB/s", "12:04")))
    assert seen == sorted(seen)
    assert all(list(words) == sorted(words, reverse=True) for words in seen)


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (120, 30)], ids=str)
def test_a_border_stays_whole_whatever_the_names_are(saving, size):
    model = said(saving, None)
    model.node = replace(saving.node, host="h" * 150)
    lines = paint(frame(model, size)).plain.splitlines()
    assert lines[0][0] + lines[0][-1] == "╭╮"
    assert len(lines[0]) == size[0]
    assert "h" * 20 in lines[0]
    assert {line[0] + line[-1] for line in lines[:-1]} == {"╭╮", "││", "╰╯"}


# --- the graph -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("height", [1, 2, 3, 4, 5, 8, 20, 50])
@pytest.mark.parametrize("need", [4e6, 0.22e9, 0.999e9, 3.3e9, 25e9, 26.4e9, 100e9, 12345e9])
def test_the_axis_is_linear_in_round_numbers(need, height):
    axis = graph.axis(need, height)
    known = [(height - line, float(label) * 1e9) for line, label in enumerate(axis.labels) if label]
    assert known, "at least one label beside the 0"
    for edge, value in known:
        assert value == pytest.approx(axis.top * edge / height), "a label is the value at the upper edge of its line"
    assert need <= axis.top * (1 + 1e-9) <= 2.5 * need
    step = min(value for _, value in known)
    few = ("1.5", "3.0", "4.0", "6.0", "8.0")
    assert f"{step:.1e}"[:3] in ("1.0", "2.0", "2.5", "5.0", *few)
    assert len(known) >= min(height, 2), "one label at the top, and one in the middle"
    assert height > 4 or axis.labels[0]
    assert len({len(label.partition(".")[2]) for label in axis.labels if label}) == 1, "all have equally many decimals"
    assert max(map(len, axis.labels)) <= 6


def drawn(model, written, read, target, width, height, glyphs=text.UNICODE):
    lines = graph.plot(frame(model, (80, 24), glyphs=glyphs), written, read, target, width, height)
    return [line.plain[7:] for line in lines]


def test_the_line_of_the_target_is_at_its_true_height(saving):
    top = graph.axis(1.04 * 25e9, 8).top
    for target in (20e9, 22.2e9, 24e9, 25e9):
        lines = drawn(saving, [], [], target, 10, 8)
        top = graph.axis(1.04 * target, 8).top
        (row,) = [row for row, line in enumerate(lines) if line.strip()]
        quarter = text.UNICODE.level.index(lines[row][0])
        low = (7 - row + quarter / 4) / 8 * top
        assert low - 1e-3 <= target <= low + top / 32 + 1e-3


def test_bars_end_where_their_value_is(saving):
    lines = drawn(saving, [10e9, 20e9, 15e9], [], 0.0, 3, 4)
    top = graph.axis(20e9, 4).top
    for column, value in enumerate((10e9, 20e9, 15e9)):
        eighths = sum(text.UNICODE.spark.index(line[column]) for line in lines)
        assert eighths / 32 * top == pytest.approx(value, abs=top / 64)


def test_the_newest_stands_at_the_right(saving):
    assert drawn(saving, [5e9], [], 0.0, 5, 2) == ["    █", "    █"]
    assert drawn(saving, [5e9] * 9, [], 0.0, 5, 1) == ["█████"]


@pytest.mark.parametrize("glyphs", [text.UNICODE, text.ASCII])
def test_written_and_read_are_told_apart_without_colour_and_both_tops_are_seen(saving, glyphs):
    assert not set(glyphs.spark[1:]) & set(glyphs.dotted[1:])
    assert not set(glyphs.level) & set(glyphs.spark[1:] + glyphs.dotted[1:])
    lines = drawn(saving, [4e9, 20e9], [20e9, 4e9], 0.0, 2, 10, glyphs)
    first, second = ([line[column] for line in lines if line[column] != " "] for column in (0, 1))
    assert set(first[:-2]) <= set(glyphs.dotted)
    assert first[-1] == glyphs.spark[-1]
    assert second[-1] == glyphs.dotted[-1]
    assert second[0] in glyphs.spark


def test_the_axis_of_time_says_how_long_ago(saving):
    for zoom, width in itertools.product((0.0, *graph.ZOOMS), (60, 80, 120, 200)):
        shown = graph.block(frame(saving, (width, 24), Ui(zoom_s=zoom)), width, 6)
        axis = shown[-2].plain[2:-2]
        count = len(axis) - 7
        assert axis.endswith("now")
        each = (zoom or 60.0) / count
        marks = [
            (found.start() + len(found[0]) // 2 - 7, found[1]) for found in re.finditer(r" -([\d:]+)(?: s)? ", axis)
        ]
        assert marks
        for at, word in marks:
            minutes, _, seconds = word.rpartition(":")
            ago = int(minutes or 0) * 60 + int(seconds)
            assert abs((count - at) * each - ago) <= each
        assert width < 80 or f"zoom {(zoom or 60) / 60:.0f} min" in shown[0].plain


# --- layout --------------------------------------------------------------------------------------------------------


def test_the_parts_share_the_height_and_none_is_too_small_to_show_anything():
    for room, ranks, threads, with_graph in itertools.product(range(8, 80), (3, 11, 200), (0, 4, 7, 67), (True, False)):
        high, table, below = share_out(room, ranks, threads, graph=with_graph)
        assert high + table + below == room
        assert high == 0 or (with_graph and high >= 5)
        assert below == 0 or 4 <= below <= threads
        assert table >= min(3, room)
        if ranks <= room - high:
            assert table >= ranks, "the table shows all ranks before the graph grows"


def test_a_frozen_screen_says_so_at_each_size(saving):
    for size in ((120, 30), (80, 24), (60, 14), (40, 8)):
        assert "FROZEN" in paint(frame(saving, size, frozen=True)).plain, size


# --- the last line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [True, False])
def test_keys_stand_whole_and_a_cut_is_shown(saving, live):
    every = [(key.sign, key.word) for key in (KEYS if live else REPLAY_KEYS) if key.word]
    for width in range(14, 260):
        line = footer.keys(frame(saving, (width, 24), live=live))
        plain = line.plain
        assert line.width == width
        whole = [(key, word) for key, word in every if f" {key} {word} " in plain]
        if len(whole) == len(every):
            assert plain.rstrip().endswith("? Help")
        else:
            assert plain.rstrip().endswith("… ? all keys")
        assert re.sub(r"\s+", " ", plain).strip() == " ".join(
            [*(f"{key} {word}" for key, word in whole), "? Help" if len(whole) == len(every) else "… ? all keys"]
        )
    assert len(whole) == len(every), "at some width, no key is cut"


@pytest.mark.parametrize(("size", "view"), [((80, 24), "live"), ((40, 8), "live"), ((80, 24), "history")])
def test_another_jobs_trouble_and_a_notice_are_seen_on_each_screen(saving, size, view):
    model = said(saving, None)
    (job,) = saving.jobs
    sentence = Sentence("bad", ("rank 3 died: this checkpoint cannot be completed", "rank 3 died"))
    model.jobs = [job, replace(job, key="b", name="bert", sentence=sentence)]
    assert "▼ bert: rank 3 died" in paint(frame(model, size, Ui(view=view))).plain
    assert "bert: rank 3" not in paint(frame(model, size, Ui(view=view, job="b"))).plain
    assert "saved x.svg" in paint(frame(model, size, Ui(view=view, notice="saved x.svg"))).plain


# --- help ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(40, 8), (80, 24), (20, 4), (120, 80)], ids=str)
def test_all_of_the_help_can_be_read_at_each_size(saving, size):
    ui = Ui(help=True)
    pages = []
    while True:
        shown = paint(frame(saving, size, ui))
        assert {line.width for line in shown.lines} == {size[0]}
        assert len(shown.lines) == size[1]
        page = [line.plain for line in shown.lines[:-1]]
        if pages and page == pages[-1]:
            break
        pages.append(page)
        ui.scroll["help"] += max(size[1] - 1, 1)
    words = " ".join(" ".join(line.split()) for page in pages for line in page)
    for key in ("Ctrl-Z", "PgUp", "Space", "F12"):
        assert key in words
    for sign in ("●", "◐", "▼", "│", "⣿", "█"):
        assert sign in words
    meant = ("ETA", "SLOW", "peak", "10^9", "THREADS", "QD", "p99", *cells.STATE_STYLES)
    for word in {*meant} - {"SOURCE", "LIMIT", "ERROR"}:
        assert word in words, word


def test_the_help_explains_each_key_of_the_last_line(saving):
    page = " ".join(line.plain for line in help.lines(frame(saving, (120, 200), Ui(help=True))))
    for key in KEYS:
        assert not key.word or f" {key.sign} " in page, key


# --- any size, anything to show --------------------------------------------------------------------------------------

FIGURES = st.one_of(st.none(), st.just(0.0), st.floats(0.0, 1e15), st.just(math.inf), st.just(math.nan))
LABELS = st.text(max_size=40)
OPERATIONS = st.fixed_dictionaries(
    {
        "running": st.booleans(),
        "phase": st.sampled_from(["plan", "stage", "write", "read", "fsync", "commit", "done", "failed", "died"]),
        "label": LABELS.map(text.clean),
        "rate": FIGURES,
        "average": FIGURES,
        "peak": st.floats(0.0, 1e15),
        "target": st.floats(0.0, 1e13),
        "done": st.integers(0, 1 << 60),
        "total": st.integers(0, 1 << 60),
        "progress": st.one_of(st.none(), st.floats(0.0, 1.0)),
        "eta_s": FIGURES,
        "elapsed_s": st.floats(0.0, 1e9),
        "verdict": st.sampled_from(list(Verdict)),
        "sentence": st.one_of(
            st.none(), st.builds(Sentence, st.sampled_from(["info", "warn", "bad"]), st.tuples(LABELS, LABELS))
        ),
    }
)
CHOICES = st.fixed_dictionaries(
    {
        "view": st.sampled_from(VIEWS),
        "sort": st.sampled_from(list(SORTS)),
        "graph": st.booleans(),
        "zoom_s": st.sampled_from([0.0, *graph.ZOOMS]),
        "help": st.sampled_from([False, False, False, True]),
        "notice": st.sampled_from(["", "cannot write \u65e5\u672c"]),
        "filter": st.sampled_from(["", "6", "nobody"]),
        "scroll": st.dictionaries(st.sampled_from(["live", "help", *VIEWS]), st.integers(0, 999)),
        "job": st.sampled_from(["", "b"]),
    }
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=st.tuples(st.integers(1, 210), st.integers(1, 70)),
    operations=st.lists(OPERATIONS, max_size=4),
    choices=CHOICES,
    ascii=st.booleans(),
    frozen=st.booleans(),
    jobs=st.integers(0, 3),
)
def test_anything_at_any_size_fills_the_screen_exactly(saving, size, operations, choices, ascii, frozen, jobs):  # noqa: A002
    glyphs = text.ASCII if ascii else text.UNICODE
    model = said(saving, None)
    model.jobs = [replace(saving.jobs[0], key=key, name=key) for key in "abc"[:jobs]]
    keys = [job.key for job in model.jobs] or [""]
    made = [replace(saving.ops[0], job_key=keys[number % len(keys)], **op) for number, op in enumerate(operations)]
    model.ops = made
    model.rows = [replace(row, job_key=keys[(row.rank or 0) % len(keys)]) for row in saving.rows]
    model.jobs = [replace(job, sentence=made[0].sentence if made else None) for job in model.jobs]
    shown = paint(frame(model, size, Ui(**choices), glyphs, frozen=frozen))
    assert len(shown.lines) == size[1]
    assert {line.width for line in shown.lines} == {size[0]}
    assert all(text.width(line.plain) == size[0] for line in shown.lines)
    assert {name for line in shown.lines for _, name in line.parts} <= {*STYLES, ""}
    if ascii:
        assert shown.plain.isascii()
