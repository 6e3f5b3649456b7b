"""The site: links lead somewhere, public names are described, questions are answered, nothing comes from elsewhere."""

from __future__ import annotations

import re
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: The attributes by which a page loads files, by tag.
LOADS = {"img": "src", "script": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
#: Relations in the head of a page that name other pages, and load nothing.
RELATIONS = {"index", "search", "next", "prev", "canonical"}


class Page(HTMLParser):
    """The anchors of a page, its links, the files that it loads, and its text."""

    def __init__(self, file):
        super().__init__()
        self.ids, self.links, self.loads, self.said = set(), [], [], []
        #: The text of each section with its subsections, by anchor; and the anchors of open sections.
        self.sections, self._open = {}, []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "section":
            self._open.append(found.get("id"))
            self.sections[self._open[-1]] = []
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif found.get(LOADS.get(tag)) is not None:
            (self.links if found.get("rel") in RELATIONS else self.loads).append(found[LOADS[tag]])

    def handle_endtag(self, tag):
        if tag == "section":
            self._open.pop()

    def handle_data(self, data):
        self.said.append(data)
        for anchor in self._open:
            self.sections[anchor].append(data)


@pytest.fixture(scope="module")
def pages(site):
    return {file: Page(file) for file in sorted(site.rglob("*.html"))}


def broken(file, link, pages):
    """Return why a link of a page leads nowhere, or None."""
    address = urllib.parse.urlsplit(link)
    if address.scheme or address.netloc:
        return None if address.scheme in {"http", "https"} else f"{file.name}: {link}: what is that?"
    to = (file.parent / urllib.parse.unquote(address.path)).resolve() if address.path else file
    if not to.is_file():
        return f"{file.name}: {link}: no such file"
    anchor = urllib.parse.unquote(address.fragment)
    if anchor and to in pages and anchor not in pages[to].ids:
        return f"{file.name}: {link}: no such anchor"
    return None


def test_links_lead_somewhere(pages):
    assert len(pages) > 50
    found = [broken(file, link, pages) for file, page in pages.items() for link in page.links]
    assert len(found) > 5000
    assert [each for each in found if each] == []


def test_broken_links_are_seen(pages):
    file = next(file for file in pages if file.name == "index.html")
    for link in ("nowhere.html", "install.html#nowhere", "#nowhere", "file:///etc/passwd"):
        assert broken(file, link, pages), link
    assert broken(file, "install.html#the-name", pages) is None


def test_pages_load_nothing_from_elsewhere(site, pages):
    found = {load for page in pages.values() for load in page.loads}
    assert any(load.endswith(".svg") for load in found)
    assert [load for load in found if urllib.parse.urlsplit(load).scheme not in {"", "data"} or load[:2] == "//"] == []
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert [each for each in re.findall(r"url\(\s*[\"']?([^)\"']*)", styles) if "//" in each.split("data:")[0]] == []
    assert "@import" not in styles


def test_each_page_says_for_whom_it_is(site, pages):
    """The first line of a page names its readers and its contents. The reference of a module describes the module."""
    others = {"genindex.html", "py-modindex.html", "search.html", "code-of-conduct.html"}
    found = [file for file in pages if file.name not in others and file.parent.name not in {"api", "_modules"}]
    assert len(found) > 60
    first = re.compile(r"</h1>\s*<p>For ")
    assert [file.relative_to(site) for file in found if not first.search(file.read_text(encoding="utf-8"))] == []


def test_the_questions_that_decide_are_answered(site, pages):
    """tests/docs/questions.toml has the questions; "no" is an answer. Each answer is two clicks from the home page."""
    import tomllib

    questions = tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))["question"]
    assert len({question["ask"] for question in questions}) == 40
    near = reached = {site / "index.html"}
    for _ in range(2):
        near = {
            file.parent.joinpath(urllib.parse.urlsplit(link).path).resolve()
            for file in near & pages.keys()
            for link in pages[file].links
            if urllib.parse.urlsplit(link).scheme == ""
        }
        reached |= near
    wrong = []
    for question in questions:
        file = site / question["page"]
        said = " ".join("".join(pages[file].sections.get(question["anchor"], ())).split()) if file in pages else ""
        lacking = [words for words in question["words"] if words not in said]
        if lacking or file not in reached or not question["words"]:
            wrong.append((question["ask"], lacking))
    assert wrong == []


def test_every_public_name_is_in_the_reference(pages):
    """tests/api/surface.txt lists the public names; the fields of a class may be among its documented arguments."""
    anchors = set().union(*(page.ids for file, page in pages.items() if file.parent.name == "api"))
    lacking, module, owner, names = [], "", "", 0
    for line in (ROOT / "tests" / "api" / "surface.txt").read_text(encoding="utf-8").splitlines():
        depth, name = len(line) - len(line.lstrip()), re.search(r"(?:class )?([\w.]+)", line)[1]
        names += 1
        if depth == 0:
            module, full = name, f"module-{name}"
        elif depth == 2:
            owner = name
            full = f"module-{module}.{name}" if line.endswith(": a module") else f"{module}.{name}"
            full = re.sub(".*: as ", "", line) if ": as " in line else full
        else:
            full = f"{module}.{owner}.{name}"
        if full not in anchors and not _is_argument(module, owner, name):
            lacking.append(full)
    assert names > 400
    assert lacking == []


def _is_argument(module, owner, name):
    from importlib import import_module
    from inspect import getdoc

    return f"\n    {name}: " in (getdoc(getattr(import_module(module), owner, None)) or "")


def test_every_command_is_in_the_reference(pages):
    (said,) = ("".join(page.said) for file, page in pages.items() if file.name == "commands.html")
    table = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8").partition("\n## ")[0]
    commands = set(re.findall(r"^\| `([a-z]+)\b.*", table, re.MULTILINE)) - {"top"}
    assert len(commands) > 15
    assert [command for command in commands if f"usage: fastckpt {command}" not in said] == []
    assert "usage: fastckpt-top" in said
