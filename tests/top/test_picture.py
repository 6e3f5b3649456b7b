"""Pictures of the screen: text, shapes, and their rendering by librsvg."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import fastckpt_top
import pytest
from fastckpt_top.app import TopApp
from fastckpt_top.replay import Replay
from fastckpt_top.views.state import Ui
from looking import demo
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import TerminalTheme

from harness import needs

ROOT = Path(__file__).parents[2]
TOOLS, DOCS = ROOT / "tui" / "tools", ROOT / "docs"
sys.path.append(str(TOOLS))
import svg as picture  # noqa: E402 - it is found only from here on

SVG = "{http://www.w3.org/2000/svg}"
THEME = TerminalTheme((0, 0, 0), (255, 255, 255), [(0, 0, 0)] * 8)
IN_ANY_FONT = set("·…→←↑↓−×±≥≤–—°")  # noqa: RUF001  (meant)
"""Characters beyond ASCII that every terminal font has."""

SMALL = """\
<?xml version="1.0" encoding="UTF-8"?>
<svg xmlns="http://www.w3.org/2000/svg" role="img" width="64" height="56" viewBox="-12 -12 64 56">
<title>a &lt; b</title>
<rect x="-11.5" y="-11.5" width="63" height="55" rx="8" fill="#000000" stroke="#ffffff" stroke-opacity=".3"/>
<g shape-rendering="crispEdges">
<path fill="#0000ff" d="M32 16h8v16h-8z"/>
<path fill="#ff0000" d="M24 0h16v16h-16z"/>
<path fill="#ffffff" d="M0 24h16v1h-16z"/>
<path stroke="#ffffff" stroke-width="2" stroke-dasharray="2" d="M17 31h6"/>
</g>
<path fill="#ffffff" fill-rule="evenodd" d="M24 16m.5 4.5h7l-3.5 7z"/>
<g xml:space="preserve" font-family="FONTS" font-size="13.3333">
<text y="12"><tspan x="0 8" fill="#ffffff">a&amp;</tspan>\
<tspan x="16" fill="#ff0000" font-weight="bold">b  </tspan></text>
<text y="28">    <tspan x="32" fill="#ffffff">x</tspan></text>
</g>
</svg>
""".replace("FONTS", picture._FONTS)


def drawn(*lines):
    return picture.svg([[Segment(line)] for line in lines], THEME, "test")


def texts(svg):
    """The text of each line that has any, as a reader selects it."""
    return ["".join(line.itertext()) for line in ET.fromstring(svg).iter(f"{SVG}text")]


def test_a_small_picture():
    lines = [
        [Segment("a&", Style.parse("#ffffff on #000000")), Segment("b██", Style.parse("bold #ff0000 on #000000"))],
        [Segment("──⣀▼"), Segment("x", Style.parse("#ffffff on #0000ff"))],
    ]
    assert picture.svg(lines, THEME, "a < b") == SMALL


@pytest.fixture(scope="module")
def screen():
    """The demonstration's screen: its lines as text, and its picture."""

    async def take():
        clock, session = demo(25.0)
        app = TopApp(session, Ui(), clock=clock)
        async with app.run_test(size=(120, 30)) as pilot:
            for _ in range(10):
                clock.now += 0.5
                app.look()
            await pilot.press("t")
            await pilot.pause()
            return app.canvas.painted().plain.splitlines(), picture.of(app.canvas)

    return asyncio.run(take())


def test_text_is_read_in_order_and_in_its_columns(screen):
    lines, svg = screen
    plain = [re.sub("[─-◿⠀-⣿]", " ", line).rstrip() for line in lines]  # these are drawn as shapes
    assert [line.rstrip() for line in texts(svg)] == [line for line in plain if line]


def test_each_character_has_its_own_column(screen):
    lines, svg = screen
    by_row = {}
    for line in ET.fromstring(svg).iter(f"{SVG}text"):
        row = (int(line.get("y")) - picture.BASE) // picture.CELL[1]
        for span in line:
            places = [int(x) // picture.CELL[0] for x in span.get("x").split()]
            word = span.text.rstrip()
            assert len(places) == len(word)
            assert places == list(range(places[0], places[0] + len(word)))
            by_row.setdefault(row, []).append("".join(lines[row][place] for place in places) == word)
    assert len(by_row) > 20
    assert all(all(right) for right in by_row.values())


def test_nothing_is_fetched_and_nothing_runs(screen):
    _, svg = screen
    root = ET.fromstring(svg)
    assert {node.tag.removeprefix(SVG) for node in root.iter()} == {
        "svg",
        "title",
        "rect",
        "g",
        "path",
        "text",
        "tspan",
    }
    assert not [name for node in root.iter() for name in node.attrib if "href" in name or name.startswith("on")]
    assert svg.count("http") == 1  # the namespace of SVG
    assert "url(" not in svg
    assert len(svg) < 100_000


def test_each_character_of_the_views_is_drawn_or_in_any_font():
    """A character that a font lacks, or draws wider than a cell, would break the columns."""
    source = "".join(path.read_text("utf-8") for path in Path(fastckpt_top.__file__).parent.rglob("*.py"))
    left_to_fonts = {
        char for char in set(source) - set("\u00a0") if not char.isascii() and texts(drawn(char)) == [char]
    }
    assert not left_to_fonts - IN_ANY_FONT


def test_foreign_text_is_harmless():
    svg = drawn("<script>&\"'\x1b\x00]]>", "漢字x", "\U0001f600y")
    assert texts(svg) == ["<script>&\"'\ufffd\ufffd]]>", "漢字x", "\U0001f600y"]
    spans = [span.get("x") for span in ET.fromstring(svg).iter(f"{SVG}tspan")]
    assert spans[1:] == ["0 16 32", "0 0 16"]  # a wide character takes two cells; one beyond 16 bits counts twice


def test_what_a_style_leaves_open_comes_from_the_theme():
    lines = [[Segment("a", Style(color="default", bgcolor="default", reverse=True)), Segment("b")]]
    svg = picture.svg(lines, THEME, "")
    assert 'x="0" fill="#000000"' in svg
    assert 'x="8" fill="#ffffff"' in svg
    assert ET.fromstring(picture.svg([], THEME, "")) is not None


@pytest.mark.parametrize("zoom", [1, 1.37, 2])
def test_librsvg_renders_it(tmp_path, zoom):
    """Marks, bars and text are in place, and blocks have no seams, even if cells are no whole number of pixels."""
    convert = needs.tool("rsvg-convert", "librsvg2-bin")
    from matplotlib.image import imread

    source, png = tmp_path / "a.svg", tmp_path / "a.png"
    source.write_text(drawn("████    ▄▄▌ ", "████  X ●▼⣿ ", "            "), "utf-8")
    subprocess.run([convert, "-z", str(zoom), "-o", png, source], check=True)
    ink = imread(png)[:, :, 0]

    def cell(column, row, left=0.0, top=0.0, right=1.0, bottom=1.0):
        """The pixels of a part of a cell, without the edge."""
        x, y = (picture.MARGIN + column * 8) * zoom, (picture.MARGIN + row * 16) * zoom
        return ink[
            round(y + top * 16 * zoom) + 1 : round(y + bottom * 16 * zoom) - 1,
            round(x + left * 8 * zoom) + 1 : round(x + right * 8 * zoom) - 1,
        ]

    assert cell(0, 0, right=4, bottom=2).min() == 1.0  # four blocks, two lines, no seam
    assert cell(8, 0, bottom=0.5).max() < 0.1
    assert cell(8, 0, top=0.5, right=2).min() == 1.0
    assert cell(10, 0, right=0.5).min() == 1.0
    assert cell(10, 0, left=0.5).max() < 0.1
    for column in (6, 8, 9, 10):
        assert cell(column, 1).max() > 0.5
    for column in (4, 5, 7, 11):
        assert cell(column, 1).max() < 0.1


# --- the documents' pictures -----------------------------------------------------------------------------------------


def tool(name, *arguments):
    """Run a tool with an empty PATH, so that it draws only from its input."""
    command = [sys.executable, str(TOOLS / name), *map(str, arguments)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=60, env={**os.environ, "PATH": ""})


def test_a_recordings_last_moment_is_drawn_as_if_it_were_watched(recording, tmp_path):
    replay = Replay(str(recording))
    replay.end()
    tool("picture.py", recording, tmp_path / "a.svg", "--size", "100x26", "--keys", "tab,tab")
    shown = " ".join(texts((tmp_path / "a.svg").read_text("utf-8")))
    assert "live" in shown
    assert "replay" not in shown
    assert time.strftime("%H:%M:%S", time.localtime(replay.model.real)) in shown
    assert "11800" in shown


def test_scenarios_are_drawn_from_recordings_that_are_there(recording, tmp_path):
    shutil.copy(recording, tmp_path / "dead.jsonl.gz")
    tool("scenarios.py", tmp_path / "docs", "--only", "dead", "--recordings", tmp_path)
    assert [path.name for path in tmp_path.rglob("*.svg")] == ["dead.svg"]
    assert texts((tmp_path / "docs/pictures/dead.svg").read_text("utf-8"))


def test_the_documents_show_each_picture_and_each_is_small_and_of_this_writer():
    guide = (DOCS / "monitor.md").read_text("utf-8")
    shown = set(re.findall(r"!\[[^]]+\]\(([^)]+\.svg)\)", guide))
    scenarios = set(re.findall(r'"((?:pictures/)?[\w-]+\.svg)"', (TOOLS / "scenarios.py").read_text("utf-8")))
    assert shown == scenarios
    assert shown == {"monitor.svg"} | {f"pictures/{path.name}" for path in (DOCS / "pictures").iterdir()}
    for name in shown:
        svg = (DOCS / name).read_text("utf-8")
        assert len(svg) < 60_000
        assert picture._FONTS in svg
        assert "node07" in " ".join(texts(svg))
