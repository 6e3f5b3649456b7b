"""Every block of code in the documents: programs are run, commands are parsed, data is read.

``text`` marks output, a listing or a synopsis. The page shows such a block like any other block.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import stages

from harness import cli, needs, pages, programs, zygote

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "tui/*.md", "benchmarks/*.md", "docs/**/*.md")
    for page in ROOT.glob(pattern)
)
#: Programs of other projects, whose arguments are not checked.
OF_OTHERS = {
    *("cargo", "curl", "docker", "jq", "kubectl", "lfs", "llamafactory-cli", "ls", "maturin", "pip", "pre-commit"),
    *("pytest", "rustup", "source", "srun", "tee", "torchrun", "trl", "vllm", "xargs"),
}
#: Pages with sessions, and the tests that compare these with new ones; one page has figures of a single machine.
SESSIONS = {"docs/sizing.md": "tests/tools/test_sizing_guide.py", "docs/bench.md": None}


def blocks(page):
    """Yield the blocks of a page: language (None for an indented block), text, line."""
    markdown = needs.package("markdown_it").MarkdownIt()
    for token in markdown.parse((ROOT / page).read_text(encoding="utf-8")):
        if token.type in {"fence", "code_block"}:
            yield token.info if token.type == "fence" else None, token.content, token.map[0] + 1


def all_of(*languages):
    """Return the blocks of all pages in some languages: page, text, line."""
    found = [(page, text, line) for page in PAGES for language, text, line in blocks(page) if language in languages]
    assert found, languages
    return found


# -- kinds of blocks ---------------------------------------------------------------------------------------------------


def test_each_block_says_what_it_is():
    kinds = {None, "python", "console", "bash", "yaml", "promql", "text"}
    found = [(page, line, language) for page in PAGES for language, _, line in blocks(page)]
    assert len(found) > 100
    assert [each for each in found if each[2] not in kinds] == []


def test_each_program_is_run():
    assert {page: len(found) for page in PAGES if (found := pages.python(page))} == {
        page: len(around) for page, around in stages.STAGES.items()
    }
    for page, around in stages.STAGES.items():
        for test in around:
            if isinstance(test, str) and test.startswith("tests/"):
                text = pages.text(test)
                assert Path(page).name in text or f'"{Path(page).stem}"' in text, (page, test)


def test_names_in_a_part_are_in_the_program():
    parts = 0
    for page, around in stages.STAGES.items():
        for part, whole in zip(pages.python(page), around, strict=True):
            if isinstance(whole, str) and whole.startswith("examples/"):
                names = {*re.findall(r"\b(?:from|import) [\w.]+", part), *re.findall(r"\w+(?:\.\w+)*(?=\()", part)}
                assert any("fastckpt" in name for name in names)
                assert [name for name in names if not re.search(rf"{name}\b", pages.text(whole))] == [], page
                parts += 1
    assert parts == 4


def test_sessions_are_compared_by_the_test_that_is_named():
    assert {page for page, _, _ in all_of("console")} == SESSIONS.keys()
    for page, test in SESSIONS.items():
        assert test is None or Path(page).name in (ROOT / test).read_text(encoding="utf-8")


# -- programs ----------------------------------------------------------------------------------------------------------


def program(page, around):
    """Yield the parts of a program from all blocks of a page, with fastckpt's commands if the page is in ``ENDS``."""
    around = iter(around)
    yield stages.TRAINING
    for language, text, _ in blocks(page):
        if language == "python":
            around_it = next(around)
            if isinstance(around_it, str):
                continue
            before, after = around_it
            for large, small in stages.SMALLER.get(page, {}).items():
                text = text.replace(large, small)  # noqa: PLW2901
            yield from (before, text, after)
        elif language is None and page in stages.ENDS:
            lines = [words[1:] for line in text.splitlines() if (words := shlex.split(line))[0] == "fastckpt"]
            yield "\n".join(f"with looks.forked(): assert cli.main({words}) == 0" for words in lines)
    yield stages.ENDS.get(page, "")


def test_programs(tmp_path, monkeypatch):
    """One test and one process that forks run all programs, so that each import takes time only once."""
    failed = {}
    with zygote.running(env={"FASTCKPT_TEST_IMPORT": stages.IMPORTS, "PYTHONWARNINGS": "ignore"}) as children:
        for page, around in stages.STAGES.items():
            if all(isinstance(one, str) for one in around):
                continue
            folder = tmp_path / page
            folder.mkdir(parents=True)
            (folder / "program.py").write_text("\n".join(program(page, around)), encoding="utf-8")
            monkeypatch.chdir(folder)
            done = programs.run(children, [folder / "program.py"])
            if done.returncode:
                failed[page] = done.stderr
    assert not failed, "\n".join(f"{page}: {said}" for page, said in failed.items())


# -- commands ----------------------------------------------------------------------------------------------------------


def commands(text):
    """Yield the simple commands in lines for a shell as words, without comments."""
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
    """Return the fault of a command, or None."""
    while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] in {"sudo", "time", "-v"}):
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
    if program.startswith("scripts/") or program == ".ci/run":
        return None if (ROOT / program).is_file() else "no such script"
    if name in {"python", "python3", "$python"}:
        return python_command(arguments)
    return None if name in OF_OTHERS else "no program that is known here"


class Parsed(BaseException):
    """A command line fits its command. This is no ``Exception``, because the command would report that."""


def parsed(arguments):
    """Parse a command line of fastckpt, as the command does, and do nothing."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(parser, *given, **named):
        parse(parser, *given, **named)
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
    """Return the fault of a Python command, or None: its program must exist, and have the options in or beside it."""
    if arguments[0] in {"-c", "-m"}:
        return None
    file = ROOT / arguments[0]
    if not file.is_file():
        return None if arguments[0] == "train.py" else "no such program"
    beside = [*file.parent.glob("*.py"), *file.parent.glob("*/*.py")]
    texts = "".join(each.read_text(encoding="utf-8") for each in [file, *beside])
    # If a program makes options from names of axes, its text has only the names.
    named = '"' if 'add_argument(f"--{' in file.read_text(encoding="utf-8") else '"--'
    options = [word.removeprefix("--") for word in arguments[1:] if word.startswith("--")]
    lacking = [option for option in options if f'"--{option}"' not in texts and f'{named}{option}"' not in texts]
    return f"no option {lacking}" if lacking else None


def test_commands(capfd):
    """Checks commands in indented blocks and in lines of sessions."""
    found = []
    for page, text, line in all_of(None):
        found += [(page, line, words, said) for words in commands(text) if (said := wrong(words))]
    for page, text, line in all_of("console"):
        lines = "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)", text, re.MULTILINE))
        found += [
            (page, line, words, said) for words in commands(lines) if words[0] != "cat" and (said := wrong(words))
        ]
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


def test_a_synopsis_has_the_options_of_its_command(capsys):
    found = 0
    for page, text, _ in all_of("text"):
        for command in re.findall(r"^fastckpt (\w+) .*\[", text):
            assert cli.main([command, "--help"]) == 0
            told = capsys.readouterr().out
            assert set(re.findall(r"--[\w-]+", text)) <= set(re.findall(r"--[\w-]+", told)), page
            found += 1
    assert found == 2


# -- data and scripts --------------------------------------------------------------------------------------------------


def test_yaml_is_read():
    yaml = needs.package("yaml")
    for page, text, line in all_of("yaml"):
        assert all(isinstance(one, dict) for one in yaml.safe_load_all(text)), (page, line)


def test_scripts_are_read():
    bash = shutil.which("bash")
    for page, text, line in all_of("bash"):
        done = subprocess.run([bash, "-n"], input=text, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), (page, line)
        fastckpt = [words for words in commands(text) if words[0].startswith("fastckpt")]
        assert [words for words in fastckpt if wrong(words)] == [], (page, line)
