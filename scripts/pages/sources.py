"""Lays out what Sphinx reads: the pages of the repository, sections, and pages that are made from code."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

import tomllib

from . import api, commands, examples

ROOT = Path(__file__).parents[2]
HOME = "README.md"
#: Pages that are generated: each function returns texts by file. The first file is the page in the tree.
MADE = {"made:api": api.pages, "made:commands": commands.pages, "made:examples": examples.pages}
#: Folders of the repository to which pages link, but which are not entries of the tree.
FOLDERS = {"docs/guides": "use-with.md", "docs/migrate": "migrate.md", "examples/doors": "examples.md"}
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
    """The file in the sources for a file of the repository: files of docs/ keep their paths, others their names."""
    if page == HOME:
        return "index.md"
    if page.startswith("docs/"):
        return page.removeprefix("docs/")
    folder, _, name = page.rpartition("/")
    return f"{folder}.md" if name == "README.md" else page.lower().replace("_", "-")


def write(to: Path) -> None:
    """Write the sources into an empty directory."""
    sections = tree()
    entries = [HOME, *(page for section in sections for page in section.pages)]
    folders = {entry.rstrip("/"): f"{place(entry).rstrip('/')}.md" for entry in entries if entry.endswith("/")}
    inside = {
        folder: sorted(one.relative_to(ROOT).as_posix() for one in (ROOT / folder).glob("*.md")) for folder in folders
    }
    pages = [entry for entry in entries if not entry.endswith("/") and entry not in MADE]
    places = {page: place(page) for page in (*pages, *(page for found in inside.values() for page in found))}
    if lost := {one.relative_to(ROOT).as_posix() for one in (ROOT / "docs").rglob("*.md")} - places.keys():
        raise ValueError(f"docs/navigation.toml lacks {', '.join(sorted(lost))}: give each page a section")
    texts = {places[page]: _relinked(page, {**places, **folders, **FOLDERS}, to) for page in places}
    first = {}
    for name in MADE.keys() & set(entries):
        made = MADE[name]()
        first[name] = next(iter(made))
        texts |= made
    for folder, file in folders.items():
        title = folder.rpartition("/")[2].replace("-", " ").capitalize()
        about = f"For those who choose among {title.lower()}: a page for each."
        texts[file] = f"# {title}\n\n{about}\n{_toctree([places[page] for page in inside[folder]])}"
    for section in sections:
        files = [first.get(entry) or folders.get(entry.rstrip("/")) or places[entry] for entry in section.pages]
        texts[f"{section.name}.md"] = f"# {section.title}\n\n{section.about}\n{_toctree(files)}"
    texts["index.md"] += _toctree([section.name for section in sections], "hidden:")
    for file, text in texts.items():
        (to / file).parent.mkdir(parents=True, exist_ok=True)
        (to / file).write_text(text, encoding="utf-8")


def _toctree(files: list[str], option: str = "maxdepth: 1") -> str:
    names = [posixpath.splitext(file)[0] for file in files]
    return "\n".join(["", "```{toctree}", f":{option}", "", *names, "```", ""])


def _relinked(page: str, places: dict[str, str], to: Path) -> str:
    """The text of a page, with its links to other files of the repository as they are in the sources."""
    here = posixpath.dirname(places[page])

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[0]))
        if path not in places and not (ROOT / path).is_file():
            return match[0]  # an address, or a broken link, which Sphinx reports
        if path not in places:  # a picture, or another file to copy
            copy = to / place(path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / path).read_bytes())
        return posixpath.relpath(places.get(path, place(path)), here or ".")

    return _TARGET.sub(target, (ROOT / page).read_text(encoding="utf-8"))
