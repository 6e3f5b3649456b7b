"""Lists a checkpoint as torch.distributed.checkpoint does: entries by dotted keys.

Its planners flatten mappings, and lists that hold tensors or mappings; everything else is one entry. Keys become
strings. This module treats the structure of a checkpoint in the same way, so that its keys match those of a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._state.builders import StateBuilder
from fastckpt._state.select import MAPPINGS, ends_of
from fastckpt._state.unflatten import is_attributed, unflatten
from fastckpt.exceptions import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from fastckpt._state.unflatten import Token

#: The tags in the first tokens of tensors that are made of several others.
_COMPOSED = frozenset({"coo", "compressed", "quantized", "expanded"})


class Entry(NamedTuple):
    """One entry: the keys that lead to it, and its tokens. ``composed``: whether it is a tensor made from others."""

    path: tuple[str | int, ...]
    start: int
    end: int
    token: Token
    composed: bool

    @property
    def number(self) -> int | None:
        """The number of the stored tensor, if the entry is a tensor."""
        return self.token[1] if type(self.token) is list and self.token[0] == "tensor" else None


def entries_of(tokens: list[Token], path: str) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """The entries of a checked structure, in order, by their dotted keys; and its containers.

    Raises:
        CheckpointError: the state is not a mapping, or two entries have one key.
    """
    ends = ends_of(tokens)
    found: dict[str, Entry] = {}
    outer: dict[str, Entry] = {}
    if not _is_mapping(tokens[0]):
        raise CheckpointError(
            f"load: {path}: torch.distributed.checkpoint loads mappings, but the state of this checkpoint is not one: "
            "use fastckpt.load"
        )
    todo: list[tuple[int, tuple[str | int, ...]]] = [(0, ())]
    while todo:
        position, keys = todo.pop()
        token = tokens[position]
        tag = token[0] if type(token) is list else None
        name = ".".join(map(str, keys))
        if tag == "type" and is_attributed(token):
            todo.append((position + 2, keys))
            outer.setdefault(name, Entry(keys, position, ends[position], token, composed=False))
        elif tag in MAPPINGS:
            todo.extend(reversed([(value, (*keys, key)) for key, value in _items(tokens, ends, position)]))
            outer.setdefault(name, Entry(keys, position, ends[position], token, composed=False))
        elif tag == "list" and not _is_terminal(tokens, ends, position):
            todo.extend(reversed([(child, (*keys, at)) for at, child in enumerate(_children(ends, position))]))
            outer.setdefault(name, Entry(keys, position, ends[position], token, composed=False))
        else:
            if name in found:
                raise CheckpointError(
                    f"load: {path}: two entries of the checkpoint have the key {name!r} when keys are joined with "
                    "dots, as torch.distributed.checkpoint joins them: use fastckpt.load"
                )
            found[name] = Entry(keys, position, ends[position], token, composed=tag in _COMPOSED)
    return found, outer


def _is_mapping(token: Token) -> bool:
    return type(token) is list and (token[0] in MAPPINGS or is_attributed(token))


def _children(ends: list[int], position: int) -> Iterator[int]:
    """The positions of the members of a list."""
    child = position + 1
    while child < ends[position]:
        yield child
        child = ends[child]


def _items(tokens: list[Token], ends: list[int], position: int) -> Iterator[tuple[str, int]]:
    """The keys of a mapping as strings, and the positions of their values."""
    key = position + 1 + (tokens[position][0] == "ddict")
    while key < ends[position]:
        value = ends[key]
        token = tokens[key]
        if type(token) is list:
            token = unflatten(tokens[key:value], StateBuilder("torch"))
        yield str(token), value
        key = ends[value]


def _is_terminal(tokens: list[Token], ends: list[int], position: int) -> bool:
    """Whether a list is one entry: no member is a mapping, a tensor or a list that is not one entry."""
    todo = [position]
    while todo:
        for child in _children(ends, todo.pop()):
            token = tokens[child]
            if type(token) is not list:
                continue
            if _is_mapping(token) or token[0] == "tensor" or token[0] in _COMPOSED:
                return False
            if token[0] == "list":
                todo.append(child)
    return True


class Known(dict[str, Any]):
    """The metadata of all entries. A key that leads to several entries is also found, but not listed.

    Planners with ``flatten_state_dict=False`` request such keys, and read the contents as one value.

    Args:
        entries: the metadata of each entry.
        outer: the keys of containers.
        value: the metadata of a value.
    """

    def __init__(self, entries: dict[str, Any], outer: Container[str], value: Any) -> None:
        super().__init__(entries)
        self._outer = outer
        self._value = value

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._outer

    def __missing__(self, key: str) -> Any:
        if key in self._outer:
            return self._value
        raise KeyError(key)
