"""A training loop on accelerate, as its examples have it, that a test may end at any point, and what it leaves."""

from __future__ import annotations

import builtins
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import runs
import torch
import trainers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed
from torch import nn

import fastckpt
from fastckpt.integrations import accelerate as door
from harness.rot import rot

STEPS, ROWS, BATCH = 40, 64, 4
SCHEDULES = {
    "functions": lambda optimizer, total: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 - at / total),
    "cosine": torch.optim.lr_scheduler.CosineAnnealingLR,
}


class Progress:
    """Where the program is, and what it has seen."""

    def __init__(self):
        self.batches, self.step, self.losses, self.rows = 0, 0, [], []

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


def train(
    folder,
    strike=None,
    *,
    last=STEPS,
    accumulation=1,
    schedule="functions",
    fsdp=False,
    installed=True,
    background=True,
    limit=2,
    stateful=False,
    registered=1,
):
    """Run the loop in a folder, from the newest checkpoint there.

    Args:
        folder: where it runs.
        strike: a step; this process is killed after it, and before its save.
        last: the step to end at.
        accumulation: batches of a step.
        schedule: which of :data:`SCHEDULES`.
        fsdp: whether the model is spread over the ranks.
        installed: whether the door is.
        background: of ``install``.
        limit: of checkpoints that are kept.
        stateful: whether the loader has a state; otherwise the program skips the batches that it took.
        registered: how many objects are.

    Returns:
        The step that it began with, what two equal runs have in common at their ends, and the checkpoints there.
    """
    folder = runs.begin(folder)
    if installed:
        door.install(background=background)
    if fsdp:
        trainers.spread_on_the_cpu()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulation,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=0, use_stateful_dataloader=stateful
        ),
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=limit),
    )
    set_seed(0)
    inputs = torch.randn(ROWS, 16)
    rows = torch.utils.data.TensorDataset(torch.arange(ROWS), inputs, inputs.sum(1, keepdim=True))
    # A generator of its own: a loader that goes on in the middle of an epoch would take one more number from torch's.
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, generator=torch.Generator())
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = SCHEDULES[schedule](optimizer, STEPS * accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    set_seed(1, device_specific=True)
    progress = Progress()
    accelerator.register_for_checkpointing(progress, *(Progress() for _ in range(registered - 1)))
    if any((folder / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
    began = progress.step

    def batches():
        epoch, skip = divmod(progress.batches, len(loader))
        while True:
            loader.set_epoch(epoch)
            yield from accelerator.skip_first_batches(loader, skip) if skip and not stateful else loader
            epoch, skip = epoch + 1, 0

    taken = batches()
    while progress.step < last:
        seen, x, y = next(taken)
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        progress.batches += 1
        progress.rows += accelerator.gather(seen).tolist()
        if not accelerator.sync_gradients:
            continue
        progress.step += 1
        progress.losses.append(accelerator.gather(loss.detach()).mean().item())
        if progress.step == strike:
            fastckpt.background.drain()  # there shall be something to go on from
            os.kill(os.getpid(), signal.SIGKILL)
        if progress.step % 5 == 0:
            accelerator.save_state()
    rate = scheduler.get_last_lr()
    weights, spread = runs.digest(accelerator.unwrap_model(model))
    accelerator.end_training()
    found = {"weights": weights, "spread": spread, "losses": progress.losses, "rows": progress.rows, "rate": rate}
    return began, found, sorted(path.name for path in (folder / "checkpoints").iterdir())


class Values:
    """A registered object with any state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def made(folder, *registered):
    """An accelerator with automatic names, and what it has prepared."""
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    )
    model = accelerator.unwrap_model(accelerator.prepare(nn.Linear(4, 3)))
    accelerator.register_for_checkpointing(*registered)
    return accelerator, model


def own_values(folder):
    """Save and load a registered object that differs by process. Returns what each process gets."""
    door.install()
    accelerator, _ = made(folder, values := Values(None))
    rank = accelerator.process_index
    os.chdir(Path(folder, f"scratch-{rank}"))
    values.state = {"seen": {f"row-{rank}": rank}, "losses": [0.5] * (rank + 1), "mean": torch.ones(rank + 2)}
    accelerator.save_state()
    values.state = None
    accelerator.load_state()
    return {**values.state, "mean": values.state["mean"].tolist()}


def alone(folder, kind, raised):
    """Load where the second process alone cannot read its part of the newer of two checkpoints."""
    door.install(background=False)
    accelerator, _ = made(folder, values := Values(None))
    for number in range(2):
        values.state = {"number": number}
        accelerator.save_state()
    real = door.distributed.load_per_rank

    def load_per_rank(path):
        if path.endswith("_1") and accelerator.process_index == 1:
            raise getattr(builtins, kind, getattr(fastckpt, kind, None))(raised)
        return real(path)

    door.distributed.load_per_rank = load_per_rank
    try:
        accelerator.load_state()
    except (RuntimeError, fastckpt.CheckpointError) as error:
        return type(error).__name__, str(error)
    return values.state


def damaged(folder):
    """Load where each checkpoint is damaged. Returns the error."""
    with door.install(background=False):
        accelerator, _ = made(folder)
        for number in range(2):
            accelerator.save_state()
            path = Path(folder, "checkpoints", f"checkpoint_{number}", "model.safetensors")
            rot(path, path.stat().st_size - 1)
        try:
            accelerator.load_state()
        except fastckpt.CorruptCheckpointError as error:
            return str(error)


def loaded_otherwise(folder):
    """Load with a hook, into another dtype, and with parameters that the checkpoint lacks. Returns what came of it."""
    path, seen = str(Path(folder, "c")), []
    with door.install(background=False):
        accelerator, model = made(folder)
        accelerator.project_configuration.automatic_checkpoint_naming = False
        accelerator.save_state(path)
        weight = model.weight.detach().clone()
        model.to(torch.float64)
        nn.init.zeros_(model.weight)
        hook = accelerator.register_load_state_pre_hook(lambda models, where: seen.append((len(models), where)))
        accelerator.load_state(path)
        seen.append(torch.equal(model.weight, weight.double()))
        hook.remove()
        accelerator.register_load_state_pre_hook(lambda models, _: models.clear())
        nn.init.zeros_(model.weight)
        accelerator.load_state(path)
        seen.append(model.weight.any().item())
        accelerator._load_model_state_pre_hook.clear()
        model.extra = nn.Parameter(torch.ones(2))
        for strict in (True, False):
            try:
                accelerator.load_state(path, strict=strict)
                seen.append(torch.equal(model.weight, weight.double()))
            except fastckpt.StructureMismatchError:  # noqa: PERF203
                seen.append("differs")
    return path, seen


def at_the_end(folder):
    """End training after a save in the background that fails. Returns what was raised, and whether trackers ended."""
    with door.install():
        accelerator, _ = made(folder)
        ended = []
        accelerator.trackers = [SimpleNamespace(finish=lambda: ended.append(True))]
        accelerator.save_state()
        door.finish(accelerator)
        door.begin(accelerator, Failing(), None)
        try:
            accelerator.end_training()
        except OSError as error:
            return str(error), ended


class Failing:
    """A save in the background that fails."""

    def result(self):
        raise OSError("the disk is gone")


def refused(folder, *, background=False):
    """Save into directories that are in use: a named one, and one whose number is next. Returns the errors."""
    folder = Path(folder)
    door.install(background=background)
    naming = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    named, numbered = Accelerator(cpu=True), Accelerator(cpu=True, project_config=naming)
    errors = []
    for accelerator, name in ((named, "used"), (numbered, "checkpoints/checkpoint_0")):
        accelerator.prepare(nn.Linear(2, 2))
        (folder / name / "logs").mkdir(parents=True)
        (folder / name / "logs" / "events").write_text("mine")
        try:
            accelerator.save_state(str(folder / name))
        except (OSError, ValueError) as error:
            errors.append(str(error))
    named.save_state(str(folder / "free"))
    named.end_training()
    return errors
