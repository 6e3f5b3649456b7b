"""Everything of torch.distributed.checkpoint that the adapters use, and the differences between torch 2.6 and 2.15."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
FileSystemWriter = filesystem.FileSystemWriter
FileSystemReader = filesystem.FileSystemReader
StorageInfo: Any = filesystem._StorageInfo  # noqa: SLF001 - what `.metadata` holds in any version
#: The attribute of a plain tensor that represents shards of a larger one (torch.distributed.checkpoint.protocol, since
#: 2.15).
_SHARD_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def done(value: Any) -> Future[Any]:
    """Return a completed future that has this value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def is_initialized() -> bool:
    """Whether this process is in a job of torch.distributed."""
    return dist.is_available() and dist.is_initialized()


def group_size(group: Any) -> int:
    """The number of ranks of a process group, None for the default one; 1 without a job."""
    return dist.get_world_size(group) if is_initialized() else 1


def gives_objects(planner: SavePlanner) -> bool:
    """Whether a planner returns the values themselves, and the tensors of its state unchanged."""
    kind: Any = type(planner)
    stock: Any = DefaultSavePlanner
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(kind, name) is getattr(stock, name) for name in ("resolve_data", "transform_object")
    )


def keeps_state(planner: SavePlanner) -> bool:
    """Whether a planner resolves tensors to those of its ``state_dict``, by the same keys."""
    kind: Any = type(planner)
    stock: Any = DefaultSavePlanner
    return gives_objects(planner) and all(
        getattr(kind, name) is getattr(stock, name) for name in ("lookup_object", "create_local_plan")
    )


def plans_all(planner: SavePlanner) -> bool:
    """Whether a planner's global plan contains everything in the plans of the ranks."""
    kind: Any = type(planner)
    stock: Any = DefaultSavePlanner
    names = ("create_global_plan", "_create_global_plan", "_dedup_save_plans", "finish_plan")
    cached = ("_create_global_plan_with_caching", "_finish_plan_with_caching")
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(kind, name, None) is getattr(stock, name, None) for name in (*names, *cached)
    )


def is_cut(value: Any) -> bool:
    """Whether a tensor that is not a DTensor represents shards of a larger one."""
    if isinstance(value, ShardedTensor) or hasattr(value, "__create_write_items__"):
        return True
    return all(hasattr(value, name) for name in _SHARD_FIELDS)


def async_executors() -> list[Any]:
    """Return the classes that run the saves of ``dcp.async_save``, since torch 2.7.

    Raises:
        RuntimeError: this torch runs them in another way.
    """
    if not hasattr(state_dict_saver, "AsyncCheckpointerType"):
        return []
    names = ("_ThreadBasedAsyncCheckpointExecutor", "_ProcessBasedAsyncCheckpointExecutor")
    found = [getattr(state_dict_saver, name, None) for name in names]
    if not all(hasattr(executor, "execute_save") for executor in found):
        raise RuntimeError(
            f"install: torch {torch.__version__} runs asynchronous saves in a way that fastckpt does not know, and "
            "would write torch's own files: give dcp.async_save a storage_writer=fastckpt.dcp.Writer() instead"
        )
    return found


def copy_shard_fields(source: Any, made: Any) -> None:
    """Make ``made`` represent the same shards of a larger tensor as ``source``, if it represents any."""
    if all(hasattr(source, name) for name in _SHARD_FIELDS):
        for name in _SHARD_FIELDS:
            setattr(made, name, getattr(source, name))


__all__ = [
    "AsyncStager",
    "BytesStorageMetadata",
    "CheckpointException",
    "ChunkStorageMetadata",
    "DTensor",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "Future",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "Parameter",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "Shard",
    "ShardedTensor",
    "StorageInfo",
    "StorageMeta",
    "StorageReader",
    "StorageWriter",
    "Tensor",
    "TensorProperties",
    "TensorStorageMetadata",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
    "WriteResult",
    "async_executors",
    "copy_shard_fields",
    "done",
    "gives_objects",
    "group_size",
    "is_cut",
    "is_initialized",
    "keeps_state",
    "plans_all",
    "torch",
]


def kept_plan(planner: Any) -> SavePlan | None:
    """The plan that a rank made for an earlier save, which its planner keeps because the new one is equal."""
    kept = getattr(planner, "_cached_save_plan", None)
    plan = kept.get(getattr(planner, "_cached_plans_key", None)) if isinstance(kept, dict) else None
    return plan if getattr(planner, "_enable_plan_caching", False) else None
