"""Checks arguments of callers before anything happens."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from fastckpt import _core
from fastckpt._units import bytes_of

#: Argument types of public functions, as type checkers see them.
Engine: TypeAlias = Literal["auto", "uring", "threads", "direct", "buffered"]
Framework: TypeAlias = Literal["auto", "torch", "numpy"]
Unknown: TypeAlias = Literal["error", "plain"]

_ENGINES = get_args(Engine)
_FRAMEWORKS = get_args(Framework)
_UNKNOWN = get_args(Unknown)
_MOST_NICE = 19


def check_io(operation: str, io: Any) -> str:
    """``io=``."""
    if io not in _ENGINES:
        raise ValueError(f"{operation}: io must be one of {', '.join(_ENGINES)}, not {io!r}")
    engine: str = _ENGINES[_ENGINES.index(io)]
    return engine


def check_threads(operation: str, threads: Any) -> int | None:
    """``threads=``."""
    if threads is not None and (type(threads) is not int or not 1 <= threads <= _core.MOST_THREADS):
        raise ValueError(f"{operation}: threads must be None or an int from 1 to {_core.MOST_THREADS}, not {threads!r}")
    return threads


def check_unknown(operation: str, unknown: Any) -> None:
    """``unknown=``."""
    if unknown not in _UNKNOWN:
        raise ValueError(f"{operation}: unknown must be one of {', '.join(_UNKNOWN)}, not {unknown!r}")


def check_framework(operation: str, framework: Any) -> None:
    """``framework=``."""
    if framework not in _FRAMEWORKS:
        raise ValueError(f"{operation}: framework must be one of {', '.join(_FRAMEWORKS)}, not {framework!r}")


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
    return bytes_of(f"{operation}: {what}", limit.removesuffix("/s") if isinstance(limit, str) else limit)


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
