"""A program that saves with torch.distributed.checkpoint, on any number of ranks: distributed_checkpoint.py [STEPS]."""

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fastckpt

fastckpt.dcp.install()  # the line to add

model = nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
path, done = Path("runs/dcp/last"), 0


def state(step: int) -> dict:
    """The state to save or to fill."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


if path.exists():
    saved = state(0)
    dcp.load(saved, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    done = saved["step"]

for step in range(done + 1, int(sys.argv[1] if len(sys.argv) > 1 else 40) + 1):
    x = torch.randn(8, 16)
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        done = step
        dcp.save(state(step), checkpoint_id=path)
print("ended at step", done)
