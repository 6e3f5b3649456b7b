"""Lays out what Sphinx reads: the pages of the tree, sections, and pages that are made from code."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from . import api, commands, examples

ROOT = Path(__file__).parents[2]
#: Pages that are made: each gives texts by the path of their file in the sources. The first is the page of the tree.
MADE = {"api": api.pages, "commands": commands.pages, "examples": examples.pages}
#: The target of a link, without its anchor.
_TARGET = re.compile(r"(?<=\]\()[^()\s#]+(?=[#)])")


@dataclass(frozen=True)
class Section:
    """A part of the tree, as docs/navigation.toml has it."""

    name: str
    title: str
    about: str
    pages: list[str]


def tree() -> list[Section]:
    """The sections, in order."""
    read = tomllib.loads((ROOT / "docs" / "navigation.toml").read_text(encoding="utf-8"))
    return [Section(**section) for section in read["section"]]


def place(page: str) -> str:
    """Where a file of the repository lies in the sources: pages of docs/ as they do there, others by their names."""
    inside = page.removeprefix("docs/")
    folder, _, name = inside.rpartition("/")
    if inside != page or name != "README.md":
        return inside if inside != page else inside.lower()
    return f"{folder or 'readme'}.md"


def write(to: Path) -> None:
    """Write the sources into an empty directory."""
    sections = tree()
    pages = [page for section in sections for page in section.pages]
    made = {name: MADE[name]() for name in (page.partition(":")[2] for page in pages if page.startswith("made:"))}
    for texts in made.values():
        for path, text in texts.items():
            _put(to / path, text)
    places = {page: place(page) for page in ("docs/index.md", *pages) if not page.startswith("made:")}
    # A link to a folder leads to the page that shows what is in it.
    places |= {"docs/guides": "use-with.md", "examples/doors": "examples.md"}
    for page in places:
        if (ROOT / page).is_file():
            _put(to / places[page], _relinked(page, places, to))
    home = [f"{section.title} <{section.name}>" for section in sections]
    with (to / "index.md").open("a", encoding="utf-8") as index:
        index.write(_toctree(home, "hidden:"))
    for section in sections:
        entries = [
            places[page] if page in places else next(iter(made[page.partition(":")[2]])) for page in section.pages
        ]
        names = [str(PurePosixPath(entry).with_suffix("")) for entry in entries]
        _put(to / f"{section.name}.md", f"# {section.title}\n\n{section.about}\n{_toctree(names, 'maxdepth: 1')}")


def _toctree(entries: list[str], option: str) -> str:
    return "\n".join(["", "```{toctree}", f":{option}", "", *entries, "```", ""])


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _relinked(page: str, places: dict[str, str], to: Path) -> str:
    """The text of a page, with its links to other files of the repository as they are in the sources."""
    here = os.path.dirname(places[page])

    def target(match: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(page), match[0]))
        if path not in places and (ROOT / path).is_file():
            # What is no page is a picture, or a file to take along.
            places_of_file = path.removeprefix("docs/")
            _copy(ROOT / path, to / places_of_file)
            return os.path.relpath(places_of_file, here or ".")
        return os.path.relpath(places[path], here or ".") if path in places else match[0]

    return _TARGET.sub(target, (ROOT / page).read_text(encoding="utf-8"))


def _copy(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(file.read_bytes())
