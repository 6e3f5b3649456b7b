"""Converts the items of a planner of torch.distributed.checkpoint to stored values, never to pickles.

The default planner pickles values before a writer sees them, so the values themselves are requested from it. Items of
other planners are read back as ``torch.load(weights_only=True)`` reads them.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastckpt._api.save_request import warn_of_types
from fastckpt._state.flatten import flatten
from fastckpt._state.key_paths import part_of
from fastckpt._state.unflatten import is_tensor
from fastckpt._tensors import memory as _memory
from fastckpt._tensors import torch as _tensors
from fastckpt._tensors.described import Logical, Stored, Unsupported
from fastckpt._tensors.movers import Sources
from fastckpt._tensors.spreads import Spreads
from fastckpt.exceptions import UnsupportedTypeError

from . import _torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt._state.registry import Types
    from fastckpt._tensors.described import Describe
    from fastckpt._tensors.memory import Mover

#: For each dimension, its start and its stop.
Box = tuple[tuple[int, int], ...]


class Memory(NamedTuple):
    """A box of a tensor in the memory of this rank: ``address`` is 0 if ``mover`` copies the bytes."""

    box: Box
    address: int
    nbytes: int
    mover: Mover | None
    keep: Any


class Given(NamedTuple):
    """A tensor, an array or long bytes in a value of one rank.

    ``rest`` is the end of its name after the name of the value, or None.
    """

    owner: int
    rest: str | None
    dtype: str
    shape: tuple[int, ...]
    logical: Logical
    address: int = 0
    nbytes: int = 0
    mover: Mover | None = None
    keep: Any = None

    def about(self) -> list[Any]:
        """The description for other ranks."""
        logical = None if self.logical is None else [self.logical[0], list(self.logical[1])]
        return [self.rest, self.dtype, list(self.shape), logical]


class Value(NamedTuple):
    """A value: its structure tokens, JSON, in which tensors are numbered from 0, and these tensors."""

    tokens: str
    tensors: list[Given]

    def told(self, key: str, rank: int, *, compared: bool) -> list[Any]:
        """The value of a rank in a message (:mod:`._united`).

        Raises:
            RuntimeError: the caller's current stream of a device that takes part is being captured into a graph.
        """
        abouts = [one.about() for one in self.tensors]
        digests = () if not abouts else self._digests(abouts) if compared else ("", "")
        return [key, rank, [self.tokens, abouts, *digests]]

    def _digests(self, abouts: list[list[Any]]) -> tuple[str, str]:
        """Two digests: of long bytes, and of tensors and arrays with their descriptions."""
        strings = {token[1] for token in json.loads(self.tokens) if _is_bytes(token)}
        sources = Sources("dcp.save", {n: one.mover for n, one in enumerate(self.tensors) if one.mover is not None})
        plain, tensors = hashlib.sha256(), hashlib.sha256()
        for number, one in enumerate(self.tensors):
            if one.mover is None:
                data = _memory.at(one.address, one.nbytes)
            else:
                data = np.empty(one.nbytes, np.uint8)
                sources.fill([(number, 0, _memory.address_of(data), one.nbytes)])
            into = plain if number in strings else tensors
            # The lengths are hashed, too, so that they delimit the bytes.
            into.update(json.dumps(one.shape if into is plain else abouts[number]).encode())
            into.update(data.data)
        return plain.hexdigest(), tensors.hexdigest()


def value_of(planner: Any, item: _torch.WriteItem) -> Any:
    """The value of an item that is not a tensor.

    Raises:
        UnsupportedTypeError: the planner pickled it, and the pickle holds more than plain values.
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


class _NoSpreads(Spreads):
    """No tensor in a value is spread over ranks."""

    def describe_of(self, _: type) -> Describe | None:
        """Return None for any type."""
        return None


def stored_value(key: str, value: Any, types: Types, ranks: Sequence[int], rank: int) -> Value:
    """The stored form of a value of this rank.

    Raises:
        UnsupportedTypeError: something in it cannot be saved; the message names its place.
    """
    # As in the rest of the state, tokens must not depend on the rank.
    spreads = _NoSpreads(ranks, rank, device_numbers=len(ranks) == 1)
    flat = flatten({key: value}, operation="dcp.save", types=types, spreads=spreads)
    warn_of_types("dcp.save", flat)
    name = part_of(key)
    tensors = []
    for number, tensor in enumerate(flat.tensors):
        rest = tensor.name.removeprefix(f"{name}.") if tensor.name.startswith(f"{name}.") else None
        logical = None if tensor.logical is None else (tensor.logical[0], tuple(tensor.logical[1]))
        about = (tensor.dtype, tuple(tensor.shape), logical, tensor.address, tensor.capacity)
        tensors.append(Given(rank, rest, *about, flat.movers.get(number), flat.keep[number]))
    return Value(f"[{','.join(flat.tokens[2:])}]", tensors)


def _is_bytes(token: Any) -> bool:
    return type(token) is list and is_tensor(token) and token[0] in {"bytes", "bytearray"}


class Cut(NamedTuple):
    """A tensor that ranks hold in boxes: stored dtype and shape, and the logical ones if they differ."""

    dtype: str
    shape: tuple[int, ...]
    logical: Logical


def box_of(key: str, item: _torch.WriteItem, value: Any) -> tuple[Cut, Memory]:
    """A box of a tensor.

    Raises:
        UnsupportedTypeError: the box cannot be stored.
        ValueError: the tensor's shape differs from that of the item's box.
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
    if found.logical is None:
        return Cut(found.dtype, sizes, None), memory
    return Cut(found.dtype, (math.prod(sizes) * tensor.element_size(),), (found.logical[0], sizes)), memory
