"""Whether two states are the same: types, structure, order, and every bit of every tensor."""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import torch

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> bytes:
    """The logical bytes of a dense tensor, whatever its dtype."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    raw = tensor if tensor.dtype.itemsize == 16 else tensor.view(_RAW[tensor.dtype.itemsize])
    if not raw.numel():
        return b""
    # A clone has usual strides: a contiguous tensor of one element may have any stride.
    flat = raw.clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.shape, left.layout, left.requires_grad) != (
        right.dtype,
        right.shape,
        right.layout,
        right.requires_grad,
    ):
        return False
    if left.layout is torch.sparse_coo:
        parts = [(side.detach()._indices(), side.detach()._values()) for side in (left, right)]
        return left.is_coalesced() == right.is_coalesced() and all(map(_tensor, *parts))
    if left.layout is not torch.strided:
        rows = "crow_indices" if hasattr(left, "crow_indices") and "csr bsr".find(str(left.layout)[-3:]) >= 0 else None
        names = (rows, "col_indices") if rows else ("ccol_indices", "row_indices")
        return all(
            _tensor(getattr(left.detach(), name)(), getattr(right.detach(), name)()) for name in (*names, "values")
        )
    return bits(left) == bits(right)


def _leaf(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return _tensor(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, np.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, complex):
        return struct.pack(">2d", left.real, left.imag) == struct.pack(">2d", right.real, right.imag)
    return bool(left == right)


def same(left: Any, right: Any) -> bool:
    # The comparison is a loop, because states nest deeper than Python recurses.
    todo = [(left, right)]
    while todo:
        left, right = todo.pop()
        if type(left) is not type(right) and not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)):
            return False
        if isinstance(left, dict):
            if len(left) != len(right):
                return False
            if isinstance(left, defaultdict) and left.default_factory is not right.default_factory:
                return False
            if isinstance(left, OrderedDict):
                todo.append((vars(left), vars(right)))
            for ours, theirs in zip(left.items(), right.items(), strict=True):
                todo.extend(zip(ours, theirs, strict=True))
        elif type(left) in (list, tuple):
            if len(left) != len(right):
                return False
            todo.extend(zip(left, right, strict=True))
        elif type(left) is slice:
            todo.append(((left.start, left.stop, left.step), (right.start, right.stop, right.step)))
        elif not _leaf(left, right):
            return False
    return True
