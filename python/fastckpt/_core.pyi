"""The compiled core: thin, typed, without knowledge of tensors beyond name, dtype, shape and address."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypedDict, final, type_check_only

from fastckpt._tensors.described import Tensor

__all__ = [
    "DEBUG_BUILD",
    "MAX_DIMENSIONS",
    "MAX_TOKENS",
    "MOST_THREADS",
    "PLAN",
    "DamagedRange",
    "Gathering",
    "Incoming",
    "Leftover",
    "ListedCheckpoint",
    "LogicalType",
    "Mail",
    "Mappings",
    "Memory",
    "Operation",
    "Probe",
    "ProbedFiles",
    "ProbedRing",
    "RankBase",
    "RankLoad",
    "RankSave",
    "ReadRequest",
    "Reader",
    "Replicas",
    "SaveOptions",
    "Share",
    "SingleFile",
    "Snapshot",
    "Spread",
    "StoredShard",
    "StoredTensor",
    "__version__",
    "aggregation",
    "begin_copy",
    "check_target",
    "counters_refused",
    "crc64",
    "crc64_joined",
    "crowded",
    "leftovers",
    "list_checkpoints",
    "probe",
    "process_token",
    "reads_process",
    "remove",
    "remove_leftover",
    "save",
    "set_changed",
    "set_group",
    "set_target",
    "try_nice",
    "wait_for",
    "warn",
]

__version__: str
DEBUG_BUILD: bool
MAX_DIMENSIONS: int
"""The most dimensions of a tensor (docs/format.md, section 3.4)."""
MAX_TOKENS: int
"""The most tokens of a structure."""
MOST_THREADS: int
"""The most worker threads of an operation."""
PLAN: int
"""The version of the rules by which ranks share the work of a save or a load."""

@type_check_only
class Report(TypedDict):
    """The report of one operation. Times are seconds, sizes bytes."""

    bytes: int
    seconds: float
    phases: dict[str, float]
    threads: int
    engine: str
    fallback: str | None
    warnings: tuple[str, ...]
    thread_bytes: tuple[int, ...]
    blocks: dict[str, int]
    paths: dict[str, int]
    copied: int
    shards: int
    tensors: int

@type_check_only
class WrittenReport(Report):
    """The report of a save, and the files that it linked from its base."""

    linked_files: int
    linked_bytes: int

@type_check_only
class ExchangedReport(Report):
    """A report of one rank, and the bytes that it sent to other ranks and received from them."""

    sent: int
    received: int
    peers: int
    team: int
    grain: int

@type_check_only
class LoadedReport(Report):
    """A report of one rank, and the bytes that it read from storage, received from others and read for others."""

    storage: int
    peers: int
    sent: int
    pieces: bytes
    """Checksums of the parts that this rank read of blocks whose other parts other ranks read."""

@type_check_only
class Saved(TypedDict):
    """How the ranks of a save wrote: engine, reason for a fallback, worker threads, seconds."""

    engine: str
    fallback: str | None
    threads: int
    seconds: float

@type_check_only
class Verified(Report):
    """A report, and every damaged range."""

    damage: list[DamagedRange]

@final
class SaveOptions:
    """How a state is saved: see :func:`fastckpt.save_async`. ValueError for an invalid value.

    ``model_prefix`` is the prefix of the model's tensor names, empty if all of the state is the model. Names that begin
    with ``training_prefix`` are not the model's, unless it is empty. ``files`` are further files for the directory, by
    plain names that are not fastckpt's own. ``elapsed`` are the seconds since the program called, for the live
    counters. ``operation`` is the save that these options are for, if it has begun; ``step`` and ``elapsed`` are its
    own then. ``base`` is an earlier checkpoint, whose files with only unchanged tensors are linked; ``frozen`` records
    for each tensor whether it will not change, and is empty if that is unknown. ``kept`` are options that the manifest
    records, by name, in words. Ranks ignore ``base``: see :class:`RankBase`. ``staging`` is memory for the staging
    buffers; None for the core's own memory of at most ``most_staging`` bytes. It is in use until the operation ends, or
    for a rank until ``close``. If the storage does not answer for ``deadline``, DeadlineError is raised, and threads
    that wait for it continue to use their memory.
    """

    def __new__(
        cls,
        *,
        shard_size: int,
        model_prefix: str = "",
        training_prefix: str = "",
        overwrite: bool = True,
        files: Sequence[tuple[str, bytes]] = ...,
        base: str | None = None,
        frozen: Sequence[bool] = ...,
        kept: Sequence[tuple[str, str]] = ...,
        io: str = "auto",
        threads: int | None = None,
        bandwidth_limit: int | None = None,
        nice: int | None = None,
        step: int | None = None,
        elapsed: float = 0.0,
        operation: Operation | None = None,
        staging: Memory | None = None,
        most_staging: int | None = None,
        deadline: timedelta | None = None,
    ) -> SaveOptions: ...

def save(
    path: str,
    tensors: Sequence[Tensor],
    structure: str,
    metadata: str,
    options: SaveOptions,
    fill: Callable[[list[tuple[int, int, int, int]]], None] | None,
    tick: Callable[[int, int], None] | None,
    keep: object = None,
) -> WrittenReport:
    """Write a checkpoint, which is durable and visible when this returns.

    ``fill(ranges)`` copies the bytes of tensors without an address; worker threads call it. A range is a tuple
    ``(index, start, address, nbytes)``: the bytes ``[start, start + nbytes)`` of tensor number ``index`` go to
    ``address``. That memory belongs to ``fill`` until it returns. ValueError if the dtype and shape of a tensor do not
    match the size of its memory. The caller keeps the memory unchanged until the call returns, and alive; if the
    options have a ``deadline``, ``keep`` keeps it alive for as long as the save uses it. ``tick(done, total)`` is
    called about ten times a second on the calling thread, in bytes; an exception that it, ``fill`` or a signal handler
    raises stops the save, removes its files, and is raised.
    """

def check_target(path: str, overwrite: bool, deadline: timedelta | None = None) -> None:
    """Raise the error that a save to ``path`` would raise, as far as a check can show it; create nothing.

    Examples: the name is taken and must not be replaced, no directory can be made there, the storage does not answer.
    """

@final
class ListedCheckpoint:
    """A checkpoint in a directory; the docstring of the compiled class explains each attribute."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def created(self) -> float | None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def aside(self) -> bool: ...
    @property
    def damage(self) -> str | None: ...

def list_checkpoints(directory: str) -> list[ListedCheckpoint]:
    """The checkpoints in ``directory``, by name."""

def remove(path: str, more: Sequence[str], force: bool) -> None:
    """Remove a checkpoint, and other plain files in it: those named in ``more``, or all (``force``)."""

@final
class Leftover:
    """An entry under a temporary name in a directory of checkpoints.

    Attributes:
        name: the name of the directory.
        checkpoint: the name of the checkpoint that it belongs to.
        host: the machine it was made on; empty for an unfinished copy.
        state: ``alive``, ``dead``, ``unknown``, ``kept`` or ``foreign``.
        bytes: bytes of its files.
        changed: seconds since 1970 when something was last made, removed or renamed in it, or written to a file of it.
    """

    @property
    def name(self) -> str: ...
    @property
    def checkpoint(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def changed(self) -> int: ...

@final
class Incoming:
    """A file that :meth:`Gathering.begin` has made, not yet whole."""

@final
class Gathering:
    """The place beside ``target`` where the files of a copy of the checkpoint with this ``manifest`` are gathered.

    It is made, unless an earlier copy or another process has made it. The gathered files stay there until ``give_up``,
    even if this object is dropped. ValueError after ``close`` or ``give_up``, and for a name that no file may have.
    """

    def __new__(cls, target: str, manifest: bytes, overwrite: bool) -> Gathering: ...
    def path(self) -> str:
        """The directory in which the files are gathered."""
    def held(self) -> list[tuple[str, int]]:
        """The names and lengths of the complete files in it."""
    def begin(self, nbytes: int) -> Incoming:
        """Make a file of ``nbytes`` bytes, to be filled."""
    def write(self, file: Incoming, offset: int, address: int, nbytes: int) -> int:
        """Write ``nbytes`` bytes at ``address`` to ``offset`` and return their CRC-64. Threads may call it in parallel.

        Bytes that begin at a page in memory and in the file bypass the page cache.
        """
    def keep(self, file: Incoming, name: str) -> None:
        """Sync a complete file, and give it its name, replacing a file of that name."""
    def drop(self, file: Incoming) -> None:
        """Remove a file that is not whole."""
    def link(self, source: str, name: str, expected: tuple[int, int]) -> None:
        """Hard-link ``name`` in the directory ``source``, if it is the file ``(device, inode)``."""
    def publish(self, files: Sequence[tuple[str, int]]) -> list[str]:
        """Make a checkpoint from these files, by name and length, which is durable and visible when this returns.

        Returns:
            Warnings, in words.
        """
    def close(self) -> None:
        """Leave the gathered files for a later copy."""
    def give_up(self) -> None:
        """Remove the gathered files."""

@final
class SingleFile:
    """A file that will appear at ``path`` whole and durable. ValueError after ``publish`` or ``discard``.

    With ``direct``, writes bypass the page cache if the file system permits.
    """

    def __new__(cls, path: str, direct: bool) -> SingleFile: ...
    def is_direct(self) -> bool:
        """Whether writes bypass the page cache."""
    def reserve(self, start: int, end: int) -> None:
        """Allocate these bytes, so that threads can write them in parallel."""
    def write(self, offset: int, address: int, nbytes: int) -> int:
        """Like :meth:`Gathering.write`."""
    def publish(self, nbytes: int, crc: int) -> None:
        """Cut the file to ``nbytes`` bytes with this CRC-64, and give it its path. The CRC is stored, if possible."""
    def discard(self) -> None:
        """Remove the file."""

def leftovers(directory: str) -> list[Leftover]:
    """The entries of ``directory`` under temporary names."""

def remove_leftover(directory: str, name: str, force: bool) -> bool:
    """Remove a leftover if it is dead, or with ``force`` if it is unknown or kept. Return whether it was removed."""

def begin_copy(kind: str, path: str, step: int | None) -> Operation | None:
    """Show a copy to a checkpoint in the live counters: a ``copy``, ``drain`` or ``fetch``; None without the core."""

def set_target(target: str) -> tuple[int, int]:
    """Set the target of this process, and return its bytes per second per GPU of saves and of loads; 0 for none.

    ``ValueError`` for anything else.
    """

def set_group(group: int, rank: int, size: int) -> None:
    """Show in the monitor that this process is ``rank`` of ``size`` in the group with this number, which is not 0."""

def wait_for(rank: int | None) -> None:
    """Show in the monitor that this process waits for a rank of its group; None if it no longer waits."""

def counters_refused() -> str | None:
    """Why the monitor does not see this process, if the file system of its directory is the reason."""

def set_changed(step: int, model: float | None, optimizer: float | None) -> None:
    """Show in the monitor the shares of the model's and the optimizer's bytes that changed with the save of a step."""

def warn(text: str) -> None:
    """Show a warning of this process in the monitor: up to 64 bytes of UTF-8."""

@final
class ProbedRing:
    """Results of the calls of io_uring: an errno, or 0.

    ``refused`` is the reason if a save has no ring. ``enter`` and ``register`` are called without a ring: the kernel
    returns ``EBADF`` or ``EINVAL``, a seccomp filter returns something else.
    """

    refused: int
    setup: int
    enter: int
    register: int

@final
class ProbedFiles:
    """Features of a file system: 0 for one that works, None for one that was not tried, else an errno.

    ``direct_used`` is whether a save would try direct I/O; ``direct_alignment`` the alignments of memory and of offsets
    in bytes, None where the kernel does not report them; ``direct_bypasses`` whether direct writes leave the page cache
    alone, None if that cannot be observed; ``lock_reach`` which machines see a writer's lock: ``machine``,
    ``everywhere`` or ``unknown``.
    """

    direct_open: int | None
    direct_write: int | None
    direct_read: int | None
    direct_used: bool
    direct_alignment: tuple[int, int] | None
    direct_bypasses: bool | None
    cachestat: int | None
    uncached: int | None
    fallocate: int | None
    reflink: int | None
    rename_exchange: int | None
    lock: int | None
    lock_reach: str

@final
class Probe:
    """The steps that a save in a directory would take; made by :func:`fastckpt.tools.probe`.

    ``engine`` is the engine that would run, ``fallback`` why it is not the requested one, ``threads`` its workers,
    ``cores`` the cores that this process may use. ``huge_pages`` and ``populate`` are the results of ``madvise``, an
    errno or 0. ``staging`` is the most staging memory of an operation, ``counters`` the size of a process's live
    counters, both in bytes. ``counters_at`` are their possible directories, in order, each with the reason why it is
    not checked, or None. ``files`` lists what the file system supports, or is None, and then ``trouble`` is the step
    that failed and its errno.
    """

    engine: str
    fallback: str | None
    threads: int
    cores: int
    huge_pages: int
    populate: int
    staging: int
    counters: int
    counters_at: list[tuple[str, str | None]]
    ring: ProbedRing
    files: ProbedFiles | None
    trouble: tuple[str, int] | None

def crc64(address: int, nbytes: int, before: int | None = None) -> int:
    """The CRC-64/NVME of ``nbytes`` bytes at ``address``; with ``before``, preceded by bytes with that checksum.

    The caller keeps the memory alive, and nothing writes to it meanwhile. :mod:`fastckpt._crc64` accepts buffers.
    """

def process_token() -> tuple[int, bytes] | None:
    """The address of 16 random bytes that no other process has, and the bytes; None if the system has none."""

def reads_process(process: int, address: int, token: bytes) -> bool:
    """Whether the 16 bytes at an address of another process are these; OSError if this process may not read them."""

def crc64_joined(first: int, parts: Sequence[tuple[int, int]]) -> int:
    """The checksum of bytes with the checksum ``first``, followed by parts, given as checksum and length in bytes."""

def crowded(keys: Sequence[object], *, neighbours: int) -> bool:
    """Whether inserting ``keys``, in this order, would take more than 128 steps per key.

    A dict examines one place per step, and ``neighbours`` is 0; a set also examines the next 9. TypeError if a key
    cannot be hashed.
    """

def probe(directory: str, *, io: str) -> Probe:
    """Try the steps of a save in ``directory`` with this ``io``, and remove all traces.

    ``ValueError`` for an unknown engine.
    """

def try_nice(nice: int) -> None:
    """Whether a thread may have this niceness: ``OSError`` if not."""

@final
class Mappings:
    """Shards as private memory, unmapped with this object: writes to it never reach the files."""

    def address(self, shard: int, offset: int, nbytes: int) -> int:
        """The address of ``nbytes`` of a shard's file, ``offset`` bytes in; IndexError if they are not mapped."""

@final
class Memory:
    """Host memory for snapshots and staging buffers: huge pages, which look empty in a forked child."""

    def __new__(cls, nbytes: int) -> Memory: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_in_use(self) -> bool:
        """Whether it is closed, or a snapshot or an operation uses it, even an abandoned one."""
    def close(self) -> None:
        """Unmap it, unless a snapshot or an operation uses it: then close it again later."""

@final
class Operation:
    """An operation in the live counters that the core does not run: a save while its state is copied, a copy.

    The core takes over a save by its :class:`SaveOptions`, and ends it. From then on, and after ``end_copy`` and
    ``fail``, the methods do nothing.
    """

    def __new__(cls, path: str, nbytes: int, *, step: int | None = None, elapsed: float = 0.0) -> Operation:
        """Begin a save to ``path``, with tensors of ``nbytes`` bytes, ``elapsed`` seconds after the program called."""
    def staged(self, nbytes: int) -> None:
        """Report the number of bytes copied so far. One thread at a time calls this."""
    def plan(self) -> None:
        """Report that the copy is complete."""
    def copied(self, nbytes: int, total: int) -> None:
        """Report the bytes that a copy of a checkpoint has moved so far. One thread at a time calls this."""
    def end_copy(self, whole: bool) -> None:
        """Report that a copy of a checkpoint has ended, and whether the checkpoint at its target is whole."""
    def fail(self, errno: int | None = None) -> None:
        """Report that the copy failed, or that the save was abandoned."""

@final
class Snapshot:
    """A state to be copied into images of its files, and then written from there; or parts to be copied.

    Each method but the properties and ``stop`` raises RuntimeError while another runs, or out of order.
    """

    def __new__(
        cls,
        tensors: Sequence[Tensor],
        structure: str,
        metadata: str,
        options: SaveOptions,
        fill: Callable[[list[tuple[int, int, int, int]]], None] | None,
    ) -> Snapshot:
        """Lay out the files. Arguments are those of :func:`save`."""
    @staticmethod
    def of_parts(
        parts: Sequence[Tensor], joins: bytes, fill: Callable[[list[tuple[int, int, int, int]]], None] | None
    ) -> Snapshot:
        """Pack ``parts`` into memory, to be written by others from their ``places`` before ``close``.

        Only the address and the capacity of each are used. Parts begin at multiples of 64 bytes; two consecutive parts
        are packed without a gap if the byte of both in ``joins`` is not 0. ``fill`` is as for :func:`save`; the index
        of a range is the index in ``parts``.
        """
    @property
    def nbytes(self) -> int:
        """Bytes of memory that it needs."""
    @property
    def total(self) -> int:
        """Bytes of all tensors."""
    @property
    def staged(self) -> int:
        """Bytes copied so far."""
    def stop(self) -> None:
        """Make ``stage`` end soon, with KeyboardInterrupt."""
    def attach(self, memory: Memory) -> None:
        """Use this memory for the copies, until ``close``."""
    def places(self) -> list[tuple[int, int]]:
        """The place of each tensor or part in the attached memory: its address and its bytes."""
    def copied(self, nbytes: int) -> None:
        """Report that the caller has copied this many bytes of tensors to their places itself; these copies have ended.

        ValueError if fewer were missing.
        """
    def stage(self, wanted: bytes, *, last: bool, options: SaveOptions) -> None:
        """Copy the tensors whose byte in ``wanted`` is not 0, by several threads; after ``last``, release the sources.

        RuntimeError if, after ``last``, bytes are missing that neither this nor the caller has copied.
        """
    def save(self, path: str, options: SaveOptions, tick: Callable[[int, int], None] | None) -> WrittenReport:
        """Write the images, with this path, ``overwrite``, ``base`` and I/O; see :func:`save`. RuntimeError for parts.

        ``frozen`` was given when the files were laid out.
        """
    @property
    def is_left(self) -> bool:
        """Whether an abandoned save may still read it: its memory stays until nothing refers to this object."""
    def close(self) -> None:
        """Give the memory back, and release all other resources, unless it ``is_left``."""

@final
class LogicalType:
    """The logical dtype and shape of a tensor that is stored as bytes because safetensors cannot name its dtype."""

    def __new__(cls, dtype: str, shape: tuple[int, ...]) -> LogicalType: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

@final
class StoredTensor:
    """A tensor of a checkpoint: ``offset`` is the offset of its first byte in the file of shard number ``shard``."""

    def __new__(
        cls,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        shard: int,
        offset: int,
        nbytes: int,
        logical: LogicalType | None = None,
    ) -> StoredTensor: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """The name in safetensors."""
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def shard(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def logical(self) -> LogicalType | None: ...

@final
class StoredShard:
    """A file of a checkpoint.

    ``prefix`` is the beginning of its tensors' names that its header leaves out, ``crc`` the CRC-64/NVME of the whole
    file, 16 digits.
    """

    @property
    def file(self) -> str: ...
    @property
    def prefix(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def crc(self) -> str: ...

@final
class DamagedRange:
    """A damaged range of a file."""

    @property
    def file(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def tensor(self) -> str | None: ...
    @property
    def reason(self) -> str: ...

@final
class ReadRequest:
    """A tensor, or a box of it, and the destination of its bytes."""

    def __new__(
        cls,
        tensor: int,
        address: int,
        capacity: int,
        box: Sequence[tuple[int, int, int]] | None = None,
        strides: Sequence[int] | None = None,
    ) -> ReadRequest:
        """Request a tensor.

        Args:
            tensor: the number of the tensor.
            address: the lowest byte of writable host memory, or 0 if the ``drain`` of :meth:`Reader.read` receives the
                bytes.
            capacity: the writable bytes there, or those that ``drain`` can receive. It comes from the memory itself and
                never from a manifest.
            box: for each dimension of the logical shape the first index, one past the last, and the step, at least 1;
                None for the whole tensor.
            strides: for each dimension the distance in bytes between neighbours in memory, negative if they go
                backwards; None for row-major order without gaps. Rows must neither overlap nor interleave.
        """
    @property
    def tensor(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def box(self) -> list[tuple[int, int, int]] | None: ...
    @property
    def strides(self) -> list[int] | None: ...

@type_check_only
class Store(Protocol):
    """The files of a checkpoint in an object store. Worker threads call its methods, whose errors end the read.

    FileNotFoundError means that an object is missing, and a CheckpointError that the checkpoint is gone. Other errors
    are not about the checkpoint.
    """

    def manifest(self, most: int | None = None) -> bytes:
        """The manifest, or the first ``most`` bytes of it."""
    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it is missing."""
    def read(self, name: str, start: int, nbytes: int) -> tuple[int, int, object]:
        """``nbytes`` of a file, beginning at ``start``; fewer if the file ends earlier.

        Returns their address, their number, and an object that keeps them unchanged as long as it lives.
        """
    def path_of(self, name: str) -> str:
        """The name of a file in messages."""

@final
class Reader:
    """An open checkpoint, whose manifest has been read and checked."""

    def __new__(
        cls, path: str, *, keep: bool = False, manifest: bytes | None = None, files: Store | None = None
    ) -> Reader:
        """Open it. With ``keep``, shards stay open, and readable once replaced, if there are at most 64.

        ``manifest`` is the result of :meth:`manifest` of another process's reader: only the beginning of the file is
        read, and ReplacedCheckpointError is raised if it belongs to another manifest. ``files`` reads the objects of a
        store: then ``path`` is the URL, and nothing stays open.
        """
    def manifest(self) -> bytes:
        """The content of the manifest, read again."""
    def tensors(self) -> list[StoredTensor]:
        """All tensors, in the order of the state."""
    def checksum(self, tensor: int) -> int | None:
        """The CRC-64 of all bytes of a tensor: equal for equal bytes, wherever they are stored."""
    def shards(self) -> list[StoredShard]:
        """All shards."""
    def structure(self) -> str:
        """The structure, as JSON text."""
    def metadata(self) -> str:
        """The caller's metadata, as JSON text."""
    def per_rank(self) -> str | None:
        """The ``per_rank`` states, as JSON text; None if there are none."""
    def info(self) -> dict[str, Any]:
        """Format version, writer, created, saved, block_size."""
    def read(
        self,
        requests: Sequence[ReadRequest],
        *,
        verify: bool,
        io: str,
        threads: int | None,
        drain: Callable[[list[tuple[int, int, int, int]]], None] | None,
        tick: Callable[[int, int], None] | None,
        staging: Memory | None = None,
        most_staging: int | None = None,
    ) -> Report:
        """Read tensors and boxes of them.

        A request for more than the size of its memory is a ValueError before anything is read, and so is a box that is
        not in its tensor. For requests without an address, ``drain(ranges)`` receives their bytes; worker threads call
        it. A range is a tuple ``(index, start, address, nbytes)``: the bytes ``[start, start + nbytes)`` of request
        number ``index``, in row-major order, are at ``address``. That memory belongs to ``drain`` until it returns.
        ``staging`` is memory for the staging buffers; None for the core's own, at most ``most_staging`` bytes. With
        ``verify`` every extent that a request touches is read whole and compared with its checksum; without it only the
        requested ranges are read, and gaps of up to 256 KiB.
        """
    def save(self, path: str, tensors: Sequence[tuple[int, str]], structure: str, options: SaveOptions) -> Report:
        """Write a checkpoint with tensors of this one, by number and name, with the same metadata.

        The tensors are not held in memory, and are compared with their checksums on the way.
        """
    def map(self, tensors: Sequence[int]) -> Mappings:
        """Map the shards that hold ``tensors``, except empty ones. Nothing is read."""
    def check(
        self,
        mappings: Mappings,
        tensors: Sequence[int],
        *,
        threads: int | None,
        tick: Callable[[int, int], None] | None,
    ) -> Report:
        """Read every page of the mapped ``tensors``, and compare them with their checksums."""
    def verify(
        self,
        *,
        io: str,
        threads: int | None,
        tick: Callable[[int, int], None] | None,
        most_staging: int | None = None,
    ) -> Verified:
        """Compare every byte with its checksum; report all damage."""

@final
class Spread:
    """Which ranks have which boxes of a tensor. A rank has one part of it, or a part for each explicit box."""

    @staticmethod
    def all() -> Spread:
        """A spread with the whole tensor on every rank."""
    @staticmethod
    def ranks(ranks: Sequence[int]) -> Spread:
        """A spread with the whole tensor on each of these ranks."""
    @staticmethod
    def mesh(ranks: Sequence[int], mesh: Sequence[int], placements: Sequence[tuple[str, int, int]]) -> Spread:
        """Cut a tensor over a mesh of ranks, given in row-major order.

        ``placements`` has a placement for each dimension of the mesh: ``("replicate", 0, 0)``, ``("shard", dim, 0)`` or
        ``("strided", dim, factor)``. ValueError for any other placement.
        """
    @staticmethod
    def boxes(boxes: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> Spread:
        """Give ranks explicit boxes: a rank, and for each dimension the first index and one past the last."""

@final
class Share:
    """The ranges that each rank of a job writes or reads, and the bytes to send: the same on every rank."""

    @staticmethod
    def to_save(
        tensors: Sequence[tuple[str, str, Sequence[int], tuple[str, Sequence[int]] | None, Sequence[int]]],
        spreads: Sequence[Spread],
        ranks: int,
        options: SaveOptions,
        page: int = ...,
        grain: int = 0,
        team: int = 1,
    ) -> Share:
        """Lay out a save.

        Args:
            tensors: for each: name, stored dtype, stored global shape, logical dtype and global shape or None, and the
                indices of its spreads.
            spreads: the spreads.
            ranks: the number of ranks.
            options: of these, the model prefix, shard size and block size are used.
            page: bytes of the largest memory page of any rank's kernel: a rank writes whole pages of that size.
            grain: bytes at whose multiples writers change: a power of two, at least a page. 0 for a page.
            team: ranks that share the writing of their neighbouring pieces; 1 if each writes its own, 0 for as many as
                needed until the pieces add up to a grain.

        ValueError if a spread, a page or a grain does not fit. UnsupportedTypeError if the checkpoint would be too
        large.
        """
    @staticmethod
    def to_load(
        reader: Reader,
        wanted: Sequence[tuple[int, Sequence[int]]],
        spreads: Sequence[Spread],
        ranks: int,
        *,
        apart: bool = False,
        grain: int = 0,
        team: int = 1,
    ) -> Share:
        """Lay out a load of ``wanted``: for each tensor, its number in the checkpoint and the indices of its spreads.

        With ``apart``, ranks that want different long parts of a block read these parts themselves; the ``pieces`` that
        :meth:`RankLoad.read` reports of them must be collected for :meth:`compare`. ``grain`` and ``team`` are those of
        :meth:`to_save`: teams read whole blocks, and no rank reads a part of one.

        The tensors of the share are all tensors of the checkpoint, by their numbers there. IndexError for an unknown
        number.
        """
    def first(self, tensors: Sequence[int] | None) -> Share:
        """The same share of a save, with all bytes of these tensors, or of all, from the lowest rank that has them."""
    def replicated(self) -> int:
        """The number of tensors whose bytes several ranks hold."""
    def about(self, tensor: int) -> tuple[str, int, list[list[int]]]:
        """Name, bytes of an element (at least one), and the ranks of each spread of a tensor."""
    def digest(self) -> int:
        """A number that is equal on all ranks that made the same share."""
    def merge(self, pieces: Sequence[bytes]) -> bytes:
        """Combine the checksums of several ranks. ValueError if they overlap or belong nowhere."""
    def compare(self, reader: Reader, pieces: bytes) -> None:
        """Compare the checksums of extents that several ranks read in parts; CorruptCheckpointError if they differ.

        ValueError if a part is missing.
        """
    def ranges(self, rank: int) -> list[tuple[int, int, int]]:
        """The ranges that a rank writes: file, first byte, and the byte after the last; errors as in ``figures``."""
    def figures(self, rank: int, *, load: bool) -> dict[str, int]:
        """The duties of a rank. For a share made for a save, ``load`` gives the duties of a load ``apart``.

        They are: ``ranges`` of ``files`` and their ``bytes``, ``messages_sent``, ``bytes_sent``, ``messages_received``,
        ``bytes_received``, the ``peers`` that it exchanges them with, and the ranks of a ``team``. ValueError if no
        rank has some of the bytes to save.
        """

def aggregation(path: str, page: int) -> tuple[int, int]:
    """Grain and team of a save to ``path`` (:meth:`Share.to_save`), by its file system and the environment.

    ``FASTCKPT_AGGREGATE`` is ``auto``, ``off`` or the ranks of a team, ``FASTCKPT_GRAIN`` a number of bytes. ValueError
    for anything else.
    """

@final
class Mail:
    """The messages of one rank to and from others, in flight.

    Two threads move them, each for one direction in the order of its list: ``pack``, send, ``sent``; and ``admit``,
    receive, ``arrived``. Calls out of order are RuntimeErrors.
    """

    def outgoing(self) -> list[tuple[int, int]]:
        """The other rank and the bytes of each message to send, which end with their checksum."""
    def incoming(self) -> list[tuple[int, int]]:
        """The other rank and the bytes of each message to receive."""
    def travelling(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Number, rank and bytes of each message in both lists, except those that ranks read from memory."""
    def pack(self, message: int) -> int:
        """Wait until a message may be sent; return the address of its bytes."""
    def sent(self, message: int) -> None:
        """Report that a message was sent; frees its memory."""
    def admit(self, message: int) -> int:
        """Wait until there is memory for a message; return the address to receive it at."""
    def arrived(self, message: int) -> None:
        """Report that a message was received. The first use of its bytes compares it with its checksum."""
    def altered(self) -> tuple[int, str] | None:
        """The rank whose message was altered, and the error."""
    def lost(self) -> tuple[int, str] | None:
        """The rank whose memory could not be read, and why."""
    def stop(self, why: str) -> None:
        """End every wait, now and later, with a RuntimeError that names the reason."""

@final
class RankBase:
    """The part of an earlier checkpoint, its base, that the save of one rank reuses.

    The coordinator calls ``open``, ``compare``, ``take`` and ``share``. The others call ``know`` instead of ``open``,
    and ``follow`` instead of ``take``. Then pass the object to :class:`RankSave`. RuntimeError for calls out of order.
    """

    def __new__(
        cls,
        share: Share,
        rank: int,
        held: Sequence[tuple[int, int, int, int]],
        fill: Callable[[list[tuple[int, int, int, int]]], None] | None,
        options: SaveOptions,
        keep: object = None,
    ) -> RankBase:
        """Arguments as for :class:`RankSave`, with the same ``options``, including ``frozen``, and ``keep``.

        ``share`` is the share of a save without a base.
        """
    def open(self, path: str) -> bytes | None:
        """Open the base, and return its manifest for the others; None if it is unusable: then the save warns."""
    def know(self, path: str, manifest: bytes) -> None:
        """Accept the manifest of the base at ``path``, which the coordinator has opened."""
    def compare(self, tick: Callable[[int, int], None] | None) -> bytes:
        """Sum this rank's part of the base's tensors. ``fill`` and ``tick`` are called as by :func:`save`."""
    @staticmethod
    def merge(found: Sequence[bytes]) -> bytes:
        """Combine the findings of several ranks, in any order."""
    def take(self, path: str, found: bytes, tick: Callable[[int, int], None] | None) -> bytes:
        """Make the workspace for a save to ``path``, and link the unchanged files into it.

        Args:
            path: the checkpoint's directory.
            found: the merged findings of all ranks. A tensor counts as changed unless each byte was summed once.
            tick: as in :func:`save`.

        Returns:
            The answer that the others ``follow``.
        """
    def follow(self, told: bytes) -> None:
        """Record the files that the coordinator linked."""
    def share(self) -> Share:
        """The layout of the files that are not linked, for :class:`RankSave`; equal on all ranks."""
    def close(self) -> None:
        """Remove the workspace, unless a :class:`RankSave` has it. May be called again."""

@final
class Replicas:
    """The findings of a rank about cells of tensors that other ranks also hold: made by :meth:`RankSave.replicas`."""

    def digests(self) -> list[tuple[int, int, int]]:
        """For each set of ranks that hold the same cells: its number, its size, and the checksum of the cells here."""
    def of_holders(self, numbers: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Tensor, first byte, number and checksum of each cell that ranks with these numbers hold."""

@final
class RankSave:
    """The save of one rank: ``create`` or ``join``, ``allocate``, ``write``, ``commit`` by the coordinator, ``close``.

    Each method raises RuntimeError while another runs, or out of order. After any error but ValueError of ``check`` the
    save has ended, and the mail is stopped; the coordinator's workspace is removed with ``close`` at the latest.
    """

    def __new__(
        cls,
        share: Share,
        rank: int,
        held: Sequence[tuple[int, int, int, int]],
        fill: Callable[[list[tuple[int, int, int, int]]], None] | None,
        options: SaveOptions,
        base: RankBase | None = None,
        keep: object = None,
    ) -> RankSave:
        """Find out the duties of ``rank``.

        Args:
            share: made by :meth:`Share.to_save`.
            rank: the rank.
            held: tensor, part, address and bytes of the memory of each part, which is contiguous. The caller keeps it
                alive and unchanged until ``close`` has returned.
            fill: if the address is 0, ``fill(ranges)`` copies the bytes, as in :func:`save`; the index of a range is
                the index in ``held``. The threads of ``write`` and of the mail call it.
            options: I/O, ``overwrite``, ``files``, ``step`` and ``staging``.
            base: the object that made the share, if it has files of an earlier checkpoint: the files that it took over
                become a part of this save.
            keep: if the options have a ``deadline``, what keeps the memory alive for as long as the save uses it.

        ValueError if a part has other bytes than in the share, or is missing.
        """
    @property
    def mail(self) -> Mail: ...
    def addresses(self, mates: Sequence[int]) -> list[tuple[int, list[int], int]]:
        """For each of some ranks of this host: the rank, addresses for it, and the number of addresses to get from it.

        The addresses are those of the parts that it reads in this rank's memory; all are 0 if one part cannot be read.
        """
    def share(self, given: set[int], taken: Sequence[tuple[int, int, list[int]]]) -> int:
        """Send no messages for what ranks of this host read in each other's memory. Call it before the first message.

        Args:
            given: the ranks that read this rank's memory.
            taken: the ranks that this rank reads from: each with its process, and the addresses that it gave.

        Returns:
            The bytes that this rank reads.
        """
    def replicas(
        self,
        depth: str,
        seed: int,
        sum_of: Callable[[int, int], int | None] | None,
        tick: Callable[[int, int], None] | None,
    ) -> Replicas:
        """Sum the cells that this rank and others hold.

        Args:
            depth: ``sample``, ``full``, or ``first`` for the parts that are always compared.
            seed: the seed of the samples.
            sum_of: called with tensor and part, for a part without an address that is summed whole; returns the sum, or
                None if only the host can compute it, from bytes that ``fill`` copies.
            tick: called meanwhile.

        ValueError for any other depth.
        """
    def compared(self, replicas: Replicas, cell: tuple[int, int, int], most: int) -> bytes:
        """Up to ``most`` bytes of a cell, by tensor, first byte and number: the same ones at all ranks that hold it."""
    def check(self, structure: str, metadata: str, per_rank: str | None) -> None:
        """Raise UnsupportedTypeError for too large a manifest, ValueError for a text that is not an array of tokens."""
    def create(self, path: str) -> str:
        """For the coordinator: make the workspace, allocate its share of the files; return the workspace's name."""
    def join(self, path: str, name: str) -> None:
        """For the others: open the workspace; FileNotFoundError if this host does not see it."""
    def allocate(self, tick: Callable[[int, int], None] | None) -> None:
        """For the others: create their share of the files; FileNotFoundError if the workspace has been removed."""
    def write(self, tick: Callable[[int, int], None] | None) -> ExchangedReport:
        """Write this rank's ranges and make them durable; wait for the messages with bytes for them.

        ``sent`` are the bytes that other ranks need from this rank; they may still be on their way.
        """
    def pieces(self) -> bytes:
        """The checksums of the ranges that this rank wrote."""
    def commit(
        self,
        pieces: bytes,
        structure: str,
        metadata: str,
        per_rank: str | None,
        saved: Saved,
        tick: Callable[[int, int], None] | None,
    ) -> WrittenReport:
        """For the coordinator, when all have written: check that all bytes are there, and publish the checkpoint.

        Args:
            pieces: the checksums of all ranks, one after another, in any order. ValueError unless they cover each byte
                once.
            structure: the structure of the state, as JSON text.
            metadata: the caller's metadata, as JSON text.
            per_rank: the states that ranks saved for themselves, as JSON text.
            saved: how the ranks wrote, for the manifest; a report is accepted.
            tick: as in :func:`save`.
        """
    def close(self, *, committed: bool = False) -> None:
        """End the save; may be called at any time, by any thread, and again.

        It stops other threads and the mail, and waits for all that still read the memory of this rank. A workspace that
        was not committed is removed. ``committed`` is whether the coordinator has committed, for fastckpt-top.
        """

@final
class RankLoad:
    """The load of one rank: ``read``, while two threads move the messages of its ``mail``."""

    def __new__(
        cls,
        share: Share,
        rank: int,
        reader: Reader,
        requests: Sequence[tuple[int, int, int, int, Sequence[int] | None]],
        drain: Callable[[list[tuple[int, int, int, int]]], None] | None,
        *,
        verify: bool,
        io: str,
        threads: int | None,
        staging: Memory | None = None,
        most_staging: int | None = None,
    ) -> RankLoad:
        """Find out the duties of ``rank``.

        Args:
            share: made by :meth:`Share.to_load`.
            rank: the rank.
            reader: the checkpoint.
            requests: for each part of the rank: tensor, part, the address of the lowest byte of its memory, or 0 when
                ``drain`` takes its bytes, the number of bytes there, and for each dimension the distance in bytes
                between neighbours, or None for row-major order without gaps. The caller keeps the memory alive until
                ``read`` or ``close`` has returned, whichever is last.
            drain: where the address is 0, ``drain(ranges)`` takes the bytes of the parts, in row-major order, as in
                :meth:`Reader.read`; the index of a range is that in ``requests``. The threads of ``read`` call it.
            verify: compare every extent with its checksum, at the rank that reads it.
            io: the engine.
            threads: how many read, or None.
            staging: as in :meth:`Reader.read`.
            most_staging: as in :meth:`Reader.read`.

        ValueError if a part is missing, requested twice or too large for its memory.
        """
    @property
    def mail(self) -> Mail: ...
    def read(self, tick: Callable[[int, int], None] | None) -> LoadedReport:
        """Read this rank's share, and wait for the shares of the others; all parts are filled then.

        ``sent`` are the bytes that other ranks want from this rank; they may still be on their way. ``tick`` is called
        with the bytes read and received so far, and in all. Works once: RuntimeError the second time.
        """
    def close(self) -> None:
        """Stop the mail, and with it a ``read`` of another thread; forget the memory. May be called at any time."""
