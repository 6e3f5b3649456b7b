"""Lightning's Trainer, which saves through fastckpt. Started again, it resumes: lightning_trainer.py [STEPS]."""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from fastckpt.integrations.lightning import CheckpointIO, RandomStates


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


trainer = lightning.Trainer(
    max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 40,
    plugins=[CheckpointIO()],  # the line to add
    callbacks=[RandomStates(), ModelCheckpoint("runs/lightning", every_n_train_steps=10, save_last=True)],
    logger=False,
)
loader = StatefulDataLoader(torch.randn(120, 16), batch_size=8, shuffle=True)
trainer.fit(Regression(), loader, ckpt_path="last" if any(Path("runs/lightning").glob("last*.ckpt")) else None)
print("ended at step", trainer.global_step)
