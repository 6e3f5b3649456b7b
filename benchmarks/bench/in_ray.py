"""A worker of Ray Train that follows the commands of a benchmark."""

from __future__ import annotations

import atexit
import os
import tempfile
from multiprocessing.connection import Client, Listener
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Worker:
    """A run of one worker, until it is closed.

    Args:
        place: the storage of the run.
        make: makes the model and its optimizer.
        train: changes every tensor of them.
        kind: the class that saves and loads: :class:`Own` or :class:`Door`.
    """

    def __init__(
        self, place: Path, make: Callable[[], Any], train: Callable[..., None], kind: type[Own | Door]
    ) -> None:
        import ray.train.torch

        if not ray.is_initialized():
            _begin()

        def serve(config: dict[str, Any]) -> None:
            model, optimizer = make()
            saves = kind(model, optimizer)
            with Client(config["address"]) as told:
                while (word := told.recv()) != "end":
                    told.send(train(model, optimizer) if word == "train" else getattr(saves, word)())

        with Listener(family="AF_UNIX") as listener:
            trainer = ray.train.torch.TorchTrainer(
                serve,
                train_loop_config={"address": listener.address},
                scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5}),
                run_config=ray.train.RunConfig(
                    name="run",
                    storage_path=str(place.absolute()),
                    checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
                ),
            )
            self._run = Thread(target=trainer.fit, name="ray", daemon=True)
            self._run.start()
            self._worker = listener.accept()

    def tell(self, word: str) -> Any:
        """Have the worker call one of its methods, and return the result."""
        self._worker.send(word)
        return self._worker.recv()

    def close(self) -> None:
        """End the run."""
        self._worker.send("end")
        self._run.join()


def _begin() -> None:
    """Start a cluster on this machine, which ends with this process."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)  # paths of sockets must be short
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=own.name)
    atexit.register(own.cleanup)
    atexit.register(ray.shutdown)  # runs first: exit handlers run in reverse order


class Own:
    """Saves as in Ray's guide: to a temporary directory, which Ray copies to the storage."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def save(self) -> None:
        """Save."""
        import ray.train
        import torch

        with tempfile.TemporaryDirectory() as there:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, Path(there, "state.pt"))
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(there))

    def wait(self) -> None:
        """Make the last checkpoint durable."""
        from bench.device import fsync_tree

        fsync_tree(Path(self.path()))

    def path(self) -> str:
        """The last checkpoint."""
        import ray.train

        return str(ray.train.get_checkpoint().path)

    def load(self) -> None:
        """Load the last checkpoint."""
        import ray.train
        import torch

        with ray.train.get_checkpoint().as_directory() as there:
            state = torch.load(Path(there, "state.pt"))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Door:
    """A ``Manager`` whose checkpoints are reported to Ray."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        import ray.train

        import fastckpt

        self.state, self.step = {"model": model, "optimizer": optimizer}, 0
        self.manager = fastckpt.Manager(f"{ray.train.get_context().get_storage().experiment_fs_path}/steps")
        self.manager.save_on(notice=ray.train.get_preemption_info)

    def save(self) -> None:
        """Save."""
        from fastckpt.integrations.ray import report

        self.step += 1
        self.manager.save(self.step, self.state)
        report({"step": self.step}, self.manager)  # reports the previous checkpoint; Ray removes the oldest

    def wait(self) -> None:
        """Wait until the checkpoint is durable."""
        self.manager.wait()

    def path(self) -> str:
        """The last checkpoint."""
        return str(self.manager.path(self.step))

    def load(self) -> None:
        """Load the last checkpoint."""
        self.manager.restore(into=self.state)
