"""A save of several ranks: their tables become one, and then fastckpt's own protocol runs."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any

from fastckpt import _core
from fastckpt._api import in_flight
from fastckpt._files import TORCH_METADATA
from fastckpt._ranks.process_group import AgreedByRanks, ProcessGroup
from fastckpt._tensors.movers import Sources

from ._metadata import torch_metadata
from ._take import take
from ._unite import Holding, United, memories_of, unite

if TYPE_CHECKING:
    from fastckpt._api.save_request import SaveRequest
    from fastckpt._ranks.peers import Operation
    from fastckpt._ranks.replicas import Policy
    from fastckpt._ranks.session import Session
    from fastckpt._state.registry import Types

    from . import _torch
    from ._take import Taken


class Together(ProcessGroup):
    """The ranks of a process group, each with a plan.

    Args:
        session: the process group.
        operation: what its ranks do together, in its body.
        timeout: seconds for which a rank may make no progress.
        policy: how what several ranks hold is compared.
        plan: what this rank saves.
        planner: knows the tensors.
        types: the types with names that are known.
        local: the plan that this rank made; None where its planner has kept it.
    """

    def __init__(
        self,
        session: Session,
        operation: Operation,
        timeout: float,
        policy: Policy,
        plan: _torch.SavePlan,
        planner: _torch.SavePlanner,
        types: Types,
        local: _torch.SavePlan | None,
    ) -> None:
        super().__init__(session, operation, timeout, policy)
        self._plan, self._planner, self._types, self._local = plan, planner, types, local

    def agree(self, request: SaveRequest) -> AgreedByRanks:
        """Unite the plans: the round ``tables``."""
        rank = self.session.group.rank
        taken = take(self._plan, self._planner, self._types, self._local)
        request.flat.keep.append(taken)
        in_flight.wait_for_paths(request.path)
        torchs = b""

        def decide(tables: list[Any]) -> list[Any]:
            nonlocal torchs
            united = unite([table for _, table in tables], request.settings.model_key)
            torchs = torch_metadata(united.entries)
            return [_packed(united), secrets.randbits(63)]

        answer, seed = self.operation.round("tables", [[rank, taken.table()]], combine=gathered, decide=decide)
        united = _unpacked(answer)
        held, movers = _held(taken, united, rank)
        sources = Sources(request.operation, movers)
        tensors, spreads = _spread(united)
        return AgreedByRanks(
            prefix=united.prefix,
            files=[(TORCH_METADATA, torchs)],
            tensors=tensors,
            spreads=spreads,
            page=united.page,
            seed=seed,
            structure=united.structure,
            metadata=request.metadata.structure(),
            held=held,
            fill=sources.fill if movers else None,
            sum=sources.sum if movers else None,
            devices=sources.devices,
            pulled=sum(held[index][3] for index in movers),
        )


def gathered(lists: list[list[Any]]) -> list[Any]:
    """Lists of pairs of rank and value as one, in the order of the ranks."""
    return sorted((one for each in lists for one in each), key=lambda one: one[0])


def _packed(united: United) -> str:
    return json.dumps([united.tensors, united.boxes, united.numbers, united.structure, united.prefix, united.page])


def _unpacked(text: str) -> United:
    united = United()
    tensors, boxes, united.numbers, united.structure, united.prefix, united.page = json.loads(text)
    united.tensors = [
        (name, dtype, tuple(shape), None if logical is None else (logical[0], tuple(logical[1])))
        for name, dtype, shape, logical in tensors
    ]
    united.boxes = [
        [Holding(rank, tuple((start, stop) for start, stop in box), mesh) for rank, box, mesh in holders]
        for holders in boxes
    ]
    return united


def _spread(united: United) -> tuple[list[Any], list[_core.Spread]]:
    """Who has what, as the core takes it: tensors that are cut alike have one spread for each mesh that has them."""
    numbers: dict[Any, int] = {}
    tensors: list[Any] = []
    for tensor, holdings in zip(united.tensors, united.boxes, strict=True):
        by_mesh: dict[int, list[Any]] = {}
        for rank, box, mesh in holdings:
            by_mesh.setdefault(mesh, []).append((rank, box))
        tensors.append((*tensor, [numbers.setdefault(tuple(boxes), len(numbers)) for boxes in by_mesh.values()]))
    return tensors, [_core.Spread.boxes(boxes) for boxes in numbers]


def _held(taken: Taken, united: United, rank: int) -> tuple[list[tuple[int, int, int, int]], dict[int, Any]]:
    """This rank's parts: the k-th of its boxes of a tensor is its part k; and what brings those without an address."""
    held: list[tuple[int, int, int, int]] = []
    movers: dict[int, Any] = {}
    for number, memories in memories_of(taken, united).items():
        parts = [holding.box for holding in united.boxes[number] if holding.rank == rank]
        for memory in memories:
            if memory.mover is not None:
                movers[len(held)] = memory.mover
            held.append((number, parts.index(memory.box), memory.address, memory.nbytes))
    return held, movers
