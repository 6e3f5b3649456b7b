"""Checks arguments of callers before anything happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

from fastckpt._units import LEAST_RATE, bytes_of

#: Argument types of public functions, as type checkers see them.
Framework: TypeAlias = Literal["auto", "torch", "numpy"]


def one_of(argument: str, words: tuple[str, ...]) -> Callable[[str, Any], str]:
    """The check of an argument that must be one of these words; a member of a string enum counts as its string."""

    def check(operation: str, given: Any) -> str:
        if given not in words:
            raise ValueError(f"{operation}: {argument} must be one of {', '.join(words)}, not {given!r}")
        return words[words.index(given)]

    return check


check_framework = one_of("framework", get_args(Framework))


def check_bandwidth(operation: str, limit: Any, what: str = "bandwidth_limit") -> int | None:
    """``bandwidth_limit=``, or another argument of that kind, in bytes per second."""
    if limit is None:
        return None
    found = bytes_of(f"{operation}: {what}", limit.removesuffix("/s") if isinstance(limit, str) else limit)
    if found < LEAST_RATE and not (isinstance(limit, str) and limit.removesuffix("/s").endswith("B")):
        raise ValueError(f"{operation}: {what}: {limit!r} would be bytes per second: give it a unit, as in '2GB'")
    return found
