"""What an engine of DeepSpeed has in this process: parts of parameters and of the optimizer's tensors, and numbers."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID251 - DeepSpeed's states are torch's
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from fastckpt.distributed import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Where each of ZeRO's optimizers has the parameters by group, and of each group what it updates in this process.
_PLACES = {
    DeepSpeedZeroOptimizer: ("bit16_groups", "single_partition_of_fp32_groups"),
    BF16_Optimizer: ("bf16_groups", "fp32_groups_flat_partition"),
    DeepSpeedZeroOptimizer_Stage3: ("fp16_groups", "fp32_partitioned_groups_flat"),
}
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def check(operation: str, engine: Any) -> None:
    """Refuse an engine with a state that this module does not know."""
    optimizer, strangers = engine.optimizer, ", ".join(_strangers(engine.module))
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
        "deepspeed.linear": any(hasattr(one, "ds_optim_param") for one in engine.module.parameters()),
        f"state_dict() with what is no parameter or buffer of the model, such as a copy ({strangers})": strangers,
    }
    for reason, holds in reasons.items():
        if holds:
            raise NotImplementedError(
                f"{operation}: fastckpt does not support {reason}: end install() to have DeepSpeed do it"
            )


def _strangers(model: Any) -> list[str]:
    """The keys of the model's state that a load would fill without effect."""
    own = [*model.parameters(), *model.buffers()]
    # Parameters that ZeRO 3 has spread are empty: they have no place.
    known = {*map(id, own), *((one.data_ptr(), one.shape) for one in own if not hasattr(one, "ds_id"))}
    return [
        name
        for name, one in model.state_dict(keep_vars=True).items()
        if not name.endswith("_extra_state")
        and not (isinstance(one, torch.Tensor) and known.intersection((id(one), (one.data_ptr(), one.shape))))
    ]


@contextmanager
def at_rest(engine: Any) -> Iterator[None]:
    """Inside, ZeRO 3 has parts alone. After an error, in which ranks may be gone, the next forward gathers the rest."""
    getattr(engine.optimizer, "checkpoint_event_prologue", int)()
    yield
    getattr(engine.optimizer, "checkpoint_event_epilogue", int)()


def _own(param: Any) -> tuple[int, int, Any]:
    """Of the elements that ZeRO 3 has of a parameter here, padding aside: the first, how many, and of what shape."""
    size = param.ds_tensor.ds_numel
    start = min(torch.distributed.get_rank() * size, param.ds_numel)
    return start, min(size, param.ds_numel - start), param.ds_shape


def _part(at: int, start: int, size: int, shape: Any, flat: Any) -> Part:
    return Part.flat(flat.detach().narrow(0, at, size), of=shape, start=start)


def pieces(engine: Any) -> Iterator[tuple[str, int, Any, Any, Callable[[Any], Part]]]:
    """Of each parameter that the optimizer has, in the order of its groups, what this process has, if only nothing.

    The name, the number of the group, the weights, the optimizer's flat tensor, and a function that makes the part of
    the whole which is in that, or in another one like it.
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
                found = param._hp_mapping  # None: all of it is elsewhere
                start, size = (found.lp_fragment_address.start, found.lp_fragment_address.numel) if found else (0, 0)
                at = found.hp_fragment_address.start if found else 0
                weight = param.detach().view(-1)[start : start + size]
                yield name, number, weight, flat, partial(_part, at, start, size, param.shape)


def module(engine: Any, *, frozen: bool = True, buffers: bool = True) -> dict[str, Any]:
    """The model's state, with the parts of tensors that this process has."""
    found = engine.module.state_dict(keep_vars=True)
    # One for each, so that tied weights are seen to be tied.
    parts = {id(one): _part(0, *_own(one), one.ds_tensor) for one in found.values() if hasattr(one, "ds_id")}
    return {
        name: parts.get(id(one), one.detach() if isinstance(one, torch.Tensor) else one)
        for name, one in found.items()
        if (frozen or one.requires_grad if isinstance(one, torch.nn.Parameter) else buffers)
    }


def holders(engine: Any) -> dict[str, Any]:
    """What else has a state, by name."""
    found = {"lr_scheduler": engine.lr_scheduler, "grad_scaler": engine.optimizer.torch_autocast_gradscaler}
    return {name: holder for name, holder in found.items() if holder is not None}


def numbers(engine: Any) -> dict[str, Any]:
    """The owners of counters, and of the scale of losses, by name; those of another scaler have other names."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    scale = {f"{type(scaler).__name__}.{name}": scaler for name in _SCALE if hasattr(scaler, name)}
    return {**dict.fromkeys(_COUNTERS, engine), **scale}


def restore(optimizer: Any, states: dict[Any, dict[str, Any]], options: list[dict[str, Any]]) -> None:
    """Give the optimizer below ZeRO's the states of flat tensors, and the options of its groups, in torch's own way."""
    base, is_spread = optimizer.optimizer, isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    if is_spread:  # between steps, the groups are empty
        optimizer._set_fp32_optimizer_param_groups()
    state = base.state_dict()
    flats = [flat for group in base.param_groups for flat in group["params"]]
    groups = [{**new, "params": old["params"]} for new, old in zip(options, state["param_groups"], strict=True)]
    base.load_state_dict({"state": {at: states[flat] for at, flat in enumerate(flats)}, "param_groups": groups})
    if is_spread:
        optimizer._clear_fp32_optimizer_param_groups()
    else:  # parameters have views into the states, since the first step
        optimizer._hp_optimizer_states_linked = False
        if all(states[flat] for flat in flats):
            optimizer._lazy_init_hp_params_optimizer_state()
