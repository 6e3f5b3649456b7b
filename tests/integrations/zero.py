"""A training on DeepSpeed that a test may end and resume at any step, and its state."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from unittest import mock

import deepspeed
import runs
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

import fastckpt
from fastckpt import distributed
from fastckpt.integrations import deepspeed as door
from harness import pages

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 10**9,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}},
}
DTYPES = {
    "bf16": {"bf16": {"enabled": True}},
    "fp32": {},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2}},
    "fp32 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}


class Model(nn.Module):
    """A model with tied weights, a parameter of one element, one without gradients, a frozen layer and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 13)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.norm = nn.LayerNorm(13)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(7, 11, bias=False)
        self.down = nn.Linear(13, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, rows):
        self.seen += 1
        return self.head(self.down(self.gain * self.norm(self.frozen(torch.relu(self.up(self.embed(rows)))))))


class Hiding(Model):
    """A model that leaves a trained layer out of its state."""

    def state_dict(self, *given, **how):
        found = super().state_dict(*given, **how)
        return {name: one for name, one in found.items() if not name.startswith("up.")}


def quiet():
    """Have DeepSpeed compile nothing and log little, and accept fp16, which torch computes on any processor."""
    os.environ.update(LOCAL_SIZE=os.environ["WORLD_SIZE"])
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = {}


def script(*arguments):
    """Run a program, as :func:`runs.script` does."""
    quiet()
    return runs.script(*arguments)


def begin(stage, dtype="bf16", *, model=Model, seed=0, **zero):
    """Return an engine with two groups of parameters."""
    quiet()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(seed)
    made = model()
    kinds = ([one for one in made.parameters() if (one.dim() > 1) == big] for big in (True, False))
    groups = [{"params": own, "weight_decay": decay} for own, decay in zip(kinds, (0.1, 0.0), strict=True)]
    config = {**CONFIG, **DTYPES[dtype], "zero_optimization": {"stage": stage, **zero}}
    if stage == 3:
        # With these values, some parameters stay whole, and a group has several pieces.
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 10, "sub_group_size": 60}
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return deepspeed.initialize(model=made, optimizer=optimizer, config=config)[0]


def train(engine, last):
    """Train to a step; return the losses."""
    losses = []
    while engine.global_steps < last:
        drawn = torch.Generator().manual_seed(100 * dist.get_rank() + engine.global_steps)
        rows = torch.randint(11, (4,), generator=drawn)
        loss = nn.functional.cross_entropy(engine(rows).float(), rows)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def state(engine):
    """Return everything that a load must restore, read as a whole by DeepSpeed's functions, not the integration's."""
    found, optimizer = {}, engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed links states in a step of the first group, before other groups have a state.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    keys = sorted({key for one in optimizer.optimizer.state.values() for key in one} - {"step"})
    for name, value in engine.module.named_parameters():
        with GatheredParameters([value] if hasattr(value, "ds_id") else []):
            found[name] = value.detach().clone()
        if value.requires_grad:
            found[f"{name}: fp32"] = safe_get_full_fp32_param(value).clone()
            for key in keys:
                found[f"{name}: {key}"] = safe_get_full_optimizer_state(value, key).clone()
    found = {name: value.flatten().view(torch.uint8).tolist() for name, value in found.items()}
    steps = {float(one["step"]) for one in optimizer.optimizer.state.values() if "step" in one}
    scale = getattr(optimizer, "loss_scaler", None)
    return found | {
        "seen": int(engine.module.seen),
        "steps": steps,
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "rates": engine.get_lr(),
        "schedule": engine.lr_scheduler.state_dict(),
        "decay": [group["weight_decay"] for group in optimizer.param_groups],
        "scale": dict(vars(scale)) if scale else None,
    }


def play(folder, stage, dtype="bf16", *, first=0, last=6, save=None, tag=None, **more):
    """Train from a loaded step, or from the beginning.

    Args:
        folder: the folder of the checkpoints.
        stage: the stage of ZeRO.
        dtype: one of :data:`DTYPES`.
        first: the step to load.
        last: the last step to train.
        save: the step to save.
        tag: the tag of the checkpoint.
        **more: options of the engine.

    Returns:
        The client state that was loaded; the state at the load or save, the losses since then, and the last state.
    """
    with door.install():
        engine = begin(stage, dtype, seed=first, **more)
        back = None
        if first:
            path, back = engine.load_checkpoint(folder, tag)
            assert Path(path).parent == Path(folder)
        else:
            train(engine, save)
            assert engine.save_checkpoint(folder, tag, client_state={"rank": dist.get_rank()})
        middle = state(engine)
        losses = train(engine, last)
        end = state(engine)
        engine.destroy()
    return back, middle, losses, end


def guide(folder):
    """Run the programs of docs/guides/deepspeed.md in a folder; return the keys that they load."""
    os.chdir(folder)
    quiet()
    begins, saves, loads = pages.python("docs/guides/deepspeed.md")
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {**CONFIG, **DTYPES["bf16"], "zero_optimization": {"stage": 1}}
    names = {"deepspeed": deepspeed, "model": model, "optimizer": optimizer, "config": config, "epoch": 1, "step": 1000}
    exec(begins, names)
    assert names["client_state"] is None
    train(names["engine"], 1)
    names["engine"].global_steps = 1000
    names["client_state"] = {"random": fastckpt.randomness().state_dict()}
    exec(saves, names)
    exec(loads, names)
    return sorted(names["engine"].load_checkpoint("runs")[1])


def message(call, *args, **more):
    """Return the kind and the text of the exception of a call."""
    try:
        call(*args, **more)
    except Exception as error:  # noqa: BLE001 - the test judges it
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


#: The changes that make an engine unsupported, by the text of the error.
OTHERS = {
    "pipelines": ("pipeline_parallelism", True),
    "mixtures of experts": ("has_moe_layers", True),
    "tensor parallelism": ("seq_dp_world_size", 7),
    "states on NVMe": ("zero_nvme_offload_optimizer", lambda: True),
    "quantised weights": ("zero_quantized_weights", lambda: True),
    "hierarchical partitions": ("zero_hpz_partition_size", lambda: 2),
    "curricula and random layers": ("random_ltd_enabled", lambda: True),
    "ZenFlow": ("optimizer.zenflow", True),
    "Muon": ("optimizer.optimizer", type("MuonWithAuxAdam", (), {})()),
    "deepspeed.linear": ("module.gain.ds_optim_param", True),
}


@contextmanager
def changed(engine, path, value):
    """Replace an attribute of an engine inside the ``with`` statement."""
    *owners, name = path.split(".")
    owner = reduce(getattr, owners, engine)
    known, before = hasattr(owner, name), getattr(owner, name, None)
    setattr(owner, name, value)
    yield
    if known:
        setattr(owner, name, before)
    else:
        delattr(owner, name)


@contextmanager
def gives(model, **other):
    """Inside the ``with`` statement, replace values of the model's state by values made from them."""
    hook = model.register_state_dict_post_hook(
        lambda _, state, *__: state.update({name: make(state.get(name)) for name, make in other.items()})
    )
    yield
    hook.remove()


@dataclass
class Note:
    """A value of a class that no program declares."""

    text: str


def refused(folder):
    """Return the errors about unsupported engines, and about tensors that cannot be split by elements."""
    said = {}
    with door.install():
        engine = begin(2)
        train(engine, 1)
        engine.save_checkpoint(folder, "known")
        for what, (name, value) in OTHERS.items():
            with changed(engine, name, value):
                said[what] = [
                    message(engine.save_checkpoint, folder, "x"),
                    message(engine.load_checkpoint, folder, "known"),
                ]
        for what, other in {"copies": {"gain": torch.clone}, "others": {"note": str}}.items():
            with gives(engine.module, **other):
                said[what] = [
                    message(engine.save_checkpoint, folder, "x"),
                    message(engine.load_checkpoint, folder, "known"),
                ]
        said["save_dir"] = [message(engine.save_checkpoint, "")]
        engine.optimizer.offloaded_states.add("anything")
        said["offloaded"] = [message(engine.save_checkpoint, folder, "x")]
        engine.optimizer.offloaded_states.clear()
        said["custom_load_fn"] = [message(engine.load_checkpoint, folder, "known", custom_load_fn=print)]
        said["client_state"] = [message(engine.save_checkpoint, folder, "x", client_state={"it": object()})]
        for held in engine.optimizer.optimizer.state.values():
            held["exp_avg"] = held["exp_avg"].double()
        said["other dtypes"] = [message(engine.save_checkpoint, folder, "x")]
        for held in engine.optimizer.optimizer.state.values():
            held["exp_avg"] = torch.zeros(256)
        said["other sizes"] = [message(engine.save_checkpoint, folder, "x")]
        engine = begin(0, "fp32")
        said["none of ZeRO"] = [message(engine.save_checkpoint, folder, "x")]
    return said


def disturbed(folder, stage):
    """Run a training in which only one process fails to save or to load; return the errors."""
    calm = train(begin(stage), 4)

    def fail(*_, **__):
        raise OSError("of one process alone")

    with door.install():
        engine, first = begin(stage), dist.get_rank() == 0
        losses = train(engine, 1)
        with changed(engine, "lr_scheduler.state_dict", fail if first else None):
            said = [message(engine.save_checkpoint, folder, "x")]
        losses += train(engine, 2)
        whole = [one.shape for one in engine.module.parameters()]
        with gives(engine.module, **({} if first else {"gain": torch.clone})):
            said.append(message(engine.save_checkpoint, folder, "x"))
        assert [one.shape for one in engine.module.parameters()] == whole
        with gives(engine.module, gain=torch.detach if stage < 3 else lambda value: value):
            engine.save_checkpoint(folder, client_state={"note": Note("of step 2")})
        losses += train(engine, 3)
        before = state(engine)
        with mock.patch.object(distributed, "load_per_rank", distributed.load_per_rank if first else fail):
            said.append(message(engine.load_checkpoint, folder))
        assert state(engine) == before
        losses += train(engine, 4)
        assert losses == calm
        assert engine.load_checkpoint(folder)[1] == {"note": {"text": "of step 2"}}
        assert engine.loaded_checkpoint_dp_world_size == dist.get_world_size()
        with torch.no_grad():
            engine.module.seen.add_(dist.get_rank())
            engine.save_checkpoint(folder, "first's")
            if stage < 3:
                engine.module.frozen.weight.add_(dist.get_rank())
                said.append(message(engine.save_checkpoint, folder, "x"))
    return said


class Thawed(Model):
    def __init__(self):
        super().__init__()
        self.frozen.requires_grad_(True)


def partly(folder, stage):
    """Load parts of a checkpoint."""
    with door.install():
        engine = begin(stage)
        engine.save_checkpoint(folder, "early")
        losses = train(engine, 2)
        other = begin(stage, seed=1)
        other.load_checkpoint(folder)
        assert not getattr(other.optimizer, "_hp_optimizer_states_linked", False)
        assert train(other, 2) == losses

        engine.optimizer.loss_scaler.cur_scale = 4.0
        whole = state(engine)
        engine.save_checkpoint(folder, "whole")
        engine.save_checkpoint(folder, "thin", save_latest=False, exclude_frozen_parameters=True)
        weights = [name for name in whole if ": exp" not in name and ("." in name or "gain" in name)]

        other = begin(stage, seed=1)
        before = state(other)
        other.load_checkpoint(folder, load_module_only=True)
        alone = state(other)
        assert {name: alone[name] for name in weights} == {name: whole[name] for name in weights}
        assert {name: alone[name] for name in ("steps", "counters", "rates")} == {
            name: before[name] for name in ("steps", "counters", "rates")
        }
        train(other, 3)  # the optimizer continues from its own state
        other.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
        found = state(other)
        assert found["counters"] == whole["counters"]
        assert found["schedule"] != whole["schedule"]
        assert found["scale"]["cur_scale"] == 1
        assert {name: found[name] for name in weights} == {name: whole[name] for name in weights}
        other.load_checkpoint(folder)
        assert state(other) == whole
        other.optimizer.loss_scaler = type("Other", (type(other.optimizer.loss_scaler),), {})(2)
        other.load_checkpoint(folder)
        assert other.optimizer.loss_scaler.cur_scale == 2

        other = begin(stage, seed=2)
        said = [message(other.load_checkpoint, folder, "thin")]
        own = state(other)["frozen.weight"]
        other.load_checkpoint(folder, "thin", load_module_strict=False)
        found = state(other)
        assert found.pop("frozen.weight") == own != whole["frozen.weight"]
        assert all(found[name] == whole[name] for name in found.keys() - {"frozen.bias"})

        other = begin(stage, seed=3, model=Thawed)
        said.append(message(other.load_checkpoint, folder))
        other.load_checkpoint(folder, load_module_only=True)
        found = state(other)
        assert found["frozen.weight"] == whole["frozen.weight"]
        with torch.no_grad():
            thawed = torch.tensor(found["frozen.weight"], dtype=torch.uint8).view(torch.bfloat16).float()
        assert found["frozen.weight: fp32"] == thawed.view(torch.uint8).tolist()
    return said


def theirs(folder):
    """Let DeepSpeed load its own checkpoint, which fastckpt does not replace; return the error of a save over it."""
    engine = begin(1)
    train(engine, 2)
    engine.save_checkpoint(folder)
    with door.install():
        other = begin(1, seed=1)
        assert other.load_checkpoint(folder)[0] is not None
        assert other.global_steps == 2
        assert other.load_checkpoint(f"{folder}/nothing") == (None, None)
        return message(other.save_checkpoint, folder)


def moved(folder, stage, tag):
    """Load the newest checkpoint, and save it again immediately."""
    with door.install():
        engine = begin(stage, seed=9)
        _, back = engine.load_checkpoint(folder)
        engine.save_checkpoint(folder, tag, client_state=back, save_latest=False)
    return state(engine)


def twice(folder):
    """Save at step 2 and at step 4."""
    with door.install():
        engine = begin(3)
        for step in (2, 4):
            train(engine, step)
            engine.save_checkpoint(folder)


def accelerated(folder, stage):
    """Use accelerate's save_state and load_state, which leave the engine to DeepSpeed; return the losses after each."""
    quiet()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    zero = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True}}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, **zero}
    with door.install():
        accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        torch.manual_seed(0)
        model = nn.Linear(7, 3)
        rows = torch.utils.data.DataLoader(torch.randn(32, 7), batch_size=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, rows = accelerator.prepare(model, optimizer, rows)

        def losses():
            found = []
            for row in rows:
                loss = model(row.bfloat16()).float().square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            return found

        losses()
        accelerator.save_state(folder)
        after = losses()
        accelerator.load_state(folder)
        return after, losses()
