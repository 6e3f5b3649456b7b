"""The options of the command, and their values."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Final

from fastckpt_top import __version__, segment, targets
from fastckpt_top.views.state import SORTS, VIEWS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_EPILOG: Final = """\
exit codes: 0 ok; 1 below target (--check); 2 usage; 3 no process or operation found; 4 file not readable
environment: FASTCKPT_TOP_DIR, FASTCKPT_TOP_TARGET, NO_COLOR
"""


_PLAIN: Final = {"": 1.0}
_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}


def parser() -> argparse.ArgumentParser:
    """All options, checked."""
    made = argparse.ArgumentParser(
        prog="fastckpt-top",
        description="Live monitor for fastckpt: GB/s of each rank and thread against the target of your storage.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_looks(made.add_argument)
    _add_screen(made.add_argument)
    made.add_argument(
        "--version", action="version", version=f"fastckpt-top {__version__}, segment layout {segment.MAJOR}.x"
    )
    _add_debug(made)
    return made


def _add_looks(add: Callable[..., object]) -> None:
    """The options for what is observed, how often, and the outputs."""
    _add_places(add)
    add("--pid", type=int, action="append", default=[], metavar="PID", help="only this process; may be repeated")
    add("--rank", type=int, action="append", default=[], metavar="N", help="only this rank; may be repeated")
    add("--job", default="", metavar="NAME", help="only the job of this name or key (--once and --json show both)")
    add(
        "--target",
        type=_target,
        metavar="T",
        help="light, medium, high, a rate per GPU (2.5GB/s), or save=RATE,load=RATE",
    )
    add(
        "--gpus",
        type=_positive,
        metavar="N",
        help="GPUs that the target is multiplied by (default: those of the processes)",
    )
    add(
        "-d",
        "--interval",
        type=_number(0.1, 60.0, "0.1 to 60 seconds", _UNITS),
        metavar="S",
        help="seconds between two looks, 0.1 to 60 (default 0.5; --once 1), or a time such as 500ms",
    )
    add("--once", action="store_true", help="print a table of the present and exit")
    add("--json", action="store_true", help="print JSON lines; with --once one object")
    add(
        "--check",
        nargs="?",
        type=_number(0.0, 1e6, "a percentage"),
        const=100.0,
        metavar="PCT",
        help="exit 1 if the average of any job is below PCT %% of its target (default 100)",
    )
    add("--prometheus", metavar="FILE", help="also write a file for node_exporter's textfile collector at each look")
    add("--record", metavar="FILE", help="also record, as JSON lines (.gz: compressed)")
    add("--replay", metavar="FILE", help="show a recording")
    add(
        "--speed",
        type=_number(0.01, 1000.0, "0.01 to 1000"),
        default=1.0,
        metavar="X",
        help="speed of a replay (default 1)",
    )
    add("--demo", action="store_true", help="show a made-up node")
    add(
        "--duration",
        type=_number(0.0, 1e9, "seconds, or a time such as 5min", _UNITS),
        metavar="S",
        help="stop after so many seconds, or a time such as 5min",
    )
    add("--count", type=_positive, metavar="N", help="stop after so many looks (line mode and --json)")


def _add_places(add: Callable[..., object]) -> None:
    """The options for the places of segments."""
    add("--dir", metavar="DIR", help="look there instead of FASTCKPT_TOP_DIR or /dev/shm/fastckpt-UID")
    add("--all-users", action="store_true", help="look at the processes of all users and containers (as root)")


def _add_screen(add: Callable[..., object]) -> None:
    """The options for the screen."""
    add("--view", choices=VIEWS, default=VIEWS[0], help="first view (default: live)")
    add("--sort", choices=SORTS, help="first order of the ranks (default: the slowest first, or the last one chosen)")
    add(
        "--theme",
        default="",
        metavar="NAME",
        help="a Textual theme, such as textual-light or nord; c goes through them",
    )
    add("--no-config", action="store_true", help="neither read nor write ~/.config/fastckpt/top.json")
    add("--ascii", action="store_true", help="ASCII characters only")
    add("--no-color", action="store_true", help="shades of grey only, like NO_COLOR=1")
    add("--inline", action="store_true", help="under the prompt instead of on the whole screen")


def _add_debug(made: argparse.ArgumentParser) -> None:
    """``debug``: the subcommands for the shared segments."""
    words = "look at the shared segments of processes, or remove them"
    debug = made.add_subparsers(dest="command", metavar="debug", help=f"{words}: see debug --help").add_parser(
        "debug", allow_abbrev=False
    )
    debug.description = f"{words.capitalize()}."
    made.usage = "%(prog)s [options]\n       %(prog)s debug {ls,clean,dump} [options]"
    commands = debug.add_subparsers(dest="what", metavar="COMMAND", required=True)
    # The subcommands have no defaults, which would override options before `debug`.
    found = commands.add_parser("ls", help="list the segments", argument_default=argparse.SUPPRESS, allow_abbrev=False)
    found.add_argument("--json", action="store_true", help="print JSON lines")
    clean = commands.add_parser(
        "clean",
        help="show segments of dead processes older than 10 minutes",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    clean.add_argument("--yes", action="store_true", default=False, help="remove them")
    for one in (found, clean):
        _add_places(one.add_argument)
    commands.add_parser("dump", help="print a segment's contents as JSON").add_argument("segment", metavar="SEGMENT")


def _target(word: str) -> targets.Target:
    try:
        return targets.parse(word, "option")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(low: float, high: float, what: str, units: Mapping[str, float] = _PLAIN) -> Callable[[str], float]:
    """Reads a number with or without a unit, which must be between two limits."""

    def parse(word: str) -> float:
        try:
            number, unit = re.fullmatch(r"(.*?)([a-z]*)", word.strip()).groups()  # type: ignore[union-attr] # always
            value = float(number) * units[unit]
        except (ValueError, KeyError):
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"`{word}`: expected {what}")
        return value

    return parse


def _positive(word: str) -> int:
    value = _number(1, 1e6, "a whole number of at least 1")(word)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"`{word}`: expected a whole number of at least 1")
    return int(value)
