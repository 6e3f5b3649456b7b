"""A program that saves atomic, durable and verified files to fsspec's URLs: fsspec_files.py [STEPS]."""

import sys

import torch
from torch import nn

from fastckpt.integrations.fsspec import FileSystem

files = FileSystem()  # the line to change; or fsspec.filesystem("fastckpt")

model = nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
path, done = "runs/fsspec/state.pt", 0
if files.exists(path):
    with files.open(path) as file:
        saved = torch.load(file)
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
        with files.open(path, "wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
print("ended at step", done)
