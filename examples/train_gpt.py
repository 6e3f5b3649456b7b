"""Train a small GPT on Python's own source, save everything with one call, and resume bit for bit.

    python examples/train_gpt.py --steps 200 --save-every 50 --out runs/gpt
    python examples/train_gpt.py --steps 400 --save-every 50 --out runs/gpt --resume

Everything that a run depends on goes into one dictionary: model, optimizer, learning-rate schedule, gradient scaler,
position in the data, and the states of the random generators of torch, NumPy and Python. A ``fastckpt.Manager`` saves
it to ``OUT/step-00000050``, keeps the last checkpoints, and loads the newest that verifies for ``--resume``. Kill the
program at any moment: on a CPU the resumed run repeats the losses of an uninterrupted one to the last bit (with the
same options: a sum's last bits depend on the number of threads). SIGTERM saves the step and ends the run.

With ``--async`` training continues while a checkpoint is written: the state is copied during the next forward and
backward, and the optimizer step waits for the copy.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import fastckpt
from fastckpt import when

VOCABULARY = 256  # the text is bytes


class Block(nn.Module):
    """One transformer layer: attention, then a perceptron, each around a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.project(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """A decoder that predicts the next byte; input and output embedding are one tensor."""

    def __init__(self, context: int, width: int = 96, layers: int = 3, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of ``targets``."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text(limit: int = 1_000_000) -> Tensor:
    """Return the beginning of Python's standard library, as bytes: real text that every machine has."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)[:limit]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Batches:
    """Endless batches of text windows, in a new order each epoch, with a position that can be saved."""

    def __init__(self, text: Tensor, *, batch: int, context: int, seed: int) -> None:
        self.text, self.batch, self.context = text, batch, context
        # One window fewer than fit: a window may start up to `context` bytes after its place.
        self.windows = len(text) // context - 2
        self.random = np.random.default_rng(seed)
        self.order = self.random.permutation(self.windows)
        self.position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each ``[batch, context]``."""
        if self.position + self.batch > self.windows:
            self.order, self.position = self.random.permutation(self.windows), 0
        chosen = self.order[self.position : self.position + self.batch]
        self.position += self.batch
        # Python's generator shifts the starts of the windows each time, so its state matters, too.
        starts = [int(window) * self.context + random.randrange(self.context) for window in chosen]
        rows = torch.stack([self.text[start : start + self.context + 1] for start in starts]).long()
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that decides all later batches."""
        return {"order": self.order, "position": self.position, "random": self.random.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was saved."""
        self.order, self.position = state["order"], state["position"]
        self.random.bit_generator.state = state["random"]


class Training:
    """Everything that a step changes; saves and restores it as one state."""

    def __init__(self, options: argparse.Namespace) -> None:
        random.seed(options.seed)
        torch.manual_seed(options.seed)
        self.device = torch.device(options.device)
        self.step = 0
        self.model = GPT(options.context).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        # The rate at a step must not depend on where this run ends, or a resumed, longer run would differ.
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warmup_then_decay)
        # Half precision needs the scaler; on a CPU the scaler is off, and its state is an empty dictionary.
        self.half = self.device.type == "cuda"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.half)
        self.batches = Batches(read_text(), batch=options.batch, context=options.context, seed=options.seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole training state, which decides all later steps."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "batches": self.batches.state_dict(),
            "random": {
                "python": random.getstate(),
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if self.half else [],
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self.batches.load_state_dict(state["batches"])
        random.setstate(state["random"]["python"])
        torch.set_rng_state(state["random"]["torch"])
        if self.half:
            torch.cuda.set_rng_state_all(state["random"]["cuda"])

    def train_step(self) -> float:
        """Take one step, and return its loss."""
        inputs, targets = (part.to(self.device) for part in self.batches.next())
        with torch.autocast(self.device.type, dtype=torch.float16, enabled=self.half):
            loss = self.model(inputs, targets)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.step += 1
        return loss.item()


def warmup_then_decay(step: int, warmup: int = 20) -> float:
    """Return the factor on the learning rate: a linear rise, then a fall with the square root of the step."""
    return min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))


def manager_of(options: argparse.Namespace) -> fastckpt.Manager:
    """Return the manager of the run's checkpoints."""
    return fastckpt.Manager(
        options.out,
        keep=options.keep,
        # The last step, too, so that the next run can continue from it.
        save_when=[when.Every(steps=options.save_every), when.Steps(options.steps)],
        async_save=options.asynchronous,
        save_options={"io": fastckpt.IO(lazy=True, threads=1, nice=10)} if options.asynchronous else None,
    )


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT, save with fastckpt, resume bit for bit.")
    parser.add_argument("--steps", type=int, default=200, help="train up to this step (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=50, help="steps between saves (default: %(default)s)")
    parser.add_argument("--keep", type=int, default=3, help="checkpoints to keep (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="directory (default: %(default)s)")
    parser.add_argument("--async", action="store_true", dest="asynchronous", help="continue training during the write")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--context", type=int, default=96, help="bytes of text in a window (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--losses", type=Path, help="append 'step loss' to this file, losses as exact hexadecimal floats"
    )
    options = parser.parse_args()
    for name in ("save_every", "keep", "batch", "context", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def main() -> None:
    """Train."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    options.out.mkdir(parents=True, exist_ok=True)

    training = Training(options)
    with manager_of(options) as manager:
        steps = manager.steps()
        if steps and not options.resume:
            raise SystemExit(f"{manager.path(steps[-1])} exists: add --resume to continue, or choose another --out")
        found = manager.restore()
        if found is not None:
            training.load_state_dict(found.state)
            print(f"resumed from {found.path}")
        manager.save_on_signal(signal.SIGTERM, grace="30s")
        train(options, training, manager)


def train(options: argparse.Namespace, training: Training, manager: fastckpt.Manager) -> None:
    """Take the remaining steps."""
    begin, first = time.perf_counter(), training.step
    while training.step < options.steps:
        loss = training.train_step()
        step = training.step
        if options.losses:
            with options.losses.open("a") as file:
                file.write(f"{step} {loss.hex()}\n")
        if step % 10 == 0 or step == options.steps:
            speed = (step - first) / (time.perf_counter() - begin)
            rate = training.schedule.get_last_lr()[0]
            print(f"step {step:5d}  loss {loss:.4f}  lr {rate:.2e}  {speed:.1f} steps/s", flush=True)
        if manager.should_save(step):
            manager.save(step, training.state_dict(), {"loss": loss})


if __name__ == "__main__":
    main()
