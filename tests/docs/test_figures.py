"""The pictures that explain the idea match scripts/pages/figures.py, are shown on pages, and are small and readable."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from pages import figures

ROOT = Path(__file__).parents[2]
FIGURES = figures.files()
SVG = "{http://www.w3.org/2000/svg}"
#: Height of letters, and the width of a letter in a wide font, as parts of the font size.
TALL, WIDE = 0.75, {"code": 0.602, "bold": 0.62, "": 0.55}


def test_the_files_are_those_that_the_script_draws():
    there = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "docs" / "figures").iterdir()}
    assert there == FIGURES, "run python scripts/pages/figures.py"


def test_a_page_shows_each_and_says_what_it_shows():
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    shown = re.findall(r"!\[([^]]+)\]\((?:\.\./)?figures/([\w.]+)\)", text)
    assert sorted(name for _, name in shown) == sorted(FIGURES)
    assert all(len(said) > 50 for said, _ in shown)


@pytest.mark.parametrize("name", FIGURES)
def test_each_is_small_and_fetches_nothing(name):
    svg = FIGURES[name]
    assert len(svg) < 30_000
    assert set(re.findall(r"url\([^)]*\)", svg)) <= {"url(#tip)"}
    assert re.findall(r"https?:[^\"']*", svg) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"@import|@font-face|<script|<image|href", svg)
    assert ET.fromstring(svg).find(f"{SVG}title").text


def number(element, name):
    return float(element.get(name))


def extent(text):
    """Return left, top, right and bottom of a line of words."""
    styles = text.get("class").split()
    size = 12 if "small" in styles else 13 if "code" in styles else 14
    (kind,) = [style for style in ("code", "bold") if style in styles][:1] or [""]
    wide = len(text.text) * size * WIDE[kind]
    left = number(text, "x") - (wide / 2 if text.get("text-anchor") == "middle" else 0)
    return left, number(text, "y") - TALL * size, left + wide, number(text, "y") + 0.2 * size


def crowded(svg):
    """Return the words that cross the edge of a box or of the picture, and pairs of words that overlap."""
    root = ET.fromstring(svg)
    boxes = [[number(box, side) for side in ("x", "y", "width", "height")] for box in root.iter(f"{SVG}rect")]
    texts = [(text.text, extent(text)) for text in root.iter(f"{SVG}text")]
    found = []
    for words, (left, top, right, bottom) in texts:
        for x, y, width, height in boxes:
            apart = right < x or x + width < left or bottom < y or y + height < top
            within = x < left and right < x + width and y < top and bottom < y + height
            if not apart and not within:
                found.append(words)
    for (one, (left, top, right, bottom)), (other, (x, y, end, low)) in combinations(texts, 2):
        if left < end and x < right and top < low and y < bottom:
            found.append((one, other))
    return found


@pytest.mark.parametrize("name", FIGURES)
def test_words_have_room(name):
    assert crowded(FIGURES[name]) == []


def test_crowded_words_are_seen():
    figure = figures.Figure("", 100)
    figure.label(100, 10, 50, 20, "grey", "much too long")
    figure.text(300, 50, "one")
    figure.text(310, 55, "other")
    figure.text(690, 80, "the edge")
    figure.text(200, 30, "apart")
    assert crowded(figure.svg()) == ["much too long", "the edge", ("one", "other")]


def brightness(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 2], ids=["light", "dark"])
@pytest.mark.parametrize("ink", ["ink", "dim"])
@pytest.mark.parametrize("under", ["ground", "grey", "blue", "green", "amber"])
def test_words_can_be_read_in_light_and_in_dark(theme, ink, under):
    """The contrast of words is at least 4.5 to 1, as WCAG requires."""
    dark, bright = sorted(brightness(figures.COLOURS[each][theme]) for each in (ink, under))
    assert (bright + 0.05) / (dark + 0.05) >= 4.5
