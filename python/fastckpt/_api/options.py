"""Checks arguments of callers before anything happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

from fastckpt import _core
from fastckpt._units import LEAST_RATE, bytes_of

#: Argument types of public functions, as type checkers see them.
Engine: TypeAlias = Literal["auto", "uring", "threads", "direct", "buffered"]
Framework: TypeAlias = Literal["auto", "torch", "numpy"]
Undeclared: TypeAlias = Literal["error", "plain"]

_MOST_NICE = 19


def one_of(argument: str, words: tuple[str, ...]) -> Callable[[str, Any], str]:
    """The check of an argument that is one of these words; a member of an enum of texts is its text."""

    def check(operation: str, given: Any) -> str:
        if given not in words:
            raise ValueError(f"{operation}: {argument} must be one of {', '.join(words)}, not {given!r}")
        return words[words.index(given)]

    return check


check_io = one_of("io", get_args(Engine))
check_undeclared = one_of("undeclared", get_args(Undeclared))
check_framework = one_of("framework", get_args(Framework))


def check_threads(operation: str, threads: Any) -> int | None:
    """``threads=``."""
    if threads is not None and (type(threads) is not int or not 1 <= threads <= _core.MOST_THREADS):
        raise ValueError(f"{operation}: threads must be None or an int from 1 to {_core.MOST_THREADS}, not {threads!r}")
    return threads


def check_in_flight(operation: str, most: Any) -> int:
    """``max_in_flight=``."""
    if type(most) is not int or most < 1:
        raise ValueError(f"{operation}: max_in_flight must be an int, at least 1, not {most!r}")
    return most


def check_nice(operation: str, nice: Any) -> int | None:
    """``nice=``."""
    if nice is not None and (type(nice) is not int or not 0 <= nice <= _MOST_NICE):
        raise ValueError(f"{operation}: nice must be None or an int from 0 to {_MOST_NICE}, not {nice!r}")
    return nice


def check_bandwidth(operation: str, limit: Any, what: str = "bandwidth_limit") -> int | None:
    """``bandwidth_limit=``, or another argument of that kind, in bytes per second."""
    if limit is None:
        return None
    found = bytes_of(f"{operation}: {what}", limit.removesuffix("/s") if isinstance(limit, str) else limit)
    if found < LEAST_RATE and not (isinstance(limit, str) and limit.removesuffix("/s").endswith("B")):
        raise ValueError(f"{operation}: {what}: {limit!r} would be bytes per second: give it a unit, as in '2GB'")
    return found


def check_pin(operation: str, pin: Any) -> int | None:
    """``pin=``: the most bytes that may be pinned in this process; None for any number."""
    if isinstance(pin, bool):
        return None if pin else 0
    if type(pin) is int and pin == 0:
        return 0
    try:
        # A number of bytes is whole, unless it has a unit.
        return bytes_of("pin", None if isinstance(pin, float) else pin)
    except ValueError:
        raise ValueError(
            f"{operation}: pin must be True, False, or the most bytes to pin in this process: an int, or a string such "
            f"as '8GB' or '8GiB'; not {pin!r}"
        ) from None
