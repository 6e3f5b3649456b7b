"""Weights in one safetensors file, atomic, durable and verified: safetensors_file.py [STEPS]."""

import sys
from pathlib import Path

import torch
from torch import nn

from fastckpt.integrations.safetensors import safe_open, save_file  # the line to change

model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
path, done = Path("runs/safetensors/model.safetensors"), 0
if path.exists():
    with safe_open(path, framework="pt") as file:
        model.load_state_dict(file.get_tensors())
        done = int(file.metadata()["step"])

for step in range(done + 1, int(sys.argv[1] if len(sys.argv) > 1 else 40) + 1):
    x = torch.randn(8, 16)
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        done = step
        save_file(model.state_dict(), path, metadata={"step": str(step)})
print("ended at step", done)
