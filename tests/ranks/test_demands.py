"""What a rank demands of a checkpoint: parts of tensors into the memory that is in ``into``, whatever that holds."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fastckpt
from fastckpt import StructureMismatchError, _core
from fastckpt._api.load_settings import LoadSettings
from fastckpt._ranks.demands import Wanting, bitmap, combine_wanted, common, demands, numbers_in
from fastckpt._ranks.offers import combine_offers
from fastckpt._tensors.spread import part_of
from harness import needs


def gathered(value):
    out: list = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def load(path, into, **options):
    """Load as ranks do, but each takes its parts from the whole tensors by itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reader = _core.Reader(str(path))
    wanted = demands(reader, str(path), LoadSettings.of("load", options), into, rank, range(size))
    agreement = Wanting(wanted)
    verdict = agreement.decide(combine_wanted(gathered(agreement.arrival())))
    answer = None
    if agreement.is_open(verdict):
        answer = agreement.unite(combine_offers(gathered(agreement.offer(verdict))))
    agreed = agreement.settle(verdict, answer)
    assert len({request[:2] for request in agreed.requests}) == len(agreed.requests)
    assert len(set(map(repr, gathered((agreed.wanted, agreed.spreads))))) == 1
    with fastckpt.open(path) as checkpoint:
        for index, request in enumerate(agreed.requests):
            number, spreads = agreed.wanted[request.tensor]
            mine = [agreed.spreads[each] for each in spreads if rank in agreed.spreads[each].ranks]
            fill(agreed, index, checkpoint, reader.tensors()[number].name, mine[request.part])
    return wanted.build(), wanted, verdict


def fill(agreed, index, checkpoint, name, spread):
    full = np.asarray(checkpoint[name])
    indices = [
        [at for start, stop in each for at in range(start, stop)]
        for each in part_of(full.shape, spread, dist.get_rank())
    ]
    part = np.ascontiguousarray(full[np.ix_(*indices)] if indices else full)
    request = agreed.requests[index]
    data = np.frombuffer(part.tobytes(), np.uint8)
    if request.strides is not None:
        low = (ctypes.c_char * request.nbytes).from_address(request.address)
        np.ndarray(part.shape, part.dtype, low, strides=request.strides)[...] = part
    elif request.address:
        assert request.nbytes == part.nbytes
        ctypes.memmove(request.address, part.tobytes(), part.nbytes)
    else:
        # In two pieces, the second first, as messages come.
        middle = data.nbytes // 2
        agreed.drain([(index, middle, data.ctypes.data + middle, data.nbytes - middle)])
        agreed.drain([(index, 0, data.ctypes.data, middle)])


def numbered(*shape):
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape) + 1


def _tensors(path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    names = {
        "rows": [Shard(0), Shard(0)],
        "columns": [Replicate(), Shard(1)],
        "both": [Shard(1), Shard(0)],
        "whole": [Replicate(), Replicate()],
    }
    state = {"model": {name: numbered(5, 3) for name in (*names, "plain", "turned", "cast")}, "step": 4}
    state["model"]["empty"] = torch.empty(0, 2)
    if dist.get_rank() == 0:
        fastckpt.save(state, path)
    dist.barrier()
    into = {name: distribute_tensor(torch.zeros(5, 3), mesh, cut) for name, cut in names.items()}
    row = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0), Replicate()])
    gaps = torch.zeros(*row.to_local().shape, 2)[..., 0].t().contiguous().t()
    into["turned"] = DTensor.from_local(
        gaps, mesh, [Shard(0), Replicate()], run_check=False, shape=row.shape, stride=row.stride()
    )
    into["empty"] = distribute_tensor(torch.empty(0, 2), mesh, [Shard(0), Shard(0)])
    into["cast"] = distribute_tensor(torch.zeros(5, 3, dtype=torch.bfloat16), mesh, [Shard(0), Shard(1)])
    into["plain"] = torch.zeros(5, 3)
    loaded, wanted, verdict = load(path, {"model": into}, dtype={"model.cast": "bfloat16"})
    assert verdict == ["equal", None]
    assert loaded["step"] == 4
    for name, value in into.items():
        assert loaded["model"][name] is value
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full.float(), state["model"][name]), name
    # All ranks name the empty ones, too.
    assert wanted.unwanted() is None


def _modules_and_optimizers(path) -> None:
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(whole.parameters(), amsgrad=True)
    whole(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        fastckpt.save({"model": whole, "optimizer": optimizer}, path)
    dist.barrier()
    for steps in (0, 1):
        model = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 2))
        fully_shard(model[0])
        fully_shard(model)
        mine = torch.optim.AdamW(model.parameters(), amsgrad=True)
        if steps:
            model(torch.randn(4, 3)).sum().backward()
            mine.step()
        loaded, _, _ = load(path, {"model": model, "optimizer": mine})
        assert loaded["model"] is model
        for name, value in whole.state_dict().items():
            found = model.state_dict()[name]
            assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, value)
        for number, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                found = mine.state_dict()["state"][number][name]
                assert isinstance(found, DTensor) == (name != "step")
                assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, value)
        # It goes on from there.
        model(torch.ones(4, 3)).sum().backward()
        mine.step()
    into = get_optimizer_state_dict(model, mine)
    with pytest.raises(StructureMismatchError, match="not in the checkpoint"):
        demands(_core.Reader(str(path)), str(path), LoadSettings.of("load", {}), {"optimizer": into}, 0, range(2))


def _stages(path) -> None:
    rank = dist.get_rank()
    if rank == 0:
        fastckpt.save({"model": {f"layer{at}": numbered(at + 2) for at in range(4)}, "note": "x"}, path)
    dist.barrier()
    into = {"model": {f"layer{rank}": torch.zeros(rank + 2), f"layer{(rank + 1) % 4}": torch.zeros((rank + 1) % 4 + 2)}}
    loaded, wanted, verdict = load(path, into)
    assert verdict == ["tables", None]
    for value in into["model"].values():
        assert torch.equal(value, numbered(len(value)))
    assert loaded["note"] == "x"
    assert set(loaded["model"]) == set(into["model"])
    others = {f"model.layer{at}" for at in range(4)} - {f"model.{name}" for name in into["model"]}
    assert set(wanted.names_of(wanted.unwanted())) == others
    # What no rank wants is an error for all, unless it may be.
    less = {"model": {f"layer{rank % 2}": torch.zeros(rank % 2 + 2)}}
    with pytest.raises(
        StructureMismatchError, match=r"no rank has a destination.* 2 tensors of .*\n  model\.layer2\n  model\.layer3$"
    ):
        load(path, less)
    _, wanted, verdict = load(path, less, strict=False)
    assert wanted.names_of(verdict[1]) == ("model.layer2", "model.layer3")
    # And what a rank has beyond the checkpoint is one of its own.
    with pytest.raises(StructureMismatchError, match=r"\['model'\]\['more'\]: not in the checkpoint"):
        load(path, {"model": {"more": torch.zeros(1)}})


def _a_tie_of_the_checkpoint(path) -> None:
    """What is stored once may be wanted in several places, by each rank in another way."""
    mesh = init_device_mesh("cpu", (2,))
    shared = numbered(6, 2)
    if dist.get_rank() == 0:
        fastckpt.save({"a": shared, "b": shared, "c": shared, "d": shared}, path)
    dist.barrier()
    into = {
        "a": torch.zeros(6, 2),
        "b": torch.zeros(6, 2),
        "c": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)]),
        "d": distribute_tensor(torch.zeros(6, 2), mesh, [Replicate()]),
    }
    loaded, _, _ = load(path, into)
    for name, value in loaded.items():
        assert value is into[name]
        assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, shared)
    # One rank wants it twice, the other once.
    mine = {name: torch.zeros(6, 2) for name in (("a", "b") if dist.get_rank() else ("a",))}
    loaded, _, verdict = load(path, mine)
    assert verdict[0] == "tables"
    assert all(torch.equal(value, shared) for value in mine.values())


def _mismatches(path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    if dist.get_rank() == 0:
        fastckpt.save({"a": numbered(6, 2), "s": numbered(6, 2).to_sparse()}, path)
    dist.barrier()
    for value, reason in (
        (
            distribute_tensor(torch.zeros(6, 3), mesh, [Shard(0)]),
            r"shape \[6, 2\] in the checkpoint, \[6, 3\] in into=",
        ),
        (
            distribute_tensor(torch.zeros(6, 2).int(), mesh, [Shard(0)]),
            "dtype float32 in the checkpoint, int32 in into=",
        ),
    ):
        with pytest.raises(StructureMismatchError, match=reason):
            load(path, {"a": value}, keys="a")
    value = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])
    with pytest.raises(StructureMismatchError, match=r"\['s'\]"):
        load(path, {"s": value}, keys="s*")
    # A rank that leaves out what is spread over it.
    with pytest.raises(
        ValueError, match=r"^load: .*\n  \['a'\]: a DTensor over ranks 0, 1 on rank 0, no such on rank 1"
    ):
        load(path, {"a": value} if dist.get_rank() == 0 else {"s": numbered(6, 2).to_sparse()}, strict=False)
    with pytest.raises(StructureMismatchError, match=r"fastckpt\.distributed\.load fills it"):
        fastckpt.load(path, into={"a": value}, keys="a")
    dist.barrier()


def _new_tensors(path) -> None:
    if dist.get_rank() == 0:
        fastckpt.save({"a": numbered(3), "b": np.arange(4.0), "c": b"x" * 5000}, path)
    dist.barrier()
    loaded, wanted, verdict = load(path, None)
    assert verdict == ["equal", None]
    assert torch.equal(loaded["a"], numbered(3))
    assert np.array_equal(loaded["b"], np.arange(4.0))
    assert loaded["c"] == b"x" * 5000
    assert wanted.unwanted() is None


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (4, _tensors),
        (2, _modules_and_optimizers),
        (4, _stages),
        (2, _a_tie_of_the_checkpoint),
        (2, _mismatches),
        (2, _new_tensors),
    ],
    ids=lambda case: case.__name__.strip("_") if callable(case) else None,
)
def test_demands(forge, tmp_path, size, case):
    if case is _modules_and_optimizers:
        needs.of_torch(hasattr(torch.cpu.Stream, "record_event"), "training under fully_shard on the CPU")
    with forge.group(size) as group:
        group.run(case, tmp_path / "c")


def test_bitmaps():
    one, other = bitmap({1, 5, 900}, 1000), bitmap({5, 7, 900}, 1000)
    assert numbers_in(common([one, other, one])) == [5, 900]
    assert common([one, bitmap({2}, 1000)]) is None
    assert common([one, None]) is None
    assert numbers_in(common([one, one])) == [1, 5, 900]
    assert bitmap(set(), 10) is None
    assert numbers_in(None) == []
    assert len(bitmap(set(range(0, 100_000, 2)), 100_000)) < 1000
