"""DeepSpeed's ``save_checkpoint`` and ``load_checkpoint`` write and read checkpoints of fastckpt.

    fastckpt.integrations.deepspeed.install()

Each tag is one checkpoint, for any number of processes and any stage of ZeRO (docs/guides/deepspeed.md).
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch  # noqa: TID251 - DeepSpeed's states are torch's
from deepspeed.runtime.engine import DeepSpeedEngine

import fastckpt
from fastckpt import distributed
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed

from ._directory import is_ours
from ._processes import crew_of, on_all
from ._zero import at_rest, check, holders, module, numbers, pieces, restore

__all__ = ["install"]

_installed = Installed()
#: The key of what is no tensor of a parameter; among those that are, the key of the weights that are updated.
_ABOUT, _MASTER = "deepspeed", "fp32"


def install(*, io: Any = "auto") -> Installation:
    """Have ``save_checkpoint`` and ``load_checkpoint`` of DeepSpeed's engines go through fastckpt.

    All processes write one checkpoint, of whole tensors under the names of the parameters: the weights, and what the
    optimizer has of them, to the last bit. Any number of processes goes on from it, with ZeRO 1, 2 or 3. Each process
    gets its own ``client_state`` back, or the first one's, where it gave none or another number of processes saved.
    ``latest`` is written once the checkpoint is durable. Checkpoints of DeepSpeed itself are loaded by it.

    Args:
        io: how bytes move: a :class:`fastckpt.IO`, or the name of an engine.

    Returns:
        A context manager, which ends it; so does its ``uninstall``. Without either it lasts as long as the process.

    Raises:
        TypeError: ``io`` is neither.
        ValueError: ``io`` names an unknown engine.

    Example:
        >>> import fastckpt
        >>> with fastckpt.integrations.deepspeed.install():
        ...     pass  # engine.save_checkpoint("runs")
    """
    ours = ((DeepSpeedEngine, one.__name__[1:], one) for one in (_save_checkpoint, _load_checkpoint))
    return _installed.begin({"io": check_io("install", io)}, ours)


def _state(engine: Any, *, frozen: bool) -> dict[str, Any]:
    """What this process saves; of what is no tensor, the first one's counts."""
    optimizer, tensors = engine.optimizer, defaultdict[str, dict[str, Any]](dict)
    groups: list[dict[str, Any]] = [{"params": [], "options": {**one, "params": 0}} for one in optimizer.param_groups]
    for name, number, weight, flat, part in pieces(engine):
        held = optimizer.optimizer.state.get(flat, {})
        # Weights that the optimizer updates in place have no second copy.
        flats = {_MASTER: flat} if flat.dtype != weight.dtype else {}
        found = {key: value for key, value in held.items() if isinstance(value, torch.Tensor)}
        flats |= {key: value for key, value in found.items() if (value.shape, value.dtype) == (flat.shape, flat.dtype)}
        rest = {key: value for key, value in held.items() if key not in flats}
        if odd := [key for key in rest.keys() & found if found[key].numel() > 1 or found[key].shape == flat.shape]:
            raise NotImplementedError(f"save_checkpoint: the optimizer has tensors of other sizes or dtypes: {odd}")
        for key, value in flats.items():
            tensors[key][name] = part(value)
        groups[number] |= {"tensors": [*flats], "rest": rest}
        groups[number]["params"].append(name)
    is_first = torch.distributed.get_rank() == 0
    state: dict[str, Any] = {"module": module(engine, frozen=frozen, buffers=is_first), "optimizer": dict(tensors)}
    if is_first:
        state[_ABOUT] = {
            "groups": groups,
            "numbers": {name: getattr(owner, name.rpartition(".")[2]) for name, owner in numbers(engine).items()},
            "held": {name: holder.state_dict() for name, holder in holders(engine).items()},
        }
    return state


def _given(theirs: Any, *args: Any, **more: Any) -> dict[str, Any]:
    """The arguments of a call, by name, with DeepSpeed's own defaults."""
    call = signature(theirs).bind(*args, **more)
    call.apply_defaults()
    return call.arguments


def _save_checkpoint(options: Any, theirs: Any, engine: Any, *args: Any, **more: Any) -> bool:
    given, crew = _given(theirs, engine, *args, **more), crew_of(engine)
    if not given["save_dir"]:
        raise ValueError("save_checkpoint: save_dir is empty: name the directory of the checkpoints")
    tag = f"global_step{engine.global_steps}" if given["tag"] is None else str(given["tag"])
    path = Path(given["save_dir"], tag).absolute()
    on_all("save_checkpoint", path, partial(check, "save_checkpoint", engine), crew)
    with at_rest(engine):
        make = partial(_state, engine, frozen=not given["exclude_frozen_parameters"])
        distributed.save(
            on_all("save_checkpoint", path, make, crew),
            path,
            per_rank=given["client_state"] or {},
            files=fastckpt.Files(model_key="module"),
            io=options["io"],
        )
    if given["save_latest"]:
        crew.first("save_checkpoint", partial(_tell, Path(given["save_dir"], "latest"), tag))
    return True


def _tell(path: Path, tag: str) -> None:
    with fastckpt.open_write(path) as file:
        file.write(tag.encode())


def _find(load_dir: Any, tag: Any = None, *_: Any, **__: Any) -> str | None:
    """The checkpoint that is to be loaded, if fastckpt wrote it."""
    latest = Path(load_dir, "latest")
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    path = Path(load_dir, str(tag)).absolute()
    return str(path) if tag is not None and is_ours(path) else None


def _load_checkpoint(options: Any, theirs: Any, engine: Any, *args: Any, **more: Any) -> Any:
    path = (crew := crew_of(engine)).first("load_checkpoint", partial(_find, *args, **more))
    if path is None:
        return theirs(engine, *args, **more)
    on_all("load_checkpoint", path, partial(check, "load_checkpoint", engine), crew)
    given, io = _given(theirs, engine, *args, **more), options["io"]
    if given["custom_load_fn"] is not None:
        raise NotImplementedError(f"load_checkpoint: {path}: fastckpt has no use for custom_load_fn")
    alone, strict = given["load_module_only"], given["load_module_strict"]
    # What a process reads alone comes before the engine changes.
    about = distributed.load(path, keys=_ABOUT, io=io)[_ABOUT]
    saved, client_state = on_all("load_checkpoint", path, partial(_client_state, path, crew), crew)
    with at_rest(engine):
        _load(engine, path, about["groups"], strict=strict, whole=given["load_optimizer_states"] and not alone, io=io)
    engine.loaded_checkpoint_dp_world_size = saved
    if not alone:
        engine.loaded_checkpoint_mp_world_size = 1
        for name, owner in numbers(engine).items():
            # The scale belongs to the optimizer.
            if name in about["numbers"] and (owner is engine or given["load_optimizer_states"]):
                setattr(owner, name.rpartition(".")[2], about["numbers"][name])
        asked = {"lr_scheduler": given["load_lr_scheduler_states"], "grad_scaler": given["load_optimizer_states"]}
        for name, holder in holders(engine).items():
            if asked[name] and name in about["held"]:
                holder.load_state_dict(about["held"][name])
    return path, client_state


def _client_state(path: str, crew: Any) -> tuple[int, Any]:
    """How many processes have saved, and what this one gave then, or the first one."""
    with fastckpt.open(path) as found:
        saved = found.ranks
    read = partial(distributed.load_per_rank, path, registry=fastckpt.Registry(undeclared="plain"))
    return saved, (read(rank=crew.rank) if saved == crew.size else None) or read(rank=0)


def _load(engine: Any, path: str, groups: list[dict[str, Any]], *, strict: bool, whole: bool, io: Any) -> None:
    """Fill the weights; those of the optimizer; and if ``whole`` its states, and its options."""
    optimizer, own = engine.optimizer, [*pieces(engine)]
    saved = {name: (number, group) for number, group in enumerate(groups) for name in group["params"]}
    if whole and [one[:2] for one in own] != [(name, number) for name, (number, _) in saved.items()]:
        raise ValueError(f"load_checkpoint: {path} has other groups of parameters: make the same, or load_module_only")
    into, states = defaultdict[str, dict[str, Any]](dict), dict[Any, dict[str, Any]]()
    for name, _, _, flat, part in own:
        _, group = saved.get(name, (0, {"tensors": (), "rest": {}}))
        state = states.setdefault(flat, deepcopy(group["rest"]))
        for key in group["tensors"] if whole else {_MASTER}.intersection(group["tensors"]):
            if key != _MASTER and key not in state:
                held = optimizer.optimizer.state.get(flat, {}).get(key)
                state[key] = torch.zeros_like(flat) if held is None else held
            into[key][name] = part(state.get(key, flat))
    found = distributed.load(path, into={"module": module(engine)}, keys="module", strict=strict, io=io)["module"]
    extra = {key: found[key] for key in found if key.endswith("_extra_state")}
    if extra:
        engine.module.load_state_dict(extra, strict=False)
    if into:
        distributed.load(
            path, into={"optimizer": dict(into)}, keys=[f"optimizer.{key}" for key in into], strict=whole, io=io
        )
    for name, _, weight, flat, part in own:
        if name not in into.get(_MASTER, {}):
            part(flat).tensor.copy_(weight)
    if whole:
        restore(optimizer, states, [group["options"] for group in groups])


def __dir__() -> list[str]:
    return sorted(__all__)
