"""accelerate's ``save_state`` and ``load_state`` write and read checkpoints of fastckpt.

    fastckpt.integrations.accelerate.install()

Each directory of ``save_state`` is one checkpoint (docs/guides/accelerate.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from accelerate import accelerator as _accelerator
from accelerate import data_loader as _data_loader
from accelerate import scheduler as _scheduler
from accelerate.utils import DistributedType, broadcast_object_list

import fastckpt
from fastckpt import distributed
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed

from ._directory import LOG, holds_remains, is_ours, is_sound, keep, move_aside, newest_that_verifies, sweep
from ._last_save import LastSave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["install"]

_installed = Installed()
_last_saves: WeakKeyDictionary[Any, LastSave] = WeakKeyDictionary()
#: What accelerate itself has to save.
_LEFT = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


@dataclass
class Place:
    """Where a loader is in its rows.

    Attributes:
        owner: the loader that was prepared; others skip some batches of it.
        rows: the rows of all processes that were taken in this epoch.
        skip: the rows that come first in the next iteration are these, and are not taken again.
        began: the state of the loader's generator when the epoch began; without one, the random states.
        randomness: the random states to restore once the first batch after a load is there.
    """

    owner: Any
    rows: int = 0
    skip: int = 0
    began: Any = None
    randomness: Any = None


_places: WeakKeyDictionary[Any, Place] = WeakKeyDictionary()


def install(*, io: Any = "auto", background: bool = True) -> Installation:
    """Have ``Accelerator.save_state`` and ``load_state`` of this program go through fastckpt.

    Models, optimizers, schedules, the gradient scaler, registered objects, random states of each process and the place
    of each prepared loader are saved; processes save together. After ``load_state`` a prepared loader goes on with the
    row that would have come next, unless ``skip_first_batches`` is called; a schedule goes on with the step, also with
    another number of processes. With ``automatic_checkpoint_naming``, ``load_state()`` takes the newest checkpoint that
    verifies, and ``total_limit`` removes old ones after the new one is durable. With DeepSpeed, Megatron-LM, XLA,
    FSDP1, hooks for saving, and ``save_on_each_node``, accelerate saves itself, and a warning says so.

    Args:
        io: how bytes move: a :class:`fastckpt.IO`, or the name of an engine.
        background: whether ``save_state`` returns once the state was copied (:func:`fastckpt.save_async`), or when the
            checkpoint is durable. The next ``save_state``, ``load_state`` and ``end_training`` wait for it.

    Returns:
        A context manager, which ends it; so does its ``uninstall``. Without either it lasts as long as the process.

    Raises:
        TypeError: ``io`` is neither.
        ValueError: there is no such engine.

    Example:
        >>> import fastckpt
        >>> with fastckpt.integrations.accelerate.install():
        ...     pass  # accelerator.save_state("runs/step-100")
    """
    options = {"io": check_io("install", io), "background": background}
    for owner, name, ours in _OURS:
        _installed.replace(owner, name, ours)
    return _installed.begin(options)


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


def _of_first(accelerator: Any, find: Callable[[], Any]) -> Any:
    """What the first process finds."""
    found: list[Any] = broadcast_object_list([find() if accelerator.is_main_process else None])
    return found[0]


def _number(path: str) -> int:
    found = re.search(r"(\d+)$", path)
    return -1 if found is None else int(found[1])


def _automatic(accelerator: Any) -> list[str]:
    """The checkpoints that were named automatically, the oldest first."""
    folder = Path(accelerator.project_dir, "checkpoints")
    return sorted((str(path) for path in folder.glob("checkpoint_*")), key=_number)


# -- States. -----------------------------------------------------------------------------------------------------------


def _numbered(kind: str, values: Any) -> dict[str, Any]:
    return {kind if number == 0 else f"{kind}_{number}": value for number, value in enumerate(values)}


def _state(accelerator: Any) -> dict[str, Any]:
    """What is saved, and loaded into."""
    unwrap, scaler = accelerator.unwrap_model, accelerator.scaler
    return {
        **_numbered("model", [unwrap(model, keep_torch_compile=False) for model in accelerator._models]),
        **_numbered("optimizer", [getattr(one, "optimizer", one) for one in accelerator._optimizers]),
        **({} if scaler is None else {"scaler": scaler}),
        **_numbered("registered", accelerator._custom_objects),
    }


def _notes(accelerator: Any) -> dict[str, Any]:
    """What counts by processes, and how many there are."""
    return {
        "processes": accelerator.num_processes,
        "schedulers": [one.state_dict() for one in accelerator._schedulers],
        "loaders": [_note(loader) for loader in accelerator._dataloaders],
    }


def _note(loader: Any) -> dict[str, Any]:
    if getattr(loader, "use_stateful_dataloader", False):
        return {"state": loader.state_dict()}
    place = _place_of(loader)
    return {
        "rows": place.rows,
        "epoch": loader.iteration,
        "began": place.began if place.rows else _randomness_of(loader).state_dict(),
    }


def _save_state(options: Any, theirs: Any, accelerator: Any, output_dir: Any = None, *args: Any, **more: Any) -> Any:
    reason = _left_to_accelerate(accelerator)
    if reason is not None:
        LOG.warning("fastckpt: with %s, accelerate saves as it does without fastckpt", reason)
        return theirs(accelerator, output_dir, *args, **more)
    _finish(accelerator)
    naming, first = accelerator.project_configuration, accelerator.is_main_process
    if naming.automatic_checkpoint_naming:
        output_dir = Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
    path = str(Path(output_dir).expanduser())
    if naming.automatic_checkpoint_naming and _of_first(accelerator, lambda: is_sound(path)):
        raise ValueError(f"save_state: {path} exists: set project_configuration.iteration to a number that is free")
    if first and holds_remains(path):  # of accelerate's own save that was killed, or of a damaged checkpoint
        move_aside(path)

    def rotate() -> None:
        if first:
            if naming.automatic_checkpoint_naming:
                keep(naming.total_limit, {path}, _automatic(accelerator))
            sweep(str(Path(path).parent))

    pending = distributed.save_async(
        _state(accelerator),
        path,
        ranks=distributed.Ranks(on_difference="warn"),
        per_rank={"random": fastckpt.randomness(), "step": accelerator.step, **_notes(accelerator)},
        files=fastckpt.Files(model_key="model") if accelerator._models else None,
        io=options["io"],
    )
    _last_saves.setdefault(accelerator, LastSave()).begin(pending, rotate)
    naming.iteration += 1
    if not options["background"]:
        _finish(accelerator)
    return Path(path)


def _finish(accelerator: Any) -> None:
    if accelerator in _last_saves:
        _last_saves[accelerator].finish()


def _end_training(_: Any, theirs: Any, accelerator: Any) -> None:
    _finish(accelerator)
    theirs(accelerator)


def _load_state(_: Any, theirs: Any, accelerator: Any, input_dir: Any = None, *args: Any, **more: Any) -> Any:
    _finish(accelerator)
    automatic = input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming
    if automatic:
        input_dir = _of_first(accelerator, lambda: newest_that_verifies(reversed(_automatic(accelerator))))
    path = None if input_dir is None else str(Path(input_dir).expanduser())
    if not is_ours(path):
        return theirs(accelerator, input_dir, *args, **more)
    assert path is not None  # noqa: S101 - is_ours
    state = _state(accelerator)
    distributed.load(path, into=state, keys=[*state])
    try:
        own = distributed.load_per_rank(path)
    except ValueError as error:
        LOG.warning("fastckpt: random states of processes are not restored: %s", error)
        own = {**distributed.load_per_rank(path, rank=0), "random": None}
    for one, saved in zip(accelerator._schedulers, own["schedulers"], strict=True):
        _resume_schedule(one, saved, own["processes"], accelerator.num_processes)
    for loader, note in zip(accelerator._dataloaders, own["loaders"], strict=True):
        _resume_loader(loader, note)
    accelerator.step = own["step"]
    if own["random"] is not None:
        fastckpt.randomness().load_state_dict(own["random"])
        for loader in accelerator._dataloaders:
            _place_of(loader).randomness = own["random"]
    if automatic:
        accelerator.project_configuration.iteration = _number(path) + 1
    return None


# -- Schedules: a prepared one takes a step for each process. ----------------------------------------------------------


def _resume_schedule(scheduler: Any, saved: dict[str, Any], before: int, now: int) -> None:
    inner = getattr(scheduler, "scheduler", scheduler)
    inner.load_state_dict(saved)
    counts = getattr(scheduler, "step_with_optimizer", False) and not scheduler.split_batches
    if before == now or not counts:
        return
    if not hasattr(inner, "lr_lambdas"):
        # Where it ends is in its state, counted in the steps of as many processes as the run began with.
        _paces[scheduler] = before
        scheduler.split_batches = True  # one step for each call
        return
    # Its functions are those of this program, which counts in the steps of the processes that there are now.
    inner.last_epoch = inner.last_epoch * now // before
    inner._step_count = inner.last_epoch + 1
    inner._last_lr = [
        base * rate(inner.last_epoch) for base, rate in zip(inner.base_lrs, inner.lr_lambdas, strict=True)
    ]
    for group, rate in zip(inner.optimizer.param_groups, inner._last_lr, strict=True):
        group["lr"] = rate


#: The processes for which a schedule takes steps, where these are not those that there are.
_paces: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def _step(_: Any, theirs: Any, scheduler: Any, *args: Any, **more: Any) -> None:
    inner = scheduler.scheduler
    for _number in range(_paces.get(scheduler, 1) if scheduler.gradient_state.sync_gradients else 1):
        if scheduler not in _paces or inner._step_count <= getattr(inner, "total_steps", inner._step_count):
            theirs(scheduler, *args, **more)


# -- Loaders. ----------------------------------------------------------------------------------------------------------


def _place_of(loader: Any) -> Place:
    place = _places.get(loader)
    if place is None:
        place = _places[loader] = Place(loader)
    return place


class _Generator:
    """A generator of random numbers, as a state."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "generator" in state:
            self._generator.set_state(state["generator"])


def _randomness_of(loader: Any) -> Any:
    """What decides the order of an epoch's rows, unless a seed does."""
    generator = getattr(loader, "synchronized_generator", None)
    return fastckpt.randomness() if generator is None else _Generator(generator)


def _resume_loader(loader: Any, note: dict[str, Any]) -> None:
    if "state" in note:
        loader.load_state_dict(note["state"])
        return
    loader.iteration = note["epoch"]
    place = _place_of(loader)
    place.skip, place.rows, place.began = note["rows"], 0, note["began"]


def _iterate(_: Any, theirs: Any, loader: Any) -> Iterator[Any]:
    place = _place_of(loader)
    size, skip = place.owner.total_batch_size, place.skip
    if skip and loader is place.owner:
        # The rest of an epoch, by accelerate's own way to take it.
        yield from _skip_first_batches(None, _SKIP, loader, skip // size)
        return
    decides = _randomness_of(loader)
    if skip and place.began is not None:
        decides.load_state_dict(place.began)
    place.rows, place.skip, place.began = skip // size * size, 0, decides.state_dict()
    for batch in theirs(loader):
        place.rows += size
        random, place.randomness = place.randomness, None
        if random is not None and skip:
            # What began the iteration has drawn numbers.
            fastckpt.randomness().load_state_dict(random)
        yield batch
    place.rows = 0
    place.owner.iteration = loader.iteration


def _skip_first_batches(_: Any, theirs: Any, loader: Any, num_batches: int = 0) -> Any:
    made = theirs(loader, num_batches)
    if loader in _places or isinstance(loader, _LOADERS):
        place = _places[made] = _place_of(loader)
        place.skip = num_batches * place.owner.total_batch_size
    return made


_LOADERS = (_data_loader.DataLoaderShard, _data_loader.DataLoaderDispatcher)
_SKIP = _data_loader.skip_first_batches
#: What is replaced, and by what.
_OURS: list[tuple[Any, str, Any]] = [
    (_accelerator.Accelerator, "save_state", _save_state),
    (_accelerator.Accelerator, "load_state", _load_state),
    (_accelerator.Accelerator, "end_training", _end_training),
    (_scheduler.AcceleratedScheduler, "step", _step),
    *((loader, "__iter__", _iterate) for loader in _LOADERS),
    *((module, "skip_first_batches", _skip_first_batches) for module in (_accelerator, _data_loader)),
]


def __dir__() -> list[str]:
    return sorted(__all__)
