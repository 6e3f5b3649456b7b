"""Lightning's checkpoints are written and read by fastckpt, in the background (docs/guides/lightning.md).

Trainer(plugins=[fastckpt.integrations.lightning.CheckpointIO()])
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Any

import torch  # noqa: TID251 - Lightning's processes are torch's
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.core import saving as _saving
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

import fastckpt
from fastckpt._api import in_flight
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed
from fastckpt._paths import is_url, path_of

from ._directory import LOG, is_ours, remove

__all__ = ["CheckpointIO", "RandomStates", "install"]

_installed = Installed()
#: Keys in checkpoints: Lightning's for the model, and fastckpt's for random states.
_MODEL, _RANDOM = "state_dict", "fastckpt.random"


def install() -> Installation:
    """Make ``load_from_checkpoint`` read checkpoints of fastckpt, in programs without a :class:`CheckpointIO`.

    Returns:
        A context manager that ends the installation, as ``uninstall`` does. Otherwise it lasts as long as the process.

    Example:
        >>> import fastckpt
        >>> with fastckpt.integrations.lightning.install():
        ...     pass  # Module.load_from_checkpoint("runs/epoch=3-step=400.ckpt")
    """
    ours = [(ModelCheckpoint, "_save_checkpoint", _save_checkpoint), (ModelCheckpoint, "file_exists", _file_exists)]
    others: list[Any] = [(_saving, "pl_load", _load), (Strategy, "save_checkpoint", _save_by_strategy)]
    return _installed.begin({"io": "auto"}, [*ours, *others])


def _plugin_of(trainer: Any) -> CheckpointIO | None:
    plugin = trainer.strategy.checkpoint_io
    return plugin if isinstance(plugin, CheckpointIO) else None


def _load(options: Any, theirs: Any, path: Any, *how: Any, **more: Any) -> Any:
    if isinstance(path, (str, os.PathLike)) and not is_url(os.fspath(path)):
        in_flight.wait_for_paths(path_of("load_checkpoint", path))
    if not is_ours(path):
        return theirs(path, *how, **more)
    where = how[0] if how else more.get("map_location")
    # If a function or a dict chooses the devices of tensors, they are loaded to the host.
    device = str(where) if isinstance(where, (str, torch.device)) else None
    # The save has warned of classes that become plain values.
    return fastckpt.load(path, device=device, registry=fastckpt.Registry(undeclared="plain"), io=options["io"])


def _save_checkpoint(_: Any, theirs: Any, checkpoints: Any, trainer: Any, filepath: str) -> None:
    """Save in the background what ``ModelCheckpoint`` saves during training, unless a link to it follows."""
    plugin = _plugin_of(trainer)
    if plugin is None or trainer.state.status == TrainerStatus.INTERRUPTED or checkpoints.save_last == "link":
        theirs(checkpoints, trainer, filepath)
        return
    if any(getattr(logger, "_log_model", False) for logger in trainer.loggers):
        LOG.warning("fastckpt: loggers upload files only, not these checkpoints")
    plugin._behind = True
    try:
        theirs(checkpoints, trainer, filepath)
    finally:
        plugin._behind = False


def _file_exists(_: Any, theirs: Any, checkpoints: Any, filepath: str, trainer: Any) -> bool:
    """Report that a checkpoint in flight exists, and that one to be removed does not."""
    plugin, target = _plugin_of(trainer), None if is_url(filepath) else path_of("file_exists", filepath)
    known = {} if plugin is None else {path: save is not None for save, path in [*plugin._queue]}
    if target in known:  # true only on the first process
        return bool(trainer.strategy.reduce_boolean_decision(known[target], all=False))
    return bool(theirs(checkpoints, filepath, trainer))


def _save_by_strategy(_: Any, theirs: Any, strategy: Any, checkpoint: Any, filepath: Any, *how: Any, **kw: Any) -> None:
    """Write torch's files for strategies that read only these."""
    if isinstance(strategy, (FSDPStrategy, ModelParallelStrategy)) and isinstance(strategy.checkpoint_io, CheckpointIO):
        if strategy.is_global_zero:
            TorchCheckpointIO.save_checkpoint(strategy.checkpoint_io, checkpoint, filepath, *how, **kw)
    else:
        theirs(strategy, checkpoint, filepath, *how, **kw)


class CheckpointIO(TorchCheckpointIO):
    """A plugin of Lightning's ``Trainer`` and ``Fabric``: each checkpoint is a directory of fastckpt.

    ``ModelCheckpoint`` saves in the background while training continues: training stops until the state is copied to
    the host, which needs no device memory. All other saves are complete when the call returns. Lightning removes a
    checkpoint only after all earlier saves are durable. Files of torch, URLs, and saves of the strategies FSDP and
    ModelParallel (use :func:`fastckpt.dcp.install`) are handled as if there were no plugin. Do not wrap the plugin
    in Lightning's ``AsyncCheckpointIO``.

    Args:
        io: how bytes move: a :class:`fastckpt.IO`, or the name of an engine. ``max_in_flight`` is 2 unless it is an
            ``IO``.
        background: whether saves return before they are durable. The end of ``fit`` waits for them.

    Raises:
        TypeError: ``io`` has another type.
        ValueError: ``io`` names an unknown engine.

    Example:
        >>> from fastckpt.integrations.lightning import CheckpointIO
        >>> plugins = [CheckpointIO(io="buffered")]  # Trainer(plugins=plugins)
    """

    def __init__(self, *, io: Any = "auto", background: bool = True) -> None:
        how = check_io("CheckpointIO", io)
        # Two, because with save_last one step has two saves.
        self._io, self._background = how if how is io else replace(how, max_in_flight=2), background
        #: Whether a save that begins now is made in the background.
        self._behind = False
        #: Saves with their paths; and paths to remove once the saves before them are durable.
        self._queue: list[tuple[Any, str]] = []
        self._lock = RLock()
        install()

    def __getstate__(self) -> dict[str, Any]:
        return {"io": self._io, "background": self._background}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CheckpointIO.__init__(self, **state)  # a subclass may take other arguments

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a checkpoint; Lightning calls it on the first process.

        Args:
            checkpoint: the state.
            path: its directory. A file of torch or a link at the path is replaced when the checkpoint is durable.
            storage_options: not supported, must be None.

        Raises:
            OSError: the storage failed, in this save or an earlier one.
            TypeError: there are ``storage_options``.
            UnsupportedTypeError: the state holds an object that is neither a tensor nor a plain value.
        """
        # Before Slurm requeues a job, Lightning mistakes digits of hidden names for versions.
        if storage_options is not None or is_url(str(path)) or Path(path).name.startswith("hpc_ckpt_"):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        self._settle()
        target = Path(path_of("save_checkpoint", path))
        with self._lock:
            self._queue = [one for one in self._queue if one != (None, str(target))]
        how: Any = {"io": self._io, "files": fastckpt.Files(model_key=_MODEL) if checkpoint.get(_MODEL) else None}
        in_the_way = target.is_symlink() or target.is_file()
        # Lightning puts links and lists of models beside the first checkpoint, and expects its directory to exist.
        if self._behind and self._background and target.parent.is_dir() and not in_the_way:
            save = fastckpt.save_async(checkpoint, target, **how)
            self._queue.append((save, save.path))
            save.add_done_callback(self._tidy)
            return
        self.teardown()
        # Until the old file is gone, the new checkpoint has a name that Lightning also accepts as the last one.
        new = target.with_suffix(f".new{target.suffix}") if in_the_way else target
        fastckpt.save(checkpoint, new, **how)
        if in_the_way:
            target.unlink()
            new.rename(target)

    def load_checkpoint(self, path: Any, *how: Any, **more: Any) -> dict[str, Any]:
        """Load a checkpoint, after all saves have ended.

        Args:
            path: its directory, or a file of torch.
            how: as for Lightning's own plugin. If fastckpt wrote the checkpoint, tensors go to the device that
                ``map_location`` names, or else to the host, and no code is executed.
            more: the same arguments by name.

        Returns:
            The state.

        Raises:
            CorruptCheckpointError: the checkpoint is damaged.
            FileNotFoundError: the checkpoint does not exist.
            OSError: the storage failed, in this load or an earlier save.
        """
        self.teardown()
        return _load({"io": self._io}, super().load_checkpoint, path, *how, **more)  # type: ignore[no-any-return]

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint once all earlier saves are durable.

        Args:
            path: its directory, or a file.

        Raises:
            OSError: the storage failed.
        """
        if is_url(str(path)):
            super().remove_checkpoint(path)
        else:
            self._queue.append((None, path_of("remove_checkpoint", path)))
            self._tidy()

    def teardown(self) -> None:
        """Wait until all saves are durable.

        Raises:
            OSError: the storage failed.
        """
        self._settle(wait=True)

    def _settle(self, *, wait: bool = False) -> None:
        """Raise the error of a save that has ended; with ``wait``, wait for all saves."""
        saves = [save for save, _ in [*self._queue] if save is not None]  # a save that ends meanwhile leaves the queue
        while saves and (wait or saves[0].done()):
            if saves[0].exception() is not None:
                with self._lock:  # the checkpoints to be removed stay: one may be the only good one
                    self._queue = [(save, save.path) for save in saves[1:]]
            saves.pop(0).result()
        self._tidy()

    def _tidy(self, _: Any = None) -> None:
        """Forget durable saves, and remove the paths queued after them. The thread of a save that ends calls this."""
        with self._lock:
            while self._queue and ((save := self._queue[0][0]) is None or save.progress().phase == "done"):
                path = Path(self._queue[0][1])
                if save is None and (path.is_symlink() or path.is_file()):
                    path.unlink()
                elif save is None:
                    remove(str(path))
                self._queue.pop(0)


class RandomStates(Callback):
    """A callback of Lightning's ``Trainer`` that saves the random states of each process, which Lightning does not.

    With this and a stateful loader, a run that was killed within an epoch ends as if it had not been interrupted.

    Example:
        >>> from fastckpt.integrations.lightning import RandomStates
        >>> callbacks = [RandomStates()]  # Trainer(callbacks=callbacks)
    """

    #: The state loaded for this process, until training begins; and whether an epoch had ended.
    _own: Any = None
    _is_at_end = False

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Add the states of all processes to the checkpoint; Lightning calls it on each.

        Raises:
            RuntimeError: another process does not answer.
        """
        state = fastckpt.randomness().state_dict()
        name, keys, *rest = state["numpy"]
        # As a list and not an array, so that torch can also load the state from its own files.
        states: list[Any] = [{**state, "numpy": (name, keys.tolist(), *rest)}] * trainer.world_size
        if trainer.world_size > 1:
            if trainer.state.status == TrainerStatus.INTERRUPTED:
                return  # the other processes may not take part
            torch.distributed.all_gather_object(states, states[0])
        checkpoint[_RANDOM] = states

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Keep this process's state until training begins."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        states = checkpoint.get(_RANDOM, [])
        if len(states) != trainer.world_size:
            LOG.warning("fastckpt: random states are not restored: they were saved by %d processes", len(states))
            return
        self._own = states[trainer.global_rank]
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
        self._is_at_end = progress.get("is_last_batch", False)

    def setup(self, *_: Any, **__: Any) -> None:
        """Forget the states that an earlier run loaded."""
        self._own = None

    def on_fit_start(self, *_: Any) -> None:
        """Restore the state before loaders draw the order of an epoch."""
        if self._own is not None:
            fastckpt.randomness().load_state_dict(self._own)
        if self._is_at_end:
            self._own = None

    def on_train_start(self, *_: Any) -> None:
        """Restore the state again if the epoch has already begun, or now if the strategy has loaded it late."""
        self.on_fit_start()
        self._own = None
