"""transformers' Trainer saves and resumes through fastckpt, but still decides when to save and what to keep.

    fastckpt.integrations.transformers.install()
    trainer.train(resume_from_checkpoint=True)

Each ``checkpoint-N`` is one checkpoint, and a model for ``from_pretrained`` (docs/guides/trainer.md). A function that
replaces a method of the Trainer has its name, and gets the options of ``install``, that method, and the Trainer.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from transformers import trainer as _trainer
from transformers import trainer_utils as _utils
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState
from transformers.trainer_jit_checkpoint import CheckpointManager

import fastckpt
from fastckpt import Files, distributed
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed

from ._directory import LOG, clear, digests, finish, is_ours, keep, newest_first, newest_that_verifies
from ._processes import begin_save, crew_of, engine_of, own_state

__all__ = ["install"]

_installed = Installed()
#: Sums for the next line of the Trainer's log and for its result, which it does not save itself; and those of TRL.
_COUNTED = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
_COUNTED_BY_TRL = ("_metrics", "_total_train_tokens")
_HARMLESS = (_trainer.__name__, "axolotl.core.trainers.base")  # after their saves, they do nothing with a checkpoint


def install(*, io: Any = "auto", background: bool = True) -> Installation:
    """Make every ``Trainer`` of this program save and resume through fastckpt.

    Its settings still apply, and ranks save together. ``train(resume_from_checkpoint=True)`` resumes from the newest
    checkpoint that verifies, if there is one. docs/guides/trainer.md lists what is left to the Trainer, with a warning.

    Args:
        io: how bytes move: a :class:`fastckpt.IO`, or the name of an engine.
        background: whether training continues once the state is copied (:func:`fastckpt.save_async`), or only when the
            checkpoint is durable, as it always does if ``push_to_hub`` or a callback with an ``on_save`` reads it.

    Returns:
        A context manager that ends the installation, as ``uninstall`` does. Otherwise it lasts as long as the process.

    Raises:
        TypeError: ``io`` has another type.
        ValueError: ``io`` names an unknown engine.

    Example:
        >>> import fastckpt
        >>> door = fastckpt.integrations.transformers.install(io=fastckpt.IO(bandwidth_limit="1GB/s"))
        >>> door.uninstall()  # after trainer.train(resume_from_checkpoint=True)
    """
    return _installed.begin({"io": check_io("install", io), "background": background}, _OURS)


class _Run:
    """One call of ``train``."""

    resumed: Any = None  # the checkpoint of fastckpt from which this call resumes
    ended = False  # whether that checkpoint was the end of its training
    restored = False  # whether random states and sums of losses were restored from it
    files: dict[str, bytes] | None = None  # the files beside the weights, the same in each checkpoint
    logged = saved = -1  # the steps that were logged and saved last
    stopped = False  # whether SIGTERM has ended this call


def _run_of(trainer: Any) -> _Run:
    """The last call of ``train``."""
    return vars(trainer).setdefault("_fastckpt_run", _Run())  # type: ignore[no-any-return]


def _left_to_trainer(trainer: Any) -> str | None:
    """Why the Trainer saves this state itself, or None."""
    mine, stock, loaders = type(trainer), _trainer.Trainer, ("_load_from_checkpoint", "_load_best_model")
    reasons = {
        str(engine := engine_of(trainer.accelerator)): engine,
        "SageMaker": trainer.args.parallel_mode.value == "sagemaker_model_parallel",
        "a model that was sharded as it was loaded": trainer.is_distributed_loading_by_transformers,
        "an adapter that is not called default": {*getattr(trainer.model, "peft_config", ())} - {"default"},
        "save_on_each_node": trainer.args.save_on_each_node,
        f"overridden loaders in {mine.__name__}": any(getattr(mine, one) is not getattr(stock, one) for one in loaders),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _model_of(trainer: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
    """The module inside DDP or ``torch.compile``; and its saved state by key: for PEFT, the adapter."""
    bare = trainer.accelerator.unwrap_model(trainer.model if model is None else model, keep_torch_compile=False)
    if not hasattr(bare, "peft_config"):
        return bare, {"model": bare}
    return bare, {"adapter_model": sys.modules["peft"].get_peft_model_state_dict(bare)}


def _training_of(trainer: Any) -> dict[str, Any]:
    """The training state beside the model."""
    optimizer, scaler = trainer.optimizer, trainer.accelerator.scaler
    parts = {"optimizer": getattr(optimizer, "optimizer", optimizer), "scheduler": trainer.lr_scheduler}
    return parts if scaler is None else {**parts, "scaler": scaler}


def _files(trainer: Any) -> dict[str, bytes]:
    """Configuration, tokenizer and all other files beside the weights."""
    names = trainer.model.state_dict() if hasattr(trainer.model, "peft_config") else ()  # PEFT looks for these names
    with tempfile.TemporaryDirectory() as there:
        trainer._save(there, state_dict={name: sys.modules["torch"].empty(1) for name in names})  # all but the weights
        found = [one for one in Path(there).iterdir() if ".safetensors" not in one.name]
        if folders := [one.name for one in found if one.is_dir()]:
            LOG.warning("fastckpt: checkpoints do not have the directories %s of the processing class", folders)
        return {one.name: one.read_bytes() for one in found if one.is_file()}


def _save_checkpoint(options: dict[str, Any], theirs: Any, trainer: Any, model: Any, trial: Any) -> None:
    run, args, state = _run_of(trainer), trainer.args, trainer.state
    if (reason := _left_to_trainer(trainer)) is not None:
        LOG.warning("fastckpt: with %s, the Trainer saves as it does without fastckpt", reason)
        theirs(trainer, model, trial)
        return
    finish(trainer)
    if trainer.hp_search_backend is None and trial is None:
        trainer.store_flos()
    directory, start = trainer._get_output_dir(trial=trial), f"{_utils.PREFIX_CHECKPOINT_DIR}-"
    path, best = (str(Path(directory, f"{start}{one}")) for one in (state.global_step, state.best_global_step))
    if state.best_global_step and (path == best or Path(best).is_dir()):
        state.best_model_checkpoint = best
    callbacks = trainer.callback_handler.callbacks
    stateful: Any = [one for one in (*callbacks, trainer.control) if isinstance(one, ExportableState)]
    state.stateful_callbacks.update(TrainerState(stateful_callbacks=stateful).stateful_callbacks)
    told = {_trainer.TRAINER_STATE_NAME: json.dumps(asdict(state), indent=2) + "\n"}
    if args.should_save:  # a save of the Trainer's own may have been killed
        clear(path)
        run.files = run.files or _files(trainer)
    older = _utils.sort_checkpoints(directory, use_mtime=True) if args.should_save else []
    _, parts = _model_of(trainer)
    counted = _COUNTED + _COUNTED_BY_TRL * any(one.__module__.startswith("trl.") for one in type(trainer).__mro__)
    ended = trainer.control.should_training_stop and not run.stopped and state.global_step < state.max_steps
    begin_save(
        trainer,
        {**parts, **({} if args.save_only_model else _training_of(trainer))},
        path,
        partial(keep, args.save_total_limit, {path, state.best_model_checkpoint}, [*older, path]),
        own={"counted": {name: getattr(trainer, name) for name in counted if hasattr(trainer, name)}},
        metadata={"step": state.global_step, "ended": ended, **digests(told)},
        files=Files({**(run.files or {}), **told} if args.should_save else {}, model_key=next(iter(parts))),
        io=options["io"],
    )
    run.saved = state.global_step
    reads = args.push_to_hub or any(type(one).on_save is not TrainerCallback.on_save for one in callbacks)
    if reads or not _saves_last(type(trainer)) or not options["background"]:
        finish(trainer)
    if args.push_to_hub:
        trainer._push_from_checkpoint(path)


def _saves_last(trainers: type) -> bool:
    """Whether the ``_save_checkpoint`` overrides of a trainer's classes do nothing after the Trainer's."""
    ends = r"( *)def .*\n\1    (return )?super\(\)\._save_checkpoint\([^()]*\)\s*"  # not below an if or a with
    own = [vars(one).get("_save_checkpoint") for one in trainers.__mro__ if one.__module__ not in _HARMLESS]
    try:
        return all(re.fullmatch(ends, inspect.getsource(one), re.DOTALL) for one in own if one)
    except (OSError, TypeError):
        return False


def _maybe_log_save_evaluate(_: Any, theirs: Any, trainer: Any, *args: Any, **more: Any) -> None:
    """Save once at the end of an epoch, where the Trainer calls this twice: for the last step and for the epoch."""
    run, state, control = _run_of(trainer), trainer.state, trainer.control
    again, run.logged = run.logged == state.global_step, state.global_step
    control.should_training_stop |= run.stopped
    ends = float(state.epoch or 0).is_integer() or state.global_step >= state.max_steps
    if again and run.stopped and not ends:
        return  # the epoch continues after the restart
    due, comes_again = control.should_save or run.stopped, ends and not again
    control.should_save = due and not comes_again
    theirs(trainer, *args, **more)
    control.should_save = due and comes_again


def _execute_jit_checkpoint(_: Any, __: Any, manager: Any) -> None:
    """After SIGTERM, make the Trainer log, evaluate and save as at the end of any step, and then stop."""
    manager.is_checkpoint_requested = manager.trainer.control.should_training_stop = False
    _run_of(manager.trainer).stopped = True


def _finalize_training(_: Any, theirs: Any, trainer: Any, trial: Any, *args: Any) -> Any:
    run, given, state = _run_of(trainer), trainer.args, trainer.state
    if run.stopped and run.saved != state.global_step:  # SIGTERM came at a step that was not saved as the best
        trainer._save_checkpoint(trainer.model, trial)
        trainer.control = trainer.callback_handler.on_save(given, state, trainer.control)
    finish(trainer)
    if run.resumed is not None and not run.restored:  # no step was left to train
        trainer._load_rng_state(run.resumed)
    if run.restored:
        # The Trainer adds the rest to the loss of all steps, but divides by the number of steps since the restart.
        steps, rest = state.global_step, trainer._tr_loss.item()
        share = max(steps - trainer._initial_global_step, 0.001) / max(steps, 0.001)
        trainer._total_loss_scalar = (trainer._total_loss_scalar + rest) * share - rest
    result, best = theirs(trainer, trial, *args), state.best_model_checkpoint
    if given.save_total_limit == 1 and given.should_save and best is not None and not run.stopped:
        keep(1, {best}, _utils.sort_checkpoints(trainer._get_output_dir(trial)))
    return result


def newest_of(trainer: Any) -> str | None:
    """The newest checkpoint of a Trainer that verifies; all ranks call it."""
    place = trainer.args.output_dir, f"{_utils.PREFIX_CHECKPOINT_DIR}-", _trainer.TRAINER_STATE_NAME
    return crew_of(trainer.accelerator).first("resume", lambda: newest_that_verifies(newest_first(*place)))


def _train(_: Any, theirs: Any, trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **more: Any) -> Any:
    finish(trainer)
    run = trainer._fastckpt_run = _Run()
    vars(trainer).pop("_load_rng_state", None)  # set by an earlier call
    path, folder = Path(str(resume_from_checkpoint)), Path(trainer.args.output_dir)
    is_last = path.parent == folder and path.match(f"{_utils.PREFIX_CHECKPOINT_DIR}-*") and path.is_dir()
    if torn := is_last and not (path / _trainer.TRAINER_STATE_NAME).exists():  # a save was killed
        LOG.warning("fastckpt: %s is not whole, so the newest undamaged checkpoint is used instead", path)
    if torn or (str(path).lower() == "true" and not path.exists()):  # a command line can only pass strings
        resume_from_checkpoint = newest_of(trainer)
    if not is_ours(resume_from_checkpoint):
        return theirs(trainer, resume_from_checkpoint, *args, **more)
    run.resumed = resume_from_checkpoint
    with fastckpt.open(run.resumed) as checkpoint:
        run.ended = bool((checkpoint.metadata or {}).get("ended"))
    trainer._load_rng_state = partial(_restore_counted, trainer)  # Axolotl's own method looks for the Trainer's file
    return theirs(trainer, run.resumed, *args, **more)


def _run_epoch(_: Any, theirs: Any, trainer: Any, *args: Any, **more: Any) -> None:
    if trainer.state.global_step < trainer.state.max_steps and not _run_of(trainer).ended:
        theirs(trainer, *args, **more)
    else:
        trainer.control.should_training_stop = True


def _load_callback_state(_: Any, theirs: Any, trainer: Any) -> None:
    theirs(trainer)  # it restores only on request, and makes new callbacks
    for name, saved in trainer.state.stateful_callbacks.items() if _run_of(trainer).resumed else ():
        ours = [one for one in trainer.callback_handler.callbacks if type(one).__name__ == name]
        for callback, state in zip(ours, saved if isinstance(saved, list) else [saved], strict=False):
            for attribute, value in state.get("attributes", {}).items():
                setattr(callback, attribute, value)


def _load_from_checkpoint(_: Any, theirs: Any, trainer: Any, path: str, model: Any = None) -> None:
    if not is_ours(path):
        theirs(trainer, path, model)
        return
    bare, part = _model_of(trainer, model)
    distributed.load(path, into=part, keys=list(part))
    if "adapter_model" in part:  # some adapters return copies of their tensors
        sys.modules["peft"].set_peft_model_state_dict(bare, part["adapter_model"])


def _load_optimizer_and_scheduler(_: Any, theirs: Any, trainer: Any, path: str | None) -> None:
    if path is None or not is_ours(path):
        theirs(trainer, path)
        return
    with fastckpt.open(path) as checkpoint:
        parts = _training_of(trainer) if "optimizer" in checkpoint.structure else {}
    if parts:
        distributed.load(path, into=parts, keys=list(parts))
    else:
        LOG.warning("fastckpt: %s has the model only: the optimizer and the schedule begin anew", path)


def _restore_counted(trainer: Any, path: str) -> None:
    """Restore the random states and the sums of the Trainer."""
    own = own_state(path) or distributed.load_per_rank(path, rank=0)
    for name, value in own["counted"].items():
        setattr(trainer, name, value.to(trainer.args.device) if hasattr(value, "to") else value)
    _run_of(trainer).restored = True


def _load_best_model(_: Any, theirs: Any, trainer: Any) -> None:
    path = trainer.state.best_model_checkpoint
    trainer._load_from_checkpoint(path, trainer.model) if is_ours(path) else theirs(trainer)


_SAVING = (_save_checkpoint, _maybe_log_save_evaluate, _finalize_training)
_RESUMING = (_run_epoch, _load_callback_state, _load_from_checkpoint, _load_optimizer_and_scheduler, _load_best_model)
_OURS: list[tuple[Any, str, Any]] = [
    (_trainer.Trainer, "train", _train),
    *((_trainer.Trainer, ours.__name__, ours) for ours in (*_SAVING, *_RESUMING)),
    (CheckpointManager, "execute_jit_checkpoint", _execute_jit_checkpoint),
    (_trainer, "sort_checkpoints", lambda *_, **__: []),  # else the Trainer removes them file by file at its end
]
