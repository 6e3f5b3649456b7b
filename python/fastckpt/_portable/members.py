"""Separates the members of a JSON object and counts their elements before parsing: json builds lists of any length."""

from __future__ import annotations

import collections
import json
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import numpy as np

from .limits import MAX_TOKENS, MAX_VALUES

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The deepest nesting for the JSON parser, and for a structure: its array, a token, a list in it.
_DEEPEST, _TOKENS_DEEPEST = 127, 3
#: The longest integer of 64 bits.
_INTEGER_DIGITS = 20
_SPACE = b" \t\r\n"
#: Stands for the value of a member that its object names twice: parsers differ in which of the values they take.
TWICE: Final = object()

#: Bytes that are scanned together, and the bytes that must not be cut: an escape.
_CHUNK = 64 << 10
_ESCAPE = re.compile(rb"\\*.?", re.DOTALL)
_ARRAY = re.compile(rb"[ \t\r\n]*\[")
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair: it is not a character

_QUOTE, _COMMA, _COLON, _LIST, _OBJECT = b'",:[{'
_IS_MARK = np.isin(np.arange(256), list(b"[]{},:"))
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1

_Array: TypeAlias = "np.ndarray[Any, Any]"


class NotUnicode(dict[str, Any]):
    """An object with a name that is not Unicode. Like the core, readers may ignore it, but not read it."""


def _marks(text: memoryview, depth: int = 0) -> Iterator[tuple[_Array, _Array, _Array]]:
    """The brackets, commas and colons of JSON outside strings; ``depth`` brackets are open before the text.

    Yields:
        For a piece of the text: their positions, the characters, and the number of open brackets after each.
    """
    begin = quotes = 0
    while begin < len(text):
        end = begin + _CHUNK
        if bytes(text[end - 1 : end]) == b"\\":
            end = _ESCAPE.match(text, end).end()  # type: ignore[union-attr] # it matches nothing, too
        # With escapes overwritten, by as many bytes, every quote begins or ends a string.
        plain = np.frombuffer(bytes(text[begin:end]).replace(b"\\\\", b"__").replace(b'\\"', b"__"), np.uint8)
        at = np.flatnonzero(_IS_MARK[plain])
        found = np.flatnonzero(plain == _QUOTE)
        at = at[(np.searchsorted(found, at) + quotes) % 2 == 0]
        quotes += len(found)
        marks = plain[at]
        depths = np.cumsum(_STEP[marks], dtype=np.int64) + depth
        if len(at):
            depth = int(depths[-1])
            yield at + begin, marks, depths
        begin = end


def count(text: memoryview) -> int:
    """The most elements that the array ``text`` can have."""
    return 1 + sum(int(np.count_nonzero((marks == _COMMA) & (depth == 1))) for _, marks, depth in _marks(text))


def check_tokens(what: str, text: memoryview) -> None:
    """Raise ValueError unless ``text`` is an array of tokens within the limits of the format."""
    if _ARRAY.match(text) is None:
        raise ValueError(f"{what} is not an array")
    tokens = values = 1
    last = 0
    for _, marks, depth in _marks(text):
        if (marks == _OBJECT).any():
            raise ValueError(f"{what} holds an object")
        commas = marks == _COMMA
        # The number of the token at each mark, and of the tokens that have a list.
        number = np.cumsum(commas & (depth == 1)) + tokens
        lists = number[(marks == _LIST) & (depth == _TOKENS_DEEPEST)]
        tokens, values = int(number[-1]), values + int(np.count_nonzero(commas))
        if depth.max() > _TOKENS_DEEPEST or tokens > MAX_TOKENS or values > MAX_VALUES:
            raise ValueError(f"{what} is deeper or longer than the format allows")
        if len(lists):
            if lists[0] == last or (np.diff(lists) == 0).any():
                raise ValueError(f"{what} holds a token with more than one list in it")
            last = int(lists[-1])


def members(text: memoryview) -> list[tuple[str, memoryview]]:
    """The members of an object whose text after the first brace is ``text``: names, and unparsed values.

    A value may be nested to any depth: values deeper than the limit are checked, and replaced by 0.

    Raises:
        ValueError: it is not an object.
    """
    colons: list[int] = []
    commas = [-1]
    end, deep = -1, False
    for at, marks, depth in _marks(text, 1):
        if end >= 0 or (depth[:-1] < 1).any():
            raise ValueError("something follows its last brace")
        deep = deep or bool(depth.max() > _DEEPEST)
        colons += at[(depth == 1) & (marks == _COLON)].tolist()
        commas += at[(depth == 1) & (marks == _COMMA)].tolist()
        end = int(at[-1]) if depth[-1] < 1 else -1
    if end < 0 or bytes(text[end:]).rstrip(_SPACE) != b"}":
        raise ValueError("it is not one JSON object")
    if len(colons) != len(commas):
        raise ValueError("it has a member without a name or a value")
    if deep:
        return members(memoryview(_shallow(text)))
    found = []
    for begin, colon, stop in zip(commas, colons, [*commas[1:], end], strict=True):
        name = json.loads(str(text[begin + 1 : colon], "utf-8")) if begin < colon < stop else None
        if type(name) is not str or _HALF.search(name):
            raise ValueError("it has a member whose name is not Unicode")
        found.append((name, text[colon + 1 : stop]))
    return found


def _shallow(text: memoryview) -> bytes:
    """``text`` with 0 in place of each value that is nested too deep, after a check that it is JSON.

    Text is checked once, whatever its depth, and never parsed deeper than the limit: a value is cut out as soon as it
    is complete, after the values inside it.
    """
    # The pieces of each open value, the object itself first.
    pieces: list[list[bytes]] = [[]]
    done = 0
    for at, marks, depth in _marks(text, 1):
        opens = (_STEP[marks] > 0) & (depth % (_DEEPEST + 1) == 0)
        closes = (_STEP[marks] < 0) & (depth % (_DEEPEST + 1) == _DEEPEST)
        for mark in np.flatnonzero(opens | closes).tolist():
            here = int(at[mark])
            if opens[mark]:
                pieces[-1].append(bytes(text[done:here]))
                pieces.append([])
                done = here
            else:
                pieces[-1].append(bytes(text[done : here + 1]))
                check(str(b"".join(pieces.pop()), "utf-8"))
                pieces[-1].append(b"0")
                done = here + 1
    return b"".join([*pieces[0], bytes(text[done:])])


def parse(text: str) -> Any:
    """Parse JSON: see :data:`TWICE` and :class:`NotUnicode`; an integer beyond 64 bits becomes a float.

    Raises:
        ValueError: the text is not JSON.
    """
    return json.loads(text, parse_int=_int, parse_constant=_constant, object_pairs_hook=_object)


def check(text: str) -> None:
    """Raise ValueError unless this is JSON."""
    json.loads(text, parse_int=len, parse_float=len, parse_constant=_constant)


def _int(digits: str) -> int | float:
    # -0 has a sign, so it does not count as an integer.
    return int(digits) if len(digits) <= _INTEGER_DIGITS and digits != "-0" else float(digits)


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        times = collections.Counter(name for name, _ in pairs)
        made.update((name, TWICE) for name in made if times[name] > 1)
    return NotUnicode(made) if _HALF.search("".join(made)) else made
