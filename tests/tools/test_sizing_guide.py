"""docs/sizing.md: every command on the page is run, and its output matches the page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from harness import cli

GUIDE = Path(__file__).parents[2] / "docs" / "sizing.md"
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*")


def commands() -> list[tuple[str, str]]:
    """The page's commands and their outputs, in order; the output of ``cat`` is a file that later commands read."""
    blocks = re.findall(r"^```console\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    found = []
    for block in blocks:
        for command in block.split("$ ")[1:]:
            line, _, shown = command.partition("\n")
            while line.endswith("\\"):
                more, _, shown = shown.partition("\n")
                line = f"{line[:-1].rstrip()} {more.strip()}"
            found.append((line, shown))
    return found


def about(text: str) -> tuple[list[str], list[float]]:
    """Return the words of a text, and its numbers."""
    return NUMBER.sub("#", text).split(), [float(number.replace(",", "")) for number in NUMBER.findall(text)]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that the page shows."""
    for line, shown in commands():
        if line.startswith("cat "):
            (tmp_path / line[4:]).write_text(shown)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PAGE = [(line, shown) for line, shown in commands() if not line.startswith("cat ")]


def test_the_page_has_the_worked_examples() -> None:
    assert len(PAGE) >= 6
    assert {line.split()[1] for line, _ in PAGE} == {"plan"}
    assert any("--simulate" in line for line, _ in PAGE)


@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize(("line", "shown"), PAGE, ids=[line for line, _ in PAGE])
def test_the_page_shows_what_its_commands_print(capsys: pytest.CaptureFixture[str], line: str, shown: str) -> None:
    program, *arguments = shlex.split(line)
    assert program == "fastckpt"
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    if "--simulate" not in arguments:
        assert printed == shown
        return
    # Random numbers and fits may differ in their last digits between versions of NumPy.
    (words, numbers), (expected_words, expected) = about(printed), about(shown)
    assert words == expected_words
    assert numbers == pytest.approx(expected, rel=0.02, abs=0.3)


def test_links_of_the_page_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", GUIDE.read_text(encoding="utf-8")):
        assert (GUIDE.parent / link).exists(), link
