"""Facts about a stored tensor that are known before it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastckpt._tensors.dtypes import plain_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastckpt._core import Reader, StoredTensor

#: The position of the device in a tensor's token, if it has one.
_DEVICE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Facts about a stored tensor that are known before it is read.

    Attributes:
        name: the name of the tensor in the checkpoint.
        dtype: the dtype: ``float32``, ``bfloat16``, ``complex128``; numpy's notation if torch lacks it (``>f8``).
        shape: the sizes of the tensor.
        bytes: bytes of its data.
        shard: the file that holds it.
        kind: ``tensor`` for torch's, ``array`` for numpy's, ``bytes`` or ``bytearray``.
        device: the device that it was saved from, such as ``cuda:0``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    shard: str
    kind: str
    device: str = "cpu"


def info_of(stored: StoredTensor, token: list[Any], files: Sequence[str]) -> TensorInfo:
    """The info of a tensor.

    Args:
        stored: the tensor.
        token: the first token that represents it.
        files: the names of the shards.
    """
    return TensorInfo(
        name=stored.name,
        dtype=plain_name(stored.dtype, None if stored.logical is None else stored.logical.dtype),
        shape=(stored.logical or stored).shape,
        bytes=stored.nbytes,
        shard=files[stored.shard],
        kind=token[0],
        device=device_of(token),
    )


def device_of(token: list[Any]) -> str:
    """The device that the tensor of a token was on."""
    device: str = token[_DEVICE] if token[0] == "tensor" and len(token) > _DEVICE else "cpu"
    return device


def are_equal(reader: Reader, stored: Sequence[StoredTensor], left: int, right: int) -> bool:
    """Whether two stored tensors are equal: then both may fill one destination."""
    one, other = stored[left], stored[right]
    logical = [tensor.logical and (tensor.logical.dtype, tensor.logical.shape) for tensor in (one, other)]
    return (one.dtype, one.shape, logical[0]) == (other.dtype, other.shape, logical[1]) and reader.checksum(
        left
    ) == reader.checksum(right)
