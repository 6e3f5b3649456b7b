"""torchtitan's own checkpoint manager under ``install()``: it finds what it saved, resumes from it and removes it."""

from __future__ import annotations

import pickle
import re
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fastckpt
from fastckpt.distributed import Ranks
from harness import logged, parallel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="NOT TESTED HERE: needs torchtitan (scripts/setup)"),
]


class Optimizers:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state):
        set_optimizer_state_dict(self.model, self.optimizer, state)


class Loader:
    """As torchtitan's: each rank has a key of its own, with a pickle in bytes."""

    def __init__(self):
        self.rows = 0

    def state_dict(self):
        return {f"dp_rank_{dist.get_rank()}": pickle.dumps({"rows": self.rows}), "world_size": dist.get_world_size()}

    def load_state_dict(self, state):
        self.rows = pickle.loads(state[f"dp_rank_{dist.get_rank()}"])["rows"]


class TrainState:
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


def train(folder, mode, last, ours=True):
    """Train to step ``last``: the step that was found, and the moments and weights of this rank at the end."""
    from torchtitan.components.checkpoint import CheckpointManager

    config = CheckpointManager.Config(
        enable=True, folder="run", interval=1, keep_latest_k=2, async_mode=mode, last_save_model_only=False
    )
    model, optimizer = parallel.build("fsdp", trained=False)
    progress, loader = TrainState(), Loader()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    if ours:
        fastckpt.dcp.install(ranks=Ranks(timeout=60))
    manager = CheckpointManager(
        config,
        dataloader=loader,
        model_parts=[model],
        optimizers=Optimizers(model, optimizer),
        lr_schedulers=schedule,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(folder),
    )
    if mode == "async_with_pinned_mem":
        # The manager's own stager needs a GPU for pinned memory; the rest is as it has it.
        manager.stager = DefaultStager(StagingOptions(False, True, True, False))
    with logged.warnings() as texts:
        manager.load()
        found = progress.step
        rows = loader.rows
        while progress.step < last:
            parallel.train(model, optimizer, 1)
            schedule.step()
            progress.step += 1
            loader.rows += 7
            manager.save(progress.step, last_step=False)
            # Training goes on once the state has been copied.
            manager.maybe_wait_for_staging()
        manager.maybe_wait_for_saving()
        manager.close()
    assert texts == []
    weights = [each.to_local().tolist() for each in model.parameters()]
    moments = [each["exp_avg"].to_local().tolist() for each in optimizer.state.values()]
    return found, rows, (weights, moments, schedule.get_last_lr())


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_save_restart_resume_and_keep_the_latest(forge, tmp_path, mode):
    with forge.group(2) as group:
        straight = group.run(train, tmp_path / "straight", "disabled", 7, ours=False, timeout=240)
    with forge.group(2) as group:
        assert [result[:2] for result in group.run(train, tmp_path, mode, 4, timeout=240)] == [(0, 0)] * 2
    run = tmp_path / "run"
    assert fastckpt.load(run / "step-4")["train_state"]["step"] == 4
    with forge.group(2) as group:
        resumed = group.run(train, tmp_path, mode, 7, timeout=240)
    assert [result[:2] for result in resumed] == [(4, 28)] * 2
    assert [result[2] for result in resumed] == [result[2] for result in straight]
    kept = sorted(int(found[1]) for each in run.iterdir() if (found := re.fullmatch(r"step-(\d+)", each.name)))
    # One more where the last save was on its way when the manager looked.
    assert kept in ([6, 7], [5, 6, 7])
    for step in kept:
        path = run / f"step-{step}"
        assert not list(path.glob("*.distcp"))
        assert {".metadata", "fastckpt.json"} <= {each.name for each in path.iterdir()}
        assert fastckpt.verify(path).ok
