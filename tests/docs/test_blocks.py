"""Every block of code in the documents: programs are run, commands are parsed, data is read.

``text`` marks what somebody sees: output, a listing, a synopsis. Anything else is an error here.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import stages

from harness import cli, needs, programs

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "tui/*.md", "benchmarks/*.md", "docs/**/*.md")
    for page in ROOT.glob(pattern)
)
#: Programs of others, whose arguments are theirs.
OF_OTHERS = {
    *("cargo", "curl", "docker", "jq", "lfs", "pip", "pytest", "scontrol", "srun", "torchrun", "vllm"),
    *("llamafactory-cli", "trl"),
}
#: Pages whose output of commands is compared with a new one by the test that names the page, or is of one machine.
SESSIONS = {"docs/sizing.md": "tests/tools/test_sizing_guide.py", "docs/bench.md": None}


def blocks(page):
    """The blocks of a page: language (None for an indented one), text, line."""
    markdown = needs.package("markdown_it").MarkdownIt()
    for token in markdown.parse((ROOT / page).read_text(encoding="utf-8")):
        if token.type in {"fence", "code_block"}:
            yield token.info if token.type == "fence" else None, token.content, token.map[0] + 1


def python(page):
    return [text for language, text, _ in blocks(page) if language == "python"]


# -- what kinds there are ----------------------------------------------------------------------------------------------


def test_each_block_says_what_it_is():
    kinds = {None, "python", "console", "bash", "yaml", "text"}
    found = [(page, line, language) for page in PAGES for language, _, line in blocks(page)]
    assert len(found) > 100
    assert [each for each in found if each[2] not in kinds] == []


def test_each_program_is_run():
    """Here, or whole elsewhere, or in another program; no page is listed that has none."""
    count = {page: len(python(page)) for page in PAGES}
    listed = {page: len(stages.STAGES.get(page, ())) for page in count}
    for table in (stages.PARTS, stages.ELSEWHERE):
        for page in table:
            listed[page] += 3 if page == "docs/monitoring.md" else 1
    assert listed == count
    for page, test in [*stages.ELSEWHERE.items(), *((page, test) for page, test in SESSIONS.items() if test)]:
        text = (ROOT / test).read_text(encoding="utf-8")
        assert Path(page).name in text or f'"{Path(page).stem}"' in text, (page, test)


@pytest.mark.parametrize("page", stages.PARTS)
def test_names_in_a_part_are_in_the_program(page):
    text = (ROOT / stages.PARTS[page]).read_text(encoding="utf-8")
    part = min(python(page), key=len)
    names = [*re.findall(r"fastckpt\.[\w.]+", part), *re.findall(r"import (.*)", part)[0:1]]
    assert names
    assert [name for name in names if name not in text] == []


# -- programs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", stages.STAGES)
def test_programs(children_with_torch, tmp_path, monkeypatch, page):
    script = [stages.TRAINING]
    for (before, after), block in zip(stages.STAGES[page], python(page), strict=True):
        for large, small in stages.SMALLER.get(page, {}).items():
            block = block.replace(large, small)  # noqa: PLW2901
        script += [before, block, after]
    (tmp_path / "program.py").write_text("\n".join(script), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = programs.run(children_with_torch, [tmp_path / "program.py"])
    assert done.returncode == 0, done.stderr


# -- commands ----------------------------------------------------------------------------------------------------------


def commands(text):
    """The simple commands in the lines of a shell: words, without redirections and what is after a comment."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = []
        for word in [*lexer, ";"]:
            if word in {";", "|", "&&", "||"}:
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def wrong(words):
    """What is wrong with a command, or nothing."""
    while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] == "sudo"):
        words = words[1:]
    if ">" in words:
        words = words[: words.index(">")]
    if not words:
        return None
    program, arguments = words[0], words[1:]
    name = program.rpartition("/")[2]
    if name == "fastckpt":
        return parsed(arguments)
    if name == "fastckpt-top":
        from fastckpt_top import options

        return refused(lambda: options.parser().parse_args(arguments))
    if program.startswith("scripts/"):
        return None if (ROOT / program).is_file() else "no such script"
    if name in {"python", "python3", "$python"}:
        return python_command(arguments)
    return None if name in OF_OTHERS or name == "maturin" else "no program that is known here"


def parsed(arguments):
    """Parse a command line of fastckpt, as the command does, and do nothing."""
    import argparse

    class Parsed(Exception):  # noqa: N818
        pass

    parse, outermost = argparse.ArgumentParser.parse_args, []

    def parse_args(parser, *given, **named):
        outermost.append(parse(parser, *given, **named))
        raise Parsed

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args):
        return refused(lambda: cli.main(arguments), Parsed)


def refused(parse, end=()):
    try:
        status = parse()
    except end:
        return None
    except SystemExit as error:
        return f"it ends with {error.code}"
    return f"it ends with {status}" if isinstance(status, int) and status else None


def python_command(arguments):
    """Options of a program of the repository are in its text, or beside it."""
    if arguments[0] in {"-c", "-m"}:
        return None
    file = ROOT / arguments[0]
    if not file.is_file():
        return None if arguments[0] == "train.py" else "no such program"
    texts = "".join(each.read_text(encoding="utf-8") for each in [*file.parent.glob("*.py"), *file.parent.glob("*/*.py")])
    lacking = [word for word in arguments[1:] if word.startswith("--") and f'"{word}"' not in texts]
    return f"no option {lacking}" if lacking else None


@pytest.mark.parametrize("page", PAGES)
def test_commands(page):
    """Indented blocks, and the lines of sessions."""
    found = []
    for language, text, line in blocks(page):
        if language == "console":
            assert page in SESSIONS
            text = "\n".join(re.findall(r"^\$ (.*(?:\\\n.*)*)", text, re.MULTILINE))  # noqa: PLW2901
        if language in {None, "console"}:
            found += [(line, words, said) for words in commands(text) if words[0] != "cat" and (said := wrong(words))]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        *("fastckpt prune run --for-ever", "fastckpt nothing", "fastckpt-top --nothing", "scripts/nothing"),
        *("python benchmarks/sweep.py --nothing", "python nothing.py", "nothing", "scripts/docs | fastckpt rm"),
    ],
)
def test_wrong_commands_are_seen(line):
    assert [words for words in commands(line) if wrong(words)]


# -- data and scripts --------------------------------------------------------------------------------------------------


def test_yaml_is_read():
    yaml = needs.package("yaml")
    found = [[*yaml.safe_load_all(text)] for page in PAGES for language, text, _ in blocks(page) if language == "yaml"]
    assert found
    assert all(isinstance(one, dict) for each in found for one in each)


def test_scripts_are_read():
    bash = shutil.which("bash")
    found = [text for page in PAGES for language, text, _ in blocks(page) if language == "bash"]
    assert found
    for text in found:
        done = subprocess.run([bash, "-n"], input=text, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), text
