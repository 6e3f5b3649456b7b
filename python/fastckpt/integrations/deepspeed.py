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
from ._processes import crew_of
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
        flats |= {key: value for key, value in held.items() if getattr(value, "shape", None) == flat.shape}
        rest = {key: value for key, value in held.items() if key not in flats}
        if any(isinstance(value, torch.Tensor) and value.numel() > 1 for value in rest.values()):
            raise NotImplementedError(f"save_checkpoint: the optimizer has tensors of other sizes among {[*rest]}")
        for key, value in flats.items():
            tensors[key][name] = part(value)
        groups[number] |= {"tensors": [*flats], "rest": rest}
        groups[number]["params"].append(name)
    state: dict[str, Any] = {"module": module(engine, frozen=frozen), "optimizer": dict(tensors)}
    if torch.distributed.get_rank() == 0:
        state[_ABOUT] = {
            "groups": groups,
            "numbers": {name: getattr(owner, name) for name, owner in numbers(engine).items()},
            "held": {name: holder.state_dict() for name, holder in holders(engine).items()},
        }
    return state


def _given(theirs: Any, *args: Any, **more: Any) -> dict[str, Any]:
    """The arguments of a call, by name, with DeepSpeed's own defaults."""
    call = signature(theirs).bind(*args, **more)
    call.apply_defaults()
    return call.arguments


def _save_checkpoint(options: Any, theirs: Any, engine: Any, *args: Any, **more: Any) -> bool:
    check("save_checkpoint", engine)
    given, crew = _given(theirs, engine, *args, **more), crew_of(engine)
    tag = f"global_step{engine.global_steps}" if given["tag"] is None else str(given["tag"])
    path = Path(given["save_dir"], tag).absolute()
    with at_rest(engine):
        distributed.save(
            _state(engine, frozen=not given["exclude_frozen_parameters"]),
            path,
            ranks=distributed.Ranks(on_difference="warn"),
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
    path = crew_of(engine).first("load_checkpoint", partial(_find, *args, **more))
    if path is None:
        return theirs(engine, *args, **more)
    check("load_checkpoint", engine)
    given, io = _given(theirs, engine, *args, **more), options["io"]
    if given["custom_load_fn"] is not None:
        raise NotImplementedError(f"load_checkpoint: {path}: fastckpt has no use for custom_load_fn")
    alone, strict = given["load_module_only"], given["load_module_strict"]
    about = distributed.load(path, keys=_ABOUT, io=io)[_ABOUT]
    with at_rest(engine):
        _load(engine, path, about["groups"], strict=strict, whole=given["load_optimizer_states"] and not alone, io=io)
    if not alone:
        for name, owner in numbers(engine).items():
            setattr(owner, name, about["numbers"].get(name, getattr(owner, name)))
        for name, holder in holders(engine).items():
            if name in about["held"] and (name != "lr_scheduler" or given["load_lr_scheduler_states"]):
                holder.load_state_dict(about["held"][name])
    try:
        own = distributed.load_per_rank(path)
    except ValueError:  # another number of processes has saved
        own = None
    return path, own or distributed.load_per_rank(path, rank=0)


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
