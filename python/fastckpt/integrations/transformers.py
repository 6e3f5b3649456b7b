"""transformers' Trainer saves and resumes through fastckpt; it decides itself when it saves, and what it keeps.

    fastckpt.integrations.transformers.install()
    trainer.train(resume_from_checkpoint=True)

Each ``checkpoint-N`` is one checkpoint, and a model for ``from_pretrained`` (docs/guides/trainer.md). Functions that
replace a method of the Trainer have its name, and get the options of ``install``, that method, and the Trainer.
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
from weakref import WeakKeyDictionary

from transformers import trainer as _trainer
from transformers import trainer_utils as _utils
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.utils.import_utils import is_sagemaker_mp_enabled, is_torch_xla_available

import fastckpt
from fastckpt import Files, distributed
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed

from ._directory import LOG, begin, clear, digests, finish, is_ours, keep, newest_first, newest_that_verifies, sweep
from ._processes import crew_of

__all__ = ["install"]

_installed = Installed()
#: What the Trainer adds up for the next line of its log and for its result, and does not save itself; and TRL's.
_COUNTED = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
_COUNTED_BY_TRL = ("_metrics", "_total_train_tokens")
#: How copies of ranks are compared: DDP lets buffers differ (BatchNorm's), and goes on with those of the first rank.
_RANKS = distributed.Ranks(on_difference="warn")


def install(*, io: Any = "auto", background: bool = True) -> Installation:
    """Make every ``Trainer`` of this program save and resume through fastckpt.

    The Trainer's own settings still apply. ``train(resume_from_checkpoint=True)`` resumes from the newest checkpoint
    that verifies, and begins where there is none. States of callbacks (``ExportableState``) come back, too, whatever
    ``restore_callback_states_from_checkpoint`` says. Ranks save together, with DDP and FSDP2. Of a PEFT model the
    adapter is saved. What it leaves to the Trainer, with a warning, is in docs/guides/trainer.md.

    Args:
        io: how bytes move: a :class:`fastckpt.IO`, or the name of an engine.
        background: whether training continues once the state is copied (:func:`fastckpt.save_async`), or waits until
            the checkpoint is durable. It waits all the same for what reads the checkpoint: ``push_to_hub``, and
            callbacks that have an ``on_save``.

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


class _Run:
    """One call of ``train``."""

    #: The checkpoint that it goes on from, if fastckpt wrote that; and whether that was the end of its training.
    resumed: Any = None
    ended = False
    #: Whether the random states and the sums of losses were taken from that.
    restored = False
    #: The files beside the weights, which are the same in each of its checkpoints.
    files: dict[str, bytes] | None = None
    #: The step that was logged last, and the one that was saved last; whether the save of an epoch's last step is due.
    logged: int | None = None
    saved: int | None = None
    due = False
    #: Whether SIGTERM has ended it.
    stopped = False


_runs: WeakKeyDictionary[Any, _Run] = WeakKeyDictionary()


def _run_of(trainer: Any) -> _Run:
    """The last call of ``train``."""
    return _runs.setdefault(trainer, _Run())


def _left_to_trainer(trainer: Any) -> str | None:
    """Why the Trainer saves this state itself, or None."""
    mine, stock, loaders = type(trainer), _trainer.Trainer, ("_load_from_checkpoint", "_load_best_model")
    reasons = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP1": trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1,
        "XLA": is_torch_xla_available(),
        "SageMaker": is_sagemaker_mp_enabled(),
        "a model that was sharded as it was loaded": trainer.is_distributed_loading_by_transformers,
        "an adapter that is not called default": {*getattr(trainer.model, "peft_config", ())} - {"default"},
        "save_on_each_node": trainer.args.save_on_each_node,
        f"loaders of its own in {mine.__name__}": any(getattr(mine, one) is not getattr(stock, one) for one in loaders),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _unwrapped(trainer: Any, model: Any = None) -> Any:
    """The module itself, without DDP and ``torch.compile`` around it."""
    return trainer.accelerator.unwrap_model(trainer.model if model is None else model, keep_torch_compile=False)


def _model_of(trainer: Any, model: Any = None) -> dict[str, Any]:
    """The model that is saved and loaded, by its key: of PEFT the adapter alone, by the names of its own file."""
    bare = _unwrapped(trainer, model)
    if not hasattr(bare, "peft_config"):
        return {"model": bare}
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - where it is in use

    return {"adapter_model": get_peft_model_state_dict(bare)}


def _training_of(trainer: Any) -> dict[str, Any]:
    """What training needs beside the model."""
    optimizer, scaler = trainer.optimizer, trainer.accelerator.scaler
    parts = {"optimizer": getattr(optimizer, "optimizer", optimizer), "scheduler": trainer.lr_scheduler}
    return parts if scaler is None else {**parts, "scaler": scaler}


def _files(trainer: Any) -> dict[str, bytes]:
    """Configuration, tokenizer and whatever else lies beside the weights."""
    # Of an adapter, a tensor of each name is looked for.
    names = trainer.model.state_dict() if hasattr(trainer.model, "peft_config") else ()
    with tempfile.TemporaryDirectory() as there:
        trainer._save(there, state_dict={name: sys.modules["torch"].empty(1) for name in names})  # all but the weights
        found = [one for one in Path(there).iterdir() if ".safetensors" not in one.name]
        if folders := [one.name for one in found if one.is_dir()]:
            LOG.warning("fastckpt: checkpoints do not have the directories %s of the processing class", folders)
        return {one.name: one.read_bytes() for one in found if one.is_file()}


def _counted(trainer: Any) -> dict[str, Any]:
    is_of_trl = any(one.__module__.startswith("trl.") for one in type(trainer).__mro__)
    names = (*_COUNTED, *_COUNTED_BY_TRL) if is_of_trl else _COUNTED
    return {name: getattr(trainer, name) for name in names if hasattr(trainer, name)}


def _save_checkpoint(options: dict[str, Any], theirs: Any, trainer: Any, model: Any, trial: Any) -> None:
    run, args, state = _run_of(trainer), trainer.args, trainer.state
    if (reason := _left_to_trainer(trainer)) is not None:
        LOG.warning("fastckpt: with %s, the Trainer saves as it does without fastckpt", reason)
        theirs(trainer, model, trial)
        return
    finish(trainer)
    if trainer.hp_search_backend is None and trial is None:
        trainer.store_flos()
    directory = trainer._get_output_dir(trial=trial)
    start = str(Path(directory, _utils.PREFIX_CHECKPOINT_DIR))
    path, best = f"{start}-{state.global_step}", f"{start}-{state.best_global_step}"
    if state.best_global_step and (path == best or Path(best).is_dir()):
        state.best_model_checkpoint = best
    callbacks = trainer.callback_handler.callbacks
    stateful: Any = [one for one in (*callbacks, trainer.control) if isinstance(one, ExportableState)]
    state.stateful_callbacks.update(TrainerState(stateful_callbacks=stateful).stateful_callbacks)
    told = {_trainer.TRAINER_STATE_NAME: json.dumps(asdict(state), indent=2) + "\n"}
    first = trainer.is_world_process_zero()
    if first:  # a save of the Trainer's own may have been killed
        clear(path)
        run.files = run.files or _files(trainer)
    parts = _model_of(trainer)
    ended = trainer.control.should_training_stop and not run.stopped and state.global_step < state.max_steps
    pending = distributed.save_async(
        {**parts, **({} if args.save_only_model else _training_of(trainer))},
        path,
        ranks=_RANKS,
        per_rank={"random": fastckpt.randomness(), "counted": _counted(trainer)},
        metadata={"step": state.global_step, "ended": ended, **digests(told)},
        files=Files({**(run.files or {}), **told} if first else {}, model_key=next(iter(parts))),
        io=options["io"],
    )
    run.saved = state.global_step
    limit, protected = args.save_total_limit, {path, state.best_model_checkpoint}

    def rotate() -> None:
        if args.should_save:
            keep(limit, protected, _utils.sort_checkpoints(directory, use_mtime=True))
            sweep(directory)

    begin(trainer, pending, rotate)
    reads = any(type(one).on_save is not TrainerCallback.on_save for one in callbacks)
    if reads or not _saves_last(type(trainer)) or args.push_to_hub or not options["background"]:
        finish(trainer)
    if args.push_to_hub:
        trainer._push_from_checkpoint(path)


def _saves_last(trainers: type) -> bool:
    """Whether the classes of a trainer that have a ``_save_checkpoint`` of their own do nothing after the Trainer's."""
    own = [vars(one)["_save_checkpoint"] for one in trainers.__mro__ if "_save_checkpoint" in vars(one)]
    others = [one for one in own[:-1] if one.__module__ != "axolotl.core.trainers.base"]  # which frees memory
    ends = r"( *)def .*\n\1    (return )?super\(\)\._save_checkpoint\([^()]*\)\s*"  # not below an if or a with
    try:
        return all(re.fullmatch(ends, inspect.getsource(one), re.DOTALL) for one in others)
    except (OSError, TypeError):
        return False


def _maybe_log_save_evaluate(_: Any, theirs: Any, trainer: Any, *args: Any, **more: Any) -> None:
    """At the end of an epoch it comes twice, for the last step and for the epoch: one save serves both."""
    run, state, control = _run_of(trainer), trainer.state, trainer.control
    again, run.logged = run.logged == state.global_step, state.global_step
    ends = float(state.epoch or 0).is_integer() or state.global_step >= state.max_steps
    if again and run.stopped and not ends:
        return  # the epoch goes on after the restart
    due, comes_again = run.due or control.should_save or run.stopped, ends and not again
    control.should_save, run.due = due and not comes_again, due and comes_again
    theirs(trainer, *args, **more)
    if run.stopped and not comes_again and run.saved != state.global_step:  # it was not the best one
        _, _, model, trial = args[:4]
        trainer._save_checkpoint(model, trial)
        trainer.control = trainer.callback_handler.on_save(trainer.args, state, control)


def _stop(_: Any, __: Any, callback: Any, ___: Any, ____: Any, control: Any, **_____: Any) -> None:
    """After SIGTERM, have the Trainer log, evaluate and save as at the end of any step, and stop."""
    manager = callback.jit_manager
    if manager is not None and manager.is_checkpoint_requested:
        manager.is_checkpoint_requested = False
        control.should_training_stop = _run_of(callback.trainer).stopped = True


def _finalize_training(_: Any, theirs: Any, trainer: Any, trial: Any, *args: Any) -> Any:
    finish(trainer)
    run, given, state = _run_of(trainer), trainer.args, trainer.state
    if run.resumed is not None and not run.restored:  # it had no step to take
        trainer._load_rng_state(run.resumed)
    if run.restored:
        # The Trainer divides the loss of all steps by the number of those since the restart, by which it tells the
        # speed. The rest is not yet in the sum.
        steps, rest = state.global_step, trainer._tr_loss.item()
        share = max(steps - trainer._initial_global_step, 0.001) / max(steps, 0.001)
        trainer._total_loss_scalar = (trainer._total_loss_scalar + rest) * share - rest
    limit, given.save_total_limit = given.save_total_limit, None  # it would remove the last one file by file
    try:
        result = theirs(trainer, trial, *args)
    finally:
        given.save_total_limit = limit
    if limit == 1 and given.should_save and state.best_model_checkpoint is not None and not run.stopped:
        paths = _utils.sort_checkpoints(trainer._get_output_dir(trial))
        keep(1, {state.best_model_checkpoint}, paths)
    return result


def _candidates(directory: str) -> list[str]:
    """The checkpoints that a Trainer can go on from, the newest first; damaged ones may be among them."""
    return newest_first(directory, f"{_utils.PREFIX_CHECKPOINT_DIR}-", _trainer.TRAINER_STATE_NAME)


def newest_of(trainer: Any) -> str | None:
    """The newest checkpoint of a Trainer that verifies; all ranks call it."""
    crew, folder = crew_of(trainer.accelerator), trainer.args.output_dir
    return crew.first("resume", lambda: newest_that_verifies(_candidates(folder)))


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
    finish(trainer)
    run = _runs[trainer] = _Run()
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
    if trainer.state.global_step < trainer.state.max_steps and not _run_of(trainer).ended:
        return theirs(trainer, *args, **more)
    trainer.control.should_training_stop = True
    return None


def _load_callback_state(_: Any, theirs: Any, trainer: Any) -> None:
    if _run_of(trainer).resumed is None:
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
    part = _model_of(trainer, model)
    distributed.load(path, into=part, keys=list(part))
    if "adapter_model" in part:
        from peft import set_peft_model_state_dict  # noqa: PLC0415 - where it is in use

        # Some adapters give copies of their tensors.
        set_peft_model_state_dict(_unwrapped(trainer, model), part["adapter_model"])


def _load_optimizer_and_scheduler(_: Any, theirs: Any, trainer: Any, path: str | None) -> None:
    if path is None or not is_ours(path):
        theirs(trainer, path)
        return
    with fastckpt.open(path) as checkpoint:
        saved = checkpoint.structure
    if "optimizer" in saved:
        parts = _training_of(trainer)
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
    _run_of(trainer).restored = True


def _load_best_model(_: Any, theirs: Any, trainer: Any) -> None:
    path = trainer.state.best_model_checkpoint
    trainer._load_from_checkpoint(path, trainer.model) if is_ours(path) else theirs(trainer)


_SAVING = (_save_checkpoint, _maybe_log_save_evaluate, _finalize_training)
_RESUMING = (_run_epoch, _load_callback_state, _load_from_checkpoint, _load_optimizer_and_scheduler, _load_best_model)
#: What is replaced, and by what.
_OURS: list[tuple[Any, str, Any]] = [
    (_trainer.Trainer, "train", _train),
    *((_trainer.Trainer, ours.__name__, ours) for ours in (*_SAVING, *_RESUMING)),
    *((JITCheckpointCallback, name, _stop) for name in ("on_step_end", "on_epoch_end")),
    # In the middle of a step there is nothing to save.
    *((JITCheckpointCallback, name, lambda *_, **__: None) for name in ("on_step_begin", "on_pre_optimizer_step")),
    *((module, "get_last_checkpoint", _last_checkpoint) for module in (_trainer, _utils)),
]
