"""The parts of a tensor on each rank, as torch itself divides it and as DTensors describe it."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _utils, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from fastckpt._tensors import torch as _torch
from fastckpt._tensors.described import Unsupported
from fastckpt._tensors.spread import REPLICATE, Spread, in_order, local_shape, orders_of, part_of, simplest
from fastckpt._tensors.spreads import Spreads
from fastckpt.exceptions import UnsupportedTypeError
from harness import needs
from harness.internals import local_of

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (4, 1), (2, 2, 2), (3, 1, 2)]
placements = st.one_of(
    st.just(REPLICATE),
    st.tuples(st.just("shard"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("strided"), st.integers(0, 2), st.integers(1, 4)),
)


@st.composite
def cuts(draw):
    mesh = draw(st.sampled_from(MESHES))
    shape = draw(st.lists(st.integers(0, 9), min_size=3, max_size=3))
    return tuple(shape), mesh, tuple(draw(placements) for _ in mesh)


def of_torch(placement):
    kind, dim, factor = placement
    if kind == "replicate":
        return Replicate()
    return Shard(dim) if kind == "shard" else _StridedShard(dim, split_factor=factor)


def taken(full, ranges):
    """The elements of an array in ranges of indices along each dimension."""
    indices = [[index for start, stop in each for index in range(start, stop)] for each in ranges]
    return full[np.ix_(*indices)] if indices else full


@given(cuts())
@settings(max_examples=400, deadline=None)
def test_parts_are_those_that_torch_cuts(cut):
    needs.of_torch(hasattr(_utils, "_compute_local_shape_and_global_offset"), "local shapes without a device mesh")
    shape, mesh, placed = cut
    full = torch.arange(math.prod(shape)).reshape(shape)
    spread = simplest(range(math.prod(mesh)), mesh, placed)
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
        part = full
        for size, index, placement in zip(mesh, coordinate, placed, strict=True):
            if placement != REPLICATE:
                pieces, _ = of_torch(placement)._split_tensor(part, size, with_padding=False, contiguous=False)
                part = pieces[index]
        ranges = part_of(shape, spread, rank)
        assert ranges is not None
        assert np.array_equal(taken(full.numpy(), ranges), part.numpy())
        sizes, offsets = _utils._compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), [of_torch(placement) for placement in placed]
        )
        assert local_shape(shape, spread, rank) == tuple(sizes)
        if math.prod(sizes):
            assert tuple(each[0][0] for each in ranges) == tuple(offsets)
    assert part_of(shape, spread, math.prod(mesh)) is None


def test_meshes_of_one_rank_and_replicas_are_whole():
    shard = ("shard", 0, 0)
    assert simplest([5], (1,), (shard,)) == Spread((5,))
    assert simplest([3, 1], (2,), (REPLICATE,)) == Spread((1, 3))
    assert simplest([0, 1, 2, 3], (1, 4), (shard, shard)) == Spread((0, 1, 2, 3), (4,), (shard,))
    assert simplest([0, 1, 2, 3], (2, 2), (REPLICATE, shard)).mesh == (2, 2)


# Tests in groups of processes.


def numbered(*shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def held(value: DTensor, full: torch.Tensor, rank: int | None = None) -> Spread:
    """The description of a DTensor, which is first compared with the DTensor's memory."""
    rank = dist.get_rank() if rank is None else rank
    spreads = Spreads(range(dist.get_world_size()), rank)
    describe_one = spreads.describe_of(type(value))
    assert describe_one is not None
    stored = describe_one(value)
    assert tuple(stored.shape) == tuple(full.shape)
    spread = spreads.found[stored.local.spread - 1]
    ranges = part_of(full.shape, spread, rank)
    local = value._local_tensor
    if ranges is None:
        assert local.numel() == 0
    else:
        part = taken(full.numpy(), ranges)
        assert np.array_equal(part, local.detach().numpy()) or part.size == local.numel() == 0
    assert stored.local.nbytes == local.nbytes
    assert stored.address == (local.data_ptr() if local.nbytes and local.is_contiguous() else 0)
    return spread


def _distributed_tensors() -> None:
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for shape in ((8, 6), (7, 5), (3, 2), (1, 9), (0, 4), (2, 3, 5)):
        full = numbered(*shape)
        for dim in range(len(shape)):
            held(distribute_tensor(full, flat, [Shard(dim)]), full)
            for other in range(len(shape)):
                held(distribute_tensor(full, square, [Shard(dim), Shard(other)]), full)
            held(distribute_tensor(full, square, [Replicate(), Shard(dim)]), full)
            held(distribute_tensor(full, square["tp"], [Shard(dim)]), full)
            held(distribute_tensor(full, square["dp"], [Shard(-1)]), full)
    strange = numbered(6, 4)
    found = held(distribute_tensor(strange, square, [Shard(0), Replicate()]), strange)
    assert found == Spread((0, 1, 2, 3), (2, 2), (("shard", 0, 0), REPLICATE))
    assert held(distribute_tensor(strange, flat, [Replicate()]), strange) == Spread((0, 1, 2, 3))
    row = square["tp"]
    first = dist.get_rank() // 2 * 2
    assert held(distribute_tensor(strange, row, [Shard(1)]), strange).ranks == (first, first + 1)


def test_tensors_that_torch_has_distributed(forge):
    with forge.group(4) as group:
        group.run(_distributed_tensors)


class Two(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, rows)
        self.down = torch.nn.Linear(rows, 6)

    def forward(self, x):
        return self.down(self.up(x))


def _fsdp_over_tensor_parallel(shape: tuple[int, int], rows: int) -> list[Spread]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = Two(rows)
    whole = {name: numbered(*value.shape) for name, value in model.state_dict().items()}
    model.load_state_dict(whole)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return [held(value, whole[name]) for name, value in model.state_dict().items()]


# Uneven chunks: 385 rows become 193 and 192, and a rank has 49, 48 or 46 of these. Of 13 rows, the last rank has none.
@pytest.mark.parametrize(("shape", "rows"), [((2, 2), 8), ((4, 2), 385), ((4, 2), 13), ((2, 4), 9), ((3, 2), 10)])
def test_fsdp_over_tensor_parallel(forge, shape, rows):
    with forge.group(math.prod(shape)) as group:
        for spreads in group.run(_fsdp_over_tensor_parallel, shape, rows):
            # Tensor parallelism divides first, and FSDP divides its parts.
            assert spreads[0].mesh == shape[::-1]
            assert spreads[0].placements == (("shard", 0, 0), ("shard", 0, 0))
            assert spreads[0].ranks[: shape[0]] == tuple(range(0, math.prod(shape), shape[1]))


def _redistributed() -> None:
    """Compare with torch's results for strided placements, in both orders, and for a placement that only views give."""
    mesh = init_device_mesh("cpu", (2, 2, 2))
    for size in (8, 9, 11, 13, 3):
        full = numbered(size, 2)
        for factors in ((2, 1, 1), (4, 1, 1), (4, 2, 1), (2, 2, 1), (1, 2, 1)):
            placements = [Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor) for factor in factors]
            whole = distribute_tensor(full, mesh, [Replicate()] * 3)
            held(whole.redistribute(mesh, placements), full)


def test_strided_placements_say_in_which_order_meshes_cut(forge):
    needs.of_torch(hasattr(DTensorSpec, "use_strided_shard_as_shard_order"), "redistribution to strided shards")
    with forge.group(8) as group:
        group.run(_redistributed)


def test_placements_of_no_order_are_left_as_they_are():
    shard, strided = ("shard", 0, 0), ("strided", 0, 3)
    assert orders_of((2, 2), (strided, shard)) == {}
    assert orders_of((2, 2), (strided, ("shard", 1, 0))) == {1: [1]}
    assert in_order(range(4), (2, 2), (strided, shard), {}) == Spread((0, 1, 2, 3), (2, 2), (strided, shard))


def _a_mesh_of_some_ranks() -> Any:
    # Every rank makes the mesh, which has only two of the ranks.
    inner = DeviceMesh("cpu", [1, 2])
    full = numbered(5, 3)
    spread = held(distribute_tensor(full, inner, [Shard(0)]), full)
    local = local_of({"w": distribute_tensor(full, inner, [Shard(0)])}, dist.get_rank(), range(4))
    return spread, local.told.digests, [tensor.capacity for tensor in local.request.flat.tensors]


def test_a_mesh_that_not_all_ranks_are_in(forge):
    with forge.group(4) as group:
        spreads, digests, sizes = zip(*group.run(_a_mesh_of_some_ranks), strict=True)
    assert set(spreads) == {Spread((1, 2), (2,), (("shard", 0, 0),))}
    assert len(set(digests)) == 1
    assert sizes == ([0], [36], [24], [0])


def _turned_meshes() -> None:
    for ranks in ([3, 1, 0, 2], [[3, 2], [1, 0]], [[1, 3], [0, 2]], [[2, 0], [3, 1]]):
        mesh = DeviceMesh("cpu", ranks)
        full = numbered(8, 4)
        value = distribute_tensor(full, mesh, [Shard(0)] * mesh.ndim)
        held(value, full)
        assert torch.equal(value.full_tensor(), full)
    with pytest.raises(Unsupported, match="orders ranks differently"):
        held(distribute_tensor(full, DeviceMesh("cpu", [[0, 3], [2, 1]]), [Shard(0), Shard(1)]), full)


def test_meshes_that_name_their_ranks_in_another_order(forge):
    with forge.group(4) as group:
        group.run(_turned_meshes)


def _ranks_of_a_group() -> Any:
    members = [3, 1]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    ranks = dist.get_process_group_ranks(group)
    value = distribute_tensor(numbered(4, 2), mesh, [Shard(0)])
    spreads = Spreads(ranks, ranks.index(dist.get_rank()))
    spreads.describe_of(DTensor)(value)  # type: ignore[misc]
    with pytest.raises(
        UnsupportedTypeError,
        match=r"\['w'\].*over rank \d, which is not in the process group: give ranks= a process group",
    ):
        local_of({"w": value}, 0, [dist.get_rank()])
    return spreads.found


def test_ranks_are_those_in_the_group(forge):
    with forge.group(4) as group:
        found = group.run(_ranks_of_a_group)
    assert found[0] is None
    assert found[1] == found[3]
    assert sorted(found[1][0].ranks) == [0, 1]


# The stored form of a DTensor.


def mesh_of_one():
    return init_device_mesh("cpu", (1,))


def _flat(**values):
    return local_of(values, 0, [0]).request.flat


def _flags() -> None:
    mesh = mesh_of_one()
    plain = distribute_tensor(numbered(4, 2), mesh, [Shard(0)])
    grad = distribute_tensor(numbered(4, 2), mesh, [Shard(0)]).requires_grad_()
    flat = _flat(
        plain=plain,
        grad=grad,
        parameter=torch.nn.Parameter(distribute_tensor(numbered(4, 2), mesh, [Shard(0)])),
        frozen=torch.nn.Parameter(distribute_tensor(numbered(4, 2), mesh, [Shard(0)]), requires_grad=False),
    )
    values = [token for token in flat.tokens if token.startswith('["tensor"')]
    assert values == ['["tensor",0]', '["tensor",1,"g"]', '["tensor",2,"pg"]', '["tensor",3,"p"]']


def _dtypes() -> None:
    mesh = mesh_of_one()
    flat = _flat(
        half=distribute_tensor(numbered(4, 2).bfloat16(), mesh, [Shard(0)]),
        complex=distribute_tensor(torch.zeros(3, 5, dtype=torch.complex128), mesh, [Shard(1)]),
        scalar=distribute_tensor(torch.zeros(()), mesh, [Replicate()]),
    )
    assert [(tensor.dtype, tuple(tensor.shape), tensor.logical) for tensor in flat.tensors] == [
        ("BF16", (4, 2), None),
        ("U8", (240,), ("torch.complex128", torch.Size([3, 5]))),
        ("F32", (), None),
    ]


def _memory() -> None:
    mesh = mesh_of_one()
    local = numbered(4, 6)[:, ::2]
    value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    turned = DTensor.from_local(numbered(3, 4).t(), mesh, [Shard(0)], run_check=False)
    flat = _flat(gaps=value, turned=turned)
    for index, wanted in enumerate((local.contiguous(), numbered(3, 4).t().contiguous())):
        tensor = flat.tensors[index]
        assert (tensor.address, tensor.capacity) == (0, 48)
        out = np.empty(48, np.uint8)
        flat.movers[index](0, out.ctypes.data, 48)
        assert np.array_equal(out.view(np.float32).reshape(wanted.shape), wanted.numpy())


def _ties() -> None:
    mesh = mesh_of_one()
    one = distribute_tensor(numbered(4, 2), mesh, [Shard(0)])
    same = DTensor.from_local(one.to_local(), mesh, [Shard(0)], run_check=False)
    whole = DTensor.from_local(one.to_local(), mesh, [Replicate()], run_check=False)
    empty = distribute_tensor(torch.empty(0, 2), mesh, [Shard(0)])
    other = distribute_tensor(torch.empty(0, 2), mesh, [Shard(0)])
    flat = _flat(one=one, same=same, detached=one.detach(), empty=empty, again=empty.detach(), other=other)
    assert flat.ties == [(0, "same"), (0, "detached"), (1, "again")]
    assert len(flat.tensors) == 3
    # The two placements are the same only on a mesh of one rank.
    assert len(_flat(one=one, whole=whole).tensors) == 1


def _refusals() -> None:
    mesh = mesh_of_one()
    partial = DTensor.from_local(numbered(4, 2), mesh, [Partial()])

    class Odd(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        def __tensor_flatten__(self):
            return ["inner"], None

        @classmethod
        def __tensor_unflatten__(cls, inner, *_):
            return cls(inner["inner"])

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            args = [arg.inner if isinstance(arg, Odd) else arg for arg in args]
            return function(*args, **(kwargs or {}))

    good = distribute_tensor(numbered(4, 2), mesh, [Shard(0)])
    inside = distribute_tensor(numbered(4, 2), mesh, [Shard(0)])
    inside._local_tensor = Odd(numbered(4, 2))
    sparse = distribute_tensor(numbered(4, 2), mesh, [Shard(0)])
    sparse._local_tensor = numbered(4, 2).to_sparse()
    short = DTensor.from_local(
        numbered(3, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size([4, 2]), stride=(2, 1)
    )
    meta = DTensor.from_local(torch.empty(4, 2, device="meta"), mesh, [Shard(0)], run_check=False)
    freed = distribute_tensor(numbered(4, 2), mesh, [Shard(0)])
    freed.to_local().untyped_storage().resize_(0)
    for value, reason in (
        (partial, "sum over ranks.*redistribute"),
        (inside, "local tensors are of .*Odd"),
        (Odd(good), "a DTensor inside another tensor"),
        (sparse, "layout torch.sparse_coo"),
        (short, r"has the shape \[3, 2\], but .* give \[4, 2\] to rank 0"),
        (meta, "meta tensor"),
        (freed, "memory has been freed"),
    ):
        with pytest.raises(UnsupportedTypeError, match=rf"save: cannot store \['w'\].*{reason}"):
            _flat(w=value)


@pytest.mark.parametrize(
    "case", [_flags, _dtypes, _memory, _ties, _refusals], ids=lambda case: case.__name__.strip("_")
)
def test_what_one_rank_stores(forge, case):
    with forge.group(1) as group:
        group.run(case)


def _asynchronous() -> None:
    import torch.distributed._functional_collectives as funcol

    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    waiting = funcol.all_reduce(torch.full((2, 3), float(rank)), "sum", mesh)
    assert type(waiting).__name__ == "AsyncCollectiveTensor"
    value = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False)
    value._local_tensor = waiting
    waited = []
    wait = type(waiting).wait
    type(waiting).wait = lambda self: waited.append(self) or wait(self)
    flat = local_of({"w": value}, rank, [0, 1]).request.flat
    assert any(each is waiting for each in waited)
    assert torch.equal(flat.keep[0], torch.ones(2, 3))
    assert flat.tensors[0].address == flat.keep[0].data_ptr()


def test_a_collective_under_way_is_waited_for(forge):
    with forge.group(2) as group:
        group.run(_asynchronous)


def _another_order() -> None:
    """A spec may give the order in which the dimensions of a mesh divide a tensor, instead of strided shards."""
    mesh = init_device_mesh("cpu", (2, 2))
    value = distribute_tensor(numbered(8, 3), mesh, [Shard(0), Shard(0)])
    spec = value._spec
    if not hasattr(spec, "shard_order"):
        return
    (entry,) = spec.shard_order
    assert tuple(entry.mesh_dims) == (0, 1)
    first, second = divmod(dist.get_rank(), 2)
    # The second dimension of the mesh divides the tensor first.
    local = numbered(8, 3)[second * 4 + first * 2 : second * 4 + first * 2 + 2]
    turned = DTensor.from_local(local, mesh, [Shard(0), Shard(0)], run_check=False)
    turned._spec.shard_order = (entry._replace(mesh_dims=(1, 0)),)
    rows = ("shard", 0, 0)
    assert held(turned, numbered(8, 3)) == Spread((0, 2, 1, 3), (2, 2), (rows, rows))


def test_another_order_of_the_mesh(forge):
    with forge.group(4) as group:
        group.run(_another_order)


def _local_of_a_strange_rank() -> None:
    mesh = DeviceMesh("cpu", [0])
    value = distribute_tensor(numbered(2, 2), mesh, [Shard(0)])
    if dist.get_rank() == 1:
        value._local_tensor = numbered(2, 2)
        with pytest.raises(Unsupported, match="a rank that is not in its mesh"):
            Spreads([0, 1], 1).describe_of(DTensor)(value)  # type: ignore[misc]


def test_data_outside_of_the_mesh_is_refused(forge):
    with forge.group(2) as group:
        group.run(_local_of_a_strange_rank)


@pytest.mark.parametrize("name", ["DTensor", "ShardedTensor"])
def test_tensors_of_several_processes(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed._shard.sharded_tensor import ShardedTensor

    kind = {"DTensor": DTensor, "ShardedTensor": ShardedTensor}[name]
    remedy = {"DTensor": "full_tensor", "ShardedTensor": "full_state_dict=True"}[name]
    with pytest.raises(Unsupported, match=rf"a {name} is spread over processes: fastckpt.distributed.save.*{remedy}"):
        _torch.describe_of(kind)
