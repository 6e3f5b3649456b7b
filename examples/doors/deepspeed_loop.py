"""A loop on DeepSpeed that saves through fastckpt. Started again, it resumes: deepspeed_loop.py [STEPS]."""

import sys

import deepspeed
import torch
from torch import nn

import fastckpt

fastckpt.integrations.deepspeed.install()  # the line to add

config = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}
model = nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
path, _ = engine.load_checkpoint("runs/deepspeed")
if path is not None:
    print("resumes after step", engine.global_steps)

while engine.global_steps < int(sys.argv[1] if len(sys.argv) > 1 else 40):
    x = torch.randn(8, 16, device=engine.device, dtype=torch.bfloat16)
    loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    if engine.global_steps % 10 == 0:
        engine.save_checkpoint("runs/deepspeed")
print("ended at step", engine.global_steps)
