"""A checkpoint that is open: its names, its structure, and single tensors or parts of them."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator, KeysView, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from types import TracebackType
from typing import Any

import numpy as np

from fastckpt import _core
from fastckpt._paths import AnyPath
from fastckpt._state.builders import StateBuilder, Validator, numpy_leaf, torch_for
from fastckpt._state.registry import Types
from fastckpt._state.select import aliases
from fastckpt._state.unflatten import parse, unflatten
from fastckpt._stores.reader import open_reader
from fastckpt._stores.urls import place_of
from fastckpt._tensors import memory as _memory
from fastckpt._tensors.slicing import part
from fastckpt._text import suggest

from .build_report import build_report
from .destinations import Targets, read_targets
from .io import IO, Engine, check_io
from .outcome import warn_of_unknown
from .per_rank import states_of
from .placement import Placement, Stock, place
from .reports import LoadReport
from .tensor_info import TensorInfo, info_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Facts about the save that wrote a checkpoint.

    Attributes:
        format_version: version of the format.
        writer: name and version of the program.
        created: seconds since 1970 when the save began.
        seconds: seconds until all data was durable.
        gigabytes_per_second: throughput of the save (GB is 10^9 bytes).
        engine: the engine that ran: ``uring``, ``threads`` or ``buffered``.
        fallback: why the requested engine was not used, or None.
        threads: worker threads used.
        options: ``exclude`` and ``frozen`` of the save, in words, if they were given.
    """

    format_version: int
    writer: str
    created: float
    seconds: float
    gigabytes_per_second: float
    engine: str
    fallback: str | None
    threads: int
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Composed:
    """A value made of several parts, in a checkpoint's structure: a tensor that is not plain, or an object.

    Attributes:
        kind: ``coo``, ``compressed``, ``quantized``, ``expanded`` or ``type``.
        about: the description of the value: sizes, layout, the name of its type.
        parts: the parts of the value; for an object, its value, and the dict of its attributes if it has any.
    """

    kind: str
    about: tuple[Any, ...]
    parts: tuple[Any, ...]


class _View:
    """A builder that puts the facts about a tensor in the tensor's place."""

    plain = False

    def __init__(self, infos: list[TensorInfo]) -> None:
        self.infos = infos

    def tensor(self, token: list[Any]) -> Any:
        return self.infos[token[1]]

    def leaf(self, token: list[Any]) -> Any:
        return numpy_leaf(token)

    def composed(self, token: list[Any], parts: list[Any]) -> Any:
        return Composed(token[0], tuple(token[1:]), tuple(parts))

    def typed(self, name: str, value: Any, attributes: Any) -> Any:
        return Composed("type", (name,), (value,) if attributes is None else (value, attributes))

    def zone(self, value: Any) -> dt.tzinfo | None:
        # A registered type of time zones is not decoded here.
        return value if issubclass(type(value), dt.tzinfo) else None


class TensorHandle:
    """A tensor of an open checkpoint: ``handle[index]`` reads a part of it; made by :meth:`Checkpoint.tensor`.

    A read covers each block of 4 MiB that the index touches, within the tensor, and compares it with its checksum,
    unless the checkpoint was opened with ``IO(verify=False)``.

    Attributes:
        info: the facts about the tensor.
    """

    def __init__(self, info: TensorInfo, read: Callable[[Any], Any]) -> None:
        self.info = info
        self._read = read

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the tensor."""
        return self.info.shape

    @property
    def dtype(self) -> str:
        """The dtype of the tensor, as in :class:`fastckpt.types.TensorInfo`."""
        return self.info.dtype

    def __getitem__(self, index: Any) -> Any:
        """Read a part.

        Args:
            index: a basic index: an int, a slice of any step, an Ellipsis, or a tuple of them.

        Returns:
            The part, contiguous, in new memory: a tensor or an array, as saved, on the ``device`` of
            :func:`fastckpt.open`; a part of bytes is an array.

        Raises:
            IndexError: the index does not fit the shape.
            TypeError: the index is of another type.
            ValueError: the step of a slice is 0, or the checkpoint is closed.
            CorruptCheckpointError: bytes differ from those that were written.
            RuntimeError: the caller's current stream of the tensor's device is being captured into a graph.
        """
        return self._read(index)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.info.name!r} has no dimension, and so no length")
        return self.shape[0]

    # Without this, Python would iterate by reading row by row.
    __iter__ = None
    __contains__ = None

    def __repr__(self) -> str:
        return f"<fastckpt tensor {self.info.name!r}: {self.dtype} {list(self.shape)}>"


class Checkpoint(Mapping[str, Any]):
    """A checkpoint opened for reading single tensors, by name; made by :func:`fastckpt.open`.

    The checkpoint is a context manager, and a read-only mapping of the names of all tensors, in the order of the state:
    each access to a value reads it. A read is verified against the checksums of the blocks that it covers completely.
    For an expanded tensor, the methods describe and read its base, with one element along the dimensions that repeat;
    only ``load`` returns the whole. A tied tensor is listed once, under its first name, and can be read under the name
    of each of its places. After ``close``, methods that need no shard still work; reads raise ValueError.

    Attributes:
        report: the report of the last read, or None before the first.
    """

    def __init__(self, path: AnyPath, device: Any = None, io: Engine | IO = "auto") -> None:
        self.report: LoadReport | None = None
        self._io = check_io("open", io)
        self._path = place_of("open", path)
        self._reader: _core.Reader | None = open_reader("open", self._path, keep=True)
        self._stored = self._reader.tensors()
        self._tokens = tokens = parse(self._reader.structure())
        self._about = self._reader.metadata()
        self._ranks = len(states_of("open", self._reader))
        check = Validator(self._stored, strangers=True)
        unflatten(tokens, check, operation="open")
        # The first token of each tensor determines how it comes back.
        self._first: dict[int, list[Any]] = {}
        for token in check.found:
            self._first.setdefault(token[1], token)
        self._shards = self._reader.shards()
        about = self._reader.info()
        writer = f"{about['writer']['name']} {about['writer']['version']}"
        saved = {**about["saved"], "options": dict(about["saved"]["options"])}
        self._origin = Origin(format_version=about["version"], writer=writer, created=about["created"], **saved)
        files = [shard.file for shard in self._shards]
        self._placement: Placement | None = None
        if device is not None:
            stock = Stock(tokens, self._stored, files, check.found, check.types, "open")
            self._placement = place(stock, device, None, "auto", strict=True)
        self._infos = [info_of(stored, self._token(index), files) for index, stored in enumerate(self._stored)]
        self._index = {info.name: index for index, info in enumerate(self._infos)}
        # Usually nothing is tied, and no search is needed.
        if len(check.found) > len(self._first):
            for _, index, name in aliases(self._tokens, [*self]):
                self._index.setdefault(name, index)

    def _token(self, index: int) -> list[Any]:
        # A tensor that the structure does not name can only be read as an array.
        return self._first.get(index) or ["array", index]

    def _open(self) -> _core.Reader:
        if self._reader is None:
            raise ValueError(f"{self._path}: the checkpoint is closed")
        return self._reader

    @property
    def path(self) -> str:
        """The checkpoint's directory, absolute, or its URL."""
        return self._path

    @property
    def shards(self) -> dict[str, int]:
        """The name of each file that holds tensors, and its size in bytes."""
        return {shard.file: shard.nbytes for shard in self._shards}

    @property
    def origin(self) -> Origin:
        """Which program wrote the checkpoint, when and how."""
        return self._origin

    def info(self, name: str) -> TensorInfo:
        """Facts about one tensor.

        Args:
            name: the name of the tensor.

        Returns:
            The dtype, shape, size in bytes, shard and device of the tensor; nothing is read.

        Raises:
            KeyError: there is no such tensor.
        """
        return self._infos[self._find(name)]

    def _find(self, name: str) -> int:
        index = self._index.get(name)
        if index is not None:
            return index
        below = next((one for one in self._index if one.startswith(f"{name}.")), None)
        if below is not None:
            raise KeyError(
                f"{self._path}: {name!r} is not a tensor, but holds {below!r}: load(..., keys={name!r}) reads all of it"
            )
        raise KeyError(f"{self._path}: no tensor {name!r}{suggest(str(name), [*self])}")

    @property
    def ranks(self) -> int:
        """The number of ranks that saved a ``per_rank`` state with the checkpoint; 0 if none did.

        :func:`fastckpt.distributed.load_per_rank` loads these states.
        """
        return self._ranks

    @property
    def metadata(self) -> Any:
        """The value passed to ``save(metadata=...)``, built on each access.

        Values of types that this program does not know are returned in their stored form, with a warning.
        Configurations of omegaconf are returned in this form without a warning.
        """
        return metadata_of(self._about)

    @property
    def structure(self) -> Any:
        """The state with a :class:`TensorInfo` in place of each tensor, built on each access.

        A ``torch.Size`` is a tuple here, dtypes and devices are strings; sparse, quantised and expanded tensors and
        registered objects are :class:`fastckpt.types.Composed`.
        """
        return unflatten(self._tokens, _View(self._infos), operation="open")

    def __getitem__(self, name: str) -> Any:
        """Read one tensor.

        Args:
            name: the name of the tensor.

        Returns:
            A tensor, an array, or bytes, as saved; tensors are on the ``device`` of :func:`fastckpt.open`.

        Raises:
            KeyError: there is no such tensor.
            CorruptCheckpointError: its bytes differ from those that were written.
            RuntimeError: the caller's current stream of the tensor's device is being captured into a graph.
        """
        self._open()
        targets = Targets(self._stored, "auto", self._placement)
        targets.make([self._token(self._find(name))])
        self._read(targets)
        return targets.values()[0]

    def tensor(self, name: str) -> TensorHandle:
        """One tensor, unread: ``checkpoint.tensor("model.w")[:10]`` reads ten rows.

        Args:
            name: the name of the tensor.

        Returns:
            A handle with its shape and dtype; indexing it reads.

        Raises:
            KeyError: there is no such tensor.
        """
        number = self._find(name)
        return TensorHandle(self._infos[number], partial(self._read_part, number))

    def _read_part(self, number: int, index: Any) -> Any:
        self._open()
        targets = Targets(self._stored, "auto", self._placement)
        is_tensor = self._token(number)[0] == "tensor"
        dtype = targets.tensor_dtype(number) if is_tensor else targets.array_dtype(number)
        box, strides, shape = part(targets.shape(number, dtype.itemsize), dtype.itemsize, index)
        device = targets.devices.get(number)
        # Memory on a device can only be filled in order.
        if device is not None and min(strides, default=1) > 0:
            made = torch_for("a torch tensor").empty_on(device, shape, dtype)
            targets.ask_box(number, made, box)
            self._read(targets)
            return made
        memory = np.empty(prod(shape) * dtype.itemsize, np.uint8)
        if memory.size:
            address = _memory.address_of(memory)
            targets.requests.append(_core.ReadRequest(number, address, memory.nbytes, box, strides))
        self._read(targets)
        if not is_tensor:
            return np.ndarray(shape, dtype, memory)
        torch = torch_for("a torch tensor")
        made = torch.over(memory, dtype, shape) if memory.size else torch.empty(shape, dtype, 0, 0)
        return made if device is None else made.to(device)

    def _read(self, targets: Targets) -> None:
        began = time.perf_counter()
        targets.begin("open")
        report = read_targets(self._open(), targets, io=self._io)
        self.report = build_report(LoadReport, self._path, began, report)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def keys(self) -> KeysView[str]:
        """The names of all tensors, in the order of the state."""
        return dict.fromkeys(self).keys()

    def __iter__(self) -> Iterator[str]:
        return (info.name for info in self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    # Compare by identity: the comparison of mappings would read all tensors.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<fastckpt.types.Checkpoint {self._path!r}: {len(self)} tensors>"

    def close(self) -> None:
        """Close the shards. Values that were read stay valid."""
        self._reader = None

    def __enter__(self) -> Checkpoint:  # noqa: PYI034 - Self is not in Python 3.10
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def metadata_of(text: Any) -> Any:
    """The value passed to ``save(metadata=...)``, from the reader's text."""
    tokens = parse(text)
    check = Validator([], types=Types("open", plain=True, on_demand=False))
    unflatten(tokens, check, operation="open: metadata")
    if check.unknown:
        warn_of_unknown("open: metadata", check.unknown)
    try:
        return unflatten(tokens, StateBuilder("auto", types=check.types), operation="open: metadata")
    except ImportError:
        types = Types("open", framework="numpy", plain=True, on_demand=False)
        return unflatten(tokens, StateBuilder("numpy", types=types), operation="open: metadata")


def open(path: AnyPath, *, device: Any = None, io: Engine | IO = "auto") -> Checkpoint:
    """Open a checkpoint without reading its tensors.

    If it has at most 64 shards, all are opened and stay open until it is closed. On a local file system everything can
    then be read even after another save has replaced the checkpoint, or it was removed. (Its disk space is freed on
    close.) The shards of a larger checkpoint are opened when they are read; reading a removed shard raises
    ReplacedCheckpointError, and so may any read of a checkpoint that another machine has replaced on NFS or FUSE. A
    forked child inherits no open shards: it opens them when it reads. For a URL nothing stays open, and a child that
    was forked after the first read cannot read (docs/stores.md).

    Args:
        path: the checkpoint's directory, or its URL in an object store (docs/stores.md).
        device: where torch tensors go when they are read, in whole or in part; see :func:`fastckpt.load`.
        io: how tensors are read, as for :func:`fastckpt.load`: an engine, or an :class:`IO` with threads, or without
            verification.

    Returns:
        A mapping, :class:`fastckpt.types.Checkpoint`, and a context manager. Names are the keys on the way to a tensor,
        joined with dots: ``checkpoint["model.0.weight"]`` reads one, ``checkpoint.tensor("model.0.weight")[2:5]`` a
        part of it.

    Raises:
        CorruptCheckpointError: the manifest is damaged. (The first read from a damaged shard fails.)
        FormatVersionError: this release does not read its format version.
        FileNotFoundError: there is nothing at ``path``.
        ImportError: ``device`` is given and torch cannot be imported; or ``path`` is a URL and the package obstore
            cannot be imported.
        KeyError: a pattern of ``device`` matches nothing.
        TypeError: a pattern of ``device`` is not a string.
        OSError: the storage failed, or the store did not answer or refused.
        ValueError: ``path`` is a URL of an unknown store, ``io`` is not an engine, or a device does not exist here.

    Example:
        >>> import fastckpt, numpy
        >>> _ = fastckpt.save({"w": numpy.arange(6.0).reshape(3, 2)}, "step-7", metadata={"step": 7})
        >>> with fastckpt.open("step-7") as checkpoint:
        ...     checkpoint.metadata, checkpoint.info("w").shape, checkpoint.tensor("w")[-1]
        ({'step': 7}, (3, 2), array([4., 5.]))
    """
    return Checkpoint(path, device, io)
