"""Many ranks in one process, each in a thread: the coordinator's cost of an agreement on a save with fastckpt.dcp.

Every rank runs the code of ``dcp.save`` with ``fastckpt.dcp.Writer`` from its plan to the agreement, in the rounds and
in the tree of the real protocol, with its encoding. No byte of a tensor is touched. The state resembles that of FSDP:
equal DTensors that are each cut over all ranks, some values that all ranks have, and values with a tensor that the
ranks of one stage have; with ``--boxes`` a separate planner cuts it, so that only boxes describe it. The work of
torch's default planner on its coordinator is measured for comparison.

    PYTHONPATH=benchmarks python -m bench.ranks_dcp --points 8x900,1024x900
"""

from __future__ import annotations

import argparse
import dataclasses
import queue
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import ranks_simulation
from fastckpt._api.save_request import SaveRequest
from fastckpt._api.save_settings import WriteSettings
from fastckpt._ranks import words
from fastckpt._ranks.ranks import Ranks
from fastckpt._ranks.tree import below
from fastckpt._state.registry import Types
from fastckpt.dcp._brought import Brought
from fastckpt.dcp._together import Together

if TYPE_CHECKING:
    from collections.abc import Callable

#: The number of values in the state.
VALUES = 20
#: The number of stages. The ranks of a stage, which are this many ranks apart, have a value with a tensor.
STAGES = 8
COLUMNS = 64


@dataclasses.dataclass
class Traffic:
    """The work of the coordinator: bytes received by round, bytes of the answer, signs of life, CPU seconds."""

    received: dict[str, int] = dataclasses.field(default_factory=dict)
    answers: dict[str, int] = dataclasses.field(default_factory=dict)
    alive: int = 0
    seconds: float = 0.0


class _Operation:
    """The rounds of one rank, which takes the messages of the ranks below it, and passes on those from above."""

    def __init__(self, rank: int, up: list[queue.Queue[bytes]], down: list[queue.Queue[bytes]], one: Any) -> None:
        self.rank, self.up, self.down = rank, up, down
        #: Only one thread runs at a time: a thousand threads that wait for Python's lock would wake up constantly.
        self.one = one
        self.traffic = Traffic()

    def _take(self, inbox: queue.Queue[bytes]) -> bytes:
        """Return the next message; another thread may run meanwhile."""
        self.one.release()
        try:
            return inbox.get(timeout=600)
        finally:
            self.one.acquire()

    def round(self, name: str, value: Any, *, combine: Callable[[list[Any]], Any], decide: Callable[[Any], Any]) -> Any:
        """Do a round, like the method of the same name of a process group's operation."""
        under = below(self.rank, len(self.up))
        data = [self._take(self.up[child]) for child in under]
        self.traffic.received[name] = sum(map(len, data))
        value = combine([value, *map(words.decode, data)])
        if self.rank:
            self.up[self.rank].put(words.encode(value))
            answer = self._take(self.down[self.rank])
        else:
            answer = words.encode(decide(value))
        self.traffic.answers[name] = len(answer)
        for child in under:
            self.down[child].put(answer)
        return words.decode(answer)

    def alive(self) -> None:
        """Count a sign of life."""
        self.traffic.alive += 1


class _Cutting(DefaultSavePlanner):
    """Returns the local parts of tensors without a call that may communicate."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self.state_dict[write_item.index.fqn]._local_tensor  # noqa: SLF001 - to_local() may communicate


def state_of(ranks: int, tensors: int, rows: int) -> dict[str, Any]:
    """Return the state of each rank. The local tensors are the same on all ranks."""
    mesh = init_device_mesh("cpu", (ranks,))
    size = torch.Size([rows * ranks, COLUMNS])
    model = {
        f"layers.{number:06d}.weight": DTensor.from_local(
            torch.empty(rows, COLUMNS, dtype=torch.bfloat16),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=size,
            stride=(COLUMNS, 1),
        )
        for number in range(tensors)
    }
    stages = {f"{number}": (number, torch.ones(2)) for number in range(STAGES)}
    return {
        "model": model,
        "values": {f"{number:02d}": [number, "value"] for number in range(VALUES)},
        "stages": stages,
    }


def plans_of(plan: Any, rank: int, ranks: int, rows: int, *, boxes: bool) -> tuple[Any, Any]:
    """Return the plan of one rank as torch leaves it, with a share of the values, and the plan that the rank made.

    For tensors, both plans have the boxes of the rank; it only matters that they are boxes.
    """
    offsets = torch.Size([rank * rows, 0])
    left, own = [], []
    for number, item in enumerate(plan.items):
        made = item
        kind, _, stage = item.index.fqn.partition(".")
        if kind == "stages":
            if int(stage) == rank % STAGES:
                own.append(made)
            continue
        if item.tensor_data is not None and boxes:
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=item.tensor_data.chunk.sizes)
            index = dataclasses.replace(item.index, offset=offsets)
            made = dataclasses.replace(
                item, index=index, tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk)
            )
        own.append(made)
        if item.tensor_data is not None or number % ranks == rank:
            left.append(made)
    return dataclasses.replace(plan, items=left), dataclasses.replace(plan, items=own)


def agree(ranks: int, tensors: int, *, boxes: bool = False, rows: int = 1) -> list[Traffic]:
    """Have all ranks agree on a state; return the work of each rank."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        state = state_of(ranks, tensors, rows)
        up: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(ranks)]
        down: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(ranks)]
        one = threading.Lock()
        operations = [_Operation(rank, up, down, one) for rank in range(ranks)]
        failed: list[BaseException] = []
        planner = (_Cutting if boxes else DefaultSavePlanner)()
        planner.set_up_planner(state)
        first = planner.create_local_plan()

        def run(rank: int) -> None:
            with one:
                operation: Any = operations[rank]
                group: Any = SimpleNamespace(group=SimpleNamespace(rank=rank, size=ranks, ranks=range(ranks)))
                plan, local = plans_of(first, rank, ranks, rows, boxes=boxes)
                settings, types = WriteSettings.of("dcp.save", {}), Types("dcp.save")
                request = SaveRequest.of("dcp.save", "/checkpoint", None, settings, types, began=time.perf_counter())
                began = time.thread_time()
                try:
                    brought = Brought(plan, planner, types, range(ranks), rank, local)
                    Together(group, operation, Ranks(), brought).agree(request)
                except BaseException as error:  # noqa: BLE001 - raised below
                    failed.append(error)
                operation.traffic.seconds = time.thread_time() - began

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if failed:
                raise failed[0]
            time.sleep(0.01)
        if failed:
            raise failed[0]
    finally:
        dist.destroy_process_group()
    return [operation.traffic for operation in operations]


def main() -> None:
    """Measure and print the requested points."""
    parser = argparse.ArgumentParser(prog="python -m bench.ranks_dcp", description=__doc__)
    parser.add_argument("--points", default="8x900,64x900,1024x900", help="ranks x tensors")
    parser.add_argument("--boxes", action="store_true", help="have a separate planner cut the state")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch's planner")
    chosen = parser.parse_args()
    for text in chosen.points.split(","):
        ranks, tensors = map(int, text.split("x"))
        found = agree(ranks, tensors, boxes=chosen.boxes)[0]
        print(
            f"{ranks:,} ranks x {tensors:,} tensors: coordinator {found.seconds:.3f} s CPU, "
            f"{sum(found.received.values()) / 1e3:,.1f} KB in, answers {sum(found.answers.values()) / 1e3:,.1f} KB, "
            f"{found.alive:,} signs of life"
        )
        if not chosen.no_torch:
            theirs = ranks_simulation.peer(ranks, tensors, limit=ranks * tensors)
            if theirs is not None:
                print(
                    f"  torch's planner: create_global_plan {theirs['plan_cpu']:.3f} s CPU, with what travels "
                    f"{theirs['coordinator_cpu']:.3f} s; {theirs['received'] / 1e6:,.1f} MB in, "
                    f"{theirs['sent'] / 1e6:,.1f} MB out"
                )


if __name__ == "__main__":
    main()
