"""accelerate's ``save_state`` and ``load_state`` write and read checkpoints of fastckpt.

    fastckpt.integrations.accelerate.install()

Each directory of ``save_state`` is one checkpoint (docs/guides/accelerate.md).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from accelerate import accelerator as _accelerator
from torch.utils import _pytree  # noqa: TID251 - accelerate's states are torch's
from torch.utils.data import IterableDataset  # noqa: TID251 - and its loaders

import fastckpt
from fastckpt import _core, distributed
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed

from ._directory import LOG, finish, is_ours, is_sound, keep, newest_first
from ._processes import begin_save, crew_of, engine_of, first_that_loads, own_dtypes, own_state

__all__ = ["install"]

_installed = Installed()
#: Automatic directory names: the directory below the project's, and the prefix of the numbers.
_FOLDER, _NAME = "checkpoints", "checkpoint_"
#: The key of registered objects in the state; and members of metadata: ``accelerator.step``, and loader positions.
_REGISTERED, _STEP, _ROWS = "registered", "accelerate.step", "accelerate.rows"


def install(*, io: Any = "auto", background: bool = True) -> Installation:
    """Make ``Accelerator.save_state`` and ``load_state`` of this program use fastckpt.

    It saves the same state as accelerate. Processes save together, so each of them must call it; schedules, the scaler
    and registered objects are those of the main process. Classes in the state of a registered object are restored if
    they are declared (:func:`fastckpt.register_type`). With ``automatic_checkpoint_naming``, ``load_state()`` loads the
    newest checkpoint that verifies, ``save_state`` continues its numbers, and ``total_limit`` removes old ones once the
    new one is durable. docs/guides/accelerate.md lists what it leaves to accelerate, with a warning.

    Args:
        io: how bytes move: a :class:`fastckpt.IO`, or the name of an engine.
        background: whether ``save_state`` returns once the state is copied (:func:`fastckpt.save_async`), or when the
            checkpoint is durable. The next ``save_state``, ``load_state`` or ``end_training`` waits for the save.

    Returns:
        A context manager that ends the installation, as ``uninstall`` does. Otherwise it lasts as long as the process.

    Raises:
        TypeError: ``io`` has another type.
        ValueError: ``io`` names an unknown engine.

    Example:
        >>> import fastckpt
        >>> with fastckpt.integrations.accelerate.install():
        ...     pass  # accelerator.save_state("runs/step-100")
    """
    ours = ((_accelerator.Accelerator, one.__name__[1:], one) for one in (_save_state, _load_state, _end_training))
    return _installed.begin({"io": check_io("install", io), "background": background}, ours)


def _left_to_accelerate(accelerator: Any, *, loads: bool) -> str | None:
    """Why accelerate saves or loads this state itself, or None."""
    reasons = {
        str(engine := engine_of(accelerator)): engine,
        "hooks for saving": not loads and accelerator._save_model_state_pre_hook,
        "save_on_each_node": not loads and accelerator.project_configuration.save_on_each_node,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _state(accelerator: Any, models: list[Any]) -> dict[str, Any]:
    """The state to save or to load into, with these models. Keys are numbered like accelerate's files."""
    unwrap, scaler = accelerator.unwrap_model, accelerator.scaler
    kinds = {
        "model": [
            unwrap(model, keep_torch_compile=False) if any(model is one for one in models) else None
            for model in accelerator._models
        ],
        "optimizer": [getattr(one, "optimizer", one) for one in accelerator._optimizers],
        "scheduler": [getattr(one, "scheduler", one) for one in accelerator._schedulers],
        "scaler": [] if scaler is None else [scaler],
        _REGISTERED: accelerator._custom_objects,
    }
    return {
        kind if number == 0 else f"{kind}_{number}": value
        for kind, values in kinds.items()
        for number, value in enumerate(values)
        if value is not None
    }


def _stateful(accelerator: Any) -> list[Any]:
    return [one for one in accelerator._dataloaders if getattr(one, "use_stateful_dataloader", False)]


def _counts(state: Any) -> Any:
    return state.get("_snapshot", {}).get("_main_snapshot", state)  # with workers, a stateful loader nests its counts


def _has_place(loader: Any) -> bool:
    """Whether each process counts its own batches, of a fixed size; otherwise the main process may read for all."""
    is_counted = isinstance(getattr(loader.batch_sampler, "batch_size", None), int)
    return is_counted and not isinstance(loader.dataset, IterableDataset) and not hasattr(loader, "split_batches")


def _rows(loader: Any) -> int:
    """The rows of the current epoch that a stateful loader has yielded to all processes; 0 also at the epoch's end."""
    state = loader.state_dict()
    if state["_iterator_finished"] or not _has_place(loader):
        return 0
    batches = _counts(state)["_sampler_iter_yielded"] + state.get("_steps_since_snapshot", 0)
    return int(batches * loader.total_batch_size)


def _place(loader: Any, rows: int) -> dict[str, Any]:
    """The state of a stateful loader after some rows of an epoch. The loader yields the rows of a cut batch again."""
    state = {**loader.state_dict(), "_steps_since_snapshot": 0}
    if _has_place(loader):
        _counts(state)["_sampler_iter_yielded"] = rows // loader.total_batch_size
    return state | {"_iterator_finished": not rows or not _has_place(loader)}


def _own_part(accelerator: Any) -> dict[str, Any]:
    """The state that this process saves: in accelerate only the main process saves state that is not spread."""

    def is_own(key: str, value: Any) -> bool:
        if accelerator.is_main_process or key.startswith(("model", "optimizer")):
            return True
        # The value is spread if its tensors are parts of tensors that are spread over processes.
        return any(hasattr(one, "device_mesh") for one in _pytree.tree_leaves(value.state_dict()))

    return {key: value for key, value in _state(accelerator, accelerator._models).items() if is_own(key, value)}


def _save_state(options: Any, theirs: Any, accelerator: Any, output_dir: Any = None, *args: Any, **more: Any) -> Any:
    finish(accelerator)
    if (reason := _left_to_accelerate(accelerator, loads=False)) is not None:
        LOG.warning("fastckpt: with %s, accelerate saves as it does without fastckpt", reason)
        return theirs(accelerator, output_dir, *args, **more)
    naming, first = accelerator.project_configuration, accelerator.is_main_process
    automatic, limit = naming.automatic_checkpoint_naming, naming.total_limit
    name = f"{_NAME}{accelerator.save_iteration}"
    path = Path(accelerator.project_dir, _FOLDER, name) if automatic else Path(output_dir).expanduser()
    # Checked now, because the save runs in the background, and a program may end without waiting for its result.
    crew_of(accelerator).first("save_state", partial(_check_target, path, automatic=automatic))

    older = newest_first(path.parent, _NAME, "*")[::-1] if first and automatic else []
    begin_save(
        accelerator,
        _own_part(accelerator),
        path,
        partial(keep, limit, {str(path)}, [*older, str(path)]),
        own={"loaders": [one.state_dict() for one in _stateful(accelerator)]},
        metadata={_STEP: accelerator.step, _ROWS: [_rows(one) for one in _stateful(accelerator)]},
        files=fastckpt.Files(model_key="model") if accelerator._models else None,
        io=options["io"],
    )
    naming.iteration += 1
    if not options["background"]:
        finish(accelerator)
    return path


def _check_target(path: Path, *, automatic: bool) -> None:
    """Refuse a directory that is in use."""
    if automatic and path.exists() and (is_sound(str(path)) or not is_ours(path)):
        raise ValueError(f"save_state: {path} exists: set project_configuration.iteration to an unused number")
    _core.check_target(str(path.absolute()), True)


def _end_training(_: Any, theirs: Any, accelerator: Any) -> None:
    try:
        finish(accelerator)
    finally:
        theirs(accelerator)


def _load_state(options: Any, theirs: Any, accelerator: Any, input_dir: Any = None, *args: Any, **more: Any) -> None:
    finish(accelerator)
    crew, naming = crew_of(accelerator), accelerator.project_configuration

    def load(path: str) -> str:
        about = crew.first("load_state: about", partial(_about, path))
        if about is None:
            theirs(accelerator, path, *args, **more)
        else:
            _load(accelerator, path, *about, strict=more.get("strict", True), io=options["io"])
        return path

    paths = [] if input_dir is None else [str(Path(input_dir).expanduser())]
    if input_dir is None and naming.automatic_checkpoint_naming:
        paths = crew.first("load_state", partial(newest_first, Path(accelerator.project_dir, _FOLDER), _NAME, "*"))
    if not paths:
        theirs(accelerator, None, *args, **more)
        return
    loaded = first_that_loads(paths, load, crew)
    if input_dir is None:
        naming.iteration = int(Path(loaded).name.removeprefix(_NAME)) + 1


def _about(path: str) -> tuple[int, int | None, list[int]] | None:
    """The number of registered objects, ``accelerator.step`` and loader positions in a checkpoint of fastckpt."""
    if not is_ours(path):
        return None
    with fastckpt.open(path) as checkpoint:
        registered = sum(key.startswith(_REGISTERED) for key in checkpoint.structure)
        metadata = checkpoint.metadata or {}
        return registered, metadata.get(_STEP), metadata.get(_ROWS, [])


def _load(accelerator: Any, path: str, registered: int, step: int | None, rows: Any, *, strict: bool, io: Any) -> None:
    if (engine := _left_to_accelerate(accelerator, loads=True)) is not None:
        raise RuntimeError(f"load_state: {path} is a checkpoint of fastckpt; with {engine}, accelerate cannot load it")
    if step is None:
        raise RuntimeError(f"load_state: {path} was not saved by save_state: use fastckpt.load")
    if registered != len(accelerator._custom_objects):
        raise RuntimeError(
            f"load_state: {path} has {registered} registered objects, and {len(accelerator._custom_objects)} are "
            "registered (register_for_checkpointing): nothing was loaded"
        )
    models = [*accelerator._models]
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(models, path)  # a hook removes the models that it loads itself
    state = _state(accelerator, models)
    # Models keep their dtypes, as in torch's own loads.
    dtype = own_dtypes({key: one.state_dict() for key, one in state.items() if key.startswith("model")})
    distributed.load(path, into=state, keys=[*state], strict=strict, dtype=dtype, io=io)
    accelerator.step = step
    if (own := own_state(path)) is not None:
        places = own["loaders"]
    else:
        places = [_place(*one) for one in zip(_stateful(accelerator), rows, strict=False)]
        if any(one.step_with_optimizer and not one.split_batches for one in accelerator._schedulers):
            LOG.warning("fastckpt: schedules count rows, as accelerate does: see docs/guides/accelerate.md")
    for loader, state in zip(_stateful(accelerator), places, strict=False):
        # A loader at the end of its epoch draws one random number when it starts again, as a new loader does.
        loader.load_state_dict({} if state["_iterator_finished"] else state)
        loader.dl_state_dict = state  # needed for a save before the next batch
