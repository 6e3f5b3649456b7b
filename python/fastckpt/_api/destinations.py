"""Destinations of a read: new tensors and arrays, one for each stored tensor and kind, and those of ``into=``."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastckpt import _core
from fastckpt._state.builders import torch_for
from fastckpt._state.collector import paused
from fastckpt._tensors import memory as _memory
from fastckpt._tensors import numpy as _numpy
from fastckpt._tensors.cast import Cast
from fastckpt._tensors.dtypes import NUMPY_PREFIX, PLAIN_NAMES, TORCH_PREFIX, plain_name
from fastckpt._tensors.movers import Sinks
from fastckpt.exceptions import CorruptCheckpointError, UnsupportedTypeError

from .build_report import with_warnings
from .io import DEFAULT_IO, most_staging
from .lent import lent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fastckpt._tensors.movers import Range

    from .io import IO
    from .lent import Lent
    from .placement import Placement

    Drain = Callable[[Sequence[Range]], None]

_LIMIT = 2**63
#: Bytes that are copied from mappings at a time.
_STEP = 16 << 20
_MOST_THREADS = 16


class Whole(NamedTuple):
    """A tensor of which this rank holds a part: the number of its spread, and its size in bytes in the part's dtype."""

    spread: int
    nbytes: int


class Targets:
    """The requests of a read: what to read, where to put it, and how to finish it.

    Attributes:
        requests: for the core, with address 0 where a mover accepts the bytes; with ``mappings``, the copies to make.
        movers: the movers of requests, by request number.
        mappings: where shards are mapped, or None. If they are, new tensors on the host are pages of the mappings, and
            :meth:`copy_mapped` fills all other destinations.
        sinks: the sinks that :meth:`begin` made.
        fresh: bytes that are read into new host tensors and arrays, and how many of them are in large ones.
    """

    def __init__(
        self, stored: Sequence[_core.StoredTensor], framework: str, placement: Placement | None = None
    ) -> None:
        self.stored = stored
        self.framework = framework
        self.devices: Mapping[int, Any] = {} if placement is None else placement.devices
        self.dtypes: Mapping[int, str] = {} if placement is None else placement.dtypes
        self.mappings: _core.Mappings | None = None
        self.requests: list[_core.ReadRequest] = []
        self.movers: dict[int, _memory.Mover] = {}
        self.sinks: Sinks | None = None
        self.fresh = 0, 0
        self._pushed = 0
        self._dtypes: dict[tuple[str, str | None], tuple[Any, int, Callable[..., Any]]] = {}
        self._converters: dict[tuple[Any, Any], tuple[Callable[..., None], tuple[int, int]]] = {}
        self._made: dict[tuple[Any, ...], Any] = {}
        self._values: list[Any] = []
        self._exports: list[np.ndarray[Any, Any]] = []
        # Values that can be built only from the bytes, and their places.
        self._later: list[tuple[int, tuple[Any, ...], Callable[[], Any]]] = []

    def push(self, number: int, mover: _memory.Mover, nbytes: int) -> None:
        """Pass the ``nbytes`` of request ``number`` to a mover."""
        self.movers[number] = mover
        self._pushed += nbytes

    def begin(self, operation: str) -> None:
        """After the last request, allow :meth:`drain`; called by the thread whose streams the devices wait for.

        Raises:
            RuntimeError: one of these streams is being captured into a graph.
        """
        self.sinks = Sinks(operation, self.movers)

    @contextmanager
    def lent(self) -> Iterator[Lent]:
        """A context with staging memory for tensors on devices."""
        assert self.sinks is not None  # noqa: S101 - it has begun
        with lent(self.sinks.devices, self._pushed) as staging:
            yield staging

    def drain(self, ranges: Sequence[Range]) -> None:
        """The core's callback for requests without an address."""
        assert self.sinks is not None  # noqa: S101 - it has begun
        self.sinks.drain(ranges)

    def copy_mapped(self, report: Mapping[str, Any], threads: int | None) -> dict[str, Any]:
        """Fill the tensors that are not mapped with copies from the verified mappings.

        Args:
            report: the report of the check.
            threads: the most threads that copy; None for one per core, within limits.

        Returns:
            The report of the check and the copies.
        """
        if not self.requests:
            return dict(report)
        began = time.perf_counter()
        steps = list(self._steps())
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(min(len(steps), threads or min(cores, _MOST_THREADS)), "fastckpt-copy") as pool:
            try:
                running = pool.map(self.drain, steps)
            except RuntimeError:  # no thread can be started: the interpreter is ending
                running = map(self.drain, steps)
            # On an error, tasks that have not begun are cancelled.
            for _ in running:
                pass
        seconds = time.perf_counter() - began
        phases = {**report["phases"], "read": report["phases"].get("read", 0.0) + seconds}
        on_host = (request.capacity for number, request in enumerate(self.requests) if not self._is_on_device(number))
        return {
            **report,
            "seconds": report["seconds"] + seconds,
            "phases": phases,
            "copied": report["copied"] + sum(on_host),
        }

    def _is_on_device(self, number: int) -> bool:
        assert self.sinks is not None  # noqa: S101 - it has begun
        return self.sinks.is_on_device(number)

    def _steps(self) -> Iterator[list[Range]]:
        """The copies to make from the mappings, in portions."""
        step: list[Range] = []
        room = _STEP
        for number, request in enumerate(self.requests):
            address, nbytes = self._address(request.tensor), self.stored[request.tensor].nbytes
            start = 0
            while start < nbytes:
                size = min(room, nbytes - start)
                step.append((number, start, address + start, size))
                start += size
                room -= size
                if not room:
                    yield step
                    step, room = [], _STEP
        if step:
            yield step

    def ask(
        self, index: int, memory: Any, address: int, mover: _memory.Mover | None = None, whole: Whole | None = None
    ) -> None:
        """Request a read of a whole tensor, or of a rank's part of it, into the tensor or array ``memory``.

        Every request goes through this method or one of the two below.

        Args:
            index: the tensor's number.
            memory: the tensor or array.
            address: the address of its memory, if it is contiguous and on the host, else 0.
            mover: accepts the bytes if the address is 0.
            whole: the tensor of which ``memory`` is this rank's part.

        Raises:
            CorruptCheckpointError: the number of bytes of the stored tensor differs.
        """
        self._fits(index, memory.nbytes if whole is None else whole.nbytes)
        self._request(index, address, memory.nbytes, whole, mover=mover)

    def ask_box(self, index: int, memory: Any, box: Sequence[tuple[int, int, int]]) -> None:
        """Request a read of a box of a tensor into the contiguous tensor ``memory`` on a device."""
        if memory.nbytes:
            self.push(len(self.requests), torch_for("a torch tensor").mover_in(memory), memory.nbytes)
            self.requests.append(_core.ReadRequest(index, 0, memory.nbytes, box))

    def _request(
        self,
        index: int,
        address: int,
        room: int,
        whole: Whole | None,
        *,
        mover: _memory.Mover | None = None,
        layout: np.ndarray[Any, Any] | None = None,
    ) -> None:
        """Record one request, unless it is empty."""
        assert whole is None  # noqa: S101 - one process alone reads no parts
        if not room:
            return
        if self.mappings is not None:
            if layout is not None:
                mover, room = _memory.mover_in(layout), layout.size * layout.itemsize
            elif mover is None:
                mover = partial(_put, address)
            address, layout = 0, None
        if mover is not None:
            self.push(len(self.requests), mover, room)
        strides = None if layout is None else layout.strides
        self.requests.append(_core.ReadRequest(index, address, room, strides=strides))

    def ask_cast(
        self,
        index: int,
        memory: Any,
        address: int,
        mover: _memory.Mover | None,
        whole: Whole | None = None,
        *,
        torch: bool = True,
    ) -> None:
        """Like :meth:`ask`, but cast elements to the dtype that :attr:`dtypes` has for the tensor.

        Args:
            index: the tensor's number.
            memory: the tensor or array.
            address: the address of its memory, if it is contiguous and on the host, else 0.
            mover: accepts the converted elements if the address is 0.
            whole: the tensor of which ``memory`` is this rank's part.
            torch: whether torch converts the elements; if not, numpy does.
        """
        convert, sizes = self._converter(index, torch=torch)
        self._fits(index, (memory.nbytes if whole is None else whole.nbytes) // sizes[1] * sizes[0])
        room = memory.nbytes // sizes[1] * sizes[0]
        self._request(index, 0, room, whole, mover=Cast(convert, sizes, address, mover))

    def _converter(self, index: int, *, torch: bool) -> tuple[Callable[..., None], tuple[int, int]]:
        source = self.tensor_dtype(index) if torch else self.array_dtype(index)
        target = self.wanted_dtype(index, torch=torch)
        known = self._converters.get((source, target))
        if known is None:
            try:
                make = torch_for("a torch tensor").converter if torch else _numpy.converter
                known = self._converters[source, target] = (make(source, target), (source.itemsize, target.itemsize))
            except (RuntimeError, TypeError) as error:
                raise UnsupportedTypeError(
                    f"load: tensor {self.stored[index].name!r} of dtype {self._kind(index)} cannot be cast to "
                    f"{self.dtypes[index]} ({error}): leave it out of dtype="
                ) from error
        return known

    def wanted_dtype(self, index: int, *, torch: bool) -> Any:
        """The dtype, torch's or numpy's, that a tensor is cast to."""
        name = self.dtypes[index]
        found = torch_for("a torch tensor").DTYPES.get(name) if torch else _numpy.dtype_of_torch(name)
        if found is None:
            lacking = "this version of torch" if torch else "numpy (without the package ml_dtypes)"
            other = "" if torch else ', or framework="torch"'
            raise UnsupportedTypeError(
                f"load: tensor {self.stored[index].name!r} cannot be cast to {name}, which {lacking} does not have: "
                f"give another dtype={other}"
            )
        return found

    def ask_strided(self, index: int, memory: Any, layout: np.ndarray[Any, Any], whole: Whole | None = None) -> None:
        """Like :meth:`ask`, for host memory with gaps or in another order, whose elements do not overlap.

        Args:
            index: the tensor's number.
            memory: the tensor or array.
            layout: where its elements are (:func:`fastckpt._tensors.memory.laid_out`).
            whole: the tensor of which ``memory`` is this rank's part.
        """
        self._fits(index, memory.nbytes if whole is None else whole.nbytes)
        low, high = _memory.span(layout) if memory.nbytes else (0, 0)
        self._request(index, low, high - low, whole, layout=layout)

    def take(self, value: Any) -> None:
        """Use the existing ``value`` for the next token."""
        self._values.append(value)

    def make(self, tokens: Sequence[list[Any]]) -> None:
        """New memory for each of these tokens, in order; equal tokens share it."""
        with paused():
            self._make(tokens)

    def _make(self, tokens: Sequence[list[Any]]) -> None:
        made = self._made
        values = self._values
        for token in tokens:
            # The key omits the device: tied tensors are one tensor, whichever device they were on.
            key = tuple(token[:3])
            value = made.get(key)
            if value is None:
                value = made[key] = self._new(key)
            if type(value) is _Pending:
                self._later.append((len(values), key, value.finish))
            values.append(value)

    def _count(self, index: int, nbytes: int) -> None:
        """Count memory allocated for a tensor in a load without mappings; memory for a device is only temporary."""
        if self.mappings is None and index not in self.devices:
            self.fresh = self.fresh[0] + nbytes, self.fresh[1] + (nbytes if nbytes >= _memory.LARGE else 0)

    def values(self) -> list[Any]:
        """The value of each token, after everything has been read."""
        self._exports.clear()
        finished: dict[tuple[Any, ...], Any] = {}
        for position, key, finish in self._later:
            if key not in finished:
                finished[key] = finish()
            self._values[position] = finished[key]
        return self._values

    def _new(self, key: tuple[Any, ...]) -> Any:
        tag, index, *more = key
        if tag in {"bytes", "bytearray"}:
            return self._bytes(tag, index)
        flags = more[0] if more else ""
        if tag == "tensor" and self.framework != "numpy":
            if not more:
                return self._tensor(index)
            plain = self._made.get((tag, index))
            if plain is None:
                plain = self._made[tag, index] = self._tensor(index)
            try:
                return torch_for("a torch tensor").with_flags(plain, flags)
            except RuntimeError as error:  # an integer tensor cannot require a gradient
                raise self._malformed(index, str(error)) from error
        if tag == "array" and self.framework == "torch":
            return self._array_as_tensor(index)
        return self._array(index)

    def _array_as_tensor(self, index: int) -> Any:
        torch = torch_for("a numpy array that is to become a torch tensor")
        if self.stored[index].logical is None:
            return self._tensor(index)
        array = self._array(index)
        if torch.from_array(array[:0] if array.ndim else array) is None:
            raise self._lacks(index, "torch", "numpy")
        device = self.devices.get(index)
        if device is not None:
            return _Pending(lambda: torch.from_array(array).to(device))
        if array.dtype.isnative:
            return torch.from_array(array)
        return _Pending(lambda: torch.from_array(array))

    def _tensor(self, index: int) -> Any:
        stored = self.stored[index]
        logical = stored.logical
        # The same few dtypes recur, and a lookup is not free.
        kind = (stored.dtype, None if logical is None else logical.dtype)
        known = self._dtypes.get(kind)
        if known is None:
            found = self.tensor_dtype(index)
            known = self._dtypes[kind] = (found, found.itemsize, torch_for("a torch tensor").empty)
        found, itemsize, empty = known
        nbytes = stored.nbytes
        shape = stored.shape if logical is None and nbytes else self.shape(index, itemsize)
        device = self.devices.get(index) if self.devices else None
        cast = bool(self.dtypes) and index in self.dtypes
        if device is not None or cast:
            torch = torch_for("a torch tensor")
            wanted = self.wanted_dtype(index, torch=True) if cast else found
            if device is None:
                room = prod(shape) * wanted.itemsize
                tensor = empty(shape, wanted, 0, room)
                self._count(index, room)
            else:
                tensor = torch.empty_on(device, shape, wanted)
            address = tensor.data_ptr() if device is None else 0
            (self.ask_cast if cast else self.ask)(
                index, tensor, address, torch.mover_in(tensor) if nbytes and not address else None
            )
            return tensor
        if nbytes and self.mappings is not None:
            return torch_for("a torch tensor").over(self._mapped(index, itemsize), found, shape)
        tensor = empty(shape, found, stored.offset, nbytes)
        self._count(index, nbytes)
        self.ask(index, tensor, tensor.data_ptr())
        return tensor

    def _array(self, index: int) -> Any:
        stored = self.stored[index]
        found = self.array_dtype(index)
        shape = self.shape(index, found.itemsize)
        if index in self.dtypes:
            wanted = self.wanted_dtype(index, torch=False)
            room = prod(shape) * wanted.itemsize
            array = _numpy.empty(shape, wanted, 0, room)
            self._count(index, room)
            self.ask_cast(index, array, _memory.address_of(array), None, torch=False)
            return array
        if stored.nbytes and self.mappings is not None:
            return np.ndarray(shape, found, self._mapped(index, found.alignment))
        array = _numpy.empty(shape, found, stored.offset, stored.nbytes)
        self._count(index, stored.nbytes)
        self.ask(index, array, _memory.address_of(array))
        return array

    def _mapped(self, index: int, alignment: int) -> _memory.Bytes:
        """The bytes of a tensor in the mapping of its shard; a copy if its elements would not be aligned there."""
        stored = self.stored[index]
        memory = _memory.at(self._address(index), stored.nbytes, self.mappings)
        return memory.copy() if stored.offset % alignment else memory

    def _address(self, index: int) -> int:
        """The byte at which a tensor begins in the mappings."""
        stored = self.stored[index]
        assert self.mappings is not None  # noqa: S101 - the callers check it
        return self.mappings.address(stored.shard, stored.offset, stored.nbytes)

    def tensor_dtype(self, index: int) -> Any:
        """The torch dtype of a stored tensor."""
        logical = self.stored[index].logical
        try:
            name = None if logical is None else logical.dtype
            found = torch_for("a torch tensor").dtype_of(self.stored[index].dtype, name)
        except ValueError as error:
            raise self._malformed(index, str(error)) from error
        if found is None:
            raise self._lacks(index, "this version of torch", "numpy")
        return found

    def array_dtype(self, index: int) -> np.dtype[Any]:
        """The numpy dtype of a stored tensor."""
        dtype, logical = self.stored[index].dtype, self.stored[index].logical
        found: np.dtype[Any] | None
        try:
            if logical is not None and logical.dtype.startswith(NUMPY_PREFIX):
                found = _numpy.parse_dtype(logical.dtype)
            elif logical is not None:
                found = _numpy.dtype_of_torch(logical.dtype.removeprefix(TORCH_PREFIX))
            else:
                found = _numpy.DTYPES.get(dtype) or _numpy.dtype_of_torch(PLAIN_NAMES.get(dtype, ""))
        except (ValueError, TypeError) as error:
            raise self._malformed(index, str(error)) from error
        if found is None:
            raise self._lacks(index, "numpy (without the package ml_dtypes)", "torch")
        return found

    def _bytes(self, tag: str, index: int) -> Any:
        nbytes = self.stored[index].nbytes
        if nbytes and self.mappings is not None:
            mapped = self._mapped(index, 1)
            # The bytes are copied only after they have been checked.
            return _Pending(mapped.tobytes if tag == "bytes" else lambda: bytearray(mapped))
        self._count(index, nbytes)
        if tag == "bytearray":
            value = bytearray(nbytes)
            if nbytes:
                # The array exports the memory, and so keeps it alive during the write.
                exported = np.frombuffer(value, np.uint8)
                self._exports.append(exported)
                self.ask(index, exported, _memory.address_of(exported))
            return value
        memory = np.empty(nbytes, np.uint8)
        self.ask(index, memory, _memory.address_of(memory))
        return _Pending(memory.tobytes)

    def shape(self, index: int, itemsize: int) -> tuple[int, ...]:
        """A tensor's logical shape, which fits its bytes."""
        stored = self.stored[index]
        shape, nbytes = (stored.logical or stored).shape, stored.nbytes
        self._fits(index, prod(shape) * itemsize)
        # Neither numpy nor torch can count the elements of an empty tensor whose other sizes alone are too large.
        if not nbytes and prod(size or 1 for size in shape) * max(itemsize, 1) >= _LIMIT:
            raise self._malformed(index, "its shape is out of range")
        return shape

    def _fits(self, index: int, nbytes: int) -> None:
        """Refuse a tensor whose stored number of bytes does not match its dtype and shape.

        A new tensor (on the host, on a device or over a mapping) and a part of a tensor are made from this dtype and
        shape; existing memory has its own.
        """
        if self.stored[index].nbytes != nbytes:
            raise self._malformed(index, "its logical dtype and shape do not fit its bytes")

    def _malformed(self, index: int, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"load: tensor {self.stored[index].name!r}: {reason}")

    def _lacks(self, index: int, lacking: str, other: str) -> UnsupportedTypeError:
        return UnsupportedTypeError(
            f"load: tensor {self.stored[index].name!r} has dtype {self._kind(index)}, which {lacking} "
            f'does not have: load with framework="{other}", or choose other tensors with keys='
        )

    def _kind(self, index: int) -> str:
        stored = self.stored[index]
        return plain_name(stored.dtype, None if stored.logical is None else stored.logical.dtype)


def _put(to: int, start: int, address: int, nbytes: int) -> None:
    """A mover into contiguous host memory."""
    _memory.at(to + start, nbytes)[:] = _memory.at(address, nbytes)


def read_targets(
    reader: _core.Reader,
    targets: Targets,
    requests: Sequence[_core.ReadRequest] | None = None,
    drain: Drain | None = None,
    *,
    io: IO = DEFAULT_IO,
    tick: Callable[[int, int], None] | None = None,
) -> Mapping[str, Any]:
    """Read the requests of ``targets``, or ``requests`` instead, in one process; returns the report.

    See ``_core.Reader.read``.
    """
    with targets.lent() as staging:
        report = reader.read(
            targets.requests if requests is None else requests,
            verify=io.verify,
            io=io.engine,
            threads=io.threads,
            most_staging=most_staging(io),
            drain=drain or (targets.drain if targets.movers else None),
            tick=tick,
            staging=staging.core,
        )
        return with_warnings(report, staging.warnings)


class _Pending:
    """A value that can be made only from its bytes."""

    __slots__ = ("finish",)

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.finish = finish
