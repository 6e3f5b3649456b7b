"""What one rank brings to a save: the entries of its plan, and how they hang together."""

from __future__ import annotations

import hashlib
import json
import mmap
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _torch
from ._values import Held, Leaf, leaf_of, shard_of, value_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastckpt._state.registry import Types

    from ._values import Memory

Path = tuple[str | int, ...]


class Taken(NamedTuple):
    """The entries of a plan.

    Attributes:
        leaves: by dotted keys.
        places: where each key stands among all keys of the state.
        order: a digest of all keys of the state: ranks that have the same have the same state.
        ties: keys of tensors that are the same as one before them, with the first of them.
        copies: tensors of this rank that the plan leaves to another one, by names.
        ids: for each plain optimizer state, by what leads to it, a digest of what its parameters' numbers stand for.
        meshes: by key, the global ranks of the mesh of each DTensor, ascending.
    """

    leaves: dict[str, Leaf]
    places: dict[str, int]
    order: str
    ties: dict[str, str]
    ids: dict[str, str]
    copies: dict[str, Held]
    meshes: dict[str, tuple[int, ...]]

    def table(self) -> str:
        """All of it but the memory, for other ranks: JSON."""
        numbers: dict[tuple[int, ...], int] = {(): 0}
        mesh = {key: numbers.setdefault(ranks, len(numbers)) for key, ranks in self.meshes.items()}
        about = {
            "meshes": list(numbers),
            "order": self.order,
            "page": mmap.PAGESIZE,
            "ties": self.ties,
            "ids": self.ids,
            "entries": [
                [
                    key,
                    self.places[key],
                    leaf.path,
                    leaf.tokens,
                    [_described(held, mesh.get(key, 0)) for held in leaf.tensors],
                ]
                for key, leaf in self.leaves.items()
            ],
            "copies": [_described(held, mesh.get(held.name, 0)) for held in self.copies.values()],
        }
        return json.dumps(about, separators=(",", ":"))

    def memories(self) -> dict[str, list[Memory]]:
        """The memory of each tensor, by its name."""
        found = {held.name: list(held.memories) for leaf in self.leaves.values() for held in leaf.tensors}
        for name, held in self.copies.items():
            found.setdefault(name, []).extend(held.memories)
        return found


def _described(held: Held, mesh: int) -> list[Any]:
    boxes = [memory.box for memory in held.memories]
    return [held.name, held.dtype, held.shape, held.logical, held.sizes, boxes, mesh]


def take(
    plan: _torch.SavePlan, planner: _torch.SavePlanner, types: Types, local: _torch.SavePlan | None = None
) -> Taken:
    """Resolve what a plan has, and what else this rank has of it by the plan that it made itself.

    Raises:
        UnsupportedTypeError: something cannot be stored; the message names it.
        ValueError: the plan has a tensor or a value twice, or boxes that do not fit.
    """
    paths = _paths(plan, planner)
    leaves: dict[str, Leaf] = {}
    for item in plan.items:
        key = item.index.fqn
        path = paths.get(key, (key,))
        known = leaves.get(key)
        if item.type is _torch.WriteItemType.BYTE_IO:
            leaf = leaf_of(key, path, value_of(planner, item), types)
        else:
            resolved: Any = planner.resolve_data(item)
            if item.type is _torch.WriteItemType.TENSOR:
                leaf = leaf_of(key, path, resolved, types)
            else:
                leaf = shard_of(key, path, item, resolved)
        leaves[key] = leaf if known is None else _joined(key, known, leaf, item)
    own = local if local is not None and local.items else _torch.kept_plan(planner)
    copies = {} if own is None else _copies(plan, own, planner, types)
    places = {key: at for at, key in enumerate(paths)}
    for key in leaves:
        places.setdefault(key, len(places))
    order = hashlib.sha256(json.dumps(list(paths)).encode()).hexdigest() if paths else ""
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, dict) or not _torch.keeps_state(planner):
        return Taken(leaves, places, order, {}, {}, copies, {})
    return Taken(leaves, places, order, _ties(state), _ids(state, paths), copies, _meshes(state))


def _meshes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The ranks of the meshes of DTensors, by key."""
    ranks: dict[int, tuple[int, ...]] = {}
    found = {}
    for key, value in state.items():
        if isinstance(value, _torch.DTensor):
            mesh = value.device_mesh
            if id(mesh) not in ranks:
                ranks[id(mesh)] = tuple(sorted(mesh.mesh.flatten().tolist()))
            found[key] = ranks[id(mesh)]
    return found


def _copies(plan: _torch.SavePlan, local: _torch.SavePlan, planner: Any, types: Types) -> dict[str, Held]:
    """The tensors of a rank that its plan has no more: torch left them to another rank that has them, too."""
    have = {item.index for item in plan.items}
    copies: dict[str, Leaf] = {}
    for item in local.items:
        key = item.index.fqn
        if item.type is _torch.WriteItemType.BYTE_IO or item.index in have:
            continue
        resolved = planner.resolve_data(item)
        is_whole = item.type is _torch.WriteItemType.TENSOR
        leaf = leaf_of(key, (key,), resolved, types) if is_whole else shard_of(key, (key,), item, resolved)
        copies[key] = _joined(key, copies[key], leaf, item) if key in copies else leaf
    return {held.name: held for leaf in copies.values() for held in leaf.tensors}


def _paths(plan: _torch.SavePlan, planner: Any) -> Mapping[str, Path]:
    """The keys that lead to each entry, by its dotted key, as the planner flattened the state."""
    for mappings in (plan.planner_data, getattr(planner, "mappings", None)):
        if isinstance(mappings, dict) and mappings and all(type(path) is tuple for path in mappings.values()):
            return mappings
    return {}


def _joined(key: str, known: Leaf, more: Leaf, item: _torch.WriteItem) -> Leaf:
    """An entry with another box."""
    if item.type is not _torch.WriteItemType.SHARD or len(known.tensors) != 1:
        raise ValueError(f"dcp.save: the plan of this rank has {key!r} twice")
    (held,), (other,) = known.tensors, more.tensors
    if held[:5] != other[:5]:
        raise ValueError(f"dcp.save: the plan of this rank has {key!r} with two dtypes or shapes")
    boxes = {memory.box for memory in held.memories}
    held.memories.extend(memory for memory in other.memories if memory.box not in boxes)
    return known


def _ties(state: Mapping[str, Any]) -> dict[str, str]:
    """Keys of tensors that are the same as one before them, with the first of them."""
    first: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for key, value in state.items():
        if not isinstance(value, _torch.Tensor) or isinstance(value, _torch.ShardedTensor):
            continue
        tie = _tie(value)
        if tie is not None and first.setdefault(tie, key) != key:
            ties[key] = first[tie]
    return ties


def _tie(value: Any) -> Any:
    """What two tensors have in common that are one; None for a tensor without memory of its own to compare."""
    about: tuple[Any, ...] = ()
    if isinstance(value, _torch.DTensor):
        about = (value.shape, value.device_mesh, value.placements)
        value = value._local_tensor  # noqa: SLF001 - to_local() may communicate
    elif type(value) not in (_torch.Tensor, _torch.Parameter) or not value.numel():
        return None
    try:
        storage = value.untyped_storage()
        where = (storage._cdata, value.storage_offset())  # noqa: SLF001 - no public name tells empty storages apart
    except (RuntimeError, NotImplementedError):  # of a layout that has no storage
        return None
    return (*where, value.dtype, tuple(value.shape), value.stride(), value.is_conj(), value.is_neg(), *about)


def _ids(state: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, str]:
    """A digest for each optimizer state whose parameters are numbers: of the shapes that belong to each number."""
    found: dict[str, list[Any]] = {}
    for key, path in paths.items():
        for at in range(len(path) - 1):
            if path[at] == "state" and str(path[at + 1]).isdecimal() and key in state:
                outer = ".".join(map(str, path[:at]))
                params = state.get(".".join(map(str, (*path[:at], "param_groups", 0, "params"))))
                if isinstance(params, list) and all(type(number) is int for number in params):
                    value = state[key]
                    about = list(value.shape) if isinstance(value, _torch.Tensor) else None
                    found.setdefault(outer, []).append([path[at + 1 :], about])
    return {outer: hashlib.sha256(json.dumps(about).encode()).hexdigest() for outer, about in found.items()}


def shown(ranks: Sequence[int]) -> str:
    """Ranks, for a message."""
    listed = ", ".join(map(str, ranks[:_LISTED]))
    return f"{listed} and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else listed


_LISTED = 8
