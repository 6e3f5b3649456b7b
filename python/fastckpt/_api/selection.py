"""Selection of names by patterns: for ``keys``, ``exclude`` and the patterns of ``dtype`` and ``device``."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fastckpt._state.select import named, without
from fastckpt._text import suggest

if TYPE_CHECKING:
    from fastckpt._state.unflatten import Token

#: The most names, and their greatest length, that are compared with a pattern that matches nothing.
_KNOWN, _LONG = 5000, 500


def _expression(pattern: str) -> str:
    if any(sign in pattern for sign in "*?["):
        return fnmatch.translate(pattern)
    return rf"(?s:{re.escape(pattern)}(?:\..*)?)\Z"


class Patterns:
    """The glob patterns of one argument. A pattern without ``*``, ``?`` and ``[`` also chooses all below that name.

    Args:
        argument: the name of the argument.
        patterns: the patterns.
        operation: the word that error messages begin with.

    Raises:
        TypeError: a pattern is not a string.
    """

    def __init__(self, argument: str, patterns: Iterable[Any], operation: str = "load") -> None:
        self.argument = argument
        self.operation = operation
        self.texts = list(patterns)
        for text in self.texts:
            if not isinstance(text, str):
                raise TypeError(f"{operation}: {argument}: a pattern must be a string, not {text!r}")
        self._matches = [re.compile(_expression(text)).match for text in self.texts]
        self._used = [False] * len(self.texts)
        self._known: list[str] = []

    def first(self, name: str) -> int | None:
        """The number of the first pattern that matches ``name``, or None. All matching patterns count as used."""
        found = None
        for number, match in enumerate(self._matches):
            if match(name):
                self._used[number] = True
                if found is None:
                    found = number
        if len(self._known) < _KNOWN and len(name) <= _LONG:
            self._known.append(name)
        return found

    def unused(self) -> list[str]:
        """The patterns that have matched no name so far."""
        return [text for text, used in zip(self.texts, self._used, strict=True) if not used]

    def check(self) -> None:
        """Raise KeyError for a pattern that has matched nothing."""
        for text in self.unused():
            # A pattern also chooses all names below a match: names are compared up to the depth of the pattern.
            parts = text.count(".") + 1
            near = suggest(text, [*dict.fromkeys(".".join(name.split(".", parts)[:parts]) for name in self._known)])
            if not near.startswith(";"):
                near = suggest(text, self._known)
            raise KeyError(f"{self.operation}: {self.argument}: {text!r} matches nothing{near}")


def patterns_of(argument: str, given: Any, operation: str) -> Patterns:
    """The patterns that a caller gave as one argument.

    Raises:
        TypeError: ``given`` is neither a pattern nor a sequence of patterns.
    """
    if not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray)):
        raise TypeError(f"{operation}: {argument} must be a pattern or a sequence of patterns, not {given!r}")
    return Patterns(argument, [given] if isinstance(given, str) else given, operation)


def texts_of(argument: str) -> Callable[[str, Any], tuple[str, ...] | None]:
    """The check of an option that accepts patterns; a record of settings stores them as strings."""

    def check(operation: str, given: Any) -> tuple[str, ...] | None:
        return None if given is None else tuple(patterns_of(argument, given, operation).texts)

    return check


class Selection:
    """The choice that ``keys`` and ``exclude`` make in a checkpoint: everything if both are None.

    Raises:
        TypeError: ``keys`` or ``exclude`` is neither patterns nor None.
    """

    def __init__(self, keys: Any, exclude: Any, operation: str = "load") -> None:
        self.keys = None if keys is None else patterns_of("keys", keys, operation)
        self.exclude = None if exclude is None else patterns_of("exclude", exclude, operation)
        self._operation = operation

    @property
    def all(self) -> bool:
        """Whether everything is chosen."""
        return self.keys is None and self.exclude is None

    def takes(self, name: str) -> bool:
        """Whether this name is chosen."""
        if self.exclude is not None and self.exclude.first(name) is not None:
            return False
        return self.keys is None or self.keys.first(name) is not None

    def of(self, tokens: list[Token], stored: list[str], *, strict: bool) -> tuple[set[int], tuple[str, ...]]:
        """The chosen positions of a structure whose stored tensors have the names ``stored``.

        Returns:
            The positions, and the patterns of ``keys`` that match nothing.

        Raises:
            KeyError: a pattern matches nothing, and ``strict`` is set.
            ValueError: ``exclude`` matches the whole state, which is one value.
        """
        wanted: set[int] = set()
        unwanted: set[int] = set()
        for position, name in named(tokens, stored):
            if self.keys is None or self.keys.first(name) is not None:
                wanted.add(position)
            if self.exclude is not None and self.exclude.first(name) is not None:
                unwanted.add(position)
        for patterns in (self.keys, self.exclude):
            if strict and patterns is not None:
                patterns.check()
        if 0 in unwanted:
            raise ValueError(f"{self._operation}: exclude= leaves nothing to save: the state is a single value")
        missing = () if self.keys is None else tuple(self.keys.unused())
        return without(tokens, wanted, unwanted) if unwanted else wanted, missing
