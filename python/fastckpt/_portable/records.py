"""Records that the reader accepts and returns; ``_core.pyi`` documents each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class LogicalType(NamedTuple):
    """The logical dtype and shape of a tensor that is stored as bytes."""

    dtype: str
    shape: tuple[int, ...]


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint; ``crc`` has 16 digits for each extent."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int
    logical: LogicalType | None = None
    crc: str = ""


class StoredShard(NamedTuple):
    """A file of a checkpoint."""

    file: str
    nbytes: int
    prefix: str
    data_offset: int
    header_crc: str
    crc: str


class DamagedRange(NamedTuple):
    """A damaged range of a file."""

    file: str
    offset: int
    length: int
    tensor: str | None
    reason: str


class ReadRequest(NamedTuple):
    """A tensor, or a box of it, and the destination of its bytes."""

    tensor: int
    address: int
    capacity: int
    box: Sequence[tuple[int, int, int]] | None = None
    strides: Sequence[int] | None = None


class ListedCheckpoint(NamedTuple):
    """A checkpoint in a directory.

    Attributes:
        name: the name of the checkpoint.
        path: the path of the checkpoint, to load it.
        created: seconds since 1970 when its save began; None if its manifest is damaged.
        bytes: bytes of the files that fastckpt wrote.
        aside: always False, because only the compiled core finds what a killed save moved aside.
        damage: the damage, as shown by its manifest and the lengths of its files; None without damage.
    """

    name: str
    path: str
    created: float | None
    bytes: int
    aside: bool
    damage: str | None
