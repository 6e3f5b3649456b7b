"""The bytes of a shared segment, layout 1.0, and their decoding. The authority is docs/telemetry.md.

Input is not trusted: whatever the bytes are, decoding ends in a value or in `BadSegment`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from fastckpt_top.text import clean

MAGIC: Final = b"FCKTTOP\0"
MAJOR: Final = 1
ENDIAN_TAG: Final = 0x01020304
HEADER_SIZE: Final = 256
PROCESS_OFFSET: Final = 0x100
TABLES_OFFSET: Final = 0x200
"""No table begins before this offset."""
MAX_SIZE: Final = 1 << 20
"""Largest file that is looked at, bytes."""
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
REFUSALS: Final = {
    FLAG_NO_RING: "io_uring",
    FLAG_NO_DIRECT: "direct I/O",
    FLAG_NO_WORKERS: "worker threads",
}
"""What was refused where `FLAG_FALLBACK` is set."""


class BadSegment(ValueError):  # noqa: N818  (it says what the input is, not what went wrong in here)
    """These bytes are not a segment that this version can read; the message says why."""


class Kind(IntEnum):
    """The kind of an operation."""

    SAVE = 1
    LOAD = 2
    VERIFY = 3


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


class ThreadState(IntEnum):
    """The current activity of a worker thread."""

    IDLE = 0
    SOURCE = 1
    IO = 2
    FSYNC = 3
    ERROR = 4
    LIMIT = 5
    PEERS = 6


KINDS: Final = {0: "unknown", Kind.SAVE: "save", Kind.LOAD: "load", Kind.VERIFY: "verify"}
ENGINES: Final = {0: "unknown", 1: "uring", 2: "threads", 3: "buffered"}
RESULTS: Final = {0: "unknown", 1: "ok", 2: "failed"}
PHASES: Final = {0: "unknown"} | {p.value: p.name.lower() for p in Phase}
THREAD_STATES: Final = {s.value: s.name.lower() for s in ThreadState}
PROCESS_STATES: Final = {0: "idle", 1: "active", 2: "exiting"}

# name, offset, struct code ("64s": char[64]; "16Q": u64[16])
_Fields = tuple[tuple[str, int, str], ...]
HEADER: Final[_Fields] = (
    ("magic", 0x00, "8s"),
    ("major", 0x08, "H"),
    ("minor", 0x0A, "H"),
    ("header_size", 0x0C, "I"),
    ("total_size", 0x10, "I"),
    ("endian_tag", 0x14, "I"),
    ("features", 0x18, "Q"),
    ("op_off", 0x20, "I"),
    ("op_stride", 0x24, "I"),
    ("op_count", 0x28, "I"),
    ("thr_off", 0x2C, "I"),
    ("thr_stride", 0x30, "I"),
    ("thr_count", 0x34, "I"),
    ("hist_off", 0x38, "I"),
    ("hist_stride", 0x3C, "I"),
    ("hist_count", 0x40, "I"),
    ("generation", 0x44, "I"),
    ("pid", 0x48, "I"),
    ("uid", 0x4C, "I"),
    ("start_ticks", 0x50, "Q"),
    ("pid_ns", 0x58, "Q"),
    ("mono0_ns", 0x60, "Q"),
    ("real0_ns", 0x68, "Q"),
    ("boot_id", 0x70, "16s"),
    ("rank", 0x80, "i"),
    ("local_rank", 0x84, "i"),
    ("world", 0x88, "i"),
    ("local_world", 0x8C, "i"),
    ("gpu", 0x90, "i"),
    ("numa", 0x94, "i"),
    ("version", 0x98, "24s"),
    ("job", 0xB0, "64s"),
    ("launch", 0xF0, "Q"),
    ("time_ns", 0xF8, "Q"),
)
PROCESS: Final[_Fields] = (
    ("heartbeat", 0x00, "Q"),
    ("state", 0x08, "Q"),
    ("bytes_written", 0x10, "Q"),
    ("bytes_read", 0x18, "Q"),
    ("saves_ok", 0x20, "Q"),
    ("saves_failed", 0x28, "Q"),
    ("loads_ok", 0x30, "Q"),
    ("loads_failed", 0x38, "Q"),
    ("hist_head", 0x40, "Q"),
    ("threads_used", 0x48, "Q"),
    ("verifies_ok", 0x50, "Q"),
    ("verifies_failed", 0x58, "Q"),
    ("target_save", 0x60, "Q"),
    ("target_load", 0x68, "Q"),
    ("ops_unslotted", 0x70, "Q"),
    ("group", 0x78, "Q"),
    ("group_rank", 0x80, "I"),
    ("group_size", 0x84, "I"),
    ("waits_for", 0x88, "Q"),
    ("changed_step", 0x90, "q"),
    ("changed", 0x98, "Q"),
    ("warned", 0xA0, "Q"),
    ("warning", 0xA8, "64s"),
)
OPERATION: Final[_Fields] = (
    ("seq", 0x00, "Q"),
    ("op_id", 0x08, "Q"),
    ("kind", 0x10, "I"),
    ("phase", 0x14, "I"),
    ("engine", 0x18, "I"),
    ("flags", 0x1C, "I"),
    ("fallback_errno", 0x20, "I"),
    ("threads", 0x24, "I"),
    ("bytes_total", 0x28, "Q"),
    ("bytes_durable", 0x30, "Q"),
    ("files_total", 0x38, "I"),
    ("files_done", 0x3C, "I"),
    ("t_start_mono_ns", 0x40, "Q"),
    ("t_phase_mono_ns", 0x48, "Q"),
    ("t_end_mono_ns", 0x50, "Q"),
    ("st_dev", 0x58, "Q"),
    ("step", 0x60, "q"),
    ("block_size", 0x68, "I"),
    ("queue_depth", 0x6C, "I"),
    ("target", 0x70, "Q"),
    ("error", 0x78, "Q"),
    ("label", 0x80, "64s"),
    ("path", 0xC0, "304s"),
    ("bytes_staged", 0x1F0, "Q"),
    ("bytes_to_stage", 0x1F8, "Q"),
)
THREAD: Final[_Fields] = (
    ("bytes_ever", 0x00, "Q"),
    ("requests", 0x08, "Q"),
    ("bytes_submitted", 0x10, "Q"),
    ("busy_ns", 0x18, "Q"),
    ("source_wait_ns", 0x20, "Q"),
    ("last_progress_mono_ns", 0x28, "Q"),
    ("in_flight", 0x30, "I"),
    ("state", 0x34, "I"),
    ("op_slot", 0x38, "I"),
    ("errors", 0x3C, "I"),
    ("latency_sum_ns", 0x40, "Q"),
    ("latency_max_ns", 0x48, "Q"),
    ("retries", 0x50, "I"),
    ("shorts", 0x54, "I"),
    ("fsync_wait_ms", 0x58, "I"),
    ("peer_wait_ms", 0x5C, "I"),
    ("tid", 0x60, "I"),
    ("cpu", 0x64, "I"),
    ("op_id", 0x68, "Q"),
    ("file", 0x70, "I"),
    ("limit_wait_ms", 0x74, "I"),
    ("bytes_op", 0x78, "Q"),
    ("latency_hist", 0x80, "16Q"),
)
HISTORY: Final[_Fields] = (
    ("op_id", 0x00, "Q"),
    ("kind", 0x08, "I"),
    ("result", 0x0C, "I"),
    ("engine", 0x10, "I"),
    ("threads", 0x14, "I"),
    ("bytes", 0x18, "Q"),
    ("t_start_real_ns", 0x20, "Q"),
    ("dur_ns", 0x28, "Q"),
    ("sync_ns", 0x30, "Q"),
    ("peak_bps", 0x38, "Q"),
    ("p50_us", 0x40, "I"),
    ("p99_us", 0x44, "I"),
    ("step", 0x48, "q"),
    ("error", 0x50, "Q"),
    ("flags", 0x58, "I"),
    ("fallback_errno", 0x5C, "I"),
    ("label", 0x60, "64s"),
    ("path", 0xA0, "96s"),
)
SIZES: Final = {"header": 256, "process": 256, "operation": 512, "thread": 256, "history": 256}
LAYOUT: Final = {"header": HEADER, "process": PROCESS, "operation": OPERATION, "thread": THREAD, "history": HISTORY}

_TYPES: Final = {"H": "u16", "I": "u32", "Q": "u64", "i": "i32", "q": "i64"}


def _compile(fields: _Fields, size: int) -> struct.Struct:
    parts = ["<"]
    at = 0
    for _, offset, code in fields:
        if offset > at:
            parts.append(f"{offset - at}x")
        parts.append(code)
        at = offset + struct.calcsize("<" + code)
    parts.append(f"{size - at}x")
    made = struct.Struct("".join(parts))
    assert made.size == size  # noqa: S101  (a statement about the tables above, checked once at import)
    return made


_HEADER, _PROCESS, _OPERATION, _THREAD, _HISTORY = (_compile(LAYOUT[name], size) for name, size in SIZES.items())
THREAD_SIZE: Final = SIZES["thread"]
OPERATION_SIZE: Final = SIZES["operation"]
HISTORY_SIZE: Final = SIZES["history"]


@dataclass(frozen=True, slots=True)
class Header:
    """The publishing process, and the places of the tables. Field by field as in docs/telemetry.md 5.1."""

    major: int
    minor: int
    header_size: int
    total_size: int
    endian_tag: int
    features: int
    op_off: int
    op_stride: int
    op_count: int
    thr_off: int
    thr_stride: int
    thr_count: int
    hist_off: int
    hist_stride: int
    hist_count: int
    generation: int
    pid: int
    uid: int
    start_ticks: int
    pid_ns: int
    mono0_ns: int
    real0_ns: int
    boot_id: str
    rank: int
    local_rank: int
    world: int
    local_world: int
    gpu: int
    numa: int
    version: str
    job: str
    launch: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Process:
    """Totals of one process (docs/telemetry.md 5.2)."""

    heartbeat: int = 0
    state: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    saves_ok: int = 0
    saves_failed: int = 0
    loads_ok: int = 0
    loads_failed: int = 0
    hist_head: int = 0
    threads_used: int = 0
    verifies_ok: int = 0
    verifies_failed: int = 0
    target_save: int = 0
    target_load: int = 0
    ops_unslotted: int = 0
    group: int = 0
    group_rank: int = 0
    group_size: int = 0
    waits_for: int = 0
    changed_step: int = 0
    changed: int = 0
    warned: int = 0
    warning: str = ""

    @property
    def shares(self) -> dict[str, float]:
        """The changes in the save of `changed_step`, of the groups for which they are known: 0 to 1."""
        found = {"model": self.changed & NONE_U32, "optimizer": self.changed >> 32}
        return {group: min((share - 1) / 1e6, 1.0) for group, share in found.items() if share}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One save, load or verify (docs/telemetry.md 5.3). Times in nanoseconds of the process's monotonic clock."""

    seq: int
    op_id: int
    kind: int
    phase: int
    engine: int
    flags: int
    fallback_errno: int
    threads: int
    bytes_total: int
    bytes_durable: int
    files_total: int
    files_done: int
    t_start_mono_ns: int
    t_phase_mono_ns: int
    t_end_mono_ns: int
    st_dev: int
    step: int
    block_size: int
    queue_depth: int
    target: int
    error: int
    label: str
    path: str
    bytes_staged: int = 0
    bytes_to_stage: int = 0

    @property
    def refused(self) -> tuple[str, ...]:
        """What was refused, so that another engine runs than the wanted one: see `REFUSALS`."""
        return tuple(name for flag, name in REFUSALS.items() if self.flags & flag)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.t_end_mono_ns == 0 and self.phase not in (Phase.DONE, Phase.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One worker thread's slot (docs/telemetry.md 5.4)."""

    bytes_ever: int
    requests: int
    bytes_submitted: int
    busy_ns: int
    source_wait_ns: int
    last_progress_mono_ns: int
    in_flight: int
    state: int
    op_slot: int
    errors: int
    latency_sum_ns: int
    latency_max_ns: int
    retries: int
    shorts: int
    fsync_wait_ms: int = 0
    peer_wait_ms: int = 0
    tid: int
    cpu: int
    op_id: int
    file: int
    limit_wait_ms: int
    bytes_op: int
    latency_hist: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class History:
    """One ended operation (docs/telemetry.md 5.5)."""

    op_id: int
    kind: int
    result: int
    engine: int
    threads: int
    bytes: int
    t_start_real_ns: int
    dur_ns: int
    sync_ns: int
    peak_bps: int
    p50_us: int
    p99_us: int
    step: int
    error: int
    flags: int
    fallback_errno: int
    label: str
    path: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A decoded segment. `threads` has the index of the slot before each thread."""

    header: Header
    process: Process
    operations: tuple[Operation, ...]
    threads: tuple[tuple[int, Thread], ...]
    history: tuple[History, ...]


def check_prefix(data: bytes) -> tuple[int, int]:
    """Judge the first 32 bytes, which are the same in every version.

    Args:
        data: The beginning of the file, at least 32 bytes.

    Returns:
        Major and minor version.

    Raises:
        BadSegment: It is not a segment, or one of another byte order.
    """
    if len(data) < HEADER_SIZE:
        raise BadSegment(f"too short: {len(data)} bytes")
    magic, major, minor, _, _, tag, _ = struct.unpack_from("<8sHHIIIQ", data)
    if magic != MAGIC:
        raise BadSegment("no segment: the magic number is missing")
    if tag != ENDIAN_TAG:
        raise BadSegment("written with another byte order")
    return major, minor


def decode_header(data: bytes, file_size: int) -> Header:
    """Decode and check the header.

    Args:
        data: The first 256 bytes of the file, or more.
        file_size: Size of the file in bytes, from fstat.

    Returns:
        A header whose tables are all inside the file.

    Raises:
        BadSegment: Something in it cannot be true, or needs a newer version of this program.
    """
    major, minor = check_prefix(data)
    if major != MAJOR:
        raise BadSegment(
            f"segment layout {major}.{minor} needs {'a newer' if major > MAJOR else 'an older'} fastckpt-top"
        )
    named = _named(HEADER, _HEADER, data, 0)
    del named["magic"]
    header = Header(**named)
    if file_size > MAX_SIZE:
        raise BadSegment(f"too large: {file_size} bytes")
    if header.generation == 0:
        raise BadSegment("not published: still being built")
    if header.header_size < HEADER_SIZE or header.total_size > file_size:
        raise BadSegment(f"sizes: header {header.header_size}, total {header.total_size}, file {file_size}")
    for name, offset, stride, count, least in (
        ("operations", header.op_off, header.op_stride, header.op_count, OPERATION_SIZE),
        ("threads", header.thr_off, header.thr_stride, header.thr_count, THREAD_SIZE),
        ("history", header.hist_off, header.hist_stride, header.hist_count, HISTORY_SIZE),
    ):
        if stride < least or stride % 8 or offset % 8 or offset < TABLES_OFFSET:
            raise BadSegment(f"table of {name}: offset {offset}, stride {stride}")
        if offset + stride * count > header.total_size:
            raise BadSegment(f"table of {name} reaches beyond the end: {offset} + {stride} x {count}")
    return header


def decode_process(data: bytes, offset: int = PROCESS_OFFSET) -> Process:
    """Decode the process block at `offset` of `data`.

    Raises:
        BadSegment: `data` is too short.
    """
    return Process(**_named(PROCESS, _PROCESS, data, offset))


def decode_operation(data: bytes, offset: int) -> Operation:
    """Decode the operation slot at `offset` of `data`.

    Raises:
        BadSegment: `data` is too short.
    """
    return Operation(**_named(OPERATION, _OPERATION, data, offset))


def decode_thread(data: bytes, offset: int) -> Thread:
    """Decode the thread slot at `offset` of `data`.

    Raises:
        BadSegment: `data` is too short.
    """
    return Thread(**_named(THREAD, _THREAD, data, offset))


def decode_history(data: bytes, offset: int) -> History:
    """Decode the history record at `offset` of `data`.

    Raises:
        BadSegment: `data` is too short.
    """
    return History(**_named(HISTORY, _HISTORY, data, offset))


def decode(data: bytes) -> Segment:
    """Decode a whole segment from one copy of its bytes, for dumps and tests.

    Args:
        data: The file.

    Returns:
        All used slots and records. Slots that were being written at that moment are left out.

    Raises:
        BadSegment: The bytes are not a segment that can be read.
    """
    header = decode_header(data, len(data))
    process = decode_process(data)
    operations = [decode_operation(data, header.op_off + i * header.op_stride) for i in range(header.op_count)]
    threads = [(i, decode_thread(data, header.thr_off + i * header.thr_stride)) for i in range(header.thr_count)]
    history = [decode_history(data, header.hist_off + i * header.hist_stride) for i in range(header.hist_count)]
    return Segment(
        header,
        process,
        tuple(op for op in operations if op.op_id and op.seq % 2 == 0),
        tuple((i, thread) for i, thread in threads if thread.op_id),
        tuple(sorted((record for record in history if record.op_id), key=lambda record: record.op_id)),
    )


def layout() -> dict[str, dict[str, dict[str, int | str]]]:
    """The layout as data, for comparison with the producer's and with the documentation.

    Returns:
        Table -> field -> `offset` in bytes (within the table's entry) and `type` as docs/telemetry.md writes it.
    """
    tables: dict[str, dict[str, dict[str, int | str]]] = {}
    for table, fields in LAYOUT.items():
        tables[table] = {name: {"offset": offset, "type": _type_name(name, code)} for name, offset, code in fields}
    return tables


def _type_name(name: str, code: str) -> str:
    if code.endswith("s"):
        return f"{'u8' if name in ('magic', 'boot_id') else 'char'}[{code[:-1]}]"
    return f"{_TYPES[code[-1]]}[{code[:-1]}]" if len(code) > 1 else _TYPES[code]


def _named(fields: _Fields, shape: struct.Struct, data: bytes, offset: int) -> dict[str, Any]:
    """Field -> value: numbers, cleaned strings, tuples for arrays, hexadecimal digits for ids."""
    if offset < 0 or offset + shape.size > len(data):
        raise BadSegment(f"cut short: {len(data)} bytes, {offset + shape.size} needed")
    values = shape.unpack_from(data, offset)
    named: dict[str, Any] = {}
    for index, (name, _, code) in enumerate(fields):
        if code.endswith("s"):
            raw: bytes = values[index]
            named[name] = raw.hex() if code == "16s" else clean(raw.split(b"\0", 1)[0].decode("utf-8", "replace"))
        elif len(code) > 1:  # an array, which is always the last field
            named[name] = tuple(values[index:])
        else:
            named[name] = values[index]
    return named
