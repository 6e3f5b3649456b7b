"""A loop on accelerate that saves through fastckpt. Started again, it resumes: accelerate_loop.py [STEPS]."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

import fastckpt

fastckpt.integrations.accelerate.install()  # the line to add

naming = ProjectConfiguration("runs/accelerate", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(project_config=naming, cpu=not torch.cuda.is_available())
model = nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
if any(Path("runs/accelerate/checkpoints").glob("checkpoint_[0-9]*")):
    accelerator.load_state()
    print("resumes after step", accelerator.step)

for step in range(accelerator.step + 1, int(sys.argv[1] if len(sys.argv) > 1 else 40) + 1):
    x = torch.randn(8, 16, device=accelerator.device)
    with accelerator.accumulate(model):  # counts the steps
        accelerator.backward(nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)))
        optimizer.step()
        optimizer.zero_grad()
    if step % 10 == 0:
        accelerator.save_state()
accelerator.end_training()
print("ended at step", accelerator.step)
