"""Which ranks write an extent, on a file system that locks extents for writers, as shared file systems do."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fastckpt
import fastckpt.distributed
from harness import mounts, parallel

RANKS = 4
EXTENT = 4 << 20


def _state() -> dict[str, torch.Tensor]:
    """Tensors of 12.8 MB in total, each with at most 32 KiB on a rank."""
    made = torch.Generator().manual_seed(5)
    rows = [64 - number % 5 for number in range(100)]
    return {f"{n:03}": torch.randint(99, (size, 512), dtype=torch.int32, generator=made) for n, size in enumerate(rows)}


def _save(path: str, aggregate: str) -> tuple[int, int]:
    os.environ["FASTCKPT_AGGREGATE"] = aggregate
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: parallel.distributed(tensor, mesh, [Shard(0)]) for name, tensor in _state().items()}
    report = fastckpt.distributed.save(state, path)
    return report.team, report.grain


@pytest.mark.root
def test_an_extent_changes_its_owner_only_between_pieces_in_place(lasting, tmp_path):
    fastckpt.save(_state(), tmp_path / "alone")
    name = "model.safetensors"
    alone = (tmp_path / "alone" / name).read_bytes()
    extents = -(-len(alone) // EXTENT)
    for aggregate in ("off", str(RANKS), "auto"):
        # The test counts grants and measures no time, so a grant takes none.
        with mounts.extent_locks(extent=EXTENT, grant=0.0) as (point, counted), lasting(RANKS) as group:
            told = group.run(_save, point / "c", aggregate)
            grants, seen, writes = counted()[name]
            assert (point / "c" / name).read_bytes() == alone, "the files equal those of one process"
        assert seen == extents
        if aggregate == "off":
            # Each rank has pieces in each extent, except perhaps in the last. How often it returns there is chance.
            assert grants >= RANKS * (extents - 1)
            assert writes >= 100 * RANKS
            continue
        assert grants == extents
        assert all(team >= RANKS and grain == EXTENT for team, grain in told)
