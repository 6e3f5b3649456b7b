"""Casts elements during a save."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import device as _device
from . import memory as _memory
from .numpy import stored_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from .described import Tensor
    from .memory import Bytes, Mover
    from .pieces import Index

#: Elements that are converted at a time: as many as fit the CPU caches, and as torch copies in the calling thread.
_PIECE = 30 << 10


class Loss:
    """Whether a cast found numbers beyond the range of the new dtype. Any thread may record it."""

    __slots__ = ("_flags", "_is_certain")

    def __init__(self) -> None:
        self._is_certain = False
        #: Tensors of one element on a device, which show whether a part had numbers out of range.
        self._flags: list[Any] = []

    def note(self, found: bool) -> None:  # noqa: FBT001 - it is the only argument
        """Record whether numbers out of range were found."""
        if found:
            self._is_certain = True

    def note_flag(self, flag: Any) -> None:
        """Record a flag that a device will set."""
        self._flags.append(flag)

    def happened(self) -> bool:
        """Whether numbers out of range were found; call it after all copies have ended."""
        flags, self._flags = self._flags, []
        for flag in flags:
            self.note(bool(flag))
        return self._is_certain


class Recast(NamedTuple):
    """A tensor that is stored with another dtype.

    Attributes:
        dtype: the name in the file.
        logical: the name that the user sees, if it differs.
        size: bytes of an element.
        mover: copies the elements.
        loss: records whether numbers were out of range.
    """

    dtype: str
    logical: str | None
    size: int
    mover: Mover
    loss: Loss

    def of(self, tensor: Tensor, count: int) -> Tensor:
        """``tensor``, of which ``count`` elements are in this process, cast to this dtype."""
        shape: Sequence[int] = tensor.shape if tensor.logical is None else tensor.logical[1]
        capacity = count * self.size
        if self.logical is None:
            return tensor._replace(dtype=self.dtype, shape=shape, address=0, capacity=capacity, logical=None)
        return tensor._replace(
            dtype=self.dtype,
            shape=(math.prod(shape) * self.size,),
            address=0,
            capacity=capacity,
            logical=(self.logical, shape),
        )


class CastOut:
    """A mover of converted elements, piece by piece in the calling thread.

    Args:
        shape: sizes of the tensor.
        size: bytes of a converted element.
        convert: fills contiguous, aligned bytes from the sub-tensor under an index.
    """

    __slots__ = ("_convert", "_shape", "_size")

    def __init__(self, shape: Sequence[int], size: int, convert: Callable[[Index, Bytes], None]) -> None:
        self._shape = shape
        self._size = size
        self._convert = convert

    def __call__(self, start: int, address: int, nbytes: int) -> None:
        """See :data:`._memory.Mover`."""
        step = _PIECE * self._size
        for done in range(0, nbytes, step):
            _memory.copy_out(
                self._shape, self._size, self._convert, start + done, address + done, min(step, nbytes - done)
            )


class CastDownload(_device.Download):
    """Copies ranges of a tensor on a device, converted there.

    Args:
        torch: the module.
        value: the tensor.
        dtype: a ``torch.dtype``.
        lost: whether a part has numbers outside the dtype's range, as a tensor of one element; None if none can.
        loss: records whether numbers were out of range.
    """

    __slots__ = ("_dtype", "_loss", "_lost")

    def __init__(
        self, torch: ModuleType, value: Any, dtype: Any, lost: Callable[[Any], Any] | None, loss: Loss
    ) -> None:
        # The base class's constructor is not called: no bytes of this tensor are stored as they are in memory.
        self.torch = torch
        self.raw = value
        self.flip = None
        self.device = value.device
        self.size = dtype.itemsize
        self.nbytes = value.numel() * self.size
        self.flat = None
        self._dtype = dtype
        self._lost = lost
        self._loss = loss

    def ordered(self, part: Any) -> Any:
        """See :meth:`.device.Download.ordered`."""
        part = part.resolve_neg()
        if self._lost is not None:
            self._loss.note_flag(self._lost(part))
        return part.to(self._dtype, memory_format=self.torch.contiguous_format)


def recast_array(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> Recast:
    """Cast an array to another of numpy's own floating-point dtypes."""
    high = float(np.finfo(dtype).max)
    kind = array.dtype.kind
    narrows = kind != "b" and bool((np.finfo if kind == "f" else np.iinfo)(array.dtype).max > high)
    loss = Loss()

    def convert(index: Index, contiguous: Bytes) -> None:
        part = array[(*index, ...)]
        with np.errstate(all="ignore"):
            np.copyto(contiguous.view(dtype).reshape(part.shape), part, casting="unsafe")
            if narrows:
                loss.note(bool((np.isfinite(part) & ((part > high) | (part < -high))).any()))

    name, logical = stored_dtype(dtype)
    return Recast(name, logical, dtype.itemsize, CastOut(array.shape, dtype.itemsize, convert), loss)


def recast_tensor(torch: ModuleType, value: Any, dtype: Any, name: str, logical: str | None) -> Recast:
    """Cast a torch tensor to another floating-point dtype, on its device.

    Args:
        torch: the module.
        value: the tensor.
        dtype: a ``torch.dtype``.
        name: the name in the file.
        logical: the user's name, if it differs.

    Raises:
        RuntimeError: torch cannot convert it.
    """
    value = value.detach()
    loss, lost, size = Loss(), _losing(torch, value.dtype, dtype), dtype.itemsize
    if not value.is_cpu:
        return Recast(name, logical, size, CastDownload(torch, value, dtype, lost, loss), loss)
    if value.is_contiguous():
        value = value.view(-1)

    def convert(index: Index, contiguous: Bytes) -> None:
        # torch's copy between dtypes can mistake a view with changed signs for its base.
        part = (value[index] if index else value).resolve_neg()
        torch.from_numpy(contiguous).view(dtype).view(part.shape).copy_(part)
        if lost is not None:
            loss.note(bool(lost(part)))

    return Recast(name, logical, size, CastOut(tuple(value.shape), size, convert), loss)


@functools.cache
def _losing(torch: ModuleType, source: Any, target: Any) -> Callable[[Any], Any] | None:
    """A function that detects numbers beyond the range of ``target`` in a part; None if there can be none."""
    # A refused cast fails here; and not every dtype has infinities.
    keeps_infinities = bool(torch.full((1,), torch.inf).to(target).float().isinf())
    torch.zeros(1, dtype=source).to(target)
    if source is torch.bool:
        return None
    low, high = torch.finfo(target).min, torch.finfo(target).max
    reach = (torch.finfo if source.is_floating_point else torch.iinfo)(source)
    if low <= reach.min and reach.max <= high:
        return None

    def lost(part: Any) -> Any:
        wide = part if part.dtype in (torch.float32, torch.float64) else part.float()
        if part.is_cpu:
            least, most = torch.aminmax(wide)
            if low <= least.item() and most.item() <= high:
                return False
        beyond = (wide < low) | (wide > high)
        return (beyond & wide.isfinite() if keeps_infinities else beyond).any()

    return lost
