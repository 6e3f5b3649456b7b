"""The place of a checkpoint, and the names of options, on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastckpt._paths import is_url
from fastckpt._stores.urls import place_of


def option(name: str) -> str:
    """The option that sets an argument of this name."""
    return f"--{name.replace('_', '-')}"


def path(text: str) -> Path:
    """Return a path; refuse an empty one, as from an unset variable, which would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return Path(text)


def place(text: str) -> Path | str:
    """A path, even from ``file://``; another URL unchanged, because a Path would fold its slashes."""
    if not text.lower().startswith("file:/"):
        return text if is_url(text) else path(text)
    try:
        return Path(place_of("open", text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
