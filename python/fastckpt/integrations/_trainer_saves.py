"""What a Trainer of transformers saves, and when: see :mod:`fastckpt.integrations.transformers`.

Each function replaces the method of its name, and gets the options of ``install``, that method, and the Trainer.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import tempfile
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import trainer as _trainer
from transformers import trainer_utils as _utils
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.utils.import_utils import is_sagemaker_mp_enabled, is_torch_xla_available

import fastckpt
from fastckpt import Files, distributed

from ._directory import LOG, digests, holds_remains, keep, move_aside, sweep
from ._last_save import LastSave

#: What the Trainer adds up for the next line of its log and for its result, and does not save itself; and TRL's.
_COUNTED = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
_COUNTED_BY_TRL = ("_metrics", "_total_train_tokens")
#: How copies of ranks are compared: DDP lets buffers differ (BatchNorm's), and goes on with those of the first rank.
_RANKS = distributed.Ranks(on_difference="warn")


class Run:
    """One call of ``train``."""

    #: The checkpoint that it goes on from, if fastckpt wrote that; and whether that was the end of its training.
    resumed: Any = None
    ended = False
    #: Whether the random states and the sums of losses were taken from that.
    restored = False
    #: What lies beside the weights, the same in each of its checkpoints.
    files: dict[str, bytes] | None = None
    #: The step that was logged last, and the one that was saved last; whether the save of an epoch's last step is due.
    logged: int | None = None
    saved: int | None = None
    due = False
    #: Whether SIGTERM has ended it.
    stopped = False

    def __init__(self) -> None:
        self.last_save = LastSave()


_runs: WeakKeyDictionary[Any, Run] = WeakKeyDictionary()


def begin(trainer: Any) -> Run:
    """A call of ``train`` begins."""
    finish(trainer)
    made = _runs[trainer] = Run()
    return made


def run_of(trainer: Any) -> Run:
    """The last call of ``train``."""
    return _runs.setdefault(trainer, Run())


def _left_to_trainer(trainer: Any) -> str | None:
    """Why the Trainer saves this state itself, or None."""
    mine, stock = type(trainer), _trainer.Trainer
    names = ("_load_from_checkpoint", "_load_best_model")
    reasons = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP1": trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1,
        "XLA": is_torch_xla_available(),
        "SageMaker": is_sagemaker_mp_enabled(),
        "a model that was sharded as it was loaded": trainer.is_distributed_loading_by_transformers,
        "an adapter that is not called default": {*getattr(trainer.model, "peft_config", ())} - {"default"},
        "save_on_each_node": trainer.args.save_on_each_node,
        f"a loader of its own in {mine.__name__}": any(
            getattr(mine, name) is not getattr(stock, name) for name in names
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def unwrapped(trainer: Any, model: Any = None) -> Any:
    """The module itself, without DDP and ``torch.compile`` around it."""
    return trainer.accelerator.unwrap_model(trainer.model if model is None else model, keep_torch_compile=False)


def model_of(trainer: Any, model: Any = None) -> dict[str, Any]:
    """The model that is saved and loaded, by its key: of PEFT the adapter alone, by the names of its own file."""
    bare = unwrapped(trainer, model)
    if not hasattr(bare, "peft_config"):
        return {"model": bare}
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - where it is in use

    return {"adapter_model": get_peft_model_state_dict(bare)}


def training_of(trainer: Any) -> dict[str, Any]:
    """What training needs beside the model."""
    optimizer, scaler = trainer.optimizer, trainer.accelerator.scaler
    parts = {"optimizer": getattr(optimizer, "optimizer", optimizer), "scheduler": trainer.lr_scheduler}
    return parts if scaler is None else {**parts, "scaler": scaler}


def _files(trainer: Any) -> dict[str, bytes]:
    """Configuration, tokenizer and whatever else lies beside the weights."""
    is_adapter = hasattr(trainer.model, "peft_config")  # of which a tensor of each name is looked for
    names = trainer.model.state_dict() if is_adapter else ()
    with tempfile.TemporaryDirectory() as there:
        trainer._save(there, state_dict={name: sys.modules["torch"].empty(1) for name in names})  # all but the weights
        found = [one for one in Path(there).iterdir() if ".safetensors" not in one.name]
        if folders := [one.name for one in found if one.is_dir()]:
            LOG.warning("fastckpt: checkpoints do not have the directories %s of the processing class", folders)
        return {one.name: one.read_bytes() for one in found if one.is_file()}


def _beside(trainer: Any) -> dict[str, bytes]:
    """The files beside the weights."""
    run = run_of(trainer)
    if run.files is None:
        run.files = _files(trainer)
    return run.files


def _states_of_callbacks(trainer: Any) -> dict[str, Any]:
    """The states of callbacks that have one, by the names of their classes."""
    found: dict[str, list[Any]] = {}
    for one in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(one, ExportableState):
            found.setdefault(type(one).__name__, []).append(one.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def _counted(trainer: Any) -> dict[str, Any]:
    is_of_trl = any(one.__module__.startswith("trl.") for one in type(trainer).__mro__)
    names = (*_COUNTED, *_COUNTED_BY_TRL) if is_of_trl else _COUNTED
    return {name: getattr(trainer, name) for name in names if hasattr(trainer, name)}


def _save_checkpoint(options: dict[str, Any], theirs: Any, trainer: Any, model: Any, trial: Any) -> None:
    run, args, state = run_of(trainer), trainer.args, trainer.state
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
    state.stateful_callbacks.update(_states_of_callbacks(trainer))
    told = {_trainer.TRAINER_STATE_NAME: json.dumps(asdict(state), indent=2) + "\n"}
    first = trainer.is_world_process_zero()
    if first and holds_remains(path):  # of a save of the Trainer's own that was killed, or of a damaged checkpoint
        move_aside(path)
    parts = model_of(trainer)
    ended = trainer.control.should_training_stop and not run.stopped and state.global_step < state.max_steps
    pending = distributed.save_async(
        {**parts, **({} if args.save_only_model else training_of(trainer))},
        path,
        ranks=_RANKS,
        per_rank={
            "random": fastckpt.randomness(),
            "counted": _counted(trainer),
        },
        metadata={"step": state.global_step, "ended": ended, **digests(told)},
        files=Files({**_beside(trainer), **told} if first else {}, model_key=next(iter(parts))),
        io=options["io"],
    )
    run.saved = state.global_step
    limit, protected = args.save_total_limit, {path, state.best_model_checkpoint}

    def rotate() -> None:
        if args.should_save:
            keep(limit, protected, _utils.sort_checkpoints(directory, use_mtime=True))
            sweep(directory)

    run.last_save.begin(pending, rotate)
    reads = any(type(one).on_save is not TrainerCallback.on_save for one in trainer.callback_handler.callbacks)
    if reads or not saves_last(type(trainer)) or args.push_to_hub or not options["background"]:
        finish(trainer)
    if args.push_to_hub:
        trainer._push_from_checkpoint(path)


def saves_last(trainers: type) -> bool:
    """Whether the classes of a trainer that have a ``_save_checkpoint`` of their own do nothing after the Trainer's."""
    own = [vars(one)["_save_checkpoint"] for one in trainers.__mro__ if "_save_checkpoint" in vars(one)]
    for function in own[:-1]:
        if function.__module__ == "axolotl.core.trainers.base":
            continue  # it frees memory
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        except (OSError, TypeError, SyntaxError):
            return False
        last = ast.unparse(tree.body[-1]) if isinstance(tree, ast.FunctionDef) else ""
        if not last.removeprefix("return ").startswith("super()._save_checkpoint("):
            return False
    return True


def finish(trainer: Any) -> None:
    """Wait until the last save is durable, and remove what it replaces."""
    run_of(trainer).last_save.finish()


def _maybe_log_save_evaluate(_: Any, theirs: Any, trainer: Any, *args: Any, **more: Any) -> None:
    """At the end of an epoch it comes twice, for the last step and for the epoch: one save serves both."""
    run, state, control = run_of(trainer), trainer.state, trainer.control
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


def stop(_: Any, __: Any, callback: Any, ___: Any, ____: Any, control: Any, **_____: Any) -> None:
    """After SIGTERM, have the Trainer log, evaluate and save as at the end of any step, and stop."""
    manager = callback.jit_manager
    if manager is not None and manager.is_checkpoint_requested:
        manager.is_checkpoint_requested = False
        control.should_training_stop = run_of(callback.trainer).stopped = True


def _finalize_training(_: Any, theirs: Any, trainer: Any, trial: Any, *args: Any) -> Any:
    finish(trainer)
    run, given, state = run_of(trainer), trainer.args, trainer.state
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


SAVING = (_save_checkpoint, _maybe_log_save_evaluate, _finalize_training)
