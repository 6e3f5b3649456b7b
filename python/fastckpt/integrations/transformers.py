"""transformers' Trainer saves and resumes through fastckpt; it decides itself when it saves, and what it keeps.

    fastckpt.integrations.transformers.install()
    trainer.train(resume_from_checkpoint=True)

Each ``checkpoint-N`` is one checkpoint, and a model for ``from_pretrained`` (docs/guides/trainer.md).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]
from transformers import trainer as _trainer
from transformers import trainer_utils as _utils
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.utils.import_utils import is_sagemaker_mp_enabled, is_torch_xla_available

import fastckpt
from fastckpt import Files, distributed
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed

from ._directory import LOG, is_ours, keep, newest_first, newest_that_verifies

__all__ = ["install"]

_installed = Installed()
#: What the Trainer adds up for the next line of its log and for its result, and does not save itself.
_COUNTED = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")


class _Run:
    """One call of ``train``."""

    #: Its last save, a PendingSave; and what removes older ones once that is durable.
    pending: Any = None
    rotate: Any = None
    resumed: Any = None  # the checkpoint that it goes on from, if fastckpt wrote that
    #: What lies beside the weights, the same in each of its checkpoints.
    files: dict[str, bytes] | None = None
    stopped = False  # by SIGTERM


_runs: WeakKeyDictionary[Any, _Run] = WeakKeyDictionary()


def install(*, io: Any = "auto", background: bool = True) -> Installation:
    """Have every Trainer of this program save and resume through fastckpt.

    All that the Trainer decides stays (``save_strategy``, ``load_best_model_at_end``, ``save_total_limit``,
    ``enable_jit_checkpoint``, ``push_to_hub``). ``train(resume_from_checkpoint=True)`` goes on from the newest
    checkpoint that verifies, and begins where there is none. States of callbacks (``ExportableState``) come back, too,
    whatever ``restore_callback_states_from_checkpoint`` says. Ranks save together, with DDP and FSDP2. With DeepSpeed,
    FSDP1, XLA, SageMaker, PEFT and ``save_on_each_node``, the Trainer saves itself, and a warning says so.

    Args:
        io: how bytes move: a :class:`fastckpt.IO`, or the name of an engine.
        background: whether training goes on once the state was copied (:func:`fastckpt.save_async`), or waits until the
            checkpoint is durable. It waits all the same for what reads the checkpoint: ``push_to_hub``, and callbacks
            that have an ``on_save``.

    Returns:
        A context manager, which ends it; so does its ``uninstall``. Without either it lasts as long as the process.

    Raises:
        TypeError: ``io`` is neither.
        ValueError: there is no such engine.

    Example:
        >>> import fastckpt
        >>> with fastckpt.integrations.transformers.install(io=fastckpt.IO(bandwidth_limit="1GB/s")):
        ...     pass  # trainer.train(resume_from_checkpoint=True)
    """
    options = {"io": check_io("install", io), "background": background}
    for owner, name, ours in _OURS:
        _installed.replace(owner, name, ours)
    return _installed.begin(options)


def _run_of(trainer: Any) -> _Run:
    return _runs.setdefault(trainer, _Run())


def _candidates(directory: str) -> list[str]:
    """The checkpoints that a Trainer can go on from, the newest first; damaged ones may be among them."""
    return newest_first(Path(directory).glob(f"{_utils.PREFIX_CHECKPOINT_DIR}-*/{_trainer.TRAINER_STATE_NAME}"))


def _last_checkpoint(_: Any, __: Any, folder: str) -> str | None:
    """The newest whose files are there in full; what is in them is verified when it is read."""
    damaged = {Path(one.path) for one in fastckpt.list(folder) if one.damage is not None}
    return next((path for path in _candidates(folder) if Path(path).absolute() not in damaged), None)


def _train(_: Any, theirs: Any, trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **more: Any) -> Any:
    _finish(trainer)
    run = _runs[trainer] = _Run()
    if resume_from_checkpoint is True:
        first = trainer.is_world_process_zero()
        found = [newest_that_verifies(_candidates(trainer.args.output_dir)) if first else None]
        (resume_from_checkpoint,) = broadcast_object_list(found)
    if is_ours(resume_from_checkpoint):
        run.resumed = resume_from_checkpoint
    return theirs(trainer, resume_from_checkpoint, *args, **more)


def _left_to_trainer(trainer: Any) -> str | None:
    """Why the Trainer saves this state itself, or None."""
    reasons = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP1": trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1,
        "XLA": is_torch_xla_available(),
        "SageMaker": is_sagemaker_mp_enabled(),
        "PEFT": hasattr(trainer.model, "peft_config"),
        "save_on_each_node": trainer.args.save_on_each_node,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _model(trainer: Any, model: Any = None) -> Any:
    """The module that is saved and loaded."""
    return trainer.accelerator.unwrap_model(trainer.model if model is None else model, keep_torch_compile=False)


def _training(trainer: Any) -> dict[str, Any]:
    """What training needs beside the model."""
    optimizer, scaler = trainer.optimizer, trainer.accelerator.scaler
    parts = {"optimizer": getattr(optimizer, "optimizer", optimizer), "scheduler": trainer.lr_scheduler}
    return parts if scaler is None else {**parts, "scaler": scaler}


def _files(trainer: Any) -> dict[str, bytes | str]:
    """Configuration, tokenizer and whatever else lies beside the weights, and the state of the Trainer."""
    run = _run_of(trainer)
    if run.files is None:
        with tempfile.TemporaryDirectory() as there:
            trainer._save(there, state_dict={})  # all but the weights
            beside = (one for one in Path(there).iterdir() if one.is_file() and ".safetensors" not in one.name)
            run.files = {one.name: one.read_bytes() for one in beside}
    return {**run.files, _trainer.TRAINER_STATE_NAME: json.dumps(asdict(trainer.state), indent=2) + "\n"}


def _states_of_callbacks(trainer: Any) -> dict[str, Any]:
    """The states of callbacks that have one, by the names of their classes."""
    found: dict[str, list[Any]] = {}
    for one in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(one, ExportableState):
            found.setdefault(type(one).__name__, []).append(one.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def _save_checkpoint(options: dict[str, Any], theirs: Any, trainer: Any, model: Any, trial: Any) -> None:
    if (reason := _left_to_trainer(trainer)) is not None:
        LOG.warning("fastckpt: with %s, the Trainer saves as it does without fastckpt", reason)
        theirs(trainer, model, trial)
        return
    _finish(trainer)
    args, state, run = trainer.args, trainer.state, _run_of(trainer)
    if trainer.hp_search_backend is None and trial is None:
        trainer.store_flos()
    directory = trainer._get_output_dir(trial=trial)
    start = str(Path(directory, _utils.PREFIX_CHECKPOINT_DIR))
    path, best = f"{start}-{state.global_step}", f"{start}-{state.best_global_step}"
    if state.best_global_step and (path == best or Path(best).is_dir()):
        state.best_model_checkpoint = best
    state.stateful_callbacks.update(_states_of_callbacks(trainer))
    counted = {name: getattr(trainer, name) for name in _COUNTED}
    run.pending = distributed.save_async(
        {"model": _model(trainer), **({} if args.save_only_model else _training(trainer))},
        path,
        per_rank={"random": fastckpt.randomness(), "counted": counted},
        metadata={"step": state.global_step},
        files=Files(_files(trainer) if trainer.is_world_process_zero() else None, model_key="model"),
        io=options["io"],
    )
    if args.should_save:
        kept = (args.save_total_limit, {path, state.best_model_checkpoint})
        run.rotate = lambda: keep(*kept, _utils.sort_checkpoints(directory, use_mtime=True))
    reads = any(type(one).on_save is not TrainerCallback.on_save for one in trainer.callback_handler.callbacks)
    if reads or args.push_to_hub or not options["background"]:
        _finish(trainer)
    if args.push_to_hub:
        trainer._push_from_checkpoint(path)


def _finish(trainer: Any) -> None:
    """Wait until the last save is durable, and remove what it replaces."""
    run = _run_of(trainer)
    pending, run.pending = run.pending, None
    if pending is not None:
        pending.result()
        if run.rotate is not None:
            run.rotate()


def _finalize_training(_: Any, theirs: Any, trainer: Any, *args: Any) -> Any:
    _finish(trainer)
    limit = trainer.args.save_total_limit
    # The Trainer divides the loss of all steps by the number of those since the restart, by which it tells the speed.
    steps, rest = trainer.state.global_step, trainer._tr_loss.item()  # the rest is not yet in the sum
    share = max(steps - trainer._initial_global_step, 0.001) / max(steps, 0.001)
    trainer._total_loss_scalar = (trainer._total_loss_scalar + rest) * share - rest
    try:
        if _run_of(trainer).stopped:
            trainer.args.save_total_limit = None  # or it would remove the newest checkpoint for the best one
        return theirs(trainer, *args)
    finally:
        trainer.args.save_total_limit = limit


def _stop(_: Any, __: Any, callback: Any, ___: Any, ____: Any, control: Any, **_____: Any) -> None:
    """After SIGTERM, have the Trainer log, evaluate and save as at the end of any step, and stop."""
    manager = callback.jit_manager
    if manager is not None and manager.is_checkpoint_requested:
        manager.is_checkpoint_requested = False
        control.should_save = control.should_training_stop = True
        _run_of(callback.trainer).stopped = True


def _run_epoch(_: Any, theirs: Any, trainer: Any, *args: Any, **more: Any) -> Any:
    if trainer.state.global_step < trainer.state.max_steps:
        return theirs(trainer, *args, **more)
    trainer._load_rng_state(_run_of(trainer).resumed)  # and the sums of losses
    trainer.control.should_training_stop = True
    return None


def _load_callback_state(_: Any, theirs: Any, trainer: Any) -> None:
    if _run_of(trainer).resumed is None:
        theirs(trainer)
        return
    states = dict(trainer.state.stateful_callbacks)
    for callback in trainer.callback_handler.callbacks:
        state = states.get(type(callback).__name__)
        if isinstance(callback, ExportableState) and state:
            vars(callback).update((state.pop(0) if isinstance(state, list) else state).get("attributes", {}))


def _load_from_checkpoint(_: Any, theirs: Any, trainer: Any, path: str, model: Any = None) -> None:
    if is_ours(path):
        distributed.load(path, into={"model": _model(trainer, model)}, keys="model")
    else:
        theirs(trainer, path, model)


def _load_optimizer_and_scheduler(_: Any, theirs: Any, trainer: Any, path: str | None) -> None:
    if path is None or not is_ours(path):
        theirs(trainer, path)
        return
    with fastckpt.open(path) as checkpoint:
        saved = checkpoint.structure
    if "optimizer" in saved:
        parts = _training(trainer)
        distributed.load(path, into=parts, keys=list(parts))
    else:
        LOG.warning("fastckpt: %s has the model only: the optimizer and the schedule begin anew", path)


def _load_rng_state(_: Any, theirs: Any, trainer: Any, path: str | None) -> None:
    if path is None or not is_ours(path):
        theirs(trainer, path)
        return
    try:
        own = distributed.load_per_rank(path)
    except ValueError as error:  # another number of ranks
        LOG.warning("fastckpt: random states of ranks are not restored: %s", error)
        return
    fastckpt.randomness().load_state_dict(own["random"])
    for name, value in own["counted"].items():
        before = getattr(trainer, name)
        setattr(trainer, name, value.to(before.device) if hasattr(before, "device") else value)


def _load_best_model(_: Any, theirs: Any, trainer: Any) -> None:
    path = trainer.state.best_model_checkpoint
    trainer._load_from_checkpoint(path, trainer.model) if is_ours(path) else theirs(trainer)


_LOADS = (_load_callback_state, _load_from_checkpoint, _load_optimizer_and_scheduler, _load_rng_state)
_OWN = (_save_checkpoint, _finalize_training, _run_epoch, _load_best_model, *_LOADS)
#: What is replaced, and by what.
_OURS: list[tuple[Any, str, Any]] = [
    (_trainer.Trainer, "train", _train),
    *((_trainer.Trainer, ours.__name__, ours) for ours in _OWN),
    *((JITCheckpointCallback, name, _stop) for name in ("on_step_end", "on_epoch_end")),
    # In the middle of a step there is nothing to save.
    *((JITCheckpointCallback, name, lambda *_, **__: None) for name in ("on_step_begin", "on_pre_optimizer_step")),
    *((module, "get_last_checkpoint", _last_checkpoint) for module in (_trainer, _utils)),
]


def __dir__() -> list[str]:
    return sorted(__all__)
