"""One rank's contribution to a save, and how the contributions of all ranks are combined.

Each entry of the planner's state is one of these:

- A plain tensor: every rank that has it has all of it. These ranks share the work, and their copies are compared.
- A DTensor: a spread over a mesh, as :func:`fastckpt.distributed.save` describes it.
- A value: the one of the lowest rank that has it, with all tensors in it. torch's plan assigns each value to some rank,
  and a mixture of values of several ranks would be a state that no rank held. Tokens are sent to the coordinator only,
  with digests of the tensors; all ranks receive the tensors in a value, because their order is that of the state.
- Boxes: of a ShardedTensor, of a DTensor whose parts match no mesh, and of all tensors that other planners cut. Every
  rank learns which rank has which box.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from fastckpt._api.save_request import warn_of_types
from fastckpt._state.flatten import flatten
from fastckpt._tensors.described import THROUGH, OwnPart, Parts, Stored, Unsupported
from fastckpt._tensors.movers import Sources
from fastckpt._tensors.spread import Spread
from fastckpt._tensors.spreads import Spreads
from fastckpt.exceptions import UnsupportedTypeError

from . import _torch
from ._structure import VALUE, insert
from ._values import Cut, Given, Memory, Value, box_of, stored_value, value_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastckpt._api.save_request import SaveRequest
    from fastckpt._state.registry import Types
    from fastckpt._tensors.described import Describe

    from ._agreed import Boxes, Known
    from ._structure import Path
    from ._values import Box

#: Marks tensors that are cut into boxes, in place of the number of a spread.
BOXES = "boxes"


class Boxed:
    """A tensor of which this rank has boxes: the number of its cut, and its memory in the order of its parts."""

    __slots__ = ("cut", "memories", "spread", "tie")

    def __init__(self, cut: Cut, number: int, lowest: int, memories: list[Memory], tie: Any) -> None:
        self.cut = cut
        self.spread = Spread((lowest,), (), ((BOXES, number, 0),))
        self.memories = memories
        self.tie = tie


class _OfOne:
    """A value with tensors, all of one rank."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: list[Given]) -> None:
        self.tensors = tensors


class _Described(Spreads):
    """Describes tensors that are spread over ranks: DTensors, tensors in values of one rank, and boxes."""

    def describe_of(self, kind: type) -> Describe | None:
        """The function that describes a type of these tensors; None for any other type."""
        own: dict[type, Describe] = {_OfOne: self._value, Given: self._given, Boxed: self._boxed}
        return own.get(kind) or super().describe_of(kind)

    def _number(self, spread: Spread) -> int:
        if spread not in self.found:
            self.found.append(spread)
        return self.found.index(spread) + 1

    @staticmethod
    def _value(value: _OfOne) -> Parts:
        children = [(THROUGH if one.rest is None else one.rest, one) for one in value.tensors]
        return Parts(f'["tuple",{len(children)}]', children)

    def _given(self, one: Given) -> Stored:
        part = OwnPart(self._number(Spread((one.owner,))), one.keep, one.nbytes)
        tie = (Given, id(one))
        return Stored(tie, one.dtype, one.shape, one.address, one.logical, '["tensor",', "]", one.mover, part)

    def _boxed(self, boxed: Boxed) -> Stored:
        part = OwnPart(self._number(boxed.spread), boxed, 0)
        dtype, shape, logical = boxed.cut
        return Stored((Boxed, boxed.tie), dtype, shape, 0, logical, '["tensor",', "]", None, part)


class Brought:
    """The contribution of one rank to a save.

    Args:
        plan: this rank's part of torch's plan.
        planner: resolves the items of the plan to tensors and values.
        types: the known types with names.
        ranks: the global ranks of the group, in its order.
        rank: this rank in the group.
        local: the plan that this rank made; None if its planner has kept it, or this is a save of one process.

    Attributes:
        rank: as given.
        strange: the keys of tensors that this rank can describe only by boxes.

    Raises:
        UnsupportedTypeError: a value cannot be stored; the message names it.
        ValueError: the plan has a tensor or a value twice.
    """

    def __init__(
        self,
        plan: _torch.SavePlan,
        planner: _torch.SavePlanner,
        types: Types,
        ranks: Sequence[int],
        rank: int,
        local: _torch.SavePlan | None = None,
    ) -> None:
        self.rank = rank
        self._ranks = ranks
        self._types = types
        self._planner = planner
        self._paths = _paths(plan, planner)
        #: For tensors, the items of the plan, and items that this rank adds because torch assigned them to other ranks.
        self._items: dict[str, list[_torch.WriteItem]] = {}
        self._values: dict[str, Value] = {}
        #: Why a value cannot be stored, by its key; all plans may leave such values out.
        self._refused: dict[str, str] = {}
        #: Keys of values, of this rank and of others.
        self._others: set[str] = set()
        self._planned = None if _torch.plans_all(planner) else sorted({item.index.fqn for item in plan.items})
        self._sort(plan, local if local is not None and local.items else _torch.kept_plan(planner))
        state = getattr(planner, "state_dict", None)
        self._state = state if isinstance(state, dict) and _torch.keeps_state(planner) else None
        self._tensors: dict[str, Any] = {}
        self.strange: list[str] = []
        self._describe()
        self._boxes: dict[str, tuple[Cut, dict[Box, Memory]]] = {}

    def _sort(self, plan: _torch.SavePlan, local: _torch.SavePlan | None) -> None:
        """Sort the items by keys, and find the stored form of values."""
        kinds: dict[str, _torch.WriteItemType] = {}
        values: dict[str, _torch.WriteItem] = {}
        for item in plan.items:
            key = item.index.fqn
            if kinds.setdefault(key, item.type) != item.type or (
                item.type != _torch.WriteItemType.SHARD and (key in self._items or key in values)
            ):
                raise ValueError(f"dcp.save: the plan of this rank has {key!r} twice")
            if item.type == _torch.WriteItemType.BYTE_IO:
                values[key] = item
            else:
                self._items.setdefault(key, []).append(item)
        have = {item.index for item in plan.items}
        for item in () if local is None else local.items:
            if item.type == _torch.WriteItemType.BYTE_IO:
                values.setdefault(item.index.fqn, item)
            elif item.index not in have:
                self._items.setdefault(item.index.fqn, []).append(item)
        for key, item in values.items():
            try:
                value = value_of(self._planner, item)
                self._values[key] = stored_value(key, value, self._types, self._ranks, self.rank)
            except UnsupportedTypeError as error:  # noqa: PERF203 - each may be left out
                if self._planned is None or key in self._planned:
                    raise
                self._refused[key] = str(error)
        self._others.update(values)

    def _describe(self) -> None:
        """Distinguish tensors that are whole or spread over a mesh from tensors that only boxes describe."""
        spreads = Spreads(self._ranks, self.rank)
        shards = {
            key for key, items in self._items.items() if any(item.type == _torch.WriteItemType.SHARD for item in items)
        }
        if self._state is None:
            for key, (item, *_) in self._items.items():
                if key in shards:
                    self.strange.append(key)
                else:
                    self._tensors[key] = self._planner.resolve_data(item)
            return
        for key, value in self._state.items():
            if not isinstance(value, _torch.Tensor):
                self._others.add(key)
            elif not isinstance(value, _torch.DTensor):
                if key in shards or _torch.is_cut(value):
                    self.strange.append(key)
                else:
                    self._tensors[key] = value
            else:
                describe: Any = spreads.describe_of(type(value))
                try:
                    describe(value)
                    self._tensors[key] = value
                except Unsupported:
                    self.strange.append(key)

    def told(self, *, compared: bool) -> list[Any]:
        """The first message to the other ranks; if ``compared``, it has digests of the tensors in values.

        Raises:
            RuntimeError: the caller's current stream of a device that takes part is being captured into a graph.
        """
        values = [value.told(key, self.rank, compared=compared) for key, value in self._values.items()]
        numbers = {outer: [[self.rank, digest]] for outer, digest in self._numbers().items()}
        return [numbers, values, [], self.strange, self._planned]

    def _numbers(self) -> dict[str, str]:
        """For each optimizer state whose parameters are numbers, a digest of the tensor shapes for each number."""
        state = self._state or {}
        here = [(path, state[key]) for key, path in self._paths.items() if key in state]
        # This includes an optimizer without state: another rank's may have a state of other parameters.
        found: dict[Path, list[Any]] = {
            path[:-3]: []
            for path, value in here
            if path[-3:] == ("param_groups", 0, "params")
            and isinstance(value, list)
            and all(type(number) is int for number in value)
        }
        for path, value in here if found else ():
            about = list(value.shape) if isinstance(value, _torch.Tensor) else None
            for at in range(len(path) - 1):
                if path[at] == "state" and path[:at] in found:
                    found[path[:at]].append([path[at + 1 :], about])
        return {
            ".".join(map(str, outer)): hashlib.sha256(json.dumps(about).encode()).hexdigest()
            for outer, about in found.items()
        }

    def cuts(self, known: Known) -> list[Any]:
        """The boxes that this rank has of tensors that some rank can describe by boxes only."""
        told = []
        for key in known.strange:
            items = self._items.get(key)
            if not items or not self._is_planned(key, known):
                continue
            found = [box_of(key, item, self._planner.resolve_data(item)) for item in items]
            cut = found[0][0]
            if any(other != cut for other, _ in found):
                raise ValueError(f"dcp.save: the plan of this rank has {key!r} with two dtypes or shapes")
            boxes = {memory.box: memory for _, memory in reversed(found)}
            self._boxes[key] = cut, boxes
            whom = [[self.rank, self.rank + 1]]
            held = {self._mesh_of(key): {json.dumps(box): whom for box in sorted(boxes)}}
            told.append([key, [[self.rank, json.dumps(cut)]], held])
        return told

    def _mesh_of(self, key: str) -> str:
        """The identity of the mesh that spreads a tensor of this rank: a box of two meshes belongs to two tensors."""
        value = None if self._state is None else self._state.get(key)
        if not isinstance(value, _torch.DTensor):
            return ""
        ranks = sorted(value.device_mesh.mesh.flatten().tolist())
        return hashlib.sha256(json.dumps(ranks).encode()).hexdigest()[:16]

    def _is_planned(self, key: str, known: Known) -> bool:
        return self._planned is None or key in known.planned

    def fill(self, request: SaveRequest, known: Known, boxes: Boxes) -> None:
        """Flatten this rank's state into a request.

        Args:
            request: the save.
            known: the first messages of all ranks.
            boxes: the boxes of all ranks.

        Raises:
            RuntimeError: the caller's current stream of a device that takes part is being captured into a graph.
            UnsupportedTypeError: something in it cannot be stored; the message names its place.
            ValueError: two entries conflict.
        """
        root = self._nested(known, boxes)
        spreads = _Described(self._ranks, self.rank, device_numbers=len(self._ranks) == 1)
        flat = request.flat = flatten(root, operation=request.operation, types=self._types, spreads=spreads)
        warn_of_types(request.operation, flat)
        request.spreads = spreads.found
        request.movers = dict(flat.movers)
        for index, kept in enumerate(flat.keep):
            if type(kept) is Boxed:
                request.boxes[index] = boxed = []
                for memory in kept.memories:
                    number = len(flat.tensors) + len(request.movers)
                    if memory.mover is not None:
                        request.movers[number] = memory.mover
                    boxed.append((memory.address, memory.nbytes, number))
        request.sources = Sources(request.operation, request.movers)

    def _nested(self, known: Known, boxes: Boxes) -> dict[Any, Any]:
        """The state of this rank, with lists as mappings of positions."""
        root: dict[Any, Any] = {}
        for key in dict.fromkeys([*self._paths, *(self._state or ()), *self._items, *self._values, *self._refused]):
            if not self._is_planned(key, known):
                continue
            if key in self._refused:
                raise UnsupportedTypeError(self._refused[key])
            path = self._paths.get(key, (key,))
            if key in self._boxes:
                insert(root, path, self._boxed(key, boxes), key)
            elif key in self._tensors and key not in known.strange:
                insert(root, path, self._tensors[key], key)
            elif key in self._others:
                insert(root, path, self._value(key, known), key)
        return root

    def _value(self, key: str, known: Known) -> _OfOne | str:
        if key not in known.values:
            return VALUE
        owner, abouts = known.values[key]
        if owner == self.rank:
            return _OfOne(self._values[key].tensors)
        return _OfOne([Given(owner, *about) for about in abouts])

    def _boxed(self, key: str, boxes: Boxes) -> Boxed:
        cut, memories = self._boxes[key]
        number, own = boxes.of(key, self.rank)
        value = None if self._state is None else self._state[key]
        tie: Any = key
        if isinstance(value, _torch.DTensor):
            local = value._local_tensor  # noqa: SLF001 - to_local() may communicate
            storage = local.untyped_storage()._cdata  # noqa: SLF001 - no public name tells empty storages apart
            tie = (storage, local.storage_offset(), tuple(local.shape), local.stride(), cut, number)
        return Boxed(cut, number, boxes.lowest(number), [memories[box] for box in own], tie)


def _paths(plan: _torch.SavePlan, planner: Any) -> Mapping[str, Path]:
    """The keys that lead to each entry, by its dotted key, as the planner flattened the state."""
    for mappings in (getattr(planner, "mappings", None), plan.planner_data):
        if isinstance(mappings, dict) and mappings and all(type(path) is tuple for path in mappings.values()):
            return {key: path if ".".join(map(str, path)) == key else (key,) for key, path in mappings.items()}
    return {}
