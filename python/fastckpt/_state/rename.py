"""New keys for a structure: ``rename=``, and the prefixes that wrappers of modules add."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastckpt._text import suggest

from .select import MAPPINGS, ends_of
from .unflatten import is_attributed

if TYPE_CHECKING:
    from .unflatten import Token


def strip_prefix(*prefixes: str) -> Callable[[str], str]:
    """For ``rename=`` of :func:`fastckpt.load`: remove the prefixes that wrappers of a module add to its keys.

    Args:
        prefixes: ``"module."`` for DDP, ``"_orig_mod."`` for ``torch.compile``, or others. Each is removed once, in any
            order, and never the whole key.

    Returns:
        A function that maps a key to the key without them.

    Raises:
        TypeError: a prefix is not a string, or is empty, or no prefix is passed.

    Example:
        >>> import fastckpt
        >>> fastckpt.strip_prefix("module.", "_orig_mod.")("_orig_mod.module.weight")
        'weight'
    """
    if not prefixes or not all(isinstance(prefix, str) and prefix for prefix in prefixes):
        raise TypeError(f"strip_prefix: each prefix must be a string that is not empty, not {prefixes!r}")

    def strip(key: str) -> str:
        left = list(prefixes)
        while prefix := next((prefix for prefix in left if key.startswith(prefix) and key != prefix), None):
            key = key[len(prefix) :]
            left.remove(prefix)
        return key

    return strip


def check_rename(operation: str, given: Any) -> Any:
    """``rename=``: new keys by old ones, or a function of the key.

    Raises:
        TypeError: ``given`` is neither of these nor None.
    """
    if isinstance(given, Mapping):
        if not all(isinstance(text, str) for pair in given.items() for text in pair):
            raise TypeError(f"{operation}: rename must map strings to strings, not {given!r}")
    elif given is not None and not callable(given):
        raise TypeError(f"{operation}: rename must be a dict or a function, not {given!r}")
    return given


class Renaming:
    """The effect of ``rename`` on string keys.

    Args:
        rename: new keys by old ones, or a function of the key; or None.
    """

    def __init__(self, rename: Any) -> None:
        self._rename = rename
        self._seen: set[str] = set()
        #: Whether ``rename`` can change any key.
        self.changes = rename is not None

    def _new(self, key: str) -> str:
        if isinstance(self._rename, Mapping):
            self._seen.add(key)
            named: str = self._rename.get(key, key)
            return named
        new = self._rename(key)
        if not isinstance(new, str):
            raise TypeError(f"load: rename= returned {new!r} for the key {key!r}: it must return a string")
        return new

    def of(self, tokens: list[Token], *, strict: bool) -> list[Token]:
        """A structure with renamed keys: the same number of tokens, in the same places.

        Keys made by the encoder of a registered type stay, and so do names of attributes; keys inside an attribute,
        such as the modules in a module's ``_metadata``, change with the others as long as they stay distinct.

        Raises:
            ValueError: two keys become one.
            KeyError: ``rename`` has a key that is not there, and ``strict`` is set.
        """
        out = list(tokens)
        ends = ends_of(tokens)
        # The positions of values whose keys may change, and whether keys may also stay.
        todo = [(0, False)]
        while todo:
            position, lenient = todo.pop()
            token = tokens[position]
            tag = token[0] if type(token) is list else None
            if tag == "type" and is_attributed(token):
                items, attributes = position + 2, ends[position + 2]
                todo.append((items, lenient))
                values = _children(attributes, ends, skip=1)[1::2]
                todo.extend((value, True) for value in values)
            elif tag in MAPPINGS:
                children = _children(position, ends, skip=1 + (tag == "ddict"))
                self._mapping(out, children[::2], lenient=lenient)
                todo.extend((value, lenient) for value in children[1::2])
            elif tag in {"list", "tuple"}:
                todo.extend((child, lenient) for child in _children(position, ends, skip=1))
        if strict and isinstance(self._rename, Mapping):
            for key in self._rename:
                if key not in self._seen:
                    raise KeyError(f"load: rename: there is no key {key!r}{suggest(key, sorted(self._seen))}")
        return out

    def _mapping(self, out: list[Token], keys: list[int], *, lenient: bool) -> None:
        olds = [out[key] for key in keys if type(out[key]) is str]
        news = [self._new(old) for old in olds]
        if news == olds:
            return
        former: dict[str, str] = {}
        for old, new in zip(olds, news, strict=True):
            if former.setdefault(new, old) != old:
                if lenient:
                    return
                raise ValueError(
                    f"load: the keys {former[new]!r} and {old!r} both become {new!r}: "
                    "choose one of them with keys= or exclude=, or change rename="
                )
        renamed = iter(news)
        for key in keys:
            if type(out[key]) is str:
                out[key] = next(renamed)


def _children(position: int, ends: list[int], *, skip: int) -> list[int]:
    """The positions where the parts of the value at ``position`` begin."""
    out = []
    at = position + skip
    while at < ends[position]:
        out.append(at)
        at = ends[at]
    return out
