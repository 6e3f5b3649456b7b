"""Train a small GPT with FSDP2 on several processes, save one checkpoint together, resume with any number of them.

    torchrun --nproc-per-node 4 examples/train_fsdp.py --steps 40 --out runs/fsdp
    torchrun --nproc-per-node 2 examples/train_fsdp.py --steps 80 --out runs/fsdp --resume

Each rank holds a part of every parameter. ``fastckpt.Manager`` works over all ranks and writes these parts to their
final places: the files are those that one process would write, so any number of ranks can read them, and so can one
process (``fastckpt.load``) or ``transformers``. Kill a rank at any moment (``kill -9``): no rank hangs, the last
durable checkpoint stays, and ``--resume`` continues from it. SIGTERM saves the step and ends the run.

With the same number of ranks, a resumed run on CPUs repeats the losses of an undisturbed one to the last bit. With
another number of ranks, sums have another order, so the losses agree except for rounding. The data does not depend on
the number of ranks: a step uses one global batch, and each rank a slice of it. Only the states of the random
generators differ by rank; they are saved with ``per_rank=``.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_gpt import GPT, read_text

import fastckpt
from fastckpt import when


class Training:
    """Everything on this rank that a step changes."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.text = read_text()
        self.step = 0
        # All ranks begin with the same weights; random numbers in training (dropout) differ from rank to rank.
        torch.manual_seed(options.seed)
        model = GPT(options.context, width=options.width, dropout=options.dropout).to(device)
        torch.manual_seed(options.seed + 1 + self.rank)
        mesh = init_device_mesh(device.type, (self.ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        self.model: nn.Module = fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return this rank's slice of the step's batch. Seed and step alone decide the batch."""
        drawn = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.step)
        length = self.options.context
        starts = torch.randint(len(self.text) - length - 1, (self.options.batch,), generator=drawn)
        mine = starts.tensor_split(self.ranks)[self.rank].tolist()
        rows = torch.stack([self.text[start : start + length + 1] for start in mine]).long().to(self.device)
        return rows[:, :-1], rows[:, 1:]

    def train_step(self) -> float:
        """Take one step and return the loss of the whole batch."""
        loss = self.model(*self.batch())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.step += 1
        mean = loss.detach() / self.ranks
        dist.all_reduce(mean)
        return float(mean)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that all ranks share: DTensors, and values that are equal on all ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def random_state(self) -> dict[str, Any]:
        """Return the state of this rank alone."""
        device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {"cpu": torch.get_rng_state(), "device": device}

    def resume(self, manager: fastckpt.Manager) -> None:
        """Fill this rank's parts from the newest checkpoint that verifies, whatever number of ranks saved it."""
        # The tensors of the model are filled in place.
        found = manager.restore(into=self.state_dict())
        if found is None:
            return
        loaded = found.state
        set_state_dict(
            self.model, self.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        self.step = found.step
        # With another number of ranks, no saved generator fits a rank: each starts a new one.
        if found.per_rank is not None:
            torch.set_rng_state(found.per_rank["cpu"])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(found.per_rank["device"], self.device)
        if self.rank == 0:
            print(f"resumed from {found.path} with {self.ranks} ranks", flush=True)

    def tell(self, loss: float) -> None:
        """Print the loss of the step, on rank 0."""
        if self.rank == 0:
            print(f"step {self.step:5d}  loss {loss:.4f}", flush=True)
            if self.options.losses:
                with self.options.losses.open("a") as file:
                    file.write(f"{self.step} {loss.hex()}\n")


def manager_of(options: argparse.Namespace) -> fastckpt.Manager:
    """Return the manager of the run's checkpoints, on all ranks."""
    return fastckpt.Manager(
        options.out,
        ranks=fastckpt.distributed.Ranks(timeout=options.timeout),
        keep=options.keep,
        # The last step, too, so that the next run can continue from it.
        save_when=[when.Every(steps=options.save_every), when.Steps(options.steps)],
        async_save=False,
    )


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with FSDP2; save and resume with fastckpt.")
    parser.add_argument("--steps", type=int, default=40, help="train up to this step (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=10, help="steps between saves (default: %(default)s)")
    parser.add_argument("--keep", type=int, default=3, help="checkpoints to keep (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp"), help="directory (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in --out")
    parser.add_argument("--batch", type=int, default=8, help="windows of text in a step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="bytes of text in a window (default: %(default)s)")
    parser.add_argument("--width", type=int, default=96, help="model width, a multiple of 4 (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.0, help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of silence that end a save or load")
    parser.add_argument("--losses", type=Path, help="rank 0 appends 'step loss' to this file, as exact hexadecimal")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if options.batch % ranks:
        parser.error(f"--batch must be a multiple of the number of ranks, {ranks}")
    return options


def main() -> None:
    """Train as one of the ranks that torchrun starts."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    training = Training(options, device)
    with manager_of(options) as manager:
        steps = manager.steps()
        if steps and not options.resume:
            raise SystemExit(f"{manager.path(steps[-1])} exists: add --resume to continue, or choose another --out")
        training.resume(manager)
        manager.save_on_signal(signal.SIGTERM, grace="25s")
        while training.step < options.steps:
            training.tell(training.train_step())
            if manager.should_save(training.step):
                manager.save(training.step, training.state_dict(), per_rank=training.random_state())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
