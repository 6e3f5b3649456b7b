"""``fastckpt.Manager`` over a process group: all ranks save, keep and restore one run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fastckpt
from harness import parallel

TIMEOUT = 20.0


def state(step):
    """A tensor that all ranks have parts of, and the same values on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": parallel.distributed(torch.full((64, 1000), float(step)), mesh, [Shard(0)]), "step": step}


def train(out, steps, **options):
    """Train from where the run is; what this rank saw."""
    with fastckpt.Manager(out, timeout=TIMEOUT, **options) as manager:
        found = manager.restore(into=state(0))
        first = found.step + 1 if found else 1
        saved = []
        for step in range(first, first + steps):
            if manager.should_save(step):
                assert manager.save(step, state(step), {"loss": 10.0 - step}, per_rank={"rank": dist.get_rank()})
                saved.append(step)
        manager.wait()
        return found and (
            found.step,
            found.state["step"],
            float(found.state["w"].to_local().min()),
            found.per_rank,
        ), saved


@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_is_saved_kept_and_restored(forge, tmp_path, async_save):
    options = {"keep": 2, "save_when": 10, "async_save": async_save}
    with forge.group(4) as group:
        assert group.run(train, tmp_path / "run", 35, **options) == [(None, [10, 20, 30])] * 4
        second = group.run(train, tmp_path / "run", 10, **options)
    assert second == [((30, 30, 30.0, {"rank": rank}), [40]) for rank in range(4)]
    manager = fastckpt.Manager(tmp_path / "run", read_only=True)
    assert manager.steps() == [30, 40]
    assert (tmp_path / "run" / "latest").read_text() == "step-00000040\n"
    assert manager.restore().state["w"].shape == (64, 1000)
