"""DTensors: which ranks hold them, and this rank's local memory. Imports torch, and handles its version differences.

It also describes ShardedTensors, which FSDP1 makes.

From torch 2.6 to 2.15: ``_StridedShard`` was a ``Shard`` and later became a separate class; specs have a
``shard_order`` since 2.9, which can express strided shards. FSDP over tensor parallelism makes strided shards: the
mesh's last dimension cuts first, and the strided one cuts the rest. So do ``redistribute`` and ``full_tensor`` of
torch; torch's functions for offsets apply strided shards first, and are wrong if chunks are uneven.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from . import torch as _torch
from .described import Describe, OwnPart, Stored, Unsupported, steps
from .rank_part import Part
from .spread import REPLICATE, Placement, Spread, in_order, local_shape, orders_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Tensor = torch.Tensor
_strided = torch.strided


class _Mesh:
    """A mesh, as ranks of the group; ``hold`` keeps its identity valid."""

    __slots__ = ("hold", "ranks", "shape")

    def __init__(self, hold: Any, ranks: Mapping[int, int]) -> None:
        self.hold = hold
        grid = _as_cut(hold.mesh.cpu().numpy())
        strange = [rank for rank in grid.ravel().tolist() if rank not in ranks]
        if strange:
            raise Unsupported(
                f"it is spread over rank {strange[0]}, which is not in the process group: give ranks= a process group "
                "that has all ranks of its mesh"
            )
        self.ranks = tuple(ranks[rank] for rank in grid.ravel().tolist())
        self.shape: tuple[int, ...] = grid.shape


def _as_cut(grid: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The global ranks of a mesh in the order of their parts of a tensor.

    Collectives distribute parts by the ranks of the process group of each line of the mesh, which ascend; a mesh may
    name them in another order. (Offsets reported by DTensors follow the mesh, and are then wrong.)
    """
    order = [np.argsort(np.argsort(grid, axis=dim), axis=dim) for dim in range(grid.ndim)]
    out = np.full_like(grid, -1)
    out[tuple(order)] = grid
    if (out < 0).any():
        raise Unsupported(
            f"its mesh {grid.tolist()} orders ranks differently in different lines: torch itself "
            "loses parts of a tensor there; build the mesh with ascending ranks"
        )
    return out


class _Known:
    """The common properties of DTensors of one mesh, of equal placements and of one shape."""

    __slots__ = ("hold", "local", "number")

    def __init__(self, hold: Any, number: int, local: tuple[int, ...] | None) -> None:
        self.hold = hold
        self.number = number
        #: The shape of this rank's part; None if it has none.
        self.local = local


class DTensors:
    """Describes the DTensors of one walk over a state.

    Args:
        ranks: by its global rank, the rank of each member of the group.
        rank: this rank in the group.
        found: collects the different spreads, in order of occurrence; their numbers begin at 1.
    """

    def __init__(self, ranks: Mapping[int, int], rank: int, found: list[Spread]) -> None:
        self.rank = rank
        self.found = found
        self._ranks = ranks
        self._numbers: dict[Spread, int] = {}
        self._meshes: dict[int, _Mesh] = {}
        # Placements are keyed by identity: comparing or hashing them runs Python for each of them.
        self._quick: dict[tuple[int, int, tuple[int, ...], bool], _Known] = {}
        self._known: dict[tuple[int, tuple[Placement, ...], str, tuple[int, ...]], _Known] = {}

    def describe_of(self, kind: type) -> Describe | None:
        """The function that describes a kind of DTensor; None for any other type."""
        return self._describe if issubclass(kind, DTensor) else None

    def _describe(self, value: DTensor) -> Stored:
        spec = value._spec
        shape = value.shape
        mesh, placements = spec.mesh, spec.placements
        order = getattr(spec, "shard_order", None)
        usual = not order or all(list(entry[1]) == sorted(entry[1]) for entry in order)
        # Views can make strided placements that correspond to no order.
        decoded = getattr(spec, "use_strided_shard_as_shard_order", True)
        key = (id(mesh), id(placements), shape, decoded)
        known = self._quick.get(key) if usual else None
        if known is None:
            known = self._learn(mesh, placements, shape, None if usual else order, decoded=decoded)
            if usual:
                self._quick[key] = known
        local = value._local_tensor
        if type(local) is not Tensor:
            local = _arrived(local)
        expected = known.local
        if expected is None:
            # A rank outside the mesh has an empty tensor of some shape.
            if local.numel():
                raise Unsupported("it has data on a rank that is not in its mesh")
        elif local.shape != expected and (local.numel() or math.prod(expected)):
            raise Unsupported(
                f"its local tensor has the shape {list(local.shape)}, but its placements {_shown(placements)} of the "
                f"shape {list(shape)} give {list(expected)} to rank {self.rank}: make it with distribute_tensor, or "
                "from_local with equal parts"
            )
        flags = ("p" if getattr(value, "_is_param", False) else "") + ("g" if value.requires_grad else "")
        try:
            return _stored(value, local, known.number, flags)
        except RuntimeError as error:
            raise Unsupported(f"its memory cannot be reached: {error}") from error

    def _learn(
        self, mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...], order: Any, *, decoded: bool
    ) -> _Known:
        learned = self._meshes.get(id(mesh))
        if learned is None:
            learned = self._meshes[id(mesh)] = _Mesh(mesh, self._ranks)
        placed = tuple(map(_placement, placements, [len(shape)] * len(placements)))
        if order is not None:
            orders = {dim: list(axes) for dim, axes in order}
        else:
            orders = orders_of(learned.shape, placed) if decoded else {}
        key = (id(mesh), placed, str(orders), shape)
        known = self._known.get(key)
        if known is None:
            spread = in_order(learned.ranks, learned.shape, placed, orders)
            number = self._numbers.get(spread)
            if number is None:
                self.found.append(spread)
                number = self._numbers[spread] = len(self.found)
            known = self._known[key] = _Known([], number, local_shape(shape, spread, self.rank))
        known.hold.append(placements)
        return known


def part_of_sharded(value: Any) -> Part:
    """This rank's part of a ShardedTensor."""
    shards = value.local_shards()
    if len(shards) > 1:
        raise Unsupported(
            f"a ShardedTensor with {len(shards)} shards on one rank cannot be stored: give each rank one shard of it"
        )
    shape = tuple(value.size())
    try:
        if shards:
            return Part(shards[0].tensor, of=shape, at=shards[0].metadata.shard_offsets)
        # An empty part is on the device of the other parts, because ranks compare the device.
        placed = [shard.placement for shard in value.metadata().shards_metadata]
        device = placed[0].device().type if placed and placed[0] is not None else "cpu"
        return Part.flat(torch.empty(0, dtype=value.dtype, device=device), of=shape, start=0)
    except (TypeError, ValueError) as error:
        raise Unsupported(f"a ShardedTensor that cannot be stored: {error}") from error


def _placement(value: Any, dimensions: int) -> Placement:
    if isinstance(value, _StridedShard):  # before Shard, of which it once was a subclass
        return ("strided", value.dim % dimensions, int(value.split_factor))
    if isinstance(value, Shard):
        return ("shard", value.dim % dimensions, 0)
    if isinstance(value, Replicate):
        return REPLICATE
    if isinstance(value, Partial):
        raise Unsupported("it is a pending sum over ranks (Partial): redistribute() it first")
    raise Unsupported(f"its placement {value} is not known: redistribute() it to Shard or Replicate first")


def _shown(placements: Sequence[Any]) -> str:
    return ", ".join(map(str, placements))


def _arrived(local: Any) -> Tensor:
    """The plain local tensor, once it has arrived."""
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()
    kind = type(local)
    if kind is torch.nn.Parameter:
        local = local.detach()
    elif kind is not Tensor:
        raise Unsupported(
            f"its local tensors are of {kind.__module__}.{kind.__qualname__}, which is stored in parts: "
            "save its parts, or its full_tensor() on all ranks"
        )
    return local  # type: ignore[no-any-return]


def _stored(value: DTensor, local: Tensor, number: int, flags: str) -> Stored:
    dtype, shape = local.dtype, value.shape
    known = _torch._STORED.get(dtype)
    if known is None or local.layout is not _strided or local.is_nested:
        raise Unsupported(
            f"a DTensor of layout {local.layout} and dtype {dtype} cannot be stored: store its full_tensor()"
        )
    if local.is_meta:
        raise Unsupported("a meta tensor has no data: materialise it first, with to_empty() or by loading weights")
    host = local.is_cpu
    storage = local.untyped_storage()
    address, mover = 0, None
    nbytes = local.nbytes
    start = local.storage_offset()
    reach: Any = None
    if host and local.is_contiguous() and not local.is_conj() and not local.is_neg():
        if storage.nbytes() - nbytes < start * local.itemsize:
            _torch._no_address(local)
        address = local.data_ptr()
    elif nbytes:
        if not _torch._is_whole(local):
            _torch._no_address(local)
        reach = (steps(local.shape, local.stride()), local.is_conj(), local.is_neg())
        mover = _torch.mover_out(local)
    name, logical = known
    return Stored(
        # The storage shows ties, even for an empty part.
        (OwnPart, storage._cdata, start, dtype, shape, number, reach),
        name,
        shape if logical is None else (math.prod(shape) * local.itemsize,),
        address if nbytes else 0,
        None if logical is None else (logical, shape),
        _torch._HEAD,
        _torch._TAILS[flags] if host else f',"{flags}","{local.device.type}"]',
        mover,
        OwnPart(number, local, nbytes, value),
    )
