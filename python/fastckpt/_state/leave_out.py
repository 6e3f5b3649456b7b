"""Removes values from a flattened state, so that it is saved as if it never had them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt.exceptions import UnsupportedTypeError

from .flatten import EXCLUDED, canonical
from .key_paths import RESERVED, unique
from .select import outer_values, prune, tensor_names
from .unflatten import is_tensor

if TYPE_CHECKING:
    from .flat import Flat
    from .unflatten import Token


def leave_out(flat: Flat, tokens: list[Token], wanted: set[int]) -> dict[int, int]:
    """Keep only the values at the positions ``wanted`` (of :func:`.select.named`) and their parents; renumber tensors.

    Args:
        flat: the state, which is changed.
        tokens: the tokens of the state, parsed. The caller must not use them afterwards.
        wanted: positions of tokens.

    Returns:
        The new numbers of the remaining tensors by their old ones.

    Raises:
        UnsupportedTypeError: a remaining value cannot be saved.
        ValueError: nothing is left.
    """
    if not wanted:
        raise ValueError("leaves nothing to save")
    kept, origin = prune(tokens, wanted)
    for token in kept:
        if type(token) is list and token[0] == EXCLUDED:
            raise UnsupportedTypeError(token[1])
    _keep_outer(flat, tokens, set(origin))
    numbers = _renumber(flat, kept)
    types = {token[1] for token in kept if type(token) is list and token[0] == "type"}
    flat.tokens[:] = map(canonical, kept)
    flat.remarks[:] = [remark for remark in flat.remarks if remark[0] in types]
    flat.keep[:] = [flat.keep[index] for index in numbers]
    flat.movers = {numbers[index]: mover for index, mover in flat.movers.items() if index in numbers}
    flat.spreads = {numbers[index]: spread for index, spread in flat.spreads.items() if index in numbers}
    flat.wholes = {numbers[index]: whole for index, whole in flat.wholes.items() if index in numbers}
    flat.inner = {numbers[index] for index in flat.inner if index in numbers}
    return numbers


def _keep_outer(flat: Flat, tokens: list[Token], kept: set[int]) -> None:
    if flat.outer is not None:
        values = zip(flat.outer.items(), outer_values(tokens), strict=True)
        flat.outer = {key: leads for (key, leads), value in values if not kept.isdisjoint(value)}


def _renumber(flat: Flat, kept: list[Token]) -> dict[int, int]:
    """Give tensors the numbers and names that they have without the removed ones."""
    numbers: dict[int, int] = {}
    taken = dict(RESERVED)
    tensors = []
    flat.ties.clear()
    for position, name, in_key in tensor_names(kept):
        token: Any = kept[position]
        index = token[1]
        tensor = flat.tensors[index]
        if index not in numbers:
            numbers[index] = len(numbers)
            tensors.append(tensor._replace(name=unique(taken, tensor.name if name is None else name)))
        elif not in_key:
            flat.ties.append((numbers[index], tensor.name if name is None else name))
    for token in kept:
        if is_tensor(token):
            token[1] = numbers[token[1]]
    flat.tensors[:] = tensors
    return numbers
