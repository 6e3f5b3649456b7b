"""Requests of the protocol to its environment: a store, a clock, and functions that may take long."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias


class Put(NamedTuple):
    """Set keys to bytes."""

    values: dict[str, bytes]


class Get(NamedTuple):
    """Return the values of keys, None for missing ones, without waiting."""

    keys: tuple[str, ...]


class Wait(NamedTuple):
    """Wait for all keys, for at most this many seconds; return whether they exist. Rank ``whom`` sets one of them."""

    keys: tuple[str, ...]
    seconds: float
    whom: int


class Forget(NamedTuple):
    """End the last wait, whose keys will not come. To do so, missing keys may be set and removed."""


class Add(NamedTuple):
    """Add to a counter, which begins at 0, and return its new value. Its value is a text of digits."""

    key: str
    amount: int


class Swap(NamedTuple):
    """Set a key to ``value`` if it is ``expected`` (empty: missing), and return its value afterwards."""

    key: str
    expected: bytes
    value: bytes


class Remove(NamedTuple):
    """Remove keys, whether they exist or not."""

    keys: tuple[str, ...]


class Now(NamedTuple):
    """Return the seconds of a clock that only goes forward."""


class Call(NamedTuple):
    """Return the result of a function."""

    function: Callable[[Any], Any]
    value: Any


Request: TypeAlias = Put | Get | Wait | Forget | Add | Swap | Remove | Now | Call
#: A generator that yields requests and receives their answers, which have the type that each request declares.
Steps: TypeAlias = Generator[Request, Any, Any]


class UnreachableError(Exception):
    """The store does not answer. The text names the store, and a possible cause."""


def value_of(key: str) -> Steps:
    """Return the value of one key, None if it does not exist."""
    return (yield Get((key,)))[0]
