"""A save of several ranks: their tables become one, and then fastckpt's own protocol runs."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt import _core
from fastckpt._api import in_flight
from fastckpt._api.build_report import with_warnings
from fastckpt._api.lent import lent
from fastckpt._api.progress import ticker
from fastckpt._ranks.save import Compared, Portion, Texts, write_checkpoint
from fastckpt._ranks.session import session
from fastckpt._tensors.movers import Sources

from ._metadata import torch_metadata
from ._take import take
from ._unite import Holding, United, memories_of, unite

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastckpt._ranks.replicas import Policy
    from fastckpt._state.registry import Types

    from . import _torch
    from ._take import Taken


class Wishes(NamedTuple):
    """What a writer was asked for.

    Attributes:
        path: the checkpoint's directory, absolute.
        label: of this save, the same on all ranks.
        group: the process group.
        timeout: seconds of silence that are waited for.
        bandwidth: bytes per second to which the options limit this rank; None for no limit.
        model_key: see :func:`fastckpt.save`.
        options: how a state is saved whose model has the names that begin with a prefix, with staging memory; and what
            torch's ``.metadata`` holds, which the coordinator alone writes.
        policy: how what several ranks hold is compared.
        local: the plan that this rank made; None where its planner has kept it.
        metadata: makes the structure of what is read without tensors; what it raises reaches the other ranks.
    """

    path: str
    label: str
    group: Any
    timeout: float
    bandwidth: float | None
    model_key: str | None
    options: Callable[[str, _core.Memory | None, bytes], _core.SaveOptions]
    policy: Policy
    local: _torch.SavePlan | None
    metadata: Callable[[], str]


def save_together(wishes: Wishes, plan: _torch.SavePlan, planner: _torch.SavePlanner, types: Types) -> Any:
    """Write this rank's part of a checkpoint, and commit it with the others: every rank calls it.

    Returns:
        The core's report of this rank.
    """
    here = session("dcp.save", wishes.group)
    with here.peers.operation("save", wishes.path, wishes.timeout, wishes.label) as operation:
        metadata = wishes.metadata()
        taken = take(plan, planner, types, wishes.local)
        in_flight.wait_for_path(wishes.path)
        torchs = b""

        def decide(tables: list[Any]) -> list[Any]:
            nonlocal torchs
            united = unite([table for _, table in tables], wishes.model_key)
            torchs = torch_metadata(united.entries)
            return [_packed(united), secrets.randbits(63)]

        answer, seed = operation.round("tables", [[here.group.rank, taken.table()]], combine=gathered, decide=decide)
        united = _unpacked(answer)
        held, movers = _held(taken, united, here.group.rank)
        sources = Sources("dcp.save", movers)
        texts = Texts(united.structure, metadata)
        with lent(sources.devices, sum(held[index][3] for index in movers)) as staging:
            options = wishes.options(united.prefix, staging.core, torchs)
            share = wishes.policy.dealt(_share(united, here.group.size, options))
            with ticker("dcp.save", wishes.path, shown=False) as tick:
                written = write_checkpoint(
                    here,
                    operation,
                    wishes.path,
                    Portion(
                        share, held, sources.fill if movers else None, options, sum=sources.sum if movers else None
                    ),
                    texts,
                    timeout=wishes.timeout,
                    compared=Compared(wishes.policy, seed),
                    bandwidth=wishes.bandwidth,
                    tick=tick,
                )
            return with_warnings(written.own, staging.warnings)


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


def _share(united: United, ranks: int, options: _core.SaveOptions) -> _core.Share:
    """Who has what: tensors that are cut alike have one spread for each mesh that has them."""
    numbers: dict[Any, int] = {}
    spreads = []
    for holdings in united.boxes:
        by_mesh: dict[int, list[Any]] = {}
        for rank, box, mesh in holdings:
            by_mesh.setdefault(mesh, []).append((rank, box))
        spreads.append([numbers.setdefault(tuple(boxes), len(numbers)) for boxes in by_mesh.values()])
    return _core.Share.to_save(
        [(*tensor, spread) for tensor, spread in zip(united.tensors, spreads, strict=True)],
        [_core.Spread.boxes(boxes) for boxes in numbers],
        ranks,
        options,
        united.page,
    )


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
