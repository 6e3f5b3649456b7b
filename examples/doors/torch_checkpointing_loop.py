"""torch_checkpointing's manager, with durable and verified files: torch_checkpointing_loop.py [STEPS]."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch_checkpointing import CheckpointManager

from fastckpt.integrations.torch_checkpointing import StorageConfig

model = nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = CheckpointManager.Config.with_sync_save()
config.storage_config = StorageConfig()  # the line to add
manager = config.build()
folder, done = Path("runs/torch_checkpointing").absolute(), 0
saved = sorted(folder.glob("step-*"))
if saved:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    state = manager.load(str(saved[-1]), state)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["step"]

for step in range(done + 1, int(sys.argv[1] if len(sys.argv) > 1 else 40) + 1):
    x = torch.randn(8, 16)
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        done = step
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        manager.save(str(folder / f"step-{step:06d}"), state)
manager.close()
print("ended at step", done)
