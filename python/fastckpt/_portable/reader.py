"""An open checkpoint, read by a few threads: a directory through the page cache, or other files."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from fastckpt import _crc64
from fastckpt._tensors.memory import address_of, at
from fastckpt.exceptions import CorruptCheckpointError, ReplacedCheckpointError

from .boxes import MERGE, Box
from .files import Directory
from .limits import MANIFEST
from .manifest import corrupt, decode
from .records import DamagedRange
from .refusal import for_linux

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .files import File, Files
    from .records import ReadRequest, StoredShard, StoredTensor

    Tick: TypeAlias = Callable[[int, int], None]
    Drain: TypeAlias = Callable[[list[tuple[int, int, int, int]]], None]

#: Reads below this size take one thread.
_SMALL = 2 << 20
#: The most bytes in flight that are read into temporary memory.
_IN_FLIGHT = 256 << 20
#: Bytes per read of a header, and of the manifest's beginning, which has the checksum of the rest.
_HEADER_READ, _SEAL = 1 << 20, 64
_TICK = 0.1


class _Piece(NamedTuple):
    """Requested bytes of a tensor in one block; for verification, the whole extent.

    ``start`` counts in the tensor, ``offset`` in the file.
    """

    tensor: int
    offset: int
    start: int
    nbytes: int
    crc: str | None
    target: _Target


class _Read(NamedTuple):
    """One read."""

    shard: int
    start: int
    end: int
    pieces: list[_Piece]


class _Target:
    """The destination of the bytes of a request; none if they are only verified."""

    #: The memory of the whole tensor, if it is contiguous.
    memory: np.ndarray[Any, Any] | None = None

    def deliver(self, start: int, data: np.ndarray[Any, Any]) -> None:
        """Deliver ``data``, the tensor's bytes that begin at ``start``."""


class _Memory(_Target):
    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.memory = memory


class _Boxed(_Target):
    def __init__(self, box: Box, memory: np.ndarray[Any, Any]) -> None:
        self.box = box
        self.into = memory

    def deliver(self, start: int, data: np.ndarray[Any, Any]) -> None:
        self.box.deliver(self.into, start, data)


class _Drained(_Target):
    def __init__(self, request: int, drain: Drain) -> None:
        self.request = request
        self.drain = drain

    def deliver(self, start: int, data: np.ndarray[Any, Any]) -> None:
        self.drain([(self.request, start, address_of(data), len(data))])


class Mappings:
    """Shards as private memory: writes never reach the files."""

    def __init__(self) -> None:
        self.shards: dict[int, np.ndarray[Any, Any]] = {}

    def address(self, shard: int, offset: int, nbytes: int) -> int:
        """The address of ``nbytes`` of a shard's file, ``offset`` bytes in."""
        memory = self.shards.get(shard)
        if memory is None:
            raise IndexError("this shard is not mapped")
        if not 0 <= offset <= offset + nbytes <= len(memory):
            raise IndexError("these bytes lie beyond the mapped shard")
        return address_of(memory) + offset


class Reader:
    """An open checkpoint: manifest read and checked."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: bool = False,
        manifest: bytes | None = None,
        files: Files | None = None,
    ) -> None:
        # Shards are opened when they are read: on Windows a directory with an open file could not be replaced.
        del keep
        self._files = files or Directory(os.fspath(path))
        self._files.check()
        content = self._files.manifest(None if manifest is None else _SEAL)
        self._seal = content[:_SEAL]
        if manifest is not None:
            if manifest[:_SEAL] != self._seal:
                raise self._replaced()
            content = manifest
        self._manifest = decode(content, self._files.path_of(MANIFEST))
        self._sound: set[int] = set()

    def manifest(self) -> bytes:
        """The content of the manifest, read again."""
        content = self._files.manifest()
        if content[:_SEAL] != self._seal:
            raise self._replaced()
        return content

    def tensors(self) -> list[StoredTensor]:
        """All tensors, in the order of the state."""
        return list(self._manifest.tensors)

    def checksum(self, tensor: int) -> int | None:
        """The CRC-64 of all bytes of a tensor."""
        return _crc64.joined(_crc64.of(b""), self._sums(self._tensor(tensor)))

    def shards(self) -> list[StoredShard]:
        """All shards."""
        return list(self._manifest.shards)

    def structure(self) -> str:
        """The structure, as JSON text."""
        return self._manifest.structure

    def metadata(self) -> str:
        """The caller's metadata, as JSON text."""
        return self._manifest.metadata

    def per_rank(self) -> str | None:
        """The ``per_rank`` states, as JSON text; None if there are none."""
        return self._manifest.per_rank

    def info(self) -> dict[str, Any]:
        """Format version, writer, created, saved, block_size."""
        return self._manifest.info

    def read(
        self,
        requests: Sequence[ReadRequest],
        *,
        verify: bool,
        io: str,
        threads: int | None,
        drain: Drain | None,
        tick: Tick | None,
        staging: object = None,
        most_staging: int | None = None,
    ) -> dict[str, Any]:
        """Read tensors and boxes of them. This needs no ``staging`` memory."""
        del staging, most_staging
        job = _Job(self, io, threads)
        late = [job.ask(number, request, drain, verify=verify) for number, request in enumerate(requests)]
        with self._settled():
            if verify:
                self._check_headers(job.shards())
            job.run(tick)
        for hand_over in late:
            hand_over()
        return job.report()

    save = for_linux("save")

    def map(self, tensors: Sequence[int]) -> Mappings:
        """Map the shards that hold ``tensors``, except empty ones."""
        mappings = Mappings()
        for tensor in map(self._tensor, tensors):
            if tensor.nbytes and tensor.shard not in mappings.shards:
                shard = self._manifest.shards[tensor.shard]
                with self._settled():
                    self.open_shard(tensor.shard).close()  # checks the length
                    mappings.shards[tensor.shard] = self._files.map(shard.file, shard.nbytes)
        return mappings

    def check(
        self, mappings: Mappings, tensors: Sequence[int], *, threads: int | None, tick: Tick | None
    ) -> dict[str, Any]:
        """Compare the mapped ``tensors`` with their checksums."""
        job = _Job(self, "buffered", threads, mappings.shards)
        for number in tensors:
            tensor = self._tensor(number)
            if tensor.nbytes and tensor.shard not in mappings.shards:
                raise ValueError("this tensor is not mapped")
            job.add(number, [(0, tensor.nbytes)], _Target(), verify=True)
        with self._settled():
            self._check_headers(job.shards())
            job.run(tick)
        return job.report()

    def verify(
        self, *, io: str, threads: int | None, tick: Tick | None, most_staging: int | None = None
    ) -> dict[str, Any]:
        """Compare every byte with its checksum; report all damage. This needs no staging memory."""
        del most_staging
        with self._settled():
            return self._verified(io, threads, tick)

    def _verified(self, io: str, threads: int | None, tick: Tick | None) -> dict[str, Any]:
        damage: list[DamagedRange] = []
        job = _Job(self, io, threads, damage=damage)
        missing: dict[int, str] = {}
        for number, shard in enumerate(self._manifest.shards):
            try:
                file, size = self._files.open(shard.file)
            except CorruptCheckpointError as error:
                missing[number] = str(error)
                damage.append(DamagedRange(shard.file, 0, shard.nbytes, None, str(error)))
                continue
            with closing(file):
                if size != shard.nbytes:
                    low, high = sorted((size, shard.nbytes))
                    reason = f"it has {size} bytes, expected {shard.nbytes}"
                    damage.append(DamagedRange(shard.file, low, high - low, None, reason))
                damage += self._header_damage(shard, file) if size >= shard.data_offset else []
        for number, tensor in enumerate(self._manifest.tensors):
            if tensor.shard not in missing:
                job.add(number, [(0, tensor.nbytes)], _Target(), verify=True)
            elif tensor.nbytes:
                file_ = self._manifest.shards[tensor.shard].file
                damage.append(DamagedRange(file_, tensor.offset, tensor.nbytes, tensor.name, missing[tensor.shard]))
        job.run(tick)
        damage += self._wrong_sums()
        if damage and self._is_replaced():
            raise self._replaced()
        ordered = sorted(set(damage), key=lambda one: (one.file, one.offset, one.length, one.tensor or "", one.reason))
        return {**job.report(), "damage": ordered}

    # --- for the job ----------------------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Bytes of a block."""
        return self._manifest.block_size

    def _tensor(self, number: int) -> StoredTensor:
        if not 0 <= number < len(self._manifest.tensors):
            raise IndexError(f"there is no tensor {number}")
        return self._manifest.tensors[number]

    tensor = _tensor

    @property
    def files(self) -> Files:
        """The files of the checkpoint."""
        return self._files

    def open_shard(self, number: int, *, any_length: bool = False) -> File:
        """Open a shard, and check its length."""
        shard = self._manifest.shards[number]
        file, size = self._files.open(shard.file)
        if size != shard.nbytes and not any_length:
            file.close()
            raise corrupt(self._files.path_of(shard.file), f"it has {size} bytes, expected {shard.nbytes}")
        return file

    def raised(self, damage: DamagedRange) -> CorruptCheckpointError:
        """The error for ``damage``."""
        of = f" (tensor `{damage.tensor}`)" if damage.tensor is not None else ""
        what = f"bytes {damage.offset} to {damage.offset + damage.length}{of}: {damage.reason}"
        return corrupt(self._files.path_of(damage.file), what)

    def file_of(self, number: int) -> str:
        """The name of a shard."""
        return self._manifest.shards[number].file

    def _check_headers(self, shards: Iterable[int]) -> None:
        todo = [number for number in shards if number not in self._sound]

        def check(number: int) -> None:
            with closing(self.open_shard(number)) as file:
                for damage in self._header_damage(self._manifest.shards[number], file):
                    raise self.raised(damage)

        # Threads wait for the network in parallel, not for each other.
        with ThreadPoolExecutor(self._files.threads, "fastckpt") as pool:
            for _ in pool.map(check, todo):
                pass
        self._sound.update(todo)

    def _header_damage(self, shard: StoredShard, file: File) -> Iterator[DamagedRange]:
        """The damage of a shard's header, if any."""
        sum_, at_, field = _crc64.of(b""), 0, 0
        while at_ < shard.data_offset:
            piece = bytearray(min(_HEADER_READ, shard.data_offset - at_))
            got = file.read_at(at_, piece)
            if not at_:
                field = int.from_bytes(piece[:8], "little")
            if not got:
                break
            sum_ = _crc64.of(memoryview(piece)[:got], sum_)
            at_ += got
        # A forged manifest may have the right checksum for a header that other readers would read with another length.
        if at_ == shard.data_offset and field + 8 != at_:
            reason = f"header: its length field puts the data elsewhere than at byte {at_}"
            yield DamagedRange(shard.file, 0, 8, None, reason)
        elif at_ < shard.data_offset or _crc64.to_hex(sum_) != shard.header_crc:
            reason = f"header: checksum is {_crc64.to_hex(sum_)}, expected {shard.header_crc}"
            yield DamagedRange(shard.file, 0, shard.data_offset, None, reason)

    def _wrong_sums(self) -> Iterator[DamagedRange]:
        """Shards whose checksum, which verifies copies, is not that of their parts."""
        sums = [int(shard.header_crc, 16) for shard in self._manifest.shards]
        for tensor in sorted(self._manifest.tensors, key=lambda tensor: tensor.offset):
            sums[tensor.shard] = _crc64.joined(sums[tensor.shard], self._sums(tensor))
        for shard, sum_ in zip(self._manifest.shards, sums, strict=True):
            if _crc64.to_hex(sum_) != shard.crc:
                reason = "the manifest's checksum of the whole shard is not that of its parts"
                yield DamagedRange(shard.file, 0, shard.nbytes, None, reason)

    def _sums(self, tensor: StoredTensor) -> Iterator[tuple[int, int]]:
        """The checksum and the length of each extent of a tensor."""
        for number, (start, end) in enumerate(_cut(tensor.offset, tensor.offset + tensor.nbytes, self.block_size)):
            yield int(tensor.crc[number * _crc64.HEX :][: _crc64.HEX], 16), end - start

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """A context in which damage means a replaced checkpoint if the path has another manifest by now."""
        try:
            yield
        except (CorruptCheckpointError, FileNotFoundError) as error:
            if self._is_replaced():
                raise self._replaced() from error
            raise

    def _is_replaced(self) -> bool:
        try:
            return self._files.manifest(_SEAL) != self._seal
        except (self._files.gone, CorruptCheckpointError):
            return True

    def _replaced(self) -> ReplacedCheckpointError:
        path = self._files.path
        text = f"`{path}` was replaced or removed while it was read: open it again"
        return ReplacedCheckpointError(errno.ENOENT, text, path)


def _cut(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a range of a file, each within one block."""
    while start < end:
        stop = min(end, (start // size + 1) * size)
        yield start, stop
        start = stop


class _Job:
    """The requests of a read, and its result.

    Args:
        reader: the checkpoint.
        io: the requested engine.
        threads: the number of threads; None for the default.
        mapped: the mapped shards, if any; if so, nothing is read.
        damage: collects damage; without it the first is an error.
    """

    def __init__(
        self,
        reader: Reader,
        io: str,
        threads: int | None,
        mapped: dict[int, np.ndarray[Any, Any]] | None = None,
        damage: list[DamagedRange] | None = None,
    ) -> None:
        if io == "direct":
            raise OSError(errno.EINVAL, f'direct I/O was requested, but {reader.files.fallback}; use io="auto"')
        self._began = time.perf_counter()
        self._reader = reader
        self._fallback = None if io in ("auto", "buffered") else reader.files.fallback
        self._threads = threads
        self._mapped = mapped
        self._damage = damage
        self._pieces: list[_Piece] = []
        self._reads: list[_Read] = []
        self._wanted = self._total = 0
        self._moved: list[int] = [0]
        self._stop = False

    def ask(self, number: int, request: ReadRequest, drain: Drain | None, *, verify: bool) -> Callable[[], None]:
        """Add a request; returns a function to call after everything has been read.

        Raises:
            IndexError: there is no such tensor.
            ValueError: its memory is too small.
        """
        tensor = self._reader.tensor(request.tensor)
        address, capacity = request.address, request.capacity
        whole = request.box is None and request.strides is None
        box = None if whole else Box(tensor, request.box, request.strides)
        nbytes = tensor.nbytes if box is None else box.nbytes
        if not nbytes:
            return _nothing
        needed = nbytes if box is None or not address else box.reach
        if needed > capacity:
            raise ValueError(
                f"read: request {number} is for {needed} bytes, and its memory has {capacity}: nothing was moved"
            )
        if not address and drain is None:
            raise ValueError("read: address 0 needs a callback")
        self._wanted += nbytes
        hand_over = _nothing
        target: _Target
        if box is None:
            target = _Memory(at(address, nbytes)) if address or drain is None else _Drained(number, drain)
        else:
            if not address and drain is not None:
                packed = np.empty(nbytes, np.uint8)
                box = Box(tensor, request.box, None)
                address = address_of(packed)
                taker = _Drained(number, drain)
                hand_over = lambda: taker.deliver(0, packed)  # noqa: E731
            try:
                target = _Boxed(box, box.at(address))
            except ValueError as error:
                raise ValueError(f"read: request {number} {error}") from None
        self.add(request.tensor, [(0, nbytes)] if box is None else box.ranges(), target, verify=verify)
        return hand_over

    def add(self, number: int, ranges: Iterable[tuple[int, int]], target: _Target, *, verify: bool) -> None:
        """Add ranges of a tensor's bytes."""
        tensor = self._reader.tensor(number)
        size, offset, end = self._reader.block_size, tensor.offset, tensor.offset + tensor.nbytes
        first = offset // size
        covered = 0
        for low, high in ranges:
            for wanted in _cut(offset + low, offset + high, size):
                (start, stop), crc = wanted, None
                if verify:
                    # A checksum covers a whole extent.
                    block = start // size
                    start, stop = max(offset, block * size), min(end, (block + 1) * size)
                    crc = tensor.crc[(block - first) * _crc64.HEX :][: _crc64.HEX]
                    if stop <= covered:
                        continue
                    covered = stop
                self._pieces.append(_Piece(number, start, start - offset, stop - start, crc, target))

    def shards(self) -> list[int]:
        """The shards to read."""
        return sorted({self._reader.tensor(piece.tensor).shard for piece in self._pieces})

    def _plan(self) -> None:
        """Join pieces that are close together in one block of a shard."""
        size, least = self._reader.block_size, self._reader.files.straight
        shard_of = {piece.tensor: self._reader.tensor(piece.tensor).shard for piece in self._pieces}
        last: _Read | None = None
        for piece in sorted(self._pieces, key=lambda piece: (shard_of[piece.tensor], piece.offset)):
            shard, end = shard_of[piece.tensor], piece.offset + piece.nbytes
            self._total += piece.nbytes
            straight = piece.nbytes >= least and piece.target.memory is not None
            if (
                last is not None
                and not straight
                and last.shard == shard
                and last.start // size == piece.offset // size
                and piece.offset <= last.end + MERGE
            ):
                last = self._reads[-1] = last._replace(end=max(last.end, end))
                last.pieces.append(piece)
                continue
            self._reads.append(_Read(shard, piece.offset, end, [piece]))
            last = None if straight else self._reads[-1]
        self._pieces.clear()

    def run(self, tick: Tick | None) -> None:
        """Read everything."""
        self._planned = time.perf_counter()
        self._tensors = len({piece.tensor for piece in self._pieces})
        self._shards = len(self.shards())
        self._plan()
        most = min(self._threads or self._reader.files.threads, len(self._reads), _IN_FLIGHT // self._reader.block_size)
        count = 1 if self._total < _SMALL else max(1, most)
        self._moved = [0] * count
        todo, lock = iter(self._reads), Lock()
        with ThreadPoolExecutor(count, thread_name_prefix="fastckpt") as pool:
            try:
                left = {pool.submit(self._work, number, todo, lock) for number in range(count)}
                while left:
                    done, left = wait(left, _TICK, FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    if tick is not None:
                        tick(sum(self._moved), self._total)
            finally:
                self._stop = True

    def _work(self, number: int, todo: Iterator[_Read], lock: Lock) -> None:
        """Read what other threads have not yet taken; the file of the last shard stays open."""
        file: File | None = None
        opened = -1
        try:
            while not self._stop:
                with lock:
                    read = next(todo, None)
                if read is None:
                    return
                if self._mapped is None and opened != read.shard:
                    if file is not None:
                        file.close()
                    file = self._reader.open_shard(read.shard, any_length=self._damage is not None)
                    opened = read.shard
                self._move(read, file)
                self._moved[number] += sum(piece.nbytes for piece in read.pieces)
        except BaseException:
            self._stop = True
            raise
        finally:
            if file is not None:
                file.close()

    def _move(self, read: _Read, file: File | None) -> None:
        """Read, compare and deliver."""
        only = read.pieces[0]
        memory = only.target.memory
        straight = memory is not None and len(read.pieces) == 1
        nbytes = read.end - read.start
        if file is None:
            assert self._mapped is not None  # noqa: S101 - then every shard is open
            data, got, reason = self._mapped[read.shard][read.start : read.end], nbytes, ""
        else:
            data = memory[only.start :][:nbytes] if memory is not None and straight else np.empty(nbytes, np.uint8)
            got, reason = self._fill(file, read, data)
        for piece in read.pieces:
            begin = piece.offset - read.start
            if begin + piece.nbytes > got:
                self._damaged(read.shard, piece, reason)
                continue
            part = data[begin : begin + piece.nbytes]
            if not straight and piece.target.memory is not None:
                there = piece.target.memory[piece.start :][: piece.nbytes]
                there[:] = part
                part = there
            found = None if piece.crc is None else _crc64.to_hex(_crc64.of(part))
            if found != piece.crc:
                self._damaged(read.shard, piece, f"checksum is {found}, expected {piece.crc}")
            piece.target.deliver(piece.start, part)

    def _fill(self, file: File, read: _Read, data: np.ndarray[Any, Any]) -> tuple[int, str]:
        """Read into ``data``; return the number of bytes read, and the reason if that is not all."""
        try:
            return file.read_at(read.start, data), "the file is too short to hold it"
        except self._reader.files.gone as error:
            if self._damage is None:
                raise
            return 0, str(error.strerror)

    def _damaged(self, shard: int, piece: _Piece, reason: str) -> None:
        name = self._reader.tensor(piece.tensor).name
        damage = DamagedRange(self._reader.file_of(shard), piece.offset, piece.nbytes, name, reason)
        if self._damage is None:
            raise self._reader.raised(damage)
        self._damage.append(damage)

    def report(self) -> dict[str, Any]:
        """The report; see ``_core.pyi``."""
        ended, count = time.perf_counter(), len(self._reads)
        why = "mapped" if self._mapped is not None else self._reader.files.why
        return {
            "bytes": self._wanted or self._total,
            "seconds": ended - self._began,
            "phases": {"plan": self._planned - self._began, "read": ended - self._planned},
            "threads": len(self._moved),
            "engine": "buffered",
            "fallback": self._fallback,
            "warnings": (),
            "thread_bytes": tuple(self._moved),
            "blocks": {"zero-copy": 0, "staged": 0, "buffered": count},
            "paths": {f"buffered: {why}": count} if count else {},
            "copied": self._total if self._mapped is None else 0,
            "shards": self._shards,
            "tensors": self._tensors,
        }


def _nothing() -> None:
    """Do nothing, for requests that need no further step."""
