"""``fastckpt rm`` and ``pin``: remove a checkpoint, or keep it whatever the policies of its run decide; and ``top``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from typing import TYPE_CHECKING, Any

import fastckpt

from .places import place
from .runs import form_of, step_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence


def register(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommands; ``command(name, text, more)`` makes their parsers."""
    rm = command("rm", "remove a checkpoint", "It loses its name at once; half of it is never visible.")
    rm.add_argument("path", metavar="PATH", type=place, help="the checkpoint: its directory or URL")
    rm.add_argument("--force", action="store_true", help="also remove other plain files in it")
    pin = command(
        "pin",
        "keep a checkpoint, whatever the policies of its run decide",
        "Only on this tier: a manager with remote= pins on both.",
    )
    pin.add_argument("path", metavar="PATH", type=place, help="the checkpoint: its directory")
    pin.add_argument("--off", action="store_true", help="let the policies decide on it again")
    top = command("top", "show saves and loads live, and the slow ranks", "Runs fastckpt-top with all its options.")
    top.add_argument("options", metavar="OPTION", nargs="*", help="see 'fastckpt-top --help'")


def remove(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Remove one checkpoint; return exit status, JSON document and lines."""
    path = options.path if isinstance(options.path, str) else os.fspath(options.path.absolute())
    fastckpt.remove(path, force=options.force)
    return 0, {"path": path, "removed": True}, [f"removed {path}"]


def pin(options: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    """Pin or unpin one checkpoint; return exit status, JSON document and lines."""
    if isinstance(options.path, str):
        raise ValueError(f"pin: {options.path!r} is a URL: the run's manager pins there")  # noqa: TRY004
    path = options.path.absolute()
    form = form_of([path.name])
    step = step_of(path.name, form)
    if step is None:
        raise ValueError(f"pin: the name {path.name!r} has no step number")
    manager = fastckpt.Manager(path.parent, name=form)
    if options.off:
        manager.unpin(step)
    else:
        manager.pin(step)
    document = {"path": str(path), "step": step, "pinned": not options.off}
    return 0, document, [f"{'unpinned' if options.off else 'pinned'} {path}"]


def top(arguments: Sequence[str]) -> int:
    """Run the monitor, which is a separate distribution; returns its exit status."""
    # Look beside this command first, because its environment may not be activated.
    where = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    program = shutil.which("fastckpt-top", path=os.pathsep.join(where))
    if program is None:
        sys.stderr.write("fastckpt: the monitor is not installed: pip install fastckpt-top\n")
        return 2
    output = subprocess.DEVNULL if "--quiet" in arguments else None
    given = [argument for argument in arguments if argument != "--quiet"]
    return subprocess.call([program, *given], stdout=output)  # noqa: S603 - what pip has installed
