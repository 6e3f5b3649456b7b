"""Converts directories of torch.distributed.checkpoint to checkpoints and back, without the state in memory.

The contents of a directory are a plan for fastckpt's writer. Its files are mapped, and the save reads each byte from
the mapping when it needs it. An export is torch's own save of the mapped state.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Size
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from fastckpt._state.flatten import flatten
from fastckpt.dcp import Writer
from fastckpt.exceptions import CheckpointError

from . import pickled as _pickled
from .distributed import METADATA_FILE, Directory
from .needs import first_line, refuse_growth
from .one_file import check_growth, leaves, load, replacing, system_error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .distributed import Item


class _Planner(DefaultSavePlanner):
    """Returns the contents of the directory; ``values`` are the values that were read already."""

    def __init__(self, directory: Directory, values: dict[str, Any]) -> None:
        super().__init__()
        self._directory = directory
        self._values = values
        self._numbers = {
            (key, piece.offsets): number
            for key, item in directory.items.items()
            for number, piece in enumerate(item.pieces)
        }

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value, or the piece of a tensor."""
        if index.fqn in self._values:
            return self._values[index.fqn]
        return self._directory.read(index.fqn, self._numbers[index.fqn, tuple(index.offset or ())])


def write(source: Path, destination: Path, *, overwrite: bool, expand: bool) -> tuple[int, int]:
    """Write the contents of a directory of torch.distributed.checkpoint as a checkpoint."""
    try:
        _pickled.check(source)
    except _pickled.RefusedError as error:
        raise CheckpointError(
            f"cannot import {source}: {error}; if you trust it, load it with torch.distributed.checkpoint and give "
            "the state to fastckpt.save"
        ) from error
    try:
        with _pickled.bounded((source / METADATA_FILE).stat().st_size):
            directory = Directory(source)
        # Exactly the objects that are read within these limits are written.
        with _pickled.bounded(*directory.nbytes()):
            values = {key: directory.read(key) for key, item in directory.items.items() if item.sizes is None}
            flat = flatten(values, operation="import")
    except MemoryError as error:
        raise CheckpointError(f"cannot import {source}: it has changed meanwhile: import it again") from error
    if not expand:
        refuse_growth(
            "import", source, directory.tensor_bytes() + sum(one.capacity for one in flat.tensors), directory.size()
        )
    flat.keep.clear()
    writer = Writer(destination, overwrite=overwrite)
    items = [made for key, item in directory.items.items() for made in _items(key, item)]
    plan = SavePlan(items, planner_data={key: item.path for key, item in directory.items.items()})
    writer.set_up_storage_writer(is_coordinator=True)
    (plan,) = writer.prepare_global_plan([plan])
    writer.write_data(plan, _Planner(directory, values)).wait()
    assert writer.report is not None  # noqa: S101 - it has written
    return writer.report.tensors, writer.report.bytes


def export(source: Path, destination: Path, keys: Sequence[str] | None, *, expand: bool = False) -> tuple[int, ...]:
    """Write the state of a checkpoint to a new directory with ``torch.distributed.checkpoint.save``."""
    state = load(source, destination, keys)
    if not isinstance(state, dict):
        raise CheckpointError(
            f"cannot export {source}: its state is a {type(state).__name__}, and torch.distributed.checkpoint saves a "
            "dict: give --format torch"
        )
    sizes = [leaf.numel() * leaf.element_size() for _, leaf in leaves(state) if isinstance(leaf, torch.Tensor)]
    if not expand:
        check_growth(source, sum(sizes))
    with replacing(destination) as temporary:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is ")
                save(state, storage_writer=FileSystemWriter(temporary), no_dist=True)
        except (CheckpointException, ValueError, RuntimeError) as error:
            cause: Any = next((one for one, _ in getattr(error, "failures", {}).values()), error)
            if not isinstance(cause, Exception):
                raise cause from error  # Ctrl-C
            if failed := system_error(cause):
                raise failed from error
            raise CheckpointError(
                f"cannot export {source}: torch.distributed.checkpoint refuses its state: {first_line(cause)}; choose "
                "a part of it with --keys, or give --format torch"
            ) from error
    return len(sizes), sum(sizes)


def _items(key: str, item: Item) -> list[WriteItem]:
    if item.sizes is None:
        return [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)]
    properties = TensorProperties(dtype=item.dtype)
    return [
        WriteItem(
            MetadataIndex(key, Size(piece.offsets)),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(Size(piece.offsets), Size(piece.sizes)), properties, Size(item.sizes)
            ),
        )
        for piece in item.pieces
    ]
