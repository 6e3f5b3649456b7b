"""``fastckpt rm``, ``pin`` and ``unpin``: one checkpoint goes, or stays whatever the policies of its run decide."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import fastckpt

from .places import place
from .runs import form_of, step_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommands; ``command(name, text, more)`` makes their parsers."""
    rm = command("rm", "remove a checkpoint", "It loses its name at once; half of it is never visible.")
    rm.add_argument("path", metavar="PATH", type=place, help="the checkpoint: its directory or URL")
    rm.add_argument("--force", action="store_true", help="also remove other plain files in it")
    for name, text in (
        ("pin", "keep a checkpoint, whatever the policies of its run decide"),
        ("unpin", "let the policies of its run decide on a checkpoint again"),
    ):
        parser = command(name, text, "Only on this tier: a manager with remote= pins on both.")
        parser.add_argument("path", metavar="PATH", type=place, help="the checkpoint: its directory")


def remove(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Remove one; return exit status, JSON document and lines."""
    path = options.path if isinstance(options.path, str) else os.fspath(options.path.absolute())
    fastckpt.remove(path, force=options.force)
    return 0, {"path": path, "removed": True}, [f"removed {path}"]


def pin(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Pin or unpin one; return exit status, JSON document and lines."""
    if isinstance(options.path, str):
        raise ValueError(f"{options.command}: {options.path!r} is a URL: the run's manager pins there")  # noqa: TRY004
    path = options.path.absolute()
    form = form_of([path.name])
    step = step_of(path.name, form)
    if step is None:
        raise ValueError(f"{options.command}: {path.name!r} has no number of a step")
    manager = fastckpt.Manager(path.parent, name=form)
    if options.command == "pin":
        manager.pin(step)
    else:
        manager.unpin(step)
    return 0, {"path": str(path), "step": step, "pinned": options.command == "pin"}, [f"{options.command}ned {path}"]
