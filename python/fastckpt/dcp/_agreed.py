"""Data that the ranks of a save exchange in addition to the common description of the state.

The size of this data does not depend on the number of ranks, except for their boxes: equal boxes of several ranks are
sent once, and so are the boxes of tensors that are cut in the same way.
"""

from __future__ import annotations

import json
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._ranks.agreement import logical_of
from fastckpt._ranks.offers import ranks_of, runs_of
from fastckpt._ranks.process_group import first_two
from fastckpt.exceptions import CheckpointError

from ._united import united

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._values import Box


class Known:
    """The facts that all ranks know of values, and of tensors that need boxes.

    Args:
        answer: the result of :func:`decide_told`, and the warnings, if any, after it.

    Attributes:
        model_key: the coordinator's option.
        values: for each value with tensors, by its key, its rank and the tensors.
        strange: the keys of tensors that some rank can describe only by boxes.
        planned: the keys in the plans of ranks whose planners may leave some out.
        warnings: the warnings about different values.
    """

    def __init__(self, answer: list[Any]) -> None:
        self.model_key, values, strange, planned, *self.warnings = answer
        self.values: dict[str, tuple[int, list[Any]]] = {
            key: (owner, [[rest, dtype, tuple(shape), logical_of(logical)] for rest, dtype, shape, logical in tensors])
            for key, owner, tensors in values
        }
        self.strange = dict.fromkeys(strange)
        self.planned = frozenset(planned or ())


def combine_told(told: Sequence[list[Any]]) -> list[Any]:
    """Combine messages: optimizers with numbers, values, their differences, strange keys, planned entries."""
    ids, values, differing, strange, planned = zip(*told, strict=True)
    plans = [keys for keys in planned if keys is not None]
    return [
        {outer: first_two([one[outer] for one in ids if outer in one]) for outer in dict.fromkeys(chain(*ids))},
        *united(chain.from_iterable(values), differing),
        list(dict.fromkeys(chain.from_iterable(strange))),
        list(dict.fromkeys(chain.from_iterable(plans))) if plans else None,
    ]


def decide_told(told: list[Any], model_key: str | None, values: dict[str, str]) -> list[Any]:
    """The facts for all ranks; ``values`` receives the tokens of each value by its key.

    Raises:
        ValueError: ranks have optimizers whose numbers refer to different parameters.
    """
    ids, found, _, strange, planned = told
    for outer, (first, *others) in ids.items():
        if others:
            raise ValueError(
                f"dcp.save: the parameters of the optimizer state {outer!r} are numbers, which refer to different "
                f"parameters on rank {others[0][0]} and on rank {first[0]}: give the state that "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict returns, which has their names"
            )
    values.update((key, tokens) for key, _, (tokens, *_) in found)
    return [model_key, [[key, rank, abouts] for key, rank, (_, abouts, *_) in found if abouts], strange, planned]


class Boxes:
    """The boxes of each rank.

    Args:
        answer: the result of :func:`decide_cuts`.

    Attributes:
        spreads: for each cut, and for each mesh in it, which ranks have which boxes of a tensor.
    """

    def __init__(self, answer: list[Any]) -> None:
        cuts, tensors = answer
        self.spreads: list[list[list[tuple[int, Box]]]] = []
        for meshes in cuts:
            made = []
            for holders in meshes:
                boxes = [
                    (rank, tuple((low, high) for low, high in box))
                    for box, runs in holders
                    for start, stop in runs
                    for rank in range(start, stop)
                ]
                made.append(sorted(boxes))
            self.spreads.append(sorted(made))
        self._cuts: dict[str, int] = dict(tensors)

    def of(self, key: str, rank: int) -> tuple[int, list[Box]]:
        """The number of the cut of a tensor, and the boxes that a rank has, in the order of its parts."""
        number = self._cuts[key]
        return number, [box for boxes in self.spreads[number] for holder, box in boxes if holder == rank]

    def lowest(self, number: int) -> int:
        """The lowest rank that has a box of this cut."""
        return min(boxes[0][0] for boxes in self.spreads[number])

    def core(self, number: int) -> list[_core.Spread]:
        """A cut in the core's form."""
        return [_core.Spread.boxes(boxes) for boxes in self.spreads[number]]


def combine_cuts(told: Sequence[list[Any]]) -> list[Any]:
    """Combine the boxes of several ranks: dtype and shape of each tensor, and its ranks by mesh and box."""
    tensors: dict[str, list[Any]] = {}
    for key, about, meshes in chain.from_iterable(told):
        known = tensors.get(key)
        if known is None:
            tensors[key] = [about, {mesh: dict(holders) for mesh, holders in meshes.items()}]
            continue
        known[0] = first_two([known[0], about])
        for mesh, holders in meshes.items():
            into = known[1].setdefault(mesh, {})
            for box, runs in holders.items():
                into[box] = into[box] + runs if box in into else runs
    return [[key, about, meshes] for key, (about, meshes) in tensors.items()]


def decide_cuts(told: list[Any], alive: Callable[[], None]) -> list[Any]:
    """The cuts, and the cut of each tensor; equal cuts are merged.

    Raises:
        CheckpointError: a part of a tensor is in no box.
        ValueError: ranks have a tensor with two dtypes or shapes.
    """
    numbers: dict[str, int] = {}
    held: list[int] = []
    tensors = []
    for key, about, meshes in told:
        alive()
        if len(about) > 1:
            (first, own), (second, other) = [(rank, json.loads(text)) for rank, text in about]
            raise ValueError(
                f"dcp.save: the dtype or shape of {key!r} differs between rank {second} ({other[0]} {other[1]}) and "
                f"rank {first} ({own[0]} {own[1]})"
            )
        cut = [
            [[json.loads(box), runs_of(ranks_of(runs))] for box, runs in sorted(holders.items())]
            for _, holders in sorted(meshes.items())
        ]
        text = json.dumps(cut, separators=(",", ":"))
        number = numbers.setdefault(text, len(numbers))
        if number == len(held):
            held.append(sum(prod(stop - start for start, stop in box) for holders in cut for box, _ in holders))
        _, shape, logical = json.loads(about[0][1])
        sizes = shape if logical is None else logical[1]
        # Overlapping boxes may hide a gap from this check; the core finds it.
        if held[number] < prod(sizes):
            raise CheckpointError(
                f"dcp.save: {key!r} of the sizes {sizes} is incomplete here ({held[number]} of {prod(sizes)} "
                "elements): call dcp.save on all ranks that have a part of it, without no_dist=True"
            )
        tensors.append([key, number])
    return [[json.loads(text) for text in numbers], tensors]
