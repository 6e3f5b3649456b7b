"""Lightning's checkpoints are written and read by fastckpt, in the background (docs/guides/lightning.md).

    Trainer(plugins=[fastckpt.integrations.lightning.CheckpointIO()])

``ModelCheckpoint`` and the program decide what is saved, when, and what goes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID251 - Lightning's processes are torch's
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core import saving as _saving

import fastckpt
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed
from fastckpt._paths import is_url

from ._directory import LOG, is_ours, remove

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CheckpointIO", "RandomStates", "install"]

_installed = Installed()
#: Saves under way at a time: ``save_last`` saves twice at one step.
_IN_FLIGHT = 2
_RANDOM = "fastckpt.random"


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
    return _installed.begin({}, [(_saving, "pl_load", _load)])


def _load(_: Any, theirs: Callable[..., Any], path: Any, map_location: Any = None, **more: Any) -> Any:
    return _read(path, map_location) if is_ours(path) else theirs(path, map_location, **more)


def _read(path: Any, map_location: Any) -> Any:
    """The state in a checkpoint; on the host, if functions or dicts say where tensors go."""
    named = isinstance(map_location, (str, torch.device))
    return fastckpt.load(path, device=str(map_location) if named else None)


class CheckpointIO(TorchCheckpointIO):
    """A plugin of Lightning's ``Trainer`` and ``Fabric``: each checkpoint is a directory of fastckpt.

    A save returns once the state was copied to the host: training goes on, and no memory of the device is needed. A
    checkpoint is there whole and durable, or not at all. One that Lightning removes goes after what was saved before is
    durable. Loads wait for saves. Files of torch and URLs are read and written as without the plugin. With the
    strategies FSDP and ModelParallel, Lightning goes by torch.distributed.checkpoint: :func:`fastckpt.dcp.install`.

    Args:
        io: how bytes move: a :class:`fastckpt.IO`, or the name of an engine.
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
        self._io = replace(how, max_in_flight=max(how.max_in_flight, _IN_FLIGHT))
        self._background = background
        self._saves: list[Any] = []
        # Paths to remove, each with the saves before it. A save that ends removes some, in its own thread.
        self._beyond: list[tuple[list[Any], str]] = []
        self._lock = RLock()
        install()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a checkpoint; Lightning calls it on the first process.

        Args:
            checkpoint: the state.
            path: its directory. A file that is there, which torch wrote, gets ``.torch`` before the suffix of its name,
                until the new checkpoint is durable.
            storage_options: None.

        Raises:
            OSError: the storage failed at an earlier save.
            TypeError: there are ``storage_options``.
            UnsupportedTypeError: the state holds an object that is no tensor and no plain value.
        """
        if storage_options is not None or is_url(str(path)):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        self._settle()
        path = Path(path)
        with self._lock:
            self._beyond = [(saves, beyond) for saves, beyond in self._beyond if beyond != str(path)]
        aside = None
        if path.is_symlink():  # save_last="link" of an earlier run
            path.unlink()
        elif path.is_file():
            aside = path.rename(path.with_suffix(f".torch{path.suffix}"))
        files = fastckpt.Files(model_key="state_dict") if checkpoint.get("state_dict") else None
        save = fastckpt.save_async(checkpoint, path, files=files, io=self._io)
        self._saves.append(save)
        save.add_done_callback(self._tidy)
        if aside is not None:
            self.remove_checkpoint(aside)
        # Lightning puts links and lists of models beside the first checkpoint, and expects its directory to be there.
        self._settle(wait=not self._background or not path.parent.is_dir())

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: FBT001 - Lightning's interface
        """Load a checkpoint.

        Args:
            path: its directory, or a file of torch.
            map_location: where tensors go: a device or its name; otherwise they stay on the host.
            weights_only: for files of torch; nothing of a checkpoint of fastckpt is executed.

        Returns:
            The state.

        Raises:
            CorruptCheckpointError: it is damaged.
            FileNotFoundError: there is none.
            OSError: the storage failed, at an earlier save, too.
        """
        self._settle(wait=True)
        if is_ours(path):
            loaded: dict[str, Any] = _read(path, map_location)
        else:
            loaded = super().load_checkpoint(path, map_location, weights_only)
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
                self._beyond.append(([*self._saves], str(path)))
            self._tidy()

    def teardown(self) -> None:
        """Wait until all saves are durable.

        Raises:
            OSError: the storage failed.
        """
        self._settle(wait=True)

    def _settle(self, *, wait: bool = False) -> None:
        """Raise what a save raised that has ended."""
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


class RandomStates(Callback):
    """A callback of Lightning's ``Trainer`` that saves what each process draws next, which Lightning does not.

    With it and a loader that has a state, a run that was killed in the middle of an epoch ends as one that was not.

    Example:
        >>> from fastckpt.integrations.lightning import RandomStates
        >>> callbacks = [RandomStates()]  # Trainer(callbacks=callbacks)
    """

    def __init__(self) -> None:
        self._own: Any = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Add the states of all processes; Lightning calls it on each.

        Args:
            trainer: the ``Trainer``.
            pl_module: its module.
            checkpoint: what is saved.

        Raises:
            RuntimeError: another process does not answer.
        """
        state = fastckpt.randomness().state_dict()
        # Without arrays, torch loads it from a file of its own, too.
        name, keys, *rest = state["numpy"]
        states = [{**state, "numpy": (name, torch.from_numpy(keys.astype("int64")), *rest)}]
        if trainer.world_size > 1:
            gathered: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(gathered, states[0])
            states = gathered
        checkpoint[_RANDOM] = states

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Keep this process's state until training begins.

        Args:
            trainer: the ``Trainer``.
            pl_module: its module.
            checkpoint: what was loaded.
        """
        states = checkpoint.get(_RANDOM, [])
        if len(states) == trainer.world_size:
            self._own = states[trainer.global_rank]
        else:
            LOG.warning(
                "fastckpt: random states are not restored: the checkpoint has those of %d processes, and there are %d",
                len(states),
                trainer.world_size,
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Restore it.

        Args:
            trainer: the ``Trainer``.
            pl_module: its module.
        """
        if self._own is not None:
            name, keys, *rest = self._own["numpy"]
            state = {**self._own, "numpy": (name, keys.numpy().astype("uint32"), *rest)}
            fastckpt.randomness().load_state_dict(state)
            self._own = None


def __dir__() -> list[str]:
    return sorted(__all__)
