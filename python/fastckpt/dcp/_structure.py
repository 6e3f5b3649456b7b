"""Rebuilds the nested structure of a save from the flat entries of a planner.

Ranks describe it with lists as mappings of positions, so that the structures of several ranks can be merged key by key.
A placeholder or a tuple of its tensors represents a value of one rank; the coordinator inserts the value itself.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii as quote
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._state.flatten import canonical
from fastckpt._state.select import ends_of
from fastckpt._state.unflatten import is_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Path = tuple[str | int, ...]
#: Placeholder for a value without tensors; errors show it.
VALUE = "a value"


class About(NamedTuple):
    """A tensor as an entry: stored dtype, logical dtype and shape, or None, and the sizes that the user sees."""

    dtype: str
    logical: tuple[str, Sequence[int]] | None
    sizes: Sequence[int]
    requires_grad: bool


def insert(root: dict[Any, Any], path: Path, leaf: Any, key: str) -> None:
    """Insert an entry at its keys.

    Raises:
        ValueError: the entry conflicts with another one.
    """
    node: Any = root
    for step in path[:-1]:
        node = node.setdefault(step, {})
        if type(node) is not dict:
            break
    if type(node) is not dict or path[-1] in node or _is_list(node, path[-1]) is None:
        raise ValueError(_two_kinds(key))
    node[path[-1]] = leaf


def _is_list(node: dict[Any, Any], more: Any = None) -> bool | None:
    """Whether the keys of a mapping are positions; None if only some are."""
    kinds = {type(key) is int for key in (node if more is None else (*node, more))}
    return None if len(kinds) > 1 else kinds == {True}


def _two_kinds(key: str) -> str:
    return (
        f"dcp.save: {key!r} is an entry on one rank, and leads to others on another, or is a list on one and a mapping "
        "on another: give the ranks' states different keys"
    )


class _Positions(dict[int, Any]):
    """A list as a mapping of positions, of which some may be missing."""


def finish(
    structure: str, values: Mapping[str, str], tensors: Sequence[Any]
) -> tuple[str, dict[str, tuple[Path, About | None]]]:
    """The stored structure, and for each entry, by its dotted key, the keys that lead to it and its kind.

    Args:
        structure: the structure that the ranks agreed on, JSON.
        values: the tokens of each value, JSON, in which tensors are numbered from 0.
        tensors: the checkpoint's tensors.

    Raises:
        ValueError: an entry is a list on one rank and a mapping on another, or no rank has its value.
    """
    made = _Entries(json.loads(structure), values, tensors)
    root = made.at(0, ())
    _restore_numbers(root)
    out: list[str] = []
    _emit(root, out)
    return f"[{','.join(out)}]", made.found


class _Entries:
    """The entries of a structure; ``found`` has them by their dotted keys, in order."""

    def __init__(self, tokens: list[Any], values: Mapping[str, str], tensors: Sequence[Any]) -> None:
        self._tokens, self._ends = tokens, ends_of(tokens)
        self._values, self._tensors = values, tensors
        self.found: dict[str, tuple[Path, About | None]] = {}

    def at(self, position: int, path: Path) -> Any:
        """The node at a position: a mapping, a list by positions, or the tokens of an entry."""
        head, key = self._tokens[position], ".".join(map(str, path))
        if type(head) is not list or head[0] != "dict":
            return self._entry(self._tokens[position : self._ends[position]], path, key)
        node: dict[Any, Any] = {}
        below = position + 1
        for _ in range(head[1]):
            step = self._tokens[below]
            node[step] = self.at(below + 1, (*path, step))
            below = self._ends[below + 1]
        is_list = _is_list(node)
        if is_list is None:
            raise ValueError(_two_kinds(key))
        return _Positions(node) if is_list else node

    def _entry(self, tokens: list[Any], path: Path, key: str) -> list[Any]:
        self.found[key] = (path, _about(tokens, self._tensors))
        if tokens[0] != VALUE and tokens[0][0] != "tuple":
            return tokens
        if key not in self._values:
            raise ValueError(f"dcp.save: {key!r} is in the state of a rank, and in no rank's plan")
        numbers = [token[1] for token in tokens[1:]]
        return [
            [token[0], numbers[token[1]], *token[2:]] if is_tensor(token) else token
            for token in json.loads(self._values[key])
        ]


def _about(tokens: list[Any], tensors: Sequence[Any]) -> About | None:
    """The description of an entry's tensor; None if the entry is not a tensor."""
    head = tokens[0]
    if type(head) is not list or head[0] != "tensor":
        return None
    tensor = tensors[head[1]]
    sizes = tensor.shape if tensor.logical is None else tensor.logical[1]
    return About(tensor.dtype, tensor.logical, sizes, requires_grad="g" in "".join(head[2:3]))


def _restore_numbers(root: dict[Any, Any]) -> None:
    """Turn parameter numbers that torch made strings into numbers again, and restore the empty state that it dropped.

    Otherwise ``load_state_dict`` of an optimizer would silently find no state for its parameters.
    """
    todo: list[dict[Any, Any]] = [root]
    while todo:
        node = todo.pop()
        todo.extend(value for value in node.values() if isinstance(value, dict))
        groups = node.get("param_groups")
        if not isinstance(groups, _Positions):
            continue
        params = [_integers(value.get("params")) if isinstance(value, dict) else None for value in groups.values()]
        if any(params is None for params in params):
            continue
        ids = {str(number): number for numbers in params for number in numbers or ()}
        state = node.setdefault("state", {})
        if type(state) is dict:
            items = [(ids.get(key, key), value) for key, value in state.items()]
            state.clear()
            state.update(items)
            # An optimizer's state comes before its groups.
            node["param_groups"] = node.pop("param_groups")


def _integers(tokens: Any) -> list[int] | None:
    """The members of an entry that is a list of integers; None for any other entry."""
    if type(tokens) is not list or type(tokens[0]) is not list or tokens[0][0] != "list":
        return None
    return tokens[1:] if all(type(token) is int for token in tokens[1:]) else None


def _emit(node: Any, out: list[str]) -> None:
    """The tokens of a value."""
    if isinstance(node, _Positions):
        size = max(node) + 1
        out.append(f'["list",{size}]')
        for position in range(size):
            # The items that torch leaves out of a list are empty mappings.
            _emit(node.get(position, {}), out)
    elif isinstance(node, dict):
        out.append(f'["dict",{len(node)}]')
        for key, value in node.items():
            out.append(quote(key) if type(key) is str else str(key))
            _emit(value, out)
    else:
        out.extend(map(canonical, node))
