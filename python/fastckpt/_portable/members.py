"""The members of a JSON object, told apart and measured before anything is parsed: a parser makes what it is given."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from .limits import MAX_TOKENS, MAX_VALUES

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Nesting that any JSON of a manifest may have, and that of a structure: its array, a token, a list in it.
_DEEPEST, _TOKENS_DEEPEST = 127, 3
#: The longest integer of 64 bits.
_INTEGER_DIGITS = 20
_SPACE = b" \t\r\n"

#: Bytes that are looked at together, and what must not be cut from them: an escape.
_CHUNK = 256 << 10
_ESCAPE = re.compile(rb"\\*.?", re.DOTALL)

_QUOTE, _COMMA, _COLON, _LIST, _OBJECT = b'",:[{'
_IS_MARK = np.zeros(256, bool)
_IS_MARK[list(b"[]{},:")] = True
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1

_Array: TypeAlias = "np.ndarray[Any, Any]"


def _marks(text: bytes) -> Iterator[tuple[_Array, _Array, _Array]]:
    """The brackets, commas and colons of JSON that are in no string.

    Yields:
        For a stretch of the text: where they are, what they are, and how many brackets are open behind each.
    """
    begin = depth = quotes = 0
    while begin < len(text):
        end = begin + _CHUNK
        if text[end - 1 : end] == b"\\":
            end = _ESCAPE.match(text, end).end()  # type: ignore[union-attr] # it matches nothing, too
        # With escapes overwritten, by as many bytes, every quote begins or ends a string.
        plain = np.frombuffer(text[begin:end].replace(b"\\\\", b"__").replace(b'\\"', b"__"), np.uint8)
        at = np.flatnonzero(_IS_MARK[plain])
        found = np.flatnonzero(plain == _QUOTE)
        at = at[(np.searchsorted(found, at) + quotes) % 2 == 0]
        quotes += len(found)
        marks = plain[at]
        depths = np.cumsum(_STEP[marks], dtype=np.int64) + depth
        if len(at):
            depth = depths[-1]
            yield at + begin, marks, depths
        begin = end


def count(text: bytes) -> int:
    """How many elements the array ``text`` has, at most."""
    return 1 + sum(int(np.count_nonzero((marks == _COMMA) & (depth == 1))) for _, marks, depth in _marks(text))


def check_tokens(what: str, text: bytes) -> None:
    """Raise ValueError unless ``text`` is an array of tokens within the limits of the format."""
    if not text.lstrip(_SPACE).startswith(b"["):
        raise ValueError(f"{what} is not an array")
    tokens = values = 1
    last = 0
    for _, marks, depth in _marks(text):
        if (marks == _OBJECT).any():
            raise ValueError(f"{what} holds an object")
        commas = marks == _COMMA
        # The number of the token at each mark, and of those that have a list.
        number = np.cumsum(commas & (depth == 1)) + tokens
        lists = number[(marks == _LIST) & (depth == _TOKENS_DEEPEST)]
        tokens, values = int(number[-1]), values + int(np.count_nonzero(commas))
        if depth.max() > _TOKENS_DEEPEST or tokens > MAX_TOKENS or values > MAX_VALUES:
            raise ValueError(f"{what} is deeper or longer than the format allows")
        if len(lists):
            if lists[0] == last or (np.diff(lists) == 0).any():
                raise ValueError(f"{what} holds a token of more than one list")
            last = int(lists[-1])


def members(text: bytes) -> dict[str, bytes]:
    """The members of the object ``text``: their names, and their values as text, still to be parsed.

    Raises:
        ValueError: it is no object, is nested too deep, or names a member twice.
    """
    colons: list[int] = []
    commas = [0]
    end = -1
    for at, marks, depth in _marks(text):
        if end >= 0 or (depth[:-1] < 1).any():
            raise ValueError("something follows its last brace")
        if depth.max() > _DEEPEST:
            raise ValueError("it is nested too deep")
        colons += at[(depth == 1) & (marks == _COLON)].tolist()
        commas += at[(depth == 1) & (marks == _COMMA)].tolist()
        end = int(at[-1]) if depth[-1] < 1 else -1
    if end < 0 or not text.startswith(b"{") or text[end:].rstrip(_SPACE) != b"}":
        raise ValueError("it is not one JSON object")
    if len(colons) != len(commas):
        raise ValueError("it has a member without a name or a value")
    found: dict[str, bytes] = {}
    for begin, colon, stop in zip(commas, colons, [*commas[1:], end], strict=True):
        name = json.loads(text[begin + 1 : colon].decode()) if begin < colon < stop else None
        if type(name) is not str or name in found:
            raise ValueError(f"it names the member {name!r} twice, or not by a text")
        found[name] = text[colon + 1 : stop]
    return found


def parse(text: bytes) -> Any:
    """What JSON text means; ValueError for what is none, for numbers out of range and for members named twice."""
    return json.loads(
        text.decode(), parse_int=_int, parse_float=_float, parse_constant=_constant, object_pairs_hook=_object
    )


def check(text: bytes) -> None:
    """Raise ValueError unless this is JSON text, whatever it means."""
    json.loads(text.decode(), parse_int=len, parse_float=len, parse_constant=_constant)


def _int(digits: str) -> int | float:
    # -0 has a sign, and so is not such an integer.
    return int(digits) if len(digits) <= _INTEGER_DIGITS and digits != "-0" else _float(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object names a member twice")
    return made
