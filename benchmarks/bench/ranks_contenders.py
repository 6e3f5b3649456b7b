"""The contenders for the state of several ranks: fastckpt, and torch.distributed.checkpoint in its two formats.

Each function is called on all ranks at once, with a flat dict of this rank's tensors and a path.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.device import fsync_tree

if TYPE_CHECKING:
    from collections.abc import Callable

    State = dict[str, Any]


def is_first() -> bool:
    """Whether this is rank 0."""
    import torch.distributed as dist

    return bool(dist.get_rank() == 0)


@functools.cache
def _ranks(cma: str) -> Any:
    """A process group of all ranks. Each group decides only once whether its ranks read each other's memory."""
    import torch.distributed as dist

    return dist.new_group() if cma == "0" else None


def save_fastckpt(state: State, path: str) -> dict[str, Any]:
    """Save with ``fastckpt.distributed.save``, which is durable when it returns."""
    import fastckpt.distributed

    report = fastckpt.distributed.save({"model": state}, path, ranks=_ranks(os.environ.get("FASTCKPT_CMA", "")))
    return {"phases": dict(report.phases), "engine": str(report.engine)}


def load_fastckpt(state: State, path: str) -> dict[str, Any]:
    """Load into the tensors of ``state``."""
    import fastckpt.distributed

    reports: list[Any] = []
    ranks = _ranks(os.environ.get("FASTCKPT_CMA", ""))
    io = fastckpt.IO(on_report=reports.append)
    fastckpt.distributed.load(path, into={"model": state}, ranks=ranks, io=io)
    return {"phases": dict(reports[0].phases)}


def save_dcp(state: State, path: str) -> dict[str, Any]:
    """Save with torch's ``FileSystemWriter``, which syncs its files; the directory is synced afterwards."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(path, sync_files=True))
    if is_first():
        fsync_tree(Path(path))
    dist.barrier()
    return {}


def load_dcp(state: State, path: str) -> dict[str, Any]:
    """Load into the tensors of ``state`` with torch's ``FileSystemReader``."""
    import torch.distributed.checkpoint as dcp

    dcp.load({"model": state}, storage_reader=dcp.FileSystemReader(path))
    return {}


def save_dcp_hf(state: State, path: str) -> dict[str, Any]:
    """Save with torch's ``HuggingFaceStorageWriter`` and its consolidation, to one directory of whole tensors."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    # Files of at most 5 GB, as fastckpt and transformers write them, and one thread per file.
    limit, index, filled = 5 * 10**9, 1, 0
    indices = {}
    for name, tensor in state.items():
        nbytes = tensor.numel() * tensor.element_size()
        if filled and filled + nbytes > limit:
            index, filled = index + 1, 0
        indices[name], filled = index, filled + nbytes
    writer = dcp.HuggingFaceStorageWriter(
        path,
        fqn_to_index_mapping=indices,
        save_distributed=True,
        enable_consolidation=True,
        thread_count_consolidation=max(2, index),
    )
    dcp.save(state, storage_writer=writer)
    dist.barrier()
    if is_first():
        fsync_tree(Path(path))
    dist.barrier()
    return {}


def plan_dcp(state: State, path: str) -> dict[str, Any]:
    """Run ``dcp.save`` with a writer that writes nothing: only planning is left."""
    import torch
    import torch.distributed.checkpoint as dcp

    class Nothing(dcp.StorageWriter):  # type: ignore[misc]
        """Accepts all items and keeps nothing."""

        def reset(self, checkpoint_id: Any = None) -> None:
            """Begin."""

        def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            """Set up nothing."""

        def prepare_local_plan(self, plan: Any) -> Any:
            """Leave the plan unchanged."""
            return plan

        def prepare_global_plan(self, plans: Any) -> Any:
            """Leave the plans unchanged."""
            return plans

        def write_data(self, plan: Any, planner: Any) -> Any:  # noqa: ARG002 - as the base class names them
            """Write nothing."""
            done: Any = torch.futures.Future()
            done.set_result([])
            return done

        def finish(self, metadata: Any, results: Any) -> None:
            """Keep nothing."""

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
            """Take any."""
            return True

    dcp.save({"model": state}, checkpoint_id=path, storage_writer=Nothing())
    return {}


SAVES: dict[str, Callable[[State, str], dict[str, Any]]] = {
    "fastckpt": save_fastckpt,
    "dcp": save_dcp,
    "dcp_hf": save_dcp_hf,
}
LOADS: dict[str, Callable[[State, str], dict[str, Any]]] = {"fastckpt": load_fastckpt, "dcp": load_dcp}
TITLES = {
    "fio": "raw device (fio)",
    "fastckpt": "**fastckpt.distributed**",
    "dcp": "torch DCP, FileSystemWriter",
    "dcp_hf": "torch DCP, Hugging Face with consolidation",
}


def loads(name: str) -> bool:
    """Whether the contender also loads."""
    return name.partition(":")[0] in LOADS


def title(name: str) -> str:
    """Return its name in tables. A suffix after a colon names the team, and whether the ranks send all bytes."""
    who, _, team = name.partition(":")
    return f"{TITLES[who]}, FASTCKPT_AGGREGATE={team}" if team else TITLES[who]


def of(action: str, name: str) -> Callable[[State, str], dict[str, Any]]:
    """Return the function that saves, loads or plans. This also sets the teams in which ranks collect pieces."""
    if action == "plan":
        return plan_dcp
    who, _, team = name.partition(":")
    if team:
        team, _, sent = team.partition("-")
        os.environ["FASTCKPT_AGGREGATE"] = team
        os.environ["FASTCKPT_CMA"] = "0" if sent else "1"
    return {"save": SAVES, "load": LOADS}[action][who]


def quietly(call: Callable[[State, str], dict[str, Any]], state: State, path: str) -> dict[str, Any]:
    """Call without the warnings of other libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(state, path)
