"""``fastckpt completion``: a script that completes commands, options and paths in a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .places import path, place

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; ``command(name, text, more)`` makes its parser."""
    parser = command("completion", "print a script that completes this command in a shell")
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Generate the script; return exit status, JSON document and lines."""
    try:
        import shtab  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise ImportError(
            f'completion: this needs the package shtab: pip install "fastckpt-io[completion]" ({error})'
        ) from None
    for parser in options.every.values():
        for action in parser.arguments():
            if action.type in (path, place):
                action.complete = shtab.FILE
    script = shtab.complete(options.whole, shell=options.shell)
    return 0, {"shell": options.shell, "script": script}, script.splitlines()
