"""The commands in README and documents name existing distributions, extras, scripts and subcommands.

tests/docs/test_blocks.py parses the commands in blocks.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from harness import cli

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "tui" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
#: Other packages that pip installs in these pages.
OF_OTHERS = {"anycrc", "."}


def projects():
    """Return the extras of this repository's distributions, by name."""
    found = {}
    for page in (ROOT / "pyproject.toml", ROOT / "tui" / "pyproject.toml"):
        text = page.read_text(encoding="utf-8")
        extras = re.search(r"^\[project\.optional-dependencies\]\n((?:.+\n)*)", text, re.MULTILINE)
        named = re.findall(r"^(\w+) = ", extras[1], re.MULTILINE) if extras else []
        found[re.search(r'^name = "(.+)"$', text, re.MULTILINE)[1]] = set(named)
    return found


def wrong_installs(text):
    """Return the first word of each install command that names neither a distribution of fastckpt nor a known one."""
    found = []
    for words in re.findall(r"pip install ((?:[-\w.\[\]\",>=$ ]|\n +(?=fastckpt))+)", text):
        given = iter(shlex.split(words.replace("\n", " "), comments=True))
        for word in given:
            if word in {"--find-links", "--no-binary", "--group"}:
                next(given)
                continue
            name, _, extras = word.rstrip(".]").partition("[")
            named = set(extras.split(",")) if extras else set()
            if word.startswith("-") or word in OF_OTHERS:
                continue
            if name not in projects() or not named <= projects()[name]:
                found.append(word)
                break  # otherwise the words of the text after it would be reported
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_install_commands_name_what_there_is(page):
    assert wrong_installs(page.read_text(encoding="utf-8")) == []


def test_wrong_install_commands_are_seen():
    assert wrong_installs('pip install fastckpt-top\npip install "fastckpt-io[remote]"') == []
    assert wrong_installs("pip install fastckpt-io fastckpt-monitor") == ["fastckpt-monitor"]
    assert wrong_installs('pip install "fastckpt-io[s3]"') == ["fastckpt-io[s3]"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_are_there(page):
    text = page.read_text(encoding="utf-8")
    for name in {*re.findall(r"`(scripts/[\w-]+)", text), *re.findall(r"^    (scripts/[\w-]+)", text, re.MULTILINE)}:
        assert os.access(ROOT / name, os.X_OK), name


def test_commands_of_the_shell_are_there(capsys):
    text = (ROOT / "docs" / "calls.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^- (`fastckpt info`(?:,\s+`\w+`)+):\s+from the\s+shell", text, re.MULTILINE)
    listed = listed.replace("`fastckpt ", "`")
    assert cli.main(["--help"]) == 0
    known = set(re.findall(r"^ +(\w+)  ", capsys.readouterr().out, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", listed)) <= known
    assert set(re.findall(r"`fastckpt ([a-z]+)", text)) <= known
