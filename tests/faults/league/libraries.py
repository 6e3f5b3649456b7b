"""The libraries, each with saves and resumes as documented, and with its settings for safety.

Each library is a class with ``title``, ``promise`` (a link to its promises), ``train`` and ``resume``. ``train``
continues a run in a directory, saves after each step, and reports each step that the library reported as saved.
``resume`` finds the newest checkpoint by the rule of the library or its documentation, and returns the state; None if
it finds nothing. All exceptions are the library's own.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from .states import LENGTH, TENSORS, state_of, value_of

if TYPE_CHECKING:
    from pathlib import Path

Told = Callable[[int], None]

#: Seconds for which ranks wait for one another.
PATIENCE = 20.0


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def meet(rank: int, size: int, port: int) -> None:
    """Make this process a rank of a job."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))


class Library(ABC):
    """A library of the table.

    Attributes:
        title: its name in the table.
        package: the distribution whose version is shown.
        modules: the modules that are imported before the trials are forked.
        promise: a link to its promises.
        keeps: the number of checkpoints that it keeps, if it removes older checkpoints itself.
        ranked: whether all ranks of a job write a checkpoint together.
    """

    title: ClassVar[str]
    package: ClassVar[str]
    modules: ClassVar[tuple[str, ...]] = ("torch",)
    promise: ClassVar[str]
    keeps: ClassVar[int | None] = None
    ranked: ClassVar[bool] = False

    def version(self) -> str:
        return metadata.version(self.package)

    def load_modules(self) -> None:
        for name in self.modules:
            importlib.import_module(name)

    @abstractmethod
    def train(self, directory: Path, steps: Iterable[int], told: Told) -> None:
        """Continue the run in a directory, and report each step that the library reported as saved."""

    @abstractmethod
    def resume(self, directory: Path) -> dict[str, Any] | None:
        """Return the state of the newest checkpoint; None if there is none."""


def newest(directory: Path, pattern: str) -> Path | None:
    """Return the newest checkpoint by the number in its name, as many scripts do."""
    found = [(int("".join(filter(str.isdigit, one.name)) or 0), one) for one in directory.glob(pattern)]
    return max(found)[1] if found else None


class Fastckpt(Library):
    title, package, modules = "fastckpt (Manager)", "fastckpt-io", ("torch", "fastckpt")
    promise, keeps, ranked = "docs/promises.md", 2, True

    def version(self) -> str:
        return str(importlib.import_module("fastckpt").__version__)

    def train(self, directory: Path, steps: Iterable[int], told: Told) -> None:
        import fastckpt.distributed

        ranks = fastckpt.distributed.Ranks(timeout=PATIENCE)
        with fastckpt.Manager(directory, keep=self.keeps, async_save=False, ranks=ranks) as manager:
            for step in steps:
                manager.save(step, state_of(step))
                told(step)

    def resume(self, directory: Path) -> dict[str, Any] | None:
        import fastckpt

        found = fastckpt.Manager(directory, keep=self.keeps).restore()
        return found and found.state


class TorchSave(Library):
    title, package = "torch.save to its place", "torch"
    promise = "https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html"

    def put(self, state: Any, path: Path) -> None:
        torch.save(state, path)

    def train(self, directory: Path, steps: Iterable[int], told: Told) -> None:
        for step in steps:
            self.put(state_of(step), directory / f"step-{step}.pt")
            for old in sorted(directory.glob("step-*.pt"), key=lambda one: one.stat().st_mtime)[:-2]:
                old.unlink()
            told(step)

    def resume(self, directory: Path) -> dict[str, Any] | None:
        path = newest(directory, "step-*.pt")
        return None if path is None else torch.load(path)


class TorchSaveAndRename(TorchSave):
    title = "torch.save, then os.replace"

    def put(self, state: Any, path: Path) -> None:
        beside = path.with_suffix(".tmp")
        torch.save(state, beside)
        beside.replace(path)


class Safetensors(TorchSave):
    title, package, modules = "safetensors save_file", "safetensors", ("torch", "safetensors.torch")
    promise = "https://huggingface.co/docs/safetensors"

    def put(self, state: Any, path: Path) -> None:
        importlib.import_module("safetensors.torch").save_file(state, path)

    def resume(self, directory: Path) -> dict[str, Any] | None:
        path = newest(directory, "step-*.pt")
        return None if path is None else importlib.import_module("safetensors.torch").load_file(path)


class DCP(Library):
    title, package, modules = "torch DCP", "torch", ("torch", "torch.distributed.checkpoint")
    promise, ranked = "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html", True

    def train(self, directory: Path, steps: Iterable[int], told: Told) -> None:
        import torch.distributed.checkpoint as dcp

        for step in steps:
            dcp.save(state_of(step), checkpoint_id=directory / f"step-{step}")
            told(step)

    def resume(self, directory: Path) -> dict[str, Any] | None:
        import torch.distributed.checkpoint as dcp

        path = newest(directory, "step-*")
        if path is None:
            return None
        state = {f"w{index}": torch.zeros(LENGTH) for index in range(TENSORS)}
        dcp.load(state, checkpoint_id=path)
        return state


class TorchCheckpointing(Library):
    title, package = "torch_checkpointing", "torch_checkpointing"
    modules = ("torch", "torch_checkpointing", "torch_checkpointing.config")
    promise, ranked = "https://github.com/meta-pytorch/torch_checkpointing", True

    def manager(self) -> Any:
        import torch_checkpointing as library
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        logging.getLogger("torch_checkpointing").setLevel(logging.CRITICAL)
        config = library.CheckpointManager.Config(
            items={"state": library.ItemSpec()},
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        return library.CheckpointManager(config)

    def train(self, directory: Path, steps: Iterable[int], told: Told) -> None:
        manager = self.manager()
        for step in steps:
            manager.save(str(directory / f"step-{step}"), {"state": state_of(step)})
            told(step)

    def resume(self, directory: Path) -> dict[str, Any] | None:
        path = newest(directory, "step-*")
        return None if path is None else self.manager().load(str(path))["state"]


class Model(torch.nn.Module):
    """A model whose parameters are set, not learned, so that the step determines them."""

    def __init__(self, step: int = 0) -> None:
        super().__init__()
        for index in range(TENSORS):
            self.register_parameter(f"w{index}", torch.nn.Parameter(torch.full((LENGTH,), value_of(step, index))))

    def become(self, step: int) -> None:
        with torch.no_grad():
            for index in range(TENSORS):
                getattr(self, f"w{index}").fill_(value_of(step, index))

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return sum(parameter[0] for parameter in self.parameters()) * 0.0  # type: ignore[return-value]

    def values(self) -> dict[str, Any]:
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}


class Lightning(Library):
    title, package, modules = "Lightning ModelCheckpoint", "lightning", ("torch", "lightning.pytorch")
    promise = "https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html"
    keeps = 1

    def _run(self, directory: Path, steps: Iterable[int] | None, told: Told) -> dict[str, Any]:
        import lightning.pytorch as pl
        from lightning.pytorch.callbacks import ModelCheckpoint

        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        numbers = list(steps or [])

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = Model()
                self.automatic_optimization = False

            def training_step(self, *_: Any) -> None:
                self.optimizers().step()  # type: ignore[union-attr]
                self.model.become(self.global_step)

            def on_train_batch_start(self, *_: Any) -> None:
                if self.global_step in numbers:
                    told(self.global_step)

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.0)

        module = Module()
        saver = ModelCheckpoint(directory, save_last=True, save_top_k=1, every_n_train_steps=1, monitor=None)
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        last = max(numbers, default=0)
        trainer = pl.Trainer(accelerator="cpu", max_steps=last, callbacks=[saver], default_root_dir=directory, **quiet)
        data = torch.utils.data.DataLoader(torch.zeros(last + 1, 1))
        # This is the checkpoint that `ckpt_path="last"` chooses among several.
        there = max(directory.glob("last*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
        if steps is None:
            loaded = torch.load(there, weights_only=False)
            return {name.removeprefix("model."): value for name, value in loaded["state_dict"].items()}
        trainer.fit(module, data, ckpt_path=there)
        return {}

    def train(self, directory: Path, steps: Iterable[int], told: Told) -> None:
        self._run(directory, steps, told)

    def resume(self, directory: Path) -> dict[str, Any] | None:
        if not list(directory.glob("last*.ckpt")):
            return None
        return self._run(directory, None, lambda _: None)


class Transformers(Library):
    title, package, modules = "transformers Trainer", "transformers", ("torch", "transformers.trainer", "accelerate")
    promise = "https://huggingface.co/docs/transformers/main_classes/trainer"
    keeps = 1

    def _trainer(self, directory: Path, steps: int, told: Told) -> Any:
        import transformers

        transformers.logging.set_verbosity_error()
        warnings.simplefilter("ignore")

        class Setting(transformers.Trainer):
            def training_step(self, model: Any, *_: Any, **__: Any) -> torch.Tensor:
                model.become(self.state.global_step + 1)
                return torch.zeros(())

        class Tells(transformers.TrainerCallback):
            def on_save(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
                told(state.global_step)

        options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": self.keeps}
        quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 0.0}
        arguments = transformers.TrainingArguments(str(directory), max_steps=steps, **options, **quiet)
        data = [{"x": torch.zeros(1)}] * 8
        return Setting(Model(), arguments, train_dataset=data, callbacks=[Tells()])

    def train(self, directory: Path, steps: Iterable[int], told: Told) -> None:
        trainer = self._trainer(directory, max(steps), told)
        trainer.train(resume_from_checkpoint=any(directory.glob("checkpoint-*")))

    def resume(self, directory: Path) -> dict[str, Any] | None:
        from transformers.trainer_utils import get_last_checkpoint

        path = get_last_checkpoint(str(directory))
        if path is None:
            return None
        trainer = self._trainer(directory, int(path.rpartition("-")[2]), lambda _: None)
        trainer.train(resume_from_checkpoint=True)
        return trainer.model.values()


class Accelerate(Library):
    title, package, modules = "accelerate save_state", "accelerate", ("torch", "accelerate")
    promise = "https://huggingface.co/docs/accelerate/usage_guides/checkpoint"
    keeps = 2

    def _accelerator(self, directory: Path) -> tuple[Any, Model]:
        import accelerate
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        settings = accelerate.utils.ProjectConfiguration(
            project_dir=str(directory), automatic_checkpoint_naming=True, total_limit=self.keeps
        )
        accelerator = accelerate.Accelerator(cpu=True, project_config=settings)
        model = Model()
        return accelerator, accelerator.prepare(model)

    def train(self, directory: Path, steps: Iterable[int], told: Told) -> None:
        accelerator, model = self._accelerator(directory)
        for step in steps:
            # accelerate's names of checkpoints count saves, which are the steps here.
            accelerator.project_configuration.iteration = step
            model.become(step)
            accelerator.save_state()
            told(step)

    def resume(self, directory: Path) -> dict[str, Any] | None:
        if not any((directory / "checkpoints").glob("checkpoint_*")):
            return None
        accelerator, model = self._accelerator(directory)
        accelerator.load_state()
        return model.values()


class DeepSpeed(Library):
    title, package, modules = "DeepSpeed", "deepspeed", ("torch", "deepspeed")
    promise, ranked = "https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html", True

    def _engine(self) -> tuple[Any, Model]:
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        if not dist.is_initialized():
            meet(0, 1, free_port())
        deepspeed.init_distributed("gloo")
        model = Model()
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        return engine, model

    def train(self, directory: Path, steps: Iterable[int], told: Told) -> None:
        engine, model = self._engine()
        for step in steps:
            model.become(step)
            engine.save_checkpoint(str(directory), tag=f"step-{step}")
            told(step)

    def resume(self, directory: Path) -> dict[str, Any] | None:
        if not any(directory.iterdir()):
            return None
        engine, model = self._engine()
        path, _ = engine.load_checkpoint(str(directory))
        return None if path is None else model.values()


class Moonclip(Library):
    title, package, modules = "moonclip", "moonclip", ("torch", "moonclip")
    promise = "https://github.com/JHNMACHINE/moonclip"

    def train(self, directory: Path, steps: Iterable[int], told: Told) -> None:
        import moonclip

        manager, model = moonclip.CheckpointManager(str(directory), async_save=False), Model()
        manager.resume(model=model)
        for step in steps:
            model.become(step)
            manager.save(step=step, model=model)
            manager.flush()
            told(step)

    def resume(self, directory: Path) -> dict[str, Any] | None:
        import moonclip

        model = Model()
        following = moonclip.CheckpointManager(str(directory), async_save=False).resume(model=model)
        return model.values() if following else None


class Orbax(Library):
    title, package = "Orbax CheckpointManager", "orbax-checkpoint"
    modules = ("torch", "jax", "orbax.checkpoint")
    promise, keeps = "https://orbax.readthedocs.io/en/latest/", 2

    def _manager(self, directory: Path) -> Any:
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)
        return ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=self.keeps))

    def train(self, directory: Path, steps: Iterable[int], told: Told) -> None:
        import orbax.checkpoint as ocp

        with self._manager(directory) as manager:
            for step in steps:
                state = {name: value.numpy() for name, value in state_of(step).items()}
                manager.save(step, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
                told(step)

    def resume(self, directory: Path) -> dict[str, Any] | None:
        import orbax.checkpoint as ocp

        with self._manager(directory) as manager:
            step = manager.latest_step()
            if step is None:
                return None
            found = manager.restore(step, args=ocp.args.StandardRestore())
            return {name: torch.from_numpy(value.copy()) for name, value in found.items()}


ALL: dict[str, type[Library]] = {
    "fastckpt": Fastckpt,
    "torch.save": TorchSave,
    "torch.save+rename": TorchSaveAndRename,
    "safetensors": Safetensors,
    "dcp": DCP,
    "torch_checkpointing": TorchCheckpointing,
    "lightning": Lightning,
    "trainer": Transformers,
    "accelerate": Accelerate,
    "deepspeed": DeepSpeed,
    "moonclip": Moonclip,
    "orbax": Orbax,
}
