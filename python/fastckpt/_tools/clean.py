"""``fastckpt clean``: lists and removes leftovers of killed saves and copies in a directory of checkpoints."""

from __future__ import annotations

import datetime as dt
import os
import time
from typing import TYPE_CHECKING, Any

import fastckpt
from fastckpt._text import count, size, table, visible

from .places import place

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

#: The meaning of each state, for people.
STATES = {
    "alive": "its writer is running",
    "dead": "not needed: the next save here removes it (of a copy: the same copy continues it)",
    "unknown": "its writer may be running, perhaps on another machine",
    "kept": "an old checkpoint that a save was about to replace, or the save itself",
    "foreign": "not a checkpoint, displaced by a save that was killed: move it by hand",
}


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; ``command(name, text, more)`` makes its parser."""
    parser = command(
        "clean",
        "list or remove what killed saves and copies left in a directory",
        "Without --remove nothing is changed. What a running save writes is never removed. Exits with 1 if something "
        "could not be removed.",
    )
    parser.add_argument("path", metavar="DIR", type=place, help="the directory that holds the checkpoints")
    parser.add_argument("--remove", action="store_true", help="remove leftovers that are not needed")
    parser.add_argument(
        "--older-than",
        metavar="HOURS",
        type=float,
        help="with --remove: also remove leftovers whose writer may still run, and old checkpoints that are kept, if "
        "nothing in them was made, removed or written for that long; give more hours than any save can pause",
    )


def run(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """List leftovers, and remove the requested ones; returns exit status, JSON document and lines."""
    hours = options.older_than
    if hours is not None and (not options.remove or not hours >= 0):
        raise ValueError("clean: --older-than requires --remove and a non-negative number of hours")
    directory = options.path if isinstance(options.path, str) else os.fspath(options.path.absolute())
    found: list[dict[str, Any]] = []
    failures: list[str] = []
    for one in fastckpt.leftovers(directory):
        old = hours is not None and time.time() - one.changed > hours * 3600
        try:
            removed = options.remove and fastckpt.remove_leftover(directory, one.name, force=old)
        except OSError as error:
            removed = False
            failures.append(str(error))
        found.append(
            {
                "name": one.name,
                "checkpoint": one.checkpoint,
                "host": one.host,
                "state": one.state,
                "bytes": one.bytes,
                "changed": one.changed,
                "removed": removed,
            }
        )
    document = {"path": directory, "leftovers": found, "failures": failures}
    return 1 if failures else 0, document, [*_lines(directory, found), *map(visible, failures)]


def _lines(directory: str, found: list[dict[str, Any]]) -> list[str]:
    if not found:
        return [f"nothing is left over in {directory}"]
    rows: list[tuple[str, ...]] = [("checkpoint", "host", "changed", "size", "state", "name")]
    for one in found:
        when = dt.datetime.fromtimestamp(one["changed"]).astimezone().strftime("%Y-%m-%d %H:%M")
        state = "removed" if one["removed"] else one["state"]
        rows.append((one["checkpoint"], one["host"], when, size(one["bytes"]), state, one["name"]))
    left = [one for one in found if not one["removed"]]
    lines = table(rows, right=(3,))
    lines += [f"{state}: {text}" for state, text in STATES.items() if any(one["state"] == state for one in left)]
    return [*lines, f"{count(len(left), 'leftover')} stayed"]
