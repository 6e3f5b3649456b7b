"""A plain training loop. Started again, it resumes where it stopped: plain_loop.py [STEPS]."""

import sys

import torch
from torch import nn

import fastckpt

model = nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer, "random": fastckpt.randomness()}

with fastckpt.Manager("runs/plain", keep=2, save_when=10) as manager:
    manager.restore(into=state)
    for step in manager.remaining(int(sys.argv[1]) if len(sys.argv) > 1 else 40):
        x = torch.randn(8, 16)
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if manager.should_save(step):
            manager.save(step, state)
print("ended at step", manager.latest())
