"""transformers' Trainer saves and resumes through fastckpt; it decides itself when it saves, and what it keeps.

    fastckpt.integrations.transformers.install()
    trainer.train(resume_from_checkpoint=True)

Each ``checkpoint-N`` is one checkpoint, and a model for ``from_pretrained`` (docs/guides/trainer.md).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from transformers import trainer as _trainer
from transformers import trainer_utils as _utils
from transformers.trainer_callback import ExportableState
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import fastckpt
from fastckpt import distributed
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed

from ._directory import LOG, is_ours, newest_first, newest_that_verifies
from ._processes import crew_of
from ._trainer_saves import SAVING, begin, model_of, run_of, stop, training_of, unwrapped

__all__ = ["install"]

_installed = Installed()


def install(*, io: Any = "auto", background: bool = True) -> Installation:
    """Have every Trainer of this program save and resume through fastckpt.

    All that the Trainer decides stays (``save_strategy``, ``load_best_model_at_end``, ``save_total_limit``,
    ``enable_jit_checkpoint``, ``push_to_hub``). ``train(resume_from_checkpoint=True)`` goes on from the newest
    checkpoint that verifies, and begins where there is none. States of callbacks (``ExportableState``) come back, too,
    whatever ``restore_callback_states_from_checkpoint`` says. Ranks save together, with DDP and FSDP2. Of a PEFT model
    the adapter is saved. With DeepSpeed, FSDP1, XLA, SageMaker, adapters that are not called default,
    ``save_on_each_node``, and subclasses that load in a way of their own, the Trainer saves itself, and a warning says
    so.

    Args:
        io: how bytes move: a :class:`fastckpt.IO`, or the name of an engine.
        background: whether training goes on once the state was copied (:func:`fastckpt.save_async`), or waits until the
            checkpoint is durable. It waits all the same for what reads the checkpoint: ``push_to_hub``, and callbacks
            that have an ``on_save``.

    Returns:
        A context manager, which ends it; so does its ``uninstall``. Without either it lasts as long as the process.

    Raises:
        TypeError: ``io`` is neither.
        ValueError: ``io`` names an unknown engine.

    Example:
        >>> import fastckpt
        >>> with fastckpt.integrations.transformers.install(io=fastckpt.IO(bandwidth_limit="1GB/s")):
        ...     pass  # trainer.train(resume_from_checkpoint=True)
    """
    return _installed.begin({"io": check_io("install", io), "background": background}, _OURS)


def _candidates(directory: str) -> list[str]:
    """The checkpoints that a Trainer can go on from, the newest first; damaged ones may be among them."""
    return newest_first(Path(directory).glob(f"{_utils.PREFIX_CHECKPOINT_DIR}-*/{_trainer.TRAINER_STATE_NAME}"))


def newest_of(trainer: Any) -> str | None:
    """The newest checkpoint of a Trainer that verifies; all ranks call it."""
    return crew_of(trainer.accelerator).first(
        "resume", lambda: newest_that_verifies(_candidates(trainer.args.output_dir))
    )


def _asks_for_newest(trainer: Any, given: Any) -> bool:
    """Whether ``train`` was to find out itself where to go on.

    A command line can give text alone. A program that takes the last directory may come upon that of a killed save.
    """
    if not isinstance(given, (str, Path)):
        return given is True
    path = Path(given)
    begun = path.parent == Path(trainer.args.output_dir) and path.name.startswith(_utils.PREFIX_CHECKPOINT_DIR)
    if begun and path.is_dir() and not (path / _trainer.TRAINER_STATE_NAME).exists():
        LOG.warning("fastckpt: %s is not whole, and the newest checkpoint that is undamaged is taken", path)
        return True
    return str(given).lower() == "true" and not path.exists()


def _last_checkpoint(_: Any, __: Any, folder: str) -> str | None:
    """The newest whose files are there in full; what is in them is verified when it is read."""
    damaged = {Path(one.path) for one in fastckpt.list(folder) if one.damage is not None}
    return next((path for path in _candidates(folder) if Path(path).absolute() not in damaged), None)


def _train(_: Any, theirs: Any, trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **more: Any) -> Any:
    run = begin(trainer)
    if _asks_for_newest(trainer, resume_from_checkpoint):
        resume_from_checkpoint = newest_of(trainer)
    if not is_ours(resume_from_checkpoint):
        return theirs(trainer, resume_from_checkpoint, *args, **more)
    run.resumed = resume_from_checkpoint
    with fastckpt.open(run.resumed) as checkpoint:
        run.ended = bool((checkpoint.metadata or {}).get("ended"))
    # Also in place of a subclass's own (Axolotl's), which looks for the Trainer's file.
    trainer._load_rng_state = partial(_restore_counted, trainer)
    try:
        return theirs(trainer, run.resumed, *args, **more)
    finally:
        del trainer._load_rng_state


def _run_epoch(_: Any, theirs: Any, trainer: Any, *args: Any, **more: Any) -> Any:
    if trainer.state.global_step < trainer.state.max_steps and not run_of(trainer).ended:
        return theirs(trainer, *args, **more)
    trainer.control.should_training_stop = True
    return None


def _load_callback_state(_: Any, theirs: Any, trainer: Any) -> None:
    if run_of(trainer).resumed is None:
        theirs(trainer)
        return
    saved = trainer.state.stateful_callbacks.items()
    states = {name: list(state) if isinstance(state, list) else [state] for name, state in saved}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState) and (left := states.get(type(callback).__name__)):
            state = left.pop(0)
            given = state.get("args", {}) if trainer.args.restore_callback_states_from_checkpoint else {}
            for name, value in {**given, **state.get("attributes", {})}.items():
                setattr(callback, name, value)


def _load_from_checkpoint(_: Any, theirs: Any, trainer: Any, path: str, model: Any = None) -> None:
    if not is_ours(path):
        theirs(trainer, path, model)
        return
    part = model_of(trainer, model)
    distributed.load(path, into=part, keys=list(part))
    if "adapter_model" in part:
        from peft import set_peft_model_state_dict  # noqa: PLC0415 - where it is in use

        # Some adapters give copies of their tensors.
        set_peft_model_state_dict(unwrapped(trainer, model), part["adapter_model"])


def _load_optimizer_and_scheduler(_: Any, theirs: Any, trainer: Any, path: str | None) -> None:
    if path is None or not is_ours(path):
        theirs(trainer, path)
        return
    with fastckpt.open(path) as checkpoint:
        saved = checkpoint.structure
    if "optimizer" in saved:
        parts = training_of(trainer)
        distributed.load(path, into=parts, keys=list(parts))
    else:
        LOG.warning("fastckpt: %s has the model only: the optimizer and the schedule begin anew", path)


def _restore_counted(trainer: Any, path: str) -> None:
    """Restore random states, and what the Trainer adds up."""
    try:
        own = distributed.load_per_rank(path)
        fastckpt.randomness().load_state_dict(own["random"])
    except ValueError as error:
        LOG.warning("fastckpt: random states of ranks are not restored: %s", error)
        own = distributed.load_per_rank(path, rank=0)
    for name, value in own["counted"].items():
        device = getattr(getattr(trainer, name, None), "device", None)
        setattr(trainer, name, value if device is None else value.to(device))
    run_of(trainer).restored = True


def _load_best_model(_: Any, theirs: Any, trainer: Any) -> None:
    path = trainer.state.best_model_checkpoint
    trainer._load_from_checkpoint(path, trainer.model) if is_ours(path) else theirs(trainer)


_RESUMING = (_run_epoch, _load_callback_state, _load_from_checkpoint, _load_optimizer_and_scheduler)
#: What is replaced, and by what.
_OURS: list[tuple[Any, str, Any]] = [
    (_trainer.Trainer, "train", _train),
    *((_trainer.Trainer, ours.__name__, ours) for ours in (*SAVING, *_RESUMING, _load_best_model)),
    *((JITCheckpointCallback, name, stop) for name in ("on_step_end", "on_epoch_end")),
    # In the middle of a step there is nothing to save.
    *((JITCheckpointCallback, name, lambda *_, **__: None) for name in ("on_step_begin", "on_pre_optimizer_step")),
    *((module, "get_last_checkpoint", _last_checkpoint) for module in (_trainer, _utils)),
]


def __dir__() -> list[str]:
    return sorted(__all__)
