"""DeepSpeed's ``save_checkpoint`` and ``load_checkpoint`` write and read checkpoints of fastckpt.

fastckpt.integrations.deepspeed.install()  # docs/guides/deepspeed.md
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch  # noqa: TID251 - DeepSpeed's states are torch's
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

import fastckpt
from fastckpt import distributed
from fastckpt._api.io import check_io
from fastckpt._installed import Installation, Installed

from ._directory import is_ours
from ._processes import crew_of, on_all

__all__ = ["install"]

_installed = Installed()
#: The key of everything except the tensors of parameters; and, among these tensors, the key of the updated weights.
_ABOUT, _MASTER = "deepspeed", "fp32"
#: The attributes of ZeRO's optimizers with the parameters by group, and with the tensors that this process updates.
_PLACES = {
    DeepSpeedZeroOptimizer: ("bit16_groups", "single_partition_of_fp32_groups"),
    BF16_Optimizer: ("bf16_groups", "fp32_groups_flat_partition"),
    DeepSpeedZeroOptimizer_Stage3: ("fp16_groups", "fp32_partitioned_groups_flat"),
}
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def install(*, io: Any = "auto") -> Installation:
    """Make ``save_checkpoint`` and ``load_checkpoint`` of DeepSpeed's engines use fastckpt.

    All processes write one checkpoint, of whole tensors under the names of the parameters: the weights, and their
    optimizer states. Any number of processes can resume from it, with ZeRO 1, 2 or 3. ``latest`` is written once the
    checkpoint is durable. Each process gets its own ``client_state`` back, or that of process 0 if it saved none.

    Args:
        io: how bytes move: a :class:`fastckpt.IO`, or the name of an engine.

    Returns:
        A context manager that ends the installation, as ``uninstall`` does. Otherwise it lasts as long as the process.

    Raises:
        TypeError: ``io`` has another type.
        ValueError: ``io`` names an unknown engine.

    Example:
        >>> import fastckpt
        >>> with fastckpt.integrations.deepspeed.install():
        ...     pass  # engine.save_checkpoint("runs")
    """
    ours = ((DeepSpeedEngine, one.__name__[1:], one) for one in (_save_checkpoint, _load_checkpoint))
    return _installed.begin({"io": check_io("install", io)}, ours)


def _check(operation: str, engine: Any, custom_load_fn: Any = None) -> None:
    """Refuse an engine with a state that this module does not support, and a custom function for loading."""
    optimizer, model = engine.optimizer, engine.module
    own = [*model.parameters(), *model.buffers()]
    # Parameters that ZeRO 3 has partitioned are empty: they have no memory.
    known = {*map(id, own), *((one.data_ptr(), one.shape) for one in own if not hasattr(one, "ds_id"))}
    found = {name: one for name, one in model.state_dict(keep_vars=True).items() if not name.endswith("_extra_state")}
    places = {name: {id(one), (one.data_ptr(), one.shape)} for name, one in found.items() if torch.is_tensor(one)}
    # Filling these tensors would not change the model.
    strangers = ", ".join(name for name in found if known.isdisjoint(places.get(name, ())))
    reasons = {
        "optimizers other than those of ZeRO 1, 2 and 3": type(optimizer) not in _PLACES,
        "pipelines": engine.pipeline_parallelism,
        "mixtures of experts": engine.has_moe_layers,
        "tensor parallelism": engine.seq_dp_world_size != torch.distributed.get_world_size(),
        "states on NVMe": engine.zero_nvme_offload_optimizer() or getattr(optimizer, "params_in_nvme_and_cpu", False),
        "optimizers on two devices": hasattr(optimizer, "backup_optimizer"),
        "states that are offloaded now (engine.reload_states)": getattr(optimizer, "offloaded_states", None),
        "quantised weights": engine.zero_quantized_weights() or engine.zero_quantized_nontrainable_weights(),
        "hierarchical partitions": engine.zero_hpz_partition_size() > 1,
        "curricula and random layers": engine.curriculum_learning_enabled() or engine.random_ltd_enabled(),
        "ZenFlow": getattr(optimizer, "zenflow", False),
        "Muon": "muon" in type(getattr(optimizer, "optimizer", None)).__name__.lower(),
        "custom_load_fn": custom_load_fn,
        "deepspeed.linear": any(hasattr(one, "ds_optim_param") for one in model.parameters()),
        f"state_dict() with tensors beside the model's parameters and buffers, such as a copy ({strangers})": strangers,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise NotImplementedError(f"{operation}: fastckpt does not support {reason}: use DeepSpeed without install()")


@contextmanager
def _at_rest(engine: Any) -> Iterator[None]:
    """A context in which ZeRO 3 has only partitions. After an error, ranks may be gone: the next forward gathers."""
    getattr(engine.optimizer, "checkpoint_event_prologue", int)()
    yield
    getattr(engine.optimizer, "checkpoint_event_epilogue", int)()


def _own(param: Any) -> tuple[int, int, Any]:
    """The elements of a parameter that ZeRO 3 has on this rank, without padding: first, number, parameter's shape."""
    size = param.ds_tensor.ds_numel
    start = min(torch.distributed.get_rank() * size, param.ds_numel)
    return start, min(size, param.ds_numel - start), param.ds_shape


def _part(at: int, start: int, size: int, shape: Any, flat: Any) -> Any:
    return distributed.Part.flat(flat.detach().narrow(0, at, size), of=shape, start=start)


def _pieces(engine: Any) -> Iterator[tuple[str, int, Any, Any, Callable[[Any], Any]]]:
    """This process's part, perhaps empty, of each parameter of the optimizer, in the order of its groups.

    Yields name, group number, weights, the optimizer's flat tensor, and a function that makes the part of one like it.
    """
    optimizer = engine.optimizer
    groups, flats = (getattr(optimizer, name) for name in _PLACES[type(optimizer)])
    for number, (params, flat) in enumerate(zip(groups, flats, strict=True)):
        at = 0
        for param in params:
            name = engine.param_names[param]
            if hasattr(param, "ds_id"):
                group = optimizer.sub_group_to_group_id[number]
                yield name, group, param.ds_tensor[: _own(param)[1]], flat, partial(_part, at, *_own(param))
                at += param.ds_tensor.ds_numel
            else:
                found = param._hp_mapping  # None if other ranks have all of the parameter
                start, size = (found.lp_fragment_address.start, found.lp_fragment_address.numel) if found else (0, 0)
                at = found.hp_fragment_address.start if found else 0
                weight = param.detach().view(-1)[start : start + size]
                yield name, number, weight, flat, partial(_part, at, start, size, param.shape)


def _module(engine: Any, *, frozen: bool = True, buffers: bool = True) -> dict[str, Any]:
    """The model's state, and other trained parameters, with the parts of tensors that this process has."""
    found = engine.module.state_dict(keep_vars=True)
    has = {*found, *map(id, found.values())}
    found |= {name: one for one, name in engine.param_names.items() if one.requires_grad and not has & {name, id(one)}}
    # Each parameter has one part, so that tied weights are recognised.
    parts = {id(one): _part(0, *_own(one), one.ds_tensor) for one in found.values() if hasattr(one, "ds_id")}
    return {
        name: parts.get(id(one), one.detach() if isinstance(one, torch.Tensor) else one)
        for name, one in found.items()
        if (frozen or one.requires_grad if isinstance(one, torch.nn.Parameter) else buffers)
    }


def _others(engine: Any) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """Further state to save, by name, with the function that restores it. Each kind of scaler has its own name."""
    scaler, found = getattr(engine.optimizer, "loss_scaler", None), dict[str, Any]()
    for name, owner, members in (("engine", engine, _COUNTERS), (type(scaler).__name__, scaler, _SCALE)):
        if owner is not None:
            found[name] = {one: vars(owner)[one] for one in members if one in vars(owner)}, vars(owner).update
    objects = {"lr_scheduler": engine.lr_scheduler, "grad_scaler": engine.optimizer.torch_autocast_gradscaler}
    return found | {name: (one.state_dict(), one.load_state_dict) for name, one in objects.items() if one is not None}


def _restore(optimizer: Any, states: dict[Any, dict[str, Any]], options: list[dict[str, Any]]) -> None:
    """Load the states of flat tensors and the options of groups into the optimizer below ZeRO's, in torch's own way."""
    base, is_spread = optimizer.optimizer, isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    if is_spread:  # between steps, the groups are empty
        optimizer._set_fp32_optimizer_param_groups()
    state = base.state_dict()
    flats = [flat for group in base.param_groups for flat in group["params"]]
    groups = [{**new, "params": old["params"]} for new, old in zip(options, state["param_groups"], strict=True)]
    base.load_state_dict({"state": {at: states[flat] for at, flat in enumerate(flats)}, "param_groups": groups})
    if is_spread:
        optimizer._clear_fp32_optimizer_param_groups()
    else:  # since the first step, parameters have views into the states
        optimizer._hp_optimizer_states_linked = False
        if all(states[flat] for flat in flats):
            optimizer._lazy_init_hp_params_optimizer_state()


def _state(engine: Any, *, frozen: bool) -> dict[str, Any]:
    """The state that this process saves; values that are not tensors come from the first process."""
    optimizer, tensors = engine.optimizer, defaultdict[str, dict[str, Any]](dict)
    groups: list[dict[str, Any]] = [{"params": [], "options": {**one, "params": 0}} for one in optimizer.param_groups]
    for name, number, weight, flat, part in _pieces(engine):
        held = optimizer.optimizer.state.get(flat, {})
        # If the optimizer updates the weights in place, there is no second copy.
        flats = {_MASTER: flat} if flat.dtype != weight.dtype else {}
        found = {key: value for key, value in held.items() if isinstance(value, torch.Tensor)}
        flats |= {key: value for key, value in found.items() if (value.shape, value.dtype) == (flat.shape, flat.dtype)}
        rest = {key: value for key, value in held.items() if key not in flats}
        if odd := [key for key in rest.keys() & found if found[key].numel() > 1 or found[key].shape == flat.shape]:
            raise NotImplementedError(f"save_checkpoint: tensors differ from the parameters in size or dtype: {odd}")
        for key, value in flats.items():
            tensors[key][name] = part(value)
        groups[number] |= {"tensors": [*flats], "rest": rest}
        groups[number]["params"].append(name)
    is_first = torch.distributed.get_rank() == 0
    state: dict[str, Any] = {"module": _module(engine, frozen=frozen, buffers=is_first), "optimizer": dict(tensors)}
    if is_first:
        state[_ABOUT] = {"groups": groups, "others": {name: one for name, (one, _) in _others(engine).items()}}
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

    def tell() -> None:
        with fastckpt.open_write(Path(given["save_dir"], "latest")) as file:
            file.write(tag.encode())

    on_all("save_checkpoint", path, partial(_check, "save_checkpoint", engine), crew)
    make = partial(_state, engine, frozen=not given["exclude_frozen_parameters"])
    with _at_rest(engine):
        state, own = on_all("save_checkpoint", path, make, crew), given["client_state"] or {}
        distributed.save(state, path, per_rank=own, files=fastckpt.Files(model_key="module"), io=options["io"])
    if given["save_latest"]:
        crew.first("save_checkpoint", tell)
    return True


def _find(load_dir: Any, tag: Any = None, *_: Any, **__: Any) -> str | None:
    """The checkpoint to load, if fastckpt wrote it."""
    latest = Path(load_dir, "latest")
    name = latest.read_text().strip() if tag is None and latest.is_file() else tag
    path = Path(load_dir, str(name)).absolute()
    return str(path) if name is not None and is_ours(path) else None


def _load_checkpoint(options: Any, theirs: Any, engine: Any, *args: Any, **more: Any) -> Any:
    path = (crew := crew_of(engine)).first("load_checkpoint", partial(_find, *args, **more))
    if path is None:
        return theirs(engine, *args, **more)
    given, io = _given(theirs, engine, *args, **more), options["io"]
    on_all("load_checkpoint", path, partial(_check, "load_checkpoint", engine, given["custom_load_fn"]), crew)
    alone, strict = given["load_module_only"], given["load_module_strict"]
    # What each process reads alone comes before the engine changes.
    about = distributed.load(path, keys=_ABOUT, io=io)[_ABOUT]
    saved, client_state = on_all("load_checkpoint", path, partial(_client_state, path, crew), crew)
    with _at_rest(engine):
        _load(engine, path, about["groups"], strict=strict, whole=given["load_optimizer_states"] and not alone, io=io)
    engine.loaded_checkpoint_dp_world_size = saved
    if not alone:
        # Both scales belong to the optimizer.
        asked = {"engine": True, "lr_scheduler": given["load_lr_scheduler_states"]}
        for name, (_, restore) in _others(engine).items():
            if name in about["others"] and asked.get(name, given["load_optimizer_states"]):
                restore(about["others"][name])
    return path, client_state


def _client_state(path: str, crew: Any) -> tuple[int, Any]:
    """The number of processes that saved, and the client state of this one, or else of the first one."""
    with fastckpt.open(path) as found:
        saved = found.ranks
    read = partial(distributed.load_per_rank, path, registry=fastckpt.Registry(undeclared="plain"))
    return saved, (read(rank=crew.rank) if saved == crew.size else None) or read(rank=0)


def _load(engine: Any, path: str, groups: list[dict[str, Any]], *, strict: bool, whole: bool, io: Any) -> None:
    """Fill the weights and the optimizer's copy of them; if ``whole``, also the optimizer's states and options."""
    optimizer, own = engine.optimizer, [*_pieces(engine)]
    saved = {name: (number, group) for number, group in enumerate(groups) for name in group["params"]}
    if whole and [one[:2] for one in own] != [(name, number) for name, (number, _) in saved.items()]:
        raise ValueError(f"load_checkpoint: {path} differs in parameter groups: use the same, or load_module_only=True")
    into, states = defaultdict[str, dict[str, Any]](dict), dict[Any, dict[str, Any]]()
    for name, _, _, flat, part in own:
        _, group = saved.get(name, (0, {"tensors": (), "rest": {}}))
        state = states.setdefault(flat, deepcopy(group["rest"]))
        for key in group["tensors"] if whole else {_MASTER}.intersection(group["tensors"]):
            if key != _MASTER and key not in state:
                held = optimizer.optimizer.state.get(flat, {}).get(key)
                state[key] = torch.zeros_like(flat) if held is None else held
            into[key][name] = part(state.get(key, flat))
    found = distributed.load(path, into={"module": _module(engine)}, keys="module", strict=strict, io=io)["module"]
    if extra := {key: found[key] for key in found if key.endswith("_extra_state")}:
        engine.module.load_state_dict(extra, strict=False)
    if keys := [f"optimizer.{key}" for key in into]:
        distributed.load(path, into={"optimizer": dict(into)}, keys=keys, strict=whole, io=io)
    for name, _, weight, flat, part in own:
        if name not in into.get(_MASTER, {}):
            part(flat).tensor.copy_(weight)
    if whole:
        _restore(optimizer, states, [group["options"] for group in groups])
