"""A training loop on accelerate, written like its examples, that a test may end at any point, and its results."""

from __future__ import annotations

import builtins
import inspect
import os
import signal
import warnings
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

STEPS, ROWS, BATCH, EVALUATED = 40, 64, 4, 12
#: The points of a step at which a run may get a signal, in order: before the evaluation, the save, and the end.
POINTS = ("step", "evaluated", "ended")
SCHEDULES = {
    "functions": lambda optimizer, total: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 - at / total),
    "cosine": torch.optim.lr_scheduler.CosineAnnealingLR,
}


class Progress:
    """The program's step, the rows that it saw, its log, and its best model with the metric."""

    def __init__(self):
        self.step, self.losses, self.rows, self.log, self.best = 0, [], [], [], [float("inf")]

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
    lora=False,
    split=False,
    installed=True,
    background=True,
    limit=2,
    stateful=False,
    workers=0,
    registered=1,
):
    """Run the loop in a folder, from the newest checkpoint there. SIGTERM makes it save at the step's end, and end.

    Args:
        folder: the folder in which the loop runs.
        strike: a signal, and the step and the one of :data:`POINTS` at which this process gets it.
        last: the step after which the loop ends.
        accumulation: the number of batches of a step.
        schedule: one of :data:`SCHEDULES`.
        fsdp: whether the model is spread over the ranks.
        lora: whether an adapter is trained.
        split: whether the ranks share each batch; otherwise, each rank has its own batches.
        installed: whether the integration is installed.
        background: this argument of ``install``.
        limit: the number of checkpoints that are kept.
        stateful: whether the loader has a state; otherwise, the program skips the rows that it has taken.
        workers: the number of worker processes of the loader.
        registered: the number of registered objects.

    Returns:
        The first step, the results that two equal runs share at their ends, and the names of the checkpoints.
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
            use_seedable_sampler=True, data_seed=0, use_stateful_dataloader=stateful, split_batches=split
        ),
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=limit),
    )
    set_seed(0)
    inputs = torch.randn(ROWS, 16)
    rows = torch.utils.data.TensorDataset(torch.arange(ROWS), inputs, inputs.sum(1, keepdim=True))
    # The loader has its own generator: resumed within an epoch, it would take one more number from torch's generator.
    loader = torch.utils.data.DataLoader(rows, BATCH, shuffle=True, generator=torch.Generator(), num_workers=workers)
    evaluated = torch.utils.data.DataLoader(torch.utils.data.Subset(rows, range(EVALUATED)), BATCH)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    model = runs.adapted(model, "0", "3") if lora else model
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    scheduler = SCHEDULES[schedule](optimizer, STEPS if split else STEPS * accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    evaluated = accelerator.prepare(evaluated)
    set_seed(1, device_specific=True)
    progress, stopped = Progress(), []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    accelerator.register_for_checkpointing(progress, *(Progress() for _ in range(registered - 1)))
    if any((folder / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
    began = progress.step

    def batches():
        epoch, taken = divmod(len(progress.rows), ROWS)
        skip = taken // loader.total_batch_size
        while True:
            loader.set_epoch(epoch)
            yield from accelerator.skip_first_batches(loader, skip) if skip and not stateful else loader
            epoch, skip = epoch + 1, 0

    def reach(point):
        if strike and [*strike[1:]] == [progress.step, point]:
            runs.strike(strike[0])

    def evaluate():
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics((model(x) - y).square()).mean().item() for _, x, y in evaluated]
        model.train()
        progress.log.append([progress.step, scheduler.get_last_lr()[0], progress.losses[-1], *losses])
        if sum(losses) < progress.best[0]:
            progress.best = [sum(losses), progress.step, runs.digest(accelerator.unwrap_model(model))[0]]

    taken = batches()
    while progress.step < last and not stopped:
        seen, x, y = next(taken)
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        progress.rows += accelerator.gather(seen).tolist()
        if not accelerator.sync_gradients:
            continue
        progress.step += 1
        progress.losses.append(accelerator.gather(loss.detach()).mean().item())
        reach("step")
        if progress.step % 5 == 0:
            evaluate()
        reach("evaluated")
        if progress.step % 5 == 0 or stopped:
            accelerator.save_state()
    reach("ended")
    weights, spread = runs.digest(accelerator.unwrap_model(model))
    accelerator.end_training()
    found = {"weights": weights, "spread": spread, "schedule": scheduler.state_dict()["last_epoch"], **vars(progress)}
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
    """Return an accelerator with automatic names, and a model that it has prepared."""
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    )
    model = accelerator.unwrap_model(accelerator.prepare(nn.Linear(4, 3)))
    accelerator.register_for_checkpointing(*registered)
    return accelerator, model


class Uneven(torch.utils.data.Sampler):
    """Batches of several sizes."""

    def __iter__(self):
        return iter([[0, 1], [2], [3, 4, 5]])

    def __len__(self):
        return 3


def saved_again(folder):
    """Load the positions of some loaders, one of which has ended, and save and load them again before the next batch.

    Returns the batches after that, with a random number, and the batches of a run in which nothing was loaded.
    """
    door.install(background=False)
    warnings.simplefilter("ignore")  # torchdata's calls
    found = []
    for number in range(3):
        accelerator = Accelerator(
            cpu=True,
            project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True),
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        )
        loaders = [
            torch.utils.data.DataLoader(range(6), generator=torch.Generator()),
            torch.utils.data.DataLoader([*range(2)]),
            torch.utils.data.DataLoader(range(6), batch_sampler=Uneven()),  # its position is also saved
        ]
        loaders = [accelerator.prepare(one) for one in loaders]
        if number == 0:
            taken = iter(loaders[0])
            for _ in range(3):
                next(taken)
            list(loaders[1])
            accelerator.save_state()
        else:
            accelerator.load_state()
            accelerator.save_state()
            taken = iter(loaders[0])
        if number != 1:
            left = [int(one) for one in taken]
            found.append([left, [int(one) for one in loaders[1]], torch.rand(1).item()])
    return found[::-1]


def own_values(folder):
    """Save and load a registered object that differs by process. Returns what each process loads."""
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
    """Load while only the second process cannot read its part of the newer of two checkpoints."""
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
    """Load from a run whose checkpoints are all damaged. Returns the error."""
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
    """Load with a hook, into another dtype, and into parameters that the checkpoint lacks. Returns the results."""
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
    """End training after a save in the background that fails. Returns the error, and whether the trackers ended."""
    with door.install():
        accelerator, _ = made(folder)
        ended = []
        accelerator.trackers = [SimpleNamespace(finish=lambda: ended.append(True))]
        accelerator.save_state()
        door.finish(accelerator)
        inspect.getmodule(door.finish).begin(accelerator, Failing(), None)
        try:
            accelerator.end_training()
        except OSError as error:
            return str(error), ended


class Failing:
    """A save in the background that fails."""

    def result(self):
        raise OSError("the disk is gone")


def refused(folder, *, background=False):
    """Save into directories that are in use: a named one, and the one with the next number. Returns the errors."""
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
