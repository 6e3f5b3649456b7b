"""torchtitan's checkpoint manager, in a loop like that of torchtitan's trainer: torchtitan_loop.py [STEPS]."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from fastckpt.integrations.torchtitan import FastckptManager


class Optimizers:
    def state_dict(self) -> dict:
        return get_optimizer_state_dict(model, optimizer)

    def load_state_dict(self, state: dict) -> None:
        set_optimizer_state_dict(model, optimizer, state)


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
# In a torchtitan configuration: checkpoint=FastckptManager.Config(enable=True, interval=10)
config = FastckptManager.Config(enable=True, interval=10, folder="titan", last_save_model_only=False)
parts = {"dataloader": None, "model_parts": [model], "optimizers": Optimizers(), "lr_schedulers": schedule}
manager = config.build(**parts, states={}, sd_adapter=None, base_folder="runs")
manager.load()
last = int(sys.argv[1] if len(sys.argv) > 1 else 40)
for step in range(schedule.last_epoch + 1, last + 1):
    x = torch.randn(8, 16)
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    manager.save(step, last_step=step == last)
manager.close()
dist.destroy_process_group()
print("ended at step", schedule.last_epoch)
