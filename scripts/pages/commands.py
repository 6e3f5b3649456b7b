"""A page with the `--help` output of every command."""

from __future__ import annotations

import contextlib
import io
import os
import re
from importlib.metadata import entry_points
from unittest import mock

_HEAD = """# Commands

For those who look up an option: what `--help` prints. [The command line](command-line.md) has formats, exit
statuses and JSON.
"""
#: A command in the list of commands.
_COMMAND = re.compile(r"^ {2,4}([a-z]+) {2,}\S", re.MULTILINE)


def pages() -> dict[str, str]:
    """The page, by its path."""
    whole = _help("fastckpt")
    listed = whole.partition("COMMAND")[2]
    commands = [command for command in _COMMAND.findall(listed) if command != "top"]  # which is a separate program
    sections = [_section(f"fastckpt {command}", _help("fastckpt", command)) for command in commands]
    last = _section("fastckpt-top", _help("fastckpt-top"))
    return {"commands.md": "\n".join([_HEAD, _section("fastckpt", whole), *sections, last])}


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text.rstrip()}\n```\n"


def _help(program: str, *arguments: str) -> str:
    """What a command prints for `--help`, 100 columns wide."""
    (script,) = entry_points(group="console_scripts", name=program)
    said = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="100", NO_COLOR="1"),
        mock.patch("sys.argv", [program, *arguments, "--help"]),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        script.load()()
    return said.getvalue()
