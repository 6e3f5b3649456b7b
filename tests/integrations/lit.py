"""A training with Lightning's Trainer that a test may end at any point, and its results."""

from __future__ import annotations

import json
import os
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import runs
import torch
from torch import nn

from harness import pages

STEPS, EPOCH = 36, 8


def module():
    """A model with dropout that logs its loss; a part of the model may be an adapter."""
    import lightning

    class Regression(lightning.LightningModule):
        def __init__(self, width=16, lora=False):
            super().__init__()
            self.save_hyperparameters()
            net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 1))
            self.net = runs.adapted(net, "0", "3") if lora else net

        def training_step(self, batch, batch_idx):  # noqa: ARG002 - Lightning's interface
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch, batch_idx):  # noqa: ARG002 - Lightning's interface
            self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Regression


def train(
    folder,
    strike=None,
    *,
    last=STEPS,
    installed=True,
    background=True,
    save_last=True,
    second=False,
    epochs=False,
    evaluates=False,
    accumulation=1,
    lora=False,
):
    """Train in a folder, from the last checkpoint there.

    Args:
        folder: the folder in which it runs.
        strike: a signal, and the step and the callback hook in which this process gets it, before the step's save.
        last: the step after which it ends.
        installed: whether the integration is installed.
        background: this argument of ``CheckpointIO``.
        save_last: this argument of ``ModelCheckpoint``.
        second: whether a second ``ModelCheckpoint`` uses the same names.
        epochs: whether it saves at the ends of epochs, and the loader has no state.
        evaluates: whether it saves after evaluations, depending on their results, and when it is stopped.
        accumulation: the number of batches of a step.
        lora: whether an adapter is trained.

    Returns:
        The first step, the results that two equal runs share at their ends, and the names of the checkpoints.
    """
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    from fastckpt.integrations import lightning as door

    folder = runs.begin(folder)
    warnings.simplefilter("ignore")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    lightning.seed_everything(0)
    inputs = torch.randn(8 * EPOCH * ranks, 16)
    rows = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = StatefulDataLoader(rows, batch_size=8, sampler=StatefulDistributedSampler(rows, ranks, rank))
    # This loader has its own generator: a resumed run evaluates less often, and would take fewer of torch's numbers.
    evaluated = torch.utils.data.DataLoader(rows, batch_size=32, generator=torch.Generator()) if evaluates else None
    model = module()(width=32, lora=lora)
    lightning.seed_everything(1 + rank)
    found = {}

    class Watch(lightning.Callback):
        def on_train_start(self, trainer, _module):
            found["began"] = trainer.global_step

        def on_train_batch_end(self, trainer, _module, outputs, _batch, _batch_idx):
            self.note(trainer, "loss", outputs["loss"].item())
            self.reach(trainer, "on_train_batch_end")

        def on_validation_end(self, trainer, _module):
            self.note(trainer, "val_loss", trainer.callback_metrics["val_loss"].item())
            self.reach(trainer, "on_validation_end")

        def on_train_end(self, trainer, _module):
            self.reach(trainer, "on_train_end")

        def note(self, trainer, name, value):
            # The log of a killed run stays, so the test also compares steps that were taken twice.
            with (folder / f"noted-{rank}").open("a") as file:
                file.write(json.dumps([trainer.fit_loop.total_batch_idx, name, value]) + "\n")

        def reach(self, trainer, point):
            if strike and [*strike[1:]] == [trainer.global_step, point]:
                trainer.strategy.checkpoint_io.teardown()
                runs.strike(strike[0])

    when = {} if epochs or evaluates else {"every_n_train_steps": 5}
    name = "val_loss" if evaluates else "loss"
    checkpoints = ModelCheckpoint(
        folder / "checkpoints", "{step}", name, save_top_k=2, save_last=save_last, save_on_exception=evaluates, **when
    )
    more = [ModelCheckpoint(folder / "checkpoints", "{step}", **when)] if second else []
    if epochs:
        loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=last,
        accelerator="cpu",
        devices=ranks,
        accumulate_grad_batches=accumulation,
        callbacks=[Watch(), door.RandomStates(), checkpoints, *more],
        plugins=[door.CheckpointIO(background=background)] if installed else [],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **({"val_check_interval": 5 * accumulation, "check_val_every_n_epoch": None} if evaluates else {}),
    )
    there = any((folder / "checkpoints").glob("last*.ckpt"))
    trainer.fit(model, loader, evaluated, ckpt_path="last" if there else None)
    weights, _ = runs.digest(model)
    return (
        found.get("began"),
        {
            "weights": weights,
            "noted": sorted({*(folder / f"noted-{rank}").read_text().splitlines()}),
            "best": [Path(checkpoints.best_model_path).name, float(checkpoints.best_model_score)],
        },
        sorted(path.name for path in (folder / "checkpoints").iterdir()),
    )


def load(folder, name):
    """Load a checkpoint as users of Lightning do. Returns its width, and the digest of its weights."""
    from fastckpt.integrations import lightning as door

    with door.install():
        loaded = module().load_from_checkpoint(Path(folder, "checkpoints", name))
    return loaded.hparams.width, runs.digest(loaded)[0]


def migrated(folder):
    """Run the programs of docs/migrate/lightning.md one after the other; return the last step of each."""
    import lightning

    os.chdir(runs.begin(folder))
    warnings.simplefilter("ignore")
    rows = torch.utils.data.TensorDataset(torch.ones(64, 16), torch.ones(64, 1))
    names = {"module": module()(), "loader": torch.utils.data.DataLoader(rows, batch_size=4)}
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with mock.patch.object(lightning, "Trainer", partial(lightning.Trainer, **quiet)):
        ends = []
        for program in pages.python("docs/migrate/lightning.md"):
            exec(program, names)
            ends.append((names["trainer"].global_step, Path("runs/last.ckpt").is_dir()))
    return ends
