"""Ray Train with fastckpt. Started again, it resumes: ray_train.py [STEPS]. Tests run it with a stand-in for Ray."""

import sys
from pathlib import Path

import ray.train
import ray.train.torch
import torch
from torch import nn

import fastckpt
from fastckpt.integrations.ray import report


def train(config):
    model = ray.train.torch.prepare_model(nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": getattr(model, "module", model), "optimizer": optimizer}
    with fastckpt.Manager(f"{ray.train.get_context().get_storage().experiment_fs_path}/steps", save_when=10) as manager:
        manager.save_on(notice=ray.train.get_preemption_info)
        found = manager.restore(into=state)
        step, loss = (found.step if found else 0), torch.zeros(())
        for step in manager.remaining(config["steps"]):
            x = torch.randn(8, 16)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.save(step, state)
            report({"loss": loss.item(), "step": step}, manager)
    report({"loss": loss.item(), "step": step}, manager)  # the last checkpoint is durable


trainer = ray.train.torch.TorchTrainer(
    train,
    train_loop_config={"steps": int(sys.argv[1] if len(sys.argv) > 1 else 40)},
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(name="ray", storage_path=str(Path("runs").absolute())),
)
print("ended at step", trainer.fit().metrics["step"])
