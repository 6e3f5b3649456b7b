"""The command ``fastckpt``, run in this process as ``python -m fastckpt`` runs it in a separate one."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit status. It prints to this process's streams."""
    before, sys.argv = sys.argv, ["fastckpt", *arguments]
    try:
        runpy.run_module("fastckpt", run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    raise AssertionError("the command returned without an exit status")
