"""The bytes of a shared segment, layout 1.0, and their decoding. docs/telemetry.md is authoritative.

Input is untrusted: whatever the bytes are, decoding ends in a value or in `BadSegment`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Final, TypeVar

from fastckpt_top.text import clean

MAGIC: Final = b"FCKTTOP\0"
MAJOR: Final = 1
ENDIAN_TAG: Final = 0x01020304
HEADER_SIZE: Final = 256
PROCESS_OFFSET: Final = 0x100
TABLES_OFFSET: Final = 0x200
"""No table begins before this offset."""
MAX_SIZE: Final = 1 << 20
"""The largest file that is read, bytes."""
HISTOGRAM_BUCKETS: Final = 16
HISTOGRAM_BASE_US: Final = 64
"""Upper bound of the first latency bucket in microseconds; each next one is twice as large, the last has none."""
NONE_U32: Final = 0xFFFFFFFF

FEATURE_HEARTBEAT: Final = 1
FLAG_DIRECT: Final = 1 << 0
FLAG_FALLBACK: Final = 1 << 1
FLAG_ASYNC: Final = 1 << 5
FLAG_MIXED: Final = 1 << 6
FLAG_NO_RING: Final = 1 << 7
FLAG_NO_DIRECT: Final = 1 << 8
FLAG_NO_WORKERS: Final = 1 << 9
FLAG_WHOLE: Final = 1 << 11
REFUSALS: Final = {
    FLAG_NO_RING: "io_uring",
    FLAG_NO_DIRECT: "direct I/O",
    FLAG_NO_WORKERS: "worker threads",
}
"""The refused features if `FLAG_FALLBACK` is set."""


class BadSegment(ValueError):  # noqa: N818  (it says what the input is, not what went wrong in here)
    """These bytes are not a segment that this version can read; the message gives the reason."""


class Kind(IntEnum):
    """The kind of an operation."""

    SAVE = 1
    LOAD = 2
    VERIFY = 3
    COPY = 4
    DRAIN = 5
    FETCH = 6


class Phase(IntEnum):
    """The phase of an operation."""

    PLAN = 1
    STAGE = 2
    WRITE = 3
    FSYNC = 4
    COMMIT = 5
    DONE = 6
    FAILED = 7
    READ = 8
    COPY = 9
    DRAIN = 10
    FETCH = 11


class ThreadState(IntEnum):
    """The current activity of a worker thread."""

    IDLE = 0
    SOURCE = 1
    IO = 2
    FSYNC = 3
    ERROR = 4
    LIMIT = 5
    PEERS = 6


KINDS: Final = {0: "unknown"} | {kind.value: kind.name.lower() for kind in Kind}
COPIES: Final = (Kind.COPY, Kind.DRAIN, Kind.FETCH)
"""Kinds that move checkpoints: without workers, and without a target."""
ENGINES: Final = {0: "unknown", 1: "uring", 2: "threads", 3: "buffered"}
RESULTS: Final = {0: "unknown", 1: "ok", 2: "failed"}
PHASES: Final = {0: "unknown"} | {p.value: p.name.lower() for p in Phase}
THREAD_STATES: Final = {s.value: s.name.lower() for s in ThreadState}
SIZES: Final = {"header": 256, "process": 256, "operation": 512, "thread": 256, "history": 256}
"""Bytes of an entry of each table."""

T = TypeVar("T")


def _at(offset: int, code: str) -> Any:
    """A field, at this offset in its entry, of a type of `struct`: "64s" is char[64], "16s" an id, "16Q" u64[16]."""
    default = "" if code.endswith("s") else (0,) * int(code[:-1]) if len(code) > 1 else 0
    return field(default=default, metadata={"offset": offset, "code": code})


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The publishing process, and the places of the tables, with the fields of docs/telemetry.md 5.1."""

    major: int = _at(0x08, "H")
    minor: int = _at(0x0A, "H")
    header_size: int = _at(0x0C, "I")
    total_size: int = _at(0x10, "I")
    endian_tag: int = _at(0x14, "I")
    features: int = _at(0x18, "Q")
    op_off: int = _at(0x20, "I")
    op_stride: int = _at(0x24, "I")
    op_count: int = _at(0x28, "I")
    thr_off: int = _at(0x2C, "I")
    thr_stride: int = _at(0x30, "I")
    thr_count: int = _at(0x34, "I")
    hist_off: int = _at(0x38, "I")
    hist_stride: int = _at(0x3C, "I")
    hist_count: int = _at(0x40, "I")
    generation: int = _at(0x44, "I")
    pid: int = _at(0x48, "I")
    uid: int = _at(0x4C, "I")
    start_ticks: int = _at(0x50, "Q")
    pid_ns: int = _at(0x58, "Q")
    mono0_ns: int = _at(0x60, "Q")
    real0_ns: int = _at(0x68, "Q")
    boot_id: str = _at(0x70, "16s")
    rank: int = _at(0x80, "i")
    local_rank: int = _at(0x84, "i")
    world: int = _at(0x88, "i")
    local_world: int = _at(0x8C, "i")
    gpu: int = _at(0x90, "i")
    numa: int = _at(0x94, "i")
    version: str = _at(0x98, "24s")
    job: str = _at(0xB0, "64s")
    launch: int = _at(0xF0, "Q")
    time_ns: int = _at(0xF8, "Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Totals of one process (docs/telemetry.md 5.2)."""

    heartbeat: int = _at(0x00, "Q")
    state: int = _at(0x08, "Q")
    bytes_written: int = _at(0x10, "Q")
    bytes_read: int = _at(0x18, "Q")
    saves_ok: int = _at(0x20, "Q")
    saves_failed: int = _at(0x28, "Q")
    loads_ok: int = _at(0x30, "Q")
    loads_failed: int = _at(0x38, "Q")
    hist_head: int = _at(0x40, "Q")
    threads_used: int = _at(0x48, "Q")
    verifies_ok: int = _at(0x50, "Q")
    verifies_failed: int = _at(0x58, "Q")
    target_save: int = _at(0x60, "Q")
    target_load: int = _at(0x68, "Q")
    ops_unslotted: int = _at(0x70, "Q")
    group: int = _at(0x78, "Q")
    group_rank: int = _at(0x80, "I")
    group_size: int = _at(0x84, "I")
    waits_for: int = _at(0x88, "Q")
    changed_step: int = _at(0x90, "q")
    changed: int = _at(0x98, "Q")
    warned: int = _at(0xA0, "Q")
    warning: str = _at(0xA8, "64s")
    bytes_copied: int = _at(0xE8, "Q")
    copies_ok: int = _at(0xF0, "Q")
    copies_failed: int = _at(0xF8, "Q")

    @property
    def shares(self) -> dict[str, float]:
        """For each group for which it is known, the share that has changed in the save of `changed_step`: 0 to 1."""
        found = {"model": self.changed & NONE_U32, "optimizer": self.changed >> 32}
        return {group: min((share - 1) / 1e6, 1.0) for group, share in found.items() if share}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One save, load or verify (docs/telemetry.md 5.3). Times in nanoseconds of the process's monotonic clock."""

    seq: int = _at(0x00, "Q")
    op_id: int = _at(0x08, "Q")
    kind: int = _at(0x10, "I")
    phase: int = _at(0x14, "I")
    engine: int = _at(0x18, "I")
    flags: int = _at(0x1C, "I")
    fallback_errno: int = _at(0x20, "I")
    threads: int = _at(0x24, "I")
    bytes_total: int = _at(0x28, "Q")
    bytes_durable: int = _at(0x30, "Q")
    files_total: int = _at(0x38, "I")
    files_done: int = _at(0x3C, "I")
    t_start_mono_ns: int = _at(0x40, "Q")
    t_phase_mono_ns: int = _at(0x48, "Q")
    t_end_mono_ns: int = _at(0x50, "Q")
    st_dev: int = _at(0x58, "Q")
    step: int = _at(0x60, "q")
    block_size: int = _at(0x68, "I")
    queue_depth: int = _at(0x6C, "I")
    target: int = _at(0x70, "Q")
    error: int = _at(0x78, "Q")
    label: str = _at(0x80, "64s")
    path: str = _at(0xC0, "296s")
    bytes_linked: int = _at(0x1E8, "Q")
    bytes_staged: int = _at(0x1F0, "Q")
    bytes_to_stage: int = _at(0x1F8, "Q")

    @property
    def refused(self) -> tuple[str, ...]:
        """The refused features, because of which the engine is not the wanted one (`REFUSALS`)."""
        return tuple(name for flag, name in REFUSALS.items() if self.flags & flag)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.t_end_mono_ns == 0 and self.phase not in (Phase.DONE, Phase.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One worker thread's slot (docs/telemetry.md 5.4)."""

    bytes_ever: int = _at(0x00, "Q")
    requests: int = _at(0x08, "Q")
    bytes_submitted: int = _at(0x10, "Q")
    busy_ns: int = _at(0x18, "Q")
    source_wait_ns: int = _at(0x20, "Q")
    last_progress_mono_ns: int = _at(0x28, "Q")
    in_flight: int = _at(0x30, "I")
    state: int = _at(0x34, "I")
    op_slot: int = _at(0x38, "I")
    errors: int = _at(0x3C, "I")
    latency_sum_ns: int = _at(0x40, "Q")
    latency_max_ns: int = _at(0x48, "Q")
    retries: int = _at(0x50, "I")
    shorts: int = _at(0x54, "I")
    fsync_wait_ms: int = _at(0x58, "I")
    peer_wait_ms: int = _at(0x5C, "I")
    tid: int = _at(0x60, "I")
    cpu: int = _at(0x64, "I")
    op_id: int = _at(0x68, "Q")
    file: int = _at(0x70, "I")
    limit_wait_ms: int = _at(0x74, "I")
    bytes_op: int = _at(0x78, "Q")
    latency_hist: tuple[int, ...] = _at(0x80, "16Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One ended operation (docs/telemetry.md 5.5)."""

    op_id: int = _at(0x00, "Q")
    kind: int = _at(0x08, "I")
    result: int = _at(0x0C, "I")
    engine: int = _at(0x10, "I")
    threads: int = _at(0x14, "I")
    bytes: int = _at(0x18, "Q")
    t_start_real_ns: int = _at(0x20, "Q")
    dur_ns: int = _at(0x28, "Q")
    sync_ns: int = _at(0x30, "Q")
    peak_bps: int = _at(0x38, "Q")
    p50_us: int = _at(0x40, "I")
    p99_us: int = _at(0x44, "I")
    step: int = _at(0x48, "q")
    error: int = _at(0x50, "Q")
    flags: int = _at(0x58, "I")
    fallback_errno: int = _at(0x5C, "I")
    label: str = _at(0x60, "64s")
    path: str = _at(0xA0, "96s")


@dataclass(frozen=True, slots=True)
class Segment:
    """A decoded segment. `threads` has the index of the slot before each thread."""

    header: Header
    process: Process
    operations: tuple[Operation, ...]
    threads: tuple[tuple[int, Thread], ...]
    history: tuple[History, ...]


def _check_prefix(data: bytes) -> None:
    """Judge the first bytes, which are the same in every version."""
    if len(data) < HEADER_SIZE:
        raise BadSegment(f"too short: {len(data)} bytes")
    magic, major, minor, _, _, tag = struct.unpack_from("<8sHHIII", data)
    if magic != MAGIC:
        raise BadSegment("not a segment: the magic number is missing")
    if tag != ENDIAN_TAG:
        raise BadSegment("written with another byte order")
    if major != MAJOR:
        raise BadSegment(
            f"segment layout {major}.{minor} needs {'a newer' if major > MAJOR else 'an older'} fastckpt-top"
        )


def decode_header(data: bytes, file_size: int) -> Header:
    """Decode and check the header.

    Args:
        data: The first 256 bytes of the file, or more.
        file_size: Size of the file in bytes, from fstat.

    Returns:
        A header whose tables are all inside the file.

    Raises:
        BadSegment: The header holds an impossible value, or needs a newer version of this program.
    """
    _check_prefix(data)
    header = read(Header, data)
    if file_size > MAX_SIZE:
        raise BadSegment(f"too large: {file_size} bytes")
    if header.generation == 0:
        raise BadSegment("not published: still being built")
    if header.header_size < HEADER_SIZE or header.total_size > file_size:
        raise BadSegment(f"invalid sizes: header {header.header_size}, total {header.total_size}, file {file_size}")
    for name, offset, stride, count, least in (
        ("operations", header.op_off, header.op_stride, header.op_count, SIZES["operation"]),
        ("threads", header.thr_off, header.thr_stride, header.thr_count, SIZES["thread"]),
        ("history", header.hist_off, header.hist_stride, header.hist_count, SIZES["history"]),
    ):
        if stride < least or stride % 8 or offset % 8 or offset < TABLES_OFFSET:
            raise BadSegment(f"table of {name}: offset {offset} or stride {stride} is invalid")
        if offset + stride * count > header.total_size:
            raise BadSegment(f"table of {name} reaches beyond the end: {offset} + {stride} x {count}")
    return header


def read(kind: type[T], data: bytes, offset: int = 0) -> T:
    """Decode one entry of a table.

    Args:
        kind: `Header`, `Process`, `Operation`, `Thread` or `History`.
        data: Bytes of a segment.
        offset: The start of the entry in them.

    Returns:
        Numbers, cleaned strings, tuples for arrays, hexadecimal digits for ids.

    Raises:
        BadSegment: `data` is too short.
    """
    shape, names, texts = _SHAPES[kind]
    if offset < 0 or offset + shape.size > len(data):
        raise BadSegment(f"cut short: {len(data)} bytes, {offset + shape.size} needed")
    values = list(shape.unpack_from(data, offset))
    for index, code in texts:
        raw: bytes = values[index]
        values[index] = raw.hex() if code == "16s" else clean(raw.split(b"\0", 1)[0].decode("utf-8", "replace"))
    last = len(names) - 1
    if len(values) > len(names):  # an array, which is always the last field
        values[last:] = [tuple(values[last:])]
    return kind(**dict(zip(names, values, strict=True)))


def decode(data: bytes) -> Segment:
    """Decode a whole segment from one copy of its bytes, for dumps and tests.

    Args:
        data: The file.

    Returns:
        All used slots and records. Slots that were being written at that moment are left out.

    Raises:
        BadSegment: The bytes are not a readable segment.
    """
    header = decode_header(data, len(data))
    process = read(Process, data, PROCESS_OFFSET)
    operations = [read(Operation, data, header.op_off + i * header.op_stride) for i in range(header.op_count)]
    threads = [(i, read(Thread, data, header.thr_off + i * header.thr_stride)) for i in range(header.thr_count)]
    history = [read(History, data, header.hist_off + i * header.hist_stride) for i in range(header.hist_count)]
    return Segment(
        header,
        process,
        tuple(op for op in operations if op.op_id and op.seq % 2 == 0),
        tuple((i, thread) for i, thread in threads if thread.op_id),
        tuple(sorted((record for record in history if record.op_id), key=lambda record: record.op_id)),
    )


def _shape(kind: Any, size: int) -> tuple[struct.Struct, tuple[str, ...], tuple[tuple[int, str], ...]]:
    """The `struct` of an entry, its fields, and the number and code of its text fields."""
    code, at = "<", 0
    places = [(one.metadata["offset"], one.metadata["code"]) for one in fields(kind)]
    for offset, own in places:
        code += f"{offset - at}x{own}"
        at = offset + struct.calcsize("<" + own)
    texts = tuple((index, own) for index, (_, own) in enumerate(places) if own.endswith("s"))
    return struct.Struct(f"{code}{size - at}x"), tuple(one.name for one in fields(kind)), texts


_KINDS: Final = (Header, Process, Operation, Thread, History)
_SHAPES: Final[dict[type, Any]] = {kind: _shape(kind, size) for kind, size in zip(_KINDS, SIZES.values(), strict=True)}
