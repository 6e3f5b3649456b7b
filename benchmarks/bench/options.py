"""The options that all scripts share, and the directories in which they run."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench import GB
from bench.contenders import OTHER, Spec
from bench.loop import mounted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the shared options."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=positive, default=5, help="rounds (default: 5)")
    made.add_argument(
        "--dir",
        type=Path,
        default=Path(__file__).resolve().parents[2] / "target",
        help="where to write, on the storage to be measured (default: target/ of the repository)",
    )
    made.add_argument(
        "--loop",
        type=float,
        metavar="GB",
        help="write instead to an ext4 of this size on a loop device over /dev/shm, with direct I/O; needs root, takes "
        "this much memory, and is unmounted and deleted at the end",
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures and samples to FILE")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures into FILE, SVG or PNG (matplotlib)")
    made.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    return made


def add_against(made: argparse.ArgumentParser) -> None:
    """Add the option that includes another build of fastckpt."""
    made.add_argument(
        "--against",
        type=build,
        default=[],
        metavar="DIR",
        help="also measure another build of fastckpt, installed by pip install --no-deps --target DIR WHEEL",
    )


def build(text: str) -> list[Spec]:
    """Return the contender that is the build of fastckpt in this directory."""
    if not Path(text, "fastckpt").is_dir():
        raise argparse.ArgumentTypeError(f"{text} has no fastckpt: run pip install --no-deps --target {text} WHEEL")
    return [replace(OTHER, site=str(Path(text).resolve()))]


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def several(kind: Callable[[str], object]) -> Callable[[str], list[object]]:
    """Return a parser of a comma-separated list."""

    def parse(text: str) -> list[object]:
        return [kind(word) for word in text.split(",") if word]

    parse.__name__ = "list with commas"
    return parse


def amount(text: str) -> int:
    """Return bytes or a count: ``4096``, ``64K``, ``4M``, ``1G`` (powers of 1024) or ``2e9``."""
    factors = {"K": 2**10, "M": 2**20, "G": 2**30}
    if text[-1:].upper() in factors:
        return int(float(text[:-1]) * factors[text[-1].upper()])
    return int(float(text))


@contextmanager
def working_directory(options: argparse.Namespace, prefix: str) -> Iterator[Path]:
    """Yield a fresh directory on the storage to be measured; it is removed afterwards, even after an interrupt."""
    # A terminated run cleans up like an interrupted one.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: sys.exit(128 + got))
    with ExitStack() as stack:
        if options.loop:
            parent = stack.enter_context(mounted(int(options.loop * GB)))
        else:
            parent = options.dir
            parent.mkdir(parents=True, exist_ok=True)
        yield Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{prefix}-", dir=parent)))
