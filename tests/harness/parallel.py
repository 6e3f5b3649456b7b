"""The states of one small training job, spread over ranks in every way.

The model is a transformer with odd sizes and tied weights; the optimizer is Adam after two steps. In every topology,
the values are those of one process, to the last bit, so the checkpoints of all topologies must be the same bytes.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness import needs

# FSDP of torch 2.6 refuses to shard tensors that tensor parallelism has divided unequally.
VOCABULARY = 61 if needs.torch_at_least(2, 7) else 64
WIDTH, INNER, BLOCKS = 24, 52, 2
#: The moments of Adam.
MOMENTS = ("exp_avg", "exp_avg_sq")


class Block(nn.Module):
    """A gated layer with a skip connection."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, layers and a head. With ``stage``, one half of a pipeline, with the keys of the whole model."""

    def __init__(self, *, tied: bool = True, stage: int | None = None, scale: int = 1) -> None:
        super().__init__()
        width, inner = WIDTH * scale, INNER * scale
        first, last = stage in (None, 0), stage in (None, 1)
        if first:
            self.embed = nn.Embedding(VOCABULARY, width)
        chosen = range(BLOCKS) if stage is None else (stage,)
        self.blocks = nn.ModuleDict({str(index): Block(width, inner) for index in chosen})
        if last:
            self.position = nn.Parameter(torch.full((1, 1, width), 0.5))
            self.gain = nn.Parameter(torch.ones(3))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied and first and last:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x + self.position) * self.gain.sum()


def batch() -> torch.Tensor:
    return (torch.arange(2 * 5) * 7 % VOCABULARY).reshape(2, 5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(batch()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)


@functools.cache
def _reference(tied: bool, scale: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trained values of the model and of the optimizer, as one process trains them."""
    threads = torch.get_num_threads()
    torch.manual_seed(20)
    # The order of sums must not depend on the machine.
    torch.set_num_threads(1)
    model = Model(tied=tied, scale=scale)
    optimizer = adam(model)
    train(model, optimizer)
    torch.set_num_threads(threads)
    return get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)


def distributed(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> Any:
    """A DTensor from values that all ranks have, without communication."""
    if "src_data_rank" in inspect.signature(distribute_tensor).parameters:
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    local = whole
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            cut, _ = placement._split_tensor(local, mesh.size(dimension), with_padding=False, contiguous=True)
            local = cut[mesh.get_local_rank(dimension)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def reference(*, tied: bool = True, scale: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of the model and the optimizer of one process, with trained values."""
    return copy.deepcopy(_reference(tied, scale))


def _alone(model: Model) -> nn.Module:
    return model


def _fsdp(model: Model, mesh: DeviceMesh | None = None) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@functools.cache
def _square(world: Any, names: tuple[str, str], *shape: int) -> DeviceMesh:
    """A mesh of two dimensions. A process makes each once per world: a gloo group of torch wakes its threads 100 times
    per second until the process ends."""
    del world  # another one has other groups
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _hsdp(model: Model) -> nn.Module:
    return _fsdp(model, _square(dist.group.WORLD, ("replicate", "shard"), 2, dist.get_world_size() // 2))


def _tensor_parallel(model: Model, mesh: DeviceMesh | None = None) -> nn.Module:
    """Apply tensor parallelism: rows of ``up``, columns of ``down``, rows of the tied embedding and head."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    tied = model.head.weight is model.embed.weight
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks.values():
        parallelize_module(block, mesh, plan)
    from torch.distributed.tensor import Replicate

    parallelize_module(model, mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})
    if tied:
        # The two layers share their rows, and the plan for the head gives the same placement.
        model.head.weight = model.embed.weight
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
        model.head.weight = model.embed.weight
    else:
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    return model


def _tensor_parallel_fsdp(model: Model) -> nn.Module:
    mesh = _square(dist.group.WORLD, ("data", "tensor"), dist.get_world_size() // 2, 2)
    return _fsdp(_tensor_parallel(model, mesh["tensor"]), mesh["data"])  # type: ignore[arg-type]


def _replicas(model: Model) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


# How each topology is made, and how many ranks it needs (None: any number).
TOPOLOGIES: dict[str, tuple[Callable[[Model], nn.Module], int | None]] = {
    "single": (_alone, 1),
    "ddp": (_replicas, None),
    "fsdp": (_fsdp, None),
    "hsdp": (_hsdp, 4),
    "tp": (_tensor_parallel, None),
    "tp_fsdp": (_tensor_parallel_fsdp, 4),
    "pipeline": (_alone, 2),
}


def build(topology: str, *, tied: bool = True, scale: int = 1, trained: bool = True) -> tuple[nn.Module, Any]:
    """Model and optimizer of this rank, with the values of :func:`reference`, or with other values for a load to
    replace (``trained=False``). Only the pipeline cannot tie the weights of its two stages."""
    stage = dist.get_rank() if topology == "pipeline" else None
    tied = tied and stage is None
    values, moments = reference(tied=tied, scale=scale)

    def spread(chosen: dict[str, Any]) -> nn.Module:
        """A model with these values, spread by torch itself, so that its moments are spread like its parameters."""
        made = Model(tied=tied, stage=stage, scale=scale)
        made.load_state_dict({key: chosen.get(key, each) for key, each in made.state_dict().items()})
        return TOPOLOGIES[topology][0](made)

    model = spread(values) if trained else spread({})
    optimizer = adam(model)
    # Moments as after a step with zero gradients. In a real step, each process would plan each operation's spread anew.
    for parameter in model.parameters():
        moments_of = {name: torch.zeros_like(parameter) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments_of}
    for moment in MOMENTS if trained else ():
        source = spread({key: each[moment] for key, each in moments["state"].items()})
        for parameter, wanted in zip(model.parameters(), source.parameters(), strict=True):
            optimizer.state[parameter][moment].copy_(wanted.detach())
            optimizer.state[parameter]["step"].fill_(2)
    return model, optimizer


def state(topology: str, **options: Any) -> dict[str, Any]:
    """The state of training: ``get_state_dict`` of model and optimizer, and a few other values."""
    model, optimizer = build(topology, **options)
    return state_of(model, optimizer)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": 2,
        "lr": [0.01, None],
    }
