"""accelerate's ``save_state`` and ``load_state`` write and read checkpoints of fastckpt.

    fastckpt.integrations.accelerate.install()

Each directory of ``save_state`` is one checkpoint (docs/guides/accelerate.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from accelerate import accelerator as _accelerator
from accelerate.utils import DistributedType, broadcast_object_list

import fastckpt
from fastckpt import distributed
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed

from ._directory import LOG, is_ours, is_sound, keep, newest_that_verifies
from ._last_save import LastSave

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["install"]

_installed = Installed()
_last_saves: WeakKeyDictionary[Any, LastSave] = WeakKeyDictionary()
#: What accelerate itself has to save.
_LEFT = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
#: How a directory is named automatically, before its number.
_NAME = "checkpoint_"


def install(*, io: Any = "auto", background: bool = True) -> Installation:
    """Have ``Accelerator.save_state`` and ``load_state`` of this program go through fastckpt.

    What accelerate saves is saved: models, optimizers, schedules, the gradient scaler, registered objects, and of each
    process its random states and stateful loaders. Processes save together. With ``automatic_checkpoint_naming``,
    ``load_state()`` takes the newest checkpoint that verifies, ``save_state`` counts on from it, and ``total_limit``
    removes old ones after the new one is durable. With DeepSpeed, Megatron-LM, XLA, FSDP1, hooks for saving, and
    ``save_on_each_node``, accelerate saves itself, and a warning says so.

    Args:
        io: how bytes move: a :class:`fastckpt.IO`, or the name of an engine.
        background: whether ``save_state`` returns once the state was copied (:func:`fastckpt.save_async`), or when the
            checkpoint is durable. The next ``save_state``, ``load_state`` and ``end_training`` wait for it.

    Returns:
        A context manager, which ends it; so does its ``uninstall``. Without either it lasts as long as the process.

    Raises:
        TypeError: ``io`` is neither.
        ValueError: ``io`` names an unknown engine.

    Example:
        >>> import fastckpt
        >>> with fastckpt.integrations.accelerate.install():
        ...     pass  # accelerator.save_state("runs/step-100")
    """
    ours = ((_accelerator.Accelerator, one.__name__[1:], one) for one in (_save_state, _load_state, _end_training))
    return _installed.begin({"io": check_io("install", io), "background": background}, ours)


def _left_to_accelerate(accelerator: Any) -> str | None:
    """Why accelerate saves this state itself, or None."""
    kind = accelerator.distributed_type
    reasons = {
        str(kind): kind in _LEFT,
        "FSDP1": kind == DistributedType.FSDP and not accelerator.is_fsdp2,
        "hooks for saving": bool(accelerator._save_model_state_pre_hook),
        "save_on_each_node": accelerator.project_configuration.save_on_each_node,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def of_first(accelerator: Any, find: Callable[[], Any]) -> Any:
    """What ``find`` returns on the first process; all processes call it."""
    found: list[Any] = broadcast_object_list([find() if accelerator.is_main_process else None])
    return found[0]


def _number(path: str) -> int:
    return int(Path(path).name.removeprefix(_NAME))


def _automatic(folder: Path) -> list[str]:
    """The checkpoints that were named automatically, the oldest first."""
    named = [path for path in folder.glob(f"{_NAME}*") if path.name.removeprefix(_NAME).isdecimal() and path.is_dir()]
    return sorted(map(str, named), key=_number)


def _state(accelerator: Any) -> dict[str, Any]:
    """The state to save or to load into. Its keys are numbered as accelerate numbers its files."""
    unwrap, scaler = accelerator.unwrap_model, accelerator.scaler
    kinds = {
        "model": [unwrap(model, keep_torch_compile=False) for model in accelerator._models],
        "optimizer": [getattr(one, "optimizer", one) for one in accelerator._optimizers],
        "scheduler": [getattr(one, "scheduler", one) for one in accelerator._schedulers],
        "scaler": [] if scaler is None else [scaler],
        "registered": accelerator._custom_objects,
    }
    return {
        kind if number == 0 else f"{kind}_{number}": value
        for kind, values in kinds.items()
        for number, value in enumerate(values)
    }


def _stateful(accelerator: Any) -> list[Any]:
    """The loaders that have a state."""
    return [one for one in accelerator._dataloaders if getattr(one, "use_stateful_dataloader", False)]


def _save_state(options: Any, theirs: Any, accelerator: Any, output_dir: Any = None, *args: Any, **more: Any) -> Any:
    reason = _left_to_accelerate(accelerator)
    if reason is not None:
        LOG.warning("fastckpt: with %s, accelerate saves as it does without fastckpt", reason)
        return theirs(accelerator, output_dir, *args, **more)
    _finish(accelerator)
    naming, first = accelerator.project_configuration, accelerator.is_main_process
    automatic, limit = naming.automatic_checkpoint_naming, naming.total_limit
    if automatic:
        output_dir = Path(accelerator.project_dir, "checkpoints", f"{_NAME}{accelerator.save_iteration}")
    path = Path(output_dir).expanduser()
    if automatic and of_first(accelerator, lambda: path.exists() and (is_sound(str(path)) or not is_ours(path))):
        raise ValueError(f"save_state: {path} exists: set project_configuration.iteration to a number that is free")

    def rotate() -> None:
        if first and automatic:
            keep(limit, {str(path)}, _automatic(path.parent))

    pending = distributed.save_async(
        _state(accelerator),
        path,
        ranks=distributed.Ranks(on_difference="warn"),
        per_rank={
            "random": fastckpt.randomness(),
            "step": accelerator.step,
            "loaders": [one.state_dict() for one in _stateful(accelerator)],
        },
        files=fastckpt.Files(model_key="model") if accelerator._models else None,
        io=options["io"],
    )
    _last_saves.setdefault(accelerator, LastSave()).begin(pending, rotate)
    naming.iteration += 1
    if not options["background"]:
        _finish(accelerator)
    return path


def _finish(accelerator: Any) -> None:
    if accelerator in _last_saves:
        _last_saves[accelerator].finish()


def _end_training(_: Any, theirs: Any, accelerator: Any) -> None:
    _finish(accelerator)
    theirs(accelerator)


def _load_state(_: Any, theirs: Any, accelerator: Any, input_dir: Any = None, *args: Any, **more: Any) -> None:
    _finish(accelerator)
    automatic = input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming
    if automatic:
        folder = Path(accelerator.project_dir, "checkpoints")
        input_dir = of_first(accelerator, lambda: newest_that_verifies(reversed(_automatic(folder))))
    path = None if input_dir is None else str(Path(input_dir).expanduser())
    if path is not None and is_ours(path):
        _load(accelerator, path)
    else:
        theirs(accelerator, input_dir, *args, **more)
    if automatic and path is not None:
        accelerator.project_configuration.iteration = _number(path) + 1


def _load(accelerator: Any, path: str) -> None:
    state = _state(accelerator)
    with fastckpt.open(path) as checkpoint:
        saved = [key for key in checkpoint.structure if key.startswith("registered")]
    if len(saved) != len(accelerator._custom_objects):
        raise RuntimeError(
            f"load_state: {path} has {len(saved)} registered objects, and {len(accelerator._custom_objects)} are "
            "registered (register_for_checkpointing): nothing was loaded"
        )
    distributed.load(path, into=state, keys=[*state])
    try:
        own = distributed.load_per_rank(path)
    except ValueError as error:
        LOG.warning("fastckpt: random states and loaders of processes are not restored: %s", error)
        accelerator.step = distributed.load_per_rank(path, rank=0)["step"]
        return
    accelerator.step = own["step"]
    for loader, loaded in zip(_stateful(accelerator), own["loaders"], strict=False):
        loader.load_state_dict(loaded)
    fastckpt.randomness().load_state_dict(own["random"])


def __dir__() -> list[str]:
    return sorted(__all__)
