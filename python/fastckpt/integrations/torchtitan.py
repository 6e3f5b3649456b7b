"""torchtitan saves and resumes through fastckpt, but still decides when to save (docs/guides/torchtitan.md).

A run has ``checkpoint=FastckptManager.Config(enable=True, interval=500)`` in its configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast

from torchtitan.components.checkpointer.base import DATALOADER, MODEL
from torchtitan.components.checkpointer.dcp import CheckpointManager

import fastckpt
from fastckpt import distributed
from fastckpt._files import TORCH_METADATA
from fastckpt._manager.restore import Lost, attempt
from fastckpt._paths import is_url
from fastckpt.exceptions import CorruptCheckpointError, NotACheckpointError

from ._directory import LOG, clear, is_ours
from ._processes import first_that_loads, own_dtypes

__all__ = ["FastckptManager"]

#: The member of metadata that marks checkpoints of this integration, and its content.
_MARK, _MODEL_ONLY, _HUGGING_FACE = "torchtitan", "model_only", "hugging_face"


class FastckptManager(CheckpointManager):  # type: ignore[misc]
    """A checkpoint manager of torchtitan that keeps its checkpoints with a :class:`fastckpt.Manager`.

    Its ``Config`` has the fields of torchtitan's own manager, with the same meaning. ``async_mode`` differs, and
    ``hugging_face`` is new:

    - ``async_mode``: training continues once the state is copied (``"async"``, the default); at once, but the next
      optimizer step waits for the copy (``"async_with_pinned_mem"``); or once all is durable (``"disabled"``).
    - ``hugging_face``: whether tensors of the model have Hugging Face's names and layout in each checkpoint, if
      torchtitan's adapter for the model keeps all of them; otherwise there is a warning.

    A run resumes from the newest checkpoint that verifies and has more than a model. ``initial_load_path`` may be a
    checkpoint of this manager, of torch.distributed.checkpoint, or of Hugging Face.

    Args:
        config: its ``Config``.
        parts: as for torchtitan's own manager.

    Raises:
        ValueError: the folder is a URL; or ``last_save_in_hf`` without an adapter.

    Example:
        >>> from fastckpt.integrations.torchtitan import FastckptManager
        >>> checkpoint = FastckptManager.Config(enable=True, interval=500)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The fields of torchtitan's own manager, and ``hugging_face``."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """Whether training continues while a checkpoint is written."""

        hugging_face: bool = True
        """Whether tensors of the model have Hugging Face's names and layout, if an adapter keeps all of them."""

    def __init__(self, config: Config, **parts: Any) -> None:
        # The base class is set up without its parts for asynchronous modes and removals.
        super().__init__(replace(cast("Any", config), async_mode="disabled", keep_latest_k=0), **parts)
        if not self.enable:
            return
        self.keep_latest_k = config.keep_latest_k
        self._wants_hugging_face = config.hugging_face
        self._manager = fastckpt.Manager(
            self.folder,
            ranks=distributed.Ranks(on_difference="warn"),
            name="step-{step}",
            keep=config.keep_latest_k or None,
            async_save=config.async_mode != "disabled",
            read_only=self.load_only,
            save_options={
                "io": fastckpt.IO(lazy=config.async_mode == "async_with_pinned_mem"),
                "files": fastckpt.Files(model_key=MODEL),
            },
        )
        self._ranks = self._manager._ranks

    def __del__(self) -> None:
        """Do nothing: a finalizer must not wait for other ranks."""

    def _close(self) -> None:
        # torchtitan also closes the manager in an exception handler, where the other ranks may not come.
        self._manager.__exit__(*sys.exc_info())

    # Saving.

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 - torchtitan's interface
        if not self._should_save(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
        model_only = last_step and self.last_save_model_only
        hugging_face = (model_only and self.last_save_in_hf) or self._adapts
        state = self._state([MODEL] if model_only else self._parts(), hugging_face=hugging_face, exports=model_only)
        if DATALOADER in state:
            state[DATALOADER] = {key: state[DATALOADER][key] for key in self._loader_keys if key in state[DATALOADER]}
        if self._ranks.leads:  # a save of torchtitan's own manager may have been killed
            clear(self._manager.path(curr_step))
        self.save_future: Any = self._manager.save(
            curr_step,
            state,
            force=True,
            metadata={_MARK: {_MODEL_ONLY: model_only, _HUGGING_FACE: hugging_face}},
            per_rank=None if model_only else {"random": fastckpt.randomness()},
        )
        if last_step:
            self.maybe_wait_for_saving()
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: code that changes the state waits for the copy."""

    def _wait_for_saving(self) -> None:
        self._manager.wait()
        self.save_future = None

    @cached_property
    def _loader_keys(self) -> list[str]:
        """The keys of the loader's state that this rank saves.

        Pipeline stages share the key of one loader, but each has its own value, with a random number of its process.
        """
        told = self._ranks.each(sorted(self.states[DATALOADER].state_dict()))
        return [key for key in told[self._ranks.rank] if not any(key in keys for keys in told[: self._ranks.rank])]

    # Loading.

    def _load(self, step: int = -1) -> bool:
        candidates = self._ranks.first("load", partial(self._candidates, step))
        load = partial(first_that_loads, candidates, self._load_one, self._ranks, self._manager.path)
        return load() if candidates else self._load_theirs(step)

    def _load_theirs(self, step: int) -> bool:
        """Load a checkpoint that torchtitan's own manager wrote, perhaps while fastckpt was installed below it."""
        with fastckpt.dcp.install():
            return bool(super()._load(step))

    def _load_one(self, step: int) -> bool:
        path = self._manager.path(step)
        mark = self._ranks.first("load: kind", partial(_mark_of, path))
        if mark is None:
            return self._load_theirs(step)
        model_only, restore = step == 0, partial(self._manager.restore, step=step)
        wanted = self._states_to_load(model_only)
        found = self._fill(wanted, path, restore, hugging_face=mark[_HUGGING_FACE], casts=model_only)
        if found.per_rank is not None and not model_only:
            fastckpt.randomness().load_state_dict(found.per_rank["random"])
        return True

    def _find_load_step(self, folder: str = "") -> int:  # noqa: ARG002 - torchtitan's interface
        return -1  # no step, because `_candidates` has found all checkpoints

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:  # noqa: FBT001 - torchtitan's interface
        """Load the initial checkpoint of a run, torchtitan's or this manager's; torchtitan calls it.

        Args: state_dict: the states to load; checkpoint_id: the directory; from_hf: whether its files are Hugging
        Face's; from_quantized: whether these are quantised.

        Raises:
            CheckpointError: the checkpoint is damaged, or lacks a tensor.
        """
        is_theirs, find = from_hf or is_url(checkpoint_id), partial(_mark_of, checkpoint_id)
        if is_theirs or (mark := self._ranks.first("load: mark", find)) is None:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load = partial(distributed.load, checkpoint_id)
        self._fill(state_dict, checkpoint_id, load, hugging_face=mark[_HUGGING_FACE], casts=True)

    def _candidates(self, step: int) -> list[int]:
        """The steps that may be loaded, the best first.

        This manager's checkpoints on the branch that saved last; torchtitan's own; and a seed if there is no other.
        """
        if step != -1:
            return [step]
        manager, steps = self._manager, self._manager.steps()
        marks = {number: mark for number in steps if (mark := _mark_of(manager.path(number))) is not None}
        branch = manager._catalogue.own(manager._catalogue.entries(marks))
        whole = [number for number in branch if number > 0 and not marks[number][_MODEL_ONLY]]
        theirs = [one for one in steps if one not in marks and Path(manager.path(one), TORCH_METADATA).is_file()]
        found = whole + theirs
        if not found and marks.keys() - {0}:
            raise ValueError(
                f"load: {manager.path(max(marks))} is the end of a run, and holds only the model: give it as "
                "initial_load_path of a run with another folder"
            )
        seed = [0] if 0 in marks and not theirs else []
        if not found and not seed and any(is_ours(manager.path(number)) for number in steps):
            raise CorruptCheckpointError(
                f"load: {manager.directory}: no checkpoint can be loaded (to start anew, move them all away)"
            )
        return sorted(found, reverse=True) + seed

    # States.

    @cached_property
    def _adapts(self) -> bool:
        """Whether tensors have Hugging Face's names and layout: only if the adapter keeps all of them on all ranks."""
        if self.sd_adapter is None or not self._wants_hugging_face:
            return False
        tried = attempt(self._ranks, "sd_adapter", self._try_adapter)
        if isinstance(tried, Lost) and self._ranks.leads:
            text = "fastckpt: checkpoints use torchtitan's tensor names: Hugging Face's adapter fails: %s: %s"
            first = tried.failures.listed[0]
            LOG.warning(text, first.kind, first.why)
        return not isinstance(tried, Lost)

    def _try_adapter(self) -> None:
        """Convert the model there and back, because some adapters support only some names or shardings."""
        state = self.states[MODEL].state_dict()
        back = self.sd_adapter.from_hf(self.sd_adapter.to_hf(state))
        if lost := sorted(state.keys() - back.keys()):
            raise ValueError(f"it drops {len(lost)} of the names, such as {lost[0]}")

    def _parts(self) -> list[str]:
        """The keys of the saved state."""
        return [key for key, value in self.states.items() if hasattr(value, "state_dict")]

    def _state(self, keys: Collection[str], *, hugging_face: bool, exports: bool = False) -> dict[str, Any]:
        """The states under these keys; the model's tensors are cast if it ``exports`` them."""
        state = {key: self.states[key].state_dict() for key in keys}
        if exports:
            floats = {name: one for name, one in state[MODEL].items() if getattr(one, "is_floating_point", bool)()}
            state[MODEL] |= {name: one.to(self.export_dtype) for name, one in floats.items()}
        if hugging_face and MODEL in state:
            state[MODEL] = self.sd_adapter.to_hf(state[MODEL])
        return state

    def _fill(self, wanted: Collection[str], path: str, load: Any, *, hugging_face: bool, casts: bool) -> Any:
        """Make ``load`` fill the model, and the other ``wanted`` parts of a checkpoint; returns its result.

        The model's tensors may have other dtypes in the checkpoint if it ``casts``.
        """
        keys = [key for key in self._parts() if key == MODEL or key in wanted]
        state = self._state([key for key in keys if key != DATALOADER], hugging_face=hugging_face)
        found = load(into=state, keys=[*state], dtype=own_dtypes({MODEL: state[MODEL]}) if casts else None)
        if DATALOADER in keys:  # each rank looks for its own key in the state
            state |= distributed.load(path, keys=DATALOADER)
        if hugging_face:
            state[MODEL] = self.sd_adapter.from_hf(state[MODEL])
        for key in keys:
            self.states[key].load_state_dict(state[key])
        return found


def _mark_of(path: str) -> Mapping[str, bool] | None:
    """The mark of this manager in a checkpoint; None if another program wrote it, or if the mark is unreadable."""
    try:
        with fastckpt.open(path) as checkpoint:
            mark = (checkpoint.metadata or {}).get(_MARK)
    except CorruptCheckpointError as error:
        LOG.warning("fastckpt: %s cannot be loaded and is skipped: %s", path, error)
        return None
    except (NotACheckpointError, FileNotFoundError):
        return None
    return mark if isinstance(mark, Mapping) else None
