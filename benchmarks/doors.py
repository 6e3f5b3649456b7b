"""How long frameworks stall, wait for a durable checkpoint and resume, with and without fastckpt.

    python benchmarks/doors.py --size 1 --rounds 5 --markdown

Each framework saves the same Llama with Adam's moments, in single precision, with its own code and with its integration
(:mod:`fastckpt.integrations`). All take turns in one process and one run:

- **stands**: seconds until the framework's call of its save returns, and training goes on.
- **durable**: seconds until the checkpoint is durable. For the frameworks, an fsync of every file and directory is
  added: transformers syncs nothing, and torch.distributed.checkpoint only its files. With fastckpt, the removal of the
  oldest checkpoint is included.
- **resume**: seconds in which the framework loads model, optimizer and schedule from the disk. The checkpoint is
  dropped from the page cache first. torchtitan loads a given step.

Every tensor changes before each save. torchtitan has no adapter, so tensors have its own names. Figures are medians
without the first round; the page cache uses memory that the host backs (benchmarks/README.md). GB is 10^9 bytes.
``scripts/setup`` installs the frameworks except Ray Train (``pip install --group ray``), which has its own processes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import statistics
import sys
import time
import warnings
from abc import ABC, abstractmethod
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from lightning.fabric import Fabric
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torchtitan.components.checkpointer import CheckpointManager
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fastckpt
from bench import GB, in_ray
from bench.device import back_memory, drop_caches, fsync_tree
from bench.options import parser, working_directory
from fastckpt.integrations.torchtitan import FastckptManager

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

#: Bytes per parameter: its value and two moments.
PER_PARAMETER = 12


def llama(size: int) -> LlamaForCausalLM:
    """Return a model of about ``size`` bytes with its moments, at least 35 MB."""
    width, words = 1024 if size >= GB // 2 else 256, 8192
    per_layer = (4 + 9) * width * width * PER_PARAMETER
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=max(1, (size - words * width * PER_PARAMETER) // per_layer),
        num_attention_heads=16,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change every tensor: saves do not write unchanged tensors again."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


class Contender(ABC):
    """A framework with its model, and the checkpoints that it has written to a folder.

    Attributes:
        number: the number of the last checkpoint; the first is 1.
    """

    def __init__(self, folder: Path, model: Any = None, optimizer: Any = None) -> None:
        self.folder, self.model, self.optimizer, self.number = folder, model, optimizer, 0

    def train(self) -> None:
        """Take a step."""
        train(self.model, self.optimizer)

    def forget(self) -> None:
        """Drop the last checkpoint from the page cache."""
        drop_caches(self._path())

    @abstractmethod
    def _path(self) -> Path:
        """Return the path of the last checkpoint."""

    @abstractmethod
    def save(self) -> Callable[[], None]:
        """Save, and return a function that waits until the checkpoint is durable."""

    @abstractmethod
    def load(self) -> None:
        """Load the last checkpoint."""


class Transformers(Contender):
    """transformers' Trainer."""

    def __init__(self, folder: Path, size: int, *, ours: bool) -> None:
        arguments = TrainingArguments(str(folder), use_cpu=True, report_to="none", save_total_limit=2)
        self.trainer = Trainer(llama(size), arguments)
        self.trainer.create_optimizer_and_scheduler(100)
        super().__init__(folder, self.trainer.model, self.trainer.optimizer)
        self.ours = ours

    def _door(self) -> Any:
        return fastckpt.integrations.transformers.install() if self.ours else nullcontext()

    def _path(self) -> Path:
        return self.folder / f"checkpoint-{self.number}"

    def save(self) -> Callable[[], None]:
        self.number += 1
        self.trainer.state.global_step = self.number
        with self._door():
            self.trainer._save_checkpoint(self.trainer.model, None)  # noqa: SLF001 - what the Trainer calls
        return fastckpt.background.drain if self.ours else lambda: fsync_tree(self._path())

    def load(self) -> None:
        with self._door():
            self.trainer._load_from_checkpoint(str(self._path()))  # noqa: SLF001 - what the Trainer calls
            self.trainer._load_optimizer_and_scheduler(str(self._path()))  # noqa: SLF001 - what the Trainer calls


class Accelerate(Contender):
    """``save_state`` and ``load_state`` of accelerate."""

    def __init__(self, folder: Path, size: int, *, ours: bool) -> None:
        model = llama(size)
        optimizer = torch.optim.AdamW(model.parameters())
        naming = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
        self.accelerator = Accelerator(cpu=True, project_config=naming)
        self.accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))
        super().__init__(folder, model, optimizer)
        self.ours = ours

    def _door(self) -> Any:
        return fastckpt.integrations.accelerate.install() if self.ours else nullcontext()

    def _path(self) -> Path:
        return self.folder / "checkpoints" / f"checkpoint_{self.number - 1}"

    def save(self) -> Callable[[], None]:
        self.number += 1
        with self._door():
            self.accelerator.save_state()
        return fastckpt.background.drain if self.ours else lambda: fsync_tree(self._path())

    def load(self) -> None:
        with self._door():
            self.accelerator.load_state(str(self._path()))


class Lightning(Contender):
    """``save`` and ``load`` of Lightning's Fabric. Each save removes the last but one, as ``ModelCheckpoint`` does."""

    def __init__(self, folder: Path, size: int, *, ours: bool) -> None:
        model = llama(size)
        optimizer = torch.optim.AdamW(model.parameters())
        plugins = [fastckpt.integrations.lightning.CheckpointIO()] if ours else []
        self.fabric = Fabric(accelerator="cpu", devices=1, plugins=plugins)
        super().__init__(folder, *self.fabric.setup(model, optimizer))
        self.ours = ours

    def _path(self) -> Path:
        return self.folder / f"{self.number}.ckpt"

    def save(self) -> Callable[[], None]:
        self.number += 1
        self.fabric.save(self._path(), {"model": self.model, "optimizer": self.optimizer})

        def wait() -> None:
            fastckpt.background.drain()
            if not self.ours:
                fsync_tree(self.folder)
            if self.number > 1:
                before = self._path().with_stem(str(self.number - 1))
                self.fabric.strategy.checkpoint_io.remove_checkpoint(before)

        return wait

    def load(self) -> None:
        self.fabric.load(self._path(), {"model": self.model, "optimizer": self.optimizer})


class Optimizers:
    """The optimizer, with the interface of torchtitan's optimizers."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return its state, keyed by parameter names."""
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that is keyed by parameter names."""
        set_optimizer_state_dict(self.model, self.optimizer, state)


class Torchtitan(Contender):
    """A checkpoint manager of torchtitan."""

    def __init__(self, folder: Path, size: int, *, manager: Any, mode: str) -> None:
        model = llama(size)
        optimizer = torch.optim.AdamW(model.parameters())
        config = manager.Config(enable=True, folder="run", interval=1, keep_latest_k=2, async_mode=mode)
        self.manager = config.build(
            dataloader=None,
            model_parts=[model],
            optimizers=Optimizers(model, optimizer),
            lr_schedulers=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
            states={},
            sd_adapter=None,
            base_folder=str(folder),
        )
        super().__init__(folder / "run", model, optimizer)
        self.syncs = manager is CheckpointManager

    def _path(self) -> Path:
        return self.folder / f"step-{self.number}"

    def save(self) -> Callable[[], None]:
        self.number += 1
        self.manager.save(self.number)

        def wait() -> None:
            self.manager.maybe_wait_for_saving()
            if self.syncs:
                fsync_tree(self._path())

        return wait

    def load(self) -> None:
        self.manager.load(self.number)


class DeepSpeed(Contender):
    """An engine of DeepSpeed with ZeRO 1. DeepSpeed removes no checkpoint, so each save removes the last but one."""

    def __init__(self, folder: Path, size: int, *, ours: bool) -> None:
        # DeepSpeed reads these variables, some of them when it is imported.
        os.environ.update({"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1", "LOCAL_RANK": "0"})
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # otherwise DeepSpeed would compile an operator
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        model = llama(size)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(model.parameters())
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        super().__init__(folder, model, optimizer)
        self.ours = ours

    def _door(self) -> Any:
        return fastckpt.integrations.deepspeed.install() if self.ours else nullcontext()

    def _path(self) -> Path:
        return self.folder / str(self.number)

    def train(self) -> None:
        """Take a step with the engine, so that ZeRO collects gradients."""
        rows = torch.randint(8192, (1, 8))
        self.engine.backward(self.engine(input_ids=rows, labels=rows).loss)
        self.engine.step()

    def save(self) -> Callable[[], None]:
        self.number += 1
        with self._door():
            self.engine.save_checkpoint(str(self.folder), str(self.number))

        def wait() -> None:
            if not self.ours:
                fsync_tree(self.folder)
            if self.number > 1:
                shutil.rmtree(self.folder / str(self.number - 1))

        return wait

    def load(self) -> None:
        with self._door():
            self.engine.load_checkpoint(str(self.folder), str(self.number))


class RayTrain(Contender):
    """A worker of Ray Train, in a separate process."""

    def __init__(self, folder: Path, size: int, *, kind: Any) -> None:
        def make() -> tuple[Any, Any]:
            model = llama(size)
            return model, torch.optim.AdamW(model.parameters())

        self.worker = in_ray.Worker(folder, make, train, kind)
        super().__init__(folder)

    def train(self) -> None:
        """Take a step."""
        self.worker.tell("train")

    def _path(self) -> Path:
        return Path(self.worker.tell("path"))

    def save(self) -> Callable[[], None]:
        self.worker.tell("save")
        return lambda: self.worker.tell("wait")

    def load(self) -> None:
        self.worker.tell("load")


#: Frameworks by name, and how each is made; the part of the name after the bar names the code that saves.
CONTENDERS: dict[str, Callable[[Path, int], Contender]] = {
    "transformers' Trainer": lambda place, size: Transformers(place, size, ours=False),
    "transformers' Trainer | fastckpt": lambda place, size: Transformers(place, size, ours=True),
    "accelerate": lambda place, size: Accelerate(place, size, ours=False),
    "accelerate | fastckpt": lambda place, size: Accelerate(place, size, ours=True),
    "Lightning": lambda place, size: Lightning(place, size, ours=False),
    "Lightning | fastckpt": lambda place, size: Lightning(place, size, ours=True),
    "torchtitan, disabled": lambda place, size: Torchtitan(place, size, manager=CheckpointManager, mode="disabled"),
    "torchtitan, disabled | fastckpt": lambda place, size: Torchtitan(
        place, size, manager=FastckptManager, mode="disabled"
    ),
    "DeepSpeed": lambda place, size: DeepSpeed(place, size, ours=False),
    "DeepSpeed | fastckpt": lambda place, size: DeepSpeed(place, size, ours=True),
    "torchtitan, async": lambda place, size: Torchtitan(place, size, manager=CheckpointManager, mode="async"),
    "torchtitan, async | fastckpt": lambda place, size: Torchtitan(place, size, manager=FastckptManager, mode="async"),
    "Ray Train": lambda place, size: RayTrain(place, size, kind=in_ray.Own),
    "Ray Train | fastckpt": lambda place, size: RayTrain(place, size, kind=in_ray.Door),
}


def measured(contender: Contender, size: int) -> dict[str, float]:
    """Save and load once."""
    contender.train()
    back_memory(int(2.25 * size))
    began = time.perf_counter()
    wait = contender.save()
    stands = time.perf_counter() - began
    wait()
    durable = time.perf_counter() - began
    contender.forget()
    back_memory(int(2.25 * size))
    began = time.perf_counter()
    contender.load()
    return {"stands": stands, "durable": durable, "resume": time.perf_counter() - began}


def measure(place: Path, size: int, rounds: int, wanted: list[str]) -> dict[str, list[dict[str, float]]]:
    """Return the samples of each contender of these frameworks."""
    contenders = {}
    for number, (name, make) in enumerate(CONTENDERS.items()):
        if name.partition(" | ")[0] in wanted:
            (place / str(number)).mkdir()
            contenders[name] = make(place / str(number), size)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    names = [*contenders]
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            sample = measured(contenders[name], size)
            if number:
                samples[name].append(sample)
            print(f"{number}: {name}: {sample}", file=sys.stderr)
    for one in contenders.values():
        if isinstance(one, RayTrain):
            one.worker.close()
    return samples


def markdown(samples: dict[str, list[dict[str, float]]]) -> str:
    """Return a table of medians."""
    found = {
        name: {key: statistics.median(one[key] for one in each) for key in each[0]} for name, each in samples.items()
    }
    lines = ["| | stands, s | durable, s | resume, s |", "|---|---:|---:|---:|"]
    for name, each in found.items():
        framework, _, ours = name.partition(" | ")
        cells = [f"{each[key]:.2f}" for key in ("stands", "durable", "resume")]
        if ours:
            cells = [f"{cell} ({each[key] / found[framework][key]:.2f})" for cell, key in zip(cells, each, strict=True)]
        lines.append(f"| {'with fastckpt' if ours else framework} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--size", type=float, default=1.0, help="GB of state of each framework (default: 1)")
    frameworks = [name for name in CONTENDERS if " | " not in name]
    made.add_argument("--framework", action="append", choices=frameworks, help="repeat for several (default: all)")
    options: argparse.Namespace = made.parse_args()
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        place = stack.enter_context(working_directory(options, "doors-"))
        found = measure(place, int(options.size * GB), options.rounds, options.framework or frameworks)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(markdown(found) if options.markdown else json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
