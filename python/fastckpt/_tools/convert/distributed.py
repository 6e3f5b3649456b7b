"""Reads directories of torch.distributed.checkpoint, in which tensors are in pieces in many files."""

from __future__ import annotations

import math
import os
import pickle
import struct
import zipfile
from typing import TYPE_CHECKING, Any, NamedTuple

from fastckpt.exceptions import CheckpointError, CorruptCheckpointError, UnsupportedTypeError

from .needs import first_line, regular, torch_for
from .torch_items import KINDS, METADATA, Archive, MetadataUnpickler

if TYPE_CHECKING:
    from pathlib import Path

METADATA_FILE = ".metadata"
_TENSOR, _BYTES = KINDS[METADATA, "TensorStorageMetadata"], KINDS[METADATA, "BytesStorageMetadata"]
#: The most keys that lead to an entry, and the most list items that the table may lack: torch omits empty mappings.
_DEPTH, _GAPS = 200, 1 << 20
#: Exceptions raised by a damaged pickle or archive.
DAMAGED = (
    *(ValueError, TypeError, LookupError, AttributeError, EOFError, ImportError, RecursionError, NotImplementedError),
    *(RuntimeError, ArithmeticError, AssertionError, struct.error, zipfile.BadZipFile),
)


class Piece(NamedTuple):
    """A box of a tensor, or a value: its start and sizes, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


class Item(NamedTuple):
    """An entry: the keys that lead to it, and its pieces; ``sizes`` is None for a value."""

    path: tuple[str | int, ...]
    dtype: Any
    sizes: tuple[int, ...] | None
    pieces: list[Piece]


class Directory:
    """A directory that torch wrote: the table is read, and files are mapped on demand.

    Attributes:
        items: its entries, by dotted keys.

    Raises:
        CorruptCheckpointError: the directory is damaged.
        UnsupportedTypeError: it was written with extensions, or its table holds unsupported values.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        self.torch = torch_for("import", source)
        self._maps: dict[str, Any] = {}
        table = source / METADATA_FILE
        regular(table)
        try:
            with table.open("rb") as file:
                metadata = MetadataUnpickler(self.torch, file).load()
            self.items = self._items(metadata)
        except CheckpointError:  # some CheckpointErrors are TypeErrors, too
            raise
        except pickle.UnpicklingError as error:
            raise UnsupportedTypeError(
                f"cannot import {source}: {METADATA_FILE} is damaged, or holds more than torch writes there, and "
                f"fastckpt never executes what a pickle names: {first_line(error)}"
            ) from error
        except DAMAGED as error:
            raise self._damaged(METADATA_FILE, error) from error

    def _damaged(self, what: str, error: Exception) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"cannot import {self.source}: {what} is damaged: {first_line(error)}")

    def _items(self, metadata: Any) -> dict[str, Item]:
        where = {(index.fqn, getattr(index, "offset", None)): info for index, info in metadata.storage_data.items()}
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        found: dict[str, Item] = {}
        for key, about in metadata.state_dict_metadata.items():
            path = paths.get(key, (key,))
            if type(key) is not str or type(path) is not tuple or not _leads(path):
                raise ValueError(f"the path of keys to {key!r} is invalid")
            if isinstance(about, _BYTES):
                found[key] = Item(path, None, None, [self._piece(where[key, None], (), ())])
                continue
            properties = about.properties.attributes
            dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
            pieces = [self._piece(where[key, chunk.offsets], chunk.offsets, chunk.sizes) for chunk in about.chunks]
            if not isinstance(about, _TENSOR) or not isinstance(dtype, self.torch.dtype):
                raise TypeError(f"the entry {key!r} is neither a tensor nor a value")
            if not _covers(about.size, pieces):
                raise ValueError(f"the pieces of {key!r} are not the whole tensor")
            found[key] = Item(path, dtype, about.size, pieces)
        if _longest(found) > len(found) + _GAPS:
            raise ValueError("lists with nearly all of their members missing")
        return found

    def _piece(self, info: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Piece:
        if getattr(info, "transform_descriptors", None):
            raise UnsupportedTypeError(
                f"cannot import {self.source}: it was written with extensions, such as compression: load it with "
                "torch.distributed.checkpoint, and give the state to fastckpt.save"
            )
        file, begin, length = info.relative_path, info.offset, info.length
        # The table is untrusted input: it must not lead out of the directory.
        if type(file) is not str or os.path.basename(file) != file or not file:  # noqa: PTH119 - the name as text
            raise ValueError(f"it names {file!r}, which is not a file beside it")
        if type(begin) is not int or type(length) is not int or begin < 0 or length < 0:
            raise ValueError(f"an invalid range of {file}")
        return Piece(offsets, sizes, file, begin, length)

    def nbytes(self) -> tuple[int, int]:
        """Bytes of the table and the values, and of files with values, whose private mappings count as memory."""
        values = [item.pieces[0] for item in self.items.values() if item.sizes is None]
        size = (self.source / METADATA_FILE).stat().st_size + sum(piece.length for piece in values)
        return size, sum(file.stat().st_size for file in {self.source / one.file for one in values} if file.is_file())

    def tensor_bytes(self) -> int:
        """Bytes of the tensors, as the table lists them."""
        return sum(
            math.prod(item.sizes) * item.dtype.itemsize for item in self.items.values() if item.sizes is not None
        )

    def size(self) -> int:
        """Bytes of the files that hold the tensors."""
        files = {piece.file for item in self.items.values() for piece in item.pieces}
        return sum((self.source / file).stat().st_size for file in files)

    def read(self, key: str, number: int = 0) -> Any:
        """A value, or a piece of a tensor, as views of the mapped file.

        Raises:
            CorruptCheckpointError: the value or piece is damaged.
            UnsupportedTypeError: it holds more than plain values and tensors.
        """
        item = self.items[key]
        piece = item.pieces[number]
        try:
            found = Archive(self.torch, self._mapped(piece)).read()
        except CheckpointError:
            raise
        except pickle.UnpicklingError as error:
            raise UnsupportedTypeError(
                f"cannot import {self.source}: {key!r} is damaged, or holds more than plain values and tensors, and "
                "fastckpt never executes what a pickle names: load it with torch.distributed.checkpoint, and give the "
                f"state to fastckpt.save; {first_line(error)}"
            ) from error
        except DAMAGED as error:
            raise self._damaged(f"{key!r} in {piece.file}", error) from error
        if item.sizes is None:
            return found
        if not isinstance(found, self.torch.Tensor) or tuple(found.shape) != piece.sizes or found.dtype != item.dtype:
            raise self._damaged(f"{key!r} in {piece.file}", ValueError("it is not the piece that the table lists"))
        return found.detach()

    def _mapped(self, piece: Piece) -> Any:
        whole = self._maps.get(piece.file)
        if whole is None:
            path = self.source / piece.file
            regular(path)
            nbytes = path.stat().st_size
            # The mapping is private: writes never reach the file. It keeps no descriptor open.
            storage = self.torch.UntypedStorage.from_file(str(path), shared=False, nbytes=nbytes)
            whole = self.torch.empty(0, dtype=self.torch.uint8).set_(storage, 0, (nbytes,)).numpy()
            self._maps[piece.file] = whole
        if piece.begin + piece.length > len(whole):
            raise ValueError("the file is too short")
        return whole[piece.begin : piece.begin + piece.length]


def _leads(path: tuple[Any, ...]) -> bool:
    steps = all(type(step) is str or (type(step) is int and step >= 0) for step in path)
    return 0 < len(path) <= _DEPTH and type(path[0]) is str and steps


def _longest(items: dict[str, Item]) -> int:
    """The sum over all lists of the highest index that the table has."""
    lists: dict[tuple[str | int, ...], int] = {}
    for item in items.values():
        for at, step in enumerate(item.path):
            if type(step) is int:
                lists[item.path[:at]] = max(step, lists.get(item.path[:at], 0))
    return sum(lists.values())


def _covers(sizes: tuple[int, ...], pieces: list[Piece]) -> bool:
    """Whether pieces are inside a tensor, and have as many elements as it has."""
    inside = all(
        len(piece.offsets) == len(piece.sizes) == len(sizes)
        and all(
            start >= 0 and start + length <= size
            for start, length, size in zip(piece.offsets, piece.sizes, sizes, strict=True)
        )
        for piece in pieces
    )
    return inside and sum(math.prod(piece.sizes) for piece in pieces) == math.prod(sizes)
