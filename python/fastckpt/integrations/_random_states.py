"""A callback of Lightning that saves and restores random states."""

from __future__ import annotations

from typing import Any

import torch  # noqa: TID251 - Lightning's processes are torch's
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

import fastckpt

from ._directory import LOG

_RANDOM = "fastckpt.random"


class RandomStates(Callback):
    """A callback of Lightning's ``Trainer`` that saves what each process draws next, which Lightning does not.

    With it and a loader that has a state, a run that was killed in the middle of an epoch ends as one that was not.

    Example:
        >>> from fastckpt.integrations.lightning import RandomStates
        >>> callbacks = [RandomStates()]  # Trainer(callbacks=callbacks)
    """

    def __init__(self) -> None:
        self._own: Any = None
        self._again = False

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
            if trainer.state.status == TrainerStatus.INTERRUPTED:
                return  # the other processes may not come
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
        if trainer.state.fn != TrainerFn.FITTING:
            return
        states = checkpoint.get(_RANDOM, [])
        if len(states) != trainer.world_size:
            LOG.warning(
                "fastckpt: random states are not restored: the checkpoint has those of %d processes, and there are %d",
                len(states),
                trainer.world_size,
            )
            return
        self._own = states[trainer.global_rank]
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
        self._again |= not progress.get("is_last_batch", False)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Forget what another run has loaded.

        Args:
            trainer: the ``Trainer``.
            pl_module: its module.
            stage: of Lightning.
        """
        self._own, self._again = None, False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Restore it before loaders draw the order of an epoch.

        Args:
            trainer: the ``Trainer``.
            pl_module: its module.
        """
        self._again |= self._own is None  # some strategies load later
        self._restore()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Restore it after that, where the epoch has begun already.

        Args:
            trainer: the ``Trainer``.
            pl_module: its module.
        """
        if self._again:
            self._restore()
        self._own = None

    def _restore(self) -> None:
        if self._own is not None:
            name, keys, *rest = self._own["numpy"]
            state = {**self._own, "numpy": (name, keys.numpy().astype("uint32"), *rest)}
            fastckpt.randomness().load_state_dict(state)
