"""A program that saves atomic, durable and verified files with torch.save: torch_files.py [STEPS]."""

import sys
from pathlib import Path

import torch
from torch import nn

import fastckpt

fastckpt.integrations.torch.install()  # the line to add

model = nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
path, done = Path("runs/torch/state.pt"), 0
path.parent.mkdir(parents=True, exist_ok=True)
if path.exists():
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["step"]

for step in range(done + 1, int(sys.argv[1] if len(sys.argv) > 1 else 40) + 1):
    x = torch.randn(8, 16)
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        done = step
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
print("ended at step", done)
