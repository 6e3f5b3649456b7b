"""The states of the ranks of a job: random bits, the same in every run; each rank makes only its own part."""

from __future__ import annotations

import zlib
from typing import Any

from bench.states import llama_shapes, random_tensor

# fsdp: cut by rows; column: by columns (norms by rows); replicas: every rank has all; many: small tensors by rows;
# short: each rank has 32 or 64 KiB of rows of each tensor, as with a large model on many ranks.
KINDS = ("fsdp", "column", "replicas", "many", "short")


def make(kind: str, size: int, count: int = 0, *, blank: bool = False) -> dict[str, Any]:
    """Return this rank's state of about ``size`` bytes in all: a flat dict of tensors by name. ``blank``: zeros."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes: list[tuple[str, tuple[int, ...]]]
    if kind == "many":
        shapes = [(f"parameter.{index:06d}", (16, 16)) for index in range(count)]
    elif kind == "short":
        pairs = -(-size // (mesh.size() * 3 << 15))
        shapes = [(f"parameter.{index:06d}", (16 * mesh.size(), 1024 << index % 2)) for index in range(2 * pairs)]
    else:
        shapes = llama_shapes(size)
    state = {}
    for name, shape in shapes:
        cut = 1 if kind == "column" and len(shape) == 2 else 0
        local = list(shape)
        if kind != "replicas":
            # The size of a piece, as torch.chunk cuts.
            piece = -(-shape[cut] // mesh.size())
            local[cut] = max(0, min(shape[cut] - piece * mesh.get_local_rank(), piece))
        seed = zlib.crc32(f"{name} {0 if kind == 'replicas' else mesh.get_local_rank()}".encode())
        tensor = (
            torch.zeros(local, dtype=torch.bfloat16)
            if blank
            else random_tensor(tuple(local), torch.bfloat16, np.random.SFC64(seed))
        )
        if kind != "replicas":
            stride = (shape[1], 1) if len(shape) == 2 else (1,)
            tensor = DTensor.from_local(tensor, mesh, [Shard(cut)], shape=torch.Size(shape), stride=stride)
        state[name] = tensor
    return state


def global_bytes(state: dict[str, Any]) -> int:
    """Return the bytes of the whole tensors, each counted once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def local(tensor: Any) -> Any:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names whose local bits differ."""
    import torch

    def bits(tensor: Any) -> Any:
        return local(tensor).view(torch.int16)

    return [name for name, tensor in expected.items() if not torch.equal(bits(found[name]), bits(tensor))]
