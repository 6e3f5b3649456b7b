"""Lightning's checkpoints are written and read by fastckpt, in the background (docs/guides/lightning.md).

    Trainer(plugins=[fastckpt.integrations.lightning.CheckpointIO()])

``ModelCheckpoint`` and the program decide what is saved, when, and what goes.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID251 - Lightning's processes are torch's
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving as _saving
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerStatus

import fastckpt
from fastckpt._api import in_flight
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed
from fastckpt._paths import is_url

from ._directory import LOG, is_ours, remove
from ._random_states import RandomStates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CheckpointIO", "RandomStates", "install"]

_installed = Installed()
#: Saves under way at a time, unless the caller says: ``save_last`` saves twice at one step.
_IN_FLIGHT = 2
#: How Lightning names what it saves before Slurm requeues a job: it takes digits of hidden names for versions.
_REQUEUED = "hpc_ckpt_"


def install() -> Installation:
    """Have ``load_from_checkpoint`` of modules and data modules read checkpoints of fastckpt, too.

    :class:`CheckpointIO` does that by itself; this is for programs that only load.

    Returns:
        A context manager, which ends it; so does its ``uninstall``. Without either it lasts as long as the process.

    Example:
        >>> import fastckpt
        >>> with fastckpt.integrations.lightning.install():
        ...     pass  # Module.load_from_checkpoint("runs/epoch=3-step=400.ckpt")
    """
    ours = ((ModelCheckpoint, one.__name__, one) for one in (_save_checkpoint, _link_checkpoint))
    others = ((ModelCheckpoint, "file_exists", _file_exists), (Strategy, "save_checkpoint", _save_by_strategy))
    return _installed.begin({}, [(_saving, "pl_load", _load), *ours, *others])


def _plugin_of(trainer: Any) -> CheckpointIO | None:
    plugin = trainer.strategy.checkpoint_io
    return plugin if isinstance(plugin, CheckpointIO) else None


def _load(_: Any, theirs: Callable[..., Any], path: Any, map_location: Any = None, **more: Any) -> Any:
    if isinstance(path, (str, os.PathLike)) and not is_url(os.fspath(path)):
        in_flight.wait_for_paths(_absolute(path))
    return _read(path, map_location, "auto") if is_ours(path) else theirs(path, map_location, **more)


def _save_checkpoint(_: Any, theirs: Callable[..., Any], checkpoints: Any, trainer: Any, filepath: str) -> None:
    """What ``ModelCheckpoint`` saves while training goes on is saved in the background."""
    plugin = _plugin_of(trainer)
    if plugin is None or trainer.state.status == TrainerStatus.INTERRUPTED:
        theirs(checkpoints, trainer, filepath)
        return
    if any(getattr(logger, "_log_model", False) for logger in trainer.loggers):
        LOG.warning("fastckpt: loggers upload files alone, and none of these checkpoints")
    with plugin._in_background():
        theirs(checkpoints, trainer, filepath)


def _file_exists(_: Any, theirs: Callable[..., Any], checkpoints: Any, filepath: str, trainer: Any) -> bool:
    """What is on its way exists, and what is to be removed does not."""
    plugin = _plugin_of(trainer)
    if plugin is None:
        return bool(theirs(checkpoints, filepath, trainer))
    there = trainer.is_global_zero and plugin._is_there(filepath, checkpoints._fs.exists)
    return bool(trainer.strategy.reduce_boolean_decision(there, all=False))


def _link_checkpoint(_: Any, theirs: Callable[..., Any], trainer: Any, filepath: str, linkpath: str) -> None:
    """A link is to a checkpoint that is there."""
    plugin = _plugin_of(trainer)
    if plugin is not None:
        plugin.teardown()
    theirs(trainer, filepath, linkpath)


def _save_by_strategy(
    _: Any, theirs: Callable[..., Any], strategy: Any, checkpoint: Any, filepath: Any, storage_options: Any = None
) -> None:
    """Strategies that read files of torch alone write such files."""
    if isinstance(strategy, (FSDPStrategy, ModelParallelStrategy)) and isinstance(strategy.checkpoint_io, CheckpointIO):
        if strategy.is_global_zero:
            TorchCheckpointIO.save_checkpoint(strategy.checkpoint_io, checkpoint, filepath, storage_options)
    else:
        theirs(strategy, checkpoint, filepath, storage_options)


def _read(path: Any, map_location: Any, io: Any) -> Any:
    """The state in a checkpoint; on the host, if functions or dicts say where tensors go."""
    named = isinstance(map_location, (str, torch.device))
    # A save has warned of classes that come back as plain values.
    plain = fastckpt.Registry(undeclared="plain")
    return fastckpt.load(path, device=str(map_location) if named else None, registry=plain, io=io)


def _absolute(path: Any) -> str:
    return str(os.path.abspath(path))  # noqa: PTH100 - as the handle of a save has it


class CheckpointIO(TorchCheckpointIO):
    """A plugin of Lightning's ``Trainer`` and ``Fabric``: each checkpoint is a directory of fastckpt.

    What ``ModelCheckpoint`` saves while training goes on is saved in the background: training stands until the state
    was copied to the host, which takes no memory of the device. All else (``trainer.save_checkpoint``, ``Fabric``) is
    there when the call returns. A checkpoint is there whole and durable, or not at all; one that Lightning removes goes
    after what was saved before is durable. Files of torch and URLs are read and written as without the plugin. With the
    strategies FSDP and ModelParallel, Lightning writes files of torch, or goes by torch.distributed.checkpoint
    (:func:`fastckpt.dcp.install`). It is not to be wrapped in Lightning's ``AsyncCheckpointIO``.

    Args:
        io: how bytes move: a :class:`fastckpt.IO`, or the name of an engine. ``max_in_flight`` is 2 unless it is an
            ``IO``.
        background: whether saves return before they are durable. The end of ``fit`` waits for them.

    Raises:
        TypeError: ``io`` is neither.
        ValueError: ``io`` names an unknown engine.

    Example:
        >>> from fastckpt.integrations.lightning import CheckpointIO
        >>> plugins = [CheckpointIO(io="buffered")]  # Trainer(plugins=plugins)
    """

    def __init__(self, *, io: Any = "auto", background: bool = True) -> None:
        how = check_io("CheckpointIO", io)
        self.__setstate__((how if how is io else replace(how, max_in_flight=_IN_FLIGHT), background))

    def __getstate__(self) -> tuple[fastckpt.IO, bool]:
        return self._io, self._background

    def __setstate__(self, state: tuple[fastckpt.IO, bool]) -> None:
        self._io, self._background = state
        self._behind = False
        self._saves: list[Any] = []
        # Paths to remove, each with the saves before it. A save that ends removes some, in its own thread.
        self._beyond: list[tuple[list[Any], str]] = []
        self._lock = RLock()
        install()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a checkpoint; Lightning calls it on the first process.

        Args:
            checkpoint: the state.
            path: its directory. A file of torch or a link that is there is replaced when the checkpoint is durable.
            storage_options: None.

        Raises:
            OSError: the storage failed, at an earlier save, too.
            TypeError: there are ``storage_options``.
            UnsupportedTypeError: the state holds an object that is no tensor and no plain value.
        """
        if storage_options is not None or is_url(str(path)) or Path(path).name.startswith(_REQUEUED):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        self._settle()
        target = _absolute(path)
        with self._lock:
            self._beyond = [(saves, beyond) for saves, beyond in self._beyond if beyond != target]
        how: dict[str, Any] = {"io": self._io}
        if checkpoint.get("state_dict"):
            how["files"] = fastckpt.Files(model_key="state_dict")
        in_the_way = Path(target).is_symlink() or Path(target).is_file()
        # Lightning puts links and lists of models beside the first checkpoint, and expects its directory to be there.
        if self._behind and self._background and Path(target).parent.is_dir() and not in_the_way:
            save = fastckpt.save_async(checkpoint, target, **how)
            save.add_done_callback(self._tidy)
            self._saves.append(save)
            return
        self._settle(wait=True)
        if not in_the_way:
            fastckpt.save(checkpoint, target, **how)
            return
        # Under a name that Lightning, too, takes for the last one, until the other one has gone.
        new = Path(target).with_suffix(f".new{Path(target).suffix}")
        fastckpt.save(checkpoint, new, **how)
        Path(target).unlink()
        new.rename(target)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: FBT001 - Lightning's interface
        **more: Any,
    ) -> dict[str, Any]:
        """Load a checkpoint.

        Args:
            path: its directory, or a file of torch.
            map_location: where tensors go: a device or its name; otherwise they stay on the host.
            weights_only: for files of torch; nothing of a checkpoint of fastckpt is executed.
            more: for files of torch.

        Returns:
            The state.

        Raises:
            CorruptCheckpointError: it is damaged.
            FileNotFoundError: there is none.
            OSError: the storage failed, at an earlier save, too.
        """
        self._settle(wait=True)
        if is_ours(path):
            loaded: dict[str, Any] = _read(path, map_location, self._io)
        else:
            given = {"map_location": map_location, "weights_only": weights_only}
            more |= {name: value for name, value in given.items() if value is not None}
            loaded = super().load_checkpoint(path, **more)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint once all that was saved before is durable.

        Args:
            path: its directory, or a file.

        Raises:
            OSError: the storage failed.
        """
        if is_url(str(path)):
            super().remove_checkpoint(path)
        else:
            with self._lock:
                self._beyond.append(([*self._saves], _absolute(path)))
            self._tidy()

    def teardown(self) -> None:
        """Wait until all saves are durable.

        Raises:
            OSError: the storage failed.
        """
        self._settle(wait=True)

    @contextmanager
    def _in_background(self) -> Iterator[None]:
        """Inside, saves are in the background."""
        self._behind = True
        try:
            yield
        finally:
            self._behind = False

    def _is_there(self, path: str, exists: Callable[[str], bool]) -> bool:
        """Whether a path would exist without a background."""
        if is_url(path):
            return exists(path)
        target = _absolute(path)
        with self._lock:
            if any(beyond == target for _, beyond in self._beyond):
                return False
        return exists(path) or any(save.path == target for save in self._saves)

    def _settle(self, *, wait: bool = False) -> None:
        """Raise what a save raised that has ended."""
        # A process that was forked has none.
        self._saves = [save for save in self._saves if save.process == os.getpid()]
        while self._saves and (wait or self._saves[0].done()):
            self._saves.pop(0).result()
        self._tidy()

    def _tidy(self, _: Any = None) -> None:
        """Remove what may go. What was to go after a save that failed stays: it may be the only one."""
        with self._lock:
            waiting = []
            for saves, path in self._beyond:
                if not all(save.done() for save in saves):
                    waiting.append((saves, path))
                elif all(save.progress().phase == "done" for save in saves):
                    _remove(Path(path))
            self._beyond = waiting


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        remove(str(path))


def __dir__() -> list[str]:
    return sorted(__all__)
