"""A training loop like torchtitan's trainer, with one of torchtitan's checkpoint managers or with fastckpt's."""

from __future__ import annotations

import os
import pickle
import signal
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fastckpt
from fastckpt.distributed import Ranks
from harness import groups, logged, parallel

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

needed = pytest.mark.skipif(find_spec("torchtitan") is None, reason="NOT TESTED HERE: needs torchtitan (scripts/setup)")


def forge() -> AbstractContextManager[groups.Forge]:
    """Makes groups of processes that have imported the checkpoint managers, to save a tenth of a second per rank."""
    managers = "torchtitan.components.checkpointer,fastckpt.integrations.torchtitan"
    modules = f"harness.member,harness.titan,{managers}"
    return groups.forge(env={"FASTCKPT_TEST_IMPORT": modules, "PYTHONWARNINGS": "ignore"})


class Optimizers:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state):
        set_optimizer_state_dict(self.model, self.optimizer, state)


class Loader:
    """A data loader like torchtitan's: each rank has its own key, with a pickle in bytes, or all share that of rank 0.

    Ranks that share a key are stages of a pipeline, and each of them has its own seed.
    """

    def __init__(self, *, is_shared=False):
        self.rows, self.is_shared = 0, is_shared

    def state_dict(self):
        rank = dist.get_rank()
        values = {"rows": self.rows, "seed": rank}
        return {f"dp_rank_{0 if self.is_shared else rank}": pickle.dumps(values), "world_size": self.loaders()}

    def load_state_dict(self, state):
        assert self.loaders() == state["world_size"], "torchtitan's loader continues only with as many loaders"
        self.rows = pickle.loads(state[f"dp_rank_{0 if self.is_shared else dist.get_rank()}"])["rows"]

    def loaders(self):
        return 1 if self.is_shared else dist.get_world_size()


class TrainState:
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


def turned(name, value):
    """Swap rows and columns of the layers that Hugging Face stores transposed."""
    return value.t().contiguous() if "down" in name else value


class Adapter:
    """Hugging Face's names and layout for the model of :mod:`harness.parallel`, with tied weights only once.

    Args:
        kind: ``"whole"``, or a fault of some of torchtitan's adapters: it ``"drops"`` a name, or it
            ``"fails"`` on the last rank.
    """

    fqn_to_index_mapping = hf_assets_path = None

    def __init__(self, kind):
        self.kind = kind

    def to_hf(self, state):
        if self.kind == "fails" and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("Cannot unflatten unevenly sharded tensor")
        left_out = {"head.weight", *(["gain"] if self.kind == "drops" else [])}
        return {f"hf.{name}": turned(name, value) for name, value in state.items() if name not in left_out}

    def from_hf(self, state):
        found = {name.removeprefix("hf."): turned(name, value) for name, value in state.items()}
        return {**found, "head.weight": found["embed.weight"]}

    def get_hf_storage_reader(self, path, _):
        return HuggingFaceStorageReader(path)


def manager_of(kind, model, optimizer, schedule, *, folder, loader, progress, adapter=None, **config):
    """A manager: torchtitan's own, torchtitan's with fastckpt ``installed``, or fastckpt's."""
    if kind == "ours":
        from fastckpt.integrations.torchtitan import FastckptManager as Manager
    else:
        from torchtitan.components.checkpointer import CheckpointManager as Manager
    if kind == "installed":
        fastckpt.dcp.install(ranks=Ranks(timeout=60))
    manager = Manager.Config(
        **{"enable": True, "folder": "run", "interval": 1, "last_save_model_only": False, **config}
    ).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=Optimizers(model, optimizer),
        lr_schedulers=schedule,
        states={"train_state": progress},
        sd_adapter=adapter,
        base_folder=str(folder),
    )
    if kind != "ours" and config.get("async_mode") == "async_with_pinned_mem":
        # The manager's own stager needs a GPU for pinned memory; this one differs only in that.
        manager.stager = DefaultStager(StagingOptions(False, True, True, False))
    return manager


def train(
    folder,
    last,
    kind="installed",
    *,
    ends=False,
    seeds=False,
    dies=None,
    fails=None,
    load=-1,
    adapter=None,
    told=(),
    change=None,
    **config,
):
    """Train to step ``last``.

    Args:
        folder: the directory of the run.
        last: the last step.
        kind: the kind of manager.
        ends: whether ``last`` is the last step of the run.
        seeds: whether the manager saves a seed checkpoint at step 0.
        dies: the step after which, and before whose save, this process is killed.
        load: the step to load.
        fails: the step after which the last rank fails, and ends like torchtitan's program.
        adapter: the kind of the manager's :class:`Adapter`.
        change: another dtype of the model.
        told: parts of the only warnings in the log.
        **config: fields of its ``Config``.

    Returns:
        The first step and row, and weights, moments and learning rate of this rank at the end.
    """
    parallel.reference()  # draws random numbers on its first call in a process
    torch.manual_seed(0)
    model, optimizer = parallel.build("fsdp", trained=False)
    if change is not None:
        model.to(change)
    progress, loader = TrainState(), Loader()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    manager = manager_of(
        kind,
        model,
        optimizer,
        schedule,
        folder=folder,
        loader=loader,
        progress=progress,
        adapter=adapter and Adapter(adapter),
        **config,
    )
    with logged.warnings() as texts:
        if seeds:
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, 0.25)
            manager.save(0, last_step=True)
        else:
            manager.load(load)
        found = progress.step, loader.rows
        while progress.step < last:
            parallel.train(model, optimizer, 1)
            schedule.step()
            progress.step += 1
            loader.rows += 7
            if progress.step == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if progress.step == fails and dist.get_rank() == dist.get_world_size() - 1:
                end_badly(manager)
            manager.save(progress.step, last_step=ends and progress.step == last)
            # Training goes on once the state has been copied.
            manager.maybe_wait_for_staging()
        manager.maybe_wait_for_saving()
        manager.close()
    others = [text for text in texts if not any(part in text for part in told)]
    assert not others, others
    return *found, end_of(model, optimizer, schedule)


def end_badly(manager):
    """End like torchtitan's program after a failure of its trainer."""
    try:
        torch.empty(-1)
    except RuntimeError:
        manager.close()
        raise


def end_of(model, optimizer, schedule):
    """Weights and moments of this rank, as numbers, and the learning rate."""

    def local(value):
        return (value.to_local() if hasattr(value, "to_local") else value).tolist()

    weights = [local(each) for each in model.parameters()]
    moments = [local(each["exp_avg"]) for each in optimizer.state.values()]
    return weights, moments, schedule.get_last_lr()


def pipeline(folder):
    """Save two stages that read the same rows, and load them into others; return (equal, (rows, step))."""
    ends = []
    for trained in (True, False):
        model, optimizer = parallel.build("pipeline", trained=trained)
        progress, loader = TrainState(), Loader(is_shared=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        manager = manager_of("ours", model, optimizer, schedule, folder=folder, loader=loader, progress=progress)
        if trained:
            loader.rows = progress.step = 3
            manager.save(3)
        else:
            manager.load()
        manager.maybe_wait_for_saving()
        manager.close()
        ends.append((loader.rows, progress.step, end_of(model, optimizer, schedule)))
    return ends[0] == ends[1], ends[1][:2]


def llama(folder):
    """Save a Llama of torchtitan with its own adapter, and load it into another; return whether both are equal."""
    from torch.distributed.fsdp import fully_shard
    from torchtitan.models.llama3 import Llama3StateDictAdapter, llama3_configs

    config = llama3_configs["debugmodel"]("flex")
    found = []
    for seed in (1, 2):
        model = config.build()
        torch.manual_seed(seed)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        for layer in model.layers.values():
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        manager = manager_of(
            "ours",
            *(model, optimizer, schedule),
            folder=folder,
            loader=Loader(),
            progress=TrainState(),
            adapter=Llama3StateDictAdapter(config, None),
        )
        if seed == 1:
            manager.save(1)
        else:
            manager.load()
        manager.maybe_wait_for_saving()
        manager.close()
        found.append([parameter.to_local().clone() for parameter in model.parameters()])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))
