"""Writes torch's ``.metadata``, by which other tools recognise a checkpoint directory.

It describes the checkpoint but does not lead to its bytes. torch's own reader looks for them in a file that does not
exist, whose name shows which reader to use: it raises an error, and never returns values. The file is a pickle of
torch's own classes, which fastckpt never reads.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from fastckpt._tensors import torch as _tensors

from . import _torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._structure import About, Path

#: This file does not exist. torch names it in its FileNotFoundError.
NOT_HERE = "a checkpoint of fastckpt - load it with storage_reader=fastckpt.dcp.Reader() or call fastckpt.dcp.install()"
#: The pickle protocol. torch's own writer uses the default of the running Python; every supported Python reads 4.
_PROTOCOL = 4


def torch_metadata(entries: Mapping[str, tuple[Path, About | None]]) -> bytes:
    """The content of ``.metadata``.

    Args:
        entries: for each entry by its dotted key, the keys that lead to it, and its stored tensor if it is one.
    """
    described: dict[str, Any] = {}
    nowhere = _torch.StorageInfo(NOT_HERE, 0, 0)
    storage: dict[Any, Any] = {}
    for key, (_, about) in entries.items():
        dtype = None if about is None else _tensors.dtype_of(about.dtype, about.logical and about.logical[0])
        if about is None or dtype is None:
            described[key] = _torch.BytesStorageMetadata()
            storage[_torch.MetadataIndex(key)] = nowhere
        else:
            described[key] = whole_tensor(dtype, about.sizes, requires_grad=about.requires_grad)
            storage[_torch.MetadataIndex(key, described[key].chunks[0].offsets)] = nowhere
    return pickle.dumps(
        _torch.Metadata(described, {key: path for key, (path, _) in entries.items()}, storage), _PROTOCOL
    )


def whole_tensor(dtype: Any, sizes: Any, *, requires_grad: bool) -> _torch.TensorStorageMetadata:
    """A tensor as one whole chunk, which fits any sharding."""
    size = _torch.torch.Size(sizes)
    return _torch.TensorStorageMetadata(
        properties=_torch.TensorProperties(dtype=dtype, requires_grad=requires_grad),
        size=size,
        chunks=[_torch.ChunkStorageMetadata(offsets=_torch.torch.Size([0] * len(size)), sizes=size)],
    )
