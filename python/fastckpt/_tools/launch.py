"""``fastckpt run``: runs a program with the integrations of its frameworks installed."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

#: The directory of the module that each Python process below imports first: ``integrations/_site/sitecustomize.py``.
_SITE = str(Path(__file__).parents[1] / "integrations" / "_site")


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; ``command(name, text, more)`` makes its parser."""
    parser = command(
        "run",
        "run a training program that saves through fastckpt",
        "It calls install() of fastckpt.integrations for the frameworks that the program imports (transformers, "
        "accelerate), in all of its processes, as in: fastckpt run -- torchrun train.py. The exit status is the "
        "program's.",
    )
    parser.add_argument("program", metavar="-- COMMAND", nargs=argparse.REMAINDER, help="a command, or a Python file")


def run(options: argparse.Namespace) -> NoReturn:
    """Replace this process by the program.

    Raises:
        FileNotFoundError: the command does not exist.
        ImportError: a package is missing.
        ValueError: no command is given.
    """
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise ValueError("run: give a command after --, as in 'fastckpt run -- trl sft --config sft.yaml'")
    if importlib.util.find_spec("wrapt") is None:
        raise ImportError('run: this needs the package wrapt: pip install "fastckpt-io[run]"')
    if program[0].endswith(".py"):
        program = [sys.executable, *program]
    found = shutil.which(program[0])
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no such command", program[0])
    paths = [_SITE, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.execve(found, program, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})  # noqa: S606 - as the user asks
