"""``fastckpt clean``: lists and removes leftovers of killed saves and copies in a directory of checkpoints."""

from __future__ import annotations

import datetime as dt
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import fastckpt
from fastckpt._text import count, size, table, visible

from .places import place

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

#: The meaning of each state, in words.
STATES = {
    "alive": "its writer is running",
    "dead": "not needed: the next save here removes it (if a copy left it, the same copy continues it)",
    "unknown": "its writer may be running, perhaps on another machine",
    "kept": "an old checkpoint that a save was about to replace, or the save itself",
    "foreign": "not a checkpoint, displaced by a save that was killed: move it by hand",
}


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; ``command(name, text, more)`` makes its parser."""
    parser = command(
        "clean",
        "list or remove what killed saves and copies left in a directory",
        "Without --yes nothing is changed. What a running save writes is never removed. Exits with 1 if something "
        "could not be removed.",
    )
    parser.add_argument("path", metavar="DIR", type=place, help="the directory that holds the checkpoints")
    parser.add_argument("--yes", action="store_true", help="remove the leftovers that are not needed any more")
    parser.add_argument(
        "--older-than",
        metavar="TIME",
        help="also remove leftovers whose writer may still run, and old checkpoints that are kept, if nothing in them "
        "was made, removed or written for TIME, such as 2h; give a longer time than any save can pause",
    )


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """List leftovers, and remove the requested ones; returns exit status, JSON document and lines."""
    directory = options.path if isinstance(options.path, str) else os.fspath(options.path.absolute())
    left = fastckpt.clean(directory, older_than=options.older_than, dry_run=not options.yes)
    found = [{name: value for name, value in asdict(one).items() if name != "error"} for one in left]
    failures = [str(one.error) for one in left if one.error is not None]
    document = {"path": directory, "leftovers": found, "failures": failures}
    return 1 if failures else 0, document, [*_lines(directory, found), *map(visible, failures)]


def _lines(directory: str, found: list[dict[str, Any]]) -> list[str]:
    if not found:
        return [f"nothing is left over in {directory}"]
    rows: list[tuple[str, ...]] = [("checkpoint", "host", "changed", "size", "state", "name")]
    for one in found:
        when = dt.datetime.fromtimestamp(one["changed"]).astimezone().strftime("%Y-%m-%d %H:%M")
        state = "removed" if one["removed"] else f"{one['state']}: would be removed" if one["due"] else one["state"]
        rows.append((one["checkpoint"], one["host"], when, size(one["bytes"]), state, one["name"]))
    left = [one for one in found if not one["removed"]]
    lines = table(rows, right=(3,))
    lines += [f"{state}: {text}" for state, text in STATES.items() if any(one["state"] == state for one in left)]
    return [*lines, f"{count(len(left), 'leftover')} stayed"]
