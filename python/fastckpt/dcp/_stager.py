"""Copies states to host memory that is kept from save to save, for ``dcp.async_save``."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from fastckpt._api import host_memory
from fastckpt._background.devices import Devices
from fastckpt._tensors import memory as _memory
from fastckpt._tensors import torch as _tensors
from fastckpt._tensors.movers import Sources

from . import _torch

if TYPE_CHECKING:
    from fastckpt._tensors.movers import Range

#: The alignment of tensors in bytes: enough for every instruction set.
_ALIGNED = 64
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})


class Stager:
    """An AsyncStager for ``dcp.async_save`` that copies states into memory that fastckpt keeps for the next save.

    All tensors of a state share one range of huge pages, which is pinned if they come from a GPU. Ties between tensors
    are kept. The copy is done when :meth:`stage` returns; the next copy can reuse its memory once nothing refers to the
    tensors of the copy. :func:`fastckpt.background.release_buffers` frees the kept memory.
    """

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: the state has been copied when :meth:`stage` returns."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``state_dict`` on the CPU, which later changes of the state do not affect.

        Mappings, lists and tuples are copied as plain ones; DTensors stay DTensors of the same mesh and placements.
        """
        copier = _Copier()
        copier.measure(state_dict)
        copier.prepare()
        made: dict[str, Any] = copier.copy(state_dict)
        copier.bring()
        return made

    def synchronize_staging(self) -> None:
        """Do nothing: the copy was complete when :meth:`stage` returned."""

    def close(self) -> None:
        """Do nothing: the memory is kept for all savers, see :func:`fastckpt.background.release_buffers`."""


class _Lease:
    """Memory that is returned for reuse when the last tensor in it is gone."""

    __slots__ = ("give", "memory")

    def __init__(self, memory: host_memory.Memory) -> None:
        self.memory = memory
        # Module globals may be gone when the interpreter ends, so needed values are bound here.
        self.give: Any = host_memory.Memory.give

    def spoil(self) -> None:
        """Prevent reuse: a failed device was writing to this memory."""
        self.give = host_memory.Memory.close

    def __del__(self) -> None:
        self.give(self.memory)


class _Copier:
    """Makes one copy of a state."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.used = 0
        self.lease: _Lease | None = None
        self.memory: Any = None
        #: Tensors that come from devices: the mover of each, and its destination.
        self.movers: dict[int, Any] = {}
        self.ranges: list[Range] = []
        self.known: dict[Any, Any] = {}
        self.counted: set[Any] = set()

    def measure(self, value: Any) -> None:
        """Add up the bytes of the tensors in a value."""
        todo = [value]
        while todo:
            one = todo.pop()
            if isinstance(one, _torch.Tensor):
                for local in _locals(one):
                    if _is_plain(local) and _identity(local) not in self.counted:
                        self.counted.add(_identity(local))
                        base = _base(local.detach())
                        self.nbytes += base.numel() * base.element_size() + _ALIGNED - 1
            elif _is_mapping(one):
                todo.extend(one.values())
            elif isinstance(one, (list, tuple)):
                todo.extend(one)

    def prepare(self) -> None:
        """Take memory for the measured bytes."""
        if not self.nbytes:
            return
        self.lease = _Lease(host_memory.take(self.nbytes))
        self.memory = _memory.at(self.lease.memory.core.address, self.nbytes, self.lease)

    def copy(self, value: Any) -> Any:
        """The copy of a value."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, _torch.Tensor):
            return self._tensor(value)
        if _is_mapping(value):
            return {key: self.copy(item) for key, item in value.items()}
        if kind is list or kind is tuple:
            return kind(map(self.copy, value))
        return copy.deepcopy(value)

    def _tensor(self, value: Any) -> Any:
        if isinstance(value, _torch.DTensor):
            local = self._plain(value._local_tensor)  # noqa: SLF001 - to_local() may communicate
            return _torch.DTensor.from_local(
                local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        if isinstance(value, _torch.ShardedTensor):
            made = copy.copy(value)
            made._local_shards = [  # noqa: SLF001 - it has no public way
                _torch.Shard(tensor=self._plain(shard.tensor), metadata=shard.metadata)
                for shard in value.local_shards()
            ]
            return made
        made = self._plain(value)
        _torch.copy_shard_fields(value, made)
        return made

    def _plain(self, value: Any) -> Any:
        if not _is_plain(value):
            return copy.deepcopy(value.detach()).cpu()
        identity = _identity(value)
        known = self.known.get(identity)
        if known is None:
            known = self.known[identity] = self._copied(_base(value.detach())).expand(value.shape)
        return known

    def _copied(self, value: Any) -> Any:
        nbytes = value.numel() * value.element_size()
        if not nbytes:
            return _torch.torch.empty(value.shape, dtype=value.dtype)
        # Small device tensors that are packed without gaps share a copy.
        aligned = _ALIGNED if value.is_cpu else value.element_size()
        begin = -(-self.used // aligned) * aligned
        self.used = begin + nbytes
        made = _tensors.over(self.memory[begin : self.used], value.dtype, tuple(value.shape))
        if value.is_cpu:
            return made.copy_(value)
        number = len(self.movers)
        self.movers[number] = _tensors.mover_out(value)
        self.ranges.append((number, 0, made.data_ptr(), nbytes))
        return made

    def bring(self) -> None:
        """Copy the tensors on devices, and wait for them."""
        lease, self.memory, self.lease = self.lease, None, None
        if lease is None or not self.ranges:
            return
        devices = Devices(Sources("fastckpt.dcp.Stager", self.movers), None)
        devices.memory = lease.memory
        devices.pin()
        try:
            devices.ask(self.ranges)
            devices.wait()
        finally:
            if not devices.settle():
                lease.spoil()


def _locals(value: Any) -> list[Any]:
    """The tensors in this process's memory that make up a tensor."""
    if isinstance(value, _torch.DTensor):
        return [value._local_tensor]  # noqa: SLF001
    if isinstance(value, _torch.ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value]


def _is_plain(value: Any) -> bool:
    """Whether a tensor is dense and of torch's own class: others are copied by their own methods."""
    plain = type(value) in (_torch.Tensor, _torch.Parameter) and value.layout is _torch.torch.strided
    return plain and not value.is_quantized and not value.is_nested and not value.is_meta


def _identity(value: Any) -> Any:
    """A key that tied tensors share."""
    storage = value.untyped_storage()
    where = (storage._cdata, value.storage_offset())  # noqa: SLF001 - no public name tells empty storages apart
    return (*where, value.dtype, tuple(value.shape), value.stride(), value.is_conj(), value.is_neg())


def _base(value: Any) -> Any:
    """The tensor that an expanded one repeats; any other tensor itself."""
    steps = zip(value.shape, value.stride(), strict=True)
    return value[tuple(slice(0, 1 if size > 1 and not step else None) for size, step in steps)]


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)
