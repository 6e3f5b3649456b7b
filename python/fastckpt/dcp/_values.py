"""What a planner of torch.distributed.checkpoint has to save, as fastckpt stores it: never as a pickle.

The default planner pickles values before a writer sees them. Where it is the default one that does so, the values
themselves are asked for; what another planner made is read back as ``torch.load(weights_only=True)`` reads it.
"""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt._api.save_request import warn_of_types
from fastckpt._state.flatten import Flat, flatten
from fastckpt._state.unflatten import is_tensor
from fastckpt._tensors import torch as _tensors
from fastckpt._tensors.described import Logical, Stored, Unsupported
from fastckpt.exceptions import UnsupportedTypeError

from . import _torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt._state.registry import Types
    from fastckpt._tensors.memory import Mover

#: For each dimension where it begins and where it ends.
Box = tuple[tuple[int, int], ...]


class Memory(NamedTuple):
    """A box of a tensor in the memory of this rank: ``address`` is 0 where ``mover`` brings the bytes."""

    box: Box
    address: int
    nbytes: int
    mover: Mover | None
    keep: Any


class Held(NamedTuple):
    """A tensor of which this rank has boxes. ``shape`` is the stored one, ``sizes`` those that the user sees."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    logical: Logical
    sizes: tuple[int, ...]
    memories: list[Memory]


class Leaf(NamedTuple):
    """An entry: its structure tokens, in which tensors are numbered from 0, and these tensors."""

    path: tuple[str | int, ...]
    tokens: list[Any]
    tensors: list[Held]


def value_of(planner: Any, item: _torch.WriteItem) -> Any:
    """The value of an item that is not a tensor.

    Raises:
        UnsupportedTypeError: the planner made a pickle of it that holds more than plain values.
    """
    if _torch.gives_objects(planner):
        return planner.lookup_object(item.index)
    made = planner.resolve_data(item)
    made.seek(0)
    try:
        return _torch.torch.load(made, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UnsupportedTypeError(
            f"dcp.save: cannot store {item.index.fqn!r}: the planner {type(planner).__name__} gives bytes that are "
            "not what torch.save makes of plain values, and fastckpt stores no pickles: let it keep resolve_data and "
            f"transform_object of DefaultSavePlanner for values. torch says: {first}"
        ) from error


def leaf_of(key: str, path: tuple[str | int, ...], value: Any, types: Types) -> Leaf:
    """An entry that this rank has whole.

    Raises:
        UnsupportedTypeError: something in it cannot be saved; the message names its place.
    """
    flat = flatten({key: value}, operation="dcp.save", types=types)
    warn_of_types("dcp.save", flat)
    tokens = [json.loads(token) for token in flat.tokens[2:]]
    tensors = [_whole(flat, number) for number in range(len(flat.tensors))]
    return Leaf(path, tokens, tensors)


def _whole(flat: Flat, number: int) -> Held:
    name, dtype, shape, address, nbytes, logical = flat.tensors[number]
    sizes = tuple(shape if logical is None else logical[1])
    box = tuple((0, size) for size in sizes)
    memory = Memory(box, address, nbytes, flat.movers.get(number), flat.keep[number])
    return Held(name, dtype, tuple(shape), logical, sizes, [memory])


def shard_of(key: str, path: tuple[str | int, ...], item: _torch.WriteItem, value: Any) -> Leaf:
    """A box of a tensor.

    Raises:
        UnsupportedTypeError: it cannot be stored.
        ValueError: the tensor has other sizes than the item's box.
    """
    about = item.tensor_data
    assert about is not None  # noqa: S101 - a tensor has it
    assert about.chunk is not None  # noqa: S101 - the global plan would have failed
    box = tuple((start, start + size) for start, size in zip(about.chunk.offsets, about.chunk.sizes, strict=True))
    sizes = tuple(about.size)
    tensor = value.detach()
    if tuple(tensor.shape) != tuple(about.chunk.sizes):
        raise ValueError(
            f"dcp.save: {key!r}: the plan has a box of the sizes {list(about.chunk.sizes)}, and the tensor that the "
            f"planner gives for it has the sizes {list(tensor.shape)}"
        )
    if 0 in tensor.stride() and tensor.numel():
        tensor = tensor.contiguous()
    try:
        describe = _tensors.describe_of(type(tensor))
        found = describe(tensor) if describe is not None else None
    except Unsupported as error:
        raise UnsupportedTypeError(f"dcp.save: cannot store {key!r}: {error}") from error
    if type(found) is not Stored:
        raise UnsupportedTypeError(
            f"dcp.save: cannot store {key!r}: a shard of {type(tensor).__name__} of layout {tensor.layout} and dtype "
            f"{tensor.dtype} cannot be stored: only shards of plain dense tensors can"
        )
    memory = Memory(box, found.address, tensor.nbytes, found.mover, tensor)
    shape, logical = sizes, None
    if found.logical is not None:
        shape, logical = (_count(sizes) * tensor.element_size(),), (found.logical[0], sizes)
    return Leaf(path, [["tensor", 0]], [Held(key, found.dtype, shape, logical, sizes, [memory])])


def _count(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def renumbered(tokens: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    """Tokens of an entry with the numbers that its tensors have in the checkpoint."""
    return [[token[0], numbers[token[1]], *token[2:]] if is_tensor(token) else token for token in tokens]
